"""`publish_code`: a pull request that replaces only the code beside published weights."""

from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import HfApi

from dflash_hf import __version__
from dflash_hf._io.errors import one_line
from dflash_hf._io.files import read_json
from dflash_hf._io.repositories import REPOSITORY_ID, is_repository_id
from dflash_hf.hub.code_version import (
    CODE_ENTRY,
    CODE_MODULES,
    check_not_newer,
    uses_package_code,
    version_of,
    with_version,
)
from dflash_hf.hub.commits import PublishError, compare_with_repository, explain_hub_errors
from dflash_hf.layouts.configuration import DFlashDraftConfig
from dflash_hf.modeling.modeling_dflash import code_files


@dataclass
class CodeChange:
    """
    The result of [`publish_code`].

    Args:
        repo (`str`): The repository.
        before (`str`), after (`str`): Versions of its code.
        files (`list[str]`): Files that are replaced or added; in `config.json`, only the version changes.
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
    remedy = "Nothing was changed; run the same command again."
    with explain_hub_errors(repo, remedy):
        info = api.repo_info(repo, files_metadata=True)
        file = None
        if any(sibling.rfilename == "config.json" for sibling in info.siblings or []):
            file = Path(api.hf_hub_download(repo, "config.json", revision=info.sha))
    try:
        config = {} if file is None else read_json(file)
    except ValueError as error:
        raise PublishError(f"{repo}: its config.json cannot be read: {one_line(error)}") from error
    if file is None or not uses_package_code(config):
        raise PublishError(f"{repo}: its config.json names no code of this package, so there is none to replace.")
    try:
        DFlashDraftConfig.from_dict(config)
    except Exception as error:  # upstream's own validation raises many types
        raise PublishError(
            f"{repo} has an invalid config.json, with which new code would not load either: {one_line(error)}"
        ) from error
    check_not_newer(config, repo)
    # 2. What differs.
    contents = {**code_files(), "config.json": with_version(file.read_text(encoding="utf-8")).encode()}
    changes = compare_with_repository(info, contents, deletable=(CODE_MODULES, CODE_ENTRY))
    change = CodeChange(
        repo, version_of(config), files=sorted(changes.added + changes.replaced), removed=changes.deleted
    )
    if changes.operations and not dry_run:
        # 3. One pull request.
        title = f"Code of dflash-hf {change.after}"
        note = f"Replaces the code of {change.before} beside the weights; weights and card are unchanged."
        description = {"commit_message": title, "commit_description": note, "parent_commit": changes.parent}
        with explain_hub_errors(repo, remedy):
            change.url = api.create_commit(repo, changes.operations, create_pr=True, **description).pr_url
    return change
