"""Publishing a drafter: the preflight, the card, and one commit that holds everything."""

import filecmp
import fnmatch
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, get_token

from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.evaluation.report import PLOT_FILE, REPORT_FILE
from dflash_hf.files import atomic, read_json
from dflash_hf.gguf_format import FILE_PATTERN, gguf_config, write_gguf
from dflash_hf.hub.card import CardFacts, is_rendered, missing_code, render_card
from dflash_hf.hub.check import check
from dflash_hf.hub.drafter import Finding
from dflash_hf.hub.licenses import check_license
from dflash_hf.layouts.heads import engine_method
from dflash_hf.layouts.weights import checkpoint_files
from dflash_hf.modeling.modeling_dflash import MASK_EMBEDDING
from dflash_hf.repositories import REPOSITORY_ID, is_repository_id
from dflash_hf.terminal import one_line


_ADAPTER = "adapter_config.json"
# Files that can only come from saving a drafter.
_OURS = ("model.safetensors.index.json", "*_dflash.py", MASK_EMBEDDING, FILE_PATTERN, REPORT_FILE, PLOT_FILE)
# The files of a published drafter, besides its weights. Everything else in the folder is not uploaded: optimizer
# states, logs, training arguments with their paths.
_ADAPTERS = ("adapters/*/adapter_model.safetensors", f"adapters/*/{_ADAPTER}")
_PUBLISHED = ("config.json", *_OURS, "custom_generate/generate.py", "LICENSE*", *_ADAPTERS)


_REFUSALS: dict[int | None, str] = {
    401: "the token is invalid; run `hf auth login` again",
    403: "the token may not write there; use one with write access, or another repository",
    404: "the repository was not found, or the token has no access to it",
}


class PublishError(RuntimeError):
    """A drafter was not published; says why, and what to do."""


@dataclass
class Publication:
    """
    What was, or would be, published.

    Args:
        repo (`str`): The repository.
        files (`dict[str, int]`): Paths in it, and their sizes in bytes.
        left_out (`list[str]`): Files of the folder that are not uploaded.
        card (`ModelCard`): Its README.md.
        findings (`list[Finding]`): Findings of the preflight: warnings, and engines that cannot serve it.
        url (`str`, *optional*): The commit; `None` after a dry run, or if the repository was already up to date.
    """

    repo: str
    files: dict[str, int]
    left_out: list[str]
    card: ModelCard
    findings: list[Finding]
    url: str | None = None


def publish(
    folder: str | Path,
    repo: str,
    private: bool = False,
    dry_run: bool = False,
    facts: CardFacts | None = None,
    token: str | None = None,
    write_to: str | Path | None = None,
    gguf_target: str | Path | None = None,
) -> Publication:
    """
    Check a drafter's folder, render its card and upload both in one commit, with this package's code if the folder
    names it but does not contain it.

    Call again to finish an interrupted upload: uploaded weights are not sent twice, and unchanged files make no
    commit.

    Args:
        folder (`str` or `Path`): The drafter.
        repo (`str`): `"user/name"`; created if it does not exist.
        private (`bool`): Create it as a private repository; an existing public one is rejected.
        dry_run (`bool`): Stop before the network is needed.
        facts (`CardFacts`, *optional*): For the card. Default: the folder's own README.md, else its `card_facts.json`.
        token (`str`, *optional*): Hub token. Default: the token of `hf auth login` or `HF_TOKEN`.
        write_to (`str` or `Path`, *optional*): A folder that also receives every file. Of the files there, only a card
            that was rendered is replaced.
        gguf_target (`str` or `Path`, *optional*): The target's GGUF file, folder or repository: `dflash-<name>.gguf`
            is (re)created in `folder` for llama.cpp, which finds it in the repository by its name.

    Raises:
        `PublishError`: the folder has errors, its weights are not finite, the metadata is invalid, `write_to` holds
            other files of the same names, or the upload was rejected or interrupted.
    """
    folder = Path(folder)
    if not is_repository_id(repo):
        raise PublishError(f"repo={repo!r} is not {REPOSITORY_ID}.")
    if (folder / _ADAPTER).is_file() and not (folder / "config.json").exists():
        raise PublishError(
            f"{folder} holds an adapter alone: publish the drafter that it is merged into, which "
            "`dflash_hf.training.adapters.merged(trainer.model).save_pretrained(folder)` saves."
        )

    # 1. The preflight. Errors of single engines are only reported; their launch lines are left out of the card.
    code = missing_code(folder)
    findings = [finding for finding in check(folder, weights=True) if finding.key not in code]
    blocking = [finding for finding in findings if finding.severity == "error" and "transformers" in finding.engines]
    if blocking:
        more = f" (and {len(blocking) - 1} more: `dflash check {folder}`)" if len(blocking) > 1 else ""
        first = f"{blocking[0].key}: {one_line(blocking[0].message, 200)}"
        raise PublishError(f"{folder} cannot be published as it is: {first}{more}")
    # 2. llama.cpp's file, and the card.
    _lay_gguf(folder, repo, gguf_target)
    card = _card(folder, repo, facts)
    # 3. The files.
    sources, left_out = _select(folder)
    sources |= code
    sizes = {name: path.stat().st_size for name, path in sources.items()}
    made = {"README.md": str(card).encode()}
    for name in (name for name in sources if name.endswith(_ADAPTER)):  # trained on a local folder
        base = {**read_json(sources[name]), "base_model_name_or_path": repo}
        made[name] = (json.dumps(base, indent=2, sort_keys=True) + "\n").encode()
    sizes |= {name: len(content) for name, content in made.items()}
    result = Publication(repo, dict(sorted(sizes.items())), left_out, card, findings)
    everything: dict[str, Path | bytes] = {**sources, **made}
    if write_to is not None:
        _check_place(Path(write_to), everything)
        for name, source in everything.items():
            path = Path(write_to) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic(path) as half:
                if isinstance(source, bytes):
                    half.write_bytes(source)
                else:
                    shutil.copy2(source, half)  # a GGUF file is compared with the weights by time
    if not dry_run:
        # 4. One commit.
        result.url = _upload(repo, everything, card, private, token)
    return result


def _lay_gguf(folder: Path, repo: str, target: str | Path | None) -> None:
    """Create the file for llama.cpp, and check that every such file is a drafter and newer than the weights."""
    try:
        if target is not None:
            name = repo.rpartition("/")[2].lower().removeprefix("dflash-")
            draft = DFlashDraftModel.from_pretrained(folder)
            write_gguf(draft, folder / f"{engine_method(draft.config)}-{name}.gguf", target)
        for file in sorted(folder.glob(FILE_PATTERN)):
            gguf_config(file)
            if file.stat().st_mtime < max(Path(one).stat().st_mtime for one in checkpoint_files(str(folder))):
                raise ValueError(f"{file.name} is older than the weights; remove it, or recreate it with --gguf.")
    except (ValueError, OSError, ImportError) as error:
        raise PublishError(f"{folder} cannot be published as it is: {one_line(error, 200)}") from error


def has_own_card(folder: str | Path) -> bool:
    """Whether a folder's README.md was written or edited by hand."""
    own = Path(folder) / "README.md"
    return own.is_file() and not is_rendered(own.read_text(encoding="utf-8", errors="replace"))


def _check_place(folder: Path, files: dict[str, Path | bytes]) -> None:
    """Files of the same names may only be there with the same content, except a rendered card."""
    kept = has_own_card(folder)
    for name, source in files.items():
        path = folder / name
        if not path.exists() or name == "README.md" and not kept:
            continue
        if path.read_bytes() != source if isinstance(source, bytes) else not filecmp.cmp(source, path, shallow=False):
            raise PublishError(f"{path} exists, and would be replaced; remove it, or name a new folder.")


def _card(folder: Path, repo: str, facts: CardFacts | None) -> ModelCard:
    """The card from given facts, else the folder's own card, else from the facts in it; with valid metadata."""
    own = folder / "README.md"
    try:
        if facts is None and own.is_file():
            card = ModelCard(own.read_text(encoding="utf-8"))
        else:
            card = render_card(folder, facts or CardFacts.from_folder(folder), repo)
        metadata = ModelCard(str(card)).data.to_dict()  # as the Hub parses it
        check_license(metadata, folder)
        for name in ("base_model", "datasets"):
            values = metadata.get(name) or []
            for value in [values] if isinstance(values, str) else values:
                if not is_repository_id(value):
                    raise ValueError(f"{name}: {value!r} is not {REPOSITORY_ID}.")
    except ImportError as error:
        raise PublishError(str(error)) from error
    except Exception as error:  # YAML has its own errors
        raise PublishError(f"The card of {folder} is not valid: {error}") from error
    if not metadata.get("base_model"):
        raise PublishError(f"{own} names no base_model; add it to its metadata.")
    return card


def _select(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """The files to upload, by path in the repository, and those left out."""
    weights = {Path(file).name for file in checkpoint_files(str(folder))}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    code = _code(folder, config.get("auto_map"))
    chosen, left_out = {}, []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or name == "README.md":
            continue
        if name not in weights | code and not _is_one_of(name, _PUBLISHED):
            left_out.append(name)
            continue
        chosen[name], real = path, path.resolve()
        if not real.is_file() or not real.is_relative_to(folder.resolve()):  # anywhere on this machine
            remedy = "copy the file there, or remove the link"
            raise PublishError(f"{name} of {folder} is a link to {real}, outside the folder; {remedy}.")
    return chosen, left_out


def _code(folder: Path, auto_map) -> set[str]:
    """Files next to the weights that `auto_map` names and that contain the named class."""
    found = set()
    for value in auto_map.values() if isinstance(auto_map, dict) else ():
        module, _, name = str(value).partition(".")
        path, its_class = folder / f"{module}.py", rf"(?m)^class {re.escape(name)}\b"
        if path.is_file() and re.search(its_class, path.read_text(encoding="utf-8", errors="replace")):
            found.add(path.name)
    return found


def needs_token(token: str | None = None) -> None:
    """
    Raises:
        `PublishError`: there is no token of the Hub.
    """
    if not (token or get_token()):
        raise PublishError("There is no Hub token: run `hf auth login`, or set HF_TOKEN, and try again.")


@contextmanager
def explained(repo: str, again: str = "Nothing was committed; run the same command again.") -> Iterator[None]:
    """Around calls of the Hub: what went wrong there, as a `PublishError` with the remedy."""
    try:
        yield
    except PublishError:
        raise
    except Exception as error:  # connection errors come from whichever HTTP library huggingface_hub uses
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = "the Hub rejected it" if isinstance(error, ValueError) else "the upload was interrupted"
        reason = _REFUSALS.get(status, reason if status is None else f"the Hub answered {status}")
        said = one_line(str(error) or repr(error), 120)
        raise PublishError(f"{repo} was not published: {reason} ({said}). {again}") from error


def _upload(
    repo: str, sources: dict[str, Path | bytes], card: ModelCard, private: bool, token: str | None
) -> str | None:
    """One commit; huggingface_hub shows the progress of large files."""
    needs_token(token)
    with explained(repo, "Nothing was committed; run the same command again to upload the rest."):
        card.validate(repo_type="model")  # by the Hub's own rules, before anything is created there
        api = HfApi(token=token)
        api.create_repo(repo, private=private or None, exist_ok=True)
        before = api.repo_info(repo)
        if private and not before.private:
            raise PublishError(f"{repo} exists and is public: make it private on the Hub first, or drop --private.")
        operations = [CommitOperationAdd(name, source) for name, source in sources.items()]
        # Shards and code of an earlier version would be read along with the new files.
        there = [file.rfilename for file in before.siblings or []]
        ours = (*_OURS, "model.safetensors", "model-*-of-*.safetensors", ".eval_results/dflash.yaml")
        stale = [name for name in there if name not in sources and _is_one_of(name, ours)]
        operations += [CommitOperationDelete(name) for name in stale]
        commit = api.create_commit(repo, operations, commit_message="Upload DFlash drafter")
    return None if commit.oid == before.sha else commit.commit_url


def _is_one_of(name: str, patterns: Sequence[str]) -> bool:
    """Whether a file matches a pattern of its own level: `*` would also match a slash."""
    return any(one.count("/") == name.count("/") and fnmatch.fnmatchcase(name, one) for one in patterns)
