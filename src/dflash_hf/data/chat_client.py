"""Answers of an OpenAI-compatible server, by the `openai` client, which retries when the server is busy."""

import os
from urllib.parse import urlsplit

from dflash_hf.data.messages import UnusableRow
from dflash_hf.terminal import needs, one_line


RETRIES = 5  # of a request
_OF_THE_ROW = (400, 413, 422)  # other conversations may be answered
_HINTS = {401: "set OPENAI_API_KEY", 404: "does it serve this model there?"}


class ServerError(OSError):
    """The server cannot be reached, or rejects every request; the message has the remedy."""


class NoAnswer(UnusableRow):
    """No answer came in time."""


class ChatClient:
    """
    A client of a server.

    Args:
        url (`str`): `http://host:port` or `http://user:password@host:port`, with or without `/v1`. Without a password,
            the key is that of `OPENAI_API_KEY`.
        options (`dict`): Fields of each request, such as `model` and `max_tokens`.
        template_kwargs (`dict`): Arguments of the chat template.
        timeout (`float`): Seconds for one answer.

    Raises:
        `ImportError`: `openai` is not installed.
        `ValueError`: the address is invalid.
    """

    def __init__(self, url: str, options: dict, template_kwargs: dict, timeout: float = 600.0):
        with needs("--server needs `openai`", "serving"):
            import openai

        parts = urlsplit(url)
        shown = parts.netloc.rpartition("@")[2]  # without a password
        if parts.scheme not in ("http", "https") or not shown or parts.query or parts.fragment:
            shown = "***" if "@" in url else url
            raise ValueError(f"server={shown!r} must be an address such as http://127.0.0.1:8000, without a query.")
        self.where, self.errors = f"{parts.scheme}://{shown}", openai
        self.options, self.template_kwargs = options, template_kwargs
        key = os.environ.get("OPENAI_API_KEY") or "none"
        base = f"{url.rstrip('/').removesuffix('/v1')}/v1"
        plain = openai.DefaultHttpxClient(follow_redirects=False)  # the key stays with this server
        self.client = openai.OpenAI(
            base_url=base, api_key=key, timeout=timeout, max_retries=RETRIES, http_client=plain
        )

    def answer(
        self, messages: list[dict], tools: list | None, template_kwargs: dict, seed: int | None = None
    ) -> tuple[dict, str]:
        """
        Request an answer, sampled with a seed if one is given; returns the message and why it ended.

        Raises:
            `UnusableRow`: this conversation is rejected, or its answer takes too long (`NoAnswer`).
            `ServerError`: every conversation would be.
        """
        body, kwargs = {**self.options, "messages": messages}, {**self.template_kwargs, **template_kwargs}
        if tools:
            body["tools"] = tools
        if seed is not None:
            body["seed"] = seed
        if kwargs:
            body["extra_body"] = {"chat_template_kwargs": kwargs}
        try:
            choice = self.client.chat.completions.create(**body).model_dump(exclude_none=True)["choices"][0]
            return dict(choice["message"]), choice.get("finish_reason") or "stop"
        except self.errors.APIStatusError as error:
            status, detail = error.status_code, one_line(error.response.text, 300)
            if target := error.response.headers.get("location"):
                detail = f"it redirects to {target}, which is asked if it is given as the address"
            if status in _OF_THE_ROW:
                raise UnusableRow(f"the server answers {status}: {detail}") from error
            hint = _HINTS.get(status, f"tried {RETRIES + 1} times; see its log" if status >= 429 else "see its log")
            raise ServerError(f"{self.where} answers {status}: {detail}; {hint}.") from error
        except self.errors.APITimeoutError as error:
            late = f"{self.where} gives no answer within {self.client.timeout:g} seconds, tried {RETRIES + 1} times"
            raise NoAnswer(f"{late}; raise --timeout, or lower --concurrency or --max-new-tokens") from error
        except self.errors.APIConnectionError as error:
            reason = one_line(error.__cause__ or error, 100)
            raise ServerError(
                f"{self.where} does not answer ({reason}), tried {RETRIES + 1} times; is the server still running?"
            ) from error
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError, self.errors.APIError) as error:
            raise ServerError(f"{self.where} did not return a chat completion.") from error
