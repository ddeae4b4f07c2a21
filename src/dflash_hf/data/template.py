"""The target's chat template and tokenizer: texts and messages as the ids that it reads."""

import contextlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

from dflash_hf.data.images import ImageReader
from dflash_hf.data.messages import UNSEEN, UnusableRow, as_value, images_in, with_arguments, with_text
from dflash_hf.files import digest_of
from dflash_hf.terminal import one_line


_ROLES = {"system", "developer", "user", "assistant", "tool", "ipython"}  # others are in the template, or unknown
_PROBE = "Xq7"  # plain letters: a template may trim or escape anything else
# Arguments of `apply_chat_template` itself, not of templates.
_OF_CALLS = {"conversation", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict"}
_OF_CALLS |= {"return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length"}


@dataclass(frozen=True)
class ChatTemplate:
    """
    Renders messages as the target is served, and tokenizes them.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer; not needed for rows of ids.
        chat_template_kwargs (`dict`): Arguments of the chat template, e.g. `{"enable_thinking": False}`. A row's own
            `chat_template_kwargs` have precedence.
        reader (`ImageReader`, *optional*): Of a target that reads images. Without it, rows with images are left out.
    """

    tokenizer: object = None
    chat_template_kwargs: dict = field(default_factory=dict)
    reader: ImageReader | None = None

    def __post_init__(self):
        _check_template_kwargs(self.chat_template_kwargs)

    def __getstate__(self) -> dict:
        """Without what was found out: `datasets` knows an encoder again by its state."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def text_ids(self, text: str) -> list[int]:
        """The ids of text that continues: with one token that begins it, and without one that ends it."""
        if self._begin is None:
            return self.tokenizer(text)["input_ids"]
        ids = self._ids(text)
        return ids if ids[: len(self._begin)] == self._begin else [*self._begin, *ids]

    @cached_property
    def _begin(self) -> list[int] | None:
        """The ids that the tokenizer puts before a text; `None` if it encodes the text itself in another way, too."""
        bare, whole = self._ids(_PROBE), self.tokenizer(_PROBE)["input_ids"]
        places = range(len(whole) - len(bare) + 1)
        return next((whole[:place] for place in places if whole[place : place + len(bare)] == bare), None)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt_ids(self, messages: Sequence[Mapping], tools, **kwargs) -> list[int]:
        """The ids of messages of [`as_read`] with the generation prompt."""
        if not (images := images_in(messages)):
            return self.render(messages, tools, add_generation_prompt=True, **kwargs)
        text = self.render(messages, tools, add_generation_prompt=True, tokenize=False, **kwargs)
        return self.reader.ids(text, images)

    def ids_of_beginnings(self, texts: Sequence[str]) -> list[list[int]]:
        """
        The ids of texts, most of which begin the last one, which is tokenized once. A text's ids begin those of the
        last one if its end lies between two tokens and what follows its last added token, at which tokenizers split
        texts, has the same ids alone.
        """
        if not self.tokenizer.is_fast:
            return [self._ids(text) for text in texts]
        whole, added = texts[-1], self.tokenizer.added_tokens_decoder
        encoded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids, starts = encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]
        alone: dict[str, list[int]] = {}
        found = []
        for text in texts:
            count = bisect_left(starts, len(text)) if whole.startswith(text) else 0
            first = next((place for place in range(count - 1, 0, -1) if ids[place] in added), 0)
            rest = text[starts[first] :] if first else text
            if rest not in alone and text != whole:
                alone[rest] = self._ids(rest)
            if text == whole or first and alone[rest] == ids[first:count]:
                found.append(ids[:count])
            else:
                found.append(self._ids(text) if first else alone[rest])
        return found

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
            if images_in([message]) and not (self.reader and parts):
                raise UnusableRow(UNSEEN)
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
            return self.tokenizer.apply_chat_template(messages, **options, **{**self.chat_template_kwargs, **kwargs})
        except TemplateError as error:
            raise UnusableRow(f"the chat template refuses it ({error})") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # in the template's expressions
            raise UnusableRow(f"the chat template cannot render it ({one_line(error, 100)})") from error


def decoded(tokenizer, ids: list[int]) -> str:
    """The text of ids as it is, special tokens included."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def template_kwargs_of(row: Mapping) -> dict:
    """
    A row's own arguments of the chat template: a mapping or its JSON text.

    Raises:
        `ValueError`: `chat_template_kwargs` is neither, or sets what is not the template's.
    """
    kwargs = as_value(row.get("chat_template_kwargs") or {})
    if not isinstance(kwargs, Mapping):
        raise ValueError(f"`chat_template_kwargs` is {one_line(repr(kwargs), 60)}; give a mapping.")
    _check_template_kwargs(kwargs)
    return dict(kwargs)


def _check_template_kwargs(kwargs: Mapping) -> None:
    if taken := kwargs.keys() & _OF_CALLS:
        raise ValueError(
            f"chat_template_kwargs may not set {', '.join(sorted(taken))}: that is an argument of "
            "`apply_chat_template`, not of the template; leave it out."
        )


def digests_of_tokenizer(tokenizer) -> dict[str, str]:
    """Digests of a tokenizer's chat `template` and vocabulary (`tokenizer`); without a tokenizer, of empty ones."""
    template = "" if tokenizer is None else str(tokenizer.chat_template or "")
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    return {"template": digest_of(template), "tokenizer": digest_of(vocabulary)}
