"""Responses of an OpenAI-compatible server, by the `openai` client, which retries when the server is busy."""

import json
import os
from urllib.parse import urlsplit

from dflash_hf._io.errors import one_line, requires_extra
from dflash_hf.data.messages import UnusableRow


RETRIES = 5  # of each request, by the client
_REFUSALS = (400, 413, 422)  # statuses that concern one conversation; others may be answered
_HINTS = {401: "set OPENAI_API_KEY", 404: "does it serve this model there?"}


class ServerError(OSError):
    """The server cannot be reached, or rejects every request; the message has the remedy."""


class NoAnswer(UnusableRow):
    """The server has not answered in time."""


class ChatClient:
    """
    A client of an OpenAI-compatible server.

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
        with requires_extra("Querying a server needs `openai`", "serving"):
            import openai

        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]  # without a password
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            shown = "***" if "@" in url else url
            raise ValueError(f"server={shown!r} must be an address such as http://127.0.0.1:8000, without a query.")
        self.address = f"{parts.scheme}://{host}"
        self.openai = openai
        self.options = options
        self.template_kwargs = template_kwargs
        self.client = openai.OpenAI(
            base_url=f"{url.rstrip('/').removesuffix('/v1')}/v1",
            api_key=os.environ.get("OPENAI_API_KEY") or "none",
            timeout=timeout,
            max_retries=RETRIES,
            http_client=openai.DefaultHttpxClient(follow_redirects=False),  # the key stays with this server
        )

    def answer(
        self, messages: list[dict], tools: list | None, template_kwargs: dict, seed: int | None = None
    ) -> tuple[dict, str]:
        """
        Request the next message of a conversation, sampled with a seed if one is given.

        Returns:
            The message, and its finish reason.

        Raises:
            As [`completion`].
        """
        fields: dict = {}
        if tools:
            fields["tools"] = tools
        if seed is not None:
            fields["seed"] = seed
        kwargs = {**self.template_kwargs, **template_kwargs}
        if kwargs:
            fields["chat_template_kwargs"] = kwargs
        choice = self.completion(messages, fields)["choices"][0]
        return dict(choice["message"]), choice.get("finish_reason") or "stop"

    def completion(self, messages: list[dict], fields: dict) -> dict:
        """
        Request the next message of a conversation.

        Args:
            messages (`list[dict]`): The conversation.
            fields (`dict`): Further fields of the request; they may be the server's own.

        Returns:
            `dict`: The chat completion, with the fields that are the server's own, and at least one choice with a
            message.

        Raises:
            `UnusableRow`: this conversation is rejected, or its answer takes too long (`NoAnswer`).
            `ServerError`: every conversation would be rejected.
        """
        try:
            answer = self.client.chat.completions.create(**self.options, messages=messages, extra_body=fields)
            completion = answer.model_dump(exclude_none=True)
            dict(completion["choices"][0]["message"])  # raises if it is no chat completion
            return completion
        except self.openai.APIStatusError as error:
            status = error.status_code
            detail = one_line(error.response.text, 300)
            redirect = error.response.headers.get("location")
            if redirect:
                detail = f"it redirects to {redirect}, which is queried if it is given as the address"
            if status in _REFUSALS:
                raise UnusableRow(f"the server answers {status}: {detail}") from error
            hint = _HINTS.get(status, f"tried {RETRIES + 1} times; see its log" if status >= 429 else "see its log")
            raise ServerError(f"{self.address} answers {status}: {detail}; {hint}.") from error
        except self.openai.APITimeoutError as error:
            late = f"{self.address} gives no answer within {self.client.timeout:g} seconds, tried {RETRIES + 1} times"
            raise NoAnswer(f"{late}; raise timeout, or lower concurrency or max_new_tokens") from error
        except self.openai.APIConnectionError as error:
            reason = one_line(error.__cause__ or error, 100)
            raise ServerError(
                f"{self.address} does not answer ({reason}), tried {RETRIES + 1} times; is the server still running?"
            ) from error
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError, self.openai.APIError) as error:
            raise ServerError(f"{self.address} did not return a chat completion.") from error

    def page(self, path: str) -> str | None:
        """
        The text of another page of the server, such as `/metrics`; `None` if it has none.

        Raises:
            `ServerError`: the server cannot be reached, or requires a key.
        """
        client = self.client.with_options(max_retries=0)
        try:
            return client.get(f"{str(client.base_url).removesuffix('/v1/')}{path}", cast_to=str)
        except self.openai.APIStatusError as error:
            if error.status_code in (401, 403):
                raise ServerError(f"{self.address} answers {error.status_code}: {_HINTS[401]}.") from error
            return None
        except self.openai.APIConnectionError as error:
            reason = one_line(error.__cause__ or error, 100)
            raise ServerError(f"{self.address} does not answer ({reason}); is the server still running?") from error

    def only_model(self) -> str:
        """
        The name of the server's only model.

        Raises:
            `ValueError`: it lists several, or none; names them.
            `ServerError`: it has no list of models.
        """
        try:
            names = [model["id"] for model in json.loads(self.page("/v1/models") or "")["data"]]
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError(
                f"{self.address} has no list of models at /v1/models; name the model as `target=...`, and check the "
                "address."
            ) from error
        if len(names) != 1:
            raise ValueError(
                f"{self.address} lists {len(names)} models ({', '.join(names)}); name one as `target=...`."
            )
        return names[0]
