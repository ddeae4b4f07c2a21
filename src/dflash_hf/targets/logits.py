"""The logits of a target from its final hidden states, without another forward of its layers."""

import torch
from torch import nn
from transformers import PreTrainedModel

from dflash_hf.modeling.modeling_dflash import input_dtype
from dflash_hf.targets.frozen import decoder_forward
from dflash_hf.targets.weights import is_plain


def target_logits(target: PreTrainedModel, states: torch.Tensor, ids: torch.LongTensor | None = None) -> torch.Tensor:
    """
    The target's logits `[..., V]` from its final hidden states `[..., H]`, scaled and capped as in its forward; with
    `ids` `[v]`, only the logits `[..., v]` of these tokens.
    """
    config = target.config.get_text_config()
    head = target.get_output_embeddings()
    # Stored states may have half the target's precision.
    states = states.to(device=head.weight.device, dtype=input_dtype(head, states))
    if ids is not None and type(head) is nn.Linear and is_plain(head):
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
    states = decoder_forward(target, input_ids, None, None)
    expected = target(input_ids=input_ids, use_cache=False).logits
    logits = target_logits(target, states).to(expected)
    if not torch.allclose(logits, expected, atol=1e-2 * expected.abs().max().item(), rtol=0):
        raise ValueError(
            f"{type(target).__name__} computes its logits in another way than by its head, with the scale and cap of "
            "its configuration, so that its distribution cannot be computed from stored states. Leave out "
            "`states=True`, or train with a loss that does not need it: loss_type=ce, dpace or auf."
        )
