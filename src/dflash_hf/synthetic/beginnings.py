"""Beginnings of given texts, as prompts of a base model; `dflash prompts --data`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from dflash_hf.data.distinct import DistinctTexts, quality_issue
from dflash_hf.data.messages import UnusableRow
from dflash_hf.data.row_layouts import conversation_of
from dflash_hf.data.template import ChatTemplate


def text_beginnings(
    rows: Iterable[Mapping], source: str, tokenizer, max_tokens: int, before: Sequence[dict] = ()
) -> Iterator[tuple[dict | None, str | None]]:
    """
    The beginning of each row's text, continuing after the rows `before` of an earlier call.

    Args:
        rows (`Iterable[Mapping]`): With a text, a `prompt` that is one, or a conversation, whose first message is the
            text.
        source (`str`): Where the rows are from, for errors.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        max_tokens (`int`): Longest beginning. A longer text is cut after a whole word.
        before (`Sequence[dict]`): What was returned before.

    Returns:
        `Iterator`: For each row `kind`, `prompt`, `row`, and `sample`, the number of the text; or the reason to leave
        it out.

    Raises:
        `ValueError`: a row has no text; names its number.
    """
    template = ChatTemplate(tokenizer)
    distinct = DistinctTexts()
    for row in before:
        distinct.add(row["prompt"])
    row_number = before[-1]["row"] + 1 if before else 0
    first = before[-1]["sample"] + 1 if before else 0
    for number, row in enumerate(rows):
        if number < first:
            continue
        try:
            text = _text_of(row)
        except UnusableRow as reason:
            yield None, str(reason)
            continue
        except ValueError as error:
            raise ValueError(f"Row {number} of {source}: {error}") from error
        prompt = _beginning(template, text, max_tokens).strip()
        reason = quality_issue(prompt)
        if reason is None and not distinct.add(prompt):
            reason = "like another"
        if reason is not None:
            yield None, reason
            continue
        yield {"row": row_number, "kind": row.get("kind", "text"), "prompt": prompt, "sample": number}, None
        row_number += 1


def whole_words(text: str) -> str:
    """
    A text that was cut, without its last word, which may be half of one. A text whose last space is in its first half,
    as in Chinese or Japanese, stays, without half of a character.
    """
    words = text.rstrip()
    end = max(words.rfind(space) for space in " \n\t")
    return words[:end] if end > len(words) / 2 else words.rstrip("\ufffd")


def _text_of(row: Mapping) -> str:
    """
    The text of a row.

    Raises:
        `UnusableRow`: it is empty.
        `ValueError`: it has none.
    """
    prompt = row.get("text")
    if not isinstance(prompt, str):
        prompt = conversation_of(row, answers=False, ids=False).prompt(as_chat=False)
    if not isinstance(prompt, str):
        contents = [message["content"] for message in prompt if isinstance(message.get("content"), str)]
        prompt = contents[0] if contents else ""
    if not prompt.strip():
        raise UnusableRow("it is empty")
    return prompt


def _beginning(template: ChatTemplate, text: str, max_tokens: int) -> str:
    ids = template.text_ids(text)
    if len(ids) <= max_tokens:
        return text
    return whole_words(template.tokenizer.decode(ids[:max_tokens], skip_special_tokens=True))
