"""The prompts of a dataset, as ids: of single requests, and of conversations that the target takes part in."""

from collections.abc import Callable, Iterable, Sequence

import torch

from dflash_hf._io.files import digest_of
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import prompt_ids
from dflash_hf.targets.generation import forked_rng, generate_one


def prompts_of(
    rows: Sequence[dict],
    encoder: RowEncoder,
    data: str,
    raw: bool = False,
    target=None,
    max_new_tokens: int = 0,
    progress: Callable[[Iterable], Iterable] = iter,
    temperature: float = 0.0,
) -> list[list[int]]:
    """
    The prompt of every row, and of every turn of rows with `turns`, in order.

    Later turns follow the target's own answers, so that all methods, and all drafters, are measured on the same
    prompts. (The published implementation keeps the drafted answer: the same text if decoding is greedy, and a sample
    of the same distribution if it is not.)

    Args:
        rows (`Sequence[dict]`): See [`~dflash_hf.evaluation.sets.eval_rows`].
        data (`str`): Name of the dataset, for errors.
        raw (`bool`): A prompt that is text, or a turn, is text by itself, as it is where there is no chat template.
        target (`PreTrainedModel`), max_new_tokens (`int`): For rows with more than one turn.
        temperature (`float`): Of the answers to earlier turns; 0 is greedy. A row's sample is the same in every run.

    Raises:
        `ValueError`: a row without a prompt; names it.
    """
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
                answer_ids = _answer_ids(target, prompts[-1], max_new_tokens, temperature)
                answer = encoder.template.tokenizer.decode(answer_ids, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": answer})
    return prompts


def _answer_ids(target, prompt: list[int], max_new_tokens: int, temperature: float):
    """The target's own answer to a prompt; the seed of a sample is of the prompt, whichever process has it."""
    options: dict = {"do_sample": False}
    if temperature:
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with forked_rng(target.device):
        torch.manual_seed(int(digest_of(list(prompt))[:8], 16))
        output = generate_one(target, prompt, max_new_tokens=max_new_tokens, **options)
    return output.sequences[0, len(prompt) :]
