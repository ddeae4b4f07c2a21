"""Drafters of a target on the Hub, found by the `base_model` of their cards."""

from dataclasses import dataclass
from itertools import islice

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import get_session

from dflash_hf.repositories import SECONDS, is_repository_id
from dflash_hf.terminal import one_line


@dataclass
class FoundDrafter:
    """A repository that calls itself a DFlash drafter of a target."""

    repo: str
    downloads: int
    likes: int


def find_drafters(target: str, limit: int = 20) -> list[FoundDrafter]:
    """
    Repositories with the tag `base_model:TARGET` that have the tag `dflash`, or `dflash` in their name; most
    downloaded first.

    Args:
        target (`str`): Hub name of the target.
        limit (`int`): Maximum number of results.

    Raises:
        `ValueError`: not a repository name.
        `OSError`: the Hub cannot be reached.
    """
    if not is_repository_id(target):
        raise ValueError(f"{target!r} is not a repository name, like 'Qwen/Qwen3-8B'.")
    if constants.HF_HUB_OFFLINE:
        raise OSError("The Hub is disabled by HF_HUB_OFFLINE; unset it to list drafters.")
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)  # once, before the library retries repeatedly
        models = HfApi().list_models(filter=f"base_model:{target}", sort="downloads", full=True)
        drafters = (one for one in models if "dflash" in (one.tags or []) or "dflash" in one.id.lower())
        return [FoundDrafter(one.id, one.downloads or 0, one.likes or 0) for one in islice(drafters, limit)]
    except HfHubHTTPError as error:
        raise OSError(f"The Hub refused to list drafters of {target}: {one_line(error, 120)}") from error
    except Exception as error:  # connection errors come from whichever HTTP library huggingface_hub uses
        raise OSError(f"The Hub cannot be reached ({type(error).__name__}: {one_line(error, 100)}).") from error
