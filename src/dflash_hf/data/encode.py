"""
Conversations as ids and a loss mask, which is 1 on the tokens that the target wrote.

Messages go through the tokenizer's chat template, each assistant turn as in serving. No `{% generation %}` marks are
needed:

1. For each supervised turn the messages are rendered twice: up to the turn with the generation prompt, and up to the
   end of the turn. The first must be a prefix of the second; what follows the prefix is the turn.
2. Of the turn, only what the target itself writes is supervised, see [`RowEncoder._supervise_turn`].
3. If every turn is rendered the same in the whole conversation, one example teaches all of them. If later messages
   change how earlier turns are rendered (templates that drop old reasoning), every turn is an example of its own.

For example, a template renders "2 + 2?" and "4" as `<user>2 + 2?<assistant>4<end>`. The generation prompt ends with
`<assistant>`, so `4<end>` is supervised.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dflash_hf.data.conversation import Conversation, TokenizedText
from dflash_hf.data.images import load_image
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
        template ([`~dflash_hf.data.template.ChatTemplate`]): Tokenizes and renders as the target is served. The
            default has no tokenizer, and encodes rows of ids only.
        max_length (`int`, *optional*): Maximum number of tokens; the end is cut off.
        mask_token_id (`int`, *optional*): The drafter's mask token. Rows that contain it are left out: it would mean
            both itself and an unknown token.
        vocab_size (`int`, *optional*): Number of rows of the target's embedding; larger ids are an error.
        context_length (`int`, *optional*): Maximum sequence length of the target; prompts of that length are left out.
    """

    template: ChatTemplate = field(default_factory=ChatTemplate)
    max_length: int | None = None
    mask_token_id: int | None = None
    vocab_size: int | None = None
    context_length: int | None = None

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
        if self.template.reader is not None:
            for image in tokens.images:
                load_image(image)  # raises if it is damaged
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
            raise UnusableRow("the ids of its prompt are not a prefix of the ids of prompt and completion together")
        return Example(ids, [0] * len(prompt) + [1] * (len(ids) - len(prompt)))

    def _from_answer_ids(self, conversation: Conversation) -> Example:
        """Messages with the exact ids of the target's answer to them."""
        messages = self.template.normalize_messages(conversation.messages, conversation.tools)
        prompt = self.template.prompt_ids(messages, conversation.tools, **conversation.template_kwargs)
        mask = [0] * len(prompt) + [1] * len(conversation.answer_ids)
        return Example(np.append(prompt, conversation.answer_ids), mask, images_in(messages))

    def _from_turns(self, conversation: Conversation) -> list[Example]:
        """Messages, whose supervised turns are of the assistant: the three steps at the top of this module."""
        supervised = conversation.supervised
        if not supervised:
            raise UnusableRow("it has no assistant message")
        if supervised[0] == 0:
            raise UnusableRow("it begins with an assistant message")
        # 1. The messages that the last supervised turn ends, and the ids around each turn.
        messages = self.template.normalize_messages(conversation.messages[: supervised[-1] + 1], conversation.tools)
        ids_of_turns = self._ids_around_turns(messages, conversation)
        # 2. An example that ends with each turn, in which that turn alone is supervised.
        examples = []
        reasons = conversation.finish_reasons
        for index, (prompt, ids), reason in zip(supervised, ids_of_turns, reasons, strict=True):
            ids, mask = self._supervise_turn(prompt, ids, messages[index], reason)
            examples.append(Example(ids, mask, images_in(messages[: index + 1])))
        # 3. One example for all turns, where that is possible.
        _, conversation_ids = ids_of_turns[-1]
        if all(conversation_ids[: len(example.ids)] == example.ids for example in examples):
            return [_merge_turns(examples, conversation_ids, images_in(messages))]
        return examples

    def _supervise_turn(
        self, prompt: list[int], ids: list[int], message: Mapping, finish_reason: str | None
    ) -> tuple[list[int], list[int]]:
        """
        Ids up to the end of an assistant's turn, and their loss mask, which is 1 on what the target itself writes.

        The template may write more, which is not supervised: an empty thought before the answer, as in
        `<assistant><think></think>4<end>`, whitespace after the turn's last special token, and the end of an answer
        that was cut at its maximum length.

        Args:
            prompt (`list[int]`): The ids before the turn, with the generation prompt.
            ids (`list[int]`): The ids up to the end of the turn.
            message (`Mapping`): The turn.
            finish_reason (`str`, *optional*): Why the answer ended.

        Raises:
            `UnusableRow`: the prompt is not a prefix of the ids.
        """
        if ids[: len(prompt)] != prompt:
            raise UnusableRow(
                "the ids up to the generation prompt are not a prefix of the ids with the assistant's turn; have "
                "`dflash regenerate` answer in its own process, which writes the exact ids"
            )
        start_of_turn = ids[len(prompt) : len(prompt) + _MAX_EMPTY_THOUGHT_TOKENS]
        begin = len(prompt) + self._empty_thought_length(start_of_turn, message)
        end = self._end_of_turn(ids, begin)
        is_cut = finish_reason == "length" and end > begin  # an empty answer has no end of its own
        if is_cut and ids[end - 1] in self.template.tokenizer.added_tokens_decoder:
            end -= 1  # the answer is unfinished: its end is the template's
        return ids[:end], [0] * begin + [1] * (end - begin)

    def _ids_around_turns(
        self, messages: Sequence[Mapping], conversation: Conversation
    ) -> list[tuple[list[int], list[int]]]:
        """For each supervised turn, the ids of its prompt, and the ids up to the end of the turn."""
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
            ids = [self.template.reader.ids(text, images[:count]) for text, count in zip(texts, counts, strict=True)]
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
        bos = getattr(self.template.tokenizer, "bos_token_id", None)
        if bos is not None and ids[:2].tolist() == [bos, bos] and bos != self.template.tokenizer.eos_token_id:
            raise UnusableRow(f"it begins with {self.template.tokenizer.bos_token} twice")
        if self.mask_token_id is not None and self.mask_token_id in ids:
            raise UnusableRow(f"it holds the mask token {self.mask_token_id}")
        if mask.sum() < 2:
            raise UnusableRow("it has no response of two tokens or more")
        reader = self.template.reader
        if images and reader is None:
            raise UnusableRow(NO_IMAGE_READER)
        if reader is not None and np.isin(ids[mask != 0] if images else ids, reader.token_ids).any():
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
        match = _EMPTY_THOUGHT.match(decoded(self.template.tokenizer, ids))
        if not match or f"<{match[1]}>" in f"{message.get('reasoning_content')} {text_of(message)}":
            return 0
        # A token that also contains the start of the answer is the target's.
        for count in range(len(ids), 0, -1):
            if _EMPTY_THOUGHT.fullmatch(decoded(self.template.tokenizer, ids[:count])):
                return count
        return 0

    def _end_of_turn(self, ids: list[int], begin: int) -> int:
        """Where a turn ends: whitespace after its last special token belongs to the template."""
        end = len(ids)
        while end > begin and not decoded(self.template.tokenizer, ids[end - 1 : end]).strip():
            end -= 1
        ends_with_special_token = end > begin and ids[end - 1] in self.template.tokenizer.added_tokens_decoder
        return end if ends_with_special_token else len(ids)


def _merge_turns(examples: Sequence[Example], ids: list[int], images: Sequence[str]) -> Example:
    """
    One example of all turns of a conversation.

    Args:
        examples (`Sequence[Example]`): Each is a prefix of the conversation, and supervises its last turn.
        ids (`list[int]`): The whole conversation.
        images (`Sequence[str]`): Its images.
    """
    mask = np.zeros(len(ids), dtype=int)
    for example in examples:
        mask[: len(example.ids)] |= example.mask
    return Example(ids, mask, images)
