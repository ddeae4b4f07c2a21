"""
`target.generate(**inputs, custom_generate="<drafter>", trust_remote_code=True)`: decode with a drafter given by name.

A saved drafter holds this file twice: next to its model, so that it is never lost on re-saving, and as
`custom_generate/generate.py`, where `generate` looks for it. There nothing else of the folder can be imported.
"""

import os
import sys
import weakref

from transformers import AutoModel


_loaded = weakref.WeakKeyDictionary()  # target -> (the request, its drafter), as long as the target lives
_HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download")


def generate(model, assistant_model=None, **kwargs):
    """
    The entry point of `custom_generate="<drafter>"`: load the drafter once for each target, then decode with it.

    `generate` does not pass on the name it was given, so it is read from the calling frame. If that fails, pass the
    name as `assistant_model` as well.

    Args:
        model (`PreTrainedModel`): The target.
        assistant_model (`str` or `DFlashDraftModel`, *optional*): Another folder or repository to load, or a drafter.
        kwargs: Everything else that `generate` takes, and of `from_pretrained`: `revision`, `token`, `cache_dir`,
            `local_files_only`, `force_download`.

    Returns:
        What `model.generate(assistant_model=draft)` returns.

    Raises:
        `ValueError`: the name is unknown, or does not name a DFlash drafter.
    """
    hub = {name: value for name in _HUB_ARGUMENTS if (value := kwargs.pop(name, None)) is not None}
    if assistant_model is None or isinstance(assistant_model, str | os.PathLike):
        name = str(assistant_model or asked_for())
        wanted = (name, hub.get("revision"), _last_change(name))
        known, draft = _loaded.get(model, (None, None))
        if known != wanted or hub.get("force_download"):
            # Remote code was asked for by the caller, or this file would not run.
            draft = AutoModel.from_pretrained(name, trust_remote_code=True, dtype="auto", **hub)
            if not hasattr(draft, "dflash_decode"):
                raise ValueError(
                    f"{name} holds a {type(draft).__name__}, not a DFlash drafter; name a drafter's folder or "
                    "repository in `custom_generate` or `assistant_model`."
                )
            _loaded[model] = (wanted, draft.to(model.device).eval())
        assistant_model = _loaded[model][1]
    return model.generate(**kwargs, assistant_model=assistant_model)


def asked_for() -> str:
    """The `custom_generate` argument of the running `generate`."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_locals.get("custom_generate")
        if frame.f_code.co_name == "generate" and isinstance(name, str):
            return name
        frame = frame.f_back
    raise ValueError(
        "The drafter's name could not be read from the running `generate`; pass it as `assistant_model` as well: "
        '`generate(**inputs, custom_generate="<drafter>", assistant_model="<drafter>", trust_remote_code=True)`.'
    )


def _last_change(name: str) -> int | None:
    """When a local folder last changed, to reload a retrained drafter; `None` for a repository."""
    if not os.path.isdir(name):
        return None
    return max(entry.stat().st_mtime_ns for entry in os.scandir(name))
