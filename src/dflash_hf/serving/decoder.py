"""
Decoding for several requests with one pair, in one thread. A request that waits on its own is decoded with the
drafter. As soon as a second one waits that can be batched with it, both go on together in transformers' continuous
batching, with all that come before the batch is empty; a batch does not use the drafter.

The thread serves everybody, so every error belongs to somebody. An error while a single request is decoded, or of its
own streamer or processors, is that request's: its `future` has it, and the next request is answered. After an error of
a batch, its requests go on one by one. Caches of conversations only save time: an error of theirs is logged, and the
prompt is read from its beginning. If the thread ends nevertheless, `is_alive` is false and nobody is left waiting: all
requests fail, those that wait and those that come later.
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
    StoppingCriteria,
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
_PER_REQUEST_SETTINGS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
}
_TEXT_INPUTS = {"input_ids", "attention_mask"}
_MAX_BATCH_FAILURES = 3  # after so many in a row, nothing is batched any more
_MAX_BATCH_MANAGERS = 2  # each has its own cache
_BATCH_CACHE_SHARE = 0.1  # of the free memory, for such a cache
_MAX_BATCH_TOKENS_ON_CPU = 512  # per forward; more are no faster on a CPU, and upstream keeps logits for all of them
_BATCH_POLL_SECONDS = 0.1  # without a token, after which the decoder looks whether the batch still runs
_MAX_BACK_OFF = 31  # requests without the drafter
_ENDED = "The thread that decodes has ended, and no request is answered any more; restart the server."
# After an error that belongs to no request, so that one that repeats does not take a whole core.
_SECONDS_AFTER_ERROR = 0.1


class DecoderEnded(RuntimeError):
    """No request is answered any more."""


class DrafterBackOff:
    """
    After an answer that gained nothing by the drafter, requests are decoded without it: one, and twice as many and one
    more after each further such answer, at most `_MAX_BACK_OFF`. The loop that can draft costs time, too.
    """

    def __init__(self):
        self._length = 0  # requests without the drafter after the latest such answer
        self._remaining = 0  # of these, how many are still to come

    def allows_drafter(self) -> bool:
        """Whether the next request may use the drafter; called once for each request that would."""
        if not self._remaining:
            return True
        self._remaining -= 1
        return False

    def record(self, speedup: float) -> None:
        """Record the estimated speed-up of an answer that could use the drafter."""
        self._length = 0 if speedup > 1 else min(2 * self._length + 1, _MAX_BACK_OFF)
        self._remaining = self._length


class _EndsSingleDecoding(StoppingCriteria):
    """Ends a call of `generate` when its request wants no more tokens, or leaves it to join a batch."""

    def __init__(self, decoder: "Decoder", request: Request):
        self.decoder = decoder
        self.request = request
        self.leaves_for_batch = False

    def __call__(self, input_ids, scores, **kwargs) -> torch.BoolTensor:
        self.decoder.receive(wait=False)
        self.leaves_for_batch = self.decoder.can_batch_next(self.request.batch_key)
        ends = self.leaves_for_batch or not self.request.wants_tokens
        return torch.full((len(input_ids),), ends, device=input_ids.device)


class Decoder:
    """
    Answers requests, first come, first served.

    `submit`, `stop` and `is_alive` are for any thread; everything else runs in the decoder's own.

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
        self.stop_strings = target.generation_config.stop_strings
        target.generation_config.stop_strings = None
        self.token_bytes = TokenBytes(tokenizer)
        self.inbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()  # `None`: the sign to stop
        self.waiting: deque[Request] = deque()
        self.conversations = Conversations(target)
        self.batch_managers: dict[tuple, Any] = {}  # by the key of their batches; the latest last
        self.batch_failures = 0 if hasattr(target, "init_continuous_batching") else _MAX_BATCH_FAILURES
        self.request_numbers = itertools.count()
        self.back_off = DrafterBackOff()
        self.stop_requested = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def submit(self, request: Request) -> Request:
        """
        Answer a request; see its `future`.

        Raises:
            `DecoderEnded`: the thread has ended.
        """
        if not self.is_alive:
            raise DecoderEnded(_ENDED)
        request.batch_key = self.batch_key_of(request)
        self.inbox.put(request)
        if not self.is_alive:  # it ended meanwhile, and has looked into its inbox for the last time
            self._fail_waiting()
        return request

    @property
    def is_alive(self) -> bool:
        """Whether requests are answered."""
        return self.thread.is_alive()

    def stop(self) -> None:
        """End the threads; torch must not be at work in one while the interpreter ends."""
        self.inbox.put(None)
        self.thread.join(timeout=2)
        for manager in list(self.batch_managers.values()):
            manager.stop(block=True, timeout=2)

    def batch_key_of(self, request: Request) -> tuple | None:
        """
        Requests with the same key can be in one batch: whether they sample, and the types of their logits processors.
        `None` if a request cannot be batched.
        """
        settings = request.settings
        if set(request.inputs) - _TEXT_INPUTS or request.processors or request.prompt_scores is not None:
            return None
        if not settings.max_new_tokens or settings.max_time or settings.bad_words_ids:
            return None
        if settings.do_sample and request.seed is not None:
            return None
        if settings.num_beams not in (None, 1) or settings.repetition_penalty not in (None, 1.0):
            return None
        try:
            processors = [type(processor) for processor in self.target._get_logits_processor(settings)]
        except (TypeError, AttributeError):  # one needs what `generate` adds, such as the length of the prompt
            return None
        if not all(processor in _PER_REQUEST_SETTINGS for processor in processors):
            return None
        return (settings.do_sample, *processors)

    # --------------------------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        """Serve the first request that waits, until `stop`. Whatever ends the thread, nobody is left waiting."""
        try:
            while not self.stop_requested:
                try:
                    self.receive(wait=not self.waiting)
                    if self.waiting:
                        self._serve(self.waiting.popleft())
                except BaseException as error:  # of no request
                    _log("The thread that decodes goes on after an error", error)
                    time.sleep(_SECONDS_AFTER_ERROR)
        finally:
            self._fail_waiting()

    def _serve(self, request: Request) -> None:
        """Answer a request, and with it those that can be batched with it."""
        try:
            if request.is_finished:  # it has failed
                return
            if not request.wants_tokens:  # it is to be aborted
                request.finish()
            elif self.can_batch_next(request.batch_key):
                self.waiting.appendleft(request)
                self._decode_batch(request.batch_key)
            else:
                self._decode_single(request)
        except BaseException as error:
            if isinstance(error, MemoryError | torch.OutOfMemoryError):  # the next one may need what they take
                self.conversations.entries.clear()
            request.fail(error)

    def _fail_waiting(self) -> None:
        """Fail all requests that wait, which nobody will answer."""
        with contextlib.suppress(queue.Empty):
            while True:
                request = self.inbox.get_nowait()
                if request is not None:
                    self.waiting.append(request)
        while self.waiting:
            self.waiting.popleft().fail(DecoderEnded(_ENDED))

    def receive(self, wait: bool) -> None:
        """Move what has arrived to `waiting`; with `wait`, at least one request, or the sign to stop."""
        while wait or not self.inbox.empty():
            request = self.inbox.get()
            wait = False
            if request is None:
                self.stop_requested = True
            else:
                self.waiting.append(request)

    def can_batch_next(self, batch_key: tuple | None) -> bool:
        """Whether the first request that waits can be in a batch with this key."""
        can_batch = batch_key is not None and self.batch_failures < _MAX_BATCH_FAILURES
        return can_batch and bool(self.waiting) and self.waiting[0].batch_key == batch_key

    # ---------------------------------------------------------------------------------------- one request on its own

    def _decode_single(self, request: Request) -> None:
        """Decode a request with the drafter, from where a batch has left it, until it ends or leaves for a batch."""
        # 1. The prompt's own log-probabilities, if asked for; perhaps nothing else is.
        if request.prompt_scores is not None:
            request.prompt_scores.score_prompt(self.target, request.prompt, lambda: not request.wants_tokens)
        if request.remaining_tokens == 0:
            request.start()
            request.finish()
            return
        # 2. Its inputs: with the tokens of a batch, if it comes from one.
        drafts = request.drafts and self.back_off.allows_drafter()
        inputs = request.inputs
        token_ids = request.token_ids
        if request.tokens:
            ids = torch.tensor([token_ids], device=self.target.device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        settings = copy.copy(request.settings)
        settings.max_new_tokens = request.remaining_tokens
        settings.return_dict_in_generate = True
        options: dict = {"assistant_model": self.draft if drafts else None}
        # 3. The cache of an earlier answer, if it fits.
        is_text = not set(inputs) - _TEXT_INPUTS
        keeps_cache = is_text and (settings.num_beams or 1) == 1 and not settings.cache_implementation
        request.start()
        if keeps_cache:
            options[CACHE_NAME], request.cached_tokens = self._take_cache(token_ids)
        # 4. Decode.
        ends = _EndsSingleDecoding(self, request)
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
        # 5. What the next requests need.
        if keeps_cache:
            self._keep_cache(output.sequences[0].tolist(), len(request.prompt), output.get(CACHE_NAME))
        speedup = output.get("estimated_speedup")
        if speedup is not None:
            self.back_off.record(speedup)
        # 6. It is finished, or waits for a batch.
        if ends.leaves_for_batch and request.remaining_tokens and request.wants_tokens and not request.at_end:
            request.pause()
            self.waiting.appendleft(request)
        else:
            request.finish()

    def _take_cache(self, token_ids: list[int]) -> tuple[Any, int]:
        """The cache with the longest common prefix, and the number of tokens in it."""
        try:
            return self.conversations.take(token_ids)
        except Exception as error:
            _log("The caches of conversations are dropped after an error", error)
            self.conversations.entries.clear()
            return None, 0

    def _keep_cache(self, token_ids: list[int], prompt_length: int, cache) -> None:
        """Keep the cache of a prompt and its answer for the next turn."""
        try:
            self.conversations.keep(token_ids, prompt_length, cache)
        except Exception as error:
            _log("The caches of conversations are dropped after an error", error)
            self.conversations.entries.clear()

    # -------------------------------------------------------------------------------------------- several in a batch

    def _decode_batch(self, batch_key: tuple) -> None:
        """Decode in a batch until it is empty; requests with its key join it, up to the first with another key."""
        running: dict[str, Request] = {}
        try:
            manager = self._batch_manager(batch_key)
            while True:
                self.receive(wait=False)
                while self.can_batch_next(batch_key):
                    self._add_to_batch(manager, running)
                if not running:
                    self.batch_failures = 0
                    return
                output = manager.get_result(timeout=_BATCH_POLL_SECONDS)
                if output is None and not manager.is_running():
                    raise RuntimeError("it has ended")
                if output is not None and output.request_id in running:
                    self._take_output(output, manager, running)
        except BaseException as error:
            _log("Continuous batching failed; its requests continue one by one", error)
            self._leave_batch(batch_key, running)

    def _leave_batch(self, batch_key: tuple, running: dict[str, Request]) -> None:
        """After an error the requests of a batch go on one by one, after the tokens that it gave them."""
        self.batch_failures += 1
        if self.waiting:
            self.waiting[0].pause()  # it may have been about to join
            if not running:  # the batch could not even begin, perhaps because of the first
                self.waiting[0].batch_key = None
        for request in reversed(running.values()):
            request.batch_key = None
            request.pause()
            self.waiting.appendleft(request)
        manager = self.batch_managers.pop(batch_key, None)
        if manager is None:
            return
        try:
            for name in running:
                manager.cancel_request(name)
            threading.Thread(target=manager.stop, daemon=True).start()  # which may never end
        except BaseException as error:
            _log("A batch cannot be ended", error)

    def _batch_manager(self, batch_key: tuple):
        """The manager of the batches with a key; the oldest ends where there are too many. It owns a cache."""
        if batch_key not in self.batch_managers:
            if len(self.batch_managers) == _MAX_BATCH_MANAGERS:
                self.batch_managers.pop(next(iter(self.batch_managers))).stop(block=True, timeout=2)
            # Its own configuration: upstream changes the attention that drafted requests use, too.
            manager = with_own_config(self.target).init_continuous_batching(
                generation_config=copy.deepcopy(self.waiting[0].settings),
                continuous_batching_config=ContinuousBatchingConfig(
                    auto_switch_to_flash=False,
                    per_request_processors=True,
                    max_memory_percent=_BATCH_CACHE_SHARE,
                    max_batch_tokens=_MAX_BATCH_TOKENS_ON_CPU if self.target.device.type == "cpu" else None,
                ),
            )
            manager.start()
            self.batch_managers[batch_key] = manager
        return self.batch_managers[batch_key]

    def _add_to_batch(self, manager, running: dict[str, Request]) -> None:
        """The first waiting request joins a batch."""
        request = self.waiting[0]
        settings = request.settings
        try:
            _, *processors = request.batch_key
            attributes = [_PER_REQUEST_SETTINGS[processor] for processor in processors]
            own_settings = {attribute: getattr(settings, attribute) for attribute in attributes}
            token_ids = request.token_ids
            request.start()
        except BaseException as error:  # of its streamer
            self.waiting.popleft()
            request.fail(error)
            return
        name = f"request {next(self.request_numbers)}"
        was_added = manager.add_request(
            token_ids,
            name,
            request.remaining_tokens,
            streaming=True,
            eos_token_id=settings.eos_token_id,
            **own_settings,
        )
        if not was_added:
            raise RuntimeError("it takes no more requests")
        request.tokens_before_batch = len(token_ids)
        running[name] = self.waiting.popleft()

    def _take_output(self, output, manager, running: dict[str, Request]) -> None:
        """Add the next tokens to a request in a batch, which leaves it when it is complete."""
        request = running[output.request_id]
        if output.error is not None:
            raise RuntimeError(output.error)
        try:
            # `generated_tokens` are all since it joined.
            request.append(output.generated_tokens[len(request.token_ids) - request.tokens_before_batch :])
            is_complete = not request.wants_tokens or output.is_finished()
            if is_complete:
                request.finish()
        except BaseException as error:
            is_complete = True
            request.fail(error)
        if is_complete:
            del running[output.request_id]
            if not output.is_finished():
                manager.cancel_request(output.request_id)


def _log(event: str, error: BaseException) -> None:
    """Log an error that no request has, even one that cannot be shown."""
    try:
        text = one_line(error)
    except Exception:
        text = ""
    logger.warning(f"{event} ({type(error).__name__}: {text}).")
