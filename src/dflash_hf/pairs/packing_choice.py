"""Whether the weights of a pair are packed for the CPU."""

from dflash_hf.decoding.packing import fit_memory, packable, packed_weights


def pack_if_chosen(choice: bool | None, *models) -> bool:
    """
    Pack the weights of all models that are not `None`, if [`should_pack`] says so.

    Returns:
        `bool`: Whether they were packed.
    """
    present = [model for model in models if model is not None]
    is_chosen = should_pack(choice, *present)
    if is_chosen:
        packed_weights(*present)
    return is_chosen


def should_pack(choice: bool | None, *models) -> bool:
    """
    Whether to multiply by packed weights.

    Args:
        choice (`bool`, *optional*): The caller's choice. Default: pack if the models are on a CPU and the copies fit
            into a third of its free memory.
        models (`PreTrainedModel`): The models to pack.
    """
    if choice is not None:
        return choice
    layers = []
    for model in models:
        layers += [module for module in model.modules() if packable(module)]
    return bool(layers) and fit_memory(layers)
