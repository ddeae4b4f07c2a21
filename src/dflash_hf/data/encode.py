"""
Rows of a dataset as ids and a loss mask, which is 1 on the tokens that the target wrote.

Conversations go through the tokenizer's chat template. If the template marks assistant tokens with `{% generation %}`,
the mask follows it. Otherwise each assistant turn is rendered as in serving: the messages before it, with the
generation prompt, must be a prefix of the same messages with the turn; the rest is the turn. If later messages change
how earlier turns are rendered (templates that drop old reasoning), every turn becomes an example of its own.
"""

import contextlib
import json
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from dflash_hf.data.time_limit import time_limit
from dflash_hf.files import digest_of
from dflash_hf.terminal import one_line


COLUMNS = (
    "`messages`, alone or with `response_ids`, `prompt` and `completion`, or `input_ids` with `loss_mask` or `labels`"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_EMPTY_THOUGHT = re.compile(r"\s*<(\w+)>\s*</\1>\s*")  # <think>\n\n</think>\n\n, by whatever name
_IGNORED_LABEL = -100  # of transformers' losses
# Arguments of `apply_chat_template` itself, not of templates.
_OF_CALLS = {"conversation", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict"}
_OF_CALLS |= {"return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length"}
TEMPLATE_SECONDS = 20.0  # for one conversation, which takes milliseconds
_ENDLESS = (
    f"The chat template has not finished one conversation after {TEMPLATE_SECONDS:.0f} s: its loops do not end; give "
    "another template with --chat-template."
)


class UnusableRow(ValueError):
    """A row that is left out. The message is the reason; equal reasons are counted together."""


@dataclass
class RowEncoder:
    """
    Turns a row into examples.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer; not needed for rows of ids.
        max_length (`int`, *optional*): Maximum number of tokens; the end is cut off.
        chat_template_kwargs (`dict`): Arguments of the chat template, e.g. `{"enable_thinking": False}`.
        mask_token_id (`int`, *optional*): The drafter's mask token. Rows that contain it are left out: it would mean
            both itself and an unknown token.
        vocab_size (`int`, *optional*): Number of rows of the target's embedding; larger ids are an error.
        positions (`int`, *optional*): Maximum sequence length of the target; prompts of that length are left out.
    """

    tokenizer: object = None
    max_length: int | None = None
    chat_template_kwargs: dict = field(default_factory=dict)
    mask_token_id: int | None = None
    vocab_size: int | None = None
    positions: int | None = None

    def __post_init__(self):
        if taken := self.chat_template_kwargs.keys() & _OF_CALLS:
            raise ValueError(
                f"chat_template_kwargs may not set {', '.join(sorted(taken))}: that is an argument of "
                "`apply_chat_template`, not of the template; leave it out."
            )

    def __call__(self, row: Mapping) -> list[dict]:
        """
        The examples of a row: one, or one for each assistant turn, see above. All assistant turns of `messages` are
        supervised, except among the first `given` messages. If the row has `response_ids`, the exact ids of the
        target's answer, only these are supervised.

        Returns:
            `list[dict]`: With `input_ids` and `loss_mask`, two lists of equal length.

        Raises:
            `UnusableRow`: the row is left out.
            `ValueError`: the dataset or the template is invalid.
        """
        row = without_none(row)
        if "input_ids" in row:
            ids = numbers_in(row, "input_ids")
            examples = [(ids, _mask_of_ids(row, ids))]
        elif "messages" in row and "response_ids" in row:
            prompt = self.render(messages_in(row), tools_of(row), add_generation_prompt=True)
            answer = numbers_in(row, "response_ids")
            examples = [([*prompt, *answer], [0] * len(prompt) + [1] * len(answer))]
        elif "messages" in row:
            given = row.get("given", 0)
            if not isinstance(given, numbers.Real) or given % 1 != 0:
                raise ValueError(f"`given` is {given!r}; give the number of messages that are not learned from.")
            examples = self._conversation(messages_in(row), int(given), tools_of(row))
            if row.get("finish_reason") == "length":
                self._without_end(*examples[-1])
        elif "prompt" in row and "completion" in row:
            prompt, completion = row["prompt"], row["completion"]
            if isinstance(prompt, str) and isinstance(completion, str):
                examples = [self._text(prompt, completion)]
            elif isinstance(prompt, str):
                raise ValueError("`prompt` is text but `completion` is not; give both as text or both as messages.")
            else:
                turns = [{"role": "assistant", "content": completion}]
                if not isinstance(completion, str):
                    turns = messages_in(row, "completion")
                prompt = messages_in(row, "prompt")
                examples = self._conversation([*prompt, *turns], len(prompt), tools_of(row))
        else:
            answer = "have the target answer the prompts with `dflash regenerate`, or give answers as `completion`"
            remedy = answer if "prompt" in row else f"give {COLUMNS}"
            raise ValueError(f"There is no column to train on, only {sorted(row)}; {remedy}.")
        return [self._checked(ids, mask) for ids, mask in examples]

    def _checked(self, ids: list[int], mask: list[int]) -> dict:
        """Cut to length; reject examples that would teach nothing, or something wrong."""
        if ids and all(mask):
            raise ValueError(
                f"The loss mask is all ones ({len(ids)} tokens): the prompt would be learned as well. Mask it with 0 "
                "(or labels of -100); for text without a prompt, the first token alone. If a chat template was used, "
                "its {% generation %} block must enclose the assistant's text only."
            )
        if min(ids, default=0) < 0:
            raise ValueError(f"Token {min(ids)} of input_ids is negative; -100 belongs into `labels` only.")
        if self.vocab_size is not None and max(ids, default=0) >= self.vocab_size:
            raise ValueError(
                f"Token {max(ids)} is outside the target's embedding, which has {self.vocab_size} rows; the data was "
                "made with another tokenizer."
            )
        if self.mask_token_id is not None and self.mask_token_id in ids:
            raise UnusableRow(f"it holds the mask token {self.mask_token_id}")
        if sum(mask) < 2:
            raise UnusableRow("it has no response of two tokens or more")
        ids, mask = ids[: self.max_length], mask[: self.max_length]
        if sum(mask) < 2:
            raise UnusableRow(f"its response begins beyond max_length={self.max_length}")
        return {"input_ids": ids, "loss_mask": mask}

    def _text(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        start = self.tokenizer(prompt)["input_ids"]
        ids = self.tokenizer(prompt + completion)["input_ids"]
        if ids[: len(start)] != start:
            raise UnusableRow("the ids of its prompt do not begin those of prompt and completion together")
        return ids, [0] * len(start) + [1] * (len(ids) - len(start))

    def _conversation(self, messages: Sequence[Mapping], given: int, tools) -> list[tuple[list[int], list[int]]]:
        """No token of the first `given` messages is supervised."""
        last = max((i for i, one in enumerate(messages) if one.get("role") == "assistant"), default=-1)
        messages = messages[: last + 1]
        if last < given:
            raise UnusableRow("it has no assistant message")
        if _GENERATION.search(self.template(tools)):
            encoded = self.render(messages, tools, return_dict=True, return_assistant_tokens_mask=True)
            ids, mask = encoded["input_ids"], list(encoded["assistant_masks"])
            if given:
                start = len(self.render(messages[:given], tools, add_generation_prompt=True))
                mask[:start] = [0] * min(start, len(mask))
            return [(ids, self._without_inserted(ids, mask, messages[given:]))]

        turns = []  # ids of the conversation up to a turn's end, where the turn begins, where it ends
        for i, message in enumerate(messages):
            if message.get("role") != "assistant" or i < given:
                continue
            if i == 0:
                raise UnusableRow("it begins with an assistant message")
            start = self.render(messages[:i], tools, add_generation_prompt=True)
            ids = self.render(messages[: i + 1], tools)
            if ids[: len(start)] != start:
                raise UnusableRow(
                    "the ids up to the generation prompt do not begin those with the assistant's turn; give the chat "
                    "template {% generation %} blocks"
                )
            begin = len(start) + self._inserted(ids[len(start) :], message)
            turns.append((ids, begin, self._end(ids, begin)))

        whole = turns[-1][0]
        if all(whole[: len(ids)] == ids for ids, _, _ in turns):
            mask = [0] * len(whole)
            for _, begin, end in turns:
                mask[begin:end] = [1] * (end - begin)
            return [(whole, mask)]
        return [(ids[:end], [0] * begin + [1] * (end - begin)) for ids, begin, end in turns]

    def template(self, tools=None) -> str:
        """
        The chat template's source.

        Raises:
            `ValueError`: the tokenizer has none.
        """
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise ValueError(
                "The tokenizer has no chat template for `messages`; set chat_template to a Jinja file, or give "
                "`prompt` and `completion` as text, or `input_ids`."
            )
        return self.tokenizer.get_chat_template(tools=tools)

    def render(self, messages, tools, add_generation_prompt: bool = False, return_dict: bool = False, **kwargs):
        """The ids of a conversation under the template and its arguments."""
        from jinja2 import TemplateError

        options = {"tools": tools, "add_generation_prompt": add_generation_prompt, "return_dict": return_dict}
        messages = [with_arguments(one, _as_mapping) for one in messages]
        try:
            with time_limit(TEMPLATE_SECONDS, _ENDLESS):
                return self.tokenizer.apply_chat_template(messages, **options, **kwargs, **self.chat_template_kwargs)
        except TemplateError as error:
            raise UnusableRow(f"the chat template refuses it ({error})") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # in the template's expressions
            raise UnusableRow(f"the chat template cannot render it ({one_line(error, 100)})") from error

    def _without_inserted(self, ids: list[int], mask: list[int], messages: Sequence[Mapping]) -> list[int]:
        """The mask without the empty thoughts that the template inserts before a turn."""
        turns = [one for one in messages if one.get("role") == "assistant"]
        runs = [list(run) for value, run in groupby(range(len(mask)), key=mask.__getitem__) if value]
        everything = {"content": " ".join(map(_text_of, turns))}
        mask = list(mask)
        for i, run in enumerate(runs):
            message = turns[i] if len(runs) == len(turns) else everything
            for place in run[: self._inserted(ids[run[0] : run[-1] + 1], message)]:
                mask[place] = 0
        return mask

    def _inserted(self, ids: list[int], message: Mapping) -> int:
        """Length of an empty thought at the start of a turn that is not part of the message itself."""
        match = _EMPTY_THOUGHT.match(decoded(self.tokenizer, ids[:64]))
        if not match or f"<{match[1]}>" in _text_of(message):
            return 0
        # A token that also contains the start of the answer is the target's.
        counts = range(min(len(ids), 64), 0, -1)
        return next((count for count in counts if _EMPTY_THOUGHT.fullmatch(decoded(self.tokenizer, ids[:count]))), 0)

    def _end(self, ids: list[int], begin: int) -> int:
        """Where a turn ends: whitespace after its last special token belongs to the template."""
        end = len(ids)
        while end > begin and not decoded(self.tokenizer, ids[end - 1 : end]).strip():
            end -= 1
        return end if end > begin and ids[end - 1] in self.tokenizer.added_tokens_decoder else len(ids)

    def _without_end(self, ids: list[int], mask: list[int]) -> None:
        """The answer was cut off, so the end of its turn belongs to the template."""
        last = len(mask) - 1 - mask[::-1].index(1) if 1 in mask else 0
        if ids[last] in self.tokenizer.added_tokens_decoder:
            mask[last] = 0


def decoded(tokenizer, ids: list[int]) -> str:
    """The text of ids as it is, special tokens included."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def without_none(value):
    """A row, or a part of it, without keys that are `None`: Arrow tables have every key in every message."""
    if isinstance(value, Mapping):
        return {key: without_none(one) for key, one in value.items() if one is not None}
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return [without_none(one) for one in value]
    return value


def messages_in(row: Mapping, name: str = "messages") -> Sequence[Mapping]:
    """
    The messages in a column.

    Raises:
        `ValueError`: it holds something else.
    """
    value = row[name]
    if not isinstance(value, list | tuple) or not all(isinstance(one, Mapping) for one in value):
        raise ValueError(
            f"`{name}` is {one_line(repr(value), 60)}; give a list of messages with `role` and `content`."
        )
    return value


def numbers_in(row: Mapping, name: str) -> list[int]:
    """
    The integers in a column of token ids, labels or a loss mask.

    Raises:
        `ValueError`: it holds something else.
    """
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        numbers = [int(one) for one in row[name]]
        if numbers == list(row[name]):
            return numbers
    raise ValueError(f"`{name}` is {one_line(repr(row[name]), 60)}; give a flat list with one integer for each token.")


def tools_of(row: Mapping) -> list | None:
    """
    The tools of a row: a list, or JSON text, since tables cannot hold tools of different schemas.

    Raises:
        `ValueError`: `tools` is neither.
    """
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools else None
        except ValueError as error:
            raise ValueError(f"`tools` is text but not JSON ({error}); give a list of tools.") from error
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"`tools` is a {type(tools).__name__}; give a list of tools, or leave it out.")
    return without_none(tools) or None


def with_arguments(message: Mapping, read: Callable) -> Mapping:
    """A message with the arguments of its tool calls as `read` returns them."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function", {}))
        if "arguments" in function:
            function["arguments"] = read(function["arguments"])
        calls.append({**call, "function": function} if function else call)
    return {**message, "tool_calls": calls}


def _as_mapping(arguments):
    """As servers pass the arguments of a call to the template; unchanged if the target did not write JSON."""
    with contextlib.suppress(ValueError):
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    return arguments


def given_ids(row: Mapping) -> list[int]:
    """The ids of a row before the first supervised one; all of a row without a mask."""
    ids = numbers_in(row, "input_ids")
    mask = list(row["loss_mask"]) if "loss_mask" in row else [one != _IGNORED_LABEL for one in row.get("labels", [])]
    return ids[: mask.index(True)] if True in mask else ids


def digests_of_tokenizer(tokenizer) -> dict[str, str]:
    """Digests of a tokenizer's chat `template` and vocabulary (`tokenizer`); without a tokenizer, of empty ones."""
    template = "" if tokenizer is None else str(tokenizer.chat_template or "")
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    return {"template": digest_of(template), "tokenizer": digest_of(vocabulary)}


def _mask_of_ids(row: Mapping, ids: list[int]) -> list[int]:
    """The loss mask of a row of ids; `labels` are not shifted, and -100 where they are ignored."""
    name = "loss_mask" if "loss_mask" in row else "labels"
    if name not in row:
        raise ValueError("`input_ids` need a `loss_mask` (1 on the response) or `labels` (-100 elsewhere).")
    values, ignored = numbers_in(row, name), _IGNORED_LABEL if name == "labels" else 0
    mask = [int(value != ignored) for value in values]
    if len(values) != len(ids):
        raise ValueError(f"There are {len(ids)} input_ids but {len(values)} {name}; give one for each token.")
    if not any(mask):
        raise ValueError(f"The {name} supervise none of {len(ids)} tokens (a mask of zeros); mark the response.")
    if name == "labels":
        wrong = next((i for i in range(len(ids)) if mask[i] and values[i] != ids[i]), None)
        if wrong is not None:
            raise ValueError(
                f"labels[{wrong}]={values[wrong]} is not input_ids[{wrong}]={ids[wrong]}: labels must not be shifted, "
                "as in transformers."
            )
    return mask


def _text_of(message: Mapping) -> str:
    parts = [message.get("reasoning_content"), message.get("content")]
    return " ".join(part for part in parts if isinstance(part, str))
