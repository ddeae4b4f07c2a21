"""Attentions and hidden states, compared."""

import torch


def assert_alike(output, expected, tolerance, names=("hidden_states", "attentions")):
    """The same structure, shapes and values; nothing where nothing was asked for."""
    for name in names:
        tokens = getattr(output, name), getattr(expected, name)
        assert (tokens[0] is None) == (tokens[1] is None), name
        for layers in zip(*(listed or () for listed in tokens), strict=True):
            for ours, theirs in zip(*layers, strict=True):
                assert ours.dtype == theirs.dtype and not ours.is_inference()
                torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance, equal_nan=True)
