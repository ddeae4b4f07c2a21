"""Hooks and replaced forwards of other code on a target, which would see or change drafted tokens."""

# Libraries whose hooks and replaced forwards only place, shard or adapt a model.
_HARMLESS = ("torch", "transformers", "accelerate", "peft", "kernels", "dflash_hf")
# Files whose hooks collect features: this package's, and the one that drafters saved by 0.1 and 0.2 bring along.
_FEATURE_FILES = ("targets.features", "candidates_dflash", "target_dflash")


def unsafe_hook(target) -> str | None:
    """Why other code may see or change drafted tokens, or `None`: hooks, compiled or replaced forwards."""
    for module in target.modules():
        replaced = vars(module).get("forward")
        if module._compiled_call_impl is not None or hasattr(replaced, "_torchdynamo_orig_callable"):
            return f"{type(module).__name__} is compiled; pass the model as it was before"
        if replaced is not None and not _is_harmless(replaced):
            return f"the forward of a {type(module).__name__} is replaced"
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not _is_harmless(hook):
                return f"a hook of {_home(hook)} on a {type(module).__name__} would see drafted tokens"
    return None


def collects_features(hook) -> bool:
    """Whether a hook is one of a `FeatureTap`, of whichever version of this package."""
    return _home(hook).endswith(_FEATURE_FILES)


def _is_harmless(function) -> bool:
    """Whether a hook or forward only places, shards or adapts, by its library; an activated LoRA counts tokens."""
    library = _home(function).partition(".")[0]
    harmless = collects_features(function) or library in _HARMLESS
    return harmless and not getattr(function, "keywords", {}).get("alora_offsets")


def _home(function) -> str:
    """The module in which the code of a function, method or partial stands."""
    function = getattr(function, "func", function)
    return getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
