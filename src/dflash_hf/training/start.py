"""
How a drafter starts: from layers of its target, or with a head or another part added to a trained drafter.

A drafter with random weights spends most of a short run on learning what the target knows: what its features mean, and
how a state becomes a token. Layers of the target, its final norm, and one of its features passed on unchanged are a
better start.
"""

import math
from pathlib import Path

import torch
from torch import nn

from dflash_hf.data.template import digests_of_tokenizer
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.layouts.configuration import DFlashDraftConfig
from dflash_hf.layouts.target_layers import fitting_target_layer_ids
from dflash_hf.modeling.configuration_dflash import part_fields
from dflash_hf.modeling.heads_dflash import head_fields
from dflash_hf.modeling.target_dflash import decoder_layers, num_decoder_layers
from dflash_hf.pairs.loading import Loading, load_draft_config
from dflash_hf.targets.mask_token import mask_token_remedy, spare_token_id
from dflash_hf.targets.weights import plain_weight, quantised_layer
from dflash_hf.training.arguments import ScriptArguments
from dflash_hf.training.feature_manifest import FeatureManifest


# A reduced vocabulary restricts the head, which is most of the time of a small drafter, to the tokens that the target
# generates in practice (FR-Spec, arXiv 2502.14856).
MAX_DRAFT_VOCABULARY = 8192  # tokens that `draft_vocab_size=-1` chooses at most
# Heaps' law: text of `n` tokens has about `factor * sqrt(n)` distinct ones.
_HEAPS_FACTOR = 16
_SIZE_STEP = 1024  # sizes are multiples of it, for the matrix products of the head


def make_draft(script: ScriptArguments, target, encoder, say):
    """
    The drafter that a run trains: a fresh drafter, or a trained one. Its configuration gets the arguments of the
    chat template and the digests of the tokenizer with which the data are encoded.
    """
    if script.draft:
        draft = _load_trained_draft(script, say)
    else:
        draft = _make_fresh_draft(script, target, encoder.mask_token_id, say)
    dflash_config = dict(draft.config.dflash_config)
    kwargs = encoder.template.chat_template_kwargs
    if kwargs or dflash_config.get("chat_template_kwargs") is not None:
        dflash_config["chat_template_kwargs"] = kwargs
    dflash_config["trained_with"] = digests_of_tokenizer(encoder.template.tokenizer)
    draft.config.dflash_config = dflash_config
    return draft


def mask_token_of(script: ScriptArguments, target, tokenizer) -> int:
    """
    The mask token of a run's drafter: as given, else a trained drafter's, else the first spare row of the target's
    embedding.

    Raises:
        `ValueError`: the target has no spare row.
    """
    if script.mask_token_id is not None:
        return script.mask_token_id
    if script.draft:
        return load_draft_config(script.draft, Loading(draft_revision=script.draft_revision)).mask_token_id
    spare_id = spare_token_id(target, tokenizer)
    if spare_id is None:
        remedy = mask_token_remedy(tokenizer)
        raise ValueError(f"{script.target} has no spare embedding row for the mask token; {remedy}.")
    return spare_id


def vocabulary_size(script: ScriptArguments, counts: torch.LongTensor, vocab_size: int) -> int | None:
    """
    `draft_vocab_size` of a run; for -1, about the number of distinct tokens that its data are expected to have
    (Heaps' law), at most 8,192, and the target's own vocabulary if that is less than twice as large.
    """
    if script.draft_vocab_size != -1:
        return script.draft_vocab_size
    distinct_tokens = _HEAPS_FACTOR * math.sqrt(int(counts.sum()))
    size = _SIZE_STEP * math.ceil(distinct_tokens / _SIZE_STEP)
    size = min(size, MAX_DRAFT_VOCABULARY)
    return size if size < vocab_size / 2 else None


@torch.no_grad()
def _load_trained_draft(script: ScriptArguments, say):
    """The trained drafter that a run starts from, with the parts that its `draft_config` adds."""
    name = script.draft
    fields = script.draft_config
    options = {"dtype": torch.float32, "revision": script.draft_revision or "main"}
    draft = DFlashDraftModel.from_pretrained(name, **options)
    if quantised_layer(draft) is not None:
        raise ValueError(
            f"draft={name} is quantised, and codes cannot be trained: train the drafter as it was before."
        )
    causal = fields.get("is_causal")
    if causal not in (None, draft.config.is_causal):
        say(f"is_causal={causal}: {name} was trained with another mask and drafts worse until it adapts")
        draft = DFlashDraftModel.from_pretrained(name, **options, is_causal=causal)
    config = draft.config
    trained_with = {
        "mask_token_id": config.mask_token_id,
        "num_draft_layers": config.num_hidden_layers,
        "block_size": config.block_size,
        "target_layer_ids": config.target_layer_ids,
    }
    for key, trained_value in trained_with.items():
        value = getattr(script, key)
        if value not in (None, trained_value):
            raise ValueError(f"{key}={value}, but {name} was trained with {trained_value}; leave it out.")
    parts = {key: value for key, value in fields.items() if key in part_fields()}
    for key, value in fields.items():
        if key not in parts and getattr(config, key, None) != value:
            say(f"draft_config.{key}={value} is for a fresh drafter: {name} is not changed")
    return with_parts(draft, parts) if parts else draft


def fresh_draft_config(script: ScriptArguments, target_config, mask_token_id: int) -> DFlashDraftConfig:
    """The configuration of a run's new drafter for a target with this configuration."""
    fields = {**script.draft_config}
    layer_ids = script.target_layer_ids
    if not layer_ids and script.feature_folders:
        layer_ids = FeatureManifest.load(Path(script.feature_folders[0])).layer_ids
    if not layer_ids and script.num_target_features:
        layer_ids = fitting_target_layer_ids(num_decoder_layers(target_config), script.num_target_features)
    if layer_ids:
        fields["target_layer_ids"] = layer_ids
    if script.draft_vocab_size:
        fields["draft_vocab_size"] = script.draft_vocab_size
    shape = {"num_hidden_layers": script.num_draft_layers, "block_size": script.block_size}
    return DFlashDraftConfig.for_target(target_config, mask_token_id, **shape, **fields)


def _make_fresh_draft(script: ScriptArguments, target, mask_token_id: int, say):
    """A new drafter of a run; `init_layers` start as the target's, those counted from the end only if they fit."""
    draft = DFlashDraftModel(fresh_draft_config(script, target.config, mask_token_id))
    if script.init_layers:
        depth = len(decoder_layers(target))
        layers = [depth + layer if layer < 0 else layer for layer in script.init_layers]
        try:
            initialized = initialize_from_target(draft, target, layers)
        except ValueError:
            if min(script.init_layers) >= 0:
                raise
            initialized = []
        say(f"{len(initialized)} of the drafter's {len(list(draft.parameters()))} tensors start as the target's")
    return draft


@torch.no_grad()
def initialize_from_target(draft, target, layers: list[int]) -> list[str]:
    """
    Initialise a fresh drafter from layers of its target: their weights if names and shapes agree, the target's final
    norm, and `fc` as the identity on the feature nearest below the first of these layers, which is their input. Norms
    of a sublayer's output (Gemma), which drafters do not have, become a part of the projection before them.

    Args:
        draft (`DFlashDraftModel`): Changed in place.
        target (`PreTrainedModel`): Its target, with its layers.
        layers (`list[int]`): One layer of the target for each of the drafter's, from 0.

    Returns:
        `list[str]`: Names of the drafter's parameters that were initialised.

    Raises:
        `ValueError`: the wrong number of layers, a layer that the target does not have, or nothing fits.
    """
    config = draft.config
    target_layers = decoder_layers(target)
    all_exist = all(0 <= layer < len(target_layers) for layer in layers)
    if len(layers) != len(draft.layers) or not all_exist:
        raise ValueError(
            f"init_layers={layers} must name a layer of the target, 0 to {len(target_layers) - 1}, for each of the "
            f"drafter's {len(draft.layers)}."
        )
    initialized = []
    for number, layer in enumerate(layers):
        draft_layer = draft.layers[number]
        target_modules = dict(target_layers[layer].named_modules())
        for name, module in draft_layer.named_modules():
            if name in target_modules and _copy_weight(module, target_modules[name]):
                initialized.append(f"layers.{number}.{name}.weight")
        _initialize_query_key_norms(draft_layer, target_modules)
    _fold_output_norms(draft, target, layers)
    if not initialized:
        raise ValueError(
            f"init_layers={layers}: no weight of these layers of {type(target).__name__} has the name and shape of a "
            "drafter's weight; leave init_layers out."
        )
    final = getattr(target.get_decoder(), "norm", None)
    if final is not None and _copy_weight(draft.norm, final):
        initialized.append("norm.weight")
    if config.target_hidden_size == config.hidden_size:
        # The feature nearest below the first layer is its input in the target; the last feature if there is none.
        below = [i for i, layer in enumerate(config.target_layer_ids) if layer < layers[0]]
        feature = max(below, key=lambda i: config.target_layer_ids[i], default=len(config.target_layer_ids) - 1)
        draft.fc.weight.zero_()
        draft.fc.weight[:, feature * config.hidden_size :][:, : config.hidden_size].fill_diagonal_(1.0)
        draft.hidden_norm.weight.copy_(torch.stack([layer.input_layernorm.weight for layer in draft.layers]).mean(0))
        initialized += ["fc.weight", "hidden_norm.weight"]
    return initialized


def with_parts(draft, fields: dict):
    """
    A trained drafter with added parts: a head, or DFlash 2's convolution. They start as the identity, so it drafts as
    before.

    Args:
        draft (`DFlashDraftModel`): The trained drafter, which is not changed.
        fields (`dict`): All configuration fields of the new parts.

    Returns:
        `DFlashDraftModel`: With the same weights and dtype, and fresh weights for new parts.

    Raises:
        `ValueError`: any other field, or a part that it already has in another size.
    """
    fields_of_other_heads = head_fields().keys() - draft.config.token_head_class.fields
    for key, value in fields.items():
        present_value = None if key in fields_of_other_heads else getattr(draft.config, key, None)
        reason = None
        if key not in part_fields():
            reason = "is not a part that can be added"
        elif present_value not in (None, value):
            reason = f"differs from its {present_value}"
        if reason is not None:
            raise ValueError(
                f"draft_config.{key}={value} {reason}: a trained drafter keeps its configuration, except for "
                f"{', '.join(part_fields())}, which add a missing part."
            )
    config = type(draft.config).from_dict(draft.config.to_dict(), **fields)
    extended = type(draft)(config).to(draft.device, draft.dtype)
    extended.load_state_dict({**extended.state_dict(), **draft.state_dict()})
    return extended.train(draft.training)


def _copy_weight(draft_module: nn.Module, target_module: nn.Module) -> bool:
    """
    Copy the weight of a projection, or the effective scale of a norm (Gemma's norm stores it minus 1).

    Returns:
        `bool`: Whether it fits, and was copied.
    """
    if isinstance(draft_module, nn.Linear) and isinstance(target_module, nn.Linear):
        weight = plain_weight(target_module)
    elif "Norm" in type(draft_module).__name__ and "Norm" in type(target_module).__name__:
        weight = target_module(torch.ones_like(draft_module.weight, device=target_module.weight.device))
    else:
        return False
    if weight.shape != draft_module.weight.shape or not weight.any():
        return False
    draft_module.weight.copy_(weight)
    return True


def _fold_output_norms(draft, target, layers: list[int]) -> None:
    """
    Initialise the drafter for a target that also normalizes the output of each sublayer (Gemma 2 and 3). There, the
    norm before the MLP has another name; and since the drafter adds outputs as they are, each output projection is
    scaled by what the norm behind it does to outputs of an average size, which the target computes for a text of
    random tokens.
    """
    target_layers = [decoder_layers(target)[layer] for layer in layers]
    if not hasattr(target_layers[0], "pre_feedforward_layernorm"):
        return
    projections = {}  # the target's output projections, with the norm behind each and the drafter's own
    for draft_layer, target_layer in zip(draft.layers, target_layers, strict=True):
        _copy_weight(draft_layer.post_attention_layernorm, target_layer.pre_feedforward_layernorm)
        outputs = (
            ("self_attn.o_proj", target_layer.post_attention_layernorm),
            ("mlp.down_proj", target_layer.post_feedforward_layernorm),
        )
        for name, norm in outputs:
            projection = dict(target_layer.named_modules()).get(name)
            draft_projection = draft_layer.get_submodule(name)
            if projection is not None and projection.weight.shape == draft_projection.weight.shape:
                projections[projection] = (norm, draft_projection)
    sizes = _output_sizes(target, list(projections))
    for (norm, draft_projection), size in zip(projections.values(), sizes, strict=True):
        scale = norm(torch.ones_like(norm.weight))  # [H]
        draft_projection.weight.mul_((scale / size)[:, None].to(draft_projection.weight))


def _output_sizes(target, projections: list[nn.Module]) -> list[torch.Tensor]:
    """The root mean square of each projection's outputs, `[]`, for a text of 64 random tokens."""
    outputs: dict[nn.Module, torch.Tensor] = {}
    hooks = [
        projection.register_forward_hook(lambda module, _, output: outputs.__setitem__(module, output))
        for projection in projections
    ]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.config.get_text_config().vocab_size, (1, 64), generator=generator)
    try:
        target.get_decoder()(input_ids=ids.to(target.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [outputs[projection].float().square().mean().sqrt() for projection in projections]


def _initialize_query_key_norms(draft_layer: nn.Module, target_modules: dict[str, nn.Module]) -> None:
    """
    Initialise the drafter's query and key norms for a target that has none. A norm fixes the root mean square (RMS) of
    each query and key, so its weight becomes their expected RMS in the target: that of inputs whose channels are
    independent, with the variance that the input norm's weight gives them.
    """
    if "self_attn.q_norm" in target_modules or "self_attn.q_proj" not in target_modules:
        return
    attention = draft_layer.self_attn
    input_scale = draft_layer.input_layernorm.weight
    for norm, projection in ((attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj)):
        norm.weight.fill_((plain_weight(projection) * input_scale).square().sum(1).mean().sqrt())
