"""
Rows of a dataset as ids and a loss mask, which is 1 on the tokens that the target wrote.

Conversations go through the tokenizer's chat template, each assistant turn as in serving: the messages before it, with
the generation prompt, must be a prefix of the same messages with the turn; the rest is the turn. No `{% generation %}`
marks are needed. If later messages change how earlier turns are rendered (templates that drop old reasoning), every
turn becomes an example of its own.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dflash_hf.data.images import load
from dflash_hf.data.messages import (
    UNSEEN,
    UnusableRow,
    column_of,
    column_of_images,
    conversation_column,
    conversation_in,
    image_uri,
    images_in,
    messages_in,
    text_of,
    tools_of,
    without_columns,
)
from dflash_hf.data.template import ChatTemplate, decoded, template_kwargs_of
from dflash_hf.terminal import one_line


class Example(NamedTuple):
    """Ids and loss mask, and the paths or URIs of the images among the ids."""

    ids: Sequence[int] | np.ndarray
    mask: Sequence[int] | np.ndarray
    images: Sequence[str] = ()


COLUMNS = (
    "`messages` or `conversations`, alone or with `response_ids`, `prompt` and `completion`, `instruction` and "
    "`output`, `question` and `answer`, or `input_ids` with `loss_mask` or `labels`"
)
_EMPTY_THOUGHT = re.compile(r"\s*<(\w+)>\s*</\1>\s*")  # <think>\n\n</think>\n\n, by whatever name
_IGNORED_LABEL = -100  # of transformers' losses


@dataclass(frozen=True)
class RowEncoder(ChatTemplate):
    """
    Turns a row into examples.

    Args:
        tokenizer, chat_template_kwargs, reader: See [`~dflash_hf.data.template.ChatTemplate`].
        max_length (`int`, *optional*): Maximum number of tokens; the end is cut off.
        mask_token_id (`int`, *optional*): The drafter's mask token. Rows that contain it are left out: it would mean
            both itself and an unknown token.
        vocab_size (`int`, *optional*): Number of rows of the target's embedding; larger ids are an error.
        positions (`int`, *optional*): Maximum sequence length of the target; prompts of that length are left out.
    """

    max_length: int | None = None
    mask_token_id: int | None = None
    vocab_size: int | None = None
    positions: int | None = None

    def __call__(self, row: Mapping) -> list[dict]:
        """
        The examples of a row: one, or one for each assistant turn, see above. Learned are all assistant turns of
        `messages`, except among the first `given` messages; or those at the places in `answered`. If the row has
        `response_ids`, the exact ids of the target's answer, only these are learned. `document_ids` divide
        `input_ids` into examples.

        Returns:
            `list[dict]`: With `input_ids` and `loss_mask`, two lists of equal length, and `images` if there are any.

        Raises:
            `UnusableRow`: the row is left out.
            `ValueError`: the dataset or the template is invalid.
        """
        examples = []
        for ids, mask, images in self.arrays(row):
            seen = {"images": list(images)} if images else {}
            examples.append({"input_ids": ids.tolist(), "loss_mask": mask.tolist(), **seen})
        return examples

    def arrays(self, row: Mapping) -> list[Example]:
        """The examples of a row; a call returns them as lists."""
        found, unusable = [], None
        for ids, mask, images in self._unchecked(row):  # of several turns, those that can be learned
            try:
                found.append(self._checked(np.asarray(ids), np.asarray(mask), images))
            except UnusableRow as error:
                unusable = error
        if unusable is not None and not found:
            raise unusable
        return found

    def _unchecked(self, row: Mapping) -> list[Example]:
        """The examples of a row, whatever they teach."""
        if row.get("input_ids") is not None:
            return self._of_ids(row)
        name, said = conversation_in(row)
        if name is None or name == "prompt" and row.get("completion") is None:
            answer = "have the target answer the prompts with `dflash regenerate`, or give answers as `completion`"
            raise without_columns(row, answer if name else f"give {COLUMNS}")
        if name == "prompt":
            return self._completed(row, said)
        if row.get("response_ids") is None:
            return self._conversation(row, said, _learned(row, said))
        tools, kwargs = tools_of(row), template_kwargs_of(row)
        messages = self.as_read(said, tools)
        prompt, answer = self.prompt_ids(messages, tools, **kwargs), numbers_in(row, "response_ids")
        mask = [0] * len(prompt) + [1] * len(answer)
        return [Example(np.append(prompt, answer), mask, images_in(messages))]

    def _of_ids(self, row: Mapping) -> list[Example]:
        """A row of `input_ids`."""
        examples, images = _examples_of_ids(row), images_of(row)
        if images and len(examples) > 1:
            raise UnusableRow("it has `document_ids` and images, and no place says which are whose")
        for one in images if self.reader else ():
            load(one)  # raises if it is damaged
        return [one._replace(images=images) for one in examples]

    def _checked(self, ids: np.ndarray, mask: np.ndarray, images: Sequence[str]) -> Example:
        """Cut to length; reject examples that would teach nothing, or something wrong."""
        if len(ids) and mask.all():
            raise ValueError(
                f"The loss mask is all ones ({len(ids)} tokens): the prompt would be learned as well. Mask it with 0 "
                "(or labels of -100); for text without a prompt, the first token alone."
            )
        if (least := ids.min(initial=0)) < 0:
            raise ValueError(f"Token {least} of input_ids is negative; -100 belongs into `labels` only.")
        if self.vocab_size is not None and (largest := ids.max(initial=0)) >= self.vocab_size:
            raise ValueError(
                f"Token {largest} is outside the target's embedding, which has {self.vocab_size} rows; the data was "
                "made with another tokenizer."
            )
        begin = getattr(self.tokenizer, "bos_token_id", None)
        if begin is not None and ids[:2].tolist() == [begin, begin] and begin != self.tokenizer.eos_token_id:
            raise UnusableRow(f"it begins with {self.tokenizer.bos_token} twice")
        if self.mask_token_id is not None and self.mask_token_id in ids:
            raise UnusableRow(f"it holds the mask token {self.mask_token_id}")
        if mask.sum() < 2:
            raise UnusableRow("it has no response of two tokens or more")
        if images and self.reader is None:
            raise UnusableRow(UNSEEN)
        if self.reader and np.isin(ids[mask != 0] if images else ids, self.reader.token_ids).any():
            raise UnusableRow("it holds the token of an image where there is none")
        if images and self.max_length is not None and len(ids) > self.max_length:
            raise UnusableRow(f"it has images and more than max_length={self.max_length} tokens; it cannot be cut")
        ids, mask = ids[: self.max_length], mask[: self.max_length]
        if mask.sum() < 2:
            raise UnusableRow(f"its response begins beyond max_length={self.max_length}")
        return Example(ids, mask, images)

    def _completed(self, row: Mapping, prompt: str | list[dict]) -> list[Example]:
        """A row of `prompt` and `completion`."""
        completion = row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            start, ids = self.text_ids(prompt), self.text_ids(prompt + completion)
            if not start or not completion:
                raise UnusableRow(f"its `{'completion' if start else 'prompt'}` is empty")
            if ids[: len(start)] != start:
                raise UnusableRow("the ids of its prompt do not begin those of prompt and completion together")
            return [Example(ids, [0] * len(start) + [1] * (len(ids) - len(start)))]
        if isinstance(prompt, str):
            raise ValueError("`prompt` is text but `completion` is not; give both as text or both as messages.")
        turns = [{"role": "assistant", "content": completion}]
        if not isinstance(completion, str):
            turns = messages_in(row, "completion")
        messages = [*prompt, *turns]
        return self._conversation(row, messages, _learned({"given": len(prompt)}, messages))

    def _conversation(self, row: Mapping, messages: Sequence[Mapping], learned: list[int]) -> list[Example]:
        """A conversation in which only the messages at some places are learned: what each adds to its prompt."""
        if not learned:
            raise UnusableRow("it has no assistant message")
        if learned[0] == 0:
            raise UnusableRow("it begins with an assistant message")
        tools, kwargs = tools_of(row), template_kwargs_of(row)
        messages = self.as_read(messages[: learned[-1] + 1], tools)
        reasons = row.get("finish_reason")
        reasons = reasons if isinstance(reasons, list) else [None] * (len(learned) - 1) + [reasons]
        reasons = [*reasons, *[None] * len(learned)][: len(learned)]
        texts, images, examples = [], images_in(messages), []
        for i in learned:
            texts.append(self.render(messages[:i], tools, add_generation_prompt=True, tokenize=False, **kwargs))
            texts.append(self.render(messages[: i + 1], tools, tokenize=False, **kwargs))
        seen = [len(images_in(messages[:end])) for i in learned for end in (i, i + 1)]
        if any(seen):
            encoded = [self.reader.ids(text, images[:count]) for text, count in zip(texts, seen, strict=True)]
        else:
            encoded = self.ids_of_beginnings(texts)
        for i, prompt, ids, reason in zip(learned, encoded[::2], encoded[1::2], reasons, strict=True):
            if ids[: len(prompt)] != prompt:
                raise UnusableRow(
                    "the ids up to the generation prompt do not begin those with the assistant's turn; have `dflash "
                    "regenerate` answer in its own process, which writes the exact ids"
                )
            begin = len(prompt) + self._inserted(ids[len(prompt) : len(prompt) + 64], messages[i])
            end = self._end(ids, begin)
            if reason == "length" and ids[end - 1] in self.tokenizer.added_tokens_decoder:
                end -= 1  # the answer is unfinished: its end is the template's
            examples.append(Example(ids[:end], [0] * begin + [1] * (end - begin), images_in(messages[: i + 1])))
        whole, mask = encoded[-1], np.zeros(len(encoded[-1]), dtype=int)
        if not all(whole[: len(one.ids)] == one.ids for one in examples):
            return examples
        for one in examples:
            mask[: len(one.ids)] |= one.mask
        return [Example(whole, mask, images)]

    def _inserted(self, ids: list[int], message: Mapping) -> int:
        """Length of an empty thought at the start of a turn that is not part of the message itself."""
        match = _EMPTY_THOUGHT.match(decoded(self.tokenizer, ids[:64]))
        if not match or f"<{match[1]}>" in f"{message.get('reasoning_content')} {text_of(message)}":
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


def numbers_in(row: Mapping, name: str) -> np.ndarray:
    """
    The integers in a column of token ids, labels or a loss mask, `[T]`.

    Raises:
        `ValueError`: it holds something else.
    """
    with contextlib.suppress(TypeError, ValueError, OverflowError), np.errstate(invalid="ignore"):
        given = np.asarray(row[name])
        numbers = given.astype(np.int64, casting="unsafe" if given.dtype.kind == "f" else "same_kind")
        if numbers.ndim == 1 and (numbers == given).all():
            return numbers
    raise ValueError(f"`{name}` is {one_line(repr(row[name]), 60)}; give a flat list with one integer for each token.")


def images_of(row: Mapping) -> list[str]:
    """The images of a row: of its messages, or of what `dflash prepare` wrote. Text beside ids may be anything."""
    if row.get("input_ids") is not None:
        name = conversation_column(row)
        if name is None:
            return [image_uri(one) for one in column_of_images(row)]
        said = row[name] or [None]
        if not isinstance(said[0], Mapping) and not (isinstance(said, str) and said.lstrip().startswith("[{")):
            return []
    _, said = conversation_in(row)
    return [] if isinstance(said, str) else images_in(said)


def given_ids(row: Mapping) -> list[int]:
    """The ids of a row before the first supervised one; all of a row without a mask."""
    ids = numbers_in(row, "input_ids").tolist()
    mask = row.get("loss_mask")
    mask = [one != _IGNORED_LABEL for one in row.get("labels") or []] if mask is None else list(mask)
    return ids[: mask.index(True)] if True in mask else ids


def _learned(row: Mapping, messages: Sequence[Mapping]) -> list[int]:
    """The places of the messages that are learned: see [`RowEncoder.__call__`]."""
    answers = [i for i, one in enumerate(messages) if one["role"] == "assistant"]
    if row.get("answered") is not None:
        places = row["answered"]
        if not isinstance(places, list) or not set(places) <= set(answers):
            raise ValueError(f"`answered` is {places!r}; give places of assistant messages, which are at {answers}.")
        return sorted(places)
    given = row.get("given") or 0
    if not isinstance(given, int | float) or given % 1 != 0:
        raise ValueError(f"`given` is {given!r}; give the number of messages that are not learned from.")
    return [i for i in answers if i >= given]


def _examples_of_ids(row: Mapping) -> list[Example]:
    """The examples of a row of ids; `labels` are not shifted, and -100 where they are ignored."""
    ids, name = numbers_in(row, "input_ids"), column_of(row, "loss_mask", "labels")
    if name is None:
        raise UnusableRow("its `input_ids` need a `loss_mask` (1 on the response) or `labels` (-100 elsewhere).")
    if len(ids) == 0:
        raise UnusableRow("its `input_ids` are empty")
    values = numbers_in(row, name)
    mask = values != (_IGNORED_LABEL if name == "labels" else 0)
    if len(values) != len(ids):
        raise ValueError(f"There are {len(ids)} input_ids but {len(values)} {name}; give one for each token.")
    if not mask.any():
        raise ValueError(f"The {name} supervise none of {len(ids)} tokens (a mask of zeros); mark the response.")
    if name == "labels" and (shifted := mask & (values != ids)).any():
        wrong = int(shifted.argmax())
        raise ValueError(
            f"labels[{wrong}]={values[wrong]} is not input_ids[{wrong}]={ids[wrong]}: labels must not be shifted, as "
            "in transformers."
        )
    if row.get("document_ids") is None:
        return [Example(ids, mask.astype(np.int64))]
    documents = numbers_in(row, "document_ids")
    if len(documents) != len(ids):
        raise ValueError(f"There are {len(ids)} input_ids but {len(documents)} document_ids; give one for each token.")
    starts = np.flatnonzero(np.diff(documents)) + 1
    return [Example(*one) for one in zip(np.split(ids, starts), np.split(mask.astype(np.int64), starts), strict=True)]
