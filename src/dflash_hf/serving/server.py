"""
transformers' own server (`transformers serve`), whose model decodes with a drafter.

The application and its handlers are upstream's. Added here: the drafter and the caches of conversations (see
[`Decoder`]), options that upstream ignores (see [`Options`]), a log line for each request, cancellation when the
client disconnects, and the context limit.
"""

import asyncio
import contextlib
import copy
import functools
import hmac
import json
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future

import torch
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import DirectStreamer, GenerateManager, _StreamError

from dflash_hf.pairs import pack
from dflash_hf.responses import eos_ids
from dflash_hf.serving.decoder import Decoder
from dflash_hf.serving.options import Grammars, LogProbs, Options
from dflash_hf.serving.request import Request
from dflash_hf.serving.stop_strings import UpToStop, without_stop
from dflash_hf.terminal import one_line


_NEXT_PART = 5.0  # seconds that a part of a body may take to arrive
_STREAM_ERROR = re.compile(r'^data: \{"error": (".*")\}$', re.MULTILINE)  # of upstream: its text is JSON
_REMOVED = "/reset", "/v1/audio/transcriptions", "/v1/systemone"  # would unpack the model; are for other models
# How upstream parses an answer that is a call, as `schema_of_answer` has it; one that was cut keeps what there is.
_CALL = {
    "open_pattern": r'\{\s*"name"\s*:\s*"(?P<name>[^"]*)"\s*,\s*"arguments"\s*:\s*',
    "content": "text",
    "repeats": True,
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}


class Exchange(GenerateManager):
    """
    One request over HTTP: what upstream's handler takes for its way to the model, and sends pieces of streams through.

    Args:
        decoder (`Decoder`): Who answers.
        say (`Callable[[str], None]`): Called with a line when the request is finished.
        options (`Options`): What is asked for.
        processors (`list[LogitsProcessor]`): Of this answer.

    Attributes:
        request (`Request`): What the decoder was asked.
    """

    request: Request
    _compile = False

    def __init__(self, decoder: Decoder, say: Callable[[str], None], options: Options, processors=()):
        self.decoder, self.say, self.options = decoder, say, options
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
        from fastapi import HTTPException

        request = self._submit(inputs, gen_config, request_id)
        try:
            await asyncio.wrap_future(request.done)
        except asyncio.CancelledError:
            request.gone.set()
            raise
        except ValueError:  # caused by the request
            raise
        except Exception as error:
            raise HTTPException(500, one_line(f"{type(error).__name__}: {error}")) from error
        text = self.decoder.tokenizer.decode(request.tokens, skip_special_tokens=True)
        return text, len(request.prompt), request.tokens

    def _submit(self, inputs, settings, name: str, streamer=None) -> Request:
        options = self.options
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
        """An answer of upstream, or a piece of its stream, with log-probabilities and its usage."""
        choice, request = answer["choices"][0], self.request
        if content := self.logprobs and self.logprobs.since("text" not in choice):
            choice["logprobs"] = content
        if "usage" in answer:
            rejected = request.drafted - request.accepted
            answer["usage"]["prompt_tokens_details"] = {"cached_tokens": request.cached}
            answer["usage"]["completion_tokens_details"] = {
                "accepted_prediction_tokens": request.accepted,
                "rejected_prediction_tokens": rejected,
            }
            if self.options.is_call and not request.ended:
                choice["finish_reason"] = "length"
        return answer

    def whole(self, answer: dict) -> dict:
        """An answer that is not streamed, without the stop string."""
        choice = self.complete(answer)["choices"][0]
        of, name = (choice["message"], "content") if "message" in choice else (choice, "text")
        of[name] = without_stop(of.get(name) or "", self.request.stops)
        return answer

    def sse(self, piece) -> str:
        """A piece of a stream as an event. If asked for, the usage is an event of its own."""
        if self.logprobs is None and piece.usage is None:
            return f"data: {piece.model_dump_json(exclude_none=True)}\n\n"
        answer = self.complete(piece.model_dump(exclude_none=True))
        answers = [answer]
        if "usage" in answer and (self.options.stream_options or {}).get("include_usage"):
            answers = [{**answer, "usage": None}, {**answer, "choices": []}]
        return "".join(f"data: {json.dumps(one)}\n\n" for one in answers)


class DraftedServe(Serve):
    """
    Serves until SIGTERM or Ctrl-C; open requests are finished first.

    Args:
        target (`str`): Folder or Hub name, optionally with `@revision`; the only model that is served.
        draft (`DFlashDraftModel`, *optional*): Its drafter. Default: the target decodes alone.
        say (`Callable[[str], None]`): Called with a line when the server is ready, and for each finished request.
        at (`socket.socket`): Where to listen, see [`bound`].
        packed (`bool`, *optional*): Pack the weights of both models for a CPU. Default: if memory allows.
        template (`dict`): Arguments of the chat template, for requests without their own.
        name (`str`, *optional*): The model's id in the API. Default: `target`.
        api_key (`str`, *optional*): Required as the bearer token of every request but `/health`.
        options: `device`, `dtype`, `trust_remote_code`, `log_level` and `enable_cors`, as in `transformers serve`.

    Raises:
        `ValueError`: target and drafter do not belong together.
    """

    def __init__(
        self,
        target: str,
        draft,
        say: Callable[[str], None],
        at: socket.socket,
        packed: bool | None = None,
        template: dict | None = None,
        name: str | None = None,
        api_key: str | None = None,
        **options,
    ):
        self.target, self.draft, self.say, self.at, self.packed = target, draft, say, at, packed
        self.name, self.api_key = name or target, api_key
        super().__init__(
            force_model=target,
            chat_template_kwargs=json.dumps(template or {}),
            non_blocking=True,  # it calls `start_server` when everything is built
            **options,
        )

    def start_server(self) -> None:
        """Complete what `Serve` has built, and run it in this thread, which receives signals."""
        models = self._model_manager
        loaded = models.loaded_models.pop(models.process_model_name(self.target))
        models.loaded_models[self.name], models.process_model_name = loaded, self._pinned
        self.model, self.processor = loaded.model, loaded.processor
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        pack(self.packed, self.model, self.draft)
        self.grammars, decoder = Grammars(self.model, tokenizer), Decoder(self.model, tokenizer, self.draft)
        self.decoder = decoder
        self.calls = _reads_calls(self.processor, self.model.generation_config)
        _try_out(decoder)
        for handler in (self._chat_handler, self._completion_handler, self._response_handler):
            handler.handle_request = functools.partial(self._answer, copy.copy(handler))
        self._complete(self.server.config.app)

        def end(*_) -> None:  # until uvicorn handles signals; it raises them again when it is done
            self.server.should_exit = True

        before = signal.signal(signal.SIGTERM, end)
        try:
            host, port = self.at.getsockname()[:2]
            self.say(f"serving {self.name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
            self.server.run(sockets=[self.at])
        finally:
            signal.signal(signal.SIGTERM, before)
            decoder.stop()

    def _complete(self, app) -> None:
        """Routes for one model, errors in OpenAI's form, and what happens around requests."""
        from fastapi.exceptions import RequestValidationError, StarletteHTTPException
        from fastapi.middleware import Middleware

        served = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "dflash-hf"}
        app.router.routes[:] = [route for route in app.router.routes if route.path not in _REMOVED]
        self._model_manager.get_gen_models = lambda: [served]  # upstream lists its cache, but would not serve it
        app.add_api_route("/v1/models/{name:path}", lambda name: served | {"id": self._pinned(name)})
        app.add_middleware(ended_with_its_client)
        for kind in (StarletteHTTPException, RequestValidationError, Exception):
            app.add_exception_handler(kind, _as_openai_does)
        if self.api_key is not None:  # added last, so that web pages can read the rejection
            app.user_middleware.append(Middleware(with_key, key=self.api_key))

    def _pinned(self, name: str) -> str:
        """The name of a model, which can only be this one."""
        from fastapi import HTTPException

        if name != self.name:
            raise HTTPException(404, f"The model {name!r} does not exist; this server serves {self.name!r}.")
        return name

    async def _answer(self, handler, body: dict, request_id: str):
        """
        As upstream's handler, but with an error message for invalid requests, which upstream drops silently or
        misinterprets, and with the options that it ignores.
        """
        from fastapi import HTTPException
        from fastapi.responses import JSONResponse, StreamingResponse

        self._pinned(body.get("model") or self.name)  # upstream's 400 is OpenAI's 404
        try:
            options = Options.of(body)
            if body.get("tools") and "tools" not in str(getattr(self.processor, "chat_template", None)):
                raise ValueError(f"The chat template of {self.name} does not support tools; leave `tools` out.")
            schema = options.schema_of_answer()
            grammars = [] if schema is None else [await asyncio.to_thread(self.grammars.processor, schema)]
            exchange = Exchange(self.decoder, self.say, options, grammars)
            own, processor = copy.copy(handler), self.calls if options.is_call else self.processor
            own._resolve_model = lambda body: (self.name, self.model, processor)
            own.get_processor_inputs_from_messages = functools.partial(_inputs, own.get_processor_inputs_from_messages)
            own.generation_state, own.chunk_to_sse = exchange, exchange.sse
            body.setdefault("stream", False)  # OpenAI's default; upstream's `/v1/responses` streams
            answer = await own.handle_request(body, request_id)
        except HTTPException:
            raise
        except Exception as error:
            ours = isinstance(error, RuntimeError | OSError | MemoryError)
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise HTTPException(500 if ours else 400, one_line(f"{kind}{error}")) from error
        if "input" in body:  # of `/v1/responses`
            return answer
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = _events(answer.body_iterator)
            return answer
        return JSONResponse(exchange.whole(json.loads(answer.body)))


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


def _try_out(decoder: Decoder) -> None:
    """Generate a few tokens, so that errors appear before the first request."""
    settings = copy.deepcopy(decoder.target.generation_config)
    settings.update(max_new_tokens=4, do_sample=False)
    inputs = {"input_ids": torch.tensor([[0, 1]], device=decoder.target.device)}
    decoder.submit(Request(decoder, inputs, settings)).done.result()


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


def _inputs(read: Callable, messages: list[dict], modality) -> list[dict]:
    """
    As upstream, which drops parts of a message that the model cannot read, and the text beside an empty `tool_calls`.
    """
    messages = [{key: value for key, value in one.items() if key != "tool_calls" or value} for one in messages]
    for message in messages:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if "text" not in part and not read([{"role": "user", "content": [part]}], modality)[0]["content"]:
                raise ValueError(f"content has a part of type {part['type']!r}, which the model cannot read.")
    return read(messages, modality)


async def _events(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Upstream's stream, with errors and the end as OpenAI's clients expect them."""
    async for text in events:
        yield _STREAM_ERROR.sub(r'data: {"error": {"message": \1, "type": "server_error"}}', text)
    yield "data: [DONE]\n\n"


async def _as_openai_does(request, error):
    """Format an error as OpenAI's clients expect."""
    from fastapi.exceptions import RequestValidationError, StarletteHTTPException

    if isinstance(error, StarletteHTTPException):
        return _error(error.status_code, str(error.detail), error.headers)
    if isinstance(error, RequestValidationError):
        return _error(400, f"The body must be a JSON object, sent as application/json ({error.errors()[0]['msg']}).")
    return _error(500, one_line(f"{type(error).__name__}: {error}"))


def _error(status: int, message: str, headers=None):
    """A response with an error."""
    from fastapi.responses import JSONResponse

    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind}}, status, headers)


def with_key(app, key: str):
    """An ASGI application that rejects requests without a bearer token, except for `/health`."""

    async def call(scope, receive, send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, f"Bearer {key}".encode()):
                return await _error(401, "Wrong or missing API key.")(scope, receive, send)
        await app(scope, receive, send)

    return call


def ended_with_its_client(app):
    """
    An ASGI application that ends a request when its client disconnects, or sends no more of its body. Upstream
    finishes answers that are not streamed, and waits for the rest of a body forever, even to shut down.
    """

    async def call(scope, receive, send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        body: list[dict] = []
        while not body or body[-1].get("more_body"):
            try:
                body.append(await asyncio.wait_for(receive(), _NEXT_PART))
            except asyncio.TimeoutError:
                slow = _error(408, f"The body did not continue for {_NEXT_PART:g} seconds.")
                return await slow(scope, receive, send)

        async def message() -> dict:
            return body.pop(0) if body else await receive()

        work = asyncio.ensure_future(app(scope, message, send))
        gone = asyncio.ensure_future(receive())
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        for task in (gone, work):
            task.cancel()  # which does nothing if it is done
        with contextlib.suppress(asyncio.CancelledError):
            await work

    return call
