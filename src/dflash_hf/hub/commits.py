"""
Commits to a repository of the Hub: what they change, the upload, and errors of the Hub in plain words.

Used by `publish` and `code_only`.
"""

import fnmatch
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from dflash_hf._io.errors import one_line


class PublishError(RuntimeError):
    """A drafter was not published; the message says why, and what to do."""


class HubError(PublishError):
    """
    The Hub rejected a request, or could not be reached.

    Args:
        message (`str`): What was not done, why, and what to do.
        reason (`str`): Only why.
    """

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason


@dataclass
class Changes:
    """
    What a commit changes in a repository. Files that it does not name stay as they are.

    Args:
        added (`list[str]`), replaced (`list[str]`), deleted (`list[str]`): Names of files.
        parent (`str`, *optional*): The commit that was compared, which must still be the newest when the change
            arrives; `None` if there is no such repository.
        revision (`str`, *optional*): The branch that is changed. Default: the main one.
        creates_branch (`bool`): Whether there is no such branch yet: it begins at the main one.
        operations (`list`): The same changes as arguments of `HfApi.create_commit`; empty if nothing changes.
    """

    added: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    parent: str | None = None
    revision: str | None = None
    creates_branch: bool = False
    operations: list = field(default_factory=list)


@contextmanager
def explain_hub_errors(repo: str, remedy: str) -> Iterator[None]:
    """A context manager around calls of the Hub that turns their errors into a `HubError` with a remedy."""
    try:
        yield
    except PublishError:
        raise
    except Exception as error:  # connection errors come from whichever HTTP library huggingface_hub uses
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            reason = f"the Hub answered {status}"
        elif isinstance(error, ValueError):
            reason = "the Hub rejected it"
        else:
            reason = "the connection was interrupted"
        message = one_line(getattr(error, "server_message", None) or str(error) or repr(error), 160)
        reason = f"{reason} ({message})"
        if status in (401, 403, 404):
            remedy = "Log in with `hf auth login`, or set HF_TOKEN: its token must have access there. " + remedy
        raise HubError(f"{repo} was not published: {reason}. {remedy}", reason) from error


def compare_with_repository(info, contents: dict[str, Path | bytes], deletable: Sequence[str]) -> Changes:
    """
    Compare files with the files of a repository.

    Args:
        info (`ModelInfo`): The repository, with `files_metadata`.
        contents (`dict`): The files, by their paths in it.
        deletable (`Sequence[str]`): Patterns of the files that are deleted there if `contents` lacks them.
    """
    files = {file.rfilename: file for file in info.siblings or []}
    changes = Changes(parent=info.sha)
    for name, content in contents.items():
        operation = CommitOperationAdd(name, content)
        if name not in files:
            changes.added.append(name)
        elif not _is_same(operation, files[name]):
            changes.replaced.append(name)
        else:
            continue
        changes.operations.append(operation)
    changes.deleted = sorted(name for name in files if name not in contents and matches_any(name, deletable))
    changes.operations += map(CommitOperationDelete, changes.deleted)
    return changes


def _is_same(operation: CommitOperationAdd, hub_file) -> bool:
    """Whether a file of a repository has the content to be committed."""
    if hub_file.lfs is not None:
        return hub_file.lfs.sha256 == operation.upload_info.sha256.hex()
    with operation.as_file() as file:
        content = file.read()
    # Git's digest of a blob.
    return hub_file.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def upload(
    api: HfApi, repo: str, changes: Changes, private: bool, message: str = "Upload DFlash drafter"
) -> str | None:
    """
    Make one commit on top of `changes.parent`; a repository or branch that does not exist is created. huggingface_hub
    shows the progress of large files.

    Returns:
        The commit's URL; `None` if nothing changes.

    Raises:
        `HubError`: the Hub rejected the commit, or could not be reached.
    """
    if not changes.operations:
        return None
    with explain_hub_errors(repo, "Nothing was committed; run the same command again to upload the rest."):
        if changes.parent is None:
            api.create_repo(repo, private=private or None)
            changes.parent = api.repo_info(repo).sha
        if changes.creates_branch and changes.revision is not None:
            api.create_branch(repo, branch=changes.revision, exist_ok=True)
        options = {"commit_message": message, "parent_commit": changes.parent, "revision": changes.revision}
        return api.create_commit(repo, changes.operations, **options).commit_url


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Whether a path matches a pattern with as many slashes; in `fnmatch`, `*` also matches a slash."""
    same_level = [pattern for pattern in patterns if pattern.count("/") == name.count("/")]
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in same_level)
