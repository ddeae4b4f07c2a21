"""
Scripted drafters: they compute what a drafter computes, and draft known texts, wrong at chosen places. So the
package's own loop runs with the acceptance of a drafter that does not exist yet.

[`script_of`] chooses the places as real drafters miss them:

- Each token is right with a chance of its own, drawn from a Beta distribution with the mean `a`, independently. Then
  the acceptance length is geometric, cut at the block: `tau = 1 + a + a^2 + ... + a^(B-1)`. The bundled drafter's
  report (`examples/smollm2-135m-dflash/eval_report.json`) accepts 58, 35, 20, 12, 8, 4 and 3 % of its slots or more:
  each about 0.6 of the one before.
- A miss is often among the drafter's next tokens, which trees verify.

The chances are also the probabilities that the drafter states, by which a plain call chooses what to verify.

In bf16 and fp16 a target may choose another token at a near-tie when it verifies several tokens, and from there on the
script would be another text's. [`scripted_target`] keeps a target on its own text.
"""

import contextlib
import copy
import functools
import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from dflash_hf.decoding.probe import capabilities_of
from dflash_hf.decoding.timing import clock
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.evaluation.measure import now
from dflash_hf.targets.clones import shallow_clone


_DIGITS = 3  # of a place in the script, in base 256: every dtype holds them exactly
_SURE = 3e4  # a logit above all others, which fp16 holds too
# Of 447 slots of the bundled drafter on six held-out chats of 96 tokens, whose earlier slots were right, 56 % were
# right. Variance of this share over ranges of the drafter's own probability: 0.08, as of Beta(2a, 2(1 - a)).
_BETA_WEIGHT = 2.0
# Of the others, 27, 11, 10, 4, 3, 3 and 3 % had the right token as second, third, ... eighth likeliest: about
# 0.55 / 2, 0.55 / 4, ...
_NEAR_MISSES = 0.55
_RANKS = 8
_DRAWS = 200  # scripts of which the one nearest to tau is taken: chance alone moves tau of 100 rounds by 8 %


def now_undisturbed(device: torch.device) -> float:
    """
    The time, after the device has finished its work. On a CPU as the default policy measures it: with a single thread
    it is the thread's own CPU time, which other load of the machine does not extend.
    """
    return clock(device) if device.type == "cpu" else now(device)


class Stopwatch:
    """
    Adds up the time of forwards. Each is waited for, so that other times of a call that it measures are not typical.

    Attributes:
        seconds (`float`): So far.
    """

    def __init__(self):
        self.seconds = 0.0

    @contextlib.contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        start = now_undisturbed(device)
        yield
        self.seconds += now_undisturbed(device) - start


class ScriptedDraft(DFlashDraftModel):
    """
    A drafter that computes all that a drafter computes, and then drafts known texts.

    Its forward writes into the hidden state of each slot which place of the script this slot is, and `draft_logits`
    makes the tokens of that place the likeliest. So all that ask a drafter for tokens get those of the script: blocks,
    trees, compiled rounds, upstream's own loop. Each row follows the text that begins with its prompt, or the text of
    its own number where several do. It serves one call at a time. Build it with `of`.

    Attributes:
        is_certain_in_blocks (`bool`): Where no tree is asked for, the first token is certain, however likely it is in
            trees: sampled blocks then hold the script. Set it to false where the plain call is measured, which
            chooses sizes by the drafter's probabilities.
        stopwatch ([`Stopwatch`], *optional*): Times what a drafter computes, without what the script replaces.
    """

    is_certain_in_blocks = True
    stopwatch: Stopwatch | None = None

    @classmethod
    def of(
        cls,
        draft: DFlashDraftModel,
        texts: Sequence[torch.LongTensor],
        likely: Sequence[torch.LongTensor] | None = None,
        certainty: float | Sequence[torch.Tensor] = 0.8,
    ):
        """
        The drafter with a script; its weights and settings are shared.

        Args:
            draft (`DFlashDraftModel`): The drafter.
            texts (`Sequence[torch.LongTensor]`): `[S]` each, prompt and continuation, with the padding of the prompt.
            likely (`Sequence[torch.LongTensor]`, *optional*): `[S, k]` each, the tokens drafted for every place, the
                likeliest first. Default: the texts.
            certainty (`float` or `Sequence[torch.Tensor]`): In trees, the probability of the first of them, against
                that of all other tokens; each of the next is `e` times less likely than the one before. Or `[S, k]`
                each, the probability of each of them at each place; all other tokens share the rest.
        """
        scripted = copy.copy(draft)
        scripted.__class__ = cls
        likely = [text[:, None] for text in texts] if likely is None else likely
        scripted.texts = nn.utils.rnn.pad_sequence(list(texts), batch_first=True, padding_value=-1)  # [T, S]
        scripted.likely = nn.utils.rnn.pad_sequence(list(likely), batch_first=True)  # [T, S, k]
        places = torch.arange(scripted.texts.numel(), device=scripted.texts.device)
        base = 256 ** torch.arange(_DIGITS, device=places.device)
        digits = places[:, None] // base % 256  # [T * S, digits]
        scripted.codes = (digits / 256).to(draft.device, draft.dtype)  # small: heads read hidden states, too
        scripted.base = 256 * base.float()
        scripted.log_odds = _log_odds(certainty, scripted.likely)
        scripted.begin(scripted.texts[:1, :1])
        return scripted

    def begin(self, prompt: torch.LongTensor) -> None:
        """Choose the text of each row by its prompt `[R, S]`. `generate` calls this; before other loops, call it."""
        rows, columns = prompt.shape
        own = torch.arange(rows, device=prompt.device) % len(self.texts)
        same = (self.texts[:, :columns] == prompt[:, None, : self.texts.shape[1]]).all(dim=-1).long()  # [R, T]
        same[torch.arange(rows), own] *= 2
        self.rows = torch.where(same.any(dim=1), same.argmax(dim=1), own)[:, None]  # [R, 1]
        self.columns = columns
        self.origin = torch.zeros_like(self.rows)
        self.unread = columns  # of the prompt, at most

    def dflash_decode(self, target, input_ids, *args, **kwargs):
        self.begin(input_ids)
        return super().dflash_decode(target, input_ids, *args, **kwargs)

    def extend_context(self, context, position_ids, past_key_values):
        if self.unread > 0:  # the prompt; later texts are read that were written without drafts
            self.origin = (position_ids[:, -1:] - (self.columns - 1)).to(self.rows.device)  # [R, 1]
            self.unread -= position_ids.shape[1]
        return super().extend_context(context, position_ids, past_key_values)

    def forward(self, noise_embeds, *args, position_ids=None, **kwargs):
        with _timed(self.stopwatch, self.device):
            output = super().forward(noise_embeds, *args, position_ids=position_ids, **kwargs)
        self.unread = 0
        places = self.places(position_ids, output.last_hidden_state)
        output.last_hidden_state[:, -places.shape[1] :, :_DIGITS] = self.codes[places.to(self.codes.device)]
        return output

    def places(self, position_ids: torch.LongTensor, hidden_states: torch.Tensor) -> torch.LongTensor:
        """`[R, B - 1]`, or `[R, B]`: where the script has what the slots of a block predict, all texts in a row."""
        early = int(self.config.sample_from_anchor)  # then the anchor's own slot predicts, too
        columns = position_ids[:, 1 - early - hidden_states.shape[1] :].to(self.rows.device) - self.origin + early
        width = self.texts.shape[1]
        return self.rows * width + columns.clamp(max=width - 1)

    def draft_logits(self, hidden_states, target_head):
        codes = hidden_states[..., :_DIGITS]
        rest = hidden_states[..., _DIGITS:]
        with _timed(self.stopwatch, self.device):
            logits = super().draft_logits(nn.functional.pad(rest, (_DIGITS, 0)), target_head)
        places = (codes.to(self.base.device, torch.float32) * self.base).sum(dim=-1).long()
        likely = self.likely.flatten(0, 1)[places].to(logits.device)  # [..., k]
        if self.config.has_own_lm_head:  # a token that it does not have is another one
            drafted = torch.arange(logits.shape[-1], device=logits.device)
            likely = drafted.new_zeros(self.config.vocab_size).scatter(0, self.target_ids(drafted), drafted)[likely]
        if self.decoding_config.tree_nodes is None and self.is_certain_in_blocks:
            return logits.scatter_(-1, likely[..., :1], _SURE)
        log_odds = self.log_odds.flatten(0, 1)[places].to(logits.device)  # [..., k]
        equally_likely = torch.zeros_like(logits, dtype=torch.float32)
        return equally_likely.scatter(-1, likely, log_odds + math.log(logits.shape[-1]))


def _log_odds(certainty: float | Sequence[torch.Tensor], likely: torch.LongTensor) -> torch.Tensor:
    """`[T, S, k]`: how much likelier each of the `likely` tokens `[T, S, k]` is than all tokens without a place."""
    if isinstance(certainty, float):
        certainty = min(max(certainty, 0.51), 1 - 1e-6)  # or it would not be the likeliest
        ranks = torch.arange(likely.shape[-1], device=likely.device)
        return (math.log(certainty / (1 - certainty)) - ranks).expand(likely.shape)
    chances = nn.utils.rnn.pad_sequence(list(certainty), batch_first=True, padding_value=0.0)
    chances = chances.to(likely.device, torch.float32)
    rest = (1 - chances.sum(dim=-1, keepdim=True)).clamp(min=1e-6)
    return (chances.clamp(min=1e-6) / rest).log()


def _timed(stopwatch: Stopwatch | None, device: torch.device) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if stopwatch is None else stopwatch.running(device)


def scripted_target(target):
    """
    A target with the same weights that computes everything and then chooses the tokens of a text.

    Returns:
        The target, for calls of one row, with two more attributes: `script` (`torch.LongTensor`, *optional*), the
        text `[S]`, prompt included, and `stopwatch` ([`Stopwatch`], *optional*), which times its forwards. A forward
        that is not given `position_ids` chooses by itself.

    Raises:
        `ValueError`: the target's forward was replaced, by accelerate or others.
    """
    clone = shallow_clone(target, [target])
    clone.__class__ = _scripted_class(type(target))
    clone.script = None
    clone.stopwatch = None
    capabilities_of(clone)  # tried before it has a script
    return clone


@functools.cache
def _scripted_class(target_class: type) -> type:
    """The class of a scripted target; its name is that of the target's class, for messages."""

    @functools.wraps(target_class.forward)
    def forward(self, *args, **kwargs):
        with _timed(self.stopwatch, self.device):
            output = target_class.forward(self, *args, **kwargs)
        positions = kwargs.get("position_ids")
        if self.script is not None and positions is not None:
            if positions.dim() == 3:  # of images: the first is that of the text
                positions = positions[0]
            logits = output.logits  # [1, n, V], of the last n tokens
            last = len(self.script) - 1
            following = self.script[(positions[:, -logits.shape[1] :] + 1).clamp(max=last).to(self.script.device)]
            logits.scatter_(-1, following[..., None].to(logits.device), _SURE)
        return output

    return type(target_class.__name__, (target_class,), {"forward": forward, "__module__": target_class.__module__})


class Script(NamedTuple):
    """
    What a drafter says about a text of `S` tokens.

    Attributes:
        text (`torch.LongTensor`): `[S]`, prompt and continuation.
        likely (`torch.LongTensor`): `[S, k]`, the likeliest tokens of each place, the likeliest first.
        chances (`torch.Tensor`): `[S, k]`, the probabilities of these tokens.
    """

    text: torch.LongTensor
    likely: torch.LongTensor
    chances: torch.Tensor


def slot_accuracy(tau: float, block_size: int) -> float:
    """
    The acceptance `a` of each slot, given the earlier slots, for which `1 + a + a^2 + ... + a^(B-1) = tau`.

    Raises:
        `ValueError`: no value between 0 and 1 gives it.
    """
    if not 1 <= tau <= block_size:
        raise ValueError(f"tau={tau} must be between 1 and the block size, {block_size}.")
    low = 0.0
    high = 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**k for k in range(block_size)) < tau:
            low = middle
        else:
            high = middle
    return low


def script_of(
    text: torch.LongTensor, prompt_length: int, tau: float, block_size: int, vocab_size: int, seed: int = 0
) -> Script:
    """
    What a drafter says that commits `tau` tokens in each verification of a whole block.

    Args:
        text (`torch.LongTensor`): `[S]`, a prompt and the target's own continuation.
        prompt_length (`int`): Tokens of the prompt.
        tau (`float`): Mean acceptance length, the target's own token included.
        block_size (`int`): Tokens of a block, anchor included.
        vocab_size (`int`): The target's.
        seed (`int`): Of the places at which it is wrong.

    Raises:
        `ValueError`: `tau` is not between 1 and the block size.
    """
    accuracy = slot_accuracy(tau, block_size)
    generator = random.Random(seed)
    new_tokens = len(text) - prompt_length
    draws = [_draw_places(accuracy, new_tokens, generator) for _ in range(_DRAWS)]
    # The prompt's forward writes the first new token: it is the first anchor.
    chances, ranks = min(draws, key=lambda draw: abs(tau - _mean_length(draw[1][1:], block_size)))
    others = torch.arange(1, 1 + _RANKS, device=text.device)
    likely = (text[:, None] + others) % vocab_size  # [S, k], none of them the text's own
    likely[:prompt_length, 0] = text[:prompt_length]
    for place, rank in enumerate(ranks, start=prompt_length):
        if rank < _RANKS:
            likely[place, rank] = text[place]
    in_prompt = [[0.0] * _RANKS] * prompt_length
    return Script(text, likely, torch.tensor(in_prompt + chances))


def _draw_places(accuracy: float, count: int, generator: random.Random) -> tuple[list[list[float]], list[int]]:
    """
    For each of `count` places: the chances of the likeliest tokens `[k]`, and which of them is right; `k`: none of
    them.
    """
    accuracy = min(max(accuracy, 1e-4), 1 - 1e-4)  # a Beta distribution has no mean of 0 or 1
    near_misses = min(_NEAR_MISSES, accuracy)  # a drafter that is never right is not nearly right either
    all_chances = []
    ranks = []
    for _ in range(count):
        first = generator.betavariate(_BETA_WEIGHT * accuracy, _BETA_WEIGHT * (1 - accuracy))
        chances = [first]
        for rank in range(1, _RANKS):
            # A token that is likelier than the first would be the first.
            chances.append(min((1 - first) * near_misses * 0.5**rank, first))
        all_chances.append(chances)
        ranks.append(generator.choices(range(_RANKS + 1), [*chances, max(1 - sum(chances), 0.0)])[0])
    return all_chances, ranks


def _mean_length(ranks: Sequence[int], block_size: int) -> float:
    """The mean acceptance length of whole blocks over places whose right token has these ranks."""
    lengths = []
    start = 0
    while start < len(ranks):
        length = 1
        while length < block_size and start + length <= len(ranks) and ranks[start + length - 1] == 0:
            length += 1
        lengths.append(length)
        start += length
    return sum(lengths) / max(len(lengths), 1)
