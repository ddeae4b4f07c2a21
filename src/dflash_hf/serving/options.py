"""What a request's body asks for beyond what upstream's handlers understand."""

import json
import math
from collections import deque
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, LogitsProcessor

from dflash_hf.serving.request import Request


# Fields that upstream ignores although they change the answer, and the values that change nothing.
_NOT_SERVED = {
    **dict.fromkeys(("n", "best_of"), (None, 1)),
    **dict.fromkeys(("echo", "background"), (None, False)),
    **dict.fromkeys(("functions", "function_call", "suffix", "audio", "web_search_options"), (None,)),
    **dict.fromkeys(("previous_response_id", "conversation"), (None,)),
    "presence_penalty": (None, 0),
    "modalities": (None, ["text"]),
}
_MOST_LIKELY = 20  # of `top_logprobs`, as in OpenAI's API


@dataclass
class Options:
    """
    Args:
        seed (`int`, *optional*): Of the request's samples.
        stops (`list[str]`): Stop strings.
        biases (`dict`): Biases by token id.
        temperature (`float`, *optional*): 0 is greedy.
        likely (`int`, *optional*): Number of tokens whose log-probabilities are listed in each place, besides the
            chosen one's.
        schema (`dict`, *optional*): JSON schema of the answer.
        tool (`bool`): Whether the answer is a call of a tool.

    Attributes:
        processors (`list[LogitsProcessor]`): Made from these options.
        request (`Request`, *optional*): The request that was made with them.
    """

    seed: int | None = None
    stops: list[str] = field(default_factory=list)
    biases: dict = field(default_factory=dict)
    temperature: float | None = None
    likely: int | None = None
    schema: dict | None = None
    tool: bool = False
    processors: list[LogitsProcessor] = field(default_factory=list)
    request: Request | None = None

    @classmethod
    def of(cls, body: dict) -> "Options":
        """
        From a request's body. What upstream would misread is taken out: it seeds torch as soon as a request arrives,
        in the middle of another's answer, fails on integer biases and empty stops, and searches the whole vocabulary
        for stop strings.

        Raises:
            `ValueError`: a field has a wrong value, or is not supported.
        """
        for name, plain in _NOT_SERVED.items():
            value = body.get(name)
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in plain):
                raise ValueError(f"{name}={value!r} is not supported; leave it out.")
        seed, stop, biases = body.pop("seed", None), body.pop("stop", None) or [], body.pop("logit_bias", None) or {}
        if seed is not None and type(seed) is not int:
            raise ValueError(f"seed={seed!r} must be a whole number.")
        temperature = None if body.get("temperature") is None else float(body["temperature"])
        if temperature is not None and not 0 <= temperature < math.inf:
            raise ValueError(f"temperature={temperature:g} must be 0, for greedy decoding, or a positive number.")
        stops = stop if isinstance(stop, list) else [stop]
        if not all(isinstance(text, str) for text in stops):
            raise ValueError(f"stop={stop!r} must be a string or a list of strings.")
        if not isinstance(biases, dict):
            raise ValueError(f"logit_bias={biases!r} must be an object of token ids and their biases.")
        schema, tool = _form(body)
        return cls(
            seed=None if seed is None else seed % 2**32,  # numpy's limit; OpenAI's seeds have 64 bits
            stops=[text for text in stops if text],
            biases={(int(token),): float(bias) for token, bias in biases.items()},
            temperature=temperature,
            likely=_likely(body),
            schema=schema,
            tool=tool,
        )

    def apply(self, settings: GenerationConfig) -> None:
        """Complete upstream's settings, which ignore the temperature if the model's own are greedy."""
        if self.biases:
            settings.sequence_bias = self.biases
        settings.do_sample = bool(settings.do_sample) if self.temperature is None else self.temperature > 0

    def logprobs(self) -> list[dict]:
        """The log-probabilities of the tokens since the last call, if they are asked for."""
        for one in self.processors:
            if isinstance(one, LogProbs):
                return [one.content.popleft() for _ in range(len(one.content))]
        return []


def _likely(body: dict) -> int | None:
    """`logprobs` and `top_logprobs` of a chat, or `logprobs` of a completion."""
    wanted, most = body.pop("logprobs", None), body.pop("top_logprobs", None)
    if "messages" not in body and type(wanted) is int:
        wanted, most = True, wanted
    if wanted not in (None, False, True) or (most is not None and not wanted) or "input" in body and wanted:
        name, value = ("top_logprobs", most) if most is not None else ("logprobs", wanted)
        raise ValueError(f"{name}={value!r} is not supported here; in a chat, pass logprobs=true with it.")
    if most is not None and (type(most) is not int or not 0 <= most <= _MOST_LIKELY):
        raise ValueError(f"top_logprobs={most!r} must be a whole number from 0 to {_MOST_LIKELY}.")
    return (most or 0) if wanted else None


def _form(body: dict) -> tuple[dict | None, bool]:
    """The schema that an answer must follow, and whether it is the call of a tool."""
    choice = body.pop("tool_choice", None)
    tools = [tool.get("function", tool) for tool in body.get("tools") or [] if isinstance(tool, dict)]
    if choice == "none":
        body.pop("tools", None)
    elif choice not in (None, "auto"):
        named = choice.get("function", choice).get("name") if isinstance(choice, dict) else None
        wanted = [tool for tool in tools if choice == "required" or tool.get("name") == named]
        if not wanted:
            raise ValueError(f"tool_choice={choice!r} names none of the tools.")
        calls = [
            _object(name={"const": tool["name"]}, arguments=tool.get("parameters") or {"type": "object"})
            for tool in wanted
        ]
        return calls[0] if len(calls) == 1 else {"anyOf": calls}, True
    asked = body.pop("response_format", None) or (body.pop("text", None) or {}).get("format") or {"type": "text"}
    kind = asked.get("type") if isinstance(asked, dict) else None
    if kind == "json_schema":
        schema = asked.get("json_schema", asked).get("schema")
        if isinstance(schema, dict):
            return schema, False
    elif kind in ("text", "json_object"):
        return (None if kind == "text" else {"type": "object"}), False
    raise ValueError(f"response_format={asked!r} is not supported; use text, json_object or json_schema.")


def _object(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


class LogProbs(LogitsProcessor):
    """
    Records the log-probabilities of an answer's tokens, before the temperature.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        likely (`int`): Number of the likeliest tokens to list in each place.

    Attributes:
        content (`deque[dict]`): An entry for each token, as in OpenAI's chats, until it is taken.
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


def legacy(content: list[dict]) -> dict:
    """The same in the older form of completions."""
    texts = [one["token"] for one in content]
    return {
        "tokens": texts,
        "token_logprobs": [one["logprob"] for one in content],
        "top_logprobs": [{top["token"]: top["logprob"] for top in one["top_logprobs"]} for one in content],
        "text_offset": [sum(map(len, texts[:place])) for place in range(len(texts))],
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
