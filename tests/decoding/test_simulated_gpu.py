"""The simulated GPU follows the policy as it is today."""

import pytest
import simulated_gpu
from simulated_gpu import GPUS, Costs, Simulated, decode

from dflash_hf.decoding.adaptive import DraftStatistics


@pytest.mark.parametrize("rows", [1, 6])  # prompt lookup is for few rows
def test_policy_decodes_on_a_simulated_gpu(rows, monkeypatch):
    monkeypatch.setattr(simulated_gpu, "NEW", 40)
    costs = Costs(*GPUS["H200"], {"alone": 1760, "nothing": 1800, "block": 2100, "tree": 2400}, launch=1e-6)
    blocks = decode(costs, rows, 0.9, 0.5)
    chosen = decode(costs, rows, 0.9, 0.5, Simulated(costs, rows, DraftStatistics()))
    assert set(blocks["sizes"]) == {simulated_gpu.BLOCK - 1}
    assert max(chosen["sizes"]) <= 63 and chosen["plain"] < len(chosen["sizes"])
    for result in (blocks, chosen):
        assert result["tau"] > 2
        assert 0 < result["seconds"] < 40 * costs.round(rows, -1)
