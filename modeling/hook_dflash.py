"""
The hook into `generate`: an assistant with `dflash_decode` decodes with its own loop; every other assistant, target
and generation mode is unaffected.
"""

import functools
import os
import warnings


ASKED = "num_assistant_tokens"


def drafter_of(assistant_model):
    """
    The assistant itself if it implements the DFlash protocol, `None` if it is not a drafter. Wrappers of
    `torch.compile`, PEFT and distributed training are taken off.

    Raises:
        `ValueError`: a model that other code has built from a drafter's folder.
        `TypeError`: a name; `generate` takes a model.
    """
    if isinstance(assistant_model, str | os.PathLike):
        raise TypeError(
            f"assistant_model={str(assistant_model)!r} is a name; `generate` takes a model, so load the drafter: "
            f"`AutoModel.from_pretrained({str(assistant_model)!r})`."
        )
    while (wrapped := _wrapped_by(assistant_model)) is not None:
        assistant_model = wrapped
    if assistant_model is None or callable(getattr(type(assistant_model), "dflash_decode", None)):
        return assistant_model
    config = getattr(assistant_model, "config", None)
    if getattr(config, "dflash_config", None) is not None:
        raise ValueError(
            f"assistant_model is a {type(assistant_model).__name__} that other code built from a DFlash drafter's "
            "folder: load it with `AutoModel.from_pretrained(folder)` after `import dflash_hf`."
        )
    return None


def _wrapped_by(model):
    """The model inside a wrapper; `None` if it is not a wrapper."""
    if callable(getattr(type(model), "get_base_model", None)):  # PEFT, whose adapters are inside the model
        return model.get_base_model()
    inside = getattr(model, "_modules", {})
    return inside.get("_orig_mod", inside.get("module"))


def install_hook() -> None:
    """Wrap three methods of `GenerationMixin`. Installing twice is a no-op; `remove_hook` undoes it."""
    # Not imported at the top of this file: the package calls this function as soon as that import is done.
    from transformers import GenerationMixin

    for name, wrap in _WRAPPERS.items():
        method = getattr(GenerationMixin, name, None)
        if method is None:  # the drafter can still be loaded, trained and converted
            warnings.warn(f"transformers has no GenerationMixin.{name}: `generate` cannot draft.", stacklevel=2)
        elif not hasattr(method, "_dflash_original"):
            wrapper = wrap(method)
            wrapper._dflash_original = method
            setattr(GenerationMixin, name, wrapper)


def remove_hook() -> None:
    """Put upstream's methods back."""
    from transformers import GenerationMixin

    for name in _WRAPPERS:
        method = getattr(GenerationMixin, name, None)
        if hasattr(method, "_dflash_original"):
            setattr(GenerationMixin, name, method._dflash_original)


def _drafter_for(generation_config, assistant_model):
    """The drafter that decodes; `None` for upstream's own path, which is left alone if requested by name."""
    if assistant_model is None or getattr(generation_config, "speculation_type", None) == "dflash":
        return None
    return drafter_of(assistant_model)


def _wrap_prepare(original):
    """Note the number of drafted tokens that is asked for: later it cannot be told from upstream's default."""

    @functools.wraps(original)
    def _prepare_generation_config(self, generation_config, *args, **kwargs):
        prepared = original(self, generation_config, *args, **kwargs)
        settings = (generation_config, self.generation_config)
        asked = [kwargs.get(ASKED), *(getattr(config, ASKED, None) for config in settings)]
        setattr(prepared[0], f"_dflash_{ASKED}", next((number for number in asked if number is not None), None))
        return prepared

    return _prepare_generation_config


def _wrap_validate(original):
    @functools.wraps(original)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        assistant = _drafter_for(generation_config, generation_mode_kwargs.get("assistant_model"))
        if assistant is not None:
            return assistant.dflash_validate(self, generation_mode, generation_config, generation_mode_kwargs)
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def _wrap_decode(original):
    @functools.wraps(original)
    def _assisted_decoding(self, *args, **kwargs):
        assistant = _drafter_for(kwargs.get("generation_config"), kwargs.get("assistant_model"))
        if assistant is not None:
            kwargs.pop("assistant_model")
            return assistant.dflash_decode(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return _assisted_decoding


_WRAPPERS = {
    "_prepare_generation_config": _wrap_prepare,
    "_validate_generation_mode": _wrap_validate,
    "_assisted_decoding": _wrap_decode,
}
