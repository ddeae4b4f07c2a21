"""A seed for one answer changes no random number outside of it, on any device."""

import pytest
import torch

from dflash_hf.targets.generation import forked_rng


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
def test_generator_of_the_device_is_restored(device, monkeypatch):
    """On devices other than CUDA's, a request with a seed also decided what later requests drew."""
    states = {"device": 1}
    module = torch.get_device_module(device)
    on_device = () if device == "mps" else (torch.device(device),)  # functions of `torch.mps` have no such argument

    def get_rng_state(*devices):
        assert devices == on_device
        return states["device"]

    def set_rng_state(state, *devices):
        assert devices == on_device
        states["device"] = state

    monkeypatch.setattr(module, "get_rng_state", get_rng_state)
    monkeypatch.setattr(module, "set_rng_state", set_rng_state)
    before = torch.get_rng_state()
    with forked_rng(torch.device(device)):
        states["device"] = 2
        torch.manual_seed(3)
    assert states["device"] == 1 and torch.equal(torch.get_rng_state(), before)
    with forked_rng(torch.device(device), enabled=False):
        states["device"] = 2
    assert states["device"] == 2
