"""A target and its drafter by their names on the command line: how they are loaded."""

from dataclasses import dataclass
from pathlib import Path

from dflash_hf.terminal import one_line


TRUST = "add --trust-remote-code (in a recipe trust_remote_code=true)"


@dataclass
class Loading:
    """
    How models are loaded, as every command that loads any takes it.

    Args:
        dtype (`str`): `"auto"`, `"float32"`, `"bfloat16"` or `"float16"`.
        device (`str`, *optional*): Default: a GPU if there is any.
        revision, draft_revision (`str`, *optional*): Branch, tag or commit of the target's and the drafter's
            repository.
        trust_remote_code (`bool`): Run the code that comes with a target. Drafters never need it.
    """

    dtype: str = "auto"
    device: str | None = None
    revision: str | None = None
    draft_revision: str | None = None
    trust_remote_code: bool = False

    @classmethod
    def of(cls, arguments) -> "Loading":
        """From parsed arguments; those that a command does not take keep their defaults."""
        return cls(**{name: value for name, value in vars(arguments).items() if name in cls.__dataclass_fields__})


def device_of(name: str | None) -> str:
    """
    A device that is there; by default a GPU if there is any.

    Raises:
        `ValueError`: it is not.
    """
    import torch

    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return "cuda" if cards else "cpu"
    kind, _, index = name.partition(":")
    if kind == "cuda" and int(index or 0) >= cards:
        there = "no CUDA device" if not cards else f"cuda:0 to cuda:{cards - 1}" if cards > 1 else "cuda:0 alone"
        raise ValueError(f"--device {name}: this machine has {there}; say --device cpu, or leave it out.")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"--device {name}: this machine has no Metal device; say --device cpu, or leave it out.")
    return name


def load_target(name: str, loading: Loading, device=None, form: str = "--{} {}", **options):
    """
    A target, in evaluation mode.

    Args:
        name (`str`): A folder, or a repository of the Hub.
        loading (`Loading`): How.
        device (`str`, `torch.device` or `dict`, *optional*): In place of `loading.device`.
        form (`str`): How an argument and its value are written, for messages.
        options: Further ones of `from_pretrained`.

    Raises:
        `ValueError`: it needs custom code, or its weights are damaged.
        `ImportError`: it needs a quantisation library that is not there.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    what = form.format("target", name)
    options |= {"dtype": loading.dtype, "device_map": device or device_of(loading.device)}
    options["trust_remote_code"] = loading.trust_remote_code
    if loading.revision:
        options["revision"] = loading.revision
    try:
        return AutoModelForCausalLM.from_pretrained(name, **options).eval()
    except SafetensorError as error:
        raise ValueError(damaged(what, error)) from error
    except ValueError as error:
        raise ValueError(about_remote_code(what, error)) from error
    except ImportError as error:
        raise ImportError(f"{what} needs a library that is not installed: {one_line(error, 160)}") from error


def damaged(what: str, error: Exception) -> str:
    """What a `SafetensorError` says to its reader."""
    damage = f"{what}: its safetensors are damaged or only half written ({one_line(error, 100)})"
    return f"{damage}; download or save them again."


def load_draft(name: str, loading: Loading, device: str | None = None):
    """A drafter, in evaluation mode; none of its own code runs."""
    from dflash_hf.modeling.modeling_dflash import DFlashDraftModel

    options = {"dtype": loading.dtype, "device_map": device or device_of(loading.device)}
    if loading.draft_revision:
        options["revision"] = loading.draft_revision
    return DFlashDraftModel.from_pretrained(name, **options).eval()


def draft_config_of(name: str, loading: Loading):
    """A drafter's configuration, without its weights."""
    from dflash_hf.modeling.configuration_dflash import DFlashDraftConfig

    options = {"revision": loading.draft_revision} if loading.draft_revision else {}
    return DFlashDraftConfig.from_pretrained(name, **options)


def loaded(model, target) -> tuple:
    """Drafter, in fp32 to be trained, and target; those that are a folder or a name on the Hub are loaded."""
    import torch
    from transformers import AutoModelForCausalLM

    from dflash_hf.modeling.modeling_dflash import DFlashDraftModel

    if isinstance(model, str | Path):
        model = DFlashDraftModel.from_pretrained(model, dtype=torch.float32)
    if isinstance(target, str | Path):
        target = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    return model, target


def configured_draft(arguments, loading: Loading, device: str | None = None):
    """
    The drafter of `--draft`, which decodes as `--compile`, `--tree-nodes` and `--draft-temperature` say; `None` where
    none is named.

    Raises:
        `ValueError`: there is no drafter that they could speed up, or it cannot follow them.
    """
    ways = {name: getattr(arguments, name, None) for name in ("compile", "tree_nodes", "draft_temperature")}
    if arguments.draft is None:
        if any(ways.values()):
            raise ValueError(
                "--compile, --tree-nodes and --draft-temperature are ways to use a drafter; pass --draft."
            )
        return None
    draft = load_draft(arguments.draft, loading, device)
    for name, value in ways.items():
        setattr(draft.decoding_config, name, value)
    draft.decoding_config.check(draft.config.block_tokens)
    return draft


def pack(packed: bool | None, *models) -> bool:
    """
    `--packed`: lay out the weights of those models that are not `None` for the CPU.

    Args:
        packed (`bool`, *optional*): Default: if the models are on a CPU and the copies fit a third of its free memory.

    Returns:
        `bool`: Whether they are packed now.
    """
    import psutil

    from dflash_hf.packed_linear import packable, packed_weights

    present = [model for model in models if model is not None]
    if packed is None:
        layers = [module for model in present for module in model.modules() if packable(module)]
        size = sum(layer.weight.nbytes for layer in layers)
        packed = 0 < size < psutil.virtual_memory().available / 3
    if packed:
        packed_weights(*present)
    return packed


def about_remote_code(what: str, error: ValueError) -> str:
    """What to do about a model with custom code; other errors are returned unchanged."""
    if "trust_remote_code" not in str(error):
        return str(error)
    return f"{what} has custom code: read it, and if you trust it {TRUST}."
