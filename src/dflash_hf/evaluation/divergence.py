"""
Whether rounding alone explains an answer that differs from the target's own.

In reduced precision the same logits come out slightly different when they are computed in another way: one token at a
time, a whole block, in a batch. So greedy texts diverge where two tokens are nearly equally likely, in every
speculative decoder and in the target alone when it is called differently. Such a near-tie is distinguished from a
defect as follows:

1. *Rounding*, `r`: the target runs its own texts again, in several ways. `r` is the largest change, from one way to
   another, in the difference between the two best logits, over all positions.
2. *Gap*, `g`: at the first token that differs, the difference between the target's scores of the two tokens, from its
   own forward over the text before them: `g = |s(own) - s(other)|`.

The computation that chose the other token found a difference of at most 0. It and the computation that measures the
gap each differ from plain decoding by at most `r`, so a near-tie has `g <= 2 r`. Everything else is wrong: a token
that rounding cannot have chosen, or a text that ends where the target's does not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_hf.modeling.target_dflash import CACHE_NAME
from dflash_hf.responses import generate_one


EQUAL, NEAR_TIE, WRONG = "equal", "differs at a near-tie", "WRONG"
POSITIONS = 512  # where rounding is measured
_SHARE = 0.1  # choosing another token more often than this is not rounding: the target cannot be run in that way


@dataclass
class Divergence:
    """
    The first token of an answer that is not the target's own.

    Args:
        method (`str`), prompt (`int`): The method, and the index of the prompt.
        position (`int`): In the answer.
        own, other (`int`): The target's token and the method's; -1 if that text has ended.
        gap (`float`, *optional*): Difference between their scores; `None` if a text has ended.
        verdict (`str`): `NEAR_TIE` or `WRONG`.
    """

    method: str
    prompt: int
    position: int
    own: int
    other: int
    gap: float | None = None
    verdict: str = WRONG


@dataclass
class Rounding:
    """
    The target compared with itself.

    Args:
        size (`float`): `r` in the module's docstring.
        positions (`int`): Number of positions measured.
        ways (`list[str]`): The ways of computing that the target can be run in.
    """

    size: float
    positions: int
    ways: list[str]


def judge(
    target, prompts: Sequence, own: Sequence, others: dict[str, Sequence], block_size: int
) -> tuple[list[Divergence], Rounding | None]:
    """
    Find where answers diverge from the target's own, and whether rounding explains it.

    Args:
        target (`PreTrainedModel`): Decodes greedily.
        prompts (`Sequence[Sequence[int]]`): Prompt ids.
        own (`Sequence[Sequence[int]]`): The target's answer to each.
        others (`dict[str, Sequence[Sequence[int]]]`): The answers of each method.
        block_size (`int`): Tokens read by one verification.

    Returns:
        The divergences, and the rounding (`None` if nothing diverges).
    """
    found = [
        Divergence(method, i, *parting)
        for method, answers in others.items()
        for i, (answer, expected) in enumerate(zip(answers, own, strict=True))
        if (parting := _first_difference(expected, answer)) is not None
    ]
    if not found:
        return [], None
    # Texts that diverge come first: their positions matter most.
    order = list(dict.fromkeys([one.prompt for one in found] + list(range(len(prompts)))))
    rounding = measure_rounding(target, [(prompts[i], own[i]) for i in order], block_size)
    gaps: dict[tuple, float | None] = {}
    for one in found:
        place = (one.prompt, one.position, one.own, one.other)
        if place not in gaps:
            prompt, answer = prompts[one.prompt], list(own[one.prompt][: one.position])
            text = prompt + answer if isinstance(prompt, list) else [*prompt, *answer]  # with its images
            gaps[place] = gap_at(target, text, one.own, one.other)
        one.gap = gaps[place]
        one.verdict = WRONG if one.gap is None or one.gap > 2 * rounding.size else NEAR_TIE
    return found, rounding


def _first_difference(own: Sequence[int], other: Sequence[int]) -> tuple[int, int, int] | None:
    if list(own) == list(other):
        return None
    place = next((i for i, (a, b) in enumerate(zip(own, other)) if a != b), min(len(own), len(other)))
    return place, *(ids[place] if place < len(ids) else -1 for ids in (own, other))


def gap_at(target, text: Sequence[int], own: int, other: int) -> float | None:
    """The difference between the scores of two next tokens, after the processors of the target's own configuration."""
    if -1 in (own, other):
        return None
    output = generate_one(target, text, do_sample=False, output_scores=True, max_new_tokens=1)
    scores = output.scores[0][0].double()
    gap = abs(float(scores[own] - scores[other]))
    return gap if math.isfinite(gap) else None


def measure_rounding(target, texts: Sequence[tuple[Sequence[int], Sequence[int]]], block_size: int) -> Rounding:
    """
    Run prompts and answers again: token by token, in blocks, in one forward, and in one forward with two rows.

    Args:
        texts (`Sequence`): Pairs of prompt and answer ids; read up to `POSITIONS` tokens.
    """
    rounding = Rounding(0.0, 0, ["in blocks", "whole", "in a batch of two"])
    for prompt, answer in texts:
        answer = answer[: POSITIONS - rounding.positions]
        if not answer:
            continue
        ids, start = torch.tensor([[*prompt, *answer]], device=target.device), len(prompt)
        chosen, reference = _two_best(target, ids, start, 1)  # [n, 2], [n]
        others = {
            "in blocks": _two_best(target, ids, start, block_size, chosen),
            "whole": _two_best(target, ids, start, None, chosen),
            "in a batch of two": _two_best(target, ids.expand(2, -1), start, None, chosen),
        }
        rounding.positions += len(answer)
        for way in list(rounding.ways):
            best, apart = others[way]
            if (best[:, 0] != chosen[:, 0]).sum() > max(_SHARE * len(answer), 2):
                rounding.ways.remove(way)
            else:
                rounding.size = max(rounding.size, float((apart - reference).abs().max()))
    return rounding


@torch.no_grad()
def _two_best(target, ids: torch.Tensor, start: int, step: int | None, chosen: torch.Tensor | None = None):
    """
    For each token of a text from `start` on, the two best tokens `[n, 2]`, and the difference `[n]` between the logits
    of `chosen` `[n, 2]` (default: of the two best); of the first row. The text is read `step` tokens at a time, or in
    one forward if `None`.
    """
    last = ids.shape[1] - 1  # nothing follows the last token
    edges = [0, *(range(start, last, step) if step else ()), last]
    cache, best, apart, done = None, [], [], 0
    for begin, end in zip(edges, edges[1:]):
        first = max(start - 1 - begin, 0)  # only the prompt's last token predicts one of the answer
        output = target(input_ids=ids[:, begin:end], use_cache=step is not None, **{CACHE_NAME: cache})
        cache = getattr(output, CACHE_NAME, None)
        logits = output.logits[0, first:].float()  # [m, V]
        best.append(logits.topk(2).indices)
        pair = best[-1] if chosen is None else chosen[done : done + len(logits)]
        apart.append(logits.gather(1, pair).diff()[:, 0].neg())
        done += len(logits)
        if cache is None and end < last:  # it keeps its state elsewhere: read the text in one forward
            return _two_best(target, ids, start, None, chosen)
    return torch.cat(best), torch.cat(apart)


def summary(found: Sequence[Divergence], method: str) -> str:
    """`EQUAL`, `NEAR_TIE` or `WRONG`: the worst of a method's answers."""
    verdicts = {one.verdict for one in found if one.method == method}
    return WRONG if WRONG in verdicts else NEAR_TIE if verdicts else EQUAL
