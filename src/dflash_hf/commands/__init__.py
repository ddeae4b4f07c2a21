"""
The commands, one file each: `add_arguments(parser)` and `run(arguments, echo)`. A file is imported when its command is
used, and imports the library inside `run`, so that `--help` does not wait for torch.
"""
