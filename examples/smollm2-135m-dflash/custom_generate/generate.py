"""
`target.generate(**inputs, custom_generate="<drafter>", trust_remote_code=True)`: decode with a drafter given by name.

A saved drafter holds this file twice: next to its model, so that re-saving the drafter keeps it, and as
`custom_generate/generate.py`, where `generate` looks for it. The file must not import others of the drafter's folder:
`generate` loads it from that subfolder, without them.
"""

import os
import sys
import weakref

from transformers import AutoModel


# Target -> (source, drafter), as long as the target lives. A source is the drafter's name, its revision, and when its
# folder last changed.
_loaded = weakref.WeakKeyDictionary()
_HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download")


def generate(model, assistant_model=None, **kwargs):
    """
    The entry point of `custom_generate="<drafter>"`: load the drafter once for each target, then decode with it.

    `generate` does not pass its argument `custom_generate` on, so that the name is read from its frame.

    Args:
        model (`PreTrainedModel`): The target.
        assistant_model (`str` or `DFlashDraftModel`, *optional*): A loaded drafter, or the name of another folder or
            repository than `custom_generate` names. Without the package, transformers asks before it runs code from
            there.
        kwargs: Arguments of `generate`, and these of `from_pretrained`: `revision`, `token`, `cache_dir`,
            `local_files_only`, `force_download`.

    Returns:
        What `model.generate(assistant_model=draft)` returns.

    Raises:
        `ValueError`: the name is unknown, or does not name a DFlash drafter.
    """
    hub_arguments = {name: kwargs.pop(name) for name in _HUB_ARGUMENTS if name in kwargs}
    hub_arguments = {name: value for name, value in hub_arguments.items() if value is not None}
    if assistant_model is None or isinstance(assistant_model, str | os.PathLike):
        assistant_model = _load_drafter(model, assistant_model, hub_arguments)
    return model.generate(**kwargs, assistant_model=assistant_model)


def _load_drafter(target, name: str | os.PathLike | None, hub_arguments: dict):
    """The drafter of this name, or else of the name in `custom_generate`; a loaded one unless something changed."""
    trusted_name = custom_generate_argument()
    name = str(name or trusted_name or "")
    if not name:
        raise ValueError(
            "The drafter's name could not be read from the running `generate`; load it with `AutoModel` and pass "
            "it: `target.generate(**inputs, assistant_model=draft)`."
        )
    source = (name, hub_arguments.get("revision"), _last_modified(name))
    loaded_source, draft = _loaded.get(target, (None, None))
    if source == loaded_source and not hub_arguments.get("force_download"):
        if draft.device != target.device:  # the target has moved since the last call
            draft.to(target.device)
        return draft
    # `trust_remote_code=True` of the call concerns the folder that this file comes from, and no other.
    trust_remote_code = True if name == trusted_name else None
    draft = AutoModel.from_pretrained(name, trust_remote_code=trust_remote_code, dtype="auto", **hub_arguments)
    if not hasattr(draft, "dflash_decode"):
        raise ValueError(
            f"{name} holds a {type(draft).__name__}, not a DFlash drafter; name a drafter's folder or "
            "repository in `custom_generate` or `assistant_model`."
        )
    draft.to(target.device).eval()
    _loaded[target] = (source, draft)
    return draft


def custom_generate_argument() -> str | None:
    """The `custom_generate` argument of the running `generate`; `None` if it cannot be read."""
    frame = sys._getframe(1)
    while frame is not None:
        # `f_locals` of any other frame is not read: that would keep its variables alive.
        if frame.f_code.co_name == "generate":
            name = frame.f_locals.get("custom_generate")
            if isinstance(name, str):
                return name
        frame = frame.f_back
    return None


def _last_modified(name: str) -> int | None:
    """When a file of a local folder last changed, in ns, to reload a retrained drafter; `None` for a repository."""
    if not os.path.isdir(name):
        return None
    return max((entry.stat().st_mtime_ns for entry in os.scandir(name)), default=None)
