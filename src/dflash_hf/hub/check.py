"""
The preflight of a drafter's folder: will vLLM, SGLang and transformers load it, and all in the same way? And could
llama.cpp run it after conversion?

Only `config.json` and the headers of the weights are read, unless the weights are requested. The rules themselves are
in `engine_rules` and `safety_rules`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.files import read_json
from dflash_hf.gguf_format import gguf_config, is_gguf, limits, target_config
from dflash_hf.hub.engine_rules import ARCHITECTURES, RULES, Drafter, Finding, fits_target, of_speculators
from dflash_hf.hub.reader_rules import unread
from dflash_hf.hub.remote import local_folder
from dflash_hf.hub.safety_rules import SAFETY_RULES
from dflash_hf.layouts.configuration import DFlashDraftConfig
from dflash_hf.layouts.heads import UnknownHeadError
from dflash_hf.layouts.read import canonical_config
from dflash_hf.layouts.weights import checkpoint_files, read_header
from dflash_hf.modeling.heads_dflash import HEADS
from dflash_hf.names import ENGINES, LLAMA_CPP, READERS, SERVERS
from dflash_hf.repositories import check_revision
from dflash_hf.terminal import one_line
from dflash_hf.weights import check_finite_weights


def check(
    folder: str | Path,
    engines: Sequence[str] = ENGINES,
    target=None,
    revision: str | None = None,
    subfolder: str = "",
    weights: bool = False,
) -> list[Finding]:
    """
    Check a drafter's folder, or its repository on the Hub, against what engines read.

    Args:
        folder (`str` or `Path`): A local folder with `config.json` and safetensors; or the id of a repository, of
            which only `config.json` and the headers of the weights are downloaded; or a GGUF file.
        engines (`Sequence[str]`): Any of `"vllm"`, `"sglang"`, `"transformers"`; and, only on request, `"mlx"`,
            `"openvino"`, `"z-lab"` and `"llama.cpp"`, which reads the file that `dflash convert` makes of a folder.
        target (`str`, `Path`, `dict` or `PreTrainedConfig`, *optional*): The target's configuration, its folder, its
            `config.json`, its GGUF file or its repository: width, depth and vocabulary are compared as well.
        revision (`str`, *optional*): Branch, tag or commit of the drafter's repository.
        subfolder (`str`): The drafter's subfolder in the folder or repository.
        weights (`bool`): Also read every tensor of a local folder, to check that all values are finite.

    Returns:
        `list[Finding]`, errors first; empty if there are none.

    Raises:
        `ValueError`: an unknown engine, a repository that cannot be read or whose weights are requested, a revision
            of a local folder, or a target without a readable configuration.
    """
    known = (*ENGINES, LLAMA_CPP, *READERS)
    if unknown := [engine for engine in engines if engine not in known]:
        raise ValueError(f"engines={list(engines)} holds {unknown[0]!r}; choose from {', '.join(known)}.")
    if is_gguf(folder) and list(engines) != [LLAMA_CPP]:
        raise ValueError(f"{folder} is read by {LLAMA_CPP} only; name no other engine.")
    check_revision(str(folder), str(folder), revision)
    if weights and not Path(folder).is_dir():
        raise ValueError(f"{folder} is not a local folder: its weights can be read once it is downloaded.")
    target = None if target is None else _target_config(target)
    if is_gguf(folder):
        return list(_as_parsed(Path(folder), LLAMA_CPP, target))
    findings: list[Finding] = []
    with local_folder(folder, revision, subfolder) as local:
        for engine in engines:
            if engine not in ENGINES:
                findings += _as_parsed(local, engine, target)
        for finding in _all_findings(local, target, weights):
            concerned = tuple(engine for engine in finding.engines if engine in engines)
            if concerned:
                findings.append(Finding(finding.severity, concerned, finding.key, one_line(finding.message)))
    return sorted(findings, key=lambda finding: finding.severity)


def render(findings: Sequence[Finding]) -> str:
    """A table of findings for a terminal, or one line when there are none."""
    if not findings:
        return "No findings: the folder is ready to be served."
    rows = [(finding.severity, ", ".join(finding.engines), finding.key, finding.message) for finding in findings]
    head = ("severity", "engines", "key", "finding")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(3)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[3]]) for row in (head, *rows)]
    return "\n".join(lines)


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """
    Names and shapes of all tensors, from the headers alone.

    Raises:
        `OSError`: there are no safetensors, or a shard is missing.
        `ValueError`: a file is damaged; names it.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in checkpoint_files(str(folder)):
        shapes |= {name: shape for name, (_, shape) in read_header(file).items()}
    return shapes


def _all_findings(folder: Path, target: dict | None, weights: bool) -> Iterator[Finding]:
    try:
        config = read_json(folder / "config.json")
    except ValueError as error:
        yield Finding("error", ENGINES, "config.json", str(error))
        return
    architectures = config.get("architectures")
    try:
        canonical_config(config)
    except UnknownHeadError as error:
        yield Finding("error", ("transformers",), "architectures", str(error))
        message = "belongs to a head that this package does not know, so it cannot say how engines handle it."
        yield Finding("warning", SERVERS, "architectures", message)
        return
    except Exception:  # other errors are reported where the configuration is read
        pass
    if "transformer_layer_config" in config:
        message = f"is speculators' layout, which only vLLM reads; {_remedy(folder)}"
        yield Finding("error", ("sglang", "transformers"), "transformer_layer_config", message)
        yield from of_speculators(config)
        return
    if architectures not in [[name] for name in (*ARCHITECTURES, *(head.architecture for head in HEADS))]:
        message = f"{architectures} is not one of {', '.join(ARCHITECTURES)}; {_remedy(folder)}"
        yield Finding("error", ENGINES, "architectures", message)
        return
    try:
        parsed = DFlashDraftConfig.from_pretrained(folder)
    except Exception as error:  # upstream's own validation raises many types
        yield Finding("error", ENGINES, "config.json", " ".join(str(error).split()))
        return
    if (folder / SAFE_WEIGHTS_NAME).is_file() and (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        message = f"exists next to {SAFE_WEIGHTS_INDEX_NAME}; readers differ in which they use. Remove the stale file."
        yield Finding("error", ENGINES, SAFE_WEIGHTS_NAME, message)
    try:
        shapes = read_shapes(folder)
    except (ValueError, OSError) as error:
        yield Finding("error", ENGINES, "weights", " ".join(str(error).split()))
        return
    if weights:
        try:
            check_finite_weights(folder)
        except ValueError as error:
            yield Finding("error", ENGINES, "weights", str(error).removeprefix(f"{folder}: "))
    refused = _load_without_weights(folder)
    if refused is not None:
        yield Finding("error", ("transformers",), "weights", refused)
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in DFlashDraftModel(parsed).state_dict().items()}
    drafter = Drafter(folder, config, config.get("dflash_config") or {}, shapes, wanted, refused is None)
    for rule in (*RULES, *SAFETY_RULES):
        yield from rule(drafter)
    if target is not None:
        yield from fits_target(drafter, target)


def _remedy(folder: Path) -> str:
    refused = _load_without_weights(folder)
    if refused is None:
        return "`dflash convert` writes a folder that every engine can read."
    return f"this package cannot read it either: {refused}"


def _as_parsed(drafter: Path, engine: str, target: dict | None) -> Iterator[Finding]:
    """Findings of an engine whose rules apply to the parsed drafter: a folder in any layout, or a GGUF file."""
    try:
        if is_gguf(drafter):
            config, refused = DFlashDraftConfig.from_dict(gguf_config(drafter)), None
        else:
            config, refused = DFlashDraftConfig.from_pretrained(drafter), _load_without_weights(drafter)
    except (ValueError, OSError, ImportError) as error:
        refused = one_line(error)
    if refused is not None:
        yield Finding("error", (engine,), "weights", one_line(refused))
        return
    if engine != LLAMA_CPP:
        yield from unread(config, engine, read_json(drafter / "config.json"), target)
        return
    for key, reason in limits(config, target):
        yield Finding("error", (engine,), key, one_line(reason))


def _load_without_weights(folder: Path) -> str | None:
    """
    Why our own reader rejects a folder, or `None`. It runs on the meta device: it compares the headers with the model
    and reads no tensor.
    """
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        DFlashDraftModel.from_pretrained(folder, device_map="meta")
    except (ValueError, OSError, ImportError) as error:
        return " ".join(str(error).split())
    finally:
        if shown:
            logging.enable_progress_bar()
    return None


def _target_config(target) -> dict:
    """A target's configuration as a dictionary; of a multimodal target, its text part."""
    if hasattr(target, "get_text_config"):
        return target.get_text_config().to_dict()
    if not isinstance(target, dict):
        try:
            target = target_config(target) if is_gguf(target) or not Path(target).is_file() else read_json(target)
        except OSError as error:
            raise ValueError(f"{target} cannot be read: {error}") from error
    return target.get("text_config", target)
