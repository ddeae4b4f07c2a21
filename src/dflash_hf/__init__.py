"""
Train, publish and run DFlash drafters with nothing but Hugging Face habits.

Importing the package registers `DFlashDraftConfig` and `DFlashDraftModel` with the Auto classes and lets
`target.generate(**inputs, assistant_model=draft)` decode with a drafter. Everything else is imported when it is used.
"""

import importlib

from .auto import register as _register


__version__ = "0.1.0.dev0"

_LAZY = {
    "DFlashDraftConfig": ".modeling.configuration_dflash",
    "DFlashDraftModel": ".modeling.modeling_dflash",
    "DFlashCandidateGenerator": ".modeling.generation_dflash",
    "DFlashDecodingConfig": ".modeling.generation_dflash",
    "DFlashGenerateOutput": ".modeling.generation_dflash",
    "install_hook": ".modeling.hook_dflash",
    "remove_hook": ".modeling.hook_dflash",
    "DFlashCollator": ".data",
    "make_example": ".data",
    "generate_responses": ".target",
    "DFlashTrainer": ".trainer",
    "DFlashTrainingArguments": ".training_args",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(__all__)


_register()
