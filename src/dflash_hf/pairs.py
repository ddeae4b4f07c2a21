"""
A target and its drafter by their names on the command line: found out early what they are, then loaded.

A folder that does not exist is said to be missing, without asking the Hub for it; a name that could be a repository is
asked for once, without retries. Nothing is loaded before both configurations have been looked at.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from dflash_hf.terminal import one_line


_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "tokenizer.jinja",
)
TRUST = "add --trust-remote-code (in a recipe trust_remote_code=true)"
_SECONDS = 10.0  # for the one question to the Hub


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


def looks_local(name: str) -> bool:
    """Whether a name can only be meant as a path."""
    return name.startswith((".", "/", "~", "\\")) or name.count("/") > 1 or name.endswith("/") or "\\" in name


def read_config(name: str, what: str, revision: str | None = None) -> dict:
    """
    The `config.json` of a model.

    Args:
        name (`str`): A folder, or a repository of the Hub.
        what (`str`): The argument with its value, for messages.
        revision (`str`, *optional*): Branch, tag or commit of the repository.

    Raises:
        `OSError`: there is no such folder or repository, or the Hub cannot be reached.
        `ValueError`: it is no model, or `config.json` is damaged.
    """
    folder = Path(name).expanduser()
    if not folder.exists() and not looks_local(name):
        return read_json(_from_hub(name, what, revision))
    if not folder.exists():
        raise FileNotFoundError(f"{what}: there is no such folder.")
    if not folder.is_dir():
        raise ValueError(f"{what} is a file; name the folder of the model.")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{what}: the folder has no config.json; name one that `save_pretrained` has finished.")
    return read_json(folder / "config.json")


def check_pair(
    target: str, draft: str | None, loading: Loading, tokenizer: bool = True, form: str = "--{} {}"
) -> dict:
    """
    Look at both configurations, before anything large is read.

    Args:
        target, draft (`str`): Their names.
        loading (`Loading`): Names the revisions.
        tokenizer (`bool`): The target must bring one.
        form (`str`): How an argument and its value are written, for messages.

    Returns:
        `dict`: The target's configuration.

    Raises:
        `ValueError`, `OSError`: as [`read_config`]; also where the two are swapped, or the target has no tokenizer.
    """
    ours, theirs = form.format("target", target), form.format("draft", draft)
    config = read_config(target, ours, loading.revision)
    drafts = None if draft is None else read_config(draft, theirs, loading.draft_revision)
    from dflash_hf.modeling.layouts_dflash import is_drafter_config

    if is_drafter_config(config):
        swapped = drafts is not None and not is_drafter_config(drafts)
        remedy = "target and drafter are swapped" if swapped else "name the model that it drafts for"
        raise ValueError(f"{ours} is a DFlash drafter: {remedy}.")
    if drafts is not None and not is_drafter_config(drafts):
        kind = ", ".join(map(str, drafts.get("architectures") or [drafts.get("model_type")]))
        raise ValueError(f"{theirs} is not a DFlash drafter but {kind}; `dflash find {target}` lists drafters.")
    if tokenizer and Path(target).expanduser().is_dir():
        if not any((Path(target).expanduser() / name).exists() for name in _TOKENIZERS):
            raise ValueError(
                f"{ours}: the folder has no tokenizer; save the target's beside its weights with "
                "`tokenizer.save_pretrained(folder)`."
            )
    return config


def check_token_id(token_id: int | None, config: dict, what: str | None = None) -> None:
    """
    Raises:
        `ValueError`: the target's embedding has no such row.
    """
    nested = config.get("text_config")
    rows = (nested if isinstance(nested, dict) else config).get("vocab_size", config.get("vocab_size"))
    if token_id is not None and rows is not None and not 0 <= token_id < rows:
        given = what or f"--mask-token-id {token_id}"
        raise ValueError(f"{given} is outside the target's embedding: its {rows} rows are the ids 0 to {rows - 1}.")


def positions_of(config: dict) -> int | None:
    """Tokens that a target reads, as far as its configuration says, with those that a stretched rope adds."""
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    length = text.get("max_position_embeddings", text.get("n_positions"))
    if not length or length < 0:
        return None
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    # Some count what they stretch (Qwen's YaRN), some what comes of it (Llama 3.1): then the original is named.
    trained = rope.get("original_max_position_embeddings") or length
    return int(max(length, trained * (rope.get("factor") or 1.0)))


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
        `ValueError`: it needs code of its own, or its weights are damaged.
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
        raise ValueError(_about_remote_code(what, error)) from error
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


def drafter_of(arguments, loading: Loading, device: str | None = None):
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
                "--compile, --tree-nodes and --draft-temperature are ways to use a drafter; name it with --draft."
            )
        return None
    draft = load_draft(arguments.draft, loading, device)
    for name, value in ways.items():
        setattr(draft.decoding_config, name, value)
    draft.decoding_config.check(draft.config.block_size)
    return draft


def pack(packed: bool, *models) -> None:
    """`--packed`: lay out the weights of those models that are there for the CPU."""
    if packed:
        from dflash_hf.packed_linear import packed_weights

        packed_weights(*(model for model in models if model is not None))


def _about_remote_code(what: str, error: ValueError) -> str:
    if "trust_remote_code" not in str(error):
        return str(error)
    return f"{what} comes with code of its own: read that code, and if you trust it {TRUST}."


def read_json(path: str | Path) -> dict:
    """
    The JSON object that a file holds.

    Raises:
        `ValueError`: it holds something else, or cannot be read; says so in a line.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be a configuration.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason} at byte {error.start}.") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {one_line(error)}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold one JSON object.")
    return value


def check_repository(name: str, what: str, revision: str | None = None) -> None:
    """
    Ask once whether a name that is no folder is a repository, before libraries ask again and again.

    Raises:
        `OSError`: it is none, or the Hub cannot be reached.
    """
    if not Path(name).expanduser().exists():
        _from_hub(name, what, revision, "tokenizer_config.json")


def _from_hub(name: str, what: str, revision: str | None, file: str = "config.json") -> str:
    """The path of a repository's small file in the cache, where one question to the Hub may bring it."""
    from huggingface_hub import constants, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import build_hf_headers, get_session, validate_repo_id

    missing = f"{what}: there is no such folder, and"
    try:
        validate_repo_id(name)
    except ValueError as error:
        raise FileNotFoundError(f"{missing} it is not the name of a repository of the Hub.") from error
    found = try_to_load_from_cache(name, file, revision=revision)
    if isinstance(found, str):
        return found
    if constants.HF_HUB_OFFLINE:
        raise OSError(f"{missing} the Hub is switched off by HF_HUB_OFFLINE; name a folder, or allow the Hub.")
    url = hf_hub_url(name, file, revision=revision)
    try:
        answer = get_session().head(url, headers=build_hf_headers(), timeout=_SECONDS, follow_redirects=True)
    except Exception as error:  # of whichever HTTP library huggingface_hub uses
        raise OSError(
            f"{missing} the Hub cannot be reached ({type(error).__name__}: {one_line(error, 80)})."
        ) from error
    if answer.status_code in (401, 403):
        raise OSError(f"{missing} the Hub shows no such repository; where it is private or gated: `hf auth login`.")
    if answer.status_code == 404 and file != "config.json" and answer.headers.get("X-Error-Code") == "EntryNotFound":
        return ""  # a repository, where the question was for one
    if answer.status_code == 404:
        at = f" at revision {revision}" if revision else ""
        raise OSError(f"{missing} the Hub has no model of that name with a {file}{at}.")
    return hf_hub_download(name, file, revision=revision)
