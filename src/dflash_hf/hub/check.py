"""
The preflight of a drafter's folder: can vLLM, SGLang and transformers load it, and do they read it in the same way?
Could llama.cpp run it after conversion?

Only `config.json` and the headers of the weights are read. This package's own reader decides whether the package can
read a drafter; `limits` lists what the versions of the engines cannot.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from huggingface_hub import snapshot_download

from dflash_hf._io.errors import one_line
from dflash_hf._io.files import read_json
from dflash_hf._io.names import ENGINES, LLAMA_CPP, SERVERS
from dflash_hf._io.progress import without_bars
from dflash_hf._io.repositories import check_revision, is_gguf, small_file
from dflash_hf.conversion.convert import NATIVE_NAMES
from dflash_hf.conversion.gguf_read import gguf_config, target_config
from dflash_hf.conversion.llama_cpp_limits import llama_cpp_limits
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.hub.drafter_folder import DrafterFolder
from dflash_hf.hub.engines import engine_versions, split_engine
from dflash_hf.hub.findings import Finding
from dflash_hf.hub.limits import LIMITS, PUBLISHED_LAYOUTS
from dflash_hf.layouts.checkpoint_files import checkpoint_files, read_header
from dflash_hf.layouts.configuration import DFlashDraftConfig
from dflash_hf.layouts.errors import UnknownDrafterError
from dflash_hf.layouts.read import canonical_config, is_drafter_config
from dflash_hf.layouts.tensor_names import published_name, tensor_names
from dflash_hf.modeling.modeling_dflash import MASK_EMBEDDING
from dflash_hf.pairs.configs import incompatibilities, non_default_fields, read_config, resized_vocabulary
from dflash_hf.targets.config_fields import text_part


_ALL_READERS = (*ENGINES, LLAMA_CPP)


def check(
    folder: str | Path,
    engines: Sequence[str] = ENGINES,
    target=None,
    revision: str | None = None,
) -> list[Finding]:
    """
    Check a drafter's folder, or its repository on the Hub, against what engines read.

    Args:
        folder (`str` or `Path`): A local folder with `config.json` and safetensors; or the id of a repository, which
            is downloaded into the cache, where engines find it; or a GGUF file.
        engines (`Sequence[str]`): Any of `"vllm"`, `"sglang"`, `"transformers"`, each also with a version, as in
            `"vllm==0.26.0"`; and, only on request, `"llama.cpp"`, which reads the file that `dflash convert` makes of
            a folder. Without a version, the installed one is meant, else the newest whose limits are known:
            [`~dflash_hf.hub.engines.engine_versions`] returns it, with a warning if its limits are not known.
        target (`str`, `Path`, `dict` or `PreTrainedConfig`, *optional*): The target's configuration, its folder, its
            `config.json`, its GGUF file or its repository: width, depth and vocabulary are compared as well.
        revision (`str`, *optional*): Branch, tag or commit of the drafter's repository.

    Returns:
        `list[Finding]`, errors first; empty if there are none.

    Raises:
        `ValueError`: an unknown engine or version, a revision of a local folder, or a target without a readable
            configuration.
        `OSError`: there is no such folder or repository, or it cannot be downloaded.
    """
    names = [split_engine(engine)[0] for engine in dict.fromkeys(engines)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"engines={list(engines)} holds two versions of {name}; check them one after the other.")
    if is_gguf(folder) and names != [LLAMA_CPP]:
        raise ValueError(f"{folder} is read by {LLAMA_CPP} only; name no other engine.")
    check_revision(str(folder), str(folder), revision)
    config = {} if target is None else _target_config(target)
    if is_gguf(folder):
        return list(_findings_of_gguf(Path(folder), config))
    versions = {version.engine: version.checked_as for version in engine_versions(engines)}
    return _merged(_findings(_local_folder(str(folder), revision), config, versions), names)


def _local_folder(name: str, revision: str | None) -> Path:
    """The local folder of a drafter; a repository is downloaded into the cache."""
    config = small_file(name, name, revision)
    is_local = Path(name).expanduser().exists()
    if is_local or not is_drafter_config(read_json(config)):  # another model may be large to download
        return config.parent
    patterns = ("*.json", "*.py", "*.safetensors", MASK_EMBEDDING)
    options = {"allow_patterns": patterns, "ignore_patterns": "*/*.safetensors"}
    try:
        return Path(snapshot_download(name, revision=revision, **options))
    except Exception as error:  # connection errors come from whichever HTTP library huggingface_hub uses
        raise OSError(f"{name} cannot be downloaded: {one_line(error)}") from error


def _merged(findings: Iterator[Finding], engines: Sequence[str]) -> list[Finding]:
    """The findings about `engines`, errors first; equal findings about several engines are merged into one."""
    merged: dict[tuple, Finding] = {}
    for finding in findings:
        affected = tuple(engine for engine in finding.engines if engine in engines)
        if not affected:
            continue
        content = (finding.severity, finding.key, finding.message)
        if content in merged:
            affected = merged[content].engines + affected
        merged[content] = replace(finding, engines=affected)
    return sorted(merged.values(), key=lambda finding: finding.severity)  # "error" comes before "warning"


def _findings(folder: Path, target: dict, versions: dict[str, str]) -> Iterator[Finding]:
    """
    The findings in a folder: in steps 1 to 3 for all engines, in step 4 for the engines with a version in `versions`.
    It ends at the first error that prevents further checks: in step 1, if `config.json` cannot be read; in step 2, if
    the headers of the weights cannot be read.
    """
    # 1. What it is, by the reader of this package.
    try:
        config = read_json(folder / "config.json")
        canonical_config(config)  # raises `UnknownDrafterError`
        parsed = DFlashDraftConfig.from_pretrained(folder)
    except UnknownDrafterError as error:
        yield Finding("error", ("transformers", LLAMA_CPP), "architectures", one_line(error))
        message = "names a drafter that this package does not know; whether engines can read it is not known."
        yield Finding("warning", SERVERS, "architectures", message, leaves_open=True)
        return
    except Exception as error:  # upstream's own validation raises many types
        yield Finding("error", _ALL_READERS, "config.json", one_line(error))
        return
    # 2. Its files.
    if (folder / "model.safetensors").is_file() and (folder / "model.safetensors.index.json").is_file():
        message = "exists next to model.safetensors.index.json; readers differ in which they use. Remove one."
        yield Finding("error", _ALL_READERS, "model.safetensors", message)
    try:
        shapes = read_shapes(folder)
    except (ValueError, OSError) as error:
        yield Finding("error", _ALL_READERS, "weights", one_line(str(error).removeprefix(f"{folder}: ")))
        return
    # 3. Whether this package and llama.cpp can read it, and whether it fits the target.
    is_quantised = getattr(parsed, "quantization_config", None) is not None
    load_error = _error_of_loading(folder, device="cpu" if is_quantised else "meta")
    if load_error is not None:
        yield Finding("error", (LLAMA_CPP,), "weights", one_line(load_error))
    for key, reason in incompatibilities(parsed, target):
        yield Finding("error", ENGINES, key, one_line(reason))
    resized = resized_vocabulary(parsed, target)
    if resized is not None:  # `generate` drafts the tokens that both have
        message = f"{resized}; whether this engine can decode with such a pair is not known."
        yield Finding("warning", SERVERS, "vocab_size", message, leaves_open=True)
    yield from _limits_of_llama_cpp(parsed, target)
    # 4. What engines read of it.
    drafter = drafter_folder(folder, config, parsed, shapes, target, load_error)
    if drafter.layout in PUBLISHED_LAYOUTS:
        yield from _unknown_tensors(drafter, tensor_names(parsed))
    for limit in LIMITS:
        finding = limit.finding(drafter, versions)
        if finding is not None:
            yield finding


def drafter_folder(
    folder: Path, config: dict, parsed, shapes: dict, target: dict | None = None, load_error: str | None = None
) -> DrafterFolder:
    """
    A drafter's folder with all that limits read.

    Args:
        folder (`Path`): The folder.
        config (`dict`): Its `config.json`.
        parsed (`DFlashDraftConfig`): What this package reads in it.
        shapes (`dict`): From [`read_shapes`].
        target (`dict`, *optional*), load_error (`str`, *optional*): As in [`DrafterFolder`].
    """
    non_default = {key: (value, default) for key, value, default in non_default_fields(parsed)}
    token_head = parsed.token_head_class if parsed.has_token_head else None
    return DrafterFolder(config, folder, target or {}, shapes, non_default, token_head, load_error)


def _findings_of_gguf(file: Path, target: dict) -> Iterator[Finding]:
    try:
        parsed = DFlashDraftConfig.from_dict(gguf_config(file))
    except (ValueError, OSError, ImportError) as error:
        yield Finding("error", (LLAMA_CPP,), "weights", one_line(error))
        return
    yield from _limits_of_llama_cpp(parsed, target)


def _limits_of_llama_cpp(parsed, target: dict) -> Iterator[Finding]:
    for key, reason in llama_cpp_limits(parsed, target or None):
        yield Finding("error", (LLAMA_CPP,), key, one_line(reason))


def _unknown_tensors(drafter: DrafterFolder, renamings: dict[str, str]) -> Iterator[Finding]:
    """Tensors that this package reads under other names, while engines know only the published names."""
    native = NATIVE_NAMES if drafter.layout == "Muse" else {}
    for name in sorted(drafter.shapes):
        published = published_name(name, renamings)
        if name in drafter.own_embeddings:
            message = "is skipped by SGLang, which uses the target's; vLLM loads and uses it."
            yield Finding("error", ("sglang",), name, message)
        elif name != native.get(published, published):
            message = "is unknown: vLLM fails, SGLang skips it. `dflash convert` gives published names."
            yield Finding("error", SERVERS, name, message)


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """
    Shapes of all tensors by name, read from the headers.

    Raises:
        `OSError`: there are no safetensors, or a shard is missing.
        `ValueError`: a file is damaged; names it.
    """
    shapes = {}
    for file in checkpoint_files(str(folder)):
        for name, (_, shape) in read_header(file).items():
            shapes[name] = shape
    return shapes


def _error_of_loading(folder: Path, device: str) -> str | None:
    """
    Load a drafter. On the meta device, that compares the headers with the model and reads no tensor; the tensors of a
    quantised drafter must be read, because its quantiser unpacks them.

    Returns:
        The error of this package's reader; `None` if there is none.
    """
    try:
        with without_bars():
            DFlashDraftModel.from_pretrained(folder, device_map=device)
    except (ValueError, OSError, ImportError) as error:
        return " ".join(str(error).split())
    return None


def _target_config(target) -> dict:
    """A target's configuration as a dictionary; for a multimodal target, its text model's."""
    if hasattr(target, "get_text_config"):
        return target.get_text_config().to_dict()
    if not isinstance(target, dict):
        try:
            if is_gguf(target):
                target = target_config(target)
            elif Path(target).is_file():
                target = read_json(target)
            else:
                target = read_config(str(target), f"target={target}")
        except OSError as error:
            raise ValueError(f"{target} cannot be read: {error}") from error
    return text_part(target)
