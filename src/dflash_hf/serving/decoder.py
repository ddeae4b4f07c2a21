"""
Decoding for several requests with one pair, in one thread. A request that waits on its own is decoded with the
drafter. As soon as a second one waits that can be batched with it, both go on together in transformers' continuous
batching, with all that come before the batch is empty; a batch does not use the drafter.

All requests share this thread, so every error must be attributed to a request, and end no other:

- An error while a request is decoded on its own, or of its streamer or processors: this request fails with it, and the
  next one is answered.
- An error of a batch: its requests go on one by one.
- An error of the caches of earlier answers, which only save time: it is logged, the caches are dropped, and the prompt
  is read from its beginning.
- If the thread ends nevertheless, `is_alive` is false, and all waiting and later requests fail.

The way of a request in this thread, from queue to queue:

    submit --> inbox --receive--> waiting --_serve--> _decode_single ---> finished
                                     ^                      |
                                     |  a second one waits  |
                                     +----------------------+
                                     |
                                     +--_decode_batch--> running (a batch) ---> finished
                                     ^                      |
                                     |   the batch fails    |
                                     +----------------------+
"""

import contextlib
import copy
import itertools
import queue
import threading
import time
from collections import deque
from typing import Any

import psutil
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
from dflash_hf.serving.prefix_caches import PrefixCaches
from dflash_hf.serving.request import Request
from dflash_hf.serving.token_bytes import TokenBytes
from dflash_hf.targets.clones import with_own_config
from dflash_hf.targets.generation import forked_rng
from dflash_hf.targets.memory import free_memory


logger = logging.get_logger(__name__)

# Logits processors that may differ between the requests of a batch, and the setting that each is made from.
_PER_REQUEST_SETTINGS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
}
_TEXT_INPUTS = {"input_ids", "attention_mask"}
_MAX_BATCH_FAILURES = 3  # consecutive failures, after which nothing is batched any more
_MAX_BATCH_MANAGERS = 2  # each has its own cache
_BATCH_CACHE_SHARE = 0.1  # share of the free memory for the cache of a manager
_MAX_BATCH_CACHE_ON_CPU = 4 << 30  # bytes; upstream fills all of it with zeros before the first token
_MAX_BATCH_TOKENS_ON_CPU = 512  # per forward; more is no faster on a CPU, and upstream keeps logits of all of them
_BATCH_POLL_SECONDS = 0.1  # after this time without a token, the decoder checks that the batch still runs
_MAX_PAUSE = 31  # consecutive requests without the drafter
_ENDED = "The thread that decodes has ended, and no request is answered any more; restart the server."
# Waiting time after an error that belongs to no request, so that an error that repeats does not busy a whole core.
_SECONDS_AFTER_ERROR = 0.1


class DecoderEnded(RuntimeError):
    """No request is answered any more."""


class DrafterPause:
    """
    Pauses the drafter after answers that it did not speed up: for 1, 3, 7, ... requests (`2n + 1`), at most
    `_MAX_PAUSE`. Even a round that drafts nothing costs time in the loop that can draft.
    """

    def __init__(self):
        self._pause_length = 0  # requests in the latest pause; 0 after an answer that the drafter sped up
        self._remaining_requests = 0  # requests of this pause that are still to come

    def take_turn(self) -> bool:
        """
        Count the next request; call it once for each request that would use the drafter.

        Returns:
            `bool`: Whether this request may use the drafter: no request of a pause may.
        """
        if not self._remaining_requests:
            return True
        self._remaining_requests -= 1
        return False

    def record(self, speedup: float) -> None:
        """Record the estimated speedup of an answer that could use the drafter."""
        self._pause_length = 0 if speedup > 1 else min(2 * self._pause_length + 1, _MAX_PAUSE)
        self._remaining_requests = self._pause_length


class _SingleDecodingStop(StoppingCriteria):
    """Stops a call of `generate` when its request wants no more tokens, or leaves the call to join a batch."""

    def __init__(self, decoder: "Decoder", request: Request):
        self.decoder = decoder
        self.request = request
        self.leaves_for_batch = False

    def __call__(self, input_ids, scores, **kwargs) -> torch.BoolTensor:
        self.decoder.receive(wait=False)
        self.leaves_for_batch = self.decoder.can_batch_next(self.request.batch_key)
        stops = self.leaves_for_batch or not self.request.wants_tokens
        return torch.full((len(input_ids),), stops, device=input_ids.device)


class Decoder:
    """
    Answers requests, first come, first served.

    `submit`, `stop` and `is_alive` are for any thread; everything else runs in the decoder's own.

    Args:
        target (`PreTrainedModel`): The target. Until `stop`, its stop strings are here and not in its
            `generation_config`, since `generate` would search the vocabulary for them in each call.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        draft (`DFlashDraftModel`, *optional*): Its drafter.
    """

    def __init__(self, target, tokenizer, draft=None):
        self.target = target
        self.tokenizer = tokenizer
        self.draft = draft
        self.stop_strings = target.generation_config.stop_strings
        self.token_bytes = TokenBytes(tokenizer)
        self.inbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()  # `None`: stop
        self.waiting: deque[Request] = deque()
        self.prefix_caches = PrefixCaches(target)
        self.batch_managers: dict[tuple, Any] = {}  # by batch key; the latest last
        self.batch_failures = 0 if hasattr(target, "init_continuous_batching") else _MAX_BATCH_FAILURES
        self.request_numbers = itertools.count()
        self.drafter_pause = DrafterPause()
        self.stop_requested = False
        target.generation_config.stop_strings = None  # last: nobody calls `stop` if something above raises
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
        """
        End the threads, since torch must not run in one while the interpreter exits, and give the target its stop
        strings back.
        """
        self.inbox.put(None)
        self.thread.join(timeout=2)
        if self.stop_strings is not None:
            self.target.generation_config.stop_strings = self.stop_strings
        for manager in list(self.batch_managers.values()):
            manager.stop(block=True, timeout=2)

    def batch_key_of(self, request: Request) -> tuple | None:
        """
        Requests with the same key can be in one batch: whether they sample, and the types of their logits processors.
        `None` if a request cannot be batched.
        """
        config = request.generation_config
        if set(request.inputs) - _TEXT_INPUTS or request.processors or request.prompt_scores is not None:
            return None
        if not config.max_new_tokens or config.max_time or config.bad_words_ids:
            return None
        if config.do_sample and request.seed is not None:
            return None
        if config.num_beams not in (None, 1) or config.repetition_penalty not in (None, 1.0):
            return None
        try:
            processors = [type(processor) for processor in self.target._get_logits_processor(config)]
        except (TypeError, AttributeError):  # one needs what `generate` adds, such as the length of the prompt
            return None
        if not all(processor in _PER_REQUEST_SETTINGS for processor in processors):
            return None
        return (config.do_sample, *processors)

    # --------------------------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        """Serve the first request that waits, until `stop`. Whatever ends the thread, nobody is left waiting."""
        try:
            while not self.stop_requested:
                try:
                    self.receive(wait=not self.waiting)
                    if self.waiting:
                        self._serve(self.waiting.popleft())
                except BaseException as error:  # not a request's
                    _log("The thread that decodes goes on after an error", error)
                    time.sleep(_SECONDS_AFTER_ERROR)
        finally:
            self._fail_waiting()

    def _serve(self, request: Request) -> None:
        """Answer a request, together with the requests that can be batched with it."""
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
                self.prefix_caches.clear()
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
        """Move what has arrived to `waiting`; with `wait`, wait for a request, or for `stop`."""
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
        # 2. The answer.
        stop = _SingleDecodingStop(self, request)
        speedup = self._generate(request, stop)
        if speedup is not None:
            self.drafter_pause.record(speedup)
        # 3. It is finished, or waits for a batch.
        if stop.leaves_for_batch and request.remaining_tokens and request.wants_tokens and not request.at_end:
            request.pause()
            self.waiting.appendleft(request)
        else:
            request.finish()

    def _generate(self, request: Request, stop: StoppingCriteria) -> float | None:
        """Call `generate` for a request; returns the estimated speedup by the drafter, `None` if it was not used."""
        # 1. Its inputs: with the tokens of a batch, if it comes from one.
        inputs = request.inputs
        token_ids = request.token_ids
        if request.tokens:
            ids = torch.tensor([token_ids], device=self.target.device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        config = copy.copy(request.generation_config)
        config.max_new_tokens = request.remaining_tokens
        config.return_dict_in_generate = True
        options: dict = {"assistant_model": self.draft if self._decide_drafting(request) else None}
        # 2. The cache of an earlier answer, if it fits.
        is_text = not set(inputs) - _TEXT_INPUTS
        keeps_cache = is_text and (config.num_beams or 1) == 1 and not config.cache_implementation
        request.start()
        if keeps_cache:
            options[CACHE_NAME], request.cached_tokens = self._take_cache(token_ids)
        # 3. Decode; a seed is for this request alone.
        with forked_rng(self.target.device, enabled=request.seed is not None):
            if request.seed is not None:
                torch.manual_seed(request.seed)
            output = self.target.generate(
                **inputs,
                **options,
                generation_config=config,
                streamer=request,
                logits_processor=[*request.processors],
                stopping_criteria=[stop],
            )
        # 4. The cache, for the next turn.
        if keeps_cache:
            self._keep_cache(output.sequences[0].tolist(), len(request.prompt), output.get(CACHE_NAME))
        return output.get("estimated_speedup")

    def _decide_drafting(self, request: Request) -> bool:
        """
        Whether a request uses the drafter. This is decided when it starts: a request that continues after a batch does
        not count as another one in a pause of the drafter.
        """
        if self.draft is None or not request.use_drafter:
            return False
        if request.start_time is None:
            request.use_drafter = self.drafter_pause.take_turn()
        return request.use_drafter

    def _take_cache(self, token_ids: list[int]) -> tuple[Any, int]:
        """The cache with the longest common prefix, and the number of tokens in it."""
        try:
            return self.prefix_caches.take(token_ids)
        except Exception as error:
            _log("The caches of earlier answers are dropped after an error", error)
            self.prefix_caches.clear()
            return None, 0

    def _keep_cache(self, token_ids: list[int], prompt_length: int, cache) -> None:
        """Keep the cache of a prompt and its answer for the next turn."""
        try:
            self.prefix_caches.keep(token_ids, prompt_length, cache)
        except Exception as error:
            _log("The caches of earlier answers are dropped after an error", error)
            self.prefix_caches.clear()

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
        # 1. The request that was about to join may have been started already.
        if self.waiting:
            self.waiting[0].pause()
        # 2. If no request is in the batch, this one may be why it failed: it is not batched again.
        if self.waiting and not running:
            self.waiting[0].batch_key = None
        # 3. The requests of the batch come first again, in their order.
        for request in reversed(running.values()):
            request.batch_key = None
            request.pause()
            self.waiting.appendleft(request)
        # 4. The manager; the next batch with this key makes a new one.
        manager = self.batch_managers.pop(batch_key, None)
        if manager is None:
            return
        try:
            for name in running:
                manager.cancel_request(name)
            threading.Thread(target=manager.stop, daemon=True).start()  # it may never end
        except BaseException as error:
            _log("A batch cannot be ended", error)

    def _batch_manager(self, batch_key: tuple):
        """The manager of the batches with a key; the oldest ends where there are too many. It owns a cache."""
        if batch_key not in self.batch_managers:
            if len(self.batch_managers) == _MAX_BATCH_MANAGERS:
                self.batch_managers.pop(next(iter(self.batch_managers))).stop(block=True, timeout=2)
            # Its own configuration: upstream would also change the attention of drafted requests.
            manager = with_own_config(self.target).init_continuous_batching(
                generation_config=copy.deepcopy(self.waiting[0].generation_config),
                continuous_batching_config=ContinuousBatchingConfig(
                    auto_switch_to_flash=False,
                    per_request_processors=True,
                    max_memory_percent=_batch_cache_share(self.target.device),
                    max_batch_tokens=_MAX_BATCH_TOKENS_ON_CPU if self.target.device.type == "cpu" else None,
                ),
            )
            manager.start()
            self.batch_managers[batch_key] = manager
        return self.batch_managers[batch_key]

    def _add_to_batch(self, manager, running: dict[str, Request]) -> None:
        """The first waiting request joins a batch."""
        request = self.waiting[0]
        config = request.generation_config
        try:
            _, *processors = request.batch_key
            attributes = [_PER_REQUEST_SETTINGS[processor] for processor in processors]
            own_settings = {attribute: getattr(config, attribute) for attribute in attributes}
            token_ids = request.token_ids
            request.start()
        except BaseException as error:  # such as its streamer's
            self.waiting.popleft()
            request.fail(error)
            return
        name = f"request {next(self.request_numbers)}"
        was_added = manager.add_request(
            token_ids,
            name,
            request.remaining_tokens,
            streaming=True,
            eos_token_id=config.eos_token_id,
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


def _batch_cache_share(device: torch.device) -> float:
    """
    The share of a device's memory for the cache of a manager. In main memory upstream takes it of the whole machine,
    also in a container whose limit is lower.
    """
    if device.type != "cpu":
        return _BATCH_CACHE_SHARE
    cache_bytes = min(_BATCH_CACHE_SHARE * free_memory(device), _MAX_BATCH_CACHE_ON_CPU)
    return cache_bytes / psutil.virtual_memory().total


def _log(event: str, error: BaseException) -> None:
    """Log an error that no request has, even one that cannot be shown."""
    try:
        text = one_line(error)
    except Exception:
        text = ""
    logger.warning(f"{event} ({type(error).__name__}: {text}).")
