"""
Registration with the Auto classes: a drafter's folder is known by its content, never by its `model_type`.

Published drafters say `model_type: qwen3`, so that `AutoModel` alone would build a Qwen3 model with random embeddings,
and their remote code fails on current versions of transformers. After `import dflash_hf`, `AutoConfig` and `AutoModel`
return `DFlashDraftConfig` and `DFlashDraftModel` for every published layout, with or without `trust_remote_code=True`,
and run no remote code. To keep upstream's behaviour, set the environment variable `DFLASH_HF_AUTO=0` before the import
or call `dflash_hf.auto.unregister()`; `DFlashDraftModel.from_pretrained` works all the same.
"""

import functools
import os


def register() -> None:
    """Make `AutoConfig` return our class for a drafter's folder. Registering twice is a no-op."""
    # Imports lie in the functions: importing transformers may be what calls them, through `when_imported`.
    from transformers import AutoConfig, PreTrainedConfig

    original = AutoConfig.from_pretrained
    if hasattr(original, "_dflash_original") or os.environ.get("DFLASH_HF_AUTO") == "0":
        return

    @functools.wraps(original)
    def from_pretrained(pretrained_model_name_or_path, **kwargs):
        from dflash_hf.modeling.layouts_dflash import is_drafter_config

        lookup = {key: value for key, value in kwargs.items() if key not in ("trust_remote_code", "code_revision")}
        try:
            config_dict, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **lookup)
        except OSError:  # no config.json, or not JSON: upstream says so, or finds another way
            return original(pretrained_model_name_or_path, **kwargs)
        if is_drafter_config(config_dict):
            kwargs.pop("trust_remote_code", None)
            kwargs.pop("code_revision", None)
            from dflash_hf.modeling.modeling_dflash import DFlashDraftConfig

            return DFlashDraftConfig.from_pretrained(pretrained_model_name_or_path, **kwargs)
        return original(pretrained_model_name_or_path, **kwargs)

    from_pretrained._dflash_original = original
    AutoConfig.from_pretrained = staticmethod(from_pretrained)


def register_classes() -> None:
    """Tell `AutoConfig` and `AutoModel` of our classes. Registering twice is a no-op."""
    from transformers import AutoConfig, AutoModel

    from dflash_hf.modeling.modeling_dflash import DFlashDraftConfig, DFlashDraftModel

    AutoConfig.register(DFlashDraftConfig.model_type, DFlashDraftConfig, exist_ok=True)
    AutoModel.register(DFlashDraftConfig, DFlashDraftModel, exist_ok=True)


def unregister() -> None:
    """Give `AutoConfig` back to upstream, and with it `AutoModel`, for folders that name another model type."""
    from transformers import AutoConfig

    original = getattr(AutoConfig.from_pretrained, "_dflash_original", None)
    if original is not None:
        AutoConfig.from_pretrained = original
