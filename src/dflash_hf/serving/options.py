"""What a request's body asks for beyond what upstream's handlers understand."""

import functools
import json
import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import LogitsProcessor


# Upstream seeds torch as soon as a request arrives, in the middle of another's answer, fails on whole biases and empty
# stops, searches the vocabulary for stop strings in each call, and ignores the others.
_OURS = {"seed", "stop", "logit_bias", "logprobs", "top_logprobs", "tool_choice", "response_format", "text"}
_OURS_OF_RESPONSES = {"seed", "tool_choice", "text"}


@dataclass
class Options:
    """
    The fields of a body that upstream ignores although they change the answer, or misreads. Those that can only be
    `None`, or a single value, are not supported.
    """

    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[int, float] | None = None
    temperature: float | None = None
    messages: list[dict] | None = None
    stream_options: dict | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    tools: list[dict] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict | None = None
    response_format: dict | None = None
    text: dict | None = None
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    presence_penalty: Literal[0] | None = None
    modalities: list[Literal["text"]] | None = None
    echo: Literal[False] | None = None
    background: Literal[False] | None = None
    functions: None = None
    function_call: None = None
    suffix: None = None
    audio: None = None
    web_search_options: None = None
    previous_response_id: None = None
    conversation: None = None

    @classmethod
    def of(cls, body: dict) -> "Options":
        """
        From a request's body; what upstream would misread is taken out.

        Raises:
            `ValueError`: a field has a wrong value, or is not supported.
        """
        from pydantic import ValidationError

        try:
            options = _reader().validate_python(body)
        except ValidationError as error:
            name = error.errors()[0]["loc"][0]
            why = "; ".join(dict.fromkeys(one["msg"] for one in error.errors() if one["loc"][0] == name))
            raise ValueError(f"{name}={body[name]!r} is not supported: {why}.") from error
        if not 0 <= (options.temperature or 0) < math.inf:
            raise ValueError(f"temperature={options.temperature:g} must be 0, for greedy decoding, or positive.")
        if not 0 <= (options.likely or 0) <= 20:
            raise ValueError(f"{options.likely} log-probabilities are asked for; at most 20 are listed.")
        if options.top_logprobs is not None and not options.logprobs:
            raise ValueError(f"top_logprobs={options.top_logprobs} is not supported without logprobs=true in a chat.")
        if options.tool_choice == "none":
            body.pop("tools", None)
        for name in body.keys() & (_OURS_OF_RESPONSES if "input" in body else _OURS):
            del body[name]
        return options

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if text]

    @property
    def likely(self) -> int | None:
        """How many tokens' log-probabilities are listed in each place besides the chosen one's."""
        if self.logprobs is True:  # in a chat; a completion has a number
            return self.top_logprobs or 0
        return None if self.logprobs is False else self.logprobs

    @property
    def is_call(self) -> bool:
        """Whether the answer is the call of a tool."""
        return self.tool_choice not in (None, "auto", "none")

    def schema_of_answer(self) -> dict | None:
        """
        The JSON schema that the answer must follow.

        Raises:
            `ValueError`: the format is not supported, or the tool is unknown.
        """
        if self.is_call:
            tools = [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in self.tools or []]
            match self.tool_choice:
                case {"function": {"name": name}} | {"name": name}:
                    tools = [tool for tool in tools if tool.get("name") == name]
                case dict():
                    tools = []
            if not (calls := [_call_of(tool) for tool in tools if tool.get("name")]):
                raise ValueError(f"tool_choice={self.tool_choice!r} names none of the tools.")
            return calls[0] if len(calls) == 1 else {"anyOf": calls}
        match self.response_format or (self.text or {}).get("format") or {"type": "text"}:
            case {"type": "text"}:
                return None
            case {"type": "json_object"}:
                return {"type": "object"}
            case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
                return schema
            case {"type": "json_schema", "schema": dict(schema)}:
                return schema
            case asked:
                raise ValueError(f"response_format={asked!r} is not supported: text, json_object and json_schema are.")


@functools.cache
def _reader():
    from pydantic import TypeAdapter

    return TypeAdapter(Options)


def _call_of(tool: dict) -> dict:
    """The JSON schema of a tool's call."""
    properties = {"name": {"const": tool.get("name")}, "arguments": tool.get("parameters") or {"type": "object"}}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


class LogProbs(LogitsProcessor):
    """
    Records the log-probabilities of an answer's tokens, before the temperature.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        likely (`int`): Number of the likeliest tokens to list in each place.
    """

    def __init__(self, tokenizer, likely: int):
        self.tokenizer, self.likely = tokenizer, likely
        self.content: deque[dict] = deque()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        self.last = scores[0].log_softmax(-1)
        return scores

    def take(self, token: int) -> None:
        """The token that was chosen."""
        top = self.last.topk(self.likely).indices.tolist() if self.likely else []
        self.content.append({**self._entry(token), "top_logprobs": [self._entry(one) for one in top]})

    def _entry(self, token: int) -> dict:
        text = self.tokenizer.decode([token])
        return {"token": text, "logprob": max(float(self.last[token]), -9999.0), "bytes": [*text.encode()]}

    def since(self, chat: bool) -> dict | None:
        """The entries since the last call, if any, in the form of chats or in the older one of completions."""
        content = [self.content.popleft() for _ in range(len(self.content))]
        if chat or not content:
            return {"content": content} if content else None
        return {
            "tokens": [one["token"] for one in content],
            "token_logprobs": [one["logprob"] for one in content],
            "top_logprobs": [{top["token"]: top["logprob"] for top in one["top_logprobs"]} for one in content],
        }


class Grammars:
    """
    Compiles JSON schemas with XGrammar, if that is installed.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
    """

    def __init__(self, target, tokenizer):
        self.target, self.tokenizer, self.compiler = target, tokenizer, None

    def processor(self, schema: dict) -> LogitsProcessor:
        """
        A processor for one answer.

        Raises:
            `ValueError`: XGrammar is not installed, or does not take the schema.
        """
        try:
            import xgrammar
            from xgrammar.contrib.hf import LogitsProcessor as Grammar
        except ImportError as error:
            message = "response_format and a forced tool_choice are not supported without xgrammar; install it: "
            raise ValueError(f"{message}`pip install xgrammar`, or leave them out.") from error
        if self.compiler is None:
            ends = self.target.generation_config.eos_token_id
            size = self.target.config.get_text_config(decoder=True).vocab_size
            stops = {"stop_token_ids": ends} if ends is not None else {}
            known = xgrammar.TokenizerInfo.from_huggingface(self.tokenizer, vocab_size=size, **stops)
            self.compiler = xgrammar.GrammarCompiler(known)
        try:
            return Grammar(self.compiler.compile_json_schema(json.dumps(schema)))
        except RuntimeError as error:
            raise ValueError(f"The JSON schema cannot be followed: {error}") from error
