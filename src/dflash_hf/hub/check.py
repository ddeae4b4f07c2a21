"""
The preflight of a drafter's folder: will vLLM, SGLang and transformers load it, and all in the same way? And could
llama.cpp run it after conversion?

Only `config.json` and the headers of the weights are read, unless the weights are requested. What engines read is in
`limits`; whether this package can read a drafter, the model's own reader decides.
"""

import filecmp
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from dflash_hf.configs import read_config
from dflash_hf.files import read_json
from dflash_hf.hub.drafter import LAYOUTS, Drafter, Finding, is_as_saved
from dflash_hf.hub.limits import LIMITS, SERVED_HEADS, reads
from dflash_hf.hub.remote import local_folder
from dflash_hf.names import ENGINES, LLAMA_CPP, READERS, SERVERS
from dflash_hf.repositories import check_revision, is_gguf
from dflash_hf.terminal import one_line


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
    config = {} if target is None else _target_config(target)
    if is_gguf(folder):
        return list(_parsed_findings(Path(folder), (LLAMA_CPP,), config))
    with local_folder(folder, revision, subfolder) as local:
        found = _findings(local, config, weights) if {*engines} & {*ENGINES} else iter(())
        others = _parsed_findings(local, [engine for engine in engines if engine not in ENGINES], config)
        return _merged([*found, *others], engines)


def render(findings: Sequence[Finding]) -> str:
    """A table of findings for a terminal, or one line when there are none."""
    if not findings:
        return "No findings: the folder is ready to be served."
    rows = [(finding.severity, ", ".join(finding.engines), finding.key, finding.message) for finding in findings]
    head = ("severity", "engines", "key", "finding")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(3)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[3]]) for row in (head, *rows)]
    return "\n".join(lines)


def _merged(findings: Sequence[Finding], engines: Sequence[str]) -> list[Finding]:
    """Errors first, of the engines asked about; the same finding of several engines is one."""
    merged: dict[tuple, Finding] = {}
    for one in findings:
        concerned = tuple(engine for engine in one.engines if engine in engines)
        place = (one.severity, one.key, one.message)
        if concerned:
            before = merged.get(place)
            merged[place] = replace(one, engines=(*(before.engines if before else ()), *concerned))
    return sorted(merged.values(), key=lambda finding: finding.severity)


def _walk(drafter: Drafter, engines: Sequence[str], parsed=None) -> Iterator[Finding]:
    """The findings of the table, and the fields of the parsed configuration that engines do not read."""
    for limit in LIMITS:
        if {*limit.engines} & {*engines}:
            yield from limit.find(drafter)
    if parsed is not None:
        from dflash_hf.configs import departures

        for key, value, plain in departures(parsed):
            blind = tuple(engine for engine in engines if not reads(engine, drafter.layout, key))
            yield Finding("error", blind, key, f"{value!r} is not read; it drafts as with {plain!r}, or not at all.")


def _findings(folder: Path, target: dict, weights: bool) -> Iterator[Finding]:
    try:
        config = read_json(folder / "config.json")
    except ValueError as error:
        yield Finding("error", ENGINES, "config.json", one_line(error))
        return
    drafter, parsed = Drafter(config, folder, target, code_is_ours=_has_our_code(folder)), None
    if weights or not is_as_saved(folder, config):
        shapes, parsed = yield from _findings_of_reader(drafter, weights)
        if parsed is None:
            return
        drafter = replace(drafter, shapes=shapes)
    yield from _walk(drafter, ENGINES, parsed)


def _findings_of_reader(drafter: Drafter, weights: bool):
    """
    What this package's own reader says, and which tensors engines miss; returns the tensors' shapes and the parsed
    configuration, or nothing if there is nothing more to say.
    """
    from dflash_hf.layouts.configuration import DFlashDraftConfig
    from dflash_hf.layouts.heads import UnknownHeadError
    from dflash_hf.layouts.read import canonical_config
    from dflash_hf.modeling.heads_dflash import HEADS
    from dflash_hf.weights import check_finite_weights

    folder, config = drafter.folder, drafter.config
    # 1. What it is.
    try:
        canonical_config(config)
    except UnknownHeadError as error:
        yield Finding("error", ("transformers",), "architectures", one_line(error))
        message = "belongs to a head that this package does not know, so it cannot say how engines handle it."
        yield Finding("warning", SERVERS, "architectures", message)
        return {}, None
    except Exception:  # other errors are reported where the configuration is read
        pass
    if "transformer_layer_config" in config:
        message = f"is speculators' layout, which only vLLM reads; {_remedy(folder)}"
        yield Finding("error", ("sglang", "transformers"), "transformer_layer_config", message)
        if isinstance(config["transformer_layer_config"], dict):
            yield from _walk(drafter, ENGINES)
        return {}, None
    architectures = config.get("architectures")
    if architectures not in [[name] for name in (*LAYOUTS, *(head.architecture for head in HEADS))]:
        message = f"{architectures} is not one of {', '.join(LAYOUTS)}; {_remedy(folder)}"
        yield Finding("error", ENGINES, "architectures", one_line(message))
        return {}, None
    try:
        parsed = DFlashDraftConfig.from_pretrained(folder)
    except Exception as error:  # upstream's own validation raises many types
        yield Finding("error", ENGINES, "config.json", one_line(error))
        return {}, None
    # 2. Its files.
    if (folder / "model.safetensors").is_file() and (folder / "model.safetensors.index.json").is_file():
        message = "exists next to model.safetensors.index.json; readers differ in which they use. Remove one."
        yield Finding("error", ENGINES, "model.safetensors", message)
    try:
        shapes = read_shapes(folder)
    except (ValueError, OSError) as error:
        yield Finding("error", ENGINES, "weights", one_line(error))
        return {}, None
    if weights:
        try:
            check_finite_weights(folder)
        except ValueError as error:
            yield Finding("error", ENGINES, "weights", str(error).removeprefix(f"{folder}: "))
    # 3. Its tensors.
    refused = _load_without_weights(folder)
    if refused is not None:
        yield Finding("error", ("transformers",), "weights", one_line(refused))
    if parsed.has_head and parsed.head.name not in SERVED_HEADS:
        field = next(iter(parsed.head.fields))
        message = f"{drafter.get(field)}: no engine has a {parsed.head.name}; decode with transformers' generate()."
        yield Finding("error", SERVERS, field, message)
    yield from _tensors(drafter, parsed, shapes, loads=refused is None)
    return shapes, parsed


def _tensors(drafter: Drafter, parsed, shapes: dict, loads: bool) -> Iterator[Finding]:
    """Engines know only the published names; whether this package can load others, its own reader decides."""
    import torch

    from dflash_hf.convert import NATIVE_NAMES
    from dflash_hf.drafter import DFlashDraftModel

    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in DFlashDraftModel(parsed).state_dict().items()}
    if drafter.layout == "Muse":
        wanted = {NATIVE_NAMES.get(name, name): shape for name, shape in wanted.items()}
    beside = {"mask_embedding"}  # skipped by both engines, which read a separate file
    wanted, shapes = ({name: one[name] for name in one.keys() - beside} for one in (wanted, shapes))
    for name in sorted(wanted.keys() - shapes.keys()):
        message = f"is missing {wanted[name]}; vLLM would serve without any warning."
        yield Finding("error", SERVERS, name, message)
    remedy = " `dflash convert` gives canonical names." if loads else ""
    own = {name for name in ("embed_tokens.weight", "lm_head.weight") if name in shapes}
    for name in sorted(own if not drafter.has_own_head else own - {"lm_head.weight"}):
        message = f"{shapes[name]} is skipped by SGLang, which uses the target's; vLLM loads and uses it."
        yield Finding("error", ("sglang",), name, message)
    for name in sorted(shapes.keys() - wanted.keys() - own):
        if not (drafter.has_own_head and name == "t2d"):
            message = f"is unknown {shapes[name]}: vLLM fails, SGLang skips it.{remedy}"
            yield Finding("error", SERVERS, name, message)
    for name in sorted(wanted.keys() & shapes.keys()):
        if wanted[name] != shapes[name]:
            message = f"has shape {shapes[name]}, but config.json requires {wanted[name]}."
            yield Finding("error", SERVERS, name, message)


def _parsed_findings(drafter: Path, engines: Sequence[str], target: dict) -> Iterator[Finding]:
    """
    Findings of engines whose limits are those of the parsed configuration: of a folder in any layout, or a GGUF file.
    """
    if not engines:
        return
    from dflash_hf.gguf_format import gguf_config, limits
    from dflash_hf.layouts.configuration import DFlashDraftConfig

    try:
        if is_gguf(drafter):
            parsed, refused = DFlashDraftConfig.from_dict(gguf_config(drafter)), None
        else:
            parsed, refused = DFlashDraftConfig.from_pretrained(drafter), _load_without_weights(drafter)
    except (ValueError, OSError, ImportError) as error:
        refused = one_line(error)
    if refused is not None:
        yield Finding("error", tuple(engines), "weights", one_line(refused))
        return
    if LLAMA_CPP in engines:
        for key, reason in limits(parsed, target or None):
            yield Finding("error", (LLAMA_CPP,), key, one_line(reason))
    if readers := [engine for engine in engines if engine in READERS]:
        yield from _walk(Drafter(read_json(drafter / "config.json"), drafter, target, parsed=parsed), readers, parsed)


def _has_our_code(folder: Path) -> bool:
    """Whether the code beside the weights is byte for byte this package's."""
    spec = find_spec("dflash_hf.modeling")
    ours = sorted(Path(spec.origin).parent.glob("*_dflash.py")) if spec and spec.origin else []
    _, differ, missing = filecmp.cmpfiles(ours[0].parent, folder, [path.name for path in ours], shallow=False)
    return not differ and not missing


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """
    Names and shapes of all tensors, from the headers alone.

    Raises:
        `OSError`: there are no safetensors, or a shard is missing.
        `ValueError`: a file is damaged; names it.
    """
    from dflash_hf.layouts.weights import checkpoint_files, read_header

    shapes: dict[str, tuple[int, ...]] = {}
    for file in checkpoint_files(str(folder)):
        shapes |= {name: shape for name, (_, shape) in read_header(file).items()}
    return shapes


def _remedy(folder: Path) -> str:
    refused = _load_without_weights(folder)
    if refused is None:
        return "`dflash convert` writes a folder that every engine can read."
    return f"this package cannot read it either: {refused}"


def _load_without_weights(folder: Path) -> str | None:
    """
    Why our own reader rejects a folder, or `None`. It runs on the meta device: it compares the headers with the model
    and reads no tensor.
    """
    from transformers.utils import logging

    from dflash_hf.drafter import DFlashDraftModel

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
            target = _read_target(target)
        except OSError as error:
            raise ValueError(f"{target} cannot be read: {error}") from error
    return target.get("text_config", target)


def _read_target(target: str | Path) -> dict:
    if Path(target).is_file() and not is_gguf(target):
        return read_json(target)
    if is_gguf(target):
        from dflash_hf.gguf_format import target_config

        return target_config(target)
    return read_config(str(target), f"--target {target}")
