"""
Requests written by the target itself, to train a drafter without a dataset; `dflash prompts`.

Given its chat template up to the start of the user's text, an aligned model continues with a user's text (Magpie,
https://arxiv.org/abs/2406.08464). Samples are numbered. Each has its own seed and is compared, in order, with all
requests kept before, so that the file is the same after any interruption and for any batch size (except for rounding,
in half precision).
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from transformers import GenerationConfig

from dflash_hf.data.distinct import DistinctTexts, flaw
from dflash_hf.data.encode import decoded
from dflash_hf.data.prompt_settings import PromptSettings
from dflash_hf.data.user_turn import UserTurn
from dflash_hf.responses import eos_ids, responses


_PATIENCE = 512  # give up after this many samples without a new request


class Sample(NamedTuple):
    """Text that the target wrote as the user: a `row`, or a `reason` to leave it out."""

    row: dict | None
    reason: str | None = None


def generate_prompts(
    target, tokenizer, count: int, settings: PromptSettings | None = None, batch_size: int | None = None
) -> list[dict]:
    """
    Requests that a chat model writes itself, without near-duplicates.

    Args:
        target (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): A chat model and its tokenizer.
        count (`int`): Number of requests.
        settings (`PromptSettings`): Default: chat, T = 1, top-p 0.95.
        batch_size (`int`, *optional*): Samples that are generated together; affects speed only.

    Returns:
        `list[dict]`: Rows with `kind` and `prompt` (`messages` if there is a system prompt), `row`, and `sample`, the
        number of the sample.

    Raises:
        `ValueError`: the chat template has no recognisable user turn, or too few samples are new requests.
    """
    samples = judged_samples(target, tokenizer, count, settings or PromptSettings(), batch_size)
    return [sample.row for sample in samples if sample.row]


def judged_samples(
    target, tokenizer, count: int, settings: PromptSettings, batch_size: int | None = None, before: Sequence[dict] = ()
) -> Iterator[Sample]:
    """The samples of [`generate_prompts`], one by one, continuing after the rows `before` of earlier calls."""
    if len(before) >= count:
        return
    turn, seen = UserTurn.of(tokenizer, settings.system, settings.chat_template_kwargs), DistinctTexts()
    for row in before:
        seen.add(_text_of(row))
    have, first = len(before), before[-1]["sample"] + 1 if before else 0
    idle, left_out = 0, Counter()
    for number, response in _sampled(target, tokenizer, turn, settings, first, batch_size):
        kind, begin = settings.of_sample(number)
        text, reason = _request(tokenizer, turn, target, begin, response)
        reason = reason or flaw(text, settings.min_chars, settings.max_chars)
        reason = reason or (None if seen.add(text) else "like another")
        if reason:
            yield Sample(None, reason)
            idle, left_out = idle + 1, left_out + Counter([reason])
        else:
            yield Sample({"row": have, **_row(kind, text, settings, number)})
            have, idle = have + 1, 0
            left_out.clear()
        if have == count:
            return
        if idle >= _PATIENCE:
            reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.most_common())
            raise ValueError(
                f"count={count}: after {have} requests the last {idle} samples gave none that is new ({reasons}). Ask "
                "for fewer, raise temperature or max_new_tokens, or choose other kinds or `begin`."
            )


def _sampled(target, tokenizer, turn: UserTurn, settings: PromptSettings, first: int, batch_size: int | None):
    """Number and ids of each text that the target writes as the user, in order."""
    config = GenerationConfig(
        do_sample=True,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=0,
        eos_token_id=sorted(_stops(target, tokenizer, turn)) or None,
        pad_token_id=target.generation_config.pad_token_id,
    )
    begins = ((number, settings.of_sample(number)[1]) for number in itertools.count(first))
    prompts = ((number, prompt_ids(tokenizer, turn, begin)) for number, begin in begins)
    waiting: dict[int, list[int]] = {}
    for number, response in responses(target, prompts, settings.max_new_tokens, config, batch_size, settings.seed):
        waiting[number] = response
        while first in waiting:
            yield first, waiting.pop(first)
            first += 1


def prompt_ids(tokenizer, turn: UserTurn, begin: str) -> list[int]:
    """The prompt of a sample: the chat template up to the user's text, and the text's first words."""
    return tokenizer(turn.before + begin, add_special_tokens=False)["input_ids"]


def _stops(target, tokenizer, turn: UserTurn) -> set[int]:
    stop = turn.stop_id(tokenizer)
    return eos_ids(target.generation_config) | ({stop} if stop is not None else set())


def _request(tokenizer, turn: UserTurn, target, begin: str, response: list[int]) -> tuple[str, str | None]:
    """The text of a sample, and the reason if it is not a request that a user would send."""
    ended = response[-1] in _stops(target, tokenizer, turn)
    ids, start = response[: len(response) - ended], prompt_ids(tokenizer, turn, begin)
    # Decoded after the prompt: some tokenizers drop the space before a first word.
    text = decoded(tokenizer, [*start, *ids])[len(decoded(tokenizer, start)) :]
    if turn.stop_id(tokenizer) is None and turn.behind.strip():
        text, found, _ = text.partition(turn.behind.strip())
        ended = ended or bool(found)
    reason = None
    if not ended:
        reason = "unfinished"
    elif {id for id, token in tokenizer.added_tokens_decoder.items() if token.special} & set(ids):
        reason = "holds a special token"
    elif not text.strip():
        reason = "nothing after its beginning"
    return (begin + text).strip(), reason


def _row(kind: str, text: str, settings: PromptSettings, number: int) -> dict:
    if settings.system is None:
        return {"kind": kind, "prompt": text, "sample": number}
    system = {"role": "system", "content": settings.system}
    return {"kind": kind, "messages": [system, {"role": "user", "content": text}], "sample": number}


def _text_of(row: dict) -> str:
    return row["prompt"] if "prompt" in row else row["messages"][-1]["content"]


def rows_of_file(path: Path) -> list[dict]:
    """
    The requests in a file, without a last line that was never finished.

    Raises:
        `ValueError`: a line is not a request of `dflash prompts`; the message names it.
    """
    with path.open("rb") as lines:
        rows = [json.loads(line) for line in lines if line.endswith(b"\n")]
    for number, row in enumerate(rows):
        if row["row"] != number or "sample" not in row or not {"prompt", "messages"} & row.keys():
            raise ValueError(
                f"Line {number + 1} of {path} is not request {number} of `dflash prompts`; choose another output."
            )
    return rows
