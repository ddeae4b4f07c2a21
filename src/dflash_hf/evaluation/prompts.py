"""The prompts of a dataset, as ids: of single requests, and of conversations that the target takes part in."""

from itertools import islice

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import prompt_ids
from dflash_hf.evaluation.sets import rows_of


def read_prompts(data: str, encoder: RowEncoder, limit: int, split: str | None = None, raw: bool = False):
    """
    The first `limit` prompts of a dataset, see [`~dflash_hf.evaluation.sets.rows_of`].

    Raises:
        `ValueError`: a row without a prompt; names it.
    """
    prompts = []
    for index, row in enumerate(islice(iter(rows_of(data, split)), limit)):
        try:
            prompts.append(prompt_ids(encoder, row, raw))
        except ValueError as error:
            raise ValueError(f"Row {index} of {data}: {error}") from error
    return prompts


def prompts_of_conversations(
    target, encoder: RowEncoder, said: list[list[str]], max_new_tokens: int, progress=iter, raw: bool = False
):
    """
    The prompt of every turn of every conversation, in order; answers in between are the target's own, greedy.

    Args:
        said (`list[list[str]]`): Of each conversation what the user says, turn by turn.
        raw (`bool`): Each turn is text by itself, as it is where there is no chat template.
    """
    from dflash_hf.responses import generate_one

    prompts = []
    for turns in progress(said):
        messages: list[dict] = []
        for number, turn in enumerate(turns, start=1):
            messages.append({"role": "user", "content": turn})
            row = {"messages": messages} if encoder.tokenizer.chat_template and not raw else {"prompt": turn}
            prompts.append(list(prompt_ids(encoder, row, raw)))
            if number < len(turns):
                output = generate_one(target, prompts[-1], do_sample=False, max_new_tokens=max_new_tokens)
                answer = output.sequences[0, len(prompts[-1]) :]
                answer = encoder.tokenizer.decode(answer, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": answer})
    return prompts


def turns_of_file(data: str, limit: int, split: str | None = None) -> list[list[str]] | None:
    """
    What the user says turn by turn in the first `limit` rows of a dataset, where its rows have `turns`.

    Raises:
        `ValueError`: a row has others than texts; names it.
    """
    if data.endswith(".txt"):
        return None
    rows = list(islice(iter(rows_of(data, split)), limit))
    if not rows or "turns" not in rows[0]:
        return None
    for index, row in enumerate(rows):
        turns = row["turns"]
        if not (isinstance(turns, list) and turns and all(isinstance(one, str) and one for one in turns)):
            raise ValueError(f"Row {index} of {data}: turns={turns!r} must be a list of the user's texts.")
    return [list(row["turns"]) for row in rows]
