"""The adapters that change what a model's forward computes."""


def adapters_of(model) -> tuple:
    """The adapters (LoRA) active on a model: PEFT's, however they were added."""
    names = set()
    for module in model.modules():
        if getattr(module, "disable_adapters", None) is False:
            names.update(module.active_adapters)
    return tuple(sorted(names))
