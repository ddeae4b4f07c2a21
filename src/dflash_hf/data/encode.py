"""
Conversations as ids and a loss mask, which is 1 on the tokens that the target wrote.

Messages go through the tokenizer's chat template, each assistant turn as in serving: the messages before it, with the
generation prompt, must be a prefix of the same messages with the turn; the rest is the turn. No `{% generation %}`
marks are needed. If later messages change how earlier turns are rendered (templates that drop old reasoning), every
turn becomes an example of its own.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dflash_hf.data.conversation import Conversation, TokenizedText
from dflash_hf.data.images import ImageReader, load
from dflash_hf.data.messages import NO_IMAGE_READER, UnusableRow, images_in, text_of
from dflash_hf.data.row_layouts import conversation_of
from dflash_hf.data.template import ChatTemplate, decoded


class Example(NamedTuple):
    """Ids and loss mask, and the paths or URIs of the images among the ids."""

    ids: Sequence[int] | np.ndarray
    mask: Sequence[int] | np.ndarray
    images: Sequence[str] = ()


_EMPTY_THOUGHT = re.compile(r"\s*<(\w+)>\s*</\1>\s*")  # <think>\n\n</think>\n\n, by whatever name
_MAX_EMPTY_THOUGHT_TOKENS = 64


@dataclass(frozen=True)
class RowEncoder:
    """
    Turns a row into examples.

    Args:
        tokenizer, chat_template_kwargs, reader: Those of `template`, a [`~dflash_hf.data.template.ChatTemplate`].
        max_length (`int`, *optional*): Maximum number of tokens; the end is cut off.
        mask_token_id (`int`, *optional*): The drafter's mask token. Rows that contain it are left out: it would mean
            both itself and an unknown token.
        vocab_size (`int`, *optional*): Number of rows of the target's embedding; larger ids are an error.
        positions (`int`, *optional*): Maximum sequence length of the target; prompts of that length are left out.
    """

    tokenizer: object = None
    chat_template_kwargs: dict = field(default_factory=dict)
    reader: ImageReader | None = None
    max_length: int | None = None
    mask_token_id: int | None = None
    vocab_size: int | None = None
    positions: int | None = None
    template: ChatTemplate = field(init=False, repr=False)

    def __post_init__(self):
        template = ChatTemplate(self.tokenizer, self.chat_template_kwargs, self.reader)
        object.__setattr__(self, "template", template)  # of a frozen dataclass

    def __call__(self, row: Mapping) -> list[dict]:
        """
        The examples of a row of any layout, see [`~dflash_hf.data.row_layouts.conversation_of`].

        Returns:
            `list[dict]`: With `input_ids` and `loss_mask`, two lists of equal length, and `images` if there are any.

        Raises:
            `UnusableRow`: the row is left out.
            `ValueError`: the dataset or the template is invalid.
        """
        examples = []
        for ids, mask, images in self.encode(conversation_of(row)):
            example = {"input_ids": ids.tolist(), "loss_mask": mask.tolist()}
            if images:
                example["images"] = list(images)
            examples.append(example)
        return examples

    def encode(self, conversation: Conversation) -> list[Example]:
        """
        The examples of a conversation, `[T]` each: one, or one for each assistant turn, see above. Its `supervised`
        messages, its `completion` or its `answer_ids` alone are supervised. `document_ids` divide ids into examples.

        Raises:
            `UnusableRow`: no token is supervised, or one that cannot be.
            `ValueError`: the dataset or the template is invalid.
        """
        examples = []
        unusable = None
        for ids, mask, images in self._build_examples(conversation):
            try:
                examples.append(self._validate(np.asarray(ids), np.asarray(mask), images))
            except UnusableRow as error:  # of several turns, others may be usable
                unusable = error
        if unusable is not None and not examples:
            raise unusable
        return examples

    def _build_examples(self, conversation: Conversation) -> list[Example]:
        """The examples of a conversation, before [`_validate`]."""
        if conversation.tokens is not None:
            return self._from_ids(conversation.tokens)
        if conversation.completion is not None:
            return [self._from_text(conversation.text, conversation.completion)]
        if conversation.answer_ids is not None:
            return [self._from_answer_ids(conversation)]
        return self._from_turns(conversation)

    def _from_ids(self, tokens: TokenizedText) -> list[Example]:
        """The examples of ids with a mask: one for each run of equal `document_ids`."""
        mask = tokens.mask.astype(np.int64)
        examples = [Example(tokens.ids, mask, tokens.images)]
        if tokens.document_ids is not None:
            starts = np.flatnonzero(np.diff(tokens.document_ids)) + 1
            pieces = zip(np.split(tokens.ids, starts), np.split(mask, starts), strict=True)
            examples = [Example(ids, ids_mask, tokens.images) for ids, ids_mask in pieces]
        if tokens.images and len(examples) > 1:
            raise UnusableRow("it has `document_ids` and images, and no place says which are whose")
        if self.reader:
            for image in tokens.images:
                load(image)  # raises if it is damaged
        return examples

    def _from_text(self, text: str, completion: str) -> Example:
        """A text, of which its `completion` is supervised."""
        prompt = self.template.text_ids(text)
        if not prompt:
            raise UnusableRow("its `prompt` is empty")
        if not completion:
            raise UnusableRow("its `completion` is empty")
        ids = self.template.text_ids(text + completion)
        if ids[: len(prompt)] != prompt:
            raise UnusableRow("the ids of its prompt do not begin those of prompt and completion together")
        return Example(ids, [0] * len(prompt) + [1] * (len(ids) - len(prompt)))

    def _from_answer_ids(self, conversation: Conversation) -> Example:
        """Messages with the exact ids of the target's answer to them."""
        messages = self.template.normalize_messages(conversation.messages, conversation.tools)
        prompt = self.template.prompt_ids(messages, conversation.tools, **conversation.template_kwargs)
        mask = [0] * len(prompt) + [1] * len(conversation.answer_ids)
        return Example(np.append(prompt, conversation.answer_ids), mask, images_in(messages))

    def _from_turns(self, conversation: Conversation) -> list[Example]:
        """Messages: of each supervised one, what it adds to its prompt."""
        supervised = conversation.supervised
        if not supervised:
            raise UnusableRow("it has no assistant message")
        if supervised[0] == 0:
            raise UnusableRow("it begins with an assistant message")
        messages = self.template.normalize_messages(conversation.messages[: supervised[-1] + 1], conversation.tools)
        encoded = self._ids_around_turns(messages, conversation)
        examples = []
        for index, (prompt, ids), reason in zip(supervised, encoded, conversation.finish_reasons, strict=True):
            if ids[: len(prompt)] != prompt:
                raise UnusableRow(
                    "the ids up to the generation prompt do not begin those with the assistant's turn; have `dflash "
                    "regenerate` answer in its own process, which writes the exact ids"
                )
            start_of_turn = ids[len(prompt) : len(prompt) + _MAX_EMPTY_THOUGHT_TOKENS]
            begin = len(prompt) + self._empty_thought_length(start_of_turn, messages[index])
            end = self._end_of_turn(ids, begin)
            if reason == "length" and ids[end - 1] in self.tokenizer.added_tokens_decoder:
                end -= 1  # the answer is unfinished: its end is the template's
            mask = [0] * begin + [1] * (end - begin)
            examples.append(Example(ids[:end], mask, images_in(messages[: index + 1])))
        _, whole = encoded[-1]
        for example in examples:
            if whole[: len(example.ids)] != example.ids:  # later messages have changed how this turn is rendered
                return examples
        # Every turn reads the same in the whole conversation: one example teaches all of them.
        mask = np.zeros(len(whole), dtype=int)
        for example in examples:
            mask[: len(example.ids)] |= example.mask
        return [Example(whole, mask, images_in(messages))]

    def _ids_around_turns(
        self, messages: Sequence[Mapping], conversation: Conversation
    ) -> list[tuple[list[int], list[int]]]:
        """For each supervised turn, the ids of its prompt, and the ids up to its end."""
        tools = conversation.tools
        kwargs = conversation.template_kwargs
        images = images_in(messages)
        texts = []
        counts = []  # of images in each text
        for index in conversation.supervised:
            turns = messages[:index]
            texts.append(self.template.render(turns, tools, add_generation_prompt=True, tokenize=False, **kwargs))
            counts.append(len(images_in(turns)))
            turns = messages[: index + 1]
            texts.append(self.template.render(turns, tools, tokenize=False, **kwargs))
            counts.append(len(images_in(turns)))
        if any(counts):
            ids = [self.reader.ids(text, images[:count]) for text, count in zip(texts, counts, strict=True)]
        else:
            ids = self.template.tokenize_prefixes(texts)
        return list(zip(ids[::2], ids[1::2], strict=True))

    def _validate(self, ids: np.ndarray, mask: np.ndarray, images: Sequence[str]) -> Example:
        """An example, cut to length; one that would teach nothing, or something wrong, is rejected."""
        if len(ids) and mask.all():
            raise UnusableRow(
                "its loss mask is all ones, the prompt included; mask the prompt with 0 (or labels of -100), and of "
                "text without a prompt the first token"
            )
        smallest = ids.min(initial=0)
        if smallest < 0:
            raise ValueError(f"Token {smallest} of input_ids is negative; -100 belongs into `labels` only.")
        if self.vocab_size is not None:
            largest = ids.max(initial=0)
            if largest >= self.vocab_size:
                raise ValueError(
                    f"Token {largest} is outside the target's embedding, which has {self.vocab_size} rows; the data "
                    "was made with another tokenizer."
                )
        bos = getattr(self.tokenizer, "bos_token_id", None)
        if bos is not None and ids[:2].tolist() == [bos, bos] and bos != self.tokenizer.eos_token_id:
            raise UnusableRow(f"it begins with {self.tokenizer.bos_token} twice")
        if self.mask_token_id is not None and self.mask_token_id in ids:
            raise UnusableRow(f"it holds the mask token {self.mask_token_id}")
        if mask.sum() < 2:
            raise UnusableRow("it has no response of two tokens or more")
        if images and self.reader is None:
            raise UnusableRow(NO_IMAGE_READER)
        if self.reader and np.isin(ids[mask != 0] if images else ids, self.reader.token_ids).any():
            raise UnusableRow("it holds the token of an image where there is none")
        if self.max_length is not None and len(ids) > self.max_length:
            if images:
                raise UnusableRow(f"it has images and more than max_length={self.max_length} tokens; it cannot be cut")
            ids = ids[: self.max_length]
            mask = mask[: self.max_length]
            if mask.sum() < 2:
                raise UnusableRow(f"its response begins beyond max_length={self.max_length}")
        return Example(ids, mask, images)

    def _empty_thought_length(self, ids: list[int], message: Mapping) -> int:
        """Length of an empty thought at the start of a turn's ids that is not part of the message itself."""
        match = _EMPTY_THOUGHT.match(decoded(self.tokenizer, ids))
        if not match or f"<{match[1]}>" in f"{message.get('reasoning_content')} {text_of(message)}":
            return 0
        # A token that also contains the start of the answer is the target's.
        for count in range(len(ids), 0, -1):
            if _EMPTY_THOUGHT.fullmatch(decoded(self.tokenizer, ids[:count])):
                return count
        return 0

    def _end_of_turn(self, ids: list[int], begin: int) -> int:
        """Where a turn ends: whitespace after its last special token belongs to the template."""
        end = len(ids)
        while end > begin and not decoded(self.tokenizer, ids[end - 1 : end]).strip():
            end -= 1
        ends_with_special_token = end > begin and ids[end - 1] in self.tokenizer.added_tokens_decoder
        return end if ends_with_special_token else len(ids)
