"""The frozen target in training: features, labels, responses, and whether a drafter fits it."""

import hashlib
from collections.abc import Iterable
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
    """One forward of the target."""

    features: torch.Tensor  # [N, S, L*H]  outputs of the tapped layers
    last_hidden_state: torch.Tensor | None  # [N, S, H]    after the final norm, the head's input; if requested


def freeze(target: PreTrainedModel) -> PreTrainedModel:
    """Put a target in evaluation mode and disable the gradients of all its parameters; returns it."""
    return target.requires_grad_(False).eval()


def digest_of_target(target) -> dict[str, str]:
    """
    Digests of a target's `ends` (embedding and head) and of its `layers`: names, shapes and 64 values of every
    parameter, rounded to bf16, so that the loading dtype does not matter. A part on the meta device has no digest.
    """
    ids_of_ends = {id(target.get_input_embeddings().weight), *map(id, target.get_output_embeddings().parameters())}
    parts: dict[str, list] = {"ends": [], "layers": []}
    for name, parameter in target.named_parameters():
        part = "ends" if id(parameter) in ids_of_ends else "layers"
        parts[part].append((name, parameter))
    digests = {}
    for part, parameters in parts.items():
        if not any(parameter.is_meta for _, parameter in parameters):
            digests[part] = digest_of_parameters(parameters)
    return digests


@torch.no_grad()
def digest_of_parameters(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest of names, shapes and 64 values of each of `named_parameters()`, rounded to bf16."""
    digest = hashlib.sha256()
    for name, parameter in parameters:
        flat = parameter.reshape(-1)
        values = flat[:: max(1, len(flat) // 64)][:64].to("cpu", torch.bfloat16)
        digest.update(f"{name}{tuple(parameter.shape)}{values.tolist()}".encode())
    return digest.hexdigest()[:16]


def check_fit(draft_config, target: PreTrainedModel) -> None:
    """
    Check that a drafter can be trained for a target: `check_pair`, a mask token that ends no text, and a readable
    embedding and head.

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
    states: bool = True,
    images: dict[str, torch.Tensor] | None = None,
) -> TargetOutput:
    """
    One forward of the target's decoder, without its head and without gradient.

    Args:
        target (`PreTrainedModel`): The frozen target.
        layer_ids (`list[int]`): Id `i` is the output of decoder layer `i`.
        input_ids, attention_mask, position_ids: `[N, S]`.
        states (`bool`): `False` leaves out the last hidden state: the layers above the highest of `layer_ids` do not
            run.
        images (`dict`, *optional*): What the forward takes besides ids, if there are images among them; see
            [`~dflash_hf.data.images.ImageReader.inputs`].
    """
    model = target if states else _cut_above(target, max(layer_ids))
    eagerly = torch.compiler.set_stance("force_eager") if _is_compiled(target) else nullcontext()  # graphs skip hooks
    with FeatureTap(target, layer_ids) as tap, tap.running(), eagerly:
        last_hidden_state = _decoder_forward(model, input_ids, attention_mask, position_ids, images)
        return TargetOutput(features=tap.take(), last_hidden_state=last_hidden_state if states else None)


def target_features(target: PreTrainedModel, layer_ids: list[int], input_ids, **masks) -> torch.Tensor:
    """The features `[N, S, L*H]` of [`target_forward`] alone; takes the same masks."""
    return target_forward(target, layer_ids, input_ids, **masks, states=False).features


def _is_compiled(target: PreTrainedModel) -> bool:
    """Whether a module of the target was compiled in place."""
    return any(module._compiled_call_impl is not None for module in target.modules())


def _cut_above(target: PreTrainedModel, layer_id: int) -> PreTrainedModel:
    """A copy of the target without the layers above one; the target itself where its parts cannot run separately."""
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


def _decoder_forward(target, input_ids, attention_mask, position_ids, images=None) -> torch.Tensor:
    """The final hidden states `[N, S, H]` of one forward without the head; `images` as in [`target_forward`]."""
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
    for name, tensor in (images or {}).items():
        inputs[name] = tensor.to(input_ids.device, target.dtype if tensor.is_floating_point() else None)
    if images:  # the model around the decoder puts images among the tokens
        return target.base_model(**inputs, use_cache=False).last_hidden_state
    return target.get_decoder()(**inputs, use_cache=False).last_hidden_state


def target_logits(target: PreTrainedModel, states: torch.Tensor, ids: torch.LongTensor | None = None) -> torch.Tensor:
    """
    The target's logits `[..., V]` from its final hidden states `[..., H]`, scaled and capped as in its forward; with
    `ids` `[v]`, only the logits `[..., v]` of these tokens.
    """
    config = target.config.get_text_config()
    head = target.get_output_embeddings()
    # Stored states may have half the target's precision.
    dtype = head.weight.dtype if head.weight.is_floating_point() else states.dtype
    states = states.to(device=head.weight.device, dtype=dtype)
    if ids is not None and type(head) is nn.Linear:
        ids = ids.to(head.weight.device)
        logits = nn.functional.linear(states, head.weight[ids], None if head.bias is None else head.bias[ids])
    else:
        logits = head(states)
        if ids is not None:
            logits = logits[..., ids.to(logits.device)]
    scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    if scale != 1.0:
        logits = logits * scale
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is None:
        return logits
    return torch.tanh(logits / cap) * cap


@torch.no_grad()
def check_logits(target: PreTrainedModel) -> None:
    """
    Check that [`target_logits`] equal the logits of the target's forward.

    Raises:
        `ValueError`: they do not, so the target's distribution is unknown.
    """
    input_ids = torch.tensor([[1, 2, 3, 4]], device=target.device)
    states = _decoder_forward(target, input_ids, None, None)
    expected = target(input_ids=input_ids, use_cache=False).logits
    logits = target_logits(target, states).to(expected)
    if not torch.allclose(logits, expected, atol=1e-2 * expected.abs().max().item(), rtol=0):
        raise ValueError(
            "Stored states, and loss_type='kl', 'dspark', 'auf_kl' and 'dpace_kl' need the target's distribution, but "
            f"the logits of {type(target).__name__} are not its head's output, scaled and capped by its "
            "configuration; leave out --states, or use loss_type='ce', 'dpace' or 'auf'."
        )


def spare_token_id(target: PreTrainedModel, tokenizer) -> int | None:
    """The first row of a target's embedding that its tokenizer never uses, a natural mask token; or `None`."""
    rows = target.get_input_embeddings().weight.shape[0]
    return len(tokenizer) if len(tokenizer) < rows else None


def mask_token_remedy(tokenizer, name: str = "mask_token_id") -> str:
    """What to do where [`spare_token_id`] finds none."""
    added = ", ".join(f"{i} ({tokenizer.decode([i])})" for i in sorted(tokenizer.added_tokens_decoder)[-3:])
    remedy = f"set {name} to an id that its text never uses, such as a reserved token"
    return f"{remedy}. Its last added tokens: {added}" if added else remedy
