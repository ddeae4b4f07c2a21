"""
Train, publish and run DFlash drafters with the classes of Hugging Face: `from_pretrained`, `Trainer`, `generate`.

Importing the package registers `DFlashDraftConfig` and `DFlashDraftModel` with the Auto classes and lets
`target.generate(**inputs, assistant_model=draft)` decode with a drafter. Both happen when the modules concerned are
imported, and everything else on use, so that the import itself costs almost nothing.
"""

import importlib

from dflash_hf._registration.when_imported import when_imported as _when_imported


__version__ = "0.3.0.dev0"

_LAZY = {
    "DFlashDraftConfig": ".drafter",
    "DFlashDraftModel": ".drafter",
    "DFlashDecodingConfig": ".decoding.settings",
    "DFlashCandidateGenerator": ".modeling.candidates_dflash",
    "DraftPolicy": ".decoding.policies",
    "DFlashGenerateOutput": ".decoding.loop",
    "install_hook": ".decoding.generate_hook",
    "remove_hook": ".decoding.generate_hook",
    "DFlashCollator": ".data.examples",
    "make_example": ".data.examples",
    "generate_responses": ".synthetic.responses",
    "packed_weights": ".decoding.packing",
    "generate_prompts": ".synthetic.magpie",
    "PromptSettings": ".synthetic.magpie",
    "DFlashTrainer": ".training.trainer",
    "StoredFeatures": ".training.features",
    "DFlashTrainingArguments": ".training.training_args",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(__all__)


def _register_configuration() -> None:
    from dflash_hf._registration.auto_classes import register

    register()


def _register_classes() -> None:
    from dflash_hf._registration.auto_classes import register_classes

    register_classes()


def _install_hook() -> None:
    from dflash_hf.decoding.generate_hook import install_hook

    install_hook()


def _register_pipelines() -> None:
    from dflash_hf._registration.auto_classes import register_pipelines

    register_pipelines()


_when_imported("transformers.models.auto.configuration_auto", _register_configuration)
_when_imported("dflash_hf.drafter", _register_classes)
_when_imported("transformers.generation.utils", _install_hook)
_when_imported("transformers.pipelines.base", _register_pipelines)
