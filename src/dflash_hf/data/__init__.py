"""Prompts and answers: from files, the Hub and the target itself to ids with a loss mask."""
