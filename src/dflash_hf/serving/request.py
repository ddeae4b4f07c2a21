"""A request: what is asked for, and how its answer grows."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from dflash_hf.configs import positions_of
from dflash_hf.serving.stop_strings import CompletesStop, UpToStop


class Request:
    """
    Args:
        decoder (`Decoder`): Who answers.
        inputs (`dict`): Inputs of `generate`, `input_ids` `[1, S]` among them.
        settings (`GenerationConfig`): Changed: `max_new_tokens` is limited by the room in the context.
        streamer (`BaseStreamer`, *optional*): Receives the tokens of the answer.
        stops (`Sequence[str]`, *optional*): Strings that end the answer. Default: the settings', then the target's.
        seed (`int`, *optional*): Of this request's samples.
        processors (`Sequence[LogitsProcessor]`): Called with each token of the answer.
        drafts (`bool`): Whether the drafter may be used.

    Attributes:
        done (`Future`): Its result is the request itself, its exception what went wrong.
        tokens (`list[int]`): The answer so far.
        rounds (`int`), drafted (`int`), accepted (`int`): Verifications; tokens that they verified, and kept.
        cached (`int`): Tokens of the prompt that were in the cache of an earlier answer.
        batched (`bool`): Whether it was decoded together with others.
        ended (`bool`): Whether the answer has ended by itself, rather than at its limit.

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
    ):
        self.inputs, self.settings, self.streamer = inputs, settings, streamer
        self.seed, self.processors, self.drafts = seed, processors, drafts
        self.prompt: list[int] = inputs["input_ids"][0].tolist()
        if not self.prompt:
            raise ValueError("The prompt is empty.")
        settings.max_new_tokens = room_for_answer(decoder.target, len(self.prompt), settings.max_new_tokens)
        stops, settings.stop_strings = stops or settings.stop_strings or decoder.stops or [], None
        self.stops: Sequence[str] = [stops] if isinstance(stops, str) else stops
        self.completes = CompletesStop(decoder.tokenizer.decode, self.stops) if self.stops else None
        if self.stops and hasattr(streamer, "_enqueue"):  # upstream's: its text ends before the stop string
            streamer._enqueue = UpToStop(streamer._enqueue, self.stops)
        ends = settings.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])
        self.done, self.gone = Future(), threading.Event()
        self.done.set_running_or_notify_cancel()  # who stops waiting for it sets `gone`
        self.arrived, self.begun, self.finished = time.perf_counter(), None, None
        self.tokens: list[int] = []
        self.rounds = self.drafted = self.accepted = self.cached = 0
        self.batched = self.stopped = self._reads_prompt = False
        self.kind: tuple | None = None  # what it shares with others of a batch

    @property
    def over(self) -> bool:
        """Whether no more tokens are wanted: at a stop string, or because nobody waits for them."""
        return self.stopped or self.gone.is_set()

    @property
    def ended(self) -> bool:
        return self.stopped or bool(self.tokens) and self.tokens[-1] in self.ends

    # A streamer of `generate`.

    def begin(self) -> None:
        """Decoding begins; streamers are given the prompt first."""
        if self.begun is None:
            self.begun = time.perf_counter()
            if self.streamer is not None:
                self.streamer.put(torch.tensor(self.prompt))
        self._reads_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """The prompt, then each token."""
        if self._reads_prompt:
            self._reads_prompt = False
            return
        for token in value.flatten().tolist():
            if not self.over:
                self.take(token)

    def take(self, token: int) -> None:
        """The next token of the answer."""
        self.tokens.append(token)
        self.accepted += self.rounds > 0
        for processor in self.processors:
            if hasattr(processor, "take"):
                processor.take(token)
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token]))
        self.stopped = self.completes is not None and self.completes(token)

    def next_round(self, drafted: int) -> None:
        """The following tokens come from a new verification, the last of them from the target itself."""
        self.rounds, self.drafted, self.accepted = self.rounds + 1, self.drafted + drafted, self.accepted - 1
        if hasattr(self.streamer, "next_round"):
            self.streamer.next_round(drafted)

    def end(self) -> None:
        """A call of `generate` has ended, but not necessarily the answer."""

    # The end.

    def finish(self) -> None:
        """The answer is complete."""
        self.finished = time.perf_counter()
        if self.ended:
            self.settings.max_new_tokens = None  # or upstream says that an answer of this length was cut
        if self.streamer is not None:
            self.streamer.end()
        self.done.set_result(self)

    def fail(self, error: BaseException) -> None:
        """There is no answer."""
        self.finished = time.perf_counter()
        self.done.set_exception(error)

    def status(self) -> str:
        """Tokens, speed, tau and waiting time, as they are logged."""
        now = self.finished or time.perf_counter()
        begun = self.begun or now
        seconds, count = max(now - begun, 1e-9), len(self.tokens)
        read = f"{len(self.prompt)} ({self.cached} cached)" if self.cached else len(self.prompt)
        tau = f", tau {(self.accepted + self.rounds) / self.rounds:.2f}" if self.rounds else ""
        waited, together = begun - self.arrived, ", together with others" if self.batched else ""
        return (
            f"{read} + {count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s{tau}, "
            f"after {waited:.2f} s in the queue{together}"
        )


class Over(StoppingCriteria):
    """Ends `generate` when a request is over."""

    def __init__(self, request: Request):
        self.request = request

    def __call__(self, input_ids: torch.LongTensor, scores, **kwargs) -> torch.BoolTensor:
        return torch.full((len(input_ids),), self.request.over, device=input_ids.device)


def room_for_answer(target, prompt: int, wanted: int | None) -> int | None:
    """
    Maximum number of tokens of an answer.

    Args:
        target (`PreTrainedModel`): The target.
        prompt (`int`): Tokens of the prompt.
        wanted (`int`, *optional*): Maximum number of new tokens.

    Raises:
        `ValueError`: there is no room for an answer, or `wanted` is less than 1.
    """
    if wanted is not None and wanted < 1:
        raise ValueError(f"max_new_tokens={wanted} must be at least 1.")
    limit = positions_of(target.config.get_text_config(decoder=True).to_dict())
    if limit is None:
        return wanted
    if prompt >= limit:
        raise ValueError(f"The prompt has {prompt} tokens; prompt and answer together may have at most {limit}.")
    return min(wanted or limit, limit - prompt)
