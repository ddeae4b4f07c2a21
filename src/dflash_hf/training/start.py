"""
What a drafter begins with: layers of its target, the tokens that it may draft, and a head or another part on one that
was trained without.

A drafter of random weights spends most of a short run on learning what the target knows: what its features mean, and
how a state becomes a token. Layers of the target, its final norm, and one of its features passed on as it is are a
better place to begin. A drafter that is small beside its target's head spends most of its time there; over the few
thousand tokens that its target really writes, the head costs a fraction (FR-Spec, arXiv 2502.14856).
"""

import torch
from torch import nn

from dflash_hf.modeling.checks_dflash import part_keys
from dflash_hf.modeling.heads_dflash import head_fields
from dflash_hf.modeling.target_dflash import decoder_layers


@torch.no_grad()
def begin_as_target(draft, target, layers: list[int]) -> list[str]:
    """
    Begin a fresh drafter as layers of its target: their weights where names and shapes agree, the target's final norm,
    and `fc` as the identity on the feature nearest below the first of these layers, which is what they read.

    Args:
        draft (`DFlashDraftModel`): Changed in place.
        target (`PreTrainedModel`): Its target, with its layers.
        layers (`list[int]`): One layer of the target for each of the drafter's, from 0.

    Returns:
        `list[str]`: Names of the drafter's parameters that were taken.

    Raises:
        `ValueError`: another number of layers, one that the target does not have, or nothing fits.
    """
    theirs, config = decoder_layers(target), draft.config
    if len(layers) != len(draft.layers) or not all(0 <= one < len(theirs) for one in layers):
        raise ValueError(
            f"init_layers={layers} must name a layer of the target, 0 to {len(theirs) - 1}, for each of the drafter's "
            f"{len(draft.layers)}."
        )
    taken = []
    for number, layer in enumerate(layers):
        ours, source = draft.layers[number], dict(theirs[layer].named_modules())
        for name, module in ours.named_modules():
            if name in source and _take(module, source[name]):
                taken.append(f"layers.{number}.{name}.weight")
        _scale_head_norms(ours, source)
    if not taken:
        raise ValueError(
            f"init_layers={layers}: no weight of these layers of {type(target).__name__} has the name and the shape "
            "of a drafter's; leave init_layers out."
        )
    final = getattr(target.get_decoder(), "norm", None)
    if final is not None and _take(draft.norm, final):
        taken.append("norm.weight")
    if config.target_hidden_size == config.hidden_size:
        below = [i for i, layer in enumerate(config.target_layer_ids) if layer < layers[0]]
        feature = max(below, key=lambda i: config.target_layer_ids[i], default=len(config.target_layer_ids) - 1)
        draft.fc.weight.zero_()
        draft.fc.weight[:, feature * config.hidden_size :][:, : config.hidden_size].fill_diagonal_(1.0)
        draft.hidden_norm.weight.copy_(torch.stack([layer.input_layernorm.weight for layer in draft.layers]).mean(0))
        taken += ["fc.weight", "hidden_norm.weight"]
    return taken


def with_parts(draft, fields: dict):
    """
    A trained drafter with parts that it has not yet: a head, or DFlash 2's convolution. They begin as the identity: it
    drafts as before.

    Args:
        draft (`DFlashDraftModel`): Trained, and not changed.
        fields (`dict`): Of the configuration, all those of the new parts.

    Returns:
        `DFlashDraftModel`: Of the same weights and dtype, with fresh ones for what is new.

    Raises:
        `ValueError`: another field, or a part that it has, in another size.
    """
    others = head_fields().keys() - draft.config.head.fields
    for key, value in fields.items():
        has = None if key in others else getattr(draft.config, key, None)
        if key not in part_keys() or has not in (None, value):
            reason = "is no part that can be added" if key not in part_keys() else f"differs from its {has}"
            raise ValueError(
                f"draft_config.{key}={value} {reason}: a trained drafter keeps its configuration, but for "
                f"{', '.join(part_keys())}, which add a part to a drafter without."
            )
    config = type(draft.config).from_dict({**draft.config.to_dict(), **fields})
    wider = type(draft)(config).to(draft.device, draft.dtype)
    wider.load_state_dict({**wider.state_dict(), **draft.state_dict()})
    return wider.train(draft.training)


def _take(ours: nn.Module, theirs: nn.Module) -> bool:
    """Copy the weight of a projection, or of a norm what it really multiplies with (Gemma's stores one less)."""
    if isinstance(ours, nn.Linear) and isinstance(theirs, nn.Linear):
        weight = theirs.weight
    elif "Norm" in type(ours).__name__ and "Norm" in type(theirs).__name__:
        weight = theirs(torch.ones_like(ours.weight, device=theirs.weight.device))
    else:
        return False
    if weight.shape != ours.weight.shape or not weight.any():
        return False
    ours.weight.copy_(weight)
    return True


def _scale_head_norms(ours: nn.Module, theirs: dict[str, nn.Module]) -> None:
    """
    A target without norms of queries and keys scores with their own length; the drafter's norms get the length that
    states of independent channels would have.
    """
    attention = ours.self_attn
    for norm, projection in ((attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj)):
        if "self_attn.q_norm" not in theirs and "self_attn.q_proj" in theirs:
            norm.weight.fill_((projection.weight * ours.input_layernorm.weight).square().sum(1).mean().sqrt())


def count_tokens(dataset, vocab_size: int) -> torch.LongTensor:
    """How often each token is learned in a dataset of `input_ids` and `loss_mask`, `[V]`."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for start in range(0, len(dataset), 1000):
        rows = [dataset[index] for index in range(start, min(start + 1000, len(dataset)))]
        ids = torch.cat([torch.as_tensor(row["input_ids"]) for row in rows]).long()
        kept = torch.cat([torch.as_tensor(row["loss_mask"]) for row in rows]).bool()
        counts += torch.bincount(ids[kept], minlength=vocab_size)
    return counts


@torch.no_grad()
def take_vocabulary(draft, target, counts: torch.LongTensor) -> float:
    """
    Give a drafter with `draft_vocab_size` the most frequent tokens, and their rows of the target's head as its own.

    Args:
        draft (`DFlashDraftModel`): Changed in place.
        target (`PreTrainedModel`): Its target, with head.
        counts (`torch.LongTensor`): `[V]`, of [`count_tokens`].

    Returns:
        `float`: Share of the counted tokens that it can draft.
    """
    head, size = target.get_output_embeddings(), draft.config.draft_vocab_size
    counts = counts[: head.weight.shape[0]]
    ids = counts.argsort(descending=True, stable=True)[:size].sort().values  # of equal counts the lowest ids
    draft.d2t.copy_(ids - torch.arange(size))
    draft.lm_head.weight.copy_(head.weight[ids.to(head.weight.device)])
    return (counts[ids].sum() / counts.sum().clamp(min=1)).item()


def draft_ids(draft) -> torch.LongTensor | None:
    """
    The drafter's id of each of the target's tokens, `[V]`, -1 of those that it cannot draft; `None` where it has them
    all.

    Raises:
        `ValueError`: its vocabulary was never chosen.
    """
    if not draft.config.has_own_head:
        return None
    if draft.config.draft_vocab_size > 1 and not draft.d2t.any():
        raise ValueError(
            f"draft_vocab_size={draft.config.draft_vocab_size}, but the drafter's tokens were not chosen (d2t is 0): "
            "call `dflash_hf.training.start.take_vocabulary(draft, target, counts)` before training."
        )
    ids = torch.full((draft.config.vocab_size,), -1, device=draft.d2t.device)
    own = torch.arange(len(draft.d2t), device=draft.d2t.device)
    return ids.index_put((draft.target_ids(own),), own)
