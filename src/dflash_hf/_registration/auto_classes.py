"""
Registration with the Auto classes of transformers, which recognise a drafter by its config, not by its `model_type`.

Published drafters have `model_type: qwen3`. So without the package `AutoModel` builds a Qwen3 model with random
embeddings, and the remote code of z-lab's drafters fails on current versions of transformers. With the package,
`AutoConfig` and `AutoModel` return `DFlashDraftConfig` and `DFlashDraftModel` for drafters in every layout, with or
without `trust_remote_code=True`, and run no remote code.
"""

import functools


def register() -> None:
    """Make `AutoConfig` return `DFlashDraftConfig` for a drafter's folder. Registering twice is a no-op."""
    # Imports are inside the functions: importing transformers may be what calls them, through `when_imported`.
    from transformers import AutoConfig, PreTrainedConfig

    original = AutoConfig.from_pretrained
    if hasattr(original, "_dflash_original"):
        return

    @functools.wraps(original)
    def from_pretrained(pretrained_model_name_or_path, **kwargs):
        # Imported here: `layouts.read` itself may be what imports transformers, and then is not complete yet.
        from dflash_hf.layouts.read import is_drafter_config

        lookup = {key: value for key, value in kwargs.items() if key not in ("trust_remote_code", "code_revision")}
        try:
            config_dict, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **lookup)
        except OSError:  # no config.json, or not JSON: upstream reports it, or finds another way
            return original(pretrained_model_name_or_path, **kwargs)
        if is_drafter_config(config_dict):
            from dflash_hf.drafter import DFlashDraftConfig  # not from `layouts`: this also registers the classes

            return DFlashDraftConfig.from_pretrained(pretrained_model_name_or_path, **lookup)
        return original(pretrained_model_name_or_path, **kwargs)

    from_pretrained._dflash_original = original
    AutoConfig.from_pretrained = staticmethod(from_pretrained)


def register_classes() -> None:
    """Register `DFlashDraftConfig` and `DFlashDraftModel` with `AutoConfig` and `AutoModel`."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from dflash_hf.drafter import DFlashDraftConfig, DFlashDraftModel

    class NoCausalLM:
        """A clearer error than upstream's, which lists all its classes."""

        config_class = DFlashDraftConfig

        @classmethod
        def from_pretrained(cls, name, *args, **kwargs):
            raise TypeError(
                f"{name} is a DFlash drafter, which cannot generate on its own; load it with "
                f"`AutoModel.from_pretrained({str(name)!r})` and pass it to the target: "
                "`target.generate(..., assistant_model=draft)`."
            )

    AutoConfig.register(DFlashDraftConfig.model_type, DFlashDraftConfig, exist_ok=True)
    AutoModel.register(DFlashDraftConfig, DFlashDraftModel, exist_ok=True)
    AutoModelForCausalLM.register(DFlashDraftConfig, NoCausalLM, exist_ok=True)


def register_pipelines() -> None:
    """
    Let `pipeline(..., assistant_model="<drafter>")` load a drafter by name. Upstream searches only its own classes,
    and compares tokenizers, which a drafter does not have. Registering twice is a no-op.
    """
    from transformers import AutoConfig
    from transformers.pipelines import base

    original = base.load_assistant_model
    if hasattr(original, "_dflash_original"):
        return

    @functools.wraps(original)
    def load_assistant_model(model, assistant_model, assistant_tokenizer):
        if isinstance(assistant_model, str) and model.can_generate():
            from dflash_hf.drafter import DFlashDraftModel

            if isinstance(AutoConfig.from_pretrained(assistant_model), DFlashDraftModel.config_class):
                draft = DFlashDraftModel.from_pretrained(assistant_model, dtype=model.dtype)
                return draft.to(model.device), None
        elif hasattr(type(assistant_model), "dflash_decode"):
            return assistant_model, None
        return original(model, assistant_model, assistant_tokenizer)

    load_assistant_model._dflash_original = original
    base.load_assistant_model = load_assistant_model
