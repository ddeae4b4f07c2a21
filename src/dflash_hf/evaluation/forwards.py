"""The cost of bare forwards, which bounds the speedup of a pair on this machine."""

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from dflash_hf.evaluation.scripted_draft import now_undisturbed
from dflash_hf.targets.features import cache_argument, empty_cache, input_device


_REPEATS = 7
_WARMUP = 2  # of them, which are not counted


@dataclass
class Forwards:
    """
    Median seconds of bare forwards with an ordinary cache.

    Args:
        one_token (`float`): The target's forward over one token.
        verify (`float`): The target's forward over a block.
        draft (`float`): The drafter's forward over a block and an equal number of context features, plus the head on
            its slots.
    """

    one_token: float
    verify: float
    draft: float

    def attainable(self, tau: float) -> float:
        """The highest possible speedup over one-token forwards: `tau * t_1 / (t_draft + t_verify)`."""
        return tau * self.one_token / (self.draft + self.verify)

    def line(self, tau: float, packed: bool) -> str:
        remark = ", packed" if packed else ""
        return (
            f"bare forwards     {1e3 * self.one_token:.2f} ms one token, {1e3 * self.verify:.2f} ms block, "
            f"{1e3 * self.draft:.2f} ms draft{remark}; attainable {self.attainable(tau):.2f}x over one-token forwards "
            f"alone{remark}"
        )


def time_forwards(target, draft, prompt: Sequence[int], context: int) -> Forwards:
    """Time bare forwards after `context` tokens: the prompt, repeated."""
    size = draft.config.block_size
    target_seconds, draft_seconds = time_sizes(target, draft, prompt, context, (1, size))
    return Forwards(one_token=target_seconds[1], verify=target_seconds[size], draft=draft_seconds)


@torch.no_grad()
def time_sizes(
    target, draft, prompt: Sequence[int], context: int, sizes: Sequence[int]
) -> tuple[dict[int, float], float]:
    """
    Time bare forwards after `context` tokens: the prompt, repeated.

    Args:
        target (`PreTrainedModel`), draft (`DFlashDraftModel`): The pair.
        prompt (`Sequence[int]`): Token ids.
        context (`int`): Tokens that both have read.
        sizes (`Sequence[int]`): Tokens of the target's forwards.

    Returns:
        `tuple[dict[int, float], float]`: Median seconds of the target's forward over so many tokens, and of the
        drafter's, see [`Forwards`].
    """
    device = input_device(target)
    ids = torch.tensor([repeated(prompt, context + max(sizes))], device=device)
    block = draft.config.block_size
    cache = empty_cache(target)
    target(input_ids=ids[:, :context], use_cache=True, **{cache_argument(target): cache})
    features = torch.randn(1, context + block, draft.fc.in_features, device=draft.device, dtype=draft.dtype)
    positions = torch.arange(context, device=draft.device)[None]
    draft_cache = DynamicCache()
    draft.extend_context(draft.project_context(features[:, :context]), positions, draft_cache)
    noise = torch.randn(1, block, draft.config.hidden_size, device=draft.device, dtype=draft.dtype)

    def run_target(size: int, cache) -> None:
        next_ids = ids[:, context : context + size]
        target(input_ids=next_ids, use_cache=True, **{cache_argument(target): cache})

    def run_draft(cache) -> None:
        new_features = features[:, context:]
        output = draft(noise_embeds=noise, context_hidden_states=new_features, past_key_values=cache)
        draft.draft_logits(output.last_hidden_state[:, 1:], target.get_output_embeddings())

    target_times: dict[int, list[float]] = {size: [] for size in sizes}
    draft_times = []
    for _ in range(_REPEATS):  # in turn, so that other load affects all of them
        for size, times in target_times.items():
            times.append(_seconds(lambda cache, size=size: run_target(size, cache), cache, target.device))
        draft_times.append(_seconds(run_draft, draft_cache, draft.device))
    medians = {size: statistics.median(times[_WARMUP:]) for size, times in target_times.items()}
    return medians, statistics.median(draft_times[_WARMUP:])


def repeated(prompt: Sequence[int], length: int) -> list[int]:
    """The last `length` tokens of a prompt that is repeated as often as necessary: it ends as the prompt does."""
    times = -(-length // len(prompt))
    return (list(prompt) * times)[-length:]


def _seconds(forward: Callable, cache, device: torch.device) -> float:
    """The time of a forward, on a copy of a cache: not every cache can be cropped afterwards."""
    own_cache = copy.deepcopy(cache)
    start = now_undisturbed(device)
    forward(own_cache)
    return now_undisturbed(device) - start
