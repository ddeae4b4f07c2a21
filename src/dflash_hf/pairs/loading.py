"""
Loading a target and its drafter by their names: a folder, or a repository on the Hub.

Messages name arguments as in Python, `target=...`; the command line writes its options in their place.
"""

from dataclasses import dataclass
from pathlib import Path

from dflash_hf._io.errors import one_line
from dflash_hf._io.files import read_text
from dflash_hf._io.progress import without_bars


TRUST_REMEDY = "add --trust-remote-code (in a recipe trust_remote_code=true)"


@dataclass
class Loading:
    """
    How models are loaded: the options of every command that loads any.

    Args:
        dtype (`str`): `"auto"`, `"float32"`, `"bfloat16"` or `"float16"`; see [`dtype_on`].
        device (`str`, *optional*): Default: a GPU if there is one.
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

    def dtype_on(self, device) -> str:
        """
        The dtype for `from_pretrained`. `"auto"` is the checkpoint's, but float32 on a processor without hardware
        support for products in bf16, which is logged once.
        """
        import torch
        from transformers.utils import logging

        from dflash_hf.decoding.cpu_dtypes import is_emulated

        on_cpu = str(device) == "cpu" or (str(device) == "auto" and not torch.accelerator.is_available())
        if self.dtype != "auto" or not on_cpu or not is_emulated(torch.bfloat16):
            return self.dtype
        logging.get_logger(__name__).warning_once(
            "float32: this processor has no units for bf16 (dtype bfloat16 takes half the memory)"
        )
        return "float32"


def available_device(name: str | None) -> str:
    """
    An available device; by default a GPU if there is one.

    Raises:
        `ValueError`: the device is not available.
    """
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return "cuda" if num_gpus else "cpu"
    kind, _, index = name.partition(":")
    if kind == "cuda" and int(index or 0) >= num_gpus:
        available = f"cuda:0 to cuda:{num_gpus - 1}"
        if num_gpus == 1:
            available = "only cuda:0"
        elif num_gpus == 0:
            available = "no CUDA device"
        raise ValueError(f"device={name}: this machine has {available}; use `cpu`, or leave it out.")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device={name}: this machine has no Metal device; use `cpu`, or leave it out.")
    return name


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
    from dflash_hf.decoding.cpu_dtypes import warn_if_emulated

    device = device or available_device(loading.device)
    options |= {"dtype": loading.dtype_on(device), "device_map": device}
    options |= {"trust_remote_code": loading.trust_remote_code, "revision": loading.revision or "main"}
    target = _load_complete(name, f"target={name}", **options).eval()
    warn_if_emulated(target)
    return target


def _load_complete(name: str | Path, argument: str, **options):
    """A target, if its checkpoint has all of its parameters: others would be random."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # rejected below, by name
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
    return target


def is_multimodal(config: dict) -> bool:
    """
    Whether a model with this configuration is loaded with the part that reads images or sound: if it was saved with
    it, or if transformers has no other class for it.
    """
    from transformers.models.auto import modeling_auto

    model_type = config.get("model_type")
    multimodal = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(model_type)
    text_only = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, multimodal)
    return multimodal is not None and multimodal in (text_only, *(config.get("architectures") or ()))


def damaged_config(argument: str, error: Exception) -> str:
    """A readable message for a `StrictDataclassError`."""
    return f"{argument}: its config.json is damaged ({one_line(error, 160)}); correct it, or download it again."


def load_tokenizer(
    name: str,
    chat_template: str | Path | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    empty: bool = False,
):
    """
    Load a tokenizer, optionally with another chat template. An `empty` one is enough for rows of token ids.

    Raises:
        `OSError`: the folder or repository does not exist.
        `ValueError`: it has no tokenizer, or a tokenizer with custom code.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    from dflash_hf._io.repositories import small_file

    small_file(str(name), str(name), revision, "tokenizer_config.json")
    options = {"trust_remote_code": True} if trust_remote_code else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main", **options)
        added = tokenizer.added_tokens_decoder  # in mistral-common's tokenizers this is a method, which raises
        is_usable = empty or not isinstance(added, dict) or len(tokenizer.get_vocab()) > len(added)
        if not is_usable:  # transformers makes one of a folder without files
            raise ValueError(f"the tokenizer of {name} has no vocabulary")
    except StrictDataclassError as error:
        raise ValueError(damaged_config(str(name), error)) from error
    except (ValueError, OSError, ImportError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(f"The tokenizer of {name} has custom code; if you trust it {TRUST_REMEDY}.") from error
        if Path(name).expanduser().is_dir():
            raise ValueError(
                f"{name} holds no tokenizer that can be read; save the target's there with "
                f"`tokenizer.save_pretrained(folder)` ({one_line(error, 100)})."
            ) from error
        raise
    if chat_template is not None:
        tokenizer.chat_template = read_text(Path(chat_template))
    return tokenizer


def load_draft(name: str, loading: Loading, device: str | None = None):
    """A drafter in evaluation mode; its own code is not run."""
    from dflash_hf.drafter import DFlashDraftModel

    device = device or available_device(loading.device)
    options = {"dtype": loading.dtype_on(device), "device_map": device}
    with without_bars():
        return DFlashDraftModel.from_pretrained(name, revision=loading.draft_revision or "main", **options).eval()


def load_draft_config(name: str, loading: Loading):
    """A drafter's configuration, without its weights."""
    from dflash_hf.layouts.configuration import DFlashDraftConfig

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
    import torch

    from dflash_hf.drafter import DFlashDraftModel

    if isinstance(model, str | Path):
        model = DFlashDraftModel.from_pretrained(model, dtype=torch.float32)
    if isinstance(target, str | Path):
        target = _load_complete(target, f"target={target}", dtype="auto")
    model = getattr(model, "_orig_mod", model)  # without `torch.compile`'s wrapper, whose names would be saved
    if not hasattr(getattr(model, "config", None), "target_hidden_size"):
        raise ValueError(f"model is a {type(model).__name__}; pass the drafter (`DFlashDraftModel`), then its target.")
    return model, target


def pack(packed: bool | None, *models) -> bool:
    """
    Pack the weights of all models that are not `None` for the CPU, as [`should_pack`] decides.

    Returns:
        `bool`: Whether they were packed.
    """
    from dflash_hf.decoding.packing import packed_weights

    present = [model for model in models if model is not None]
    packed = should_pack(packed, *present)
    if packed:
        packed_weights(*present)
    return packed


def should_pack(packed: bool | None, *models) -> bool:
    """
    Whether to multiply by packed weights.

    Args:
        packed (`bool`, *optional*): The value of `--packed`. Default: if the models are on a CPU and the copies fit a
            third of its free memory.
        models (`PreTrainedModel`): The models to pack.
    """
    from dflash_hf.decoding.packing import fit_memory, packable

    if packed is not None:
        return packed
    layers = []
    for model in models:
        layers += [module for module in model.modules() if packable(module)]
    return bool(layers) and fit_memory(layers)
