"""
The hook into `target.generate(assistant_model=draft)`: three methods of `GenerationMixin` are wrapped.

The protocol: `generate` calls `draft.dflash_validate(target, mode, config, arguments)`, then
`draft.dflash_decode(target, *arguments)`, which returns the output. An assistant that is a `CandidateGenerator` drives
upstream's loop as it is; upstream itself would reject it. Everything else is unaffected: every other assistant and
generation mode, and upstream's own use of a drafter, which `speculation_type="dflash"` requests.

One process may hold several copies of this file, of the package and beside the weights of several drafters. The first
one that installs the hook serves all of them. So the hook recognises drafters and generators by their attributes, and
never by a class, of which each copy has its own.
"""

import functools
import os
import warnings
from collections.abc import Callable, Iterable

from transformers.generation import CandidateGenerator, GenerationMode


def check_mode(generation_mode, generation_config, assistant: str = "DFlash drafter") -> None:
    """
    Check that the arguments of `generate` request greedy decoding or sampling.

    Args:
        generation_mode (`GenerationMode`), generation_config (`GenerationConfig`): As `generate` has them.
        assistant (`str`): What the assistant is, for the message.

    Raises:
        `ValueError`: the arguments of `generate` ask for something that a drafter cannot speed up.
    """
    if generation_config.dola_layers is not None:
        raise ValueError(
            f"dola_layers={generation_config.dola_layers!r} cannot be combined with a drafter: drop it or "
            "`assistant_model`."
        )
    if generation_mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"assistant_model is a {assistant}, which decodes greedily or by sampling, but the arguments of "
            f"`generate` ask for {generation_mode.value}: drop `assistant_model`, or `num_beams` and the like."
        )


def wrap_generation() -> None:
    """Wrap methods of `GenerationMixin`. Wrapping twice is a no-op; [`unwrap_generation`] undoes it."""
    for name in wrap_methods(_WRAPPERS):  # the drafter can still be loaded, trained and converted
        warnings.warn(f"transformers has no GenerationMixin.{name}: `generate` cannot draft.", stacklevel=2)


def unwrap_generation() -> None:
    """Put upstream's methods back."""
    unwrap_methods(_WRAPPERS)


def wrap_methods(wrappers: dict[str, Callable]) -> list[str]:
    """
    Wrap methods of `GenerationMixin`, unless they are wrapped already.

    Args:
        wrappers (`dict`): Method name -> function that takes the original method and returns its replacement.

    Returns:
        The names that this version of transformers does not have.
    """
    # Not at the top of this file: the package calls this function while transformers is importing this class.
    from transformers import GenerationMixin

    missing = []
    for name, wrap in wrappers.items():
        method = getattr(GenerationMixin, name, None)
        if method is None:
            missing.append(name)
        elif not hasattr(method, "_dflash_original"):
            wrapper = wrap(method)
            wrapper._dflash_original = method
            setattr(GenerationMixin, name, wrapper)
    return missing


def unwrap_methods(names: Iterable[str]) -> None:
    """Undo [`wrap_methods`]."""
    from transformers import GenerationMixin

    for name in names:
        method = getattr(GenerationMixin, name, None)
        if hasattr(method, "_dflash_original"):
            setattr(GenerationMixin, name, method._dflash_original)


def drafter_of(assistant_model):
    """
    The assistant, without wrappers of `torch.compile`, PEFT and distributed training, if it implements the protocol;
    `None` if it is not a drafter.

    Raises:
        `ValueError`: a model that other code has built from a drafter's folder.
        `TypeError`: a name; `generate` takes a model.
    """
    if isinstance(assistant_model, str | os.PathLike):
        raise TypeError(
            f"assistant_model={str(assistant_model)!r} is a name; `generate` takes a model, so load the drafter: "
            f"`AutoModel.from_pretrained({str(assistant_model)!r})`."
        )
    wrapped = _unwrap_once(assistant_model)
    while wrapped is not None:
        assistant_model = wrapped
        wrapped = _unwrap_once(assistant_model)
    if assistant_model is None or callable(getattr(type(assistant_model), "dflash_decode", None)):
        return assistant_model
    config = getattr(assistant_model, "config", None)
    if getattr(config, "dflash_config", None) is not None:
        raise ValueError(
            f"assistant_model is a {type(assistant_model).__name__} that other code built from a DFlash drafter's "
            "folder: load it with `AutoModel.from_pretrained(folder)` after `import dflash_hf`."
        )
    return None


def _unwrap_once(model):
    """The model inside a wrapper; `None` if `model` is not a wrapper."""
    if callable(getattr(type(model), "get_base_model", None)):  # PEFT; the adapters stay, inside the base model
        return model.get_base_model()
    modules = getattr(model, "_modules", {})
    return modules.get("_orig_mod", modules.get("module"))  # `_orig_mod`: `torch.compile`; `module`: DDP


def _drafter_of_call(generation_config, assistant_model):
    """
    The drafter that decodes a call; `None` if transformers decodes it, as `speculation_type="dflash"` requests.
    """
    if assistant_model is None or isinstance(assistant_model, CandidateGenerator):
        return None
    if getattr(generation_config, "speculation_type", None) == "dflash":
        return None
    return drafter_of(assistant_model)


def _wrap_validation(original):
    @functools.wraps(original)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        assistant = generation_mode_kwargs.get("assistant_model")
        if isinstance(assistant, CandidateGenerator):
            return check_mode(generation_mode, generation_config, type(assistant).__name__)
        draft = _drafter_of_call(generation_config, assistant)
        if draft is not None:
            return draft.dflash_validate(self, generation_mode, generation_config, generation_mode_kwargs)
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def _wrap_decoding(original):
    @functools.wraps(original)
    def _assisted_decoding(self, *args, **kwargs):
        draft = _drafter_of_call(kwargs.get("generation_config"), kwargs.get("assistant_model"))
        if draft is not None:
            kwargs.pop("assistant_model")
            return draft.dflash_decode(self, *args, **kwargs)
        generator = kwargs.get("assistant_model")  # a candidate generator also arrives as the assistant
        reads_features = callable(getattr(type(generator), "reading_features", None))
        if reads_features and not generator.is_reading:
            with generator.reading_features():
                return original(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return _assisted_decoding


def _wrap_candidates(original):
    """Let `assistant_model` be a candidate generator, which upstream's loop then uses as it is."""

    @functools.wraps(original)
    def _get_candidate_generator(self, *args, assistant_model=None, **kwargs):
        if isinstance(assistant_model, CandidateGenerator):
            return assistant_model
        return original(self, *args, assistant_model=assistant_model, **kwargs)

    return _get_candidate_generator


_WRAPPERS = {
    "_validate_generation_mode": _wrap_validation,
    "_assisted_decoding": _wrap_decoding,
    "_get_candidate_generator": _wrap_candidates,
}
