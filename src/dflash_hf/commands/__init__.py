"""
What each command takes: arguments, help and examples. A file is read when its command is asked for, and imports what
it runs inside `run`, so that no `--help` waits for torch.
"""
