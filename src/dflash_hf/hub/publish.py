"""
`publish`: check a drafter's folder, render its model card, and upload both in one commit.

It has two parts, which a training run calls one after the other: [`prepare`] reads the folder and no more, and
[`compare`] and `upload` talk to the Hub. The calls of the Hub that `code_only` needs as well are in `commits`.
"""

import filecmp
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from transformers.dynamic_module_utils import get_relative_imports

from dflash_hf._io.errors import one_line
from dflash_hf._io.files import read_json
from dflash_hf._io.names import LLAMA_CPP, PLOT_FILE, REPORT_FILE
from dflash_hf._io.progress import without_bars
from dflash_hf._io.repositories import REPOSITORY_ID, SECONDS, is_repository_id
from dflash_hf._io.weights import check_finite
from dflash_hf.conversion.gguf_names import FILE_PATTERNS, gguf_files_in
from dflash_hf.conversion.gguf_read import gguf_config, weights_digest_of
from dflash_hf.conversion.gguf_write import write_gguf
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.evaluation.report_files import check_report
from dflash_hf.hub.card import CardFacts, code_of, has_own_card, is_rendered, render_card
from dflash_hf.hub.check import check
from dflash_hf.hub.code_version import CODE_ENTRY, CODE_MODULES, check_not_newer, with_version
from dflash_hf.hub.commits import (
    Changes,
    HubError,
    PublishError,
    compare_with_repository,
    explain_hub_errors,
    matches_any,
    upload,
)
from dflash_hf.hub.findings import Finding
from dflash_hf.layouts.checkpoint_files import checkpoint_files
from dflash_hf.layouts.head_schemas import engine_method
from dflash_hf.layouts.read import is_drafter_config
from dflash_hf.modeling.modeling_dflash import MASK_EMBEDDING
from dflash_hf.targets.digests import digest_of_parameters


_ADAPTER = "adapter_config.json"
# Files that can only come from saving a drafter.
_DRAFTER_FILES = ("model.safetensors.index.json", CODE_ENTRY, MASK_EMBEDDING, *FILE_PATTERNS, REPORT_FILE, PLOT_FILE)
# The files of a published drafter, besides its weights and code. Everything else in the folder is not uploaded:
# optimizer states, logs, training arguments with their paths, and code that is not the drafter's.
_PUBLISHED = (
    "config.json",
    *_DRAFTER_FILES,
    "LICENSE*",
    "adapters/*/adapter_model.safetensors",
    f"adapters/*/{_ADAPTER}",
)
_MODEL_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json")
# Files of a former version of the drafter, which are deleted: readers would take them for the new one's.
_OBSOLETE_FILES = (
    *_DRAFTER_FILES,
    CODE_MODULES,
    "model.safetensors",
    "model-*-of-*.safetensors",
    ".eval_results/dflash.yaml",
)


@dataclass
class Publication:
    """
    The result of [`publish`].

    Args:
        repo (`str`): The repository.
        contents (`dict[str, Path | bytes]`): The files, by their paths in it.
        left_out (`list[str]`): Names of the files of the folder that are not uploaded.
        card (`ModelCard`): Its README.md.
        findings (`list[Finding]`): Findings of the preflight: warnings, and engines that cannot serve it.
        changes (`Changes`, *optional*): What it changes there; `None` if a dry run could not reach the Hub.
        comparison_error (`str`): Why a dry run could not reach it; empty otherwise.
        url (`str`, *optional*): The commit; `None` after a dry run, or if the repository was already up to date.
    """

    repo: str
    contents: dict[str, Path | bytes]
    left_out: list[str]
    card: ModelCard
    findings: list[Finding]
    changes: Changes | None = None
    comparison_error: str = ""
    url: str | None = None

    @property
    def files(self) -> dict[str, int]:
        """Sizes of the files in bytes, by their paths in the repository."""
        sizes = {}
        for name, content in self.contents.items():
            sizes[name] = len(content) if isinstance(content, bytes) else content.stat().st_size
        return sizes


def publish(
    folder: str | Path,
    repo: str,
    private: bool = False,
    dry_run: bool = False,
    facts: CardFacts | None = None,
    token: str | None = None,
    gguf_target: str | Path | None = None,
    replace_card: bool = False,
    announce: Callable[[Publication], None] = lambda publication: None,
    revision: str | None = None,
) -> Publication:
    """
    Check a drafter's folder, render its card and upload both in one commit. If `config.json` names this package's
    code, the current version of it is uploaded; other code that `auto_map` names is uploaded as it is.

    Files of the same names are replaced in the repository, and files of a former version of the drafter are deleted;
    all others stay. To finish an interrupted upload, call it again: uploaded weights are not sent twice, and there is
    no commit if nothing changes.

    Args:
        folder (`str` or `Path`): The drafter.
        repo (`str`): `"user/name"`; created if it does not exist.
        private (`bool`): Create it as a private repository; an existing public one is rejected.
        dry_run (`bool`): Have the Hub check the card and compare with the repository, if it can be reached, and send
            nothing.
        facts (`CardFacts`, *optional*): For the card. Default: the folder's own README.md if it was written by hand,
            else its `card_facts.json`.
        token (`str`, *optional*): Hub token. Default: the token of `hf auth login` or `HF_TOKEN`.
        gguf_target (`str` or `Path`, *optional*): The target's GGUF file, folder or repository: `dflash-<name>.gguf`
            is (re)created in `folder` for llama.cpp, which finds it in the repository by its name.
        replace_card (`bool`): Also replace a README.md of the repository that was written by hand.
        announce (`Callable`): Called with the result before anything is sent.
        revision (`str`, *optional*): The branch to commit to, which is created if it does not exist. Default: the
            main one.

    Raises:
        `PublishError`: the folder has errors, its weights are not finite, its report belongs to other weights, the
            metadata is invalid, the repository holds another model or a card written by hand, or it was changed
            meanwhile, or the upload was rejected or interrupted.
    """
    result = prepare(Path(folder), repo, facts, gguf_target)
    api = HfApi(token=token)
    try:
        changes = compare(api, result, private, replace_card, revision)
    except HubError as error:
        if not dry_run or isinstance(error.__cause__, ValueError):  # the card was rejected
            raise
        result.comparison_error = one_line(error.__cause__)
    announce(result)
    if not dry_run:
        result.url = upload(api, repo, changes, private)
    return result


def prepare(
    folder: Path, repo: str, facts: CardFacts | None = None, gguf_target: str | Path | None = None
) -> Publication:
    """
    What [`publish`] would upload, without the Hub: the preflight, then the weights and the card, then the files. Only
    a folder without errors gets a card. The arguments are those of `publish`.

    Raises:
        `PublishError`: the folder cannot be published as it is.
    """
    if not is_repository_id(repo):
        raise PublishError(f"repo={repo!r} is not {REPOSITORY_ID}.")
    if (folder / _ADAPTER).is_file() and not (folder / "config.json").exists():
        raise PublishError(
            f"{folder} holds only an adapter: publish the drafter that it is merged into, which "
            "`dflash_hf.training.adapters.merged(trainer.model).save_pretrained(folder)` saves."
        )
    # 1. The preflight. Errors of single engines are only reported; their launch lines are left out of the card.
    try:
        code = code_of(folder)
    except ValueError as error:  # config.json is damaged
        raise PublishError(f"{folder} cannot be published as it is: {one_line(error, 1000)}") from error
    if code:
        check_not_newer(read_json(folder / "config.json"), folder)
    findings = [finding for finding in check(folder) if finding.key not in (*code, "dflash_hf_version")]
    for name, current in code.items():
        if (folder / name).is_file() and not filecmp.cmp(folder / name, current, shallow=False):
            message = "is replaced by this version's; code of your own needs another name, also in auto_map."
            findings.append(Finding("warning", ("transformers",), name, message))
    blocking = [finding for finding in findings if finding.severity == "error" and "transformers" in finding.engines]
    if blocking:
        more = f" (and {len(blocking) - 1} more: `dflash check {folder}`)" if len(blocking) > 1 else ""
        first = f"{blocking[0].key}: {one_line(blocking[0].message, 200)}"
        raise PublishError(f"{folder} cannot be published as it is: {first}{more}")
    # 2. The weights, read once; llama.cpp's file, and the card.
    try:
        with without_bars():
            draft = DFlashDraftModel.from_pretrained(folder)
        check_finite(draft.named_parameters())
        findings += _write_and_check_gguf(folder, draft, repo, gguf_target)
        card = _card(folder, draft, repo, facts)
    except (ValueError, OSError, ImportError) as error:
        raise PublishError(f"{folder} cannot be published as it is: {one_line(error, 1000)}") from error
    # 3. The files.
    sources, left_out = _select(folder, code)
    if facts is None and has_own_card(folder):
        readme = (folder / "README.md").read_bytes()
    else:
        readme = str(card).encode()
    contents: dict[str, Path | bytes] = {**sources, **code, "README.md": readme}
    if code:
        contents["config.json"] = with_version((folder / "config.json").read_text(encoding="utf-8")).encode()
    contents |= _adapter_configs(sources, repo)
    return Publication(repo, dict(sorted(contents.items())), left_out, card, findings)


def _adapter_configs(sources: dict[str, Path], repo: str) -> dict[str, bytes]:
    """The configurations of adapters among the files, which name the repository in place of a local folder."""
    configs = {}
    for name, source in sources.items():
        if name.endswith(_ADAPTER):
            adapter = {**read_json(source), "base_model_name_or_path": repo}
            configs[name] = (json.dumps(adapter, indent=2, sort_keys=True) + "\n").encode()
    return configs


def _write_and_check_gguf(
    folder: Path, draft: DFlashDraftModel, repo: str, target: str | Path | None
) -> list[Finding]:
    """
    Create the GGUF file if there is a `target`, and check that each GGUF file of the folder was made of this drafter.
    """
    if target is not None:
        name = repo.rpartition("/")[2].lower().removeprefix("dflash-")
        write_gguf(draft, folder / f"{engine_method(draft.config)}-{name}.gguf", target)
    weights = digest_of_parameters(draft.named_parameters())
    findings = []
    for file in gguf_files_in(folder):
        made_of = weights_digest_of(file)
        config = gguf_config(file)
        if made_of is None:
            message = "does not say of which weights it was made; recreate it with --gguf if these have changed since."
            findings.append(Finding("warning", (LLAMA_CPP,), file.name, message))
            continue
        if made_of != weights:
            raise ValueError(f"{file.name} was made of other weights; remove it, or recreate it with --gguf.")
        changed = _changed_fields(draft.config, config)
        if changed:
            raise ValueError(
                f"{file.name} was made before config.json changed ({', '.join(changed)}); remove it, or recreate it "
                "with --gguf."
            )
    return findings


def _changed_fields(config, before: dict) -> list[str]:
    """The fields in which a drafter's configuration differs from the one in its GGUF file."""
    fields = config.to_dict()
    fields_before = type(config).from_dict(before).to_dict()
    irrelevant = ("auto_map", "transformers_version", "dtype", "trained_length", "_name_or_path")
    keys = sorted({*fields, *fields_before} - {*irrelevant})
    return [key for key in keys if fields.get(key) != fields_before.get(key)]


def _card(folder: Path, draft: DFlashDraftModel, repo: str, facts: CardFacts | None) -> ModelCard:
    """The card rendered from `facts`; without them, the folder's own card, else one rendered from its facts."""
    try:
        if facts is None and has_own_card(folder):
            card = ModelCard((folder / "README.md").read_text(encoding="utf-8"))
        else:
            card = render_card(folder, facts or CardFacts.from_folder(folder), repo)
        targets = ModelCard(str(card)).data.to_dict().get("base_model") or []  # as the Hub parses it
    except ImportError:
        raise
    except Exception as error:  # YAML has its own errors
        raise ValueError(f"the card is not valid: {error}") from error
    if not targets:
        raise ValueError("README.md names no base_model; add it to its metadata.")
    check_report(folder, draft, [targets] if isinstance(targets, str) else targets)
    return card


def _select(folder: Path, code: dict[str, Path]) -> tuple[dict[str, Path], list[str]]:
    """The files to upload besides card and `code`, by path in the repository, and those left out."""
    wanted = {Path(file).name for file in checkpoint_files(str(folder))} | _own_code(folder, code)
    chosen = {}
    left_out = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or name == "README.md" or name in code:
            continue
        if name not in wanted and not matches_any(name, _PUBLISHED):
            left_out.append(name)
            continue
        chosen[name] = path
        real_path = path.resolve()
        if not real_path.is_file() or not real_path.is_relative_to(folder.resolve()):  # anywhere on this machine
            remedy = "copy the file there, or remove the link"
            raise PublishError(f"{name} of {folder} is a link to {real_path}, outside the folder; {remedy}.")
    return chosen, left_out


def _own_code(folder: Path, code: dict[str, Path]) -> set[str]:
    """Files besides `code` that hold a class that `auto_map` names, and the files that these import."""
    own_code: set[str] = set()
    waiting: list[Path] = []
    auto_map = read_json(folder / "config.json").get("auto_map")
    for value in auto_map.values() if isinstance(auto_map, dict) else ():
        module, _, name = str(value).partition(".")
        path = folder / f"{module}.py"
        class_statement = rf"(?m)^class {re.escape(name)}\b"
        if path.is_file() and re.search(class_statement, path.read_text(encoding="utf-8", errors="replace")):
            waiting.append(path)
    while waiting:
        path = waiting.pop()
        if path.name not in own_code and path.name not in code and path.is_file():
            own_code.add(path.name)
            waiting += [folder / f"{module}.py" for module in get_relative_imports(path)]
    return own_code


def compare(
    api: HfApi, result: Publication, private: bool, replace_card: bool = False, revision: str | None = None
) -> Changes:
    """
    Have the Hub check the card, and compare with the repository. The other arguments are those of [`publish`].

    Returns:
        `Changes`: What the commit changes there, which is also set in `result`.

    Raises:
        `PublishError`: the Hub rejects the card or cannot be reached; the repository is public and should be private,
            or it holds another model, or a card written by hand.
    """
    with explain_hub_errors(result.repo, "Nothing was sent; run the same command again."):
        result.card.validate(repo_type="model")  # by the Hub's own rules, before anything is created there
        result.changes = _changes(api, result, private, replace_card, revision)
        return result.changes


def _changes(api: HfApi, result: Publication, private: bool, replace_card: bool, revision: str | None) -> Changes:
    """What the commit changes in the repository, see [`compare`]."""
    repo = result.repo
    creates_branch = False
    try:
        try:
            info = api.repo_info(repo, revision=revision, files_metadata=True, timeout=SECONDS)
        except RevisionNotFoundError:
            creates_branch = True
            info = api.repo_info(repo, files_metadata=True, timeout=SECONDS)
    except RepositoryNotFoundError:
        operations = [CommitOperationAdd(name, content) for name, content in result.contents.items()]
        creates_branch = revision is not None
        return Changes(list(result.contents), revision=revision, creates_branch=creates_branch, operations=operations)
    if private and not info.private:
        raise PublishError(f"{repo} exists and is public: make it private on the Hub first, or drop --private.")
    changes = compare_with_repository(info, result.contents, _OBSOLETE_FILES)
    changes.revision = revision
    changes.creates_branch = creates_branch

    def read(name: str) -> str:
        file = api.hf_hub_download(repo, name, revision=info.sha)
        return Path(file).read_text(encoding="utf-8", errors="replace")

    names = [file.rfilename for file in info.siblings or []]
    model_files = [name for name in changes.replaced if matches_any(name, _MODEL_FILES)] + changes.deleted
    if model_files and not ("config.json" in names and _is_drafter(read("config.json"))):
        raise PublishError(
            f"{repo} holds another model, whose {', '.join(model_files[:3])} would be replaced or deleted: name a "
            "repository of its own for the drafter."
        )
    if "README.md" in changes.replaced and not replace_card and not is_rendered(read("README.md")):
        raise PublishError(
            f"{repo} has a README.md that was written or edited by hand, and is not this one: put it into the folder "
            "to keep it, or replace it with --replace-card."
        )
    return changes


def _is_drafter(config: str) -> bool:
    """Whether the text of a `config.json` describes a drafter."""
    try:
        return is_drafter_config(json.loads(config))
    except (ValueError, AttributeError, TypeError):  # damaged
        return False
