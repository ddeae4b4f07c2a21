"""Measuring a pair: decoding side by side, reports as text, and plots."""
