"""Prompts and answers, from files, the Hub or the target itself, as ids with a loss mask."""
