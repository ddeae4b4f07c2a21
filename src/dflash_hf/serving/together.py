"""
Requests that would wait for each other are batched by transformers' continuous batching if that is faster.

A drafter speeds up a single text; a batch shares each forward among many. Which is faster depends on the machine and
on the number of requests in flight, so both are timed as they run.
"""

import asyncio
import copy
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils import logging

from dflash_hf.private import private


logger = logging.get_logger(__name__)

# Settings that may differ between the requests of a batch: the argument, and the attribute that holds its value.
_PER_REQUEST = {TemperatureLogitsWarper: "temperature", TopKLogitsWarper: "top_k", TopPLogitsWarper: "top_p"}
_FAILURES = 3  # after this many, requests are no longer batched
_FORGOTTEN = 300.0  # seconds after which a method is timed again
_MOST_BATCHES = 2  # each has its own cache
_MEMORY = 0.1  # share of the free memory for such a cache
_CPU_TOKENS = 512  # per forward; more are no faster on a CPU, and upstream keeps logits for all of them


@contextmanager
def with_own_config(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """
    A model with the same weights, and with a configuration of its own that may be changed.

    Raises:
        `ValueError`: see [`private`].
    """
    own = private(model, (module for module in model.modules() if "config" in vars(module)))
    copies: dict = {}
    for module in own.modules():
        if "config" in vars(module):
            module.config = copy.deepcopy(module.config, copies)
    yield own


class BatchFailed(Exception):
    """A batch has ended before its requests were finished."""


class Together:
    """
    Continuous batching of one model, and the decision when to use it.

    Args:
        model (`PreTrainedModel`): The target; other threads may run it at the same time.
    """

    def __init__(self, model):
        self.model, self.changed = model, threading.Condition()
        self.managers, self.opened = {}, ExitStack()
        self.failures = 0 if hasattr(model, "init_continuous_batching") else _FAILURES
        self.numbers = itertools.count()
        # Requests in flight: those that a batch could take, batched, batched and sampling; and those with a seed.
        self.able = self.batched = self.drawn = self.seeded = 0
        # Tokens per second by number of requests in a batch (1: alone), and when that was measured.
        self.rates: dict[int, tuple[float, float]] = {}

    @property
    def failed(self) -> bool:
        """Whether batching has failed for this model."""
        return self.failures >= _FAILURES

    @contextmanager
    def request(self, able: bool, seeded: bool) -> Iterator[None]:
        """
        Counts a request while it is in flight. A request with a seed waits for the sampling batch, and keeps others
        from joining it: they draw from the same generator.
        """
        with self.changed:
            self.able += able
            self.seeded += seeded
            self.changed.wait_for(lambda: not (seeded and self.drawn))
        try:
            yield
        finally:
            with self.changed:
                self.able -= able
                self.seeded -= seeded

    def pays(self, sampled: bool) -> bool:
        """Whether requests are now answered faster in a batch. An untimed method is tried."""
        number = self.able
        if number < 2 or self.failed or (sampled and self.seeded):
            return False
        together, found = self.rates.get(number, (0.0, -_FORGOTTEN))
        alone, _ = self.rates.get(1, (0.0, 0.0))
        return together >= alone or time.monotonic() - found > _FORGOTTEN

    def note(self, number: int, tokens: int, seconds: float) -> None:
        """Record an answer of `tokens` tokens that was decoded in a batch of `number`."""
        if tokens > 1 and seconds > 0:
            rate, now = number * tokens / seconds, time.monotonic()
            before, found = self.rates.get(number, (rate, now))
            self.rates[number] = (rate if now - found > _FORGOTTEN else 0.7 * before + 0.3 * rate), now

    def kind_of(self, inputs: dict, settings: GenerationConfig) -> tuple | None:
        """The settings that requests of one batch must share; `None` if a request cannot be batched."""
        if self.failed or set(inputs) - {"input_ids", "attention_mask"} or settings.max_new_tokens is None:
            return None
        if (settings.num_beams or 1) > 1 or settings.bad_words_ids:
            return None
        if settings.max_time or (settings.repetition_penalty or 1.0) != 1.0:
            return None
        kind = (settings.do_sample, *(type(processor) for processor in self.model._get_logits_processor(settings)))
        known = kind in self.managers or len(self.managers) < _MOST_BATCHES
        return kind if known and all(part in _PER_REQUEST for part in kind[1:]) else None

    @contextmanager
    def joining(self, sampled: bool) -> Iterator[bool]:
        """Yields whether a request may join the batch; inside, it counts as part of it."""
        with self.changed:
            joins = not (sampled and self.seeded)
            self.batched += joins
            self.drawn += sampled and joins
        try:
            yield joins
        finally:
            with self.changed:
                self.batched -= joins
                self.drawn -= sampled and joins
                self.changed.notify_all()

    def decode(
        self,
        kind: tuple,
        ids: list[int],
        settings: GenerationConfig,
        loop: asyncio.AbstractEventLoop,
        put: Callable[[torch.Tensor], None],
    ) -> None:
        """
        Decode in the running batch; blocks this thread until the answer is complete.

        Args:
            kind (`tuple`): From [`kind_of`].
            ids (`list[int]`): The prompt, and the part of the answer generated so far.
            settings (`GenerationConfig`): Settings for the rest of the answer.
            loop (`asyncio.AbstractEventLoop`): The server's event loop, which delivers the results.
            put (`Callable`): Receives the tokens `[n]` as they are generated; may raise to end the request.

        Raises:
            `BatchFailed`: the batch has failed; the next request starts a new one, up to a number of failures.
        """
        inbox, name, written, done = queue.SimpleQueue(), f"together-{next(self.numbers)}", 0, False

        async def listen():
            manager.register_result_handler(name, inbox.put)

        manager = None
        try:
            manager = self._manager(kind, settings)
            asyncio.run_coroutine_threadsafe(listen(), loop).result()
            varied = {_PER_REQUEST[part]: getattr(settings, _PER_REQUEST[part]) for part in kind[1:]}
            limit, ends = settings.max_new_tokens, settings.eos_token_id
            if not manager.add_request(ids, name, limit, streaming=True, eos_token_id=ends, **varied):
                raise RuntimeError("it takes no more requests")
        except Exception as error:
            raise self._failure(kind, manager, error) from error
        try:
            while not done:
                output = inbox.get()
                if output.error is not None:
                    raise self._failure(kind, manager, output.error)
                done = output.is_finished()
                tokens = output.generated_tokens[written:]
                if not written:  # timed from the first token on: a batch and a prompt take a while to start
                    start, number, first = time.perf_counter(), self.batched, len(tokens)
                written += len(tokens)
                if tokens:
                    put(torch.tensor(tokens))
        finally:
            if not done:
                manager.cancel_request(name)
                manager.output_router.result_handlers.pop(name, None)  # upstream delivers nothing more for it
            if written and number == self.batched:
                self.note(number, written - first, time.perf_counter() - start)

    def _manager(self, kind: tuple, settings: GenerationConfig):
        with self.changed:
            if kind not in self.managers:
                manager = self._twin().init_continuous_batching(
                    generation_config=copy.deepcopy(settings),
                    continuous_batching_config=ContinuousBatchingConfig(
                        auto_switch_to_flash=False,
                        per_request_processors=True,
                        max_memory_percent=_MEMORY,
                        max_batch_tokens=_CPU_TOKENS if self.model.device.type == "cpu" else None,
                    ),
                )
                manager.start()
                self.managers[kind] = manager
            return self.managers[kind]

    def _twin(self):
        """
        The model with the same weights and its own configuration: upstream sets `config.is_causal` during a batch's
        forward, which would change the mask for everyone else who runs the model meanwhile.
        """
        return self.opened.enter_context(with_own_config(self.model))

    def _failure(self, kind: tuple, manager, reason) -> BatchFailed:
        with self.changed:
            first = self.managers.get(kind) is manager  # of its requests to notice
            if first:
                self.failures = _FAILURES if manager is None else self.failures + 1
                self.managers.pop(kind, None)
                logger.warning(f"Continuous batching failed; its requests continue one by one ({reason}).")
        if first and manager is not None:
            manager.stop(block=True, timeout=2)
        return BatchFailed(str(reason))

    def stop(self) -> None:
        """End the threads of all batches."""
        for manager in self.managers.values():
            manager.stop(block=True, timeout=2)
        self.opened.close()
