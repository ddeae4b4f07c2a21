"""The prompts of a dataset, as ids: of single requests, and of conversations that the target takes part in."""

from collections.abc import Callable, Iterable, Sequence

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import prompt_ids


def prompts_of(
    rows: Sequence[dict],
    encoder: RowEncoder,
    data: str,
    raw: bool = False,
    target=None,
    max_new_tokens: int = 0,
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[list[int]]:
    """
    The prompt of every row, and of every turn of rows with `turns`, in order; answers in between are the target's own,
    greedy.

    Args:
        rows (`Sequence[dict]`): See [`~dflash_hf.evaluation.sets.eval_rows`].
        data (`str`): Name of the dataset, for errors.
        raw (`bool`): A prompt that is text, or a turn, is text by itself, as it is where there is no chat template.
        target (`PreTrainedModel`), max_new_tokens (`int`): For rows with more than one turn.

    Raises:
        `ValueError`: a row without a prompt; names it.
    """
    from dflash_hf.targets.generation import generate_one

    prompts: list[list[int]] = []
    for index, row in enumerate(progress(rows)):
        messages: list[dict] = []
        turns = row.get("turns") or [None]
        for number, turn in enumerate(turns, start=1):
            if turn is not None:
                messages.append({"role": "user", "content": turn})
                as_chat = bool(encoder.template.tokenizer.chat_template) and not raw
                row = {"messages": messages} if as_chat else {"prompt": turn}
            try:
                prompts.append(prompt_ids(encoder, row, raw))
            except ValueError as error:
                raise ValueError(f"Row {index} of {data}: {error}") from error
            if number < len(turns):
                output = generate_one(target, prompts[-1], do_sample=False, max_new_tokens=max_new_tokens)
                answer_ids = output.sequences[0, len(prompts[-1]) :]
                answer = encoder.template.tokenizer.decode(answer_ids, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": answer})
    return prompts
