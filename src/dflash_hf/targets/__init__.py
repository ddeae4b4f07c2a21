"""Targets: the features that drafters read, a frozen forward for training, single answers, and hooks of other code."""
