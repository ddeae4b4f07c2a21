"""
Which drafted tokens are accepted: the target's own choice after each token, compared with the draft. Writes nothing.
"""

import copy
import math
from typing import NamedTuple

import torch
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StopStringCriteria,
    logits_process,
)

from .noise_dflash import Noise


CHUNK, SMALLEST_CHUNK = 256, 32  # ids whose scores are compared at once; see `likeliest`

# Processors that read the scores of one position only, so that one call serves all rows and positions.
_POSITIONWISE = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.LogitNormalization,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
)
# Stateless processors and criteria that judge each row by its own text only: called with one row that is ahead of the
# others, they return what they would return for it within the batch.
_ROWWISE = (
    *_POSITIONWISE,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
)
_COUNTED = (MaxLengthCriteria, EosTokenCriteria)


class Block(NamedTuple):
    """
    A draft: one path of tokens for each row. Any other draft, such as a tree, has these attributes and methods too.

    Attributes:
        tokens (`torch.LongTensor`): `[R, n]`, the anchor first: the last committed token of each row.
        depths (`torch.LongTensor`, *optional*): `[R, n]`, how far a token is from the anchor; `None`: its number.
        ancestors (`torch.BoolTensor`, *optional*): `[R, n, n]`, whether a token sees another of the draft, itself
            included; `None`: all before it.
    """

    tokens: torch.LongTensor
    depths: torch.LongTensor | None = None
    ancestors: torch.BoolTensor | None = None

    def agree(self, chosen: torch.LongTensor) -> tuple[torch.LongTensor, torch.LongTensor | None]:
        """
        How far the target agrees.

        Args:
            chosen (`torch.LongTensor`): `[R, n]`, its own token after each drafted one.

        Returns:
            The length of the longest path that it agrees with, anchor included, `[R]`; and the places in the draft of
            the tokens on that path `[R, m]`, `None` if they are the first ones.
        """
        agrees = chosen[:, :-1] == self.tokens[:, 1:]
        return 1 + agrees.long().cumprod(dim=1).sum(dim=1), None

    def children(self, row: int) -> dict[tuple[int, int], int]:
        """The places of a row's tokens, by the place before them and the token."""
        return {(place, token): place + 1 for place, token in enumerate(self.tokens[row, 1:].tolist())}


class Verdict(NamedTuple):
    """What the target accepts of a draft."""

    counts: list[int]  # tokens committed in each row, the bonus token included; 0 for rows that had ended before
    path: torch.LongTensor | None = None  # [R, m]  places of the accepted tokens in the draft; `None`: the first

    def along(self, states: torch.Tensor) -> torch.Tensor:
        """`[R, max(counts), F]` of the accepted path, from `[R, n, F]` of all drafted tokens."""
        if self.path is None:
            return states[:, : max(self.counts)]
        path = self.path[:, : max(self.counts)].to(states.device)
        return states[torch.arange(len(states), device=states.device)[:, None], path]


def likeliest(scores: torch.Tensor) -> torch.LongTensor:
    """
    As `argmax` over the vocabulary, the first of ties.

    On a CPU `amax` alone is vectorised: it finds the chunk with the likeliest token, five to nine times as fast in
    fp32. `argmax` takes four times as long as `max` in bfloat16.
    """
    chunk = math.gcd(scores.shape[-1], CHUNK)
    if scores.device.type != "cpu" or chunk < SMALLEST_CHUNK:
        return scores.max(dim=-1).indices
    chunks = scores.unflatten(-1, (-1, chunk))  # [..., C, chunk]
    best = chunks.amax(dim=-1).max(dim=-1, keepdim=True).indices  # [..., 1]
    inside = chunks.take_along_dim(best[..., None], dim=-2)[..., 0, :]  # [..., chunk]
    return best[..., 0] * chunk + inside.max(dim=-1).indices


class Rules:
    """
    The rules of one call: which token the target chooses after each token, and where a row ends.

    Args:
        prompt (`torch.LongTensor`): `[R, S]`.
        logits_processor, stopping_criteria, generation_config: As in `GenerationMixin._sample`.
        streamer (`BaseStreamer`, *optional*): As there.

    Attributes:
        listed (`list[str]`): What `generate` is to return of each token, by the names in its output.
        max_new (`int`): Maximum number of tokens to generate.
        eos (`torch.LongTensor`, *optional*): The ids that end a row.
        pad (`int`): The id that fills a row past its end.
        tokenwise (`bool`): Whether tokens are judged one by one, and each row by itself: by rules that read the text,
            and for whatever follows each token. On a CPU samples too: sorting the scores of all drafted tokens for
            `top_p` takes longer than a forward of a small target.
        processors (`list[LogitsProcessorList]`): One for each row.
        noise ([`Noise`], *optional*): Of the samples.
    """

    def __init__(self, prompt, logits_processor, stopping_criteria, generation_config, streamer=None):
        self.criteria, self.streamer, rows = stopping_criteria, streamer, len(prompt)
        names = ("scores", "logits") if generation_config.return_dict_in_generate else ()
        self.listed = [name for name in names if getattr(generation_config, f"output_{name}")]
        # A criterion of the caller replaces the configuration's limit.
        limits = [one.max_length for one in stopping_criteria if type(one) is MaxLengthCriteria]
        self.prompt_length = prompt.shape[1]
        self.max_new = max(int(min(limits, default=generation_config.max_length)) - self.prompt_length, 1)
        ends = [one.eos_token_id.flatten() for one in stopping_criteria if isinstance(one, EosTokenCriteria)]
        self.eos = torch.cat(ends) if ends else None
        pad = generation_config._pad_token_tensor
        self.pad = 0 if pad is None else int(pad)
        reads_text = any(type(one) not in _POSITIONWISE for one in logits_processor)
        reads_text = reads_text or any(type(one) not in _COUNTED for one in stopping_criteria)
        sampled, on_cpu = generation_config.do_sample, prompt.device.type == "cpu"
        self.tokenwise = bool(reads_text or self.listed or streamer is not None or (sampled and on_cpu))
        self.processors = [logits_processor]
        if rows > 1:
            self.processors = [
                LogitsProcessorList(_restricted(one, row) for one in logits_processor) for row in range(rows)
            ]
        self.noise = Noise.of(prompt.device, rows, generation_config.temperature) if sampled else None

    def why_in_step(self) -> str | None:
        """Why the rows of a batch must advance in step, if so: something follows all of them, token by token."""
        if self.listed:
            return f"{' and '.join(self.listed)} of several rows are requested"
        if self.streamer is not None:
            return "a streamer follows several rows"
        # Without an end-of-sequence token, rows ended by a stop string are written on until all have ended.
        of_rows = (*_COUNTED, StopStringCriteria) if self.eos is not None else _COUNTED
        for one in (*self.processors[0], *self.criteria):
            if type(one) not in (*_ROWWISE, *of_rows):
                return f"{type(one).__name__} judges several rows at once"
        return None

    def chosen(self, logits: torch.Tensor, depths: torch.LongTensor, lengths: list[int]) -> torch.LongTensor:
        """
        The target's own token after each token of a draft, by rules that read single positions.

        Args:
            logits (`torch.Tensor`): `[R, n, V]`.
            depths (`torch.LongTensor`): `[R, n]`.
            lengths (`list[int]`): Tokens generated before.

        Returns:
            `torch.LongTensor` `[R, n]`.
        """
        if self.noise is None and not self.processors[0]:
            return likeliest(logits.float() if logits.dtype == torch.float64 else logits)  # as plain decoding rounds
        scores = self.processors[0](None, logits.flatten(0, 1).float()).view(logits.shape)
        return likeliest(scores if self.noise is None else self.noise.perturbed(scores, depths, lengths))

    def next_token(self, row: int, text: torch.LongTensor, logits: torch.Tensor) -> tuple[int, torch.Tensor]:
        """The next token of a row with this text `[1, S]`, and its processed scores, from logits `[1, V]`."""
        scores = self.processors[row](text, logits)
        if self.noise is None:
            return int(likeliest(scores)), scores
        return self.noise.sample(scores, row, text.shape[1] - self.prompt_length), scores


def _restricted(processor, row: int):
    """A row-wise processor, restricted to one row of the batch."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if torch.is_tensor(ignored):  # [R], the padding of each row
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored[row : row + 1]
    return processor
