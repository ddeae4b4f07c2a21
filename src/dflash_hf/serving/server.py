"""
transformers' own server (`transformers serve`), whose model decodes with a drafter.

The application, its handlers and its inference thread are upstream's. Added here: the drafter, a log line for each
request, a separate seed for each request, cancellation when the client disconnects, the context limit, and a batch for
requests that would otherwise wait for each other in upstream's single inference thread per model.
"""

import asyncio
import contextlib
import copy
import functools
import hmac
import json
import math
import re
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future

import torch
from transformers import set_seed
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import GenerateManager, _GenerationCancelled

from dflash_hf.pairs import pack
from dflash_hf.serving.conversation import room_for_answer
from dflash_hf.serving.stop_strings import CompletesStop, UpToStop, without_stop
from dflash_hf.serving.together import BatchFailed, Together
from dflash_hf.terminal import one_line


# Fields that upstream ignores although they change the answer, and the values that change nothing.
_NOT_SERVED = {
    **dict.fromkeys(("n", "best_of"), (None, 1)),
    **dict.fromkeys(("logprobs", "echo", "background"), (None, False)),
    **dict.fromkeys(("top_logprobs", "functions", "function_call", "suffix", "audio", "web_search_options"), (None,)),
    **dict.fromkeys(("previous_response_id", "conversation"), (None,)),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "text": (None, {"format": {"type": "text"}}),
    "modalities": (None, ["text"]),
    "tool_choice": (None, "auto", "none"),
}
_NEXT_PART = 5.0  # seconds that a part of a body may take to arrive
_STREAM_ERROR = re.compile(r'^data: \{"error": (".*")\}$', re.MULTILINE)  # of upstream: its text is JSON


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
        from fastapi.exceptions import RequestValidationError, StarletteHTTPException
        from fastapi.middleware import Middleware

        models, app = self._model_manager, self.server.config.app
        loaded = models.loaded_models.pop(models.process_model_name(self.target))
        models.loaded_models[self.name] = loaded  # answers name the model as it is found here
        target, processor = loaded.model, loaded.processor
        self.takes_tools = "tools" in str(getattr(processor, "chat_template", None))
        pack(self.packed, target, self.draft)
        manager = self._generation_state._generate_managers[self.name] = DraftedManager(target, self.draft, self.say)
        stops = target.generation_config.stop_strings  # of requests without their own; see `CompletesStop`
        target.generation_config.stop_strings = None
        manager.try_out(target)
        for handler in (self._chat_handler, self._completion_handler, self._response_handler):
            handler._build_generation_config = functools.partial(_settings, handler._build_generation_config, stops)
            handler.get_processor_inputs_from_messages = functools.partial(
                _inputs, handler.get_processor_inputs_from_messages
            )
            handler.handle_request = functools.partial(self._answer, handler.handle_request)
        served = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "dflash-hf"}
        models.process_model_name = functools.partial(_pinned, self.name)
        models.force_model = self.name  # requests are compared with it
        removed = "/reset", "/v1/audio/transcriptions"  # would unpack; for other models
        app.router.routes[:] = [route for route in app.router.routes if route.path not in removed]
        models.get_gen_models = lambda: [served]  # upstream lists the whole cache, but would not serve it

        def one_model(name: str) -> dict:
            _pinned(self.name, name)
            return served

        app.add_api_route("/v1/models/{name:path}", one_model)
        app.add_middleware(EndedWithItsClient)
        for kind in (StarletteHTTPException, RequestValidationError, Exception):
            app.add_exception_handler(kind, _as_openai_does)
        if self.api_key is not None:  # added last, so that web pages can read the rejection
            app.user_middleware.append(Middleware(WithKey, key=self.api_key))
        host, port = self.at.getsockname()[:2]

        def end(*_) -> None:  # until uvicorn handles signals; it raises them again when it is done
            self.server.should_exit = True

        before = signal.signal(signal.SIGTERM, end)
        try:
            self.say(f"serving {self.name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
            self.server.run(sockets=[self.at])
        finally:
            signal.signal(signal.SIGTERM, before)

    async def _answer(self, handle: Callable, body: dict, request_id: str):
        """
        As upstream, but with an error message for invalid requests, which upstream drops silently or misinterprets.
        """
        from fastapi import HTTPException
        from fastapi.responses import JSONResponse, StreamingResponse

        _pinned(self.name, body.get("model") or self.name)  # upstream's 400 is OpenAI's 404
        for name, plain in _NOT_SERVED.items():
            value = body.get(name)  # logprobs=0 asks for something, logprobs=False does not
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in plain):
                raise HTTPException(400, f"{name}={value!r} is not supported; leave it out.")
        if body.get("tool_choice") == "none":
            body.pop("tools", None)
        if body.get("tools") and not self.takes_tools:
            raise HTTPException(400, f"The chat template of {self.name} does not support tools; leave `tools` out.")
        messages = body.get("messages", [])
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise HTTPException(400, f"messages={messages!r} must be a list of objects with `role` and `content`.")
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise HTTPException(400, f"stream_options={options!r} must be an object.")
        body.setdefault("stream", False)  # OpenAI's default; upstream's `/v1/responses` streams
        try:
            answer = await handle(body, request_id)
            if "input" in body:  # of `/v1/responses`
                return answer
            if isinstance(answer, StreamingResponse):
                answer.body_iterator = _events(answer.body_iterator, bool(options.get("include_usage")))
            elif body["stop"]:
                answer = JSONResponse(_cut(json.loads(answer.body), body["stop"]))
            return answer
        except HTTPException:
            raise
        except Exception as error:
            ours = isinstance(error, RuntimeError | OSError | MemoryError)
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise HTTPException(500 if ours else 400, one_line(f"{kind}{error}")) from error


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


async def _events(events: AsyncIterator[str], include_usage: bool) -> AsyncIterator[str]:
    """Upstream's stream, with an error, the usage and the end as OpenAI clients expect them."""
    async for text in events:
        if include_usage and '"usage":{' in text:  # quotes in an answer are escaped
            last = json.loads(text.removeprefix("data: "))
            usage = {"choices": [], "usage": last.pop("usage")}
            text = f"data: {json.dumps(last)}\n\ndata: {json.dumps({**last, **usage})}\n\n"
        yield _STREAM_ERROR.sub(r'data: {"error": {"message": \1, "type": "server_error"}}', text)
    yield "data: [DONE]\n\n"


def _cut(answer: dict, stops: list[str]) -> dict:
    """An answer without the stop string, which upstream leaves there."""
    choice = answer["choices"][0]
    of, name = (choice["message"], "content") if "message" in choice else (choice, "text")
    of[name] = without_stop(of[name], stops)
    return answer


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


def _settings(build: Callable, default_stops, body: dict, *args, **kwargs):
    """
    The settings of a request. Upstream seeds torch as soon as a request arrives, in the middle of another request's
    answer, ignores the temperature if the model's own settings are greedy, and fails on integer biases and on empty
    stops.
    """
    seed = body.pop("seed", None)
    if seed is not None and type(seed) is not int:
        raise ValueError(f"seed={seed!r} must be a whole number.")
    temperature = None if body.get("temperature") is None else float(body["temperature"])
    if temperature is not None and not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature:g} must be 0, for greedy decoding, or a positive number.")
    stop, biases = body.get("stop") or [], body.get("logit_bias") or {}
    stops = stop if isinstance(stop, list) else [stop]
    if not all(isinstance(text, str) for text in stops):
        raise ValueError(f"stop={stop!r} must be a string or a list of strings.")
    if not isinstance(biases, dict):
        raise ValueError(f"logit_bias={biases!r} must be an object of token ids and their biases.")
    body["stop"] = [text for text in stops if text] or None
    body["logit_bias"] = None  # upstream ignores it in `/v1/completions`
    config = build(body, *args, **kwargs)
    ends, config.stop_strings = config.stop_strings or default_stops, None
    config._stops = body["stop"] = [ends] if isinstance(ends, str) else ends
    if biases:
        config.sequence_bias = {(int(token),): float(bias) for token, bias in biases.items()}
    config._seed = None if seed is None else seed % 2**32  # numpy's limit; OpenAI's seeds have 64 bits
    config.do_sample = bool(config.do_sample) if temperature is None else temperature > 0
    return config


class DraftedManager(GenerateManager):
    """
    Upstream's inference thread of a model, for requests that decode with a drafter; requests that would wait for it
    are batched if that is faster. Each request has its own thread, which waits for one or the other.
    """

    def __init__(self, target, draft, say: Callable[[str], None]):
        super().__init__()
        self.draft, self.say, self.together = draft, say, Together(target)

    def try_out(self, target) -> None:
        """Generate a few tokens in the inference thread, so that errors appear before the first request."""
        ids = torch.tensor([[0, 1]], device=target.device)
        options = {"max_new_tokens": 4, "do_sample": False, "assistant_model": self.draft}
        self.alone(target.generate, ids, attention_mask=torch.ones_like(ids), **options)

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        """As upstream, with the drafted request in place of the model."""
        request = _Request(self, model, inputs, gen_config, request_id)
        return super().generate_streaming(request, processor, inputs, gen_config, request_id, response_parser)

    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        """As upstream, but a cancelled request stops decoding."""
        request = _Request(self, model, inputs, gen_config, request_id)
        try:
            return await super().generate_non_streaming(request, processor, inputs, gen_config, request_id)
        except asyncio.CancelledError:
            request.gone.set()
            raise

    def alone(self, function: Callable, *args, **kwargs):
        """Call a function in the inference thread."""
        return super().submit(function, *args, **kwargs).result()

    def submit(self, fn, *args, **kwargs) -> Future:
        """As upstream, in a separate thread."""
        future = Future()

        def run():
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future

    def async_submit(self, fn, *args, **kwargs):
        """As upstream; the thread may set a result or an error that nothing awaits any more."""
        future = asyncio.wrap_future(self.submit(fn, *args, **kwargs))
        future.add_done_callback(asyncio.Future.exception)  # retrieved, or asyncio would print it
        return asyncio.shield(future)

    def stop(self) -> None:
        self.together.stop()


class _Left(Exception):
    """Ends a call of `generate`, or a part in a batch: the answer is complete, or continues in a batch."""


class _Request:
    """
    Takes the model's place in an upstream request: `generate` with the drafter or in a batch, timed and logged.

    Raises:
        `HTTPException`: 400, the prompt is empty or leaves no room for an answer.
    """

    def __init__(self, manager: DraftedManager, model, inputs, settings, name: str):
        from fastapi import HTTPException

        self.manager, self.model, self.name, self.together = manager, model, name, manager.together
        self.gone, self.arrived, self.start = threading.Event(), time.perf_counter(), None
        self.seed, self.stops = vars(settings).pop("_seed", None), vars(settings).pop("_stops", None)
        self.prompt = inputs["input_ids"].shape[-1]
        if not self.prompt:
            raise HTTPException(400, "The prompt is empty.")
        try:
            settings.max_new_tokens = room_for_answer(model, self.prompt, settings.max_new_tokens)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        self.settings, ends = settings, settings.eos_token_id
        self.ends = ends if isinstance(ends, list) else [ends]
        self.kind = None if self.seed is not None else self.together.kind_of(inputs, settings)
        self.loop = asyncio.get_running_loop()
        self.lengths: list[int] = []  # tokens of each verification
        self.ids: list[int] = []  # the prompt, and the part of the answer sent so far
        self.drafting = self.batched = self.repeats = self.finished = self.stopped = False

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def generate(self, streamer=None, **kwargs):
        """Runs in the request's own thread, which waits for the inference thread or for a batch."""
        from fastapi import HTTPException

        self.streamer = streamer
        try:
            self.completes = CompletesStop(kwargs["tokenizer"].decode, self.stops) if self.stops else None
            if streamer is not None and self.stops:
                streamer._enqueue = UpToStop(streamer._enqueue, self.stops)
            with self.together.request(self.kind is not None, self.seed is not None and self.settings.do_sample):
                while not self.finished:
                    if not (self._joins() and self._in_batch(kwargs)):
                        self.manager.alone(self._drafted, kwargs)
            if self.stopped or self.ids[-1] in self.ends:
                self.settings.max_new_tokens = None  # upstream's `finish_reason` of an answer this long is `length`
            if streamer is not None:
                streamer.end()
        except _GenerationCancelled:
            self._log("; the client disconnected")
            raise
        except Exception as error:
            self._log(f"; failed: {one_line(error)}")
            if streamer is not None:
                raise RuntimeError(json.dumps(one_line(error))[1:-1]) from error  # upstream puts it between quotes
            if isinstance(error, ValueError):  # caused by the request
                raise
            raise HTTPException(500, one_line(f"{type(error).__name__}: {error}")) from error
        self._log(", together with others" if self.batched else "")
        return torch.tensor([self.ids])

    def _joins(self) -> bool:
        return self.kind is not None and self.together.pays(self.settings.do_sample)

    def _in_batch(self, kwargs: dict) -> bool:
        """Generate the rest of the answer in a batch; returns whether that was possible."""
        with self.together.joining(self.settings.do_sample) as joins:
            if not joins:
                return False
            self.start, self.batched = self.start or time.perf_counter(), True
            if not self.ids:
                self.put(kwargs["input_ids"])
            try:
                self.together.decode(self.kind, list(self.ids), self._rest(), self.loop, self.put)
            except _Left:  # at a stop string
                pass
            except BatchFailed:
                self.kind = None
                return False
        self.finished = True
        return True

    def _drafted(self, kwargs: dict) -> None:
        """Generate the answer, or the rest of it, with the drafter, until it is done or a batch is faster."""
        if self._joins():
            return
        self.start = self.start or time.perf_counter()
        if self.seed is not None:
            set_seed(self.seed)
        if self.ids:
            ids, self.repeats = torch.tensor([self.ids], device=self.model.device), True
            kwargs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "generation_config": self._rest()}
        begun, before, self.drafting = time.perf_counter(), len(self.ids) or self.prompt, True
        try:
            self.model.generate(**kwargs, streamer=self, assistant_model=self.manager.draft)
            self.finished = True
        except _Left:
            pass
        finally:
            self.drafting = False
        if not self.together.batched:
            self.together.note(1, len(self.ids) - before, time.perf_counter() - begun)

    def _rest(self):
        """The settings for the rest of the answer."""
        rest = copy.copy(self.settings)
        rest.max_new_tokens = self.settings.max_new_tokens - (len(self.ids) - self.prompt)
        return rest

    def put(self, value: torch.Tensor) -> None:
        """
        Streamer of the request: ends it at a stop string, if the client has disconnected, or if a batch is faster.
        """
        if self.gone.is_set():
            raise _GenerationCancelled
        if self.repeats:  # the prompt of a second call
            self.repeats = False
            return
        tokens = value.flatten().tolist()
        if self.completes and self.ids:
            end = next((n for n, token in enumerate(tokens, start=1) if self.completes(token)), None)
            tokens, self.stopped = tokens[:end], end is not None
        if self.streamer is not None:
            self.streamer.put(torch.tensor(tokens))
        if self.drafting and self.lengths:
            self.lengths[-1] += len(tokens)
        self.ids += tokens
        if self.stopped:
            self.finished = True
            raise _Left
        last = len(self.ids) - self.prompt >= self.settings.max_new_tokens or self.ids[-1] in self.ends
        if self.drafting and self._joins() and (len(self.ids) == self.prompt or not last):
            raise _Left

    def next_round(self) -> None:
        """The following tokens come from a new verification."""
        self.lengths.append(0)

    def end(self) -> None:
        """A call of `generate` has ended, but not necessarily the answer."""

    def _log(self, end: str) -> None:
        now = time.perf_counter()
        start = now if self.start is None else self.start
        tokens, seconds = max(len(self.ids) - self.prompt, 0), max(now - start, 1e-9)
        tau = f", tau {sum(self.lengths) / len(self.lengths):.2f}" if self.lengths else ""
        waited = f", after {start - self.arrived:.2f} s in the queue"
        speed = f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s"
        self.manager.say(f"{self.name[:8]}: {self.prompt} + {speed}{tau}{waited}{end}")


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
