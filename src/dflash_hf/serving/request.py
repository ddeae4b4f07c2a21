"""A request: what is asked for, and how its answer grows."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future

import torch
from transformers import GenerationConfig, LogitsProcessor

from dflash_hf.serving.stop_strings import CompletesStop
from dflash_hf.targets.generation import eos_ids, room_for_answer


class Request:
    """
    A streamer of `generate`, for one answer.

    Args:
        decoder (`Decoder`): Who answers.
        inputs (`dict`): Inputs of `generate`, `input_ids` `[1, S]` among them.
        settings (`GenerationConfig`): Changed: `max_new_tokens` is limited by the room in the context, and greedy
            decoding has no settings of sampling.
        streamer (`BaseStreamer`, *optional*): Receives the tokens of the answer.
        stops (`Sequence[str]`, *optional*): Strings that end the answer. Default: the settings', then the target's.
        seed (`int`, *optional*): Of this request's samples.
        processors (`Sequence[LogitsProcessor]`): Called with each token of the answer.
        drafts (`bool`): Whether the drafter may be used.
        scores (`LogProbs`, *optional*): Records the log-probabilities of the prompt's own tokens, too.

    Attributes:
        done (`Future`): Its result is the request itself, its exception what went wrong.
        gone (`threading.Event`): Set when nobody waits for the answer any more.
        tokens (`list[int]`): The answer so far.
        rounds (`int`), drafted (`int`), accepted (`int`): Verifications; tokens that they verified, and kept.
        cached (`int`): Tokens of the prompt that were in the cache of an earlier answer.
        batched (`int`): Tokens that it had when it joined others, to be decoded together; 0 if it has not.

    Raises:
        `ValueError`: the prompt is empty, or leaves no room for an answer.
    """

    def __init__(
        self,
        decoder,
        inputs: dict,
        settings: GenerationConfig,
        streamer=None,
        stops: Sequence[str] | None = None,
        seed: int | None = None,
        processors: Sequence[LogitsProcessor] = (),
        drafts: bool = True,
        scores=None,
    ):
        if not settings.do_sample:  # these mean nothing then, and upstream warns of other values
            settings.temperature = 1.0
            settings.top_p = 1.0
            settings.top_k = 50
            settings.min_p = None
        self.inputs = inputs
        self.settings = settings
        self.streamer = streamer
        self.seed = seed
        self.processors = processors
        self.drafts = drafts
        self.scores = scores
        self.prompt: list[int] = inputs["input_ids"][0].tolist()
        if not self.prompt:
            raise ValueError("The prompt is empty.")
        if settings.max_new_tokens == 0:  # the prompt alone is read
            room_for_answer(decoder.target, len(self.prompt) - 1, 1)
        else:
            settings.max_new_tokens = room_for_answer(decoder.target, len(self.prompt), settings.max_new_tokens)
        stops = stops or settings.stop_strings or decoder.stops or []
        settings.stop_strings = None  # `generate` would search the vocabulary for them
        stops = [stops] if isinstance(stops, str) else stops
        self.stops: Sequence[str] = [text for text in stops if text]  # an empty one would end every answer at once
        self.completes = CompletesStop(decoder.tokenizer.decode, self.stops) if self.stops else None
        self.done: Future = Future()
        self.gone = threading.Event()
        self.done.set_running_or_notify_cancel()  # who stops waiting for it sets `gone`
        self.arrived = time.perf_counter()
        self.begun = 0.0
        self.tokens: list[int] = []
        self.rounds = 0
        self.drafted = 0
        self.accepted = 0
        self.cached = 0
        self.batched = 0
        self.stopped = False
        self._reads_prompt = False
        self._verified = False
        self.kind: tuple | None = None  # what it shares with others of a batch

    @property
    def over(self) -> bool:
        """Whether no more tokens are wanted: at a stop string, or because nobody waits for them."""
        return self.stopped or self.gone.is_set()

    @property
    def ended(self) -> bool:
        """Whether the answer has ended by itself, rather than at its limit."""
        return self.stopped or bool(self.tokens) and self.tokens[-1] in eos_ids(self.settings)

    @property
    def text(self) -> list[int]:
        """Prompt and answer so far."""
        return [*self.prompt, *self.tokens]

    @property
    def left(self) -> int | None:
        """How many tokens may follow; `None` if there is no limit."""
        limit = self.settings.max_new_tokens
        return None if limit is None else limit - len(self.tokens)

    def begin(self) -> None:
        """Decoding begins, or goes on in another way; the streamer is given the prompt first."""
        if not self.begun:
            self.begun = time.perf_counter()
            if self.streamer is not None:
                self.streamer.put(torch.tensor(self.prompt))
        self._reads_prompt = True
        self._verified = False

    def put(self, value: torch.Tensor) -> None:
        """The prompt, then each token."""
        if self._reads_prompt:
            self._reads_prompt = False
            return
        before = len(self.tokens)
        self.take(value.flatten().tolist())
        if self._verified:
            self.accepted += len(self.tokens) - before

    def take(self, tokens: list[int]) -> None:
        """The next tokens of the answer; those after its end are dropped."""
        for token in tokens:
            if self.over:
                return
            self.tokens.append(token)
            for processor in self.processors:
                if hasattr(processor, "take"):
                    processor.take(token)
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            self.stopped = self.completes is not None and self.completes(token)

    def next_round(self, drafted: int) -> None:
        """The following tokens come from a new verification, the last of them from the target itself."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted -= 1  # `put` will count the target's own token, too
        self._verified = True
        if hasattr(self.streamer, "next_round"):
            self.streamer.next_round(drafted)

    def end(self) -> None:
        """A call of `generate` has ended, but not necessarily the answer."""

    def finish(self) -> None:
        """The answer is complete."""
        if self.ended:
            self.settings.max_new_tokens = None  # or upstream says that an answer of this length was cut
        try:
            if self.streamer is not None:
                self.streamer.end()
        except BaseException as error:
            self.fail(error)
        else:
            self._settle(self.done.set_result, self)

    def fail(self, error: BaseException) -> None:
        """The answer ends with an error, which a server can await and show; unless it has ended already."""
        self._settle(self.done.set_exception, _showable(error))

    def _settle(self, settle: Callable, value) -> None:
        """Set the result once. Futures log what their callbacks raise, but not what would end a thread."""
        if not self.done.done():
            with contextlib.suppress(BaseException):
                settle(value)

    def status(self) -> str:
        """Tokens, speed, tau and waiting time until now, as they are logged."""
        begun = self.begun or time.perf_counter()
        seconds = max(time.perf_counter() - begun, 1e-9)
        count = len(self.tokens)
        read = f"{len(self.prompt)} ({self.cached} cached)" if self.cached else len(self.prompt)
        tau = f", tau {(self.accepted + self.rounds) / self.rounds:.2f}" if self.rounds else ""
        together = ", together with others" if self.batched else ""
        return (
            f"{read} + {count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s{tau}, "
            f"after {begun - self.arrived:.2f} s in the queue{together}"
        )


def _showable(error: BaseException) -> Exception:
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
    shown = RuntimeError(f"{type(error).__name__}: {text}")
    shown.__cause__ = error
    return shown
