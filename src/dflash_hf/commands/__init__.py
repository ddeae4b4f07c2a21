"""
The commands, one module each. A module is imported only when its command is used, and imports the library inside
`run`, so that `--help` does not import torch.

Its docstring ends with the examples of the command's help. It has

- `add_arguments(parser)`: adds its options.
- `run(arguments, echo) -> Outcome`: does the work. `echo(line)` prints results to standard output, `echo.note(line)`
  messages to standard error. It fails by raising: a `UsageError` before anything was started, else any error.

and may have

- `RESUME_HINT`: how to go on after an interruption, for its help and its errors.
- `add_more_arguments(parser)`: options that its help does not list, since torch must be imported for them.
- `translate(words, parser) -> list[str]`: the words of its command line as argparse can read them.
- `remedy(unknown, words, parser) -> str`: what to write instead of unknown options.

`cli.py` calls them in this order: `add_arguments`, `add_more_arguments`, `translate`, `run`.

Besides its options, the arguments of every command have

- `command`: its name.
- `target_name`: the name of a target in a package, such as `smollm2`, if `target` is its folder, which means nothing
  to a reader; else `None`. `cli.py` sets it for `--target NAME`, and `pair.take_default` if no pair is named.
"""
