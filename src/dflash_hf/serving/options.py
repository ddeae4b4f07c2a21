"""What a request's body asks for beyond what upstream's handlers understand."""

import json
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field, StrictInt, ValidationError
from transformers import GenerationConfig, LogitsProcessor

from dflash_hf.serving.token_bytes import TokenBytes
from dflash_hf.targets.features import cache_argument, empty_cache, input_device


# Upstream seeds torch as soon as a request arrives, in the middle of another's answer, fails on whole biases and empty
# stops, searches the vocabulary for stop strings in each call, and ignores the others or does not know them.
_HANDLED_HERE = {"seed", "stop", "logit_bias", "logprobs", "top_logprobs", "tool_choice", "response_format", "text"}
_HANDLED_HERE |= {"n", "echo", "top_k", "min_p", "repetition_penalty", "repeat_penalty"}
# What would change the answer and is not done, with the value that changes nothing, if there is one.
_FIXED = dict.fromkeys(("functions", "function_call", "suffix", "audio", "image", "moderation", "verbosity"))
_FIXED |= dict.fromkeys(
    ("reasoning", "reasoning_effort", "web_search_options", "max_tool_calls", "context_management")
)
_FIXED |= {"previous_response_id": None, "conversation": None, "best_of": 1, "presence_penalty": 0}
_FIXED |= {"modalities": ["text"], "background": False, "truncation": "disabled"}
# Of vLLM and SGLang, and of llama.cpp.
_FIXED |= {"min_tokens": 0, "ignore_eos": False, "use_beam_search": False, "skip_special_tokens": True}
_FIXED |= {"add_generation_prompt": True, "continue_final_message": False, "include_stop_str_in_output": False}
_FIXED |= {"spaces_between_special_tokens": True, "stop_token_ids": None, "prompt_logprobs": None}
_FIXED |= {
    "dynatemp_range": 0,
    "xtc_probability": 0,
    "typ_p": 1,
    "typical_p": 1,
    "dry_multiplier": 0,
    "mirostat": 0,
}
# What changes no answer here: of beams, of samplers that are off, and what a server should log, keep or report.
_IGNORED = {"length_penalty", "early_stopping", "dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length"}
_IGNORED |= {"dry_penalty_last_n", "dry_sequence_breakers", "repeat_last_n", "samplers", "backend_sampling"}
_IGNORED |= {"timings_per_token", "return_progress", "cache_prompt", "id_slot", "reasoning_format", "priority"}
_IGNORED |= {"request_id", "cache_salt", "user", "metadata", "store", "service_tier", "safety_identifier"}
_IGNORED |= {"prompt_cache_key", "prompt_cache_retention", "prediction"}
_MOST_CHOICES = 8  # of a prompt; they are decoded in one batch
_MOST_PROMPTS = 256
_PIECE = 512  # tokens of a prompt that are scored at a time
_COLDEST = 1e-5  # below it logits overflow, and a sample is the likeliest token anyway
Length = Annotated[int, Field(ge=1)]
Limit = Annotated[int, Field(ge=-1)]  # -1: as many as there is room for
Id = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, Field(ge=0.01, le=100)]
Stop = Annotated[str, Field(max_length=512)]  # the end of an answer as long as this is decoded again for each token
Stops = Annotated[list[Stop], Field(max_length=64)]
_GENERATED_BY = {"transformers_version", "_from_model_config"}  # what `GenerationConfig.to_json_string` adds


class Settings(BaseModel, extra="forbid", strict=True):
    """
    What a body's `generation_config` may set: how tokens are chosen, and when an answer ends. Not that several answers
    are kept at once (beams), that other code, caches or models are loaded, or that scores and states are returned.
    """

    do_sample: bool | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    epsilon_cutoff: Annotated[float, Field(ge=0, lt=1)] | None = None
    eta_cutoff: Annotated[float, Field(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    no_repeat_ngram_size: Annotated[int, Field(ge=0)] | None = None
    bad_words_ids: Annotated[list[Annotated[list[Id], Field(min_length=1)]], Field(max_length=1000)] | None = None
    suppress_tokens: list[Id] | None = None
    begin_suppress_tokens: list[Id] | None = None
    max_new_tokens: Length | None = None
    max_length: Length | None = None
    min_new_tokens: Annotated[int, Field(ge=0)] | None = None
    min_length: Annotated[int, Field(ge=0)] | None = None
    max_time: Annotated[float, Field(gt=0)] | None = None
    stop_strings: Stop | Stops | None = None
    eos_token_id: Id | list[Id] | None = None
    pad_token_id: Id | None = None
    bos_token_id: Id | None = None
    use_cache: bool | None = None

    @classmethod
    def check(cls, text: str) -> dict:
        """
        The settings of a body's `generation_config`. Those that have their default change nothing, and are left out.

        Raises:
            `ValueError`: it is no JSON object, or has a setting that a request may not have.
        """
        try:
            settings = json.loads(text)
        except ValueError as error:
            raise ValueError(f"generation_config is not JSON ({error}).") from error
        if not isinstance(settings, dict):
            raise ValueError("generation_config must be a JSON object, as a string.")
        defaults = GenerationConfig().to_dict()
        changed = {}
        for name, value in settings.items():
            if value is None or name in _GENERATED_BY:
                continue
            if name in cls.model_fields or value != _NEUTRAL.get(name, defaults.get(name)):
                changed[name] = value
        try:
            cls.model_validate(changed)
        except ValidationError as error:
            name, why = _first_of(error)
            if name in cls.model_fields:
                raise ValueError(f"generation_config has {name}={changed[name]!r}: {why}.") from error
            remedy = "ask for n answers with `n`; " if name == "num_return_sequences" else ""
            raise ValueError(
                f"generation_config has {name}={changed[name]!r}, which a request may not set; {remedy}leave it out. "
                f"It may set {', '.join(cls.model_fields)}."
            ) from error
        return changed


# Values that change nothing of settings that a request may not have.
_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "num_beam_groups": 1, "length_penalty": 1.0}
_NEUTRAL |= {"early_stopping": False, "diversity_penalty": 0.0, "encoder_repetition_penalty": 1.0}


def _first_of(error: ValidationError) -> tuple[str, str]:
    """The first field with a wrong value, and what is wrong with it."""
    name = error.errors()[0]["loc"][0]
    messages = [detail["msg"] for detail in error.errors() if detail["loc"][0] == name]
    return str(name), "; ".join(dict.fromkeys(messages))


class Options(BaseModel):
    """
    The fields of a body that upstream ignores although they change the answer, misreads, or does not name in an error.
    """

    messages: list[dict] | None = None
    prompt: str | list[StrictInt] | list[str] | list[list[StrictInt]] | None = None
    input: str | list[dict] | None = None
    instructions: str | list[dict] | None = None
    chat_template_kwargs: dict | None = None
    generation_config: str | None = None
    frequency_penalty: Annotated[float, Field(gt=-1, le=2)] | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    max_output_tokens: Limit | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    echo: bool | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Penalty | None = None
    repeat_penalty: Penalty | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: Stop | Stops | None = None
    stream: bool | None = None
    stream_options: dict | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-10000, le=10000)]] | None = None
    logprobs: bool | Annotated[int, Field(ge=0, le=20)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict | None = None
    text: dict[Literal["format"], dict] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None

    @classmethod
    def of(cls, body: dict) -> "Options":
        """
        From a request's body; what upstream would misread is taken out.

        Raises:
            `ValueError`: a field has a wrong value, or is not supported.
        """
        for name in [name for name in body if name in _FIXED and body[name] not in (None, _FIXED[name], [], "")]:
            only = "" if _FIXED[name] is None else f": only {_FIXED[name]!r} is"
            raise ValueError(f"{name}={body[name]!r} is not supported{only}; leave it out.")
        try:
            options = cls.model_validate(body)
        except ValidationError as error:
            name, why = _first_of(error)
            raise ValueError(f"{name}={body[name]!r} is not supported: {why}.") from error
        if options.generation_config is not None:
            body["generation_config"] = json.dumps(Settings.check(options.generation_config))
        if options.top_logprobs is not None and not options.logprobs:
            raise ValueError(f"top_logprobs={options.top_logprobs} is not supported without logprobs=true in a chat.")
        if "input" in body and options.likely is not None:
            raise ValueError(f"logprobs={options.logprobs!r} is not supported by /v1/responses; use a chat.")
        other_tools = [tool for tool in options.tools or [] if tool.get("type", "function") != "function"]
        if other_tools:
            raise ValueError(f"tools has {other_tools[0]!r}, which is not supported: its type must be 'function'.")
        if options.tool_choice == "none":
            body.pop("tools", None)
        elif options.parallel_tool_calls is False and options.tools and not options.is_call:
            raise ValueError(
                "parallel_tool_calls=False is not supported unless tool_choice forces the call of a tool."
            )
        if options.max_completion_tokens is not None:  # the oldest versions ignore it
            body["max_tokens"] = body.pop("max_completion_tokens")
        if (options.temperature or 1.0) < _COLDEST or options.top_p == 0:
            options.temperature = body["temperature"] = 0.0
            body.pop("top_p", None)
        for name in body.keys() & (_HANDLED_HERE | _IGNORED | _FIXED.keys()):
            del body[name]
        return options

    @property
    def prompts(self) -> list[str | list[int]]:
        """
        The prompts of a completion.

        Raises:
            `ValueError`: there is none, or too many.
        """
        if not isinstance(self.prompt, list):
            return [self.prompt or ""]
        prompts = [self.prompt] if self.prompt and isinstance(self.prompt[0], int) else self.prompt
        if not 0 < len(prompts) <= _MOST_PROMPTS:
            raise ValueError(f"prompt has {len(prompts)} texts; a request may have 1 to {_MOST_PROMPTS}.")
        return prompts

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

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
            calls = [_call_schema(tool) for tool in tools if tool.get("name")]
            if not calls:
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
            case other:
                raise ValueError(f"response_format={other!r} is not supported: text, json_object and json_schema are.")


def _call_schema(tool: dict) -> dict:
    """The JSON schema of a tool's call."""
    properties = {"name": {"const": tool.get("name")}, "arguments": tool.get("parameters") or {"type": "object"}}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


class LogProbs(LogitsProcessor):
    """
    Records the log-probabilities of an answer's tokens, before the temperature.

    Args:
        bytes_of (`TokenBytes`): The target's tokenizer.
        likely (`int`): Number of the likeliest tokens to list in each place.
    """

    def __init__(self, bytes_of: TokenBytes, likely: int):
        self.bytes_of = bytes_of
        self.likely = likely
        self.content: deque[dict] = deque()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        self.last = scores[0].log_softmax(-1)
        return scores

    def take(self, token: int) -> None:
        """The token that was chosen."""
        count = min(self.likely, len(self.last))
        top = self.last.topk(count).indices.tolist() if count else []
        self.content.append({**self._entry(token), "top_logprobs": [self._entry(likely) for likely in top]})

    @torch.no_grad()
    def score(self, target, prompt: list[int], over: Callable[[], bool]) -> None:
        """Record the prompt's own tokens, of which the first has no log-probability; stop once it is `over`."""
        self.content.append({**_shown(self.bytes_of, prompt[0]), "logprob": None, "top_logprobs": None})
        ids = torch.tensor([prompt], device=input_device(target))
        options: dict = {"use_cache": False}
        if len(prompt) > _PIECE:  # logits of all places at once may not fit into memory
            options = {"use_cache": True, cache_argument(target): empty_cache(target)}
        for start in range(0, len(prompt) - 1, _PIECE):
            if over():
                return
            logits = target(input_ids=ids[:, start : start + _PIECE], **options).logits[0]  # [P, V]
            following = prompt[start + 1 : start + _PIECE + 1]
            for row, token in zip(logits[: len(following)].float().log_softmax(-1), following, strict=True):
                self.last = row
                self.take(token)

    def _entry(self, token: int) -> dict:
        return {**_shown(self.bytes_of, token), "logprob": max(float(self.last[token]), -9999.0)}

    def since(self, chat: bool) -> dict | None:
        """The entries since the last call, if any, in the form of chats or in the older one of completions."""
        content = [self.content.popleft() for _ in range(len(self.content))]
        if chat or not content:
            return {"content": content} if content else None
        return {
            "tokens": [entry["token"] for entry in content],
            "token_logprobs": [entry["logprob"] for entry in content],
            "top_logprobs": [_by_text(entry["top_logprobs"]) for entry in content],
        }


def _shown(bytes_of: TokenBytes, token: int) -> dict:
    return {"token": bytes_of.shown(token), "bytes": [*bytes_of(token)]}


def _by_text(entries: list[dict] | None) -> dict | None:
    """Log-probabilities by their tokens' texts; of two with the same text, the likelier one's."""
    if entries is None:
        return None
    by_text: dict = {}
    for entry in entries:
        by_text.setdefault(entry["token"], entry["logprob"])
    return by_text


class Grammars:
    """
    Compiles JSON schemas with XGrammar, if that is installed.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
    """

    def __init__(self, target, tokenizer):
        self.target = target
        self.tokenizer = tokenizer
        self.compiler = None  # made with the first schema

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
            vocab_size = self.target.config.get_text_config(decoder=True).vocab_size
            stops = {"stop_token_ids": ends} if ends is not None else {}
            tokenizer_info = xgrammar.TokenizerInfo.from_huggingface(self.tokenizer, vocab_size=vocab_size, **stops)
            self.compiler = xgrammar.GrammarCompiler(tokenizer_info)
        try:
            return Grammar(self.compiler.compile_json_schema(json.dumps(schema)))
        except RuntimeError as error:
            raise ValueError(f"The JSON schema cannot be followed: {error}") from error
