"""
The fields of a request's body that upstream's handlers ignore, misread or do not check.

A field of a body is of one of these kinds:

1. handled here and kept from upstream: `_HANDLED_HERE`;
2. not supported: `_UNSUPPORTED`, an error unless it has the value that changes nothing;
3. without effect on the answer: `_IGNORED`;
4. read by upstream, and checked here before: the other fields of [`Options`];
5. any other: upstream reads it, or rejects it by an error that names it.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictInt, ValidationError
from transformers import GenerationConfig


# Fields that are handled here and taken out of the body that upstream gets. Upstream seeds torch as soon as a request
# arrives, in the middle of another's answer; fails on integer biases and empty stop strings; searches the vocabulary
# for stop strings in each call; and ignores the other fields, or rejects them.
_HANDLED_HERE = {
    "seed",
    "stop",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "tool_choice",
    "response_format",
    "text",
    "n",
    "echo",
    "top_k",
    "min_p",
    "repetition_penalty",
    "repeat_penalty",
}
# Fields that would change the answer and are not supported, with the value that changes nothing; `None` if only null
# does.
_UNSUPPORTED = {
    # OpenAI
    "functions": None,
    "function_call": None,
    "suffix": None,
    "audio": None,
    "image": None,
    "moderation": None,
    "verbosity": None,
    "reasoning": None,
    "reasoning_effort": None,
    "web_search_options": None,
    "max_tool_calls": None,
    "context_management": None,
    "previous_response_id": None,
    "conversation": None,
    "best_of": 1,
    "presence_penalty": 0,
    "modalities": ["text"],
    "background": False,
    "truncation": "disabled",
    # vLLM and SGLang
    "min_tokens": 0,
    "ignore_eos": False,
    "use_beam_search": False,
    "skip_special_tokens": True,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "include_stop_str_in_output": False,
    "spaces_between_special_tokens": True,
    "stop_token_ids": None,
    "prompt_logprobs": None,
    # llama.cpp
    "dynatemp_range": 0,
    "xtc_probability": 0,
    "typ_p": 1,
    "typical_p": 1,
    "dry_multiplier": 0,
    "mirostat": 0,
}
# Fields that change no answer here, and are ignored.
_IGNORED = {
    # Parameters of beam search, and of samplers that are off.
    "length_penalty",
    "early_stopping",
    "dynatemp_exponent",
    "xtc_threshold",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "repeat_last_n",
    "samplers",
    "backend_sampling",
    # What a server should log, keep or report.
    "timings_per_token",
    "return_progress",
    "cache_prompt",
    "id_slot",
    "reasoning_format",
    "priority",
    "request_id",
    "cache_salt",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
}
_MAX_CHOICES = 8  # for each prompt; they are decoded in one batch
_MAX_PROMPTS = 256
_MIN_TEMPERATURE = 1e-5  # lower ones are greedy: logits would overflow, and every sample would be the likeliest token
Length = Annotated[int, Field(ge=1)]
Limit = Annotated[int, Field(ge=-1)]  # -1: as many tokens as there is room for
Id = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, Field(ge=0.01, le=100)]
# A matcher decodes the end of the answer again for each token, as long as the longest stop string.
Stop = Annotated[str, Field(max_length=512)]
Stops = Annotated[list[Stop], Field(max_length=64)]
_ADDED_BY_TRANSFORMERS = {"transformers_version", "_from_model_config"}  # by `GenerationConfig.to_json_string`
# Values of settings that a request may not have which change nothing, though they are not transformers' defaults.
_NEUTRAL_SETTINGS = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "num_beam_groups": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
    "diversity_penalty": 0.0,
    "encoder_repetition_penalty": 1.0,
}


class GenerationSettings(BaseModel, extra="forbid", strict=True):
    """
    What a body's `generation_config` may set: how tokens are chosen, and when an answer ends. It may not ask for
    several answers at once (beams), for other code, caches or models, or for scores and states.
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
    def from_json(cls, text: str) -> dict:
        """
        The settings of a body's `generation_config`. Those that have their default change nothing, and are left out.

        Args:
            text (`str`): The `generation_config`, a JSON object.

        Raises:
            `ValueError`: it is not a JSON object, or has a setting that a request may not have.
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
            if value is None or name in _ADDED_BY_TRANSFORMERS:
                continue
            if name in cls.model_fields or value != _NEUTRAL_SETTINGS.get(name, defaults.get(name)):
                changed[name] = value
        try:
            cls.model_validate(changed)
        except ValidationError as error:
            name, why = _first_error(error)
            if name in cls.model_fields:
                raise ValueError(f"generation_config has {name}={changed[name]!r}: {why}.") from error
            remedy = "ask for n answers with `n`; " if name == "num_return_sequences" else ""
            raise ValueError(
                f"generation_config has {name}={changed[name]!r}, which a request may not set; {remedy}leave it out. "
                f"It may set {', '.join(cls.model_fields)}."
            ) from error
        return changed


def _first_error(error: ValidationError) -> tuple[str, str]:
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
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = None
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
    def from_body(cls, body: dict) -> "Options":
        """
        The options of a request's body. What upstream would misread is taken out of the body.

        Raises:
            `ValueError`: a field has a wrong value, or is not supported.
        """
        _reject_unsupported(body)
        try:
            options = cls.model_validate(body)
        except ValidationError as error:
            name, why = _first_error(error)
            raise ValueError(f"{name}={body[name]!r} is not supported: {why}.") from error
        options._check_combinations()
        options._rewrite(body)
        return options

    def _check_combinations(self) -> None:
        """
        Raises:
            `ValueError`: fields that are not supported together.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} is not supported without logprobs=true in a chat.")
        if self.input is not None and self.num_top_logprobs is not None:
            raise ValueError(f"logprobs={self.logprobs!r} is not supported by /v1/responses; use a chat.")
        other_tools = [tool for tool in self.tools or [] if tool.get("type", "function") != "function"]
        if other_tools:
            raise ValueError(f"tools has {other_tools[0]!r}, which is not supported: its type must be 'function'.")
        calls_tools = bool(self.tools) and self.tool_choice != "none"
        if calls_tools and self.parallel_tool_calls is False and not self.forces_call:
            raise ValueError(
                "parallel_tool_calls=False is not supported unless tool_choice forces the call of a tool."
            )

    def _rewrite(self, body: dict) -> None:
        """
        Rewrite a body for upstream: what it would misread in its own form, and without what is handled here.

        Raises:
            `ValueError`: `generation_config` has a setting that a request may not have.
        """
        if self.generation_config is not None:
            body["generation_config"] = json.dumps(GenerationSettings.from_json(self.generation_config))
        if self.tool_choice == "none":
            body.pop("tools", None)
        if self.max_completion_tokens is not None:  # the oldest supported version of transformers ignores it
            body["max_tokens"] = body.pop("max_completion_tokens")
        is_nearly_zero = self.temperature is not None and 0 < self.temperature < _MIN_TEMPERATURE
        if is_nearly_zero or self.top_p == 0:  # greedy
            self.temperature = 0.0
            body["temperature"] = 0.0
            body.pop("top_p", None)
        for name in body.keys() & (_HANDLED_HERE | _IGNORED | _UNSUPPORTED.keys()):
            del body[name]

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
        if not 0 < len(prompts) <= _MAX_PROMPTS:
            raise ValueError(f"prompt has {len(prompts)} texts; a request may have 1 to {_MAX_PROMPTS}.")
        return prompts

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings, without empty ones."""
        strings = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [string for string in strings if string]

    @property
    def num_top_logprobs(self) -> int | None:
        """
        How many of the likeliest tokens are listed with each token's own log-probability; `None` if no
        log-probabilities are asked for.
        """
        if self.logprobs is True:  # in a chat; a completion has a number
            return self.top_logprobs or 0
        return None if self.logprobs is False else self.logprobs

    @property
    def forces_call(self) -> bool:
        """Whether the answer must be the call of a tool."""
        return self.tool_choice not in (None, "auto", "none")

    def answer_schema(self) -> dict | None:
        """
        The JSON schema that the answer must follow.

        Raises:
            `ValueError`: the format is not supported, or the tool is unknown.
        """
        if self.forces_call:
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


def _reject_unsupported(body: dict) -> None:
    """
    Raises:
        `ValueError`: a field that is not supported has a value that would change the answer.
    """
    for name, value in body.items():
        if name not in _UNSUPPORTED:
            continue
        neutral_value = _UNSUPPORTED[name]
        if value not in (None, neutral_value, [], ""):
            only = "" if neutral_value is None else f": only {neutral_value!r} is"
            raise ValueError(f"{name}={value!r} is not supported{only}; leave it out.")


def _call_schema(tool: dict) -> dict:
    """The JSON schema of a tool's call."""
    properties = {"name": {"const": tool.get("name")}, "arguments": tool.get("parameters") or {"type": "object"}}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
