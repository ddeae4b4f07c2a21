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
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from dflash_hf.targets.features import cache_argument
from dflash_hf.targets.generation import generate_one, image_inputs


EQUAL = "equal"
NEAR_TIE = "differs at a near-tie"
WRONG = "WRONG"
POSITIONS = 512  # tokens at which rounding is measured
_MAX_CHANGED_SHARE = 0.1  # if more tokens change than this, it is not rounding: the target cannot be run in that way


@dataclass
class Divergence:
    """
    The first token of an answer that is not the target's own.

    Args:
        method (`str`): The method.
        prompt (`int`): Index of the prompt.
        position (`int`): Index of the token in the answer.
        own (`int`): The target's token; -1 if its text has ended.
        other (`int`): The method's token; -1 if its text has ended.
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


def find_divergences(
    target, prompts: Sequence, own: Sequence, answers_of: dict[str, Sequence], block_size: int
) -> tuple[list[Divergence], Rounding | None]:
    """
    Find where answers diverge from the target's own, and whether rounding explains it.

    Args:
        target (`PreTrainedModel`): Decodes greedily.
        prompts (`Sequence[Sequence[int]]`): Prompt ids.
        own (`Sequence[Sequence[int]]`): The target's answer to each.
        answers_of (`dict[str, Sequence[Sequence[int]]]`): The answers of each method.
        block_size (`int`): Tokens read by one verification.

    Returns:
        The divergences, and the rounding (`None` if nothing diverges).
    """
    divergences = []
    for method, answers in answers_of.items():
        for i, (answer, expected) in enumerate(zip(answers, own, strict=True)):
            difference = _first_difference(expected, answer)
            if difference is not None:
                position, own_token, other_token = difference
                divergences.append(Divergence(method, i, position, own_token, other_token))
    if not divergences:
        return [], None
    # Texts that diverge come first: their positions matter most.
    order = list(dict.fromkeys([divergence.prompt for divergence in divergences] + list(range(len(prompts)))))
    rounding = measure_rounding(target, [(prompts[i], own[i]) for i in order], block_size)
    gaps: dict[tuple, float | None] = {}
    for divergence in divergences:
        key = (divergence.prompt, divergence.position, divergence.own, divergence.other)
        if key not in gaps:  # several methods often diverge at the same token
            prompt = prompts[divergence.prompt]
            answer = list(own[divergence.prompt][: divergence.position])
            context_ids = _joined(prompt, answer)
            gaps[key] = gap_at(target, context_ids, divergence.own, divergence.other)
        divergence.gap = gaps[key]
        is_near_tie = divergence.gap is not None and divergence.gap <= 2 * rounding.size
        divergence.verdict = NEAR_TIE if is_near_tie else WRONG
    return divergences, rounding


def _joined(prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """A prompt and what follows it; `+` of an `ImagePrompt`, which is a list, keeps its images."""
    return prompt + list(answer) if isinstance(prompt, list) else [*prompt, *answer]


def _first_difference(own: Sequence[int], other: Sequence[int]) -> tuple[int, int, int] | None:
    """The position and the two tokens there, -1 where a text has ended; `None` if the texts are equal."""
    if list(own) == list(other):
        return None
    position = 0
    while position < min(len(own), len(other)) and own[position] == other[position]:
        position += 1
    own_token = own[position] if position < len(own) else -1
    other_token = other[position] if position < len(other) else -1
    return position, own_token, other_token


def gap_at(target, context_ids: Sequence[int], own: int, other: int) -> float | None:
    """The difference between the scores of two next tokens, after the processors of the target's own configuration."""
    if -1 in (own, other):
        return None
    output = generate_one(target, context_ids, do_sample=False, output_scores=True, max_new_tokens=1)
    scores = output.scores[0][0].double()
    gap = abs(float(scores[own] - scores[other]))
    return gap if math.isfinite(gap) else None


def measure_rounding(target, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], block_size: int) -> Rounding:
    """
    Run prompts and answers again: token by token, in blocks, in one forward, and in one forward with two rows.

    Args:
        pairs (`Sequence`): Prompt and answer ids; `POSITIONS` tokens of answers are read in all.
    """
    rounding = Rounding(0.0, 0, ["in blocks", "whole", "in a batch of two"])
    for prompt, answer in pairs:
        answer = answer[: POSITIONS - rounding.positions]
        if not answer:
            continue
        text = _joined(prompt, answer)
        ids = torch.tensor([list(text)], device=target.device)
        images = image_inputs(target, text)
        images_of_two = {name: torch.cat([tensor, tensor]) for name, tensor in images.items()}
        start = len(prompt)
        best, gaps = _two_best(target, ids, images, start, 1)  # [n, 2], [n]
        computed = {
            "in blocks": _two_best(target, ids, images, start, block_size, best),
            "whole": _two_best(target, ids, images, start, None, best),
            "in a batch of two": _two_best(target, ids.expand(2, -1), images_of_two, start, None, best),
        }
        rounding.positions += len(answer)
        for way in list(rounding.ways):
            other_best, other_gaps = computed[way]
            changed = int((other_best[:, 0] != best[:, 0]).sum())
            if changed > max(_MAX_CHANGED_SHARE * len(answer), 2):
                rounding.ways.remove(way)
            else:
                rounding.size = max(rounding.size, float((other_gaps - gaps).abs().max()))
    return rounding


@torch.no_grad()
def _two_best(
    target,
    ids: torch.Tensor,
    images: dict[str, torch.Tensor],
    start: int,
    step: int | None,
    tokens: torch.Tensor | None = None,
):
    """
    What the target predicts for each of the last `n` tokens of a sequence, of the first row.

    Args:
        target (`PreTrainedModel`): The target.
        ids (`torch.Tensor`): `[N, S]`, equal rows.
        images (`dict[str, torch.Tensor]`): What the forward takes of the images among the first `start` tokens of all
            rows.
        start (`int`): Index of the first of the `n` tokens.
        step (`int`, *optional*): How many tokens are read at a time. `None`: all in one forward.
        tokens (`torch.Tensor`): `[n, 2]`, the two tokens whose logits are compared. Default: the two best.

    Returns:
        The two best tokens `[n, 2]`, and the difference between the logits of the two `tokens` `[n]`.
    """
    last = ids.shape[1] - 1  # nothing follows the last token
    inner_edges = range(start, last, step) if step else ()
    edges = [0, *inner_edges, last]
    cache_name = cache_argument(target)
    cache = None
    best: list[torch.Tensor] = []
    gaps: list[torch.Tensor] = []
    done = 0
    for begin, end in zip(edges, edges[1:]):
        first = max(start - 1 - begin, 0)  # only the prompt's last token predicts one of the answer
        options = {cache_name: cache}
        if begin == 0:  # images are in the prompt; what has an entry for each token is cut as the ids are
            for name, tensor in images.items():
                options[name] = tensor[:, :end] if name.endswith("token_type_ids") else tensor
        output = target(input_ids=ids[:, begin:end], use_cache=step is not None, **options)
        cache = getattr(output, cache_name, None)
        logits = output.logits[0, first:].float()  # [m, V]
        best.append(logits.topk(2).indices)
        pair = best[-1] if tokens is None else tokens[done : done + len(logits)]
        gaps.append(logits.gather(1, pair).diff()[:, 0].neg())
        done += len(logits)
        if cache is None and end < last:  # it keeps its state elsewhere: read the sequence in one forward
            return _two_best(target, ids, images, start, None, tokens)
    return torch.cat(best), torch.cat(gaps)


def worst_verdict(divergences: Sequence[Divergence], methods: Collection[str]) -> str:
    """`EQUAL`, `NEAR_TIE` or `WRONG`: the worst of the answers of some methods."""
    verdicts = {divergence.verdict for divergence in divergences if divergence.method in methods}
    if WRONG in verdicts:
        return WRONG
    return NEAR_TIE if verdicts else EQUAL
