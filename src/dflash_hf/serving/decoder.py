"""
Decoding for several requests with one pair, in one thread: a request that waits alone is decoded with the drafter;
several that wait are decoded together, by transformers' continuous batching, which others may join.
"""

import copy
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    set_seed,
)
from transformers.utils import logging

from dflash_hf.modeling.target_dflash import CACHE_NAME
from dflash_hf.private import with_own_config
from dflash_hf.serving.conversations import Conversations
from dflash_hf.serving.request import Over, Request


logger = logging.get_logger(__name__)

# Settings that may differ between the requests of a batch: the argument, and the attribute that holds its value.
_PER_REQUEST = {TemperatureLogitsWarper: "temperature", TopKLogitsWarper: "top_k", TopPLogitsWarper: "top_p"}
_TEXT_ONLY = {"input_ids", "attention_mask"}
_FAILURES = 3  # after so many, nothing is batched any more
_MOST_BATCHES = 2  # each has its own cache
_MEMORY = 0.1  # share of the free memory for such a cache
_CPU_TOKENS = 512  # per forward; more are no faster on a CPU, and upstream keeps logits for all of them
_NEWS = 0.1  # seconds without a token after which a batch looks whether it still runs


class Decoder:
    """
    Answers requests, first come, first served.

    Args:
        target (`PreTrainedModel`): The target. Its stop strings move here: `generate` would search its vocabulary for
            them in each call.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        draft (`DFlashDraftModel`, *optional*): Its drafter.
    """

    def __init__(self, target, tokenizer, draft=None):
        self.target, self.tokenizer, self.draft = target, tokenizer, draft
        self.stops, target.generation_config.stop_strings = target.generation_config.stop_strings, None
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.waiting: deque = deque()  # requests, and functions to call
        self.conversations = Conversations(target)
        self.managers: dict[tuple, object] = {}  # of batches, by what their requests share; the latest last
        self.failures = 0 if hasattr(target, "init_continuous_batching") else _FAILURES
        self.numbers = itertools.count()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: Request) -> Request:
        """Answer a request; see its `done`."""
        request.kind = self.kind_of(request)
        self.inbox.put(request)
        return request

    def call(self, function: Callable, *args, **kwargs) -> Future:
        """Call a function in this thread, between requests."""
        future: Future = Future()

        def run():
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self.inbox.put(run)
        return future

    def kind_of(self, request: Request) -> tuple | None:
        """What the requests of a batch must share; `None` if a request cannot be batched."""
        settings: GenerationConfig = request.settings
        if set(request.inputs) - _TEXT_ONLY or settings.max_new_tokens is None:
            return None
        if request.processors or (request.seed is not None and settings.do_sample):
            return None
        if (settings.num_beams or 1) > 1 or settings.bad_words_ids or settings.max_time:
            return None
        if (settings.repetition_penalty or 1.0) != 1.0:
            return None
        processors = [type(one) for one in self.target._get_logits_processor(settings)]
        return (settings.do_sample, *processors) if all(one in _PER_REQUEST for one in processors) else None

    def stop(self) -> None:
        """End the threads of all batches."""
        for manager in self.managers.values():
            manager.stop(block=True, timeout=2)

    # In the thread.

    def _run(self) -> None:
        while True:
            self._receive(wait=not self.waiting)
            first, *others = self.waiting
            if not isinstance(first, Request):
                self.waiting.popleft()()
            elif first.over:  # nobody waits any more
                self.waiting.popleft().finish()
            elif self._batches(first) and others and getattr(others[0], "kind", None) == first.kind:
                self._together(first.kind)
            else:
                self._alone(self.waiting.popleft())

    def _batches(self, request: Request) -> bool:
        return request.kind is not None and self.failures < _FAILURES

    def _receive(self, wait: bool) -> None:
        while wait or not self.inbox.empty():
            self.waiting.append(self.inbox.get())
            wait = False

    def _alone(self, request: Request) -> None:
        """Decode a request with the drafter; one that a batch has begun is continued."""
        settings = copy.copy(request.settings)
        inputs, text = request.inputs, [*request.prompt, *request.tokens]
        if request.tokens:
            ids = torch.tensor([text], device=self.target.device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            settings.max_new_tokens -= len(request.tokens)
        settings.return_dict_in_generate = True
        options: dict = {"assistant_model": self.draft if request.drafts else None}
        keeps = not set(inputs) - _TEXT_ONLY and (settings.num_beams or 1) == 1 and not settings.cache_implementation
        try:
            request.begin()
            if keeps:
                options[CACHE_NAME], request.cached = self.conversations.take(text)
            if request.seed is not None:
                set_seed(request.seed)
            output = self.target.generate(
                **inputs,
                **options,
                generation_config=settings,
                streamer=request,
                logits_processor=[*request.processors],
                stopping_criteria=[Over(request)],
            )
            if keeps:
                self.conversations.keep(output.sequences[0].tolist(), output.get(CACHE_NAME))
            request.finish()
        except BaseException as error:
            request.fail(error)

    def _together(self, kind: tuple) -> None:
        """Decode in a batch until it is empty; requests that arrive meanwhile join it, up to one of another kind."""
        running: dict[str, Request] = {}
        manager = None
        try:
            manager = self._manager(kind, self.waiting[0].settings)
            while True:
                self._receive(wait=False)
                while self.waiting and getattr(self.waiting[0], "kind", None) == kind:
                    self._join(manager, running)
                if not running:
                    return
                output = manager.get_result(timeout=_NEWS)
                if output is None and not manager.is_running():
                    raise RuntimeError("it has ended")
                if output is not None and output.request_id in running:
                    self._take(output, manager, running)
        except Exception as error:
            self._failed(kind, manager, error)
            for request in reversed(running.values()):
                request.kind = None
                self.waiting.appendleft(request)

    def _join(self, manager, running: dict[str, Request]) -> None:
        """The first waiting request joins a batch."""
        request, settings = self.waiting[0], self.waiting[0].settings
        own = {_PER_REQUEST[one]: getattr(settings, _PER_REQUEST[one]) for one in request.kind[1:]}
        name, limit, ends = f"request {next(self.numbers)}", settings.max_new_tokens, settings.eos_token_id
        request.begin()
        if not manager.add_request(request.prompt, name, limit, streaming=True, eos_token_id=ends, **own):
            raise RuntimeError("it takes no more requests")
        request.batched = True
        running[name] = self.waiting.popleft()

    def _take(self, output, manager, running: dict[str, Request]) -> None:
        """The next tokens of a request in a batch, which leaves it when it is complete."""
        request = running[output.request_id]
        if output.error is not None:
            raise RuntimeError(output.error)
        try:
            for token in output.generated_tokens[len(request.tokens) :]:
                if not request.over:
                    request.take(token)
            if request.over or output.is_finished():
                running.pop(output.request_id).finish()
        except Exception as error:  # of its streamer
            running.pop(output.request_id).fail(error)
        if output.request_id not in running and not output.is_finished():
            manager.cancel_request(output.request_id)

    def _manager(self, kind: tuple, settings: GenerationConfig):
        if kind not in self.managers:
            if len(self.managers) == _MOST_BATCHES:
                self.managers.pop(next(iter(self.managers))).stop(block=True, timeout=2)
            # Its own configuration: upstream changes the attention that drafted requests use, too.
            twin = with_own_config(self.target)
            manager = twin.init_continuous_batching(
                generation_config=copy.deepcopy(settings),
                continuous_batching_config=ContinuousBatchingConfig(
                    auto_switch_to_flash=False,
                    per_request_processors=True,
                    max_memory_percent=_MEMORY,
                    max_batch_tokens=_CPU_TOKENS if self.target.device.type == "cpu" else None,
                ),
            )
            manager.start()
            self.managers[kind] = manager
        return self.managers[kind]

    def _failed(self, kind: tuple, manager, error: Exception) -> None:
        """Its requests go on one by one; a batch that could not be started is not tried again."""
        logger.warning(f"Continuous batching failed; its requests continue one by one ({error}).")
        self.failures = _FAILURES if manager is None else self.failures + 1
        self.managers.pop(kind, None)
        if manager is not None:
            manager.stop(block=True, timeout=2)
