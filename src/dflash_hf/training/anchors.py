"""
Anchors: the positions of a sequence at which blocks begin.

They are drawn by hashing, not by a generator with a state: a sequence's anchors depend on its tokens, the run's seed
and the step alone, however the batch is split, padded or distributed over processes, and after a resume.
"""

import torch


_GOLDEN = -7046029254386353131  # 2**64 over the golden ratio, as int64: the increment of splitmix64


def example_seeds(input_ids: torch.Tensor, attention_mask: torch.Tensor, seed: int, step: int) -> torch.LongTensor:
    """
    One seed for each sequence, from its tokens, `seed` and `step` only.

    Args:
        input_ids (`torch.LongTensor`): `[N, S]`.
        attention_mask (`torch.Tensor`): `[N, S]`, nonzero at real tokens.
        seed (`int`): The run's seed.
        step (`int`): The optimizer step; another one gives other anchors.

    Returns:
        `torch.LongTensor` `[N]`.
    """
    position = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device) * _GOLDEN  # [S]
    content = (_mix(input_ids.long() + position) * attention_mask.bool()).sum(1)  # [N], wraps
    return _mix(content + _mix(_mix(torch.tensor(seed, device=input_ids.device)) + step))


def sample_anchors(
    loss_mask: torch.Tensor,
    num_anchors: int,
    generator: torch.Generator | None = None,
    seeds: torch.LongTensor | None = None,
    every: int | None = None,
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """
    Draw anchors uniformly without replacement among positions `a >= 1` with `loss_mask[a]` and `loss_mask[a + 1]`: a
    block needs a context before the anchor and a supervised token after it. With `every`, only among the first token
    of each answer and every so many tokens from there.

    Args:
        loss_mask (`torch.Tensor`): `[N, S]`, nonzero at tokens of responses.
        num_anchors (`int`): Number of anchors `A`.
        generator (`torch.Generator`): Draws the seeds if `seeds` is not given.
        seeds (`torch.LongTensor`): `[N]`; the anchors of a sequence depend on its seed only.
        every (`int`, *optional*): Tokens between two regular anchors of an answer.

    Returns:
        `anchors` `[N, A]`, ascending, 0 if there is no position left, and `valid` `[N, A]`, false there.
    """
    length = loss_mask.shape[1]
    device = loss_mask.device
    if seeds is None:
        seeds = torch.randint(2**62, (loss_mask.shape[0],), generator=generator).to(device)
    response = loss_mask.bool()
    eligible = torch.zeros_like(response)  # [N, S]
    eligible[:, 1:-1] = response[:, 1:-1] & response[:, 2:]
    if every is not None:
        eligible &= _tokens_into_response(response) % every == 0

    # The A largest of independent uniform keys are a uniform sample without replacement.
    position = torch.arange(1, length + 1, device=device) * _GOLDEN
    keys = _mix(seeds[:, None] + position) & 0x7FFFFFFFFFFFFFFF  # [N, S], non-negative
    keys = keys.masked_fill(~eligible, -1)
    keys, anchors = keys.topk(min(num_anchors, length), dim=1)  # [N, min(A, S)]
    anchors = anchors.masked_fill(keys < 0, length).sort(dim=1).values  # invalid ones come last
    anchors = torch.nn.functional.pad(anchors, (0, num_anchors - anchors.shape[1]), value=length)  # [N, A]
    valid = anchors < length
    return anchors.masked_fill(~valid, 0), valid


def _tokens_into_response(response: torch.BoolTensor) -> torch.LongTensor:
    """For each token `[N, S]` of a response, the number of tokens of that response before it."""
    position = torch.arange(response.shape[1], device=response.device).expand(response.shape)
    is_first = response.clone()
    is_first[:, 1:] &= ~response[:, :-1]
    return position - (position * is_first).cummax(dim=1).values


def _mix(z: torch.LongTensor) -> torch.LongTensor:
    """The finaliser of splitmix64 on int64, which wraps: stateless random bits, equal on every device."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)
