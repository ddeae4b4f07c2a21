"""The frozen target in training: its features and final hidden states, and whether a drafter fits it."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from dflash_hf.modeling.target_dflash import check_pair, decoder_layers
from dflash_hf.targets.clones import shallow_clone
from dflash_hf.targets.features import FeatureTap
from dflash_hf.targets.generation import eos_ids


@dataclass
class TargetOutput:
    """
    The output of one forward of the target.

    Args:
        features (`torch.Tensor`): `[N, S, L * H]`, outputs of the layers that the drafter reads.
        last_hidden_state (`torch.Tensor`, *optional*): `[N, S, H]`, after the final norm: the input of the head.
            `None` if it was not requested.
    """

    features: torch.Tensor
    last_hidden_state: torch.Tensor | None


def freeze(target: PreTrainedModel) -> PreTrainedModel:
    """Put a target in evaluation mode and disable the gradients of all its parameters; returns it."""
    return target.requires_grad_(False).eval()


def check_fit(draft_config, target: PreTrainedModel) -> None:
    """
    Check that a drafter can be trained for a target: that they fit (`check_pair`), that the mask token does not end a
    text, and that embedding and head can be read.

    Raises:
        `ValueError`: names argument, value and remedy.
    """
    check_pair(target, draft_config)
    if draft_config.mask_token_id in eos_ids(target.generation_config):
        raise ValueError(
            f"mask_token_id={draft_config.mask_token_id} is also an end-of-sequence id of "
            f"{type(target).__name__}; choose an id that its text never uses."
        )
    for name in ("input_embeddings", "output_embeddings"):
        if getattr(target, f"get_{name}")().weight.is_meta:
            raise ValueError(
                f"The {name} of {type(target).__name__} are offloaded, but a drafter reads them at every step; give "
                "them a device in `device_map`."
            )


@torch.no_grad()
def target_forward(
    target: PreTrainedModel,
    layer_ids: list[int],
    input_ids: torch.LongTensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.LongTensor | None = None,
    with_last_hidden_state: bool = True,
    images: dict[str, torch.Tensor] | None = None,
) -> TargetOutput:
    """
    One forward of the target's decoder, without its head and without gradient.

    Args:
        target (`PreTrainedModel`): The frozen target.
        layer_ids (`list[int]`): Id `i` is the output of decoder layer `i`.
        input_ids, attention_mask, position_ids: `[N, S]`.
        with_last_hidden_state (`bool`): Whether the last hidden state is needed. Without it, the layers above the
            highest of `layer_ids` do not run.
        images (`dict`, *optional*): The further inputs of a prompt with images, see
            [`~dflash_hf.data.images.ImageReader.inputs`].
    """
    model = target if with_last_hidden_state else _without_layers_above(target, max(layer_ids))
    # Compiled graphs skip hooks.
    eagerly = torch.compiler.set_stance("force_eager") if _is_compiled(target) else nullcontext()
    with FeatureTap(target, layer_ids) as tap, tap.running(), eagerly:
        last_hidden_state = decoder_forward(model, input_ids, attention_mask, position_ids, images)
        return TargetOutput(tap.take(), last_hidden_state if with_last_hidden_state else None)


def target_features(target: PreTrainedModel, layer_ids: list[int], input_ids, **inputs) -> torch.Tensor:
    """Only the features `[N, S, L * H]` of [`target_forward`], with the same further `inputs`."""
    return target_forward(target, layer_ids, input_ids, **inputs, with_last_hidden_state=False).features


def _is_compiled(target: PreTrainedModel) -> bool:
    """Whether a module of the target was compiled in place."""
    return any(module._compiled_call_impl is not None for module in target.modules())


def _without_layers_above(target: PreTrainedModel, layer_id: int) -> PreTrainedModel:
    """
    A shallow clone of the target without the layers above one; the target itself if a forward of its modules was
    replaced, as by accelerate: then its parts cannot run separately.
    """
    # A hook that raises would be shorter, but would abort an offloaded target in the middle of its forward.
    layers = decoder_layers(target)
    if any("forward" in vars(module) for module in target.modules()):
        return target
    parent, name = _parent_of(layers, target)
    clone = shallow_clone(target, [parent])
    parent, _ = _parent_of(layers, clone)
    parent._modules = {**parent._modules, name: layers[: max(layer_id, 0) + 1]}
    return clone


def _parent_of(child: nn.Module, model: nn.Module) -> tuple[nn.Module, str]:
    """The first module of a model that holds `child`, and its name there."""
    for module in model.modules():
        for name, part in module.named_children():
            if part is child:
                return module, name
    raise ValueError(f"{type(model).__name__} does not hold this {type(child).__name__}.")


def decoder_forward(target, input_ids, attention_mask, position_ids, images=None) -> torch.Tensor:
    """The final hidden states `[N, S, H]` of one forward without the head; `images` as in [`target_forward`]."""
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
    for name, tensor in (images or {}).items():
        inputs[name] = tensor.to(input_ids.device, target.dtype if tensor.is_floating_point() else None)
    if images:  # the model around the decoder puts images among the tokens
        return target.base_model(**inputs, use_cache=False).last_hidden_state
    return target.get_decoder()(**inputs, use_cache=False).last_hidden_state
