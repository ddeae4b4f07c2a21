"""A client of `/v1/chat/completions`: many conversations in parallel, retried when the server is busy."""

import http.client
import json
import os
import queue
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)  # busy, starting or overloaded
_OF_THE_ROW = (400, 413, 422)  # other conversations may be answered


class ServerError(OSError):
    """The server cannot be reached, or rejects every request; the message has the remedy."""


class RequestRefused(ValueError):
    """The server rejects this conversation; the message has the reason."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: it would take the key to another host."""

    def redirect_request(self, *_):
        return None


def post(url: str, body: dict, timeout: float = 600.0):
    """The response to a request of JSON, with the key of `OPENAI_API_KEY` if it is set."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout)


@dataclass
class ChatClient:
    """
    An OpenAI-compatible server.

    Args:
        url (`str`): `http://host:port`, with or without `/v1`.
        model (`str`): The name under which it serves the target.
        options (`dict`): Further fields of each request, such as `max_tokens`.
        retries (`int`): Attempts after the first; waits 1, 2, 4, ... seconds, at most 30.
        timeout (`float`): Seconds for one answer.

    Raises:
        `ValueError`: the address is invalid.
    """

    url: str
    model: str
    options: dict
    retries: int = 5
    timeout: float = 600.0

    def __post_init__(self):
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"server={self.url!r} must be an address such as http://127.0.0.1:8000.")
        self.url = self.url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"

    def answer(self, messages: list[dict], tools: list | None = None) -> dict:
        """
        Request an answer; returns its first choice, with `message` and `finish_reason`.

        Raises:
            `RequestRefused`: this conversation is rejected.
            `ServerError`: every conversation would be.
        """
        body = {"model": self.model, "messages": messages, **({"tools": tools} if tools else {}), **self.options}
        for attempt in range(self.retries + 1):
            try:
                with post(self.url, body, self.timeout) as response:
                    return json.load(response)["choices"][0]
            except urllib.error.HTTPError as error:
                detail = error.read().decode(errors="replace").strip()[:300]
                if error.code in _OF_THE_ROW:
                    raise RequestRefused(f"the server answers {error.code}: {detail}") from error
                if error.code not in _TRY_AGAIN:
                    hint = {401: "set OPENAI_API_KEY", 404: f"does it serve the model {self.model!r} there?"}
                    remedy = hint.get(error.code, "see its log")
                    if error.code in range(300, 400):
                        remedy = f"if you trust it, give the address that it redirects to, {error.headers['Location']}"
                    raise ServerError(f"{self.url} answers {error.code}: {detail}; {remedy}.") from error
                reason = f"answers {error.code}: {detail}"
            except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
                raise ServerError(f"{self.url} did not return a chat completion.") from error
            except (OSError, http.client.HTTPException) as error:  # refused, reset, timed out, cut off
                reason = f"does not answer ({getattr(error, 'reason', None) or error or type(error).__name__})"
            if attempt < self.retries:
                time.sleep(min(30, 2**attempt) * random.uniform(0.5, 1))
        raise ServerError(f"{self.url} {reason}, tried {self.retries + 1} times; is the server still running?")


def in_parallel(ask: Callable, items: Iterable[tuple], concurrency: int) -> Iterator[tuple]:
    """
    Call `ask(item[1])` for each `item` in threads, `concurrency` at a time.

    Yields:
        `(item, result)` in the order of completion; the result may be a `RequestRefused`.

    Raises:
        The first other exception of `ask`; running calls are abandoned.
    """
    todo, done = queue.SimpleQueue(), queue.SimpleQueue()

    def work():
        while (item := todo.get()) is not None:
            try:
                done.put((item, ask(item[1]), None))
            except RequestRefused as refusal:
                done.put((item, refusal, None))
            except BaseException as error:  # raised again below
                done.put((item, None, error))

    # Daemons: a server that hangs must not keep an interrupted process alive.
    for _ in range(concurrency):
        threading.Thread(target=work, daemon=True).start()
    items = iter(items)
    under_way = 0
    try:
        while True:
            while under_way < concurrency and (item := next(items, None)) is not None:
                todo.put(item)
                under_way += 1
            if under_way == 0:
                return
            item, result, error = done.get()
            under_way -= 1
            if error is not None:
                raise error
            yield item, result
    finally:
        for _ in range(concurrency):
            todo.put(None)
