"""Hooks on a target: which of them may run while drafted tokens are verified."""

import functools

import pytest
import torch
from support.pairs import make_draft, make_target

from dflash_hf import DFlashCandidateGenerator
from dflash_hf.targets.features import FeatureTap
from dflash_hf.targets.unsafe_hooks import collects_features, unsafe_hook


def hook_of_module(name: str):
    """A hook that a module of this name defines."""
    namespace = {"__name__": name}
    exec("def hook(*arguments, **keywords): ...", namespace)
    return namespace["hook"]


@pytest.fixture
def target():
    return make_target()


@pytest.mark.parametrize("wrap", [lambda hook: hook, functools.partial], ids=["function", "partial"])
@pytest.mark.parametrize(
    "module",
    [
        "my.targets.features",
        "my_candidates_dflash",
        "my.target_dflash",
        "transformers_modules.a.my_target_dflash",
    ],
)
def test_hook_with_a_similar_name_is_unsafe(module, wrap, target):
    """They were recognised by the end of their module's name."""
    hook = wrap(hook_of_module(module))
    target.model.layers[0].register_forward_hook(hook)
    assert not collects_features(hook)
    assert unsafe_hook(target) == f"a hook of {module} on a Qwen3DecoderLayer would see drafted tokens"


def test_feature_hooks_of_every_version_are_safe(target):
    draft = make_draft(target, target_layer_ids=[-1, 0, 2])
    generator = DFlashCandidateGenerator(draft, target, max_length=20)
    saved_by_0_2 = functools.partial(hook_of_module("transformers_modules.folder.revision.target_dflash"), 3)
    handle = target.model.layers[3].register_forward_hook(saved_by_0_2)
    with torch.no_grad(), FeatureTap(target, [-1, 0, 2]), generator.reading_features():
        hooks = []
        for module in target.modules():
            hooks += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        assert len(hooks) >= 7
        assert all(collects_features(hook) for hook in hooks)
        assert unsafe_hook(target) is None
    handle.remove()
