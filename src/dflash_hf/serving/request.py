"""A request to the decoder, and the answer to it so far."""

import contextlib
import enum
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future

import torch
from transformers import GenerationConfig, LogitsProcessor

from dflash_hf.serving.stop_strings import StopStringMatcher
from dflash_hf.targets.generation import eos_ids, max_answer_tokens


class RequestStatus(enum.Enum):
    """
    The state of a request. It changes only as follows, each time by the method in the second column:

        WAITING -> RUNNING             start    the decoder decodes it, on its own or in a batch
        RUNNING -> WAITING             pause    it leaves in the middle, for a batch or after a batch that failed
        RUNNING -> FINISHED_STOPPED    finish   its answer ended at a stop string or an end-of-sequence token
        RUNNING -> FINISHED_LENGTH     finish   its answer was cut, at `max_new_tokens` or `max_time`
        WAITING or RUNNING -> FINISHED_ABORTED  finish   `abort` was called, and the decoder has noticed
        WAITING or RUNNING -> FINISHED_ERROR    fail     something failed

    What is finished stays so. The [`~dflash_hf.serving.decoder.Decoder`] calls these methods in its own thread, except
    that `submit` calls `fail` once this thread has ended. `abort` changes nothing itself: it may be called from any
    thread, and the decoder finishes the request at the next token. `generate` calls `put`, `next_round`, `end_round`
    and `end`, as of any streamer.
    """

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED_STOPPED = "stopped"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "aborted"
    FINISHED_ERROR = "error"


class Request:
    """
    A request for one answer. It is the streamer that `generate` is given.

    Args:
        decoder (`Decoder`): The decoder that will answer.
        inputs (`dict`): Inputs of `generate`, `input_ids` `[1, S]` among them.
        generation_config (`GenerationConfig`): Belongs to the request, and is changed in place: `max_new_tokens` is
            limited by the room in the context, greedy decoding has no sampling parameters, and stop strings are in
            `stop_strings`.
        streamer (`BaseStreamer`, *optional*): Receives the tokens of the answer.
        stop_strings (`Sequence[str]`, *optional*): Strings that end the answer. Default: the stop
            strings of `generation_config`, then of the target.
        seed (`int`, *optional*): Seed of this request's samples.
        processors (`Sequence[LogitsProcessor]`): Logits processors. Those with a method `on_token` are called with
            each token of the answer.
        use_drafter (`bool`): Whether the drafter may be used.
        prompt_scores (`LogProbs`, *optional*): Also records the log-probabilities of the prompt's own tokens.

    Attributes:
        status (`RequestStatus`): Its state.
        future (`Future`): Done when it is finished. Its result is the request itself, its exception what failed.
        prompt (`list[int]`): Token ids of the prompt.
        tokens (`list[int]`): Token ids of the answer so far.
        rounds (`int`): Number of verifications.
        committed (`int`): Number of tokens of the answer that come from verifications.
        drafted (`int`): Number of drafted tokens that were verified.
        accepted (`int`): How many of the drafted tokens are in the answer.
        cached_tokens (`int`): Tokens of the prompt that were in the cache of an earlier answer.
        tokens_before_batch (`int`): Tokens of prompt and answer when it joined a batch; 0 if it has not.
        batch_key (`tuple`, *optional*): See `Decoder.batch_key_of`; set by `Decoder.submit`. `None`: not batched.

    Raises:
        `ValueError`: the prompt is empty, or leaves no room for an answer.
    """

    def __init__(
        self,
        decoder,
        inputs: dict,
        generation_config: GenerationConfig,
        streamer=None,
        stop_strings: Sequence[str] | None = None,
        seed: int | None = None,
        processors: Sequence[LogitsProcessor] = (),
        use_drafter: bool = True,
        prompt_scores=None,
    ):
        if not generation_config.do_sample:  # these mean nothing then, and upstream warns of other values
            generation_config.temperature = 1.0
            generation_config.top_p = 1.0
            generation_config.top_k = 50
            generation_config.min_p = None
        self.inputs = inputs
        self.generation_config = generation_config
        self.streamer = streamer
        self.seed = seed
        self.processors = processors
        self.use_drafter = use_drafter
        self.prompt_scores = prompt_scores
        self.prompt: list[int] = inputs["input_ids"][0].tolist()
        if not self.prompt:
            raise ValueError("The prompt is empty.")
        if generation_config.max_new_tokens == 0:  # only the prompt is read
            max_answer_tokens(decoder.target, len(self.prompt) - 1, 1)
        else:
            generation_config.max_new_tokens = max_answer_tokens(
                decoder.target, len(self.prompt), generation_config.max_new_tokens
            )
        strings = stop_strings or generation_config.stop_strings or decoder.stop_strings or []
        generation_config.stop_strings = None  # `generate` would search the vocabulary for them
        strings = [strings] if isinstance(strings, str) else strings
        # An empty one would end every answer at once.
        self.stop_strings: Sequence[str] = [string for string in strings if string]
        self._matcher = StopStringMatcher(decoder.tokenizer.decode, self.stop_strings) if self.stop_strings else None
        self.status = RequestStatus.WAITING
        self.future: Future = Future()
        self.future.set_running_or_notify_cancel()  # so that nobody can cancel it: `abort` is for that
        self.arrival_time = time.perf_counter()
        self.start_time: float | None = None
        self.tokens: list[int] = []
        self.rounds = 0
        self.committed = 0
        self.drafted = 0
        self.accepted = 0
        self.cached_tokens = 0
        self.tokens_before_batch = 0
        self.batch_key: tuple | None = None
        self._abort_requested = threading.Event()
        self._has_stop_string = False
        self._prompt_is_next = False  # `generate` puts the prompt first
        self._tokens_before_round = 0  # tokens of the answer when the current verification began

    def abort(self) -> None:
        """End the answer at the next token: nobody waits for it any more. May be called from any thread."""
        self._abort_requested.set()

    @property
    def wants_tokens(self) -> bool:
        """Whether more tokens may follow: not after a stop string, and not once it is to be aborted."""
        return not self._has_stop_string and not self._abort_requested.is_set()

    @property
    def at_end(self) -> bool:
        """Whether the answer so far ends at a stop string or an end-of-sequence token."""
        return self._has_stop_string or bool(self.tokens) and self.tokens[-1] in eos_ids(self.generation_config)

    @property
    def is_finished(self) -> bool:
        """Whether nothing can change any more."""
        return self.status not in (RequestStatus.WAITING, RequestStatus.RUNNING)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and answer so far."""
        return [*self.prompt, *self.tokens]

    @property
    def remaining_tokens(self) -> int | None:
        """How many tokens may follow; `None` if there is no limit."""
        limit = self.generation_config.max_new_tokens
        return None if limit is None else limit - len(self.tokens)

    def start(self) -> None:
        """Start decoding, or continue it, alone or in a batch. The streamer is given the prompt, once."""
        self.status = RequestStatus.RUNNING
        if self.start_time is None:
            self.start_time = time.perf_counter()
            if self.streamer is not None:
                self.streamer.put(torch.tensor(self.prompt))
        self._prompt_is_next = True

    def pause(self) -> None:
        """Wait to be continued, alone or in a batch, after the tokens so far; unless it is finished already."""
        if not self.is_finished:
            self.status = RequestStatus.WAITING

    def put(self, value: torch.Tensor) -> None:
        """The prompt, then each token; as a streamer of `generate`."""
        if self._prompt_is_next:
            self._prompt_is_next = False
            return
        self.append(value.flatten().tolist())

    def append(self, tokens: list[int]) -> None:
        """Add the next tokens of the answer; those after its end are dropped."""
        for token in tokens:
            if not self.wants_tokens:
                return
            self.tokens.append(token)
            for processor in self.processors:
                if hasattr(processor, "on_token"):
                    processor.on_token(token)
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            self._has_stop_string = self._matcher is not None and self._matcher.completes(token)

    def next_round(self, num_drafted: int) -> None:
        """The following tokens come from a new verification, of `num_drafted` drafted tokens."""
        self.rounds += 1
        self.drafted += num_drafted
        self._tokens_before_round = len(self.tokens)
        if hasattr(self.streamer, "next_round"):
            self.streamer.next_round(num_drafted)

    def end_round(self, num_accepted: int) -> None:
        """The verification is over; `num_accepted` of its tokens were drafted."""
        committed = len(self.tokens) - self._tokens_before_round
        self.committed += committed
        self.accepted += min(num_accepted, committed)  # a token after the end of the answer was dropped

    def end(self) -> None:
        """As a streamer: a call of `generate` has ended, but perhaps not the answer. See [`finish`]."""

    def finish(self) -> None:
        """Finish with the answer so far. If the streamer raises, the request fails."""
        if self.is_finished:
            return
        status = RequestStatus.FINISHED_LENGTH
        if self._abort_requested.is_set():
            status = RequestStatus.FINISHED_ABORTED
        elif self.at_end:
            status = RequestStatus.FINISHED_STOPPED
        try:
            self.status = status  # before the streamer ends: it may pass on how the answer ended
            if self.streamer is not None:
                self.streamer.end()
        except BaseException as error:
            self._finish_with_error(error)
            return
        with contextlib.suppress(BaseException):  # a future does not log a `SystemExit` of a callback
            self.future.set_result(self)

    def fail(self, error: BaseException) -> None:
        """Finish with an error, which a server can await and show; unless it is finished already."""
        if not self.is_finished:
            self._finish_with_error(error)

    def _finish_with_error(self, error: BaseException) -> None:
        self.status = RequestStatus.FINISHED_ERROR
        with contextlib.suppress(BaseException):  # as above
            self.future.set_exception(_raisable(error))

    def summary(self) -> str:
        """Tokens, speed, tau and waiting time until now, for the log."""
        now = time.perf_counter()
        start_time = now if self.start_time is None else self.start_time
        seconds = max(now - start_time, 1e-9)
        count = len(self.tokens)
        prompt = str(len(self.prompt))
        if self.cached_tokens:
            prompt += f" ({self.cached_tokens} cached)"
        tau = f", tau {self.committed / self.rounds:.2f}" if self.rounds else ""
        together = ", together with others" if self.tokens_before_batch else ""
        return (
            f"{prompt} + {count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s{tau}, "
            f"after {start_time - self.arrival_time:.2f} s in the queue{together}"
        )


def _raisable(error: BaseException) -> Exception:
    """
    An error that can be raised where somebody waits for the answer: `SystemExit` and its like would end the server's
    loop, a `StopIteration` cannot be set in a future of asyncio, and some errors have no text.
    """
    try:
        text = str(error)
    except BaseException:
        text = "its text cannot be read"
    else:
        if isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError):
            return error
    raisable = RuntimeError(f"{type(error).__name__}: {text}")
    raisable.__cause__ = error
    return raisable
