"""LoRA on a drafter: adapt a published drafter to a fine-tuned target, or to a domain."""

import copy

from dflash_hf._io.errors import requires_extra
from dflash_hf.drafter import DFlashDraftModel


# Every matrix of the layers. `fc`, which reads the target's features, can be added if the target itself changed.
TARGET_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def add_adapter(draft: DFlashDraftModel, peft_config: dict):
    """
    Put a trainable adapter on a drafter, whose own parameters are frozen; in Python, `peft.get_peft_model` does it.

    Args:
        draft (`DFlashDraftModel`): The drafter.
        peft_config (`dict`): Fields of a `LoraConfig` unless it names a `peft_type`. Default of `target_modules`: all
            matrices of the layers.

    Returns:
        `PeftModel`.

    Raises:
        `ImportError`: peft is not installed.
        `ValueError`: the configuration is invalid.
    """
    config = adapter_config(peft_config)
    import peft

    try:
        return peft.get_peft_model(draft, config)
    except ValueError as error:
        raise ValueError(f"peft_config={peft_config} does not fit the drafter: {error}") from error


def adapter_config(peft_config: dict):
    """The `PeftConfig` of the fields of [`add_adapter`]."""
    with requires_extra("peft_config needs peft", "train"):
        import peft
    fields = {"peft_type": "LORA", "target_modules": TARGET_MODULES, **peft_config}
    fields["task_type"] = None  # a drafter has none of the task-specific methods
    try:
        return peft.get_peft_config(fields)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"peft_config={peft_config} is not a PEFT configuration: {error}") from error


def is_adapted(model) -> bool:
    """Whether a model is a `PeftModel`."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def merged(model, state: dict | None = None) -> DFlashDraftModel:
    """
    A plain drafter with the adapter of a `PeftModel` merged into its weights; the `PeftModel` is unchanged.

    `merged(trainer.model).save_pretrained(folder)` writes a drafter that every engine can serve.

    Args:
        model (`PeftModel`): The adapted drafter.
        state (`dict`, *optional*): All of its weights, if it is sharded over processes.
    """
    if state is None:
        return copy.deepcopy(model).merge_and_unload()
    import peft

    base = model.get_base_model()
    plain = DFlashDraftModel(copy.deepcopy(base.config)).to(base.dtype)
    whole = peft.get_peft_model(plain, model.active_peft_config)
    whole.load_state_dict(state)
    return whole.merge_and_unload()


def gather_merged(trainer) -> DFlashDraftModel | None:
    """
    In the first process a plain drafter with the adapter of a `DFlashTrainer` merged into its weights, in the others
    `None`. Every process calls it: the weights of a sharded drafter are gathered from all.
    """
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) if is_sharded else None
    if not trainer.is_world_process_zero():
        return None
    return merged(trainer.accelerator.unwrap_model(trainer.model), state)
