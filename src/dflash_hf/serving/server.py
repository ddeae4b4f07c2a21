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
from contextvars import ContextVar

import torch
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import DirectStreamer, GenerateManager, _StreamError

from dflash_hf.pairs import pack
from dflash_hf.serving.decoder import Decoder
from dflash_hf.serving.options import Grammars, LogProbs, Options, legacy
from dflash_hf.serving.request import Request
from dflash_hf.serving.stop_strings import without_stop
from dflash_hf.terminal import one_line


_NEXT_PART = 5.0  # seconds that a part of a body may take to arrive
_STREAM_ERROR = re.compile(r'^data: \{"error": (".*")\}$', re.MULTILINE)  # of upstream: its text is JSON
_options: ContextVar[Options] = ContextVar("options")  # of the request that is being handled


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
        models, app = self._model_manager, self.server.config.app
        loaded = models.loaded_models.pop(models.process_model_name(self.target))
        models.loaded_models[self.name] = loaded  # answers name the model as it is found here
        target, self.processor = loaded.model, loaded.processor
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self.grammars = Grammars(target, self.tokenizer)
        self.takes_tools = "tools" in str(getattr(self.processor, "chat_template", None))
        pack(self.packed, target, self.draft)
        manager = PairManager(Decoder(target, self.tokenizer, self.draft), self.say)
        self._generation_state._generate_managers[self.name] = manager
        manager.try_out()
        for handler in (self._chat_handler, self._completion_handler, self._response_handler):
            handler.get_processor_inputs_from_messages = functools.partial(
                _inputs, handler.get_processor_inputs_from_messages
            )
            handler.handle_request = functools.partial(self._answer, handler.handle_request)
        models.process_model_name = functools.partial(_pinned, self.name)
        models.force_model = self.name  # requests are compared with it
        self._complete(app)
        host, port = self.at.getsockname()[:2]

        def end(*_) -> None:  # until uvicorn handles signals; it raises them again when it is done
            self.server.should_exit = True

        before = signal.signal(signal.SIGTERM, end)
        try:
            self.say(f"serving {self.name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
            self.server.run(sockets=[self.at])
        finally:
            signal.signal(signal.SIGTERM, before)
            manager.stop()

    def _complete(self, app) -> None:
        """Routes for one model, errors in OpenAI's form, and what happens around requests."""
        from fastapi.exceptions import RequestValidationError, StarletteHTTPException
        from fastapi.middleware import Middleware

        served = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "dflash-hf"}
        removed = "/reset", "/v1/audio/transcriptions"  # would unpack; for other models
        app.router.routes[:] = [route for route in app.router.routes if route.path not in removed]
        self._model_manager.get_gen_models = lambda: [served]  # upstream lists its cache, but would not serve it

        def one_model(name: str) -> dict:
            _pinned(self.name, name)
            return served

        app.add_api_route("/v1/models/{name:path}", one_model)
        app.add_middleware(EndedWithItsClient)
        for kind in (StarletteHTTPException, RequestValidationError, Exception):
            app.add_exception_handler(kind, _as_openai_does)
        if self.api_key is not None:  # added last, so that web pages can read the rejection
            app.user_middleware.append(Middleware(WithKey, key=self.api_key))

    async def _answer(self, handle: Callable, body: dict, request_id: str):
        """
        As upstream, but with an error message for invalid requests, which upstream drops silently or misinterprets,
        and with the options that it ignores.
        """
        from fastapi import HTTPException
        from fastapi.responses import JSONResponse, StreamingResponse

        _pinned(self.name, body.get("model") or self.name)  # upstream's 400 is OpenAI's 404
        try:
            self._check(body)
            with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            options = Options.of(body)
            if options.schema is not None:
                options.processors.append(await asyncio.to_thread(self.grammars.processor, options.schema))
            if options.likely is not None:
                options.processors.append(LogProbs(self.tokenizer, options.likely))
            body.setdefault("stream", False)  # OpenAI's default; upstream's `/v1/responses` streams
            _options.set(options)
            answer = await handle(body, request_id)
        except HTTPException:
            raise
        except Exception as error:
            ours = isinstance(error, RuntimeError | OSError | MemoryError)
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise HTTPException(500 if ours else 400, one_line(f"{kind}{error}")) from error
        if "input" in body:  # of `/v1/responses`
            return answer
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = _events(answer.body_iterator, options, with_usage)
            return answer
        return JSONResponse(_completed(json.loads(answer.body), options))

    def _check(self, body: dict) -> None:
        """
        Raises:
            `ValueError`: a field has a wrong type, or the template has no tools.
        """
        if body.get("tools") and body.get("tool_choice") != "none" and not self.takes_tools:
            raise ValueError(f"The chat template of {self.name} does not support tools; leave `tools` out.")
        messages, options = body.get("messages", []), body.get("stream_options") or {}
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ValueError(f"messages={messages!r} must be a list of objects with `role` and `content`.")
        if not isinstance(options, dict):
            raise ValueError(f"stream_options={options!r} must be an object.")


def bound(host: str, port: int) -> socket.socket:
    """
    Listen at an address; connections wait until the server runs. Port 0 chooses a free port.

    Raises:
        `ValueError`: the address is not available.
    """
    place = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind((host, port))
        place.listen()  # or another server could bind it, too, until one of them listens
    except OSError as error:
        place.close()
        raise ValueError(f"Cannot bind to --host {host} --port {port}: {error.strerror or error}.") from error
    return place


def _pinned(served: str, asked: str) -> str:
    """Upstream's `process_model_name` for a single model; otherwise `/load_model` would load any model."""
    from fastapi import HTTPException

    if asked != served:
        raise HTTPException(404, f"The model {asked!r} does not exist; this server serves {served!r}.")
    return served


async def _as_openai_does(request, error):
    """Format an error as OpenAI clients expect."""
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


def _completed(answer: dict, options: Options) -> dict:
    """An answer with its log-probabilities, its tool call and its usage, and without the stop string."""
    choice, request = answer["choices"][0], options.request
    of, name = (choice["message"], "content") if "message" in choice else (choice, "text")
    if request.stops:
        of[name] = without_stop(of[name], request.stops)
    if options.tool and request.ended:
        of["tool_calls"], of[name] = [_tool_call(answer["id"], of[name])], None
        choice["finish_reason"] = "tool_calls"
    if content := options.logprobs():
        choice["logprobs"] = {"content": content} if "message" in choice else legacy(content)
    answer["usage"] |= _details(request)
    return answer


def _tool_call(request_id: str, text: str) -> dict:
    call = json.loads(text)
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {"id": f"{request_id}_tool_call_0", "index": 0, "type": "function", "function": function}


def _details(request: Request) -> dict:
    """Of the usage, as OpenAI names them: tokens that were read before, and drafted tokens."""
    rejected = request.drafted - request.accepted
    return {
        "prompt_tokens_details": {"cached_tokens": request.cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": request.accepted,
            "rejected_prediction_tokens": rejected,
        },
    }


async def _events(events: AsyncIterator[str], options: Options, with_usage: bool) -> AsyncIterator[str]:
    """Upstream's stream, with an error, the usage and the end as OpenAI clients expect them."""
    reads, call = options.tool or options.likely is not None, ""
    async for text in events:
        if not reads and '"usage":{' not in text:  # quotes in an answer are escaped
            yield _STREAM_ERROR.sub(r'data: {"error": {"message": \1, "type": "server_error"}}', text)
            continue
        for event in text.rstrip().split("\n\n"):
            piece = json.loads(event.removeprefix("data: "))
            if "choices" not in piece:
                yield f"data: {json.dumps({'error': {'message': piece['error'], 'type': 'server_error'}})}\n\n"
                continue
            choice = piece["choices"][0]
            delta = choice.get("delta", {})
            if options.tool and not (piece.get("usage") and not options.request.ended):
                call += delta.pop("content", None) or ""
                if piece.get("usage"):
                    delta["tool_calls"], choice["finish_reason"] = [_tool_call(piece["id"], call)], "tool_calls"
            elif options.tool:
                delta["content"] = call
            if content := options.logprobs():
                choice["logprobs"] = {"content": content} if "delta" in choice else legacy(content)
            if piece.get("usage"):
                piece["usage"] |= _details(options.request)
                if with_usage:
                    usage = {**piece, "choices": []}
                    del piece["usage"]
                    yield f"data: {json.dumps(piece)}\n\n"
                    piece = usage
            yield f"data: {json.dumps(piece)}\n\n"
    yield "data: [DONE]\n\n"


def _inputs(read: Callable, messages: list[dict], modality) -> list[dict]:
    """
    As upstream, which drops parts of a message that the model cannot read, and the text beside an empty `tool_calls`.
    """
    messages = [{key: value for key, value in one.items() if key != "tool_calls" or value} for one in messages]
    for message in messages:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            read_part = read([{"role": "user", "content": [part]}], modality)[0]["content"]
            if not read_part and "text" not in part:
                raise ValueError(f"content has a part of type {part['type']!r}, which the model cannot read.")
    return read(messages, modality)


class PairManager(GenerateManager):
    """
    Upstream's way to the model: its requests go to a [`Decoder`].

    Args:
        decoder (`Decoder`): Of the pair.
        say (`Callable[[str], None]`): Called with a line for each finished request.
    """

    def __init__(self, decoder: Decoder, say: Callable[[str], None]):
        super().__init__()
        self.decoder, self.tokenizer, self.say = decoder, decoder.tokenizer, say

    def try_out(self) -> None:
        """Generate a few tokens, so that errors appear before the first request."""
        target = self.decoder.target
        inputs = {"input_ids": torch.tensor([[0, 1]], device=target.device)}
        settings = copy.deepcopy(target.generation_config)
        settings.update(max_new_tokens=4, do_sample=False)
        self.decoder.submit(Request(self.decoder, inputs, settings)).done.result()

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        """As upstream; the streamer's `cancel` ends the request."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue()
        streamer = DirectStreamer(self.tokenizer._tokenizer, loop, events, response_parser=response_parser)
        request = self._submit(inputs, gen_config, request_id, streamer)
        streamer.cancel = request.gone.set

        def failed(done: Future) -> None:
            if (error := done.exception()) is not None:  # upstream puts its text between quotes
                event = _StreamError(json.dumps(one_line(error))[1:-1])
                loop.call_soon_threadsafe(events.put_nowait, event)

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
        text = self.tokenizer.decode(request.tokens, skip_special_tokens=True)
        return text, len(request.prompt), request.tokens

    def _submit(self, inputs, settings, name: str, streamer=None) -> Request:
        options = _options.get()
        options.apply(settings)
        request = Request(self.decoder, inputs, settings, streamer, options.stops, options.seed, options.processors)

        def finished(done: Future) -> None:
            error = done.exception()
            end = "; the client disconnected" if request.gone.is_set() else ""
            self.say(f"{name[:8]}: {request.status()}{f'; failed: {one_line(error)}' if error is not None else end}")

        request.done.add_done_callback(finished)
        options.request = self.decoder.submit(request)
        return request

    def submit(self, fn: Callable, *args, **kwargs) -> Future:
        """As upstream, between requests."""
        return self.decoder.call(fn, *args, **kwargs)

    def async_submit(self, fn: Callable, *args, **kwargs) -> asyncio.Future:
        """As upstream, between requests."""
        return asyncio.wrap_future(self.submit(fn, *args, **kwargs))

    def stop(self) -> None:
        self.decoder.stop()


class WithKey:
    """
    Rejects requests without the key, except for `/health`.

    Args:
        app: The ASGI application to wrap.
        key (`str`): The bearer token.
    """

    def __init__(self, app, key: str):
        self.app, self.wanted = app, f"Bearer {key}".encode()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.wanted):
                return await _error(401, "Wrong or missing API key.")(scope, receive, send)
        await self.app(scope, receive, send)


class EndedWithItsClient:
    """
    Cancels a request when its client disconnects, or sends no more of its body. Upstream finishes answers that are not
    streamed, and waits for the rest of a body forever, even to shut down.

    Args:
        app: The ASGI application to wrap.
    """

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        inbox, answered = asyncio.Queue(), False

        async def listen():
            message = {"type": "", "more_body": True}
            while message["type"] != "http.disconnect":
                message = await asyncio.wait_for(receive(), _NEXT_PART if message.get("more_body") else None)
                inbox.put_nowait(message)

        async def reply(message):
            nonlocal answered
            answered |= message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        work = asyncio.ensure_future(self.app(scope, inbox.get, reply))
        ears = asyncio.ensure_future(listen())
        await asyncio.wait({work, ears}, return_when=asyncio.FIRST_COMPLETED)
        late = not work.done() and ears.exception()
        if not work.done() and not answered:
            work.cancel()
        ears.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        if late:
            await _error(408, f"The body did not continue for {_NEXT_PART:g} seconds.")(scope, receive, send)
