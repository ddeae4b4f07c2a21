"""The target's chat template and tokenizer: texts and messages as the ids that it reads."""

import contextlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NamedTuple

from dflash_hf._io.errors import one_line
from dflash_hf._io.files import digest_of
from dflash_hf.data.conversation import check_template_kwargs
from dflash_hf.data.images import ImageReader
from dflash_hf.data.messages import NO_IMAGE_READER, UnusableRow, as_value, images_in, with_arguments, with_text


_ROLES = {"system", "developer", "user", "assistant", "tool", "ipython"}  # others are in the template, or unknown
# A text by which a template or tokenizer is probed: plain letters, since it may trim or escape anything else.
_MARKER_TEXT = "Xq7"


class ContentSupport(NamedTuple):
    """What a template reads as the content of a message, besides text."""

    reads_parts: bool  # it reads parts, and writes their text
    reads_only_parts: bool  # it does not read text


@dataclass(frozen=True)
class ChatTemplate:
    """
    Renders messages as the target is served, and tokenizes them.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer; not needed for rows of ids.
        chat_template_kwargs (`dict`): Arguments of the chat template, e.g. `{"enable_thinking": False}`. A row's own
            `chat_template_kwargs` have precedence.
        reader (`ImageReader`, *optional*): Of a target that reads images. Without it, rows with images are left out.

    Raises:
        `ValueError`: `chat_template_kwargs` sets what is not the template's.
    """

    tokenizer: object = None
    chat_template_kwargs: dict = field(default_factory=dict)
    reader: ImageReader | None = None

    def __post_init__(self):
        check_template_kwargs(self.chat_template_kwargs)

    def __getstate__(self) -> dict:
        """Without what is cached, so that `datasets` recognises an encoder by its state."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def text_ids(self, text: str) -> list[int]:
        """The ids of text that the target continues: with the tokenizer's start token, without its end token."""
        if self._beginning is None:
            return self.tokenizer(text)["input_ids"]
        ids = self._bare_ids(text)
        if ids[: len(self._beginning)] == self._beginning:
            return ids
        return [*self._beginning, *ids]

    @cached_property
    def _beginning(self) -> list[int] | None:
        """
        The ids that the tokenizer puts before a text, such as that of `<s>`; `None` if with such tokens it also
        tokenizes the text itself in another way.
        """
        bare = self._bare_ids(_MARKER_TEXT)
        framed = self.tokenizer(_MARKER_TEXT)["input_ids"]
        for start in range(len(framed) - len(bare) + 1):
            if framed[start : start + len(bare)] == bare:
                return framed[:start]
        return None

    def _bare_ids(self, text: str) -> list[int]:
        """The ids of a text, without start and end token."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt_ids(self, messages: Sequence[Mapping], tools, **kwargs) -> list[int]:
        """The ids of messages of [`normalize_messages`] with the generation prompt."""
        images = images_in(messages)
        if not images:
            return self.render(messages, tools, add_generation_prompt=True, **kwargs)
        text = self.render(messages, tools, add_generation_prompt=True, tokenize=False, **kwargs)
        return self.reader.ids(text, images)

    def tokenize_prefixes(self, texts: Sequence[str]) -> list[list[int]]:
        """
        The ids of texts, most of which are prefixes of the last one. That one is tokenized once, and the ids of a
        prefix are taken from it where that is exact, since tokenizing every turn of a long chat again is slow.

        An example. Let the last text be `<u>Hi<a>Hello there<e>`, with the ids of `<u>`, `Hi`, `<a>`, `Hello`,
        ` there`, `<e>`. The prefix `<u>Hi<a>Hello` ends between two of these tokens, so its ids may be the first four.
        Tokenizers split texts at added tokens such as `<a>`, so only what follows the last one in the prefix, `Hello`,
        may be tokenized otherwise alone. It is compared: if its ids alone are those in the last text, the first four
        ids are taken; otherwise, as for `<u>Hi<a>Hel`, the prefix is tokenized by itself.
        """
        if not self.tokenizer.is_fast:
            return [self._bare_ids(text) for text in texts]
        whole = texts[-1]
        added = self.tokenizer.added_tokens_decoder
        encoded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids = encoded["input_ids"]
        starts = [start for start, _ in encoded["offset_mapping"]]
        bare_ids: dict[str, list[int]] = {}  # of texts that are tokenized by themselves
        ids_of_texts = []
        for text in texts:
            # 1. How many tokens of the whole lie in the text, and where the last added one among them is.
            count = bisect_left(starts, len(text)) if whole.startswith(text) else 0
            last_added = next((index for index in range(count - 1, 0, -1) if ids[index] in added), 0)
            # 2. What follows it is tokenized by itself; without an added token, the whole text is.
            rest = text[starts[last_added] :] if last_added else text
            if rest not in bare_ids and text != whole:
                bare_ids[rest] = self._bare_ids(rest)
            # 3. The two must agree.
            if text == whole or (last_added and bare_ids[rest] == ids[last_added:count]):
                ids_of_texts.append(ids[:count])
            elif last_added:
                ids_of_texts.append(self._bare_ids(text))
            else:
                ids_of_texts.append(bare_ids[rest])
        return ids_of_texts

    def source(self, tools=None) -> str:
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

    def normalize_messages(self, messages: Sequence[Mapping], tools=None) -> list[Mapping]:
        """
        Messages of [`~dflash_hf.data.messages.messages_of`] in the form that the template reads: arguments of tool
        calls as mappings instead of JSON text, contents as text or as parts. For example, a template that reads text
        gets the content `"Hi"` for `[{"type": "text", "text": "Hi"}]`, and one that reads only parts the reverse.

        Raises:
            `UnusableRow`: the template does not know a role, or reads no images.
        """
        template = self.source(tools)
        normalized = []
        for message in messages:
            role = message["role"]
            if role not in _ROLES and role not in template:
                raise UnusableRow(f"the chat template does not know the role {role!r}")
            support = self._content_support(role, template)
            if images_in([message]) and not (self.reader and support.reads_parts):
                raise UnusableRow(NO_IMAGE_READER)
            content = message.get("content")
            if content is None:
                message = {**message, "content": ""}  # of calls alone, as `transformers serve` passes it
            elif support.reads_only_parts and isinstance(content, str):
                message = {**message, "content": [{"type": "text", "text": content}]}
            if not support.reads_parts:
                message = with_text(message)
            normalized.append(with_arguments(message, as_value))
        return normalized

    @cached_property
    def _content_supports(self) -> dict[tuple[str, str], ContentSupport]:
        """The results of [`_content_support`], by role and template."""
        return {}

    def _content_support(self, role: str, template: str) -> ContentSupport:
        """What the template reads as a role's content, from how it renders a text, and the same text as a part."""
        support = self._content_supports.get((role, template))
        if support is None:
            text = self._probe(role, _MARKER_TEXT, template)
            parts = self._probe(role, [{"type": "text", "text": _MARKER_TEXT}], template)
            prints_source = "'type'" in parts or '"type"' in parts
            reads_only_parts = _MARKER_TEXT in parts and _MARKER_TEXT not in text and not prints_source
            reads_parts = reads_only_parts or (_MARKER_TEXT in text and text == parts)
            support = ContentSupport(reads_parts, reads_only_parts)
            self._content_supports[role, template] = support
        return support

    def _probe(self, role: str, content, template: str) -> str:
        """A chat with one such message as the template renders it; empty if it rejects it."""
        user = {"role": "user", "content": "?"}
        message = {"role": role, "content": content}
        if role == "user":
            messages = [message]
        elif role in ("assistant", "tool"):
            messages = [user, message]
        else:
            messages = [message, user]
        with contextlib.suppress(UnusableRow):
            return self.render(messages, None, tokenize=False, chat_template=template)
        return ""

    def render(self, messages, tools, add_generation_prompt: bool = False, return_dict: bool = False, **kwargs):
        """
        Messages of [`normalize_messages`] under the template and its arguments: ids, or with `tokenize=False` their
        text.

        Raises:
            `UnusableRow`: the template rejects them, or fails.
        """
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


def digests_of_tokenizer(tokenizer) -> dict[str, str]:
    """Digests of a tokenizer's chat `template` and vocabulary (`tokenizer`); without a tokenizer, of empty ones."""
    template = "" if tokenizer is None else str(tokenizer.chat_template or "")
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    return {"template": digest_of(template), "tokenizer": digest_of(vocabulary)}
