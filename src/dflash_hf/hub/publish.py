"""Publishing a drafter: the preflight, the card, and one commit that holds everything."""

import fnmatch
import json
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id

from dflash_hf.evaluation.report import PLOT_FILE, REPORT_FILE
from dflash_hf.hub.card import RELATIONS, CardFacts, render_card
from dflash_hf.hub.check import check, render
from dflash_hf.hub.engine_rules import Finding
from dflash_hf.modeling.checkpoint_dflash import checkpoint_files
from dflash_hf.weights import check_finite_weights


# What a published drafter consists of, besides its weights. Everything else in the folder stays at home: optimizer
# states, logs, training arguments with their paths.
_PUBLISHED = (
    "config.json",
    "model.safetensors.index.json",
    "*_dflash.py",
    "custom_generate/generate.py",
    "mask_embedding.pt",
    REPORT_FILE,
    PLOT_FILE,
    "LICENSE*",
)


class PublishError(RuntimeError):
    """A drafter was not published; says why, and what to do."""


@dataclass
class Publication:
    """
    What is, or would be, on the Hub.

    Args:
        repo (`str`): The repository.
        files (`dict[str, int]`): Paths in it, and their bytes.
        left_out (`list[str]`): Files of the folder that stay at home.
        card (`ModelCard`): Its README.md.
        findings (`list[Finding]`): What the preflight found: warnings, and engines that cannot serve it.
        url (`str`, *optional*): The commit; `None` after a dry run, or when the repository already held all this.
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
) -> Publication:
    """
    Check a drafter's folder, render its card and upload both in one commit. Nothing is written locally.

    What went wrong half-way is finished by calling it again: weights that arrived are not sent twice, and files that
    did not change make no commit.

    Args:
        folder (`str` or `Path`): The drafter.
        repo (`str`): `"user/name"`; made if it does not exist.
        private (`bool`): Make it a private one.
        dry_run (`bool`): Stop before the network is needed.
        facts (`CardFacts`, *optional*): For the card. Default: the folder's own README.md, else its `card_facts.json`.
        token (`str`, *optional*): Of the Hub. Default: the one of `hf auth login` or `HF_TOKEN`.

    Raises:
        `PublishError`: the folder has errors, its weights are not finite, the metadata is invalid, or the upload was
            refused or interrupted.
    """
    folder = Path(folder)
    try:
        validate_repo_id(repo)
    except ValueError as error:
        raise PublishError(f"repo={repo!r} is not the id of a repository, like 'user/name': {error}") from error

    # 1. The preflight. What only an engine refuses is reported; its launch line is left out of the card.
    findings = check(folder)
    blocking = [finding for finding in findings if finding.severity == "error" and "transformers" in finding.engines]
    if blocking:
        raise PublishError(f"{folder} cannot be published as it is:\n{render(blocking)}")
    try:
        check_finite_weights(folder)
    except ValueError as error:
        raise PublishError(str(error)) from error
    # 2. The card.
    card = _card(folder, repo, facts)
    # 3. The files.
    sources, left_out = _select(folder)
    sizes = {name: path.stat().st_size for name, path in sources.items()}
    sizes["README.md"] = len(str(card).encode())
    result = Publication(repo, dict(sorted(sizes.items())), left_out, card, findings)
    if not dry_run:
        # 4. One commit.
        sources = {**sources, "README.md": str(card).encode()}
        result.url = _upload(repo, sources, private, token)
    return result


def add_arguments(parser) -> None:
    """Arguments of `dflash publish`."""
    parser.add_argument("folder", help="local folder of a drafter")
    parser.add_argument("repo", help="user/name on the Hub")
    parser.add_argument("--private", action="store_true", help="make the repository a private one")
    parser.add_argument("--dry-run", action="store_true", help="list the files and validate the card; upload nothing")
    facts = parser.add_argument_group("facts of the card, besides card_facts.json and eval_report.json of the folder")
    facts.add_argument("--base-model", help="repository of the target")
    facts.add_argument("--base-model-revision", help="its commit")
    facts.add_argument("--base-model-relation", choices=RELATIONS, help="only where one fits")
    facts.add_argument("--license", help="the Hub's short name, such as mit")
    facts.add_argument("--dataset", action="append", dest="datasets", help="repository of training data; repeatable")
    facts.add_argument("--data", help="a sentence about the data")
    facts.add_argument("--hardware", help="what the evaluation ran on")
    facts.add_argument("--evaluated-on", help="dataset of the evaluation")


_FACTS = ("base_model", "base_model_revision", "base_model_relation", "license", "datasets", "data", "hardware")


def run(arguments, echo) -> int:
    """`dflash publish`: `echo` what was or would be uploaded; 1 when it was not."""
    given = {name: getattr(arguments, name) for name in (*_FACTS, "evaluated_on") if getattr(arguments, name)}
    try:
        facts = CardFacts.from_folder(arguments.folder, **given) if given else None
        result = publish(arguments.folder, arguments.repo, arguments.private, arguments.dry_run, facts)
    except (PublishError, ValueError, ImportError) as error:
        echo(f"error: {error}")
        return 1
    if result.findings:
        echo(render(result.findings))
    for name, size in result.files.items():
        echo(f"{size:>14,}  {name}")
    if result.left_out:
        echo(f"not uploaded: {', '.join(result.left_out)}")
    if arguments.dry_run:
        echo(f"The card's metadata is valid:\n{result.card.data.to_yaml()}")
        echo(f"Dry run: nothing was sent to {result.repo}.")
    else:
        echo(result.url or f"{result.repo} already holds all of this: no new commit.")
    return 0


def _card(folder: Path, repo: str, facts: CardFacts | None) -> ModelCard:
    """The card by given facts, else the folder's own, else by the facts that lie there; with valid metadata."""
    own = folder / "README.md"
    try:
        if facts is None and own.is_file():
            card = ModelCard(own.read_text(encoding="utf-8"))
        else:
            card = render_card(folder, facts or CardFacts.from_folder(folder), repo)
        metadata = ModelCard(str(card)).data.to_dict()  # as the Hub reads it
        for name in ("base_model", "datasets"):
            values = metadata.get(name) or []
            for value in [values] if isinstance(values, str) else values:
                validate_repo_id(value)
    except ImportError as error:
        raise PublishError(str(error)) from error
    except Exception as error:  # YAML has errors of its own
        raise PublishError(f"The card of {folder} is not valid: {error}") from error
    if not metadata.get("base_model"):
        raise PublishError(f"{own} names no base_model; add it to its metadata, or pass `--base-model`.")
    return card


def _select(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """What is uploaded, by its path in the repository, and what stays."""
    weights = {Path(file).name for file in checkpoint_files(str(folder))}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    auto_map = config.get("auto_map")
    code = {f"{str(name).split('.')[0]}.py" for name in auto_map.values()} if isinstance(auto_map, dict) else set()
    chosen, left_out = {}, []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or name == "README.md":
            continue
        wanted = name in weights | code or any(fnmatch.fnmatchcase(name, one) for one in _PUBLISHED)
        # `*` also matches a slash: a pattern is meant for its own level.
        if wanted and (name.count("/") == 0 or name == "custom_generate/generate.py"):
            chosen[name] = path
        else:
            left_out.append(name)
    return chosen, left_out


def _upload(repo: str, sources: dict[str, Path | bytes], private: bool, token: str | None) -> str | None:
    """One commit; huggingface_hub shows the progress of large files."""
    if not (token or get_token()):
        raise PublishError("There is no token of the Hub: run `hf auth login`, or set HF_TOKEN, and try again.")
    again = "Nothing was committed; run the same command again, it sends only what is missing."
    try:
        api = HfApi(token=token)
        api.create_repo(repo, private=private or None, exist_ok=True)
        before = api.repo_info(repo)
        operations = [CommitOperationAdd(name, source) for name, source in sources.items()]
        # Shards and code of an earlier version would be read beside the new ones.
        there = [file.rfilename for file in before.siblings or []]
        stale = [name for name in there if name not in sources and _is_ours(name)]
        operations += [CommitOperationDelete(name) for name in stale]
        commit = api.create_commit(repo, operations, commit_message="Upload DFlash drafter")
    except HfHubHTTPError as error:
        status = None if error.response is None else error.response.status_code
        if status == 401:
            reason = "the token is not valid; run `hf auth login` again"
        elif status == 403:
            reason = "the token may not write there; use one with write access, or another repository"
        elif status == 404:
            reason = "the repository was not found, or the token may not see it"
        else:
            reason = f"the Hub answered {status}"
        raise PublishError(f"{repo} was not published: {reason}. {again}\n({error})") from error
    except ValueError as error:  # of the card, or of single files
        raise PublishError(f"{repo} was not published: the Hub refused it ({error}). {again}") from error
    except Exception as error:  # connection errors are of whichever HTTP library huggingface_hub uses
        message = str(error) or repr(error)
        raise PublishError(f"{repo} was not published: the upload was interrupted ({message}). {again}") from error
    return None if commit.oid == before.sha else commit.commit_url


def _is_ours(name: str) -> bool:
    """Whether a file of a repository is one that only a drafter's saving makes."""
    patterns = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "*_dflash.py")
    return "/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
