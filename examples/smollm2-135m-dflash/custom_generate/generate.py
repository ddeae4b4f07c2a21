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

    `generate` does not pass on the name it was given, so it is read from the calling frame.

    Args:
        model (`PreTrainedModel`): The target.
        assistant_model (`str` or `DFlashDraftModel`, *optional*): A drafter, or another folder or repository to load;
            transformers asks before its code runs, if the package is not there.
        kwargs: Everything else that `generate` takes, and of `from_pretrained`: `revision`, `token`, `cache_dir`,
            `local_files_only`, `force_download`.

    Returns:
        What `model.generate(assistant_model=draft)` returns.

    Raises:
        `ValueError`: the name is unknown, or does not name a DFlash drafter.
    """
    hub = {name: value for name in _HUB_ARGUMENTS if (value := kwargs.pop(name, None)) is not None}
    if assistant_model is None or isinstance(assistant_model, str | os.PathLike):
        running = asked_for()
        name = str(assistant_model or running or "")
        if not name:
            raise ValueError(
                "The drafter's name could not be read from the running `generate`; load it with `AutoModel` and pass "
                "it: `target.generate(**inputs, assistant_model=draft)`."
            )
        wanted = (name, hub.get("revision"), _last_change(name))
        known, draft = _loaded.get(model, (None, None))
        if known != wanted or hub.get("force_download"):
            # The caller has trusted the code of the folder that this file comes from, and no other.
            trusted = True if name == running else None
            draft = AutoModel.from_pretrained(name, trust_remote_code=trusted, dtype="auto", **hub)
            if not hasattr(draft, "dflash_decode"):
                raise ValueError(
                    f"{name} holds a {type(draft).__name__}, not a DFlash drafter; name a drafter's folder or "
                    "repository in `custom_generate` or `assistant_model`."
                )
            draft.to(model.device).eval()
            _loaded[model] = (wanted, draft)
        assistant_model = draft
    return model.generate(**kwargs, assistant_model=assistant_model)


def asked_for() -> str | None:
    """The `custom_generate` argument of the running `generate`, if it can be read."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate":  # others are not looked into: that would keep their variables alive
            if isinstance(name := frame.f_locals.get("custom_generate"), str):
                return name
        frame = frame.f_back
    return None


def _last_change(name: str) -> int | None:
    """When a local folder last changed, to reload a retrained drafter; `None` for a repository."""
    if not os.path.isdir(name):
        return None
    return max((entry.stat().st_mtime_ns for entry in os.scandir(name)), default=None)
