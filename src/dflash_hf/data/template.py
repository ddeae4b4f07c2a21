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
_PROBE = "Xq7"  # plain letters: a template may trim or escape anything else


class ContentSupport(NamedTuple):
    """What a template reads as the content of a message: parts, which it writes out itself; nothing but parts."""

    parts: bool
    parts_only: bool


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
        """Without what is cached: `datasets` knows an encoder again by its state."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def text_ids(self, text: str) -> list[int]:
        """The ids of text that continues: with one token that begins it, and without one that ends it."""
        if self._beginning is None:
            return self.tokenizer(text)["input_ids"]
        ids = self._bare_ids(text)
        if ids[: len(self._beginning)] == self._beginning:
            return ids
        return [*self._beginning, *ids]

    @cached_property
    def _beginning(self) -> list[int] | None:
        """The ids that the tokenizer puts before a text; `None` if it encodes the text itself in another way, too."""
        bare = self._bare_ids(_PROBE)
        framed = self.tokenizer(_PROBE)["input_ids"]
        for place in range(len(framed) - len(bare) + 1):
            if framed[place : place + len(bare)] == bare:
                return framed[:place]
        return None

    def _bare_ids(self, text: str) -> list[int]:
        """The ids of a text alone, without tokens that begin or end it."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt_ids(self, messages: Sequence[Mapping], tools, **kwargs) -> list[int]:
        """The ids of messages of [`as_read`] with the generation prompt."""
        images = images_in(messages)
        if not images:
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
            return [self._bare_ids(text) for text in texts]
        whole = texts[-1]
        added = self.tokenizer.added_tokens_decoder
        encoded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids = encoded["input_ids"]
        starts = [start for start, _ in encoded["offset_mapping"]]
        ids_alone: dict[str, list[int]] = {}
        ids_of_texts = []
        for text in texts:
            # 1. How many tokens of the whole lie in the text, and where the last added one among them is.
            count = bisect_left(starts, len(text)) if whole.startswith(text) else 0
            last_added = next((place for place in range(count - 1, 0, -1) if ids[place] in added), 0)
            # 2. What follows it is tokenized alone; without one, the whole text is.
            rest = text[starts[last_added] :] if last_added else text
            if rest not in ids_alone and text != whole:
                ids_alone[rest] = self._bare_ids(rest)
            # 3. The two must agree.
            if text == whole or (last_added and ids_alone[rest] == ids[last_added:count]):
                ids_of_texts.append(ids[:count])
            elif last_added:
                ids_of_texts.append(self._bare_ids(text))
            else:
                ids_of_texts.append(ids_alone[rest])
        return ids_of_texts

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
        Messages of [`~dflash_hf.data.messages.messages_of`] as the template reads them: arguments of calls are
        mappings, and contents are texts, or parts if it writes those out.

        Raises:
            `UnusableRow`: it does not know a role, or reads no images.
        """
        template = self.template(tools)
        read = []
        for message in messages:
            role = message["role"]
            if role not in _ROLES and role not in template:
                raise UnusableRow(f"the chat template does not know the role {role!r}")
            support = self._content_support(role, template)
            if images_in([message]) and not (self.reader and support.parts):
                raise UnusableRow(NO_IMAGE_READER)
            content = message.get("content")
            if content is None:
                message = {**message, "content": ""}  # of calls alone, as `transformers serve` passes it
            elif support.parts_only and isinstance(content, str):
                message = {**message, "content": [{"type": "text", "text": content}]}
            if not support.parts:
                message = with_text(message)
            read.append(with_arguments(message, as_value))
        return read

    @cached_property
    def _content_supports(self) -> dict[tuple[str, str], ContentSupport]:
        """What [`_content_support`] has found out, by role and template."""
        return {}

    def _content_support(self, role: str, template: str) -> ContentSupport:
        """What the template reads as a role's content, from how it writes a text and the same text as a part."""
        support = self._content_supports.get((role, template))
        if support is None:
            text = self._probe(role, _PROBE, template)
            parts = self._probe(role, [{"type": "text", "text": _PROBE}], template)
            prints_source = "'type'" in parts or '"type"' in parts
            parts_only = _PROBE in parts and _PROBE not in text and not prints_source
            support = ContentSupport(parts_only or (_PROBE in text and text == parts), parts_only)
            self._content_supports[role, template] = support
        return support

    def _probe(self, role: str, content, template: str) -> str:
        """A message as the template writes it; empty if it refuses."""
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
        Messages of [`as_read`] under the template and its arguments: ids, or with `tokenize=False` their text.

        Raises:
            `UnusableRow`: the template refuses them, or fails.
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
