"""How a call of `generate` chooses tokens: its processors, its sampling, and where a row ends."""

import copy

import torch
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StopStringCriteria,
)

from dflash_hf.decoding.acceptance import argmax_token
from dflash_hf.decoding.sampling_noise import SamplingNoise
from dflash_hf.modeling.candidates_dflash import POSITIONWISE_PROCESSORS, STATELESS_PROCESSORS


# Criteria that are applied to all tokens of a draft at once, without being called.
_BATCHED_CRITERIA = (MaxLengthCriteria, EosTokenCriteria)


class TokenSelector:
    """
    Which token the target chooses after each token, and where a row ends. `GenerationState` writes what it chooses.

    Args:
        prompt (`torch.LongTensor`): `[R, S]`.
        logits_processor, stopping_criteria, generation_config: As in `GenerationMixin._sample`.
        streamer ([`TimedStreamer`], *optional*): Receives every token.

    Attributes:
        requested_outputs (`list[str]`): Which of `scores` and `logits` the call returns for each token.
        input_length (`int`): Columns of `input_ids`, after which generated tokens are written.
        max_new_tokens (`int`): Maximum number of tokens to generate.
        eos_token_ids (`torch.LongTensor`, *optional*): The ids that end a row.
        pad_token_id (`int`): The id that fills a row past its end.
        chooses_token_by_token (`bool`): Whether tokens are chosen one by one, and each row separately: if a processor
            or criterion reads the sequence, and if an output has an entry for each token. Also if a CPU samples:
            sorting the scores of all candidates for `top_p` takes longer than a forward of a small target.
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
        self.input_length = prompt.shape[1]
        self.max_new_tokens = max(max_length - self.input_length, 1)
        eos_criteria = [criterion for criterion in stopping_criteria if isinstance(criterion, EosTokenCriteria)]
        self.eos_token_ids = None
        if eos_criteria:
            self.eos_token_ids = torch.cat([criterion.eos_token_id.flatten() for criterion in eos_criteria])
        pad = generation_config._pad_token_tensor
        self.pad_token_id = 0 if pad is None else int(pad)
        processors_need_sequence = any(
            type(processor) not in POSITIONWISE_PROCESSORS for processor in logits_processor
        )
        criteria_need_sequence = any(type(criterion) not in _BATCHED_CRITERIA for criterion in stopping_criteria)
        is_sampled = generation_config.do_sample
        samples_on_cpu = is_sampled and prompt.device.type == "cpu"
        returns_scores = bool(self.requested_outputs)
        self.chooses_token_by_token = (
            processors_need_sequence or criteria_need_sequence or returns_scores or samples_on_cpu
        )
        self.processors = [logits_processor]
        if rows > 1:
            self.processors = [
                LogitsProcessorList(_restricted(processor, row) for processor in logits_processor)
                for row in range(rows)
            ]
        self.noise = None
        if is_sampled:
            self.noise = SamplingNoise.for_device(prompt.device, rows, generation_config.temperature)

    def lockstep_reason(self) -> str | None:
        """Why no row of a batch may be ahead of another: something reads all rows after each token. Or `None`."""
        if self.requested_outputs:
            return f"{' and '.join(self.requested_outputs)} of several rows are requested"
        if self.streamer is not None:
            return "a streamer follows several rows"
        # Without an end-of-sequence token, upstream continues rows that a stop string has ended until all have ended.
        criteria_of_rows = (
            _BATCHED_CRITERIA if self.eos_token_ids is None else (*_BATCHED_CRITERIA, StopStringCriteria)
        )
        for processor_or_criterion in (*self.processors[0], *self.criteria):
            # Called with one row that is ahead of the others, these return what they would return within the batch.
            if type(processor_or_criterion) not in (*STATELESS_PROCESSORS, *criteria_of_rows):
                return f"{type(processor_or_criterion).__name__} may read several rows at once"
        return None

    def choose(self, logits: torch.Tensor, depths: torch.LongTensor, max_depth: int) -> torch.LongTensor:
        """
        The target's choice after each candidate, by processors that read single positions.

        Args:
            logits (`torch.Tensor`): `[R, n, V]`.
            depths (`torch.LongTensor`): `[R, n]`.
            max_depth (`int`): No depth is larger.

        Returns:
            `torch.LongTensor` `[R, n]`.
        """
        if self.noise is None and not self.processors[0]:
            if logits.dtype == torch.float64:  # rounded as in plain decoding
                logits = logits.float()
            return argmax_token(logits)
        scores = self.processors[0](None, logits.flatten(0, 1).float()).view(logits.shape)
        if self.noise is not None:
            scores = self.noise.perturb(scores, depths, max_depth)
        return argmax_token(scores)

    def next_token(self, row: int, sequence: torch.LongTensor, logits: torch.Tensor) -> tuple[int, torch.Tensor]:
        """The token after a row's sequence `[1, S]`, and its processed scores `[1, V]`, from logits `[1, V]`."""
        scores = self.processors[row](sequence, logits)
        if self.noise is None:
            return int(argmax_token(scores)), scores
        return self.noise.sample(scores, row, sequence.shape[1] - self.input_length), scores


def _restricted(processor, row: int):
    """A row-wise processor, restricted to one row of the batch."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if torch.is_tensor(ignored):  # [R], the padding of each row
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored[row : row + 1]
    return processor
