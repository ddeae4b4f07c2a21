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
from transformers.cli.serving.utils import DirectStreamer, _StreamError

from dflash_hf.responses import eos_ids
from dflash_hf.serving.decoder import Decoder, DecoderEnded
from dflash_hf.serving.messages import check_items, check_strings, read_messages, template_arguments_of
from dflash_hf.serving.options import Grammars, LogProbs, Options
from dflash_hf.serving.request import Request
from dflash_hf.serving.stop_strings import UpToStop, without_stop
from dflash_hf.terminal import one_line


_COMPLETED = ('"usage":', 'data: {"error":')  # what is completed of upstream's streams
_HANDLERS = {"chat/completions": ChatCompletionHandler, "completions": CompletionHandler, "responses": ResponseHandler}
_PATHS = {handler: path for path, handler in _HANDLERS.items()}
_INPUTS = {ChatCompletionHandler: "messages", CompletionHandler: "prompt", ResponseHandler: "input"}
# How upstream parses an answer that is a call, as `schema_of_answer` has it; one that was cut keeps what there is.
_CALL = {
    "open_pattern": r'\{\s*"name"\s*:\s*"(?P<name>[^"]*)"\s*,\s*"arguments"\s*:\s*',
    "content": "text",
    "repeats": True,
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}


class Exchange:
    """
    One request over HTTP: what upstream's handler takes for the state of its server and for the manager of its model.

    Args:
        decoder (`Decoder`): Who answers.
        say (`Callable[[str], None]`): Called with a line when the request is finished.
        options (`Options`): What is asked for.
        processors (`list[LogitsProcessor]`): Of this answer.

    Attributes:
        request (`Request`, *optional*): What the decoder was asked, once it was.
    """

    _compile = False

    def __init__(self, decoder: Decoder, say: Callable[[str], None], options: Options, processors=()):
        self.decoder, self.say, self.options = decoder, say, options
        self.request: Request | None = None
        self.logprobs = None if options.likely is None else LogProbs(decoder.tokenizer, options.likely)
        self.processors = [*processors, *([] if self.logprobs is None else [self.logprobs])]

    # As the state of a handler.

    def use_continuous_batching(self, model, modality) -> bool:
        """Upstream's is not used, but see [`Decoder`]."""
        return False

    def get_manager(self, model_id: str, use_cb: bool = False) -> "Exchange":
        """Upstream has one for each model."""
        return self

    # As the manager of its model.

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        """As upstream; the streamer's `cancel` ends the request."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue()
        streamer = DirectStreamer(self.decoder.tokenizer._tokenizer, loop, events, response_parser=response_parser)

        def failed(done: Future) -> None:
            if (error := done.exception()) is not None:  # upstream puts its text between quotes
                event = _StreamError(json.dumps(one_line(error))[1:-1])
                loop.call_soon_threadsafe(events.put_nowait, event)

        request = self._submit(inputs, gen_config, request_id, streamer)
        streamer.cancel = request.gone.set
        request.done.add_done_callback(failed)
        return events, streamer

    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        """As upstream, but a cancelled request stops decoding."""
        request = self._submit(inputs, gen_config, request_id)
        try:
            await asyncio.wrap_future(request.done)
        except asyncio.CancelledError:
            request.gone.set()
            raise
        except (ValueError, DecoderEnded):  # caused by the request, or by none
            raise
        except Exception as error:
            raise HTTPException(500, one_line(f"{type(error).__name__}: {error}")) from error
        text = self.decoder.tokenizer.decode(request.tokens, skip_special_tokens=True)
        return text, len(request.prompt), request.tokens

    def _submit(self, inputs, settings, name: str, streamer=None) -> Request:
        options, own = self.options, vars(self.decoder.target.generation_config)
        if settings.max_new_tokens is None and settings.max_length is not None:
            settings.max_new_tokens = settings.max_length - inputs["input_ids"].shape[-1]
        for key, value in own.items():  # what a body's `generation_config` leaves out; `update` warns, see `Request`
            if getattr(settings, key, None) is None:
                setattr(settings, key, value)
        if options.logit_bias:
            settings.sequence_bias = {(token,): bias for token, bias in options.logit_bias.items()}
        # Upstream ignores a temperature if the model's own settings are greedy.
        settings.do_sample = bool(options.temperature if options.temperature is not None else settings.do_sample)
        seed = None if options.seed is None else options.seed % 2**32  # numpy's limit; OpenAI's have 64 bits
        request = Request(self.decoder, inputs, settings, streamer, options.stops, seed, self.processors)
        if streamer is not None and request.stops:
            streamer._enqueue = UpToStop(streamer._enqueue, request.stops)

        def finished(done: Future) -> None:
            error = done.exception()
            end = "; the client disconnected" if request.gone.is_set() else ""
            self.say(f"{name[:8]}: {request.status()}{f'; failed: {one_line(error)}' if error is not None else end}")

        request.done.add_done_callback(finished)
        self.request = self.decoder.submit(request)
        return request

    # Its answer.

    def complete(self, answer: dict) -> dict:
        """An answer of upstream, or a piece of its stream, with log-probabilities, its usage and where it was cut."""
        request, whole = self.request, answer.get("response", answer)
        choice = whole.get("choices", [{}])[0]
        if content := self.logprobs and self.logprobs.since("text" not in choice):
            choice["logprobs"] = content
        if not (usage := whole.get("usage")):
            return answer
        read, written = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
        usage[f"{read}_tokens_details"] = {"cached_tokens": request.cached}
        usage[f"{written}_tokens_details"] = {
            "accepted_prediction_tokens": request.accepted,
            "rejected_prediction_tokens": request.drafted - request.accepted,
            **({"reasoning_tokens": 0} if written == "output" else {}),
        }
        if not request.ended and choice and self.options.is_call:
            choice["finish_reason"] = "length"
        elif not request.ended and "output" in whole:
            whole |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            answer |= {"type": "response.incomplete"} if whole is not answer else {}
        return answer

    def whole(self, answer: dict) -> dict:
        """An answer that is not streamed, without the stop string."""
        choice = self.complete(answer).get("choices", [{}])[0]
        texts = [(choice, "text"), (choice.get("message", {}), "content")]
        texts += [(part, "text") for item in answer.get("output", []) for part in item.get("content", [])]
        for of, name in texts:
            if name in of:
                of[name] = without_stop(of[name] or "", self.request.stops)
        return answer

    async def stream(self, events: AsyncIterator[str], of_responses: bool) -> AsyncIterator[str]:
        """Upstream's stream, completed, with errors and the end as OpenAI's clients expect them."""
        async for text in events:
            if self.logprobs is None and not any(word in text for word in _COMPLETED):
                yield text
                continue
            for event in text.removesuffix("\n\n").split("\n\n"):
                for one in self.pieces(json.loads(event.removeprefix("data: "))):
                    yield f"data: {json.dumps(one)}\n\n"
        if not of_responses:
            yield "data: [DONE]\n\n"

    def pieces(self, piece: dict) -> list[dict]:
        """A piece of a stream, completed. If asked for, the usage is a piece of its own."""
        if isinstance(piece.get("error"), str):
            return [{"error": {"message": piece["error"], "type": "server_error"}}]
        answer = self.complete(piece)
        if "usage" in answer and (self.options.stream_options or {}).get("include_usage"):
            return [{**answer, "usage": None}, {**answer, "choices": []}]
        return [answer]


class Server:
    """
    A model and its drafter behind OpenAI's API.

    Args:
        target (`PreTrainedModel`): The only model that is served.
        processor (`PreTrainedTokenizerBase` or `ProcessorMixin`): Its tokenizer, or what else reads conversations.
        draft (`DFlashDraftModel`, *optional*): Its drafter. Default: the target decodes alone.
        name (`str`): The model's id in the API.
        say (`Callable[[str], None]`): Called with a line when the server is ready, and for each finished request.
        template (`dict`, *optional*): Arguments of the chat template, for requests without their own.

    Raises:
        `ValueError`: target and drafter do not belong together.
    """

    def __init__(self, target, processor, draft, name: str, say: Callable[[str], None], template: dict | None = None):
        tokenizer = getattr(processor, "tokenizer", processor)
        self.target, self.processor, self.name, self.say, self.template = target, processor, name, say, template
        self.decoder, self.grammars = Decoder(target, tokenizer, draft), Grammars(target, tokenizer)
        self.calls = _reads_calls(processor, target.generation_config)
        # A few tokens, so that errors appear before the first request.
        settings = copy.deepcopy(target.generation_config)
        settings.update(max_new_tokens=4, do_sample=False)
        inputs = {"input_ids": torch.tensor([[0, 1]], device=target.device)}
        self.decoder.submit(Request(self.decoder, inputs, settings)).done.result()

    def run(self, at: socket.socket, app, log_level: str = "warning") -> None:
        """Serve an application until SIGTERM or Ctrl-C; open requests are finished first. See [`bound`]."""
        server = uvicorn.Server(uvicorn.Config(app, log_level=log_level))

        def end(*_) -> None:  # until uvicorn handles signals; it raises them again when it is done
            server.should_exit = True

        before = signal.signal(signal.SIGTERM, end)
        try:
            host, port = at.getsockname()[:2]
            self.say(f"serving {self.name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
            server.run(sockets=[at])
        finally:
            signal.signal(signal.SIGTERM, before)
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
        app.add_api_route("/v1/models/{name:path}", lambda name: served | {"id": self._pinned(name)})
        app.add_api_route("/load_model", self._loaded, methods=["POST"])
        app.add_api_route("/health", self._health, response_model=None)
        for kind in (StarletteHTTPException, RequestValidationError, Exception):
            app.add_exception_handler(kind, _as_openai_does)
        if api_key is not None:
            app.add_middleware(_guarded, api_key=api_key)
        if cors:  # last, so first to be asked: preflight requests have no key
            app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
        return app

    def _pinned(self, name: str) -> str:
        """The name of a model, which can only be this one."""
        if name != self.name:
            raise HTTPException(404, f"The model {name!r} does not exist; this server serves '{self.name}'.")
        return name

    def _health(self):
        """Whether requests are answered."""
        if self.decoder.alive:
            return {"status": "ok"}
        return _error(503, "The thread that decodes has ended; restart the server.")

    async def _loaded(self, body: dict) -> Response:
        """What `transformers chat` asks first."""
        ready = {"status": "ready", "model": self._pinned(body.get("model", self.name)), "cached": True}
        return Response(f"data: {json.dumps(ready)}\n\n", media_type="text/event-stream")

    def _check_input(self, handler: type, body: dict) -> None:
        """
        Check what upstream's handler reads of a body without a look, and keep of the template's arguments its own.

        Raises:
            `ValueError`: it is missing, or of the wrong kind.
        """
        name = _INPUTS[handler]
        if name not in body:
            raise ValueError(f"The body has no {name!r}, which /v1/{_PATHS[handler]} answers.")
        if handler is ResponseHandler and not isinstance(body["input"], str):
            check_items(body["input"])
        asked = body.get("chat_template_kwargs")
        if asked:
            body["chat_template_kwargs"] = template_arguments_of(self.processor, asked)

    async def _answer(self, handler: type, body: dict, request: HTTPRequest) -> Response:
        """
        As upstream's handler, but with an error message for invalid requests, which upstream drops silently or
        misinterprets, and with the options that it ignores.
        """
        body = {key: value for key, value in body.items() if value is not None}  # `null` is as left out
        self._pinned(body.get("model") or self.name)
        name = request.headers.get("x-request-id") or str(uuid.uuid4())
        exchange = None
        try:
            check_strings(body)
            options = Options.of(body)
            self._check_input(handler, body)
            if body.get("tools") and "tools" not in str(getattr(self.processor, "chat_template", None)):
                raise ValueError(f"The chat template of {self.name} does not support tools; leave `tools` out.")
            schema = options.schema_of_answer()
            grammars = [] if schema is None else [await asyncio.to_thread(self.grammars.processor, schema)]
            exchange = Exchange(self.decoder, self.say, options, grammars)
            own = handler(ModelManager, exchange, self.template)
            own._resolve_model = lambda _: (self.name, self.target, self.calls if options.is_call else self.processor)
            own.get_processor_inputs_from_messages = functools.partial(
                read_messages, own.get_processor_inputs_from_messages
            )
            body.setdefault("stream", False)  # OpenAI's default; upstream's `/v1/responses` streams
            work = asyncio.ensure_future(own.handle_request(body, name))
            gone = asyncio.ensure_future(request.receive())  # of a body that was read: the end of the connection
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                return Response(status_code=499)  # which nobody reads
            gone.cancel()
            answer = work.result()
        except HTTPException as error:
            raise HTTPException(400 if error.status_code == 422 else error.status_code, error.detail) from error
        except DecoderEnded as error:
            raise HTTPException(503, str(error)) from error
        except Exception as error:
            # Until the decoder has it, reading the body fails: its template, its tools, its images.
            read = exchange is not None and exchange.request is not None
            ours = isinstance(error, MemoryError) or (read and isinstance(error, RuntimeError | OSError))
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise HTTPException(500 if ours else 400, one_line(f"{kind}{error}")) from error
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = exchange.stream(answer.body_iterator, "input" in body)
        else:
            answer = JSONResponse(exchange.whole(json.loads(answer.body)))
        answer.headers["x-request-id"] = name
        return answer


def bound(host: str, port: int) -> socket.socket:
    """
    Listen at an address; connections wait until the server runs. Port 0 chooses a free port.

    Raises:
        `ValueError`: the address is not available.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ValueError(f"Cannot bind to --host {host} --port {port}: {error.strerror or error}.") from error


def _guarded(app, api_key: str):
    """An ASGI application that answers only who has the key, before a body is read or parsed; and `/health`."""

    async def guarded(scope, receive, send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        closed = scope["type"] != "lifespan" and scope["path"] != "/health"
        wrong = closed and not hmac.compare_digest(given, f"Bearer {api_key}".encode())
        await (_error(401, "Wrong or missing API key.") if wrong else app)(scope, receive, send)

    return guarded


def _reads_calls(processor, settings):
    """A processor with which upstream parses answers that are calls."""
    own = copy.copy(processor)
    if hasattr(processor, "tokenizer"):
        own.tokenizer = copy.copy(processor.tokenizer)
    tokenizer = getattr(own, "tokenizer", own)
    ends = "|".join(re.escape(tokenizer.decode([end])) for end in eos_ids(settings))
    calls = {**_CALL, "close_pattern": rf"\s*\}}\s*(?:{ends}|\Z)"}
    tokenizer.response_template = {"start_anchor": "\0", "fields": {"tool_calls": calls}}  # nothing of the prompt
    return own


async def _as_openai_does(request, error):
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
