"""
An OpenAI-compatible server whose model decodes with a drafter, on the handlers of `transformers serve`.

What upstream does is read a body into the model's inputs and write its answer. Added here: the drafter and the caches
of conversations (see [`Decoder`]), options that upstream ignores (see [`Options`]), a log line for each request,
cancellation when the client disconnects, and the context limit.
"""

import asyncio
import copy
import functools
import hmac
import json
import re
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError, StarletteHTTPException
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import DirectStreamer, _StreamError, response_events_to_chunks

from dflash_hf._io.errors import one_line
from dflash_hf.serving.choices import merge_answers, merge_streams
from dflash_hf.serving.decoder import Decoder, DecoderEnded
from dflash_hf.serving.grammars import GrammarCompiler
from dflash_hf.serving.logprobs import LogProbs
from dflash_hf.serving.messages import (
    check_items,
    check_length,
    check_strings,
    read_messages,
    template_arguments_of,
)
from dflash_hf.serving.options import Options
from dflash_hf.serving.request import Request, RequestStatus
from dflash_hf.serving.stop_strings import StopStringFilter, text_before_stop
from dflash_hf.serving.token_bytes import TokenBytes
from dflash_hf.targets.generation import context_length_of, eos_ids


_COMPLETED_EVENTS = ('"usage":', 'data: {"error":')  # in those events of upstream's streams that are completed here
_HANDLERS = {"chat/completions": ChatCompletionHandler, "completions": CompletionHandler, "responses": ResponseHandler}
_PATHS = {handler: path for path, handler in _HANDLERS.items()}
_INPUT_FIELDS = {ChatCompletionHandler: "messages", CompletionHandler: "prompt", ResponseHandler: "input"}
# How upstream parses an answer that is the call of a tool, with the schema of `answer_schema`; one that was cut keeps
# what there is.
_CALL_TEMPLATE = {
    "open_pattern": r'\{\s*"name"\s*:\s*"(?P<name>[^"]*)"\s*,\s*"arguments"\s*:\s*',
    "content": "text",
    "repeats": True,
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}


class Exchange:
    """
    One choice of one HTTP request. Upstream's handler takes it for the state of its server and for the manager of its
    model, so it is called in this order: `use_continuous_batching` and `get_manager`; then `generate_streaming` or
    `generate_non_streaming`, which submit a request to the decoder. Afterwards [`Server`] calls `complete_stream` or
    `complete_answer` with the handler's answer.

    Args:
        decoder (`Decoder`): The decoder that answers.
        log (`Callable[[str], None]`): Called with a line when the request is finished.
        options (`Options`): What is asked for.
        processors (`list[LogitsProcessor]`): Logits processors of this answer.
        prompt (`str` or `list[int]`, *optional*): The prompt of a completion; token ids are not encoded again.
        number (`int`): The number of this answer among those to the same prompt.

    Attributes:
        request (`Request`, *optional*): The submitted request; `None` before.
    """

    _compile = False

    def __init__(
        self,
        decoder: Decoder,
        log: Callable[[str], None],
        options: Options,
        processors=(),
        prompt: str | list[int] | None = None,
        number: int = 0,
    ):
        self.decoder = decoder
        self.log = log
        self.options = options
        self.number = number
        self.prompt = prompt if isinstance(prompt, str) else None
        self.ids = prompt if isinstance(prompt, list) else None
        self.echo = ""  # what comes before the answer
        if options.echo and prompt is not None:
            self.echo = decoder.tokenizer.decode(prompt) if isinstance(prompt, list) else prompt
        self.request: Request | None = None
        self.logprobs: LogProbs | None = None
        if options.num_top_logprobs is not None:
            self.logprobs = LogProbs(decoder.token_bytes, options.num_top_logprobs)
        self.processors = [*processors]
        if self.logprobs is not None:
            self.processors.append(self.logprobs)

    @property
    def text_prompt(self) -> str:
        """The text that upstream reads of a completion's prompt: none if it is token ids."""
        return self.prompt or ""

    # As the state of a handler.

    def use_continuous_batching(self, model, modality) -> bool:
        """Upstream's is not used, but see [`Decoder`]."""
        return False

    def get_manager(self, model_id: str, use_cb: bool = False) -> "Exchange":
        """Upstream has a manager for each model; here it is this object."""
        return self

    # As the manager of its model.

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        """As upstream's; the streamer's `cancel` aborts the request."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue = asyncio.Queue()
        streamer = CompleteTextStreamer(self.decoder.token_bytes, loop, events, response_parser)

        def failed(done: Future) -> None:
            error = done.exception()
            if error is not None:  # upstream puts its text between quotes
                event = _StreamError(json.dumps(one_line(error))[1:-1])
                loop.call_soon_threadsafe(events.put_nowait, event)

        request = self._submit(inputs, gen_config, request_id, streamer)
        streamer.cancel = request.abort
        request.future.add_done_callback(failed)
        return events, streamer

    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        """As upstream's, but a cancelled request is aborted."""
        request = self._submit(inputs, gen_config, request_id)
        try:
            await asyncio.wrap_future(request.future)
        except asyncio.CancelledError:
            request.abort()
            raise
        except (ValueError, DecoderEnded):  # caused by the request, or by none
            raise
        except Exception as error:
            raise HTTPException(500, one_line(f"{type(error).__name__}: {error}")) from error
        text = self.decoder.token_bytes.complete_text(request.tokens)
        return text, len(request.prompt), request.tokens

    def _submit(self, inputs, settings, name: str, streamer=None) -> Request:
        """Submit a request with the settings of the body, and those of the target where the body has none."""
        options = self.options
        if self.ids is not None:
            ids = torch.tensor([self.ids], device=self.decoder.target.device)
            inputs.update({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        if settings.max_new_tokens is None and settings.max_length is not None:
            prompt_length = inputs["input_ids"].shape[-1]
            if settings.max_length <= prompt_length:
                raise ValueError(
                    f"generation_config has max_length={settings.max_length}, which counts the prompt's "
                    f"{prompt_length} tokens, too, and leaves no room for an answer; set max_new_tokens instead."
                )
            settings.max_new_tokens = settings.max_length - prompt_length
        # What a body's `generation_config` leaves out. Not `update`, which warns of settings that do not matter here.
        for key, value in vars(self.decoder.target.generation_config).items():
            if getattr(settings, key, None) is None:
                setattr(settings, key, value)
        if options.logit_bias:
            settings.sequence_bias = {(token,): bias for token, bias in options.logit_bias.items()}
        # Upstream ignores a temperature if the model's own settings are greedy.
        settings.do_sample = bool(options.temperature if options.temperature is not None else settings.do_sample)
        if options.top_k is not None:
            settings.top_k = max(options.top_k, 0)  # vLLM's -1 is none, too
        if options.min_p is not None:
            settings.min_p = options.min_p
        penalty = options.repetition_penalty or options.repeat_penalty
        if penalty is not None:
            settings.repetition_penalty = penalty
        # numpy's limit; OpenAI's have 64 bits
        seed = None if options.seed is None else (options.seed + self.number) % 2**32
        request = Request(
            self.decoder,
            inputs,
            settings,
            streamer,
            stop_strings=options.stop_strings,
            seed=seed,
            processors=self.processors,
            prompt_scores=self.logprobs if options.echo else None,
        )
        if streamer is not None and request.stop_strings:
            streamer._enqueue = StopStringFilter(streamer._enqueue, request.stop_strings)

        def finished(done: Future) -> None:
            error = done.exception()
            ending = ""
            if error is not None:
                ending = f"; failed: {one_line(error)}"
            elif request.status is RequestStatus.FINISHED_ABORTED:
                ending = "; the client disconnected"
            self.log(f"{name[:8]}: {request.summary()}{ending}")

        request.future.add_done_callback(finished)
        self.request = self.decoder.submit(request)
        return request

    # Its answer.

    def _add_details(self, answer: dict) -> dict:
        """Add log-probabilities, usage and whether it was cut to an answer of upstream, or a piece of its stream."""
        request = self.request
        response = answer.get("response", answer)
        choice = response.get("choices", [{}])[0]
        if self.logprobs is not None:
            content = self.logprobs.pop_entries(is_chat="text" not in choice)
            if content:
                choice["logprobs"] = content
        usage = response.get("usage")
        if not usage:
            return answer
        read, written = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
        usage[f"{read}_tokens_details"] = {"cached_tokens": request.cached_tokens}
        usage[f"{written}_tokens_details"] = {
            "accepted_prediction_tokens": request.accepted,
            "rejected_prediction_tokens": request.drafted - request.accepted,
            **({"reasoning_tokens": 0} if written == "output" else {}),
        }
        is_cut = request.status is not RequestStatus.FINISHED_STOPPED
        if is_cut and choice and self.options.forces_call:
            choice["finish_reason"] = "length"
        elif is_cut and "output" in response:
            response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            if response is not answer:  # a piece of a stream
                answer["type"] = "response.incomplete"
        return answer

    def complete_answer(self, answer: dict) -> dict:
        """An answer that is not streamed, with all details and without the stop string."""
        answer = self._add_details(answer)
        choice = answer.get("choices", [{}])[0]
        holders_and_fields = [(choice, "text"), (choice.get("message", {}), "content")]
        for item in answer.get("output", []):
            holders_and_fields += [(part, "text") for part in item.get("content", [])]
        for holder, field in holders_and_fields:
            if field in holder:
                holder[field] = text_before_stop(holder[field] or "", self.request.stop_strings)
        if self.echo:
            choice["text"] = self.echo + choice["text"]
        return answer

    async def complete_stream(self, events: AsyncIterator[str], is_responses: bool) -> AsyncIterator[str]:
        """Upstream's stream, completed, with errors and the end as OpenAI's clients expect them."""
        async for text in events:
            if self.logprobs is None and not self.echo and not any(word in text for word in _COMPLETED_EVENTS):
                yield text
                continue
            for event in text.removesuffix("\n\n").split("\n\n"):
                for piece in self._complete_piece(json.loads(event.removeprefix("data: "))):
                    yield f"data: {json.dumps(piece)}\n\n"
        if not is_responses:
            yield "data: [DONE]\n\n"

    def _complete_piece(self, piece: dict) -> list[dict]:
        """A piece of a stream, completed. If asked for, the usage is a piece of its own."""
        if isinstance(piece.get("error"), str):
            return [{"error": {"message": piece["error"], "type": "server_error"}}]
        answer = self._add_details(piece)
        if self.echo:  # before the first piece
            answer["choices"][0]["text"] = self.echo + answer["choices"][0]["text"]
            self.echo = ""
        if "usage" in answer and (self.options.stream_options or {}).get("include_usage"):
            return [{**answer, "usage": None}, {**answer, "choices": []}]
        return [answer]


class CompleteTextStreamer(DirectStreamer):
    """
    Upstream's streamer, with the end of the text. Upstream's keeps back text that may go on, and loses it where the
    answer ends. Here it is passed on, without a character that was cut: the same text as that of an answer that is not
    streamed.

    Args:
        token_bytes (`TokenBytes`): The bytes of the target's tokens.
        loop, events: As upstream's.
        parser (`ResponseParser`, *optional*): Upstream's.
    """

    def __init__(self, token_bytes: TokenBytes, loop: asyncio.AbstractEventLoop, events: asyncio.Queue, parser=None):
        super().__init__(token_bytes.tokenizer._tokenizer, loop, events, response_parser=parser)
        self.token_bytes = token_bytes
        self.tokens: list[int] = []
        self.passed_characters = 0
        self._upstream_decode_stream = self._decode_stream
        self._decode_stream = self

    def step(self, tokenizer, token: int) -> str | None:
        """As that of the `DecodeStream` whose place this object takes."""
        text = self._upstream_decode_stream.step(tokenizer, token)
        self.tokens.append(token)
        self.passed_characters += len(text or "")
        return text

    def end(self) -> None:
        """Pass on the rest of the text, and the end."""
        rest = self.token_bytes.complete_text(self.tokens, skip_special=self._parser is None)[self.passed_characters :]
        if rest and self._parser is None:
            self._enqueue(rest)
        elif rest:
            for item in response_events_to_chunks(self._parser.feed(rest)):
                self._enqueue(item)
        super().end()


class Server:
    """
    A model and its drafter behind OpenAI's API.

    Args:
        target (`PreTrainedModel`): The only model that is served.
        processor (`PreTrainedTokenizerBase` or `ProcessorMixin`): Its tokenizer, or what else reads conversations.
        draft (`DFlashDraftModel`, *optional*): Its drafter. Default: the target decodes alone.
        name (`str`): The model's id in the API.
        log (`Callable[[str], None]`): Called with a line when the server is ready, and for each finished request.
        template (`dict`, *optional*): Arguments of the chat template, for requests without their own.

    Raises:
        `ValueError`: target and drafter do not belong together.
    """

    def __init__(self, target, processor, draft, name: str, log: Callable[[str], None], template: dict | None = None):
        tokenizer = getattr(processor, "tokenizer", processor)
        self.target = target
        self.processor = processor
        self.name = name
        self.log = log
        self.template = template
        self.decoder = Decoder(target, tokenizer, draft)
        self.grammars = GrammarCompiler(target, tokenizer)
        self.calls_processor = _processor_for_calls(processor, target.generation_config)
        # A few tokens, so that errors appear before the first request.
        settings = copy.deepcopy(target.generation_config)
        settings.update(max_new_tokens=4, do_sample=False)
        inputs = {"input_ids": torch.tensor([[0, 1]], device=target.device)}
        self.decoder.submit(Request(self.decoder, inputs, settings)).future.result()

    def run(self, listener: socket.socket, app, log_level: str = "warning") -> None:
        """Serve an application until SIGTERM or Ctrl-C; open requests are finished first. See [`listen`]."""
        server = uvicorn.Server(uvicorn.Config(app, log_level=log_level))

        def request_exit(*_) -> None:  # until uvicorn handles signals; it raises them again when it is done
            server.should_exit = True

        previous_handler = signal.signal(signal.SIGTERM, request_exit)
        try:
            host, port = listener.getsockname()[:2]
            self.log(f"serving {self.name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
            server.run(sockets=[listener])
        finally:
            signal.signal(signal.SIGTERM, previous_handler)
            self.decoder.stop()

    def app(self, api_key: str | None = None, cors: bool = False) -> FastAPI:
        """
        The application.

        Args:
            api_key (`str`, *optional*): Required as the bearer token of every request but `/health`.
            cors (`bool`): Let web pages of any origin call it.
        """

        app = FastAPI(openapi_url=None)
        served = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "dflash-hf"}
        for path, handler in _HANDLERS.items():
            answer = functools.partial(self._answer, handler)
            app.add_api_route(f"/v1/{path}", answer, methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", lambda: {"object": "list", "data": [served]})
        app.add_api_route("/v1/models/{name:path}", lambda name: served | {"id": self._check_model_name(name)})
        app.add_api_route("/load_model", self._load_model, methods=["POST"])
        app.add_api_route("/health", self._health, response_model=None)
        for kind in (StarletteHTTPException, RequestValidationError, Exception):
            app.add_exception_handler(kind, _format_error)
        if api_key is not None:
            app.add_middleware(_require_key, api_key=api_key)
        if cors:  # last, so first to be asked: preflight requests have no key
            app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
        return app

    def _check_model_name(self, name: str) -> str:
        """
        The name of a model, which can only be the one that is served.

        Raises:
            `HTTPException`: it is another.
        """
        if name != self.name:
            raise HTTPException(404, f"The model {name!r} does not exist; this server serves '{self.name}'.")
        return name

    def _health(self):
        """Whether requests are answered."""
        if self.decoder.is_alive:
            return {"status": "ok"}
        return _error(503, "The thread that decodes has ended; restart the server.")

    async def _load_model(self, body: dict) -> Response:
        """The answer to the first request of `transformers chat`: the model is loaded."""
        ready = {"status": "ready", "model": self._check_model_name(body.get("model", self.name)), "cached": True}
        return Response(f"data: {json.dumps(ready)}\n\n", media_type="text/event-stream")

    def _check_input(self, handler: type, body: dict, options: Options) -> None:
        """
        Check the parts of a body that upstream's handler does not check, and leave out arguments that the chat
        template does not read.

        Raises:
            `ValueError`: it is missing, or of the wrong kind.
        """
        name = _INPUT_FIELDS[handler]
        if name not in body:
            raise ValueError(f"The body has no {name!r}, which /v1/{_PATHS[handler]} answers.")
        if handler is ResponseHandler and not isinstance(body["input"], str):
            check_items(body["input"])
        if handler is ResponseHandler and (options.n or 1) > 1:
            raise ValueError(f"n={options.n} is not supported by /v1/responses; use a chat.")
        if options.echo and handler is not CompletionHandler:
            raise ValueError("echo=True is for /v1/completions; leave it out.")
        if body.get("tools") and "tools" not in str(getattr(self.processor, "chat_template", None)):
            raise ValueError(f"The chat template of {self.name} does not support tools; leave `tools` out.")
        self._check_limit(handler, body)
        self._check_ids(options)
        template_arguments = body.get("chat_template_kwargs")
        if template_arguments:
            body["chat_template_kwargs"] = template_arguments_of(self.processor, template_arguments)

    def _check_limit(self, handler: type, body: dict) -> None:
        """
        Replace a limit of -1 by all that is left. A limit of 0 is for completions alone, whose prompt can be scored.

        Raises:
            `ValueError`: a limit of 0 for another handler.
        """
        for name in ("max_tokens", "max_output_tokens"):
            limit = body.get(name)
            if limit == 0 and handler is not CompletionHandler:
                raise ValueError(
                    f"{name}=0 leaves no room for an answer; give at least 1, or -1 for all that is left."
                )
            if limit == -1:
                del body[name]
                if context_length_of(self.target) is not None:
                    body[name] = context_length_of(self.target)

    def _check_length(self, handler: type, body: dict, options: Options) -> None:
        """
        Raises:
            `ValueError`: what upstream would read is much too long.
        """
        if handler is CompletionHandler:
            prompts = [prompt for prompt in options.prompts if isinstance(prompt, str)]
        else:
            prompts = [[body.get(name) for name in ("messages", "input", "instructions", "tools")]]
        for prompt in prompts:
            check_length(self.decoder.tokenizer, prompt, context_length_of(self.target))

    def _check_ids(self, options: Options) -> None:
        """
        Raises:
            `ValueError`: an id is not the model's.
        """
        rows = self.target.get_input_embeddings().weight.shape[0]
        prompts = options.prompts if isinstance(options.prompt, list) else []
        ids: set[int] = set()
        for prompt in prompts:
            if isinstance(prompt, list):
                ids.update(prompt)
        named = [("prompt", ids), ("logit_bias", {*(options.logit_bias or {})})]
        for name, tokens in named:
            wrong = [token for token in tokens if not 0 <= token < rows]
            if wrong:
                raise ValueError(f"{name} has the token {wrong[0]}; the model's are 0 to {rows - 1}.")

    async def _answer(self, handler: type, body: dict, request: HTTPRequest) -> Response:
        """
        As upstream's handler, but with an error message for invalid requests, which upstream drops silently or
        misinterprets, and with the options that it ignores.
        """
        body = {key: value for key, value in body.items() if value is not None}  # `null` is as left out
        self._check_model_name(body.get("model") or self.name)
        name = request.headers.get("x-request-id") or str(uuid.uuid4())
        exchanges: list[Exchange] = []
        try:
            check_strings(body)
            options = Options.from_body(body)
            self._check_input(handler, body, options)
            await asyncio.to_thread(self._check_length, handler, body, options)
            exchanges += await self._exchanges(handler, options)
            body.setdefault("stream", False)  # OpenAI's default; upstream's `/v1/responses` streams
            choices = [self._handle(handler, exchange, body, name) for exchange in exchanges]
            work = asyncio.ensure_future(_gather_choices(choices))
            # Of a body that was read, what comes next is the end of the connection.
            disconnected = asyncio.ensure_future(request.receive())
            await asyncio.wait({work, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                _cancel(exchanges)
                return Response(status_code=499)  # which nobody reads
            disconnected.cancel()
            answers = work.result()
        except HTTPException as error:
            _cancel(exchanges)
            raise HTTPException(400 if error.status_code == 422 else error.status_code, error.detail) from error
        except DecoderEnded as error:
            raise HTTPException(503, str(error)) from error
        except Exception as error:
            _cancel(exchanges)
            # Until the decoder has it, reading the body fails: its template, its tools, its images.
            is_read = any(exchange.request is not None for exchange in exchanges)
            is_server_error = isinstance(error, MemoryError) or (is_read and isinstance(error, RuntimeError | OSError))
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise HTTPException(500 if is_server_error else 400, one_line(f"{kind}{error}")) from error
        answer = _merged_response(exchanges, answers, options, handler is ResponseHandler)
        answer.headers["x-request-id"] = name
        return answer

    async def _exchanges(self, handler: type, options: Options) -> list[Exchange]:
        """An exchange for each choice that is asked for: `n` for each prompt."""
        schema = options.answer_schema()
        exchanges = []
        for prompt in options.prompts if handler is CompletionHandler else [None]:
            for number in range(options.n or 1):
                grammars = [] if schema is None else [await asyncio.to_thread(self.grammars.processor, schema)]
                exchanges.append(Exchange(self.decoder, self.log, options, grammars, prompt, number))
        return exchanges

    async def _handle(self, handler: type, exchange: Exchange, body: dict, name: str) -> Response:
        """The answer of upstream's handler for a choice."""
        body = dict(body)
        if handler is CompletionHandler:
            body["prompt"] = exchange.text_prompt
        upstream = handler(ModelManager, exchange, self.template)
        processor = self.calls_processor if exchange.options.forces_call else self.processor
        upstream._resolve_model = lambda _: (self.name, self.target, processor)
        upstream.get_processor_inputs_from_messages = functools.partial(
            read_messages, upstream.get_processor_inputs_from_messages
        )
        return await upstream.handle_request(body, name)


def _cancel(exchanges: list[Exchange]) -> None:
    """Abort their requests: nobody waits for them any more."""
    for exchange in exchanges:
        if exchange.request is not None:
            exchange.request.abort()


async def _gather_choices(choices: list) -> list[Response]:
    """The answers of all choices; when one fails, or nobody waits any more, the others end."""
    tasks = [asyncio.ensure_future(choice) for choice in choices]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _merged_response(exchanges: list[Exchange], answers: list, options: Options, is_responses: bool) -> Response:
    """The completed answers of all choices, as one response."""
    several = len(exchanges) > 1
    if not isinstance(answers[0], StreamingResponse):
        completed_answers = []
        for exchange, answer in zip(exchanges, answers, strict=True):
            completed_answers.append(exchange.complete_answer(json.loads(answer.body)))
        return JSONResponse(merge_answers(completed_answers, options.n or 1) if several else completed_answers[0])
    streams = []
    for exchange, answer in zip(exchanges, answers, strict=True):
        streams.append(exchange.complete_stream(answer.body_iterator, is_responses))
    usage = bool((options.stream_options or {}).get("include_usage"))
    answers[0].body_iterator = merge_streams(streams, options.n or 1, usage) if several else streams[0]
    return answers[0]


def listen(host: str, port: int) -> socket.socket:
    """
    Listen at an address; connections wait until the server runs. Port 0 chooses a free port.

    Raises:
        `ValueError`: the address is not available.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ValueError(f"Cannot bind to --host {host} --port {port}: {error.strerror or error}.") from error


def _require_key(app, api_key: str):
    """An ASGI application that rejects requests without the key before their body is read, except for `/health`."""

    async def guarded(scope, receive, send) -> None:
        authorization = dict(scope.get("headers", ())).get(b"authorization", b"")
        needs_key = scope["type"] != "lifespan" and scope["path"] != "/health"
        has_key = hmac.compare_digest(authorization, f"Bearer {api_key}".encode())
        answer = app if has_key or not needs_key else _error(401, "Wrong or missing API key.")
        await answer(scope, receive, send)

    return guarded


def _processor_for_calls(processor, settings):
    """A processor with which upstream parses answers that are calls of tools."""
    own = copy.copy(processor)
    if hasattr(processor, "tokenizer"):
        own.tokenizer = copy.copy(processor.tokenizer)
    tokenizer = getattr(own, "tokenizer", own)
    ends = "|".join(re.escape(tokenizer.decode([end])) for end in eos_ids(settings))
    calls = {**_CALL_TEMPLATE, "close_pattern": rf"\s*\}}\s*(?:{ends}|\Z)"}
    tokenizer.response_template = {"start_anchor": "\0", "fields": {"tool_calls": calls}}  # nothing of the prompt
    return own


async def _format_error(request, error):
    """Format an error as OpenAI's clients expect."""
    if isinstance(error, StarletteHTTPException):
        return _error(error.status_code, str(error.detail), error.headers)
    if isinstance(error, RequestValidationError):
        return _error(400, f"The body must be a JSON object, sent as application/json ({error.errors()[0]['msg']}).")
    return _error(500, one_line(f"{type(error).__name__}: {error}"))


def _error(status: int, message: str, headers=None):
    """A response with an error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind}}, status, headers)
