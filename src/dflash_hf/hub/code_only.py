"""A pull request that replaces the code beside published weights, and nothing else."""

import fnmatch
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from dflash_hf import __version__
from dflash_hf.files import read_json
from dflash_hf.hub.check import check
from dflash_hf.hub.drafter import OUR_MODEL
from dflash_hf.hub.limits import is_older, version_of
from dflash_hf.hub.publish import PublishError, explained, needs_token
from dflash_hf.modeling.modeling_dflash import code_files
from dflash_hf.repositories import REPOSITORY_ID, is_repository_id


@dataclass
class CodeChange:
    """
    What was, or would be, changed in a repository.

    Args:
        repo (`str`): The repository.
        before (`str`), after (`str`): Versions of its code.
        files (`list[str]`): Files that are replaced or added; of `config.json`, the version alone.
        removed (`list[str]`): Code files that this version no longer has.
        url (`str`, *optional*): The pull request; `None` after a dry run, or if nothing differs.
    """

    repo: str
    before: str
    after: str = __version__
    files: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    url: str | None = None


def publish_code(repo: str, dry_run: bool = False) -> CodeChange:
    """
    Open a pull request in a drafter's repository that replaces its code by this package's. Weights, card and
    configuration stay as they are, except for the version that `config.json` names.

    Args:
        repo (`str`): `"user/name"`.
        dry_run (`bool`): Read the repository, and open nothing.

    Raises:
        `PublishError`: the repository cannot be read, its code is not this package's, this package cannot load its
            drafter or is older than its code, or the pull request was rejected.
    """
    if not is_repository_id(repo):
        raise PublishError(f"repo={repo!r} is not {REPOSITORY_ID}.")
    # 1. The repository: is it a drafter with our code, and can the new code load it?
    api = HfApi()
    with explained(repo):
        info = api.repo_info(repo)
        names = [file.rfilename for file in info.siblings or []]
        fetched = {
            name: Path(api.hf_hub_download(repo, name, revision=info.sha))
            for name in names
            if name == "config.json" or _is_code(name)
        }
        findings = check(repo, ["transformers"])
    config = read_json(fetched["config.json"]) if "config.json" in fetched else {}
    if (config.get("auto_map") or {}).get("AutoModel") != OUR_MODEL:
        raise PublishError(f"{repo}: its config.json names no code of this package, so there is none to replace.")
    if errors := [one for one in findings if one.severity == "error"]:
        raise PublishError(f"{repo} has an error that other code does not mend: {errors[0].key}: {errors[0].message}")
    change = CodeChange(repo, before=version_of(config))
    if is_older(change.after, than=change.before):
        raise PublishError(f"{repo} has code of {change.before}; this is {change.after}: install the newer version.")
    # 2. What differs.
    new = {name: path.read_bytes() for name, path in code_files().items()}
    new["config.json"] = _with_version(fetched["config.json"].read_text(encoding="utf-8")).encode()
    old = {name: path.read_bytes() for name, path in fetched.items()}
    changed = {name: content for name, content in new.items() if old.get(name) != content}
    change.files = sorted(changed)
    change.removed = sorted(name for name in fetched if name not in new)
    if not dry_run and (change.files or change.removed):
        # 3. One pull request.
        needs_token()
        operations = [CommitOperationAdd(name, changed[name]) for name in change.files]
        operations += [CommitOperationDelete(name) for name in change.removed]
        title = f"Code of dflash-hf {change.after}"
        text = f"Replaces the code of {change.before} beside the weights; weights and card are unchanged."
        described = {"commit_message": title, "commit_description": text, "parent_commit": info.sha}
        with explained(repo):
            change.url = api.create_commit(repo, operations, create_pr=True, **described).pr_url
    return change


def _is_code(name: str) -> bool:
    return name == "custom_generate/generate.py" or "/" not in name and fnmatch.fnmatchcase(name, "*_dflash.py")


def _with_version(config: str) -> str:
    """The text of a `config.json` with this package's version, and otherwise as it is."""
    entry = f'"dflash_hf_version": {json.dumps(__version__)}'
    if "dflash_hf_version" in json.loads(config):
        return re.sub(r'"dflash_hf_version":\s*("[^"]*"|null)', entry, config, count=1)
    return config.replace("{", "{\n  " + entry + ",", 1)
