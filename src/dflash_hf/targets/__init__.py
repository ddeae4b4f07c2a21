"""Targets: their features, a frozen forward for training, logits, digests, single answers, and hooks of other code."""
