"""Pairs: checking names and configurations of a target and its drafter, and loading both."""
