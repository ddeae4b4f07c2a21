"""
Continuous batching: a batch of a target whose rows are filled, decoded and replaced independently. A finished row is
immediately replaced by the next prompt, so that no row waits for the longest.

`decoding` decodes one call of `generate`, whose rows begin together; here they come and go, and there is no drafter.
"""

import inspect
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from dflash_hf.decoding.acceptance import Block
from dflash_hf.decoding.row_lengths import RowLengths
from dflash_hf.decoding.session import SlotSession
from dflash_hf.decoding.slots import SlotCache, SlotLayer, common_prefix_length
from dflash_hf.synthetic.prompt_queue import PromptQueue
from dflash_hf.synthetic.sampling import TokenSampler
from dflash_hf.targets.features import empty_cache, input_device
from dflash_hf.targets.generation import max_answer_tokens


_MAX_CACHED_LOGITS = 16  # prompts that are not read again if they repeat: a fifth of the time of short samples
_BYTES_PER_SCORE = 16  # a logit, and its copies in fp32 and fp64
_PREFILL_CHUNK = 512  # tokens that a prefill reads in one forward: bounds the attention mask


class _FullLengthCache(SlotCache):
    """
    A cache whose rows are filled and replaced independently. It has no rings, which would overwrite tokens: another
    prompt may reuse any prefix of a row.
    """

    def slot_layer(self, layer, margin: int) -> SlotLayer:
        return SlotLayer(self)

    def copy_prefix(self, source_row: int, row: int, length: int) -> None:
        """Copy the first `length` tokens of a row to another."""
        for layer in self.filled_layers:
            for buffer in (layer.keys, layer.values):
                buffer[row, :, :length] = buffer[source_row, :, :length]

    def view_row(self, batch: SlotCache, row: int) -> None:
        """Make this cache, which has one row, a view of a row of another: forwards write into the other's slots."""
        self.capacity = batch.capacity
        for layer, batch_layer in zip(self.layers, batch.layers, strict=True):
            if isinstance(batch_layer, SlotLayer) and batch_layer.is_initialized:
                layer.keys = batch_layer.keys[row : row + 1]
                layer.values = batch_layer.values[row : row + 1]
                layer.is_initialized = True

    def keep_rows(self, rows: list[int]) -> None:
        """Drop all other rows; the kept ones are numbered in this order."""
        self.rows = len(rows)
        for layer in self.filled_layers:
            layer.keys = layer.keys[rows]
            layer.values = layer.values[rows]

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.filled_layers)


class _FullLengthSession(SlotSession):
    cache_class = _FullLengthCache


class NextToken(NamedTuple):
    """A token that a row reads next."""

    id: int
    slot: int  # to which it is written: the number of tokens before it


class BatchCache:
    """
    The key-value cache of a batch, and the forwards that fill it.

    Args:
        target (`PreTrainedModel`): The target.
        rows (`int`): Rows of the batch.
    """

    def __init__(self, target: PreTrainedModel, rows: int):
        self.target = target
        self.rows = rows
        self.device = input_device(target)
        accepted = inspect.signature(target.forward).parameters
        last_logits_only = {"logits_to_keep": torch.tensor([-1])} if "logits_to_keep" in accepted else {}
        offset = torch.zeros(rows, 1, dtype=torch.long, device=self.device)
        self.session = _FullLengthSession(target, empty_cache(target), [0] * rows, offset, {})
        self.session.verify(Block(torch.zeros_like(offset)))  # allocates the slots
        # One row, a view of the row of the batch that a prompt is read into.
        self.prefill_session = _FullLengthSession(target, empty_cache(target), [0], offset[:1], last_logits_only)
        self.logits_after_prompt: dict[tuple, torch.Tensor] = {}  # `[1, V]` each, the oldest first

    def prefill(self, row: int, prompt: Sequence[int], tokens_of_rows: dict[int, Sequence[int]]) -> torch.Tensor:
        """
        Read a prompt into a row, over what the row holds. The longest prefix that any row holds already is copied.

        Args:
            row (`int`): The row to fill.
            prompt (`Sequence[int]`): The prompt's ids.
            tokens_of_rows (`dict[int, Sequence[int]]`): The ids that rows hold, by row.

        Returns:
            `torch.Tensor`: The logits `[1, V]` after the prompt.
        """

        def preference(other: int) -> tuple[int, bool]:
            """The longest common prefix; of two equal ones, that of the row itself, which needs no copy."""
            return common_prefix_length(tokens_of_rows[other], prompt), other == row

        source_row = max(tokens_of_rows, key=preference, default=row)
        shared = common_prefix_length(tokens_of_rows.get(source_row, ()), prompt)
        self.session.cache.reserve(len(prompt))
        self.session.cache.copy_prefix(source_row, row, shared)
        self.prefill_session.cache.view_row(self.session.cache, row)
        key = tuple(prompt)
        if shared == len(prompt) and key in self.logits_after_prompt:
            return self.logits_after_prompt[key]
        # At least the last token is read, for its logits.
        for start in range(min(shared, len(prompt) - 1), len(prompt), _PREFILL_CHUNK):
            chunk = torch.tensor([prompt[start : start + _PREFILL_CHUNK]], device=self.device)
            self.prefill_session.lengths = RowLengths([start], self.device)
            logits = self.prefill_session.verify(Block(chunk))[0][:, -1]
        if len(self.logits_after_prompt) == _MAX_CACHED_LOGITS:
            oldest = next(iter(self.logits_after_prompt))
            self.logits_after_prompt.pop(oldest)
        self.logits_after_prompt[key] = logits
        return logits

    def step(self, next_tokens: dict[int, NextToken]) -> torch.Tensor:
        """
        Read one token in each of some rows.

        Args:
            next_tokens (`dict[int, NextToken]`): The token of each row, by row.

        Returns:
            `torch.Tensor`: The logits `[len(next_tokens), V]` after these tokens, in the order of `next_tokens`.
        """
        unused = NextToken(id=0, slot=0)  # rows without a prompt write to slot 0
        tokens = [next_tokens.get(row, unused) for row in range(self.rows)]
        self.session.lengths = RowLengths([token.slot for token in tokens], self.device)
        ids = torch.tensor([[token.id] for token in tokens], device=self.device)
        logits = self.session.verify(Block(ids))[0]
        return logits[list(next_tokens), -1]

    @property
    def nbytes(self) -> int:
        """Memory of the slots, which grow with the sequences, and of the scores."""
        vocab_size = self.target.get_output_embeddings().weight.shape[0]
        return self.session.cache.nbytes + self.rows * vocab_size * _BYTES_PER_SCORE

    def keep_rows(self, rows: list[int]) -> None:
        """Drop all other rows; the kept ones are numbered in this order."""
        self.rows = len(rows)
        self.session.cache.keep_rows(rows)
        self.session.first_positions = self.session.first_positions[rows]


@dataclass
class _RunningPrompt:
    """A prompt that a row of the batch is answering."""

    key: object
    prompt: Sequence[int]
    max_new_tokens: int | None
    generator: random.Random
    response: list[int] = field(default_factory=list)

    @property
    def last_slot(self) -> int:
        """Slot of the last token, which has been chosen but not read yet."""
        return len(self.prompt) + len(self.response) - 1

    @property
    def tokens_in_cache(self) -> tuple[int, ...]:
        """The ids that the row holds: all but the last."""
        return (*self.prompt, *self.response[:-1])


class ContinuousBatch:
    """
    A batch of prompts that a target is answering; [`continuous_batch_responses`] runs it.

    Args:
        target (`PreTrainedModel`): The target.
        rows (`int`): Prompts that decode together.
        max_new_tokens (`int`): Longest response; shorter where the target's context is full.
        sampler (`TokenSampler`): Chooses the tokens.
        eos_token_ids (`set[int]`): The ids that end a response.
    """

    def __init__(self, target, rows: int, max_new_tokens: int, sampler: TokenSampler, eos_token_ids: set[int]):
        self.target = target
        self.max_new_tokens = max_new_tokens
        self.sampler = sampler
        self.eos_token_ids = eos_token_ids
        self.cache = BatchCache(target, rows)
        self.running: dict[int, _RunningPrompt] = {}  # by row
        # Ids that free rows hold, by row, until the next step; prompts that start before may continue them.
        self.just_finished: dict[int, Sequence[int]] = {}

    @property
    def num_free_rows(self) -> int:
        return self.cache.rows - len(self.running)

    def start(self, key, prompt: Sequence[int]) -> None:
        """
        Read a prompt into a free row, and choose the first token of its response.

        Raises:
            `ValueError`: the prompt fills the target's context.
        """
        limit = max_answer_tokens(self.target, len(prompt), self.max_new_tokens)
        row = self._row_for(prompt)
        prompts_of_rows = {running_row: running.prompt for running_row, running in self.running.items()}
        logits = self.cache.prefill(row, prompt, {**prompts_of_rows, **self.just_finished})
        self.just_finished.pop(row, None)
        running = _RunningPrompt(key, prompt, limit, self.sampler.generator(key))
        running.response.append(int(self.sampler(logits, [running.generator])))
        self.running[row] = running

    def _row_for(self, prompt: Sequence[int]) -> int:
        """
        The free row for a prompt: that whose sequence the prompt continues the furthest; else a row without a
        sequence, so that other prompts may continue those that there are; else the first.
        """

        def preference(row: int) -> tuple[int, bool, int]:
            return common_prefix_length(self.just_finished.get(row, ()), prompt), row not in self.just_finished, -row

        free_rows = set(range(self.cache.rows)) - self.running.keys()
        return max(free_rows, key=preference)

    def step(self) -> None:
        """Choose one more token for each prompt."""
        next_tokens = {}
        for row, running in self.running.items():
            next_tokens[row] = NextToken(running.response[-1], running.last_slot)
        logits = self.cache.step(next_tokens)
        tokens = self.sampler(logits, [running.generator for running in self.running.values()]).tolist()
        for running, token in zip(self.running.values(), tokens, strict=True):
            running.response.append(token)

    def take_finished(self) -> list[_RunningPrompt]:
        """Remove the prompts whose response is complete; their rows are free, and keep their tokens for now."""
        finished = []
        for row, running in list(self.running.items()):
            if running.response[-1] in self.eos_token_ids or len(running.response) == running.max_new_tokens:
                self.running.pop(row)
                self.just_finished[row] = running.tokens_in_cache
                finished.append(running)
        return finished

    def drop_free_rows(self) -> None:
        """Shrink the batch if a quarter of its rows or more are free: each forward computes all rows."""
        if 4 * len(self.running) <= 3 * self.cache.rows:
            self.cache.keep_rows(list(self.running))
            self.running = dict(enumerate(self.running.values()))


@torch.no_grad()
def continuous_batch_responses(
    target, prompts: PromptQueue, max_new_tokens: int, sampler: TokenSampler, eos_token_ids: set[int], rows: int
) -> Iterator[tuple]:
    """
    Yield the key of each prompt and its response, as they finish. Arguments as of [`ContinuousBatch`].

    A prompt is taken when there is a row for it. While the caller holds a response it may push further prompts, which
    are taken before the next token is decoded.
    """
    batch = ContinuousBatch(target, rows, max_new_tokens, sampler, eos_token_ids)
    while True:
        # 1. Fill the free rows.
        for key, prompt in prompts.pop_up_to(batch.num_free_rows):
            batch.start(key, prompt)
        batch.just_finished.clear()  # rows that are still free are overwritten by `step`
        if not batch.running:
            return
        # 2. Rows that have finished are filled before the next step.
        finished = batch.take_finished()
        for running in finished:
            yield running.key, running.response
        if finished:
            continue
        # 3. One more token for all; rows are still free only if no prompt waits.
        batch.drop_free_rows()
        batch.step()
