"""Loading a target and its drafter by their names: a folder, or a repository on the Hub."""

from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

from dflash_hf._io.errors import one_line
from dflash_hf._io.progress import without_bars
from dflash_hf.decoding.cpu_dtypes import warn_if_emulated
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.layouts.configuration import DFlashDraftConfig
from dflash_hf.layouts.loading import check_cpu_kernels
from dflash_hf.pairs.configs import TRUST_REMEDY, damaged_config, is_multimodal
from dflash_hf.pairs.devices import available_device, dtype_to_load


@dataclass
class Loading:
    """
    How models are loaded: the options of every command that loads any.

    Args:
        dtype (`str`): `"auto"`, `"float32"`, `"bfloat16"` or `"float16"`; see [`dtype_to_load`].
        device (`str`, *optional*): As in [`available_device`].
        revision, draft_revision (`str`, *optional*): Branch, tag or commit of the target's and the drafter's
            repository.
        trust_remote_code (`bool`): Run a target's own code. Drafters never need it.
    """

    dtype: str = "auto"
    device: str | None = None
    revision: str | None = None
    draft_revision: str | None = None
    trust_remote_code: bool = False

    @classmethod
    def from_arguments(cls, arguments) -> "Loading":
        """From parsed arguments; options that a command lacks keep their defaults."""
        return cls(**{name: value for name, value in vars(arguments).items() if name in cls.__dataclass_fields__})


def load_target(name: str, loading: Loading, device=None, **options):
    """
    A target, in evaluation mode.

    Args:
        name (`str`): A folder, or a repository on the Hub.
        loading (`Loading`): Loading options.
        device (`str` or `torch.device`, *optional*): Replaces `loading.device`.
        options: Additional options of `from_pretrained`.

    Raises:
        `ValueError`: it needs custom code, or its weights are damaged, incomplete or of another configuration.
        `ImportError`: it needs a quantisation library that is not installed.
    """
    device = device or available_device(loading.device)
    options |= {"dtype": dtype_to_load(loading.dtype, device), "device_map": device}
    options |= {"trust_remote_code": loading.trust_remote_code, "revision": loading.revision or "main"}
    target = _load_complete(name, f"target={name}", **options).eval()
    warn_if_emulated(target)
    return target


def _load_complete(name: str | Path, argument: str, **options):
    """
    Load a target, in the dtype and on the device that `options` of `from_pretrained` name.

    Raises:
        `ValueError`, `ImportError`: as [`load_target`].
    """
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # so that `_check_complete` names them
    try:
        config_options = {key: value for key, value in options.items() if key in ("revision", "trust_remote_code")}
        config = AutoConfig.from_pretrained(name, **config_options).to_dict()
        model_class = AutoModelForMultimodalLM if is_multimodal(config) else AutoModelForCausalLM
        with without_bars():
            target, info = model_class.from_pretrained(name, **options)
    except StrictDataclassError as error:
        raise ValueError(damaged_config(argument, error)) from error
    except SafetensorError as error:
        damage = f"{argument}: its safetensors are damaged or only half written ({one_line(error, 100)})"
        raise ValueError(f"{damage}; download or save them again.") from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(f"{argument} has custom code: read it, and if you trust it {TRUST_REMEDY}.") from error
    except ImportError as error:
        raise ImportError(f"{argument} needs a library that is not installed: {one_line(error, 160)}") from error
    _check_complete(argument, target, info)
    check_cpu_kernels(argument, target)
    return target


def _check_complete(argument: str, target, info: dict) -> None:
    """
    Check that a target's weights are those of its configuration.

    Args:
        argument (`str`): The argument with its value, for messages.
        target (`PreTrainedModel`): The target.
        info (`dict`): From `output_loading_info` of `from_pretrained`.

    Raises:
        `ValueError`: weights are missing, or have other shapes.
    """
    parameters = {key for key, _ in target.named_parameters()}  # buffers are computed
    wrong = [f"{key} is missing" for key in sorted(parameters & set(info["missing_keys"]))]
    for key, stored, wanted in sorted(info["mismatched_keys"]):
        wrong.append(f"{key} has shape {list(stored)} instead of {list(wanted)}")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"{argument}: its weights do not fit its config.json: {', '.join(wrong[:3])}{more}; download or save it "
            "again."
        )


def load_draft(name: str, loading: Loading, device: str | None = None):
    """A drafter in evaluation mode; its own code is not run."""
    device = device or available_device(loading.device)
    options = {"dtype": dtype_to_load(loading.dtype, device), "device_map": device}
    with without_bars():
        return DFlashDraftModel.from_pretrained(name, revision=loading.draft_revision or "main", **options).eval()


def load_draft_config(name: str, loading: Loading):
    """A drafter's configuration, without its weights."""
    return DFlashDraftConfig.from_pretrained(name, revision=loading.draft_revision or "main")


def load_for_training(model, target) -> tuple:
    """
    Drafter and target of a training; each is loaded if given as a folder or Hub name, the drafter in fp32.

    Args:
        model (`DFlashDraftModel`, `str` or `Path`): The drafter; a compiled one is unwrapped.
        target (`PreTrainedModel`, `str` or `Path`): The target.

    Returns:
        `tuple[DFlashDraftModel, PreTrainedModel]`.

    Raises:
        `ValueError`: the model is not a drafter.
    """
    if isinstance(model, str | Path):
        model = DFlashDraftModel.from_pretrained(model, dtype=torch.float32)
    if isinstance(target, str | Path):
        target = _load_complete(target, f"target={target}", dtype="auto")
    model = getattr(model, "_orig_mod", model)  # without `torch.compile`'s wrapper, whose names would be saved
    if not hasattr(getattr(model, "config", None), "target_hidden_size"):
        raise ValueError(f"model is a {type(model).__name__}; pass the drafter (`DFlashDraftModel`), then its target.")
    return model, target
