"""
Whether a name is a folder or a Hub repository.

A missing folder is reported without a request. For a name that could be a repository, the Hub is asked once, without
the retries of libraries, which take a minute.
"""

from pathlib import Path

from dflash_hf._io.errors import one_line


REPOSITORY_ID = "a repository id, like 'user/name': at most 96 letters, digits, '-', '_' and '.', no '--' or '..'"
SECONDS = 10.0  # timeout of the single request to the Hub


def looks_local(name: str) -> bool:
    """Whether a name can only be a path."""
    return name.startswith((".", "/", "~", "\\")) or name.count("/") > 1 or name.endswith("/") or "\\" in name


def is_gguf(name: str | Path) -> bool:
    """Whether a name is that of a GGUF file, and not of a folder that ends in `.gguf` too."""
    return str(name).endswith(".gguf") and not Path(name).is_dir()


def is_repository_id(name: str) -> bool:
    """Whether a name is a valid repository id of the Hub."""
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except ValueError:  # huggingface_hub's own error is one
        return False
    return True


def origin(target) -> dict[str, str]:
    """The repository and commit that a target was loaded from; empty for a local folder."""
    name = target.name_or_path
    if not name or Path(name).exists() or not is_repository_id(name):
        return {}
    result = {"base_model": name}
    commit = getattr(target.config, "_commit_hash", None)
    if commit:
        result["base_model_revision"] = commit
    return result


def check_revision(name: str, argument: str, revision: str | None) -> None:
    """
    Raises:
        `ValueError`: a revision of a local folder or file, which would be ignored.
    """
    if revision and Path(name).expanduser().exists():
        raise ValueError(f"{argument} is on this machine, which has no revisions; leave out the revision {revision}.")


def small_file(name: str, argument: str, revision: str | None, file: str = "config.json") -> Path:
    """
    The path of a model's small file, such as `config.json`: in its folder, where it may be missing, or in the cache,
    for which the Hub is asked once.

    Args:
        name (`str`): Folder or repository.
        argument (`str`): How errors call it, such as `"draft=my-drafter"`.
        revision (`str`, *optional*): Branch, tag or commit of a repository.
        file (`str`): The file's name.

    Raises:
        `OSError`: there is no such folder or repository, or the Hub cannot be reached.
        `ValueError`: as [`check_revision`].
    """
    check_revision(name, argument, revision)
    folder = Path(name).expanduser()
    if folder.exists():
        return folder / file
    if looks_local(name):
        raise FileNotFoundError(f"{argument}: there is no such folder.")
    return Path(_download(name, argument, revision, file))


def _download(name: str, argument: str, revision: str | None, file: str) -> str:
    """The path of a repository's file in the cache; `""` if the repository lacks an optional file."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    missing = f"{argument}: there is no such folder, and"
    if not is_repository_id(name):
        raise FileNotFoundError(f"{missing} it is not a Hub repository name.")
    cached = try_to_load_from_cache(name, file, revision=revision)
    if isinstance(cached, str):
        return cached
    if constants.HF_HUB_OFFLINE:
        raise OSError(f"{missing} the Hub is disabled by HF_HUB_OFFLINE; name a folder, or allow the Hub.")
    try:
        get_hf_file_metadata(hf_hub_url(name, file, revision=revision), timeout=SECONDS)
    except RevisionNotFoundError as error:
        raise OSError(f"{argument}: the repository has no revision {revision}.") from error
    except EntryNotFoundError as error:
        if file != "config.json":
            return ""
        raise OSError(f"{argument}: the repository has no {file}.") from error
    except RepositoryNotFoundError as error:
        remedy = "if it is private or gated, run `hf auth login`"
        raise OSError(f"{missing} the Hub has no model of that name; {remedy}.") from error
    except Exception as error:  # from whichever HTTP library huggingface_hub uses
        reason = f"{type(error).__name__}: {one_line(error, 80)}"
        raise OSError(f"{missing} the Hub cannot be reached ({reason}).") from error
    return hf_hub_download(name, file, revision=revision)
