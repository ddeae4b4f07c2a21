"""
Decoding for several requests with one pair, in one thread: a request that waits alone is decoded with the drafter;
it and all that come before its end are decoded together, by transformers' continuous batching.

The thread serves everybody, so what fails belongs to somebody. An error while a request is decoded alone, or of its
own streamer or processors, is that request's: its `done` has it, and the next request is answered. An error of a batch
is nobody's: its requests go on one by one. Caches of conversations only save time: an error of theirs is logged, and
the text is read anew. When the thread ends nevertheless, `alive` is false and nobody waits: all requests fail, those
that wait and those that come later.
"""

import contextlib
import copy
import itertools
import queue
import threading
import time
from collections import deque
from typing import Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils import logging

from dflash_hf._io.errors import one_line
from dflash_hf.modeling.candidates_dflash import CACHE_NAME
from dflash_hf.serving.conversations import Conversations
from dflash_hf.serving.request import Request
from dflash_hf.serving.token_bytes import TokenBytes
from dflash_hf.targets.clones import with_own_config


logger = logging.get_logger(__name__)

# Settings that may differ between the requests of a batch: the argument, and the attribute that holds its value.
_PER_REQUEST = {TemperatureLogitsWarper: "temperature", TopKLogitsWarper: "top_k", TopPLogitsWarper: "top_p"}
_TEXT_ONLY = {"input_ids", "attention_mask"}
_FAILURES = 3  # after so many in a row, nothing is batched any more
_MOST_BATCHES = 2  # each has its own cache
_MEMORY = 0.1  # share of the free memory for such a cache
_CPU_TOKENS = 512  # per forward; more are no faster on a CPU, and upstream keeps logits for all of them
_NEWS = 0.1  # seconds without a token after which a batch looks whether it still runs
_LONGEST_BACK_OFF = 31  # requests without the drafter
_ENDED = "The thread that decodes has ended, and no request is answered any more; restart the server."
_PAUSE = 0.1  # seconds after an error that belongs to nobody, so that one that repeats does not take a whole core


class DecoderEnded(RuntimeError):
    """No request is answered any more."""


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
        self.target = target
        self.tokenizer = tokenizer
        self.draft = draft
        self.stops = target.generation_config.stop_strings
        target.generation_config.stop_strings = None
        self.bytes_of = TokenBytes(tokenizer)
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.waiting: deque[Request] = deque()
        self.conversations = Conversations(target)
        self.managers: dict[tuple, Any] = {}  # of batches, by what their requests share; the latest last
        self.failures = 0 if hasattr(target, "init_continuous_batching") else _FAILURES
        self.numbers = itertools.count()
        # Back-off: after an answer that gained nothing by the drafter, requests are decoded without it.
        self.back_off = 0  # how many after the latest such answer
        self.undrafted_left = 0  # of these, how many are still to come
        self.stopped = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def submit(self, request: Request) -> Request:
        """
        Answer a request; see its `done`.

        Raises:
            `DecoderEnded`: the thread has ended.
        """
        if not self.alive:
            raise DecoderEnded(_ENDED)
        request.kind = self.kind_of(request)
        self.inbox.put(request)
        if not self.alive:  # it ended meanwhile, and has looked into its inbox for the last time
            self._fail_waiting()
        return request

    @property
    def alive(self) -> bool:
        """Whether requests are answered."""
        return self.thread.is_alive()

    def kind_of(self, request: Request) -> tuple | None:
        """What the requests of a batch must share; `None` if a request cannot be batched."""
        settings = request.settings
        seeded = settings.do_sample and request.seed is not None
        unsupported = (request.processors, settings.bad_words_ids, settings.max_time, seeded)
        if any(unsupported) or set(request.inputs) - _TEXT_ONLY or not settings.max_new_tokens or request.scores:
            return None
        if settings.num_beams not in (None, 1) or settings.repetition_penalty not in (None, 1.0):
            return None
        try:
            processors = [type(processor) for processor in self.target._get_logits_processor(settings)]
        except (TypeError, AttributeError):  # one needs what `generate` adds, such as the length of the prompt
            return None
        if not all(processor in _PER_REQUEST for processor in processors):
            return None
        return (settings.do_sample, *processors)

    def stop(self) -> None:
        """End the threads; torch must not be at work in one while the interpreter ends."""
        self.inbox.put(None)
        self.thread.join(timeout=2)
        for manager in list(self.managers.values()):
            manager.stop(block=True, timeout=2)

    # In the thread.

    def _run(self) -> None:
        """Until `stop`: the first that waits is served. Whatever ends the thread, nobody is left waiting."""
        try:
            while not self.stopped:
                try:
                    self._receive(wait=not self.waiting)
                    if self.waiting:
                        self._serve(self.waiting.popleft())
                except BaseException as error:  # of no request
                    _log("The thread that decodes goes on after an error", error)
                    time.sleep(_PAUSE)
        finally:
            self._fail_waiting()

    def _serve(self, request: Request) -> None:
        """Answer a request, and with it those that may be decoded together with it."""
        try:
            if request.done.done():  # it has failed
                return
            if request.over:  # nobody waits any more
                request.finish()
            elif self._can_join(request.kind):
                self.waiting.appendleft(request)
                self._decode_batch(request.kind)
            else:
                self._decode_alone(request)
        except BaseException as error:
            if isinstance(error, MemoryError | torch.OutOfMemoryError):  # the next one may need what they take
                self.conversations.entries.clear()
            request.fail(error)

    def _fail_waiting(self) -> None:
        """Tell those that wait that nobody will answer."""
        with contextlib.suppress(queue.Empty):
            while True:
                request = self.inbox.get_nowait()
                if request is not None:
                    self.waiting.append(request)
        while self.waiting:
            self.waiting.popleft().fail(DecoderEnded(_ENDED))

    def _receive(self, wait: bool) -> None:
        """Take what has arrived into `waiting`; with `wait`, at least one request, or the sign to stop."""
        while wait or not self.inbox.empty():
            request = self.inbox.get()
            wait = False
            if request is None:
                self.stopped = True
            else:
                self.waiting.append(request)

    def _can_join(self, kind: tuple | None) -> bool:
        """Whether the first that waits may be decoded together with others of a kind."""
        can_batch = kind is not None and self.failures < _FAILURES
        return can_batch and bool(self.waiting) and self.waiting[0].kind == kind

    def _decode_alone(self, request: Request) -> None:
        """Decode a request with the drafter, from where a batch has left it, and until others wait to join it."""
        if request.scores is not None:
            request.scores.score(self.target, request.prompt, lambda: request.over)
        if request.left == 0:
            request.begin()
            request.finish()
            return
        leaves = False  # for a batch
        drafts = request.drafts and not self.undrafted_left
        if request.drafts and self.undrafted_left:
            self.undrafted_left -= 1

        def ends(input_ids, scores, **kwargs) -> torch.BoolTensor:
            nonlocal leaves
            self._receive(wait=False)
            leaves = self._can_join(request.kind)
            return torch.full((len(input_ids),), request.over or leaves, device=input_ids.device)

        inputs = request.inputs
        settings = copy.copy(request.settings)
        text = request.text
        if request.tokens:
            ids = torch.tensor([text], device=self.target.device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        settings.max_new_tokens = request.left
        settings.return_dict_in_generate = True
        options: dict = {"assistant_model": self.draft if drafts else None}
        is_text = not set(inputs) - _TEXT_ONLY
        keeps_cache = is_text and (settings.num_beams or 1) == 1 and not settings.cache_implementation
        request.begin()
        if keeps_cache:
            options[CACHE_NAME], request.cached = self._cache_of(text)
        device = self.target.device
        with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=request.seed is not None):
            if request.seed is not None:
                torch.manual_seed(request.seed)
            output = self.target.generate(
                **inputs,
                **options,
                generation_config=settings,
                streamer=request,
                logits_processor=[*request.processors],
                stopping_criteria=[ends],
            )
        if keeps_cache:
            self._keep(output.sequences[0].tolist(), len(request.prompt), output.get(CACHE_NAME))
        speedup = output.get("estimated_speedup")
        if speedup is not None:  # the loop that can draft costs time, too
            self.back_off = 0 if speedup > 1 else min(2 * self.back_off + 1, _LONGEST_BACK_OFF)
            self.undrafted_left = self.back_off
        if leaves and request.left and not request.over and not request.ended:
            self.waiting.appendleft(request)
        else:
            request.finish()

    def _cache_of(self, text: list[int]) -> tuple[Any, int]:
        """The cache of the longest beginning of a text, and its length."""
        try:
            return self.conversations.take(text)
        except Exception as error:
            _log("The caches of conversations are dropped after an error", error)
            self.conversations.entries.clear()
            return None, 0

    def _keep(self, text: list[int], prompt: int, cache) -> None:
        """Keep the cache of a text for its next turn."""
        try:
            self.conversations.keep(text, prompt, cache)
        except Exception as error:
            _log("The caches of conversations are dropped after an error", error)
            self.conversations.entries.clear()

    def _decode_batch(self, kind: tuple) -> None:
        """Decode in a batch until it is empty; requests that arrive meanwhile join it, up to one of another kind."""
        running: dict[str, Request] = {}
        try:
            manager = self._batch_manager(kind)
            while True:
                self._receive(wait=False)
                while self._can_join(kind):
                    self._add_to_batch(manager, running)
                if not running:
                    self.failures = 0
                    return
                output = manager.get_result(timeout=_NEWS)
                if output is None and not manager.is_running():
                    raise RuntimeError("it has ended")
                if output is not None and output.request_id in running:
                    self._take_output(output, manager, running)
        except BaseException as error:
            _log("Continuous batching failed; its requests continue one by one", error)
            self._leave_batch(kind, running)

    def _leave_batch(self, kind: tuple | None, running: dict[str, Request]) -> None:
        """After an error the requests of a batch go on alone, from where it has left them."""
        self.failures += 1
        if not running and self.waiting:  # it could not even begin, perhaps because of the first
            self.waiting[0].kind = None
        for request in reversed(running.values()):
            request.kind = None
            self.waiting.appendleft(request)
        manager = self.managers.pop(kind, None)
        if manager is None:
            return
        try:
            for name in running:
                manager.cancel_request(name)
            threading.Thread(target=manager.stop, daemon=True).start()  # which may never end
        except BaseException as error:
            _log("A batch cannot be ended", error)

    def _batch_manager(self, kind: tuple):
        """The manager of the batches of a kind; the oldest ends where there are too many. It owns a cache."""
        if kind not in self.managers:
            if len(self.managers) == _MOST_BATCHES:
                self.managers.pop(next(iter(self.managers))).stop(block=True, timeout=2)
            # Its own configuration: upstream changes the attention that drafted requests use, too.
            manager = with_own_config(self.target).init_continuous_batching(
                generation_config=copy.deepcopy(self.waiting[0].settings),
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

    def _add_to_batch(self, manager, running: dict[str, Request]) -> None:
        """The first waiting request joins a batch."""
        request = self.waiting[0]
        settings = request.settings
        try:
            attributes = [_PER_REQUEST[warper] for warper in request.kind[1:]]
            own_settings = {attribute: getattr(settings, attribute) for attribute in attributes}
            text = request.text
            request.begin()
        except BaseException as error:  # of its streamer
            self.waiting.popleft()
            request.fail(error)
            return
        name = f"request {next(self.numbers)}"
        ends = settings.eos_token_id
        if not manager.add_request(text, name, request.left, streaming=True, eos_token_id=ends, **own_settings):
            raise RuntimeError("it takes no more requests")
        request.batched = len(text)
        running[name] = self.waiting.popleft()

    def _take_output(self, output, manager, running: dict[str, Request]) -> None:
        """The next tokens of a request in a batch, which leaves it when it is complete."""
        request = running[output.request_id]
        if output.error is not None:
            raise RuntimeError(output.error)
        try:
            request.take(output.generated_tokens[len(request.text) - request.batched :])
            complete = request.over or output.is_finished()
            if complete:
                request.finish()
        except BaseException as error:
            complete = True
            request.fail(error)
        if complete:
            del running[output.request_id]
            if not output.is_finished():
                manager.cancel_request(output.request_id)


def _log(what: str, error: BaseException) -> None:
    """Log an error that no request has, even one that cannot be shown."""
    try:
        shown = one_line(error)
    except Exception:
        shown = ""
    logger.warning(f"{what} ({type(error).__name__}: {shown}).")
