"""LoRA on a drafter: adapt a published drafter to a fine-tuned target, or to a domain."""

import copy

from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.terminal import needs


# Every matrix of the layers. `fc`, which reads the target's features, can be added if the target itself changed.
TARGET_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def add_adapter(draft: DFlashDraftModel, peft_config):
    """
    Put a trainable adapter on a drafter, whose own parameters are frozen.

    Args:
        draft (`DFlashDraftModel`): The drafter.
        peft_config (`PeftConfig` or `dict`): A dictionary is a `LoraConfig` unless it names a `peft_type`. Default of
            `target_modules`: all matrices of the layers.

    Returns:
        `PeftModel`.

    Raises:
        `ImportError`: peft is not installed.
        `ValueError`: the drafter has an adapter already, or the configuration is invalid.
    """
    with needs("peft_config needs peft", "train"):
        import peft
    if not isinstance(draft, DFlashDraftModel):
        raise ValueError(
            f"peft_config puts an adapter on a DFlashDraftModel, but model is a {type(draft).__name__}: merge its "
            "adapter first (`model.merge_and_unload()`), or leave peft_config out to continue training it."
        )
    if isinstance(peft_config, dict):
        try:
            peft_config = peft.get_peft_config({"peft_type": "LORA", **peft_config})
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"peft_config={peft_config} is not a PEFT configuration: {error}") from error
    if not isinstance(peft_config, peft.PeftConfig):
        raise ValueError(f"peft_config={peft_config!r} must be a PEFT configuration, such as LoraConfig, or a dict.")
    peft_config = copy.copy(peft_config)
    peft_config.task_type = None  # a drafter is no model of a task, and has no method of theirs
    if getattr(peft_config, "target_modules", TARGET_MODULES) is None:
        peft_config.target_modules = TARGET_MODULES
    return peft.get_peft_model(draft, peft_config)


def is_adapted(model) -> bool:
    """Whether a model is a `PeftModel`."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def merged(model) -> DFlashDraftModel:
    """
    A plain drafter with the adapter of a `PeftModel` merged into its weights; the `PeftModel` is unchanged.

    `merged(trainer.model).save_pretrained(folder)` writes a drafter that every engine can serve.
    """
    return copy.deepcopy(model).merge_and_unload()
