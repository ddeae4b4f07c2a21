"""Hooks and replaced forwards of other code on a target, which would see or change drafted tokens."""

from collections.abc import Callable

from dflash_hf.modeling.target_dflash import FEATURE_HOOK_MARK


# Libraries whose hooks and replaced forwards only place, shard or adapt a model.
_HARMLESS_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "kernels", "dflash_hf")
# Drafters saved by 0.1 and 0.2 bring hooks without the mark of `feature_hook`, in this file beside their weights.
_UNMARKED_FEATURE_FILE = "target_dflash"


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
                return f"a hook of {_defining_module(hook)} on a {type(module).__name__} would see drafted tokens"
    return None


def collects_features(hook: Callable) -> bool:
    """
    Whether a hook only collects features, for a drafter of any version of this package: it is marked by
    [`feature_hook`], which may be the decorator of a file beside a drafter's weights.
    """
    if getattr(_unwrapped(hook), FEATURE_HOOK_MARK, False):
        return True
    names = _defining_module(hook).split(".")
    return names[0] == "transformers_modules" and names[-1] == _UNMARKED_FEATURE_FILE


def _is_harmless(function: Callable) -> bool:
    """Whether a hook or forward only places, shards, adapts or collects features."""
    if getattr(function, "keywords", {}).get("alora_offsets"):  # PEFT's activated LoRA counts tokens
        return False
    library = _defining_module(function).partition(".")[0]
    return library in _HARMLESS_LIBRARIES or collects_features(function)


def _unwrapped(function: Callable) -> Callable:
    """The function in a `functools.partial`."""
    return getattr(function, "func", function)


def _defining_module(function: Callable) -> str:
    """Name of the module whose code a function, method or partial runs."""
    function = _unwrapped(function)
    return getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
