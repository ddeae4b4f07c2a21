"""Targets: what they can do, the features that drafters read, and whether a pair fits."""
