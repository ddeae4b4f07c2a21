"""Weights that are not numbers are found before anybody serves them."""

import pytest
import torch
from support.pairs import make_draft

from dflash_hf.weights import check_finite_weights


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinite_weights_are_named(shard_size, dtype, target, tmp_path):
    """`check` said "ready to be served" of a drafter whose 14 tensors were NaN, and `publish` passed it."""
    draft = make_draft(target, own_mask_embedding=False).to(dtype)
    draft.save_pretrained(tmp_path / "good", max_shard_size=shard_size)
    check_finite_weights(tmp_path / "good")
    with torch.no_grad():
        draft.fc.weight[1, 2], draft.norm.weight[0] = float("nan"), float("-inf")
    draft.save_pretrained(tmp_path / "bad", max_shard_size=shard_size)
    for name in ("fc.weight", "norm.weight"):
        with pytest.raises(ValueError, match=rf"bad: 1 of \S+ weights are not finite .* in {name}: it cannot"):
            check_finite_weights(tmp_path / "bad")
        draft.fc.weight.data.zero_()
        draft.save_pretrained(tmp_path / "bad", max_shard_size=shard_size)


def test_missing_weights_are_an_error(tmp_path):
    with pytest.raises(OSError):
        check_finite_weights(tmp_path)
