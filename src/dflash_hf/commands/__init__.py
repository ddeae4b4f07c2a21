"""
The commands, one module each, with `add_arguments(parser)` and `run(arguments, echo)`. A module is imported only when
its command is used, and imports the library inside `run`, so that `--help` does not import torch.
"""
