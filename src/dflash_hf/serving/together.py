"""
Requests that would wait for each other, decoded together by transformers' continuous batching where that is faster.

A drafter makes one text fast; a batch shares each forward among many. Which way is faster depends on the machine and
on how many requests are in flight, so both are timed as they run.
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
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils import logging

from dflash_hf.modeling.isolation_dflash import isolated


logger = logging.get_logger(__name__)

# What a batch can do differently for each of its requests: the argument, and the attribute that holds its value.
_PER_REQUEST = {TemperatureLogitsWarper: "temperature", TopKLogitsWarper: "top_k", TopPLogitsWarper: "top_p"}
_MOST_BATCHES = 2  # each has a cache of its own
_MEMORY = 0.1  # share of the free memory that such a cache takes
_CPU_TOKENS = 512  # of one forward; more are no faster there, and upstream keeps logits for all of them


class Together:
    """
    The continuous batching of one model, and when it is used.

    Args:
        model (`PreTrainedModel`): The target; other threads may run it at the same time.
    """

    def __init__(self, model):
        self.model, self.changed = model, threading.Condition()
        self.managers, self.opened = {}, ExitStack()
        self.failed = not hasattr(model, "init_continuous_batching")
        self.numbers = itertools.count()
        self.in_flight = self.drawn = self.seeded = 0  # requests: all; batched ones that sample; those with a seed
        self.rates: dict[int, float] = {}  # tokens a second by requests in flight; 1 for those decoded alone

    @contextmanager
    def request(self, seeded: bool) -> Iterator[None]:
        """
        Counts a request while it is in flight. One with a seed waits for the batch that samples, and keeps others
        from joining it: they draw from the same generator.
        """
        with self.changed:
            self.in_flight += 1
            self.seeded += seeded
            self.changed.wait_for(lambda: not (seeded and self.drawn))
        try:
            yield
        finally:
            with self.changed:
                self.in_flight -= 1
                self.seeded -= seeded

    def pays(self, sampled: bool) -> bool:
        """Whether requests are answered faster together now. What has not been timed yet is tried."""
        number = self.in_flight
        if number < 2 or self.failed or (sampled and self.seeded):
            return False
        return self.rates.get(number, float("inf")) >= self.rates.get(1, 0.0)

    def note(self, number: int, tokens: int, seconds: float) -> None:
        """Take in an answer of so many tokens, which was one of `number` that were decoded together."""
        if tokens > 1 and seconds > 0:
            rate = number * tokens / seconds
            self.rates[number] = 0.7 * self.rates.get(number, rate) + 0.3 * rate

    def kind_of(self, inputs: dict, settings: GenerationConfig) -> tuple | None:
        """What requests of one batch have in common; `None` if a request cannot be in one."""
        if self.failed or set(inputs) - {"input_ids", "attention_mask"} or settings.max_new_tokens is None:
            return None
        if (settings.num_beams or 1) > 1:
            return None
        if settings.stop_strings or settings.max_time or (settings.repetition_penalty or 1.0) != 1.0:
            return None
        kind = (settings.do_sample, *(type(processor) for processor in self.model._get_logits_processor(settings)))
        known = kind in self.managers or len(self.managers) < _MOST_BATCHES
        return kind if known and all(part in _PER_REQUEST for part in kind[1:]) else None

    @contextmanager
    def joining(self, sampled: bool) -> Iterator[bool]:
        """Whether a request may join the batch; it counts as a part of it inside."""
        with self.changed:
            joins = not (sampled and self.seeded)
            self.drawn += sampled and joins
        try:
            yield joins
        finally:
            with self.changed:
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
        Decode in the batch that runs; waits in this thread until the answer is complete.

        Args:
            kind (`tuple`): As [`kind_of`] gives it.
            ids (`list[int]`): The prompt, and what is already written of the answer.
            settings (`GenerationConfig`): For the rest of the answer.
            loop (`asyncio.AbstractEventLoop`): The server's, which delivers the results.
            put (`Callable`): Is given the tokens `[n]` as they come; may raise to end the request.

        Raises:
            `RuntimeError`: the batch has failed; no request is put into one again.
        """
        inbox, name, written = queue.SimpleQueue(), f"together-{next(self.numbers)}", 0
        start, number, done = time.perf_counter(), self.in_flight, False

        async def listen():
            manager.register_result_handler(name, inbox.put)

        try:
            manager = self._manager(kind, settings)
            asyncio.run_coroutine_threadsafe(listen(), loop).result()
            varied = {_PER_REQUEST[part]: getattr(settings, _PER_REQUEST[part]) for part in kind[1:]}
            limit, ends = settings.max_new_tokens, settings.eos_token_id
            if not manager.add_request(ids, name, limit, streaming=True, eos_token_id=ends, **varied):
                raise RuntimeError("it takes no more requests")
        except Exception as error:
            raise self._failure(error) from error
        try:
            while not done:
                output = inbox.get()
                if output.error is not None:
                    raise self._failure(output.error)
                done = output.is_finished()
                tokens = output.generated_tokens[written:]
                written += len(tokens)
                if tokens:
                    put(torch.tensor(tokens))
        finally:
            if not done:
                manager.cancel_request(name)
        if number == self.in_flight:
            self.note(number, written, time.perf_counter() - start)

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
        The model with the same weights and a configuration of its own: upstream sets `config.is_causal` for the time
        of a batch's forward, which would be another mask for all who run the model meanwhile.
        """
        twin, configs = self.opened.enter_context(isolated(self.model, self.model.modules())), {}
        copy.deepcopy(self.model.config, configs)
        for module in twin.modules():
            if "config" in vars(module):
                module.config = configs.get(id(module.config), module.config)
        return twin

    def _failure(self, reason) -> RuntimeError:
        if not self.failed:
            logger.warning(f"Requests are answered one by one from now on: continuous batching failed ({reason}).")
        self.failed = True
        return RuntimeError(str(reason))

    def stop(self) -> None:
        """End the threads of all batches."""
        for manager in self.managers.values():
            manager.stop(block=True, timeout=2)
        self.opened.close()
