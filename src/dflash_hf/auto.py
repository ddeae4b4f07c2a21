"""Registration with the Auto classes: a drafter's folder is known by its content, never by its `model_type`."""

import functools

from transformers import AutoConfig, AutoModel, PreTrainedConfig

from .modeling.configuration_dflash import DFlashDraftConfig
from .modeling.modeling_dflash import DFlashDraftModel


_ARCHITECTURES = {"DFlashDraftModel"}


def is_drafter_config(config: dict) -> bool:
    """Whether a `config.json` is a DFlash drafter's. Published ones say `model_type: qwen3`, like many targets."""
    return bool(_ARCHITECTURES & set(config.get("architectures") or ())) or "dflash_config" in config


def register() -> None:
    """Make `AutoConfig` and `AutoModel` return our classes for a drafter's folder, without running remote code."""
    AutoConfig.register(DFlashDraftConfig.model_type, DFlashDraftConfig, exist_ok=True)
    AutoModel.register(DFlashDraftConfig, DFlashDraftModel, exist_ok=True)
    original = AutoConfig.from_pretrained
    if hasattr(original, "_dflash_original"):
        return

    @functools.wraps(original)
    def from_pretrained(pretrained_model_name_or_path, **kwargs):
        lookup = {key: value for key, value in kwargs.items() if key not in ("trust_remote_code", "code_revision")}
        config_dict, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **lookup)
        if is_drafter_config(config_dict):
            kwargs.pop("trust_remote_code", None)
            kwargs.pop("code_revision", None)
            return DFlashDraftConfig.from_pretrained(pretrained_model_name_or_path, **kwargs)
        return original(pretrained_model_name_or_path, **kwargs)

    from_pretrained._dflash_original = original
    AutoConfig.from_pretrained = staticmethod(from_pretrained)
