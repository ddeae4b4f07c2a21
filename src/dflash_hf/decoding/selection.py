"""How a call of `generate` chooses tokens: its processors, its sampling, and where a row ends. Writes nothing."""

import copy

import torch
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StopStringCriteria,
    logits_process,
)

from dflash_hf.decoding.acceptance import argmax_token
from dflash_hf.decoding.sampling_noise import SamplingNoise
from dflash_hf.modeling.candidates_dflash import STATELESS_PROCESSORS


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
_COUNTED = (MaxLengthCriteria, EosTokenCriteria)


class TokenSelector:
    """
    Which token the target chooses after each token, and where a row ends.

    Args:
        prompt (`torch.LongTensor`): `[R, S]`.
        logits_processor, stopping_criteria, generation_config: As in `GenerationMixin._sample`.
        streamer (`BaseStreamer`, *optional*): As there.

    Attributes:
        requested_outputs (`list[str]`): What `generate` is to return of each token, by the names in its output.
        max_new (`int`): Maximum number of tokens to generate.
        eos (`torch.LongTensor`, *optional*): The ids that end a row.
        pad (`int`): The id that fills a row past its end.
        tokenwise (`bool`): Whether tokens are judged one by one, and each row by itself: by rules that read the text,
            and for whatever follows each token. On a CPU samples too: sorting the scores of all drafted tokens for
            `top_p` takes longer than a forward of a small target.
        processors (`list[LogitsProcessorList]`): One for each row.
        noise ([`SamplingNoise`], *optional*): Of the samples.
    """

    def __init__(self, prompt, logits_processor, stopping_criteria, generation_config, streamer=None):
        rows = len(prompt)
        self.criteria = stopping_criteria
        self.streamer = streamer
        self.requested_outputs = []
        if generation_config.return_dict_in_generate:
            names = ("scores", "logits")
            self.requested_outputs = [name for name in names if getattr(generation_config, f"output_{name}")]
        # A criterion of the caller replaces the configuration's limit.
        limits = [criterion.max_length for criterion in stopping_criteria if type(criterion) is MaxLengthCriteria]
        max_length = int(min(limits, default=generation_config.max_length))
        self.prompt_length = prompt.shape[1]
        self.max_new = max(max_length - self.prompt_length, 1)
        ends = [
            criterion.eos_token_id.flatten()
            for criterion in stopping_criteria
            if isinstance(criterion, EosTokenCriteria)
        ]
        self.eos = torch.cat(ends) if ends else None
        pad = generation_config._pad_token_tensor
        self.pad = 0 if pad is None else int(pad)
        reads_text = any(type(processor) not in _POSITIONWISE for processor in logits_processor)
        reads_text = reads_text or any(type(criterion) not in _COUNTED for criterion in stopping_criteria)
        sampled = generation_config.do_sample
        samples_on_cpu = sampled and prompt.device.type == "cpu"
        followed = bool(self.requested_outputs) or streamer is not None
        self.tokenwise = bool(reads_text or followed or samples_on_cpu)
        self.processors = [logits_processor]
        if rows > 1:
            self.processors = [
                LogitsProcessorList(_restricted(processor, row) for processor in logits_processor)
                for row in range(rows)
            ]
        self.noise = None
        if sampled:
            self.noise = SamplingNoise.of(prompt.device, rows, generation_config.temperature)

    def why_in_step(self) -> str | None:
        """Why the rows of a batch must advance in step, if so: something follows all of them, token by token."""
        if self.requested_outputs:
            return f"{' and '.join(self.requested_outputs)} of several rows are requested"
        if self.streamer is not None:
            return "a streamer follows several rows"
        # Without an end-of-sequence token, rows ended by a stop string are written on until all have ended.
        criteria_of_rows = _COUNTED if self.eos is None else (*_COUNTED, StopStringCriteria)
        for rule in (*self.processors[0], *self.criteria):
            # Called with one row that is ahead of the others, these return what they would return within the batch.
            if type(rule) not in (*STATELESS_PROCESSORS, *criteria_of_rows):
                return f"{type(rule).__name__} judges several rows at once"
        return None

    def choose(self, logits: torch.Tensor, depths: torch.LongTensor, lengths: list[int]) -> torch.LongTensor:
        """
        The target's own token after each token of a draft, by rules that read single positions.

        Args:
            logits (`torch.Tensor`): `[R, n, V]`.
            depths (`torch.LongTensor`): `[R, n]`.
            lengths (`list[int]`): Tokens generated before in each row.

        Returns:
            `torch.LongTensor` `[R, n]`.
        """
        if self.noise is None and not self.processors[0]:
            if logits.dtype == torch.float64:  # as plain decoding rounds
                logits = logits.float()
            return argmax_token(logits)
        scores = self.processors[0](None, logits.flatten(0, 1).float()).view(logits.shape)
        if self.noise is not None:
            scores = self.noise.race(scores, depths, lengths)
        return argmax_token(scores)

    def next_token(self, row: int, text: torch.LongTensor, logits: torch.Tensor) -> tuple[int, torch.Tensor]:
        """The next token of a row with this text `[1, S]`, and its processed scores, from logits `[1, V]`."""
        scores = self.processors[row](text, logits)
        if self.noise is None:
            return int(argmax_token(scores)), scores
        return self.noise.sample(scores, row, text.shape[1] - self.prompt_length), scores


def _restricted(processor, row: int):
    """A row-wise processor, restricted to one row of the batch."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if torch.is_tensor(ignored):  # [R], the padding of each row
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored[row : row + 1]
    return processor
