"""
Between upstream's handlers (`transformers serve`) and the decoder: what a handler asks a manager for becomes a
[`~dflash_hf.serving.request.Request`], and the tokens of its answer become the queue of text that the handler reads.

A handler serves one choice of one HTTP request. It asks [`ChoiceState`] for the manager of its model, once, and gets
the [`ChoiceManager`] of this choice. It calls the manager's `generate_streaming` or `generate_non_streaming`, once,
which submits the request. What the handler then answers is completed by
[`~dflash_hf.serving.answers.AnswerCompleter`].

Everything of upstream's server that is replaced, by what, and why. Nothing of it is replaced in another file.

- `GenerationState`, which makes managers, by [`ChoiceState`]: each choice has a manager of its own.
- `GenerateManager`, which calls `generate`, by [`ChoiceManager`]: the decoder calls it, with the drafter and caches.
- An object of `ModelManager`, which loads models, by the class: of it, handlers only call a static method.
- `BaseHandler._resolve_model`, by [`PairHandler`]: the only model that is served is loaded already.
- `BaseHandler.get_processor_inputs_from_messages`, by [`PairHandler`]: upstream drops parts that a model cannot read.
- `response_template` of the tokenizer, by [`processor_for_calls`]: the forced call of a tool is JSON, not in the form
  that the model was trained to write.
- `DirectStreamer._decode_stream` and `end`, by [`CompleteTextStreamer`]: upstream loses the text that it holds back.
- `DirectStreamer._enqueue`, by [`CompleteTextStreamer`]: upstream passes on the stop string.
- `DirectStreamer.cancel`, by [`CompleteTextStreamer`]: upstream ends `generate` by an error, which would be the error
  of all requests in a batch.
- `max_new_tokens` of an answer that ended by itself, by [`_report_end`]: upstream would say that it was cut.
"""

import asyncio
import copy
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from transformers import GenerationConfig, LogitsProcessor
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    BaseHandler,
    DirectStreamer,
    GenerationState,
    _StreamError,
    response_events_to_chunks,
)

from dflash_hf._io.errors import one_line
from dflash_hf.serving.decoder import Decoder
from dflash_hf.serving.logprobs import LogProbs
from dflash_hf.serving.messages import read_messages
from dflash_hf.serving.options import Options
from dflash_hf.serving.request import Request, RequestStatus
from dflash_hf.serving.stop_strings import StopStringFilter
from dflash_hf.serving.token_bytes import TokenBytes
from dflash_hf.targets.generation import eos_ids


_SEED_RANGE = 2**32  # torch and numpy take seeds below it; OpenAI's have 64 bits
# How upstream parses an answer that is the call of a tool, in the form of [`Options.answer_schema`]. The arguments of
# an answer that was cut are those so far.
_CALL_TEMPLATE = {
    "open_pattern": r'\{\s*"name"\s*:\s*"(?P<name>[^"]*)"\s*,\s*"arguments"\s*:\s*',
    "content": "text",
    "repeats": True,
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}


# ------------------------------------------------------------------------------------------------------------ handlers


class PairHandler(BaseHandler):
    """
    What upstream's handlers have in common here: the pair is loaded, and every part of a message is read or rejected.

    Args:
        manager (`ChoiceManager`): The manager of the choice that is handled.
        name (`str`): The model's id in the API.
        processor (`PreTrainedTokenizerBase` or `ProcessorMixin`): Reads the conversation, and the calls in its answer.
        template (`dict`, *optional*): Arguments of the chat template, for a body without its own.
    """

    def __init__(self, manager: "ChoiceManager", name: str, processor, template: dict | None = None):
        super().__init__(ModelManager, ChoiceState(manager), template)
        self.name = name
        self.target = manager.decoder.target
        self.processor = processor

    def _resolve_model(self, body: dict) -> tuple:
        """The id of the model, the model and its processor."""
        return self.name, self.target, self.processor

    def get_processor_inputs_from_messages(self, messages: list[dict], modality) -> list[dict]:
        """As upstream's, which is a static method; see [`~dflash_hf.serving.messages.read_messages`]."""
        return read_messages(super().get_processor_inputs_from_messages, messages, modality)


class ChatHandler(PairHandler, ChatCompletionHandler):
    """Upstream's handler of `/v1/chat/completions`."""


class TextHandler(PairHandler, CompletionHandler):
    """Upstream's handler of `/v1/completions`."""


class ResponsesHandler(PairHandler, ResponseHandler):
    """Upstream's handler of `/v1/responses`."""


def processor_for_calls(processor, generation_config: GenerationConfig):
    """
    A copy of a processor with which upstream parses answers that are forced to be calls of tools.

    Args:
        processor (`PreTrainedTokenizerBase` or `ProcessorMixin`): The target's.
        generation_config (`GenerationConfig`): The target's, with the tokens that end an answer.
    """
    processor = copy.copy(processor)
    if hasattr(processor, "tokenizer"):
        processor.tokenizer = copy.copy(processor.tokenizer)
    tokenizer = getattr(processor, "tokenizer", processor)
    ends = "|".join(re.escape(tokenizer.decode([end])) for end in eos_ids(generation_config))
    calls = {**_CALL_TEMPLATE, "close_pattern": rf"\s*\}}\s*(?:{ends}|\Z)"}
    tokenizer.response_template = {"start_anchor": "\0", "fields": {"tool_calls": calls}}  # nothing of the prompt
    return processor


# ------------------------------------------------------------------------------------------------ state and manager


class ChoiceState(GenerationState):
    """
    Upstream's state of a server, for the handler of one choice.

    Args:
        manager (`ChoiceManager`): The manager of this choice.
    """

    def __init__(self, manager: "ChoiceManager"):
        super().__init__()  # without upstream's continuous batching, which the decoder uses by itself
        self.manager = manager

    def get_manager(self, model_id: str, use_cb: bool = False) -> "ChoiceManager":
        """The manager of this choice: only one model is served."""
        return self.manager


class ChoiceManager(BaseGenerateManager):
    """
    Upstream's manager of a model, for one choice of one HTTP request: it submits the request to the decoder.

    Args:
        decoder (`Decoder`): The decoder that answers.
        log (`Callable[[str], None]`): Called with a line when the request is finished.
        options (`Options`): What the body asks for.
        processors (`Sequence[LogitsProcessor]`): Logits processors of this choice.
        prompt (`str` or `list[int]`, *optional*): The prompt of a completion; token ids are not encoded again.
        number (`int`): The number of this choice among those for the same prompt; added to the seed.

    Attributes:
        request (`Request`, *optional*): The submitted request; `None` before.
        logprobs (`LogProbs`, *optional*): Records the log-probabilities, if they are asked for.
    """

    def __init__(
        self,
        decoder: Decoder,
        log: Callable[[str], None],
        options: Options,
        processors: Sequence[LogitsProcessor] = (),
        prompt: str | list[int] | None = None,
        number: int = 0,
    ):
        self.decoder = decoder
        self.log = log
        self.options = options
        self.prompt = prompt
        self.number = number
        self.request: Request | None = None
        self.logprobs: LogProbs | None = None
        self.processors = [*processors]
        if options.num_top_logprobs is not None:
            self.logprobs = LogProbs(decoder.token_bytes, options.num_top_logprobs)
            self.processors.append(self.logprobs)

    @property
    def text_prompt(self) -> str:
        """The text that upstream's handler is to encode as the prompt of a completion: none for token ids."""
        return self.prompt if isinstance(self.prompt, str) else ""

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        """As upstream's: the queue of the answer's text, and the streamer that fills it."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue = asyncio.Queue()
        streamer = CompleteTextStreamer(self.decoder.token_bytes, loop, events, response_parser)

        def pass_on_error(done: Future) -> None:
            error = done.exception()
            if error is not None:
                escaped_message = json.dumps(one_line(error))[1:-1]  # upstream puts it between quotes
                loop.call_soon_threadsafe(events.put_nowait, _StreamError(escaped_message))

        request = self._submit(inputs, gen_config, request_id, streamer)
        request.future.add_done_callback(pass_on_error)
        return events, streamer

    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        """As upstream's, but a cancelled call aborts its request. Raises the error with which the request fails."""
        request = self._submit(inputs, gen_config, request_id)
        try:
            await asyncio.wrap_future(request.future)
        except asyncio.CancelledError:
            request.abort()
            raise
        _report_end(request)
        text = self.decoder.token_bytes.complete_text(request.tokens)
        return text, len(request.prompt), request.tokens

    def stop(self) -> None:
        """The decoder outlives the choice: there is nothing to stop."""

    def abort(self) -> None:
        """Abort the request, if it is submitted: the client is gone, or another choice has failed."""
        if self.request is not None:
            self.request.abort()

    def _submit(self, inputs, generation_config: GenerationConfig, name: str, streamer=None) -> Request:
        """Submit the request, with what the handler has read from the body and what the options add."""
        options = self.options
        target = self.decoder.target
        if isinstance(self.prompt, list):
            ids = torch.tensor([self.prompt], device=target.device)
            inputs.update({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        prompt_length = inputs["input_ids"].shape[-1]
        complete_generation_config(generation_config, options, target.generation_config, prompt_length)
        request = Request(
            self.decoder,
            inputs,
            generation_config,
            streamer,
            stop_strings=options.stop_strings,
            seed=None if options.seed is None else (options.seed + self.number) % _SEED_RANGE,
            processors=self.processors,
            prompt_scores=self.logprobs if options.echo else None,
        )
        if streamer is not None:
            streamer.attach(request)

        def log_summary(done: Future) -> None:
            error = done.exception()
            ending = ""
            if error is not None:
                ending = f"; failed: {one_line(error)}"
            elif request.status is RequestStatus.FINISHED_ABORTED:
                ending = "; the client disconnected"
            self.log(f"{name[:8]}: {request.summary()}{ending}")

        request.future.add_done_callback(log_summary)
        self.request = self.decoder.submit(request)
        return request


def _report_end(request: Request) -> None:
    """
    Have upstream's handler say why a finished answer ended: it compares the number of tokens with `max_new_tokens` of
    its configuration, which is the request's, and takes an answer of this length for a cut one, even if it ended there
    by itself.
    """
    if request.status is RequestStatus.FINISHED_STOPPED:
        request.generation_config.max_new_tokens = None


def complete_generation_config(
    config: GenerationConfig, options: Options, defaults: GenerationConfig, prompt_length: int
) -> None:
    """
    Complete, in place, the generation configuration that upstream's handler has read from a body. The options come
    last, and win.

    Args:
        config (`GenerationConfig`): Upstream's; fields that the body does not set are `None`.
        options (`Options`): The fields of the body that upstream ignores or misreads.
        defaults (`GenerationConfig`): The target's.
        prompt_length (`int`): Tokens of the prompt.

    Raises:
        `ValueError`: `max_length` leaves no room for an answer.
    """
    # 1. The answer's limit: `max_length` also counts the prompt.
    if config.max_new_tokens is None and config.max_length is not None:
        if config.max_length <= prompt_length:
            raise ValueError(
                f"generation_config has max_length={config.max_length}, which includes the "
                f"prompt's {prompt_length} tokens and leaves no room for an answer; set max_new_tokens instead."
            )
        config.max_new_tokens = config.max_length - prompt_length
    # 2. What a body's `generation_config` leaves out. Not `update`, which warns of settings that do not matter here.
    for name, value in vars(defaults).items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    # 3. The options. Upstream ignores a temperature if the target's own configuration is greedy.
    if options.temperature is not None:
        config.do_sample = options.temperature > 0
    config.do_sample = bool(config.do_sample)
    if options.logit_bias:
        config.sequence_bias = {(token,): bias for token, bias in options.logit_bias.items()}
    if options.top_k is not None:
        config.top_k = max(options.top_k, 0)  # vLLM's -1 means no limit, as 0 does
    if options.min_p is not None:
        config.min_p = options.min_p
    penalty = options.repetition_penalty or options.repeat_penalty
    if penalty is not None:
        config.repetition_penalty = penalty


# ------------------------------------------------------------------------------------------------------------ streamer


class CompleteTextStreamer(DirectStreamer):
    """
    Upstream's streamer, with the end of the text. Upstream's holds back an incomplete character, and loses it where
    the answer ends. Here the rest is passed on, without a character that was cut: the streamed text is the same as the
    text of an answer that is not streamed.

    Args:
        token_bytes (`TokenBytes`): The bytes of the target's tokens.
        loop, events: As upstream's.
        parser (`ResponseParser`, *optional*): Upstream's.
    """

    def __init__(self, token_bytes: TokenBytes, loop: asyncio.AbstractEventLoop, events: asyncio.Queue, parser=None):
        super().__init__(token_bytes.tokenizer._tokenizer, loop, events, response_parser=parser)
        self.token_bytes = token_bytes
        self._decode_stream = _RecordingDecodeStream(self._decode_stream)  # upstream's `put` calls its `step`
        self.request: Request | None = None

    def attach(self, request: Request) -> None:
        """Stream the answer to this request: no text is passed on from its first stop string on."""
        self.request = request
        if request.stop_strings:
            self._enqueue = StopStringFilter(self._enqueue, request.stop_strings)

    def cancel(self) -> None:
        """Abort the request: the client is gone."""
        self.request.abort()

    def end(self) -> None:
        """Pass on the rest of the text, and the end."""
        _report_end(self.request)
        stream = self._decode_stream
        whole_text = self.token_bytes.complete_text(stream.tokens, skip_special=self._parser is None)
        rest = whole_text[stream.num_characters :]
        if rest and self._parser is None:
            self._enqueue(rest)
        elif rest:
            for item in response_events_to_chunks(self._parser.feed(rest)):
                self._enqueue(item)
        super().end()


class _RecordingDecodeStream:
    """
    A `DecodeStream` of tokenizers that records what passes through it.

    Attributes:
        tokens (`list[int]`): The tokens that it was given.
        num_characters (`int`): Characters of the text that it has returned.
    """

    def __init__(self, decode_stream):
        self._decode_stream = decode_stream
        self.tokens: list[int] = []
        self.num_characters = 0

    def step(self, tokenizer, token: int) -> str | None:
        """The text that the next token completes; `None` if there is none yet."""
        text = self._decode_stream.step(tokenizer, token)
        self.tokens.append(token)
        self.num_characters += len(text or "")
        return text
