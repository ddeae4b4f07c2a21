"""
Whether sampled answers follow the target's distribution.

A drafted call of this package draws the target's own sample of a seed, so a text that is equal to it needs no test.
Others differ from it by rounding, which decides where two tokens are nearly tied, or because a method draws its random
numbers in another order. Each is right if it is a sample of the target's distribution `p`, after temperature and
processors. Then the surprise of each token, `-log p(x)`, is on average the entropy `H` of the distribution that it was
drawn from, whatever came before it. So over all tokens of all answers

    z = sum(-log p(x) - H) / sqrt(sum(Var[-log p]))

has mean 0 and variance 1, and is nearly normal: the terms are martingale differences, and a text may end wherever it
likes. Tokens that are too likely, as those of greedy decoding or of a lower temperature, give a negative `z`; tokens
that are too unlikely, as a drafter's that were not verified, a positive one. A token of probability 0 is wrong by
itself. One forward of the target over each text suffices.

All answers of a method are tested, those that equal the target's own too: those that differ are a selection, in which
ties are frequent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_hf.evaluation.decoded import DecodedRuns
from dflash_hf.evaluation.divergence import WRONG
from dflash_hf.evaluation.methods import TARGET_ALONE
from dflash_hf.modeling.candidates_dflash import POSITIONWISE_PROCESSORS
from dflash_hf.targets.generation import generate_one, image_inputs


FOLLOWS = "follows the target's distribution"
MAX_Z = 5.0
_POSITIONS = 128  # whose probabilities are computed at once, in float64


@dataclass
class TextScore:
    """
    How surprising the tokens of a text are to the target.

    Args:
        excess (`float`): `sum(-log p(x) - H)`, in nats.
        variance (`float`): `sum(Var[-log p])`.
        tokens (`int`): Number of tokens.
        impossible (`int`): Tokens whose probability is 0, which the sums leave out.
    """

    excess: float = 0.0
    variance: float = 0.0
    tokens: int = 0
    impossible: int = 0

    def __add__(self, other: "TextScore") -> "TextScore":
        return TextScore(
            self.excess + other.excess,
            self.variance + other.variance,
            self.tokens + other.tokens,
            self.impossible + other.impossible,
        )

    @property
    def z(self) -> float:
        """The excess in standard deviations; 0 if nothing was left to chance."""
        return self.excess / math.sqrt(self.variance) if self.variance > 0 else 0.0


@dataclass
class DistributionTest:
    """
    The test of a method's answers: of the run in which they are furthest from the target's distribution.

    Args:
        method (`str`): The method. The target alone, whose samples are right, is tested for comparison.
        z (`float`): See the module's docstring.
        tokens (`int`): Number of tokens tested.
        impossible (`int`): Tokens that the target never draws.
        verdict (`str`): `FOLLOWS` or `WRONG`.
    """

    method: str
    z: float
    tokens: int
    impossible: int = 0
    verdict: str = FOLLOWS


def find_deviations(target, prompts: Sequence, decoded: DecodedRuns, options: dict) -> list[DistributionTest]:
    """
    Test the methods whose answers are not all equal to the target's own, and the target alone.

    Args:
        target (`PreTrainedModel`): The target.
        prompts (`Sequence[Sequence[int]]`): Prompt ids.
        decoded (`DecodedRuns`): The answers.
        options (`dict`): Arguments of `generate` that they were sampled with.

    Returns:
        `list[DistributionTest]`: Empty if all answers are equal.
    """
    methods = []
    for method in decoded[-1]:
        if any(_texts(run[method]) != _texts(run[TARGET_ALONE]) for run in decoded):
            methods.append(method)
    if not methods:
        return []
    scores: dict[tuple, TextScore] = {}  # by prompt and text: most methods and runs share their texts
    tests = []
    for method in (TARGET_ALONE, *methods):
        worst = TextScore()
        for run in decoded:
            total = TextScore()
            for index, answer in enumerate(run[method]):
                key = (index, *answer.ids)
                if key not in scores:
                    scores[key] = score_text(target, prompts[index], answer.ids, options)
                total = total + scores[key]
            if (total.impossible, abs(total.z)) >= (worst.impossible, abs(worst.z)):
                worst = total
        is_wrong = worst.impossible > 0 or abs(worst.z) > MAX_Z
        verdict = WRONG if is_wrong else FOLLOWS
        tests.append(DistributionTest(method, worst.z, worst.tokens, worst.impossible, verdict))
    return tests


def _texts(answers: Sequence) -> list[list[int]]:
    return [answer.ids for answer in answers]


@torch.inference_mode()
def score_text(target, prompt: Sequence[int], answer: Sequence[int], options: dict) -> TextScore:
    """
    Read a text with the target, in one forward.

    Args:
        target (`PreTrainedModel`): The target.
        prompt, answer (`Sequence[int]`): Token ids.
        options (`dict`): Arguments of `generate` that the answer was sampled with: their processors change `p`.
    """
    if not answer:
        return TextScore()
    text = prompt + list(answer) if isinstance(prompt, list) else [*prompt, *answer]  # `+` keeps images
    ids = torch.tensor([list(text)], device=target.device)
    score = TextScore()

    def read(model, input_ids, logits_processor, **arguments):
        nonlocal score
        output = model(input_ids=ids, use_cache=False, **image_inputs(target, text))
        logits = output.logits[0, len(prompt) - 1 : -1]  # [n, V], of the tokens of the answer
        for start in range(0, len(answer), _POSITIONS):
            part = logits[start : start + _POSITIONS].to(torch.float32, copy=True)  # as `generate` computes them
            scores = _processed(logits_processor, ids, part, len(prompt) + start)
            score = score + _score_tokens(scores.double(), ids[0, len(prompt) + start :][: len(part)])
        return input_ids

    generate_one(target, prompt, custom_generate=read, **options)
    return score


def _processed(processors, ids: torch.LongTensor, logits: torch.Tensor, start: int) -> torch.Tensor:
    """The scores `[n, V]` that `generate` samples from, of the tokens from index `start` on, from their logits."""
    if all(type(processor) in POSITIONWISE_PROCESSORS for processor in processors):
        return processors(None, logits)
    scores = [processors(ids[:, : start + i], row[None]) for i, row in enumerate(logits)]
    return torch.cat(scores)


def _score_tokens(scores: torch.Tensor, tokens: torch.LongTensor) -> TextScore:
    """The score of tokens `[n]`, from the scores `[n, V]` of all that could be in their place."""
    log_p = scores.log_softmax(dim=-1)
    p = log_p.exp()
    finite_log_p = log_p.clamp(min=-1e9)  # times p = 0 this is 0, where -inf is NaN
    entropy = -(p * finite_log_p).sum(dim=-1)  # [n]
    variance = (p * finite_log_p.square()).sum(dim=-1) - entropy.square()
    surprise = -log_p.gather(1, tokens[:, None])[:, 0]
    possible = surprise.isfinite()
    excess = (surprise - entropy)[possible].sum()
    impossible = int((~possible).sum())
    return TextScore(float(excess), float(variance.clamp(min=0)[possible].sum()), len(tokens), impossible)
