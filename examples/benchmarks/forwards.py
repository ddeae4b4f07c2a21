"""The cost of bare forwards, which bounds the speed-up of a pair on this machine."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from dflash_hf.evaluation.measure import now
from dflash_hf.modeling.candidates_dflash import CACHE_NAME


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
        """The highest possible speed-up over one-token forwards: `tau * t_1 / (t_draft + t_verify)`."""
        return tau * self.one_token / (self.draft + self.verify)

    def line(self, tau: float, packed: bool) -> str:
        remark = ", packed" if packed else ""
        return (
            f"bare forwards     {1e3 * self.one_token:.2f} ms one token, {1e3 * self.verify:.2f} ms block, "
            f"{1e3 * self.draft:.2f} ms draft{remark}; attainable {self.attainable(tau):.2f}x over one-token forwards "
            f"alone{remark}"
        )


@torch.no_grad()
def time_forwards(target, draft, prompt: Sequence[int], context: int) -> Forwards:
    """Time bare forwards after `context` tokens."""
    device = target.device
    size = draft.config.block_size
    ids = torch.tensor([(list(prompt) * (context // len(prompt) + 2))[:context]], device=device)
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    draft_cache = DynamicCache()
    target(input_ids=ids, use_cache=True, **{CACHE_NAME: cache})
    features = torch.randn(1, context, draft.fc.in_features, device=device, dtype=draft.dtype)
    draft.extend_context(draft.project_context(features), torch.arange(context, device=device)[None], draft_cache)
    noise = torch.randn(1, size, draft.config.hidden_size, device=device, dtype=draft.dtype)
    times: dict[str, list[float]] = {"one_token": [], "verify": [], "draft": []}

    def run(name: str, forward: Callable, cache, length: int) -> None:
        start = now(device)
        forward()
        times[name].append(now(device) - start)
        cache.crop(-length)

    def drafting():
        output = draft(noise_embeds=noise, context_hidden_states=features[:, :size], past_key_values=draft_cache)
        draft.draft_logits(output.last_hidden_state[:, 1:], target.get_output_embeddings())

    for _ in range(7):  # in turn, so that other load affects all of them
        run("one_token", lambda: target(input_ids=ids[:, :1], use_cache=True, **{CACHE_NAME: cache}), cache, 1)
        run("verify", lambda: target(input_ids=ids[:, :size], use_cache=True, **{CACHE_NAME: cache}), cache, size)
        run("draft", drafting, draft_cache, 2 * size)
    return Forwards(**{name: statistics.median(seconds[2:]) for name, seconds in times.items()})
