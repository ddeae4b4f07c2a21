"""
An OpenAI-compatible server whose model decodes with a drafter, on the handlers of `transformers serve`.

Upstream's handlers read a body into the model's inputs and write the answer. Added here: the drafter and the caches
of conversations (see [`Decoder`]), options that upstream ignores (see [`Options`]), a log line for each request,
cancellation when the client disconnects, and the context limit.

The diagram in the docstring of [`dflash_hf.serving`] shows the way of a request through all objects.
"""

import asyncio
import copy
import functools
import hmac
import json
import signal
import socket
import time
import uuid
from collections.abc import Callable, Sequence

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError, StarletteHTTPException
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response

from dflash_hf._io.errors import one_line
from dflash_hf.serving.answers import AnswerCompleter, merged_response
from dflash_hf.serving.bodies import COMPLETIONS, ENDPOINTS, RESPONSES, BodyChecker, Endpoint
from dflash_hf.serving.decoder import Decoder, DecoderEnded
from dflash_hf.serving.grammars import GrammarCompiler
from dflash_hf.serving.options import Options
from dflash_hf.serving.request import Request, RequestStatus
from dflash_hf.serving.upstream import ChoiceManager, processor_for_calls


_CLIENT_CLOSED_REQUEST = 499  # nginx's status, which only logs show


class Server:
    """
    A model and its drafter behind OpenAI's API.

    Args:
        target (`PreTrainedModel`): The only model that is served. Its stop strings are moved, see [`Decoder`].
        processor (`PreTrainedTokenizerBase` or `ProcessorMixin`): Its tokenizer or processor, which reads
            conversations.
        draft (`DFlashDraftModel`, *optional*): Its drafter. Default: decoding with the target only.
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
        self.checker = BodyChecker(target, processor, name)
        self.grammars = GrammarCompiler(target, tokenizer)
        self.calls_processor = processor_for_calls(processor, target.generation_config)
        # A few tokens, so that errors appear before the first request.
        generation_config = copy.deepcopy(target.generation_config)
        generation_config.update(max_new_tokens=4, do_sample=False)
        inputs = {"input_ids": torch.tensor([[0, 1]], device=target.device)}
        self.decoder = Decoder(target, tokenizer, draft)
        try:
            self.decoder.submit(Request(self.decoder, inputs, generation_config)).future.result()
        except BaseException:
            self.decoder.stop()
            raise

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
        The FastAPI application.

        Args:
            api_key (`str`, *optional*): Required as the bearer token of every request but `/health`.
            cors (`bool`): Let web pages of any origin call it.
        """

        app = FastAPI(openapi_url=None)
        served = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "dflash-hf"}
        for endpoint in ENDPOINTS:
            answer = functools.partial(self._answer, endpoint)
            app.add_api_route(endpoint.path, answer, methods=["POST"], response_model=None)
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

    async def _answer(self, endpoint: Endpoint, body: dict, request: HTTPRequest) -> Response:
        """
        Answer a request as upstream's handler, but with the options that it ignores, and with an error message for
        invalid requests, which it drops silently or misinterprets.
        """
        body = {key: value for key, value in body.items() if value is not None}  # `null` is as left out
        self._check_model_name(body.get("model") or self.name)
        name = request.headers.get("x-request-id") or str(uuid.uuid4())
        managers: list[ChoiceManager] = []
        try:
            # 1. Check the body, and keep what upstream would misread.
            options = self.checker.check_and_rewrite(endpoint, body)
            await asyncio.to_thread(self.checker.check_length, endpoint, body, options)
            body.setdefault("stream", False)  # OpenAI's default; upstream's `/v1/responses` streams
            # 2. Let upstream's handler answer each choice.
            managers += await self._managers(endpoint, options)
            handled = [self._handle(endpoint, manager, body, name) for manager in managers]
            responses = await _responses_unless_disconnected(handled, request)
        except Exception as error:
            _abort(managers)
            raise _http_error(error) from error
        if responses is None:
            _abort(managers)
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        # 3. Complete the answers, and merge them into one.
        completers = [self._completer(endpoint, manager) for manager in managers]
        response = merged_response(completers, responses, per_prompt=options.n or 1)
        response.headers["x-request-id"] = name
        return response

    async def _managers(self, endpoint: Endpoint, options: Options) -> list[ChoiceManager]:
        """A manager for each choice that is asked for: `n` for each prompt."""
        schema = options.answer_schema()
        managers = []
        for prompt in options.prompts if endpoint is COMPLETIONS else [None]:
            for number in range(options.n or 1):
                processors = []
                if schema is not None:
                    processors.append(await asyncio.to_thread(self.grammars.processor, schema))
                managers.append(ChoiceManager(self.decoder, self.log, options, processors, prompt, number))
        return managers

    async def _handle(self, endpoint: Endpoint, manager: ChoiceManager, body: dict, name: str) -> Response:
        """
        The response of upstream's handler for a choice.

        Raises:
            `HTTPException`: see [`_http_error`].
        """
        body = dict(body)
        if endpoint is COMPLETIONS:
            body["prompt"] = manager.text_prompt
        processor = self.calls_processor if manager.options.forces_call else self.processor
        handler = endpoint.handler(manager, self.name, processor, self.template)
        try:
            return await handler.handle_request(body, name)
        except Exception as error:
            raise _http_error(error, manager.request) from error

    def _completer(self, endpoint: Endpoint, manager: ChoiceManager) -> AnswerCompleter:
        """What completes the answer for a choice whose request is submitted."""
        echo = ""
        if manager.options.echo and isinstance(manager.prompt, list):
            echo = self.decoder.tokenizer.decode(manager.prompt)
        elif manager.options.echo:
            echo = manager.text_prompt
        return AnswerCompleter(manager.request, manager.options, manager.logprobs, echo, endpoint is RESPONSES)


async def _responses_unless_disconnected(choices: Sequence, request: HTTPRequest) -> list[Response] | None:
    """The responses for all choices of a request whose body was read; `None` if the client disconnects before."""
    responses = asyncio.ensure_future(_gather(choices))
    disconnection = asyncio.ensure_future(request.receive())  # after the body, nothing else can be received
    try:
        await asyncio.wait({responses, disconnection}, return_when=asyncio.FIRST_COMPLETED)
        return responses.result() if responses.done() else None
    finally:
        responses.cancel()
        disconnection.cancel()


async def _gather(choices: Sequence) -> list[Response]:
    """The responses for all choices; when one fails, or nobody waits any more, the others are cancelled."""
    tasks = [asyncio.ensure_future(choice) for choice in choices]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _abort(managers: Sequence[ChoiceManager]) -> None:
    """Abort their requests: nobody waits for them any more."""
    for manager in managers:
        manager.abort()


def _http_error(error: Exception, request: Request | None = None) -> HTTPException:
    """
    The error of an answer as the client gets it.

    - Before the decoder has the request, an error comes from reading the body, such as its template, its tools or its
      images: 400.
    - A `ValueError` with which the request fails before its first token comes from its settings, which `generate`
      checks first: 400.
    - Any other error is one of the server: 500.

    Args:
        error (`Exception`): The error.
        request (`Request`, *optional*): The request; `None` if it was not submitted.
    """
    if isinstance(error, HTTPException):  # also upstream's, whose 422 is OpenAI's 400
        return HTTPException(400 if error.status_code == 422 else error.status_code, error.detail)
    if isinstance(error, DecoderEnded):
        return HTTPException(503, str(error))
    if request is None:
        is_clients = not isinstance(error, MemoryError)
    else:
        has_failed = request.status is RequestStatus.FINISHED_ERROR
        is_clients = has_failed and isinstance(error, ValueError) and not request.tokens
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return HTTPException(400 if is_clients else 500, one_line(f"{kind}{error}"))


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
