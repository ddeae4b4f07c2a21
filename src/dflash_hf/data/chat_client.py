"""A client of `/v1/chat/completions`: many conversations in parallel, retried when the server is busy."""

import base64
import contextlib
import http.client
import json
import os
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from urllib.parse import unquote


_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)  # busy, starting or overloaded
# Scheme, user and password, and the rest: host or IPv6 address, port and path.
_ADDRESS = re.compile(r"(https?://)(?:([^/?#@]*)@)?((?:[\w.-]+|\[[\da-fA-F:.]+\])(?::\d+)?(?:/[^?#@]*)?)")
_OF_THE_ROW = (400, 413, 422)  # other conversations may be answered


class ServerError(OSError):
    """The server cannot be reached, or rejects every request; the message has the remedy."""


class RequestRefused(ValueError):
    """The server rejects this conversation; the message has the reason."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: it would take the key to another host."""

    def redirect_request(self, *_):
        return None


class Server:
    """
    An OpenAI-compatible server. As a string, it is the address without user and password.

    Args:
        url (`str`): `http://host:port` or `http://user:password@host:port`, with or without `/v1`.

    Raises:
        `ValueError`: the address is invalid.
    """

    def __init__(self, url: str):
        match = _ADDRESS.fullmatch(url)
        if match is None:
            shown = url if re.fullmatch(r"[\w.-]+(:\d+)?", url) else "***"  # anything else may hold a password
            raise ValueError(f"server={shown!r} must be an address such as http://127.0.0.1:8000, without a query.")
        scheme, user, place = match.groups(default="")
        self.address = (scheme + place).rstrip("/").removesuffix("/v1")
        self._user = unquote(user)

    def __str__(self) -> str:
        return self.address

    def post(self, body: dict, timeout: float = 600.0):
        """The response to a request for a completion, with the password or else the key of `OPENAI_API_KEY`."""
        headers = {"Content-Type": "application/json"}
        if self._user:
            headers["Authorization"] = f"Basic {base64.b64encode(self._user.encode()).decode()}"
        elif key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{self}/v1/chat/completions", json.dumps(body).encode(), headers)
        return urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout)


@dataclass
class ChatClient:
    """
    Asks a server for answers.

    Args:
        server (`Server`): The server.
        model (`str`): The name under which it serves the target.
        options (`dict`): Further fields of each request, such as `max_tokens`.
        retries (`int`): Attempts after the first; waits 1, 2, 4, ... seconds, at most 30.
        timeout (`float`): Seconds for one answer.
    """

    server: Server
    model: str
    options: dict
    retries: int = 5
    timeout: float = 600.0

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
                with self.server.post(body, self.timeout) as response:
                    choice = json.load(response)["choices"][0]
                return {**choice, "message": {**choice["message"]}}  # a `TypeError` if it is none
            except urllib.error.HTTPError as error:
                detail = detail_of(error)
                if error.code in _OF_THE_ROW:
                    raise RequestRefused(f"the server answers {error.code}: {detail}") from error
                if error.code not in _TRY_AGAIN:
                    hint = {401: "set OPENAI_API_KEY", 404: f"does it serve the model {self.model!r} there?"}
                    remedy = hint.get(error.code, "see its log")
                    if error.code in range(300, 400):
                        remedy = f"if you trust it, give the address that it redirects to, {error.headers['Location']}"
                    raise ServerError(f"{self.server} answers {error.code}: {detail}; {remedy}.") from error
                reason = f"answers {error.code}: {detail}"
            except (LookupError, TypeError, UnicodeDecodeError, RecursionError, json.JSONDecodeError) as error:
                raise ServerError(f"{self.server} did not return a chat completion.") from error
            except (OSError, http.client.HTTPException) as error:  # refused, reset, timed out, cut off
                reason = f"does not answer ({getattr(error, 'reason', None) or error or type(error).__name__})"
            if attempt < self.retries:
                time.sleep(min(30, 2**attempt) * random.uniform(0.5, 1))
        raise ServerError(
            f"{self.server}/v1/chat/completions {reason}, tried {self.retries + 1} times; is the server still running?"
        )


def detail_of(error: urllib.error.HTTPError) -> str:
    """What a server says of an error; nothing if it is cut off."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return error.read(1000).decode(errors="replace").strip()[:300]
    return ""


def in_parallel(ask: Callable, items: Iterable[tuple], concurrency: int) -> Iterator[tuple]:
    """
    Call `ask(item[1])` for each `item` in threads, `concurrency` at a time.

    Yields:
        `(item, result)` in the order of completion; the result may be a `RequestRefused`.

    Raises:
        The first other exception of `ask`; running calls are abandoned.
    """
    failed: list[Exception] = []

    def outcome(item: tuple) -> tuple:
        if failed:  # a server that rejects everything is not asked again
            raise failed[0]
        try:
            return item, ask(item[1])
        except RequestRefused as refusal:
            return item, refusal
        except Exception as error:
            failed.append(error)
            raise

    # Its threads are daemons: a server that hangs must not keep an interrupted process alive.
    with ThreadPool(concurrency) as pool:
        yield from pool.imap_unordered(outcome, items)
