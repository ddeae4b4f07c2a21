"""
Rows of a dataset as ids and a loss mask, which is 1 on the tokens that the target wrote.

Conversations go through the tokenizer's chat template. If the template marks assistant tokens with `{% generation %}`,
the mask follows it. Otherwise each assistant turn is rendered as in serving: the messages before it, with the
generation prompt, must be a prefix of the same messages with the turn; the rest is the turn. If later messages change
how earlier turns are rendered (templates that drop old reasoning), every turn becomes an example of its own.
"""

import contextlib
import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import groupby

from dflash_hf.data.messages import (
    UnusableRow,
    as_value,
    column_of,
    messages_in,
    text_of,
    tools_of,
    with_arguments,
    with_text,
)
from dflash_hf.data.time_limit import time_limit
from dflash_hf.files import digest_of
from dflash_hf.terminal import one_line


COLUMNS = (
    "`messages` or `conversations`, alone or with `response_ids`, `prompt` and `completion`, or `input_ids` with "
    "`loss_mask` or `labels`"
)
_ROLES = {"system", "developer", "user", "assistant", "tool", "ipython"}  # others are in the template, or unknown
_PROBE = "Xq7"  # plain letters: a template may trim or escape anything else
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

    def __getstate__(self) -> dict:
        """Without what was found out: `datasets` knows an encoder again by its state."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

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
        columns = column_of(row, ("input_ids",), ("messages",), ("conversations",), ("prompt", "completion"))
        if columns is None:
            answer = "have the target answer the prompts with `dflash regenerate`, or give answers as `completion`"
            remedy = answer if "prompt" in row else f"give {COLUMNS}"
            raise ValueError(f"There is no column to train on, only {sorted(row)}; {remedy}.")
        if columns == ("input_ids",):
            ids = numbers_in(row, "input_ids")
            examples = [(ids, _mask_of_ids(row, ids))]
        elif columns == ("prompt", "completion"):
            examples = self._completed(row)
        elif row.get("response_ids") is not None:
            tools = tools_of(row)
            messages = self.as_read(messages_in(row, *columns), tools)
            prompt, answer = self.render(messages, tools, add_generation_prompt=True), numbers_in(row, "response_ids")
            examples = [([*prompt, *answer], [0] * len(prompt) + [1] * len(answer))]
        else:
            given = 0 if row.get("given") is None else row["given"]
            if not isinstance(given, numbers.Real) or given % 1 != 0:
                raise ValueError(f"`given` is {given!r}; give the number of messages that are not learned from.")
            examples = self._conversation(messages_in(row, *columns), int(given), tools_of(row))
            if row.get("finish_reason") == "length":
                self._without_end(*examples[-1])
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
        begin = getattr(self.tokenizer, "bos_token_id", None)
        if begin is not None and ids[:2] == [begin, begin] and begin != self.tokenizer.eos_token_id:
            raise UnusableRow(f"it begins with {self.tokenizer.bos_token} twice")
        if self.mask_token_id is not None and self.mask_token_id in ids:
            raise UnusableRow(f"it holds the mask token {self.mask_token_id}")
        if sum(mask) < 2:
            raise UnusableRow("it has no response of two tokens or more")
        ids, mask = ids[: self.max_length], mask[: self.max_length]
        if sum(mask) < 2:
            raise UnusableRow(f"its response begins beyond max_length={self.max_length}")
        return {"input_ids": ids, "loss_mask": mask}

    def _completed(self, row: Mapping) -> list[tuple[list[int], list[int]]]:
        """A row of `prompt` and `completion`."""
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            start, ids = self.text_ids(prompt), self.text_ids(prompt + completion)
            if not start or not completion:
                raise UnusableRow(f"its `{'completion' if start else 'prompt'}` is empty")
            if ids[: len(start)] != start:
                raise UnusableRow("the ids of its prompt do not begin those of prompt and completion together")
            return [(ids, [0] * len(start) + [1] * (len(ids) - len(start)))]
        if isinstance(prompt, str):
            raise ValueError("`prompt` is text but `completion` is not; give both as text or both as messages.")
        turns = [{"role": "assistant", "content": completion}]
        if not isinstance(completion, str):
            turns = messages_in(row, "completion")
        given = messages_in(row, "prompt")
        return self._conversation([*given, *turns], len(given), tools_of(row))

    def text_ids(self, text: str) -> list[int]:
        """The ids of text that continues: with one token that begins it, and without one that ends it."""
        if self._begin is None:
            return self.tokenizer(text)["input_ids"]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids if ids[: len(self._begin)] == self._begin else [*self._begin, *ids]

    @cached_property
    def _begin(self) -> list[int] | None:
        """The ids that the tokenizer puts before a text; `None` if it encodes the text itself in another way, too."""
        bare, whole = (self.tokenizer(_PROBE, add_special_tokens=special)["input_ids"] for special in (False, True))
        places = range(len(whole) - len(bare) + 1)
        return next((whole[:place] for place in places if whole[place : place + len(bare)] == bare), None)

    def _conversation(self, messages: Sequence[Mapping], given: int, tools) -> list[tuple[list[int], list[int]]]:
        """No token of the first `given` messages is supervised."""
        last = max((i for i, one in enumerate(messages) if one["role"] == "assistant"), default=-1)
        messages = messages[: last + 1]
        if last < given:
            raise UnusableRow("it has no assistant message")
        messages = self.as_read(messages, tools)
        if _GENERATION.search(self.template(tools)):
            encoded = self.render(messages, tools, return_dict=True, return_assistant_tokens_mask=True)
            ids, mask = encoded["input_ids"], list(encoded["assistant_masks"])
            if given:
                start = len(self.render(messages[:given], tools, add_generation_prompt=True))
                mask[:start] = [0] * min(start, len(mask))
            return [(ids, self._without_inserted(ids, mask, messages[given:]))]

        turns = []  # ids of the conversation up to a turn's end, where the turn begins, where it ends
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or i < given:
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

    def as_read(self, messages: Sequence[Mapping], tools=None) -> list[Mapping]:
        """
        Messages of [`messages_in`] as the template reads them: arguments of calls are mappings, and contents are
        texts, or parts if it writes those out.

        Raises:
            `UnusableRow`: it does not know a role.
        """
        template, read = self.template(tools), []
        for message in messages:
            role, content = message["role"], message.get("content")
            if role not in _ROLES and role not in template:
                raise UnusableRow(f"the chat template does not know the role {role!r}")
            parts, only = self._reads_parts(role, template)
            if content is None:
                message = {**message, "content": ""}  # of calls alone, as `transformers serve` passes it
            elif only and isinstance(content, str):
                message = {**message, "content": [{"type": "text", "text": content}]}
            read.append(with_arguments(message if parts else with_text(message), as_value))
        return read

    @cached_property
    def _found(self) -> dict[tuple[str, str], tuple[bool, bool]]:
        """What [`_reads_parts`] found out."""
        return {}

    def _reads_parts(self, role: str, template: str) -> tuple[bool, bool]:
        """Whether the template writes the texts of parts, not a list's source; and whether it reads nothing else."""
        if (role, template) not in self._found:
            text, parts = (self._probe(role, one, template) for one in (_PROBE, [{"type": "text", "text": _PROBE}]))
            only = _PROBE in parts and _PROBE not in text and "'type'" not in parts and '"type"' not in parts
            self._found[role, template] = only or _PROBE in text and text == parts, only
        return self._found[role, template]

    def _probe(self, role: str, content, template: str) -> str:
        """A message as the template writes it; empty if it refuses."""
        user = {"role": "user", "content": "?"}
        one = {"role": role, "content": content}
        messages = {"user": [one], "assistant": [user, one], "tool": [user, one]}.get(role, [one, user])
        with contextlib.suppress(UnusableRow):
            return self.render(messages, None, tokenize=False, chat_template=template)
        return ""

    def render(self, messages, tools, add_generation_prompt: bool = False, return_dict: bool = False, **kwargs):
        """The ids of messages of [`as_read`] under the template and its arguments."""
        from jinja2 import TemplateError

        options = {"tools": tools, "add_generation_prompt": add_generation_prompt, "return_dict": return_dict}
        try:
            with time_limit(TEMPLATE_SECONDS, _ENDLESS):
                return self.tokenizer.apply_chat_template(messages, **options, **kwargs, **self.chat_template_kwargs)
        except TemplateError as error:
            raise UnusableRow(f"the chat template refuses it ({error})") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # in the template's expressions
            raise UnusableRow(f"the chat template cannot render it ({one_line(error, 100)})") from error

    def _without_inserted(self, ids: list[int], mask: list[int], messages: Sequence[Mapping]) -> list[int]:
        """The mask without the empty thoughts that the template inserts before a turn."""
        turns = [one for one in messages if one["role"] == "assistant"]
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


def given_ids(row: Mapping) -> list[int]:
    """The ids of a row before the first supervised one; all of a row without a mask."""
    ids = numbers_in(row, "input_ids")
    mask = row.get("loss_mask")
    mask = [one != _IGNORED_LABEL for one in row.get("labels") or []] if mask is None else list(mask)
    return ids[: mask.index(True)] if True in mask else ids


def digests_of_tokenizer(tokenizer) -> dict[str, str]:
    """Digests of a tokenizer's chat `template` and vocabulary (`tokenizer`); without a tokenizer, of empty ones."""
    template = "" if tokenizer is None else str(tokenizer.chat_template or "")
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    return {"template": digest_of(template), "tokenizer": digest_of(vocabulary)}


def _mask_of_ids(row: Mapping, ids: list[int]) -> list[int]:
    """The loss mask of a row of ids; `labels` are not shifted, and -100 where they are ignored."""
    columns = column_of(row, ("loss_mask",), ("labels",))
    if columns is None:
        raise ValueError("`input_ids` need a `loss_mask` (1 on the response) or `labels` (-100 elsewhere).")
    (name,) = columns
    if not ids:
        raise UnusableRow("its `input_ids` are empty")
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
    thought = message.get("reasoning_content")
    return f"{thought} {text_of(message)}" if isinstance(thought, str) else text_of(message)
