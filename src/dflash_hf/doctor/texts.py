"""Texts by the target, in which blocks are drafted."""

import copy
from collections.abc import Sequence

import torch

from dflash_hf.data.encode import RowEncoder, given_ids
from dflash_hf.data.messages import UnusableRow, text_of, tools_of
from dflash_hf.data.prompts import ids_of_prompt, prompt_of
from dflash_hf.doctor.measure import Text
from dflash_hf.files import digest_of
from dflash_hf.target import generate_responses


class Writer:
    """
    Generates texts: prompts with greedy answers of a target. Texts are cached.

    Args:
        target (`PreTrainedModel`): The target.
        block_size (`int`): The drafter's block size.
        max_new_tokens (`int`): Maximum length of an answer.
        anchors (`int`): Blocks per text.
        batch_size (`int`): Answers generated together.
    """

    def __init__(self, target, block_size: int, max_new_tokens: int = 128, anchors: int = 16, batch_size: int = 8):
        self.target, self.block_size, self.anchors = target, block_size, anchors
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.written: dict[str, list] = {}

    def of(self, other) -> "Writer":
        """A writer with the same settings for another target."""
        return Writer(other, self.block_size, self.max_new_tokens, self.anchors, self.batch_size)

    def answered(self, prompts: Sequence[Sequence[int]]) -> list[Text | None]:
        """A text for each prompt; `None` if the prompt is empty or the answer a single token."""
        asked = digest_of([list(prompt) for prompt in prompts])
        if asked not in self.written:
            self.written[asked] = self._answered(prompts)
        return self.written[asked]

    def _answered(self, prompts: Sequence[Sequence[int]]) -> list[Text | None]:
        rows = self.target.get_input_embeddings().weight.shape[0]
        usable = [i for i, prompt in enumerate(prompts) if prompt and max(prompt) < rows]
        greedy = copy.deepcopy(self.target.generation_config)
        greedy.update(do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None)
        asked = [prompts[i] for i in usable]
        answers = generate_responses(self.target, asked, self.max_new_tokens, None, self.batch_size, greedy)
        texts: list[Text | None] = [None] * len(prompts)
        for i, answer in zip(usable, answers, strict=True):
            texts[i] = Text.of(prompts[i], answer, self.block_size, self.anchors, seed=i)
        return texts

    def free(self, count: int, seed: int = 0) -> list[Text | None]:
        """
        Texts without a tokenizer: after its first token the target samples a quarter of each text, and continues
        greedily.
        """
        config = self.target.generation_config
        first = next((one for one in (config.bos_token_id, config.eos_token_id) if one is not None), None)
        first = first[0] if isinstance(first, list) else first
        if first is None:
            return [None] * count
        start = max(self.max_new_tokens // 4, 2)
        sampled = copy.deepcopy(config)
        sampled.update(do_sample=True, temperature=1.0, top_p=0.95, top_k=0, min_new_tokens=start)
        begun = generate_responses(self.target, [[first]] * count, start, None, self.batch_size, sampled, seed=seed)
        return self.answered([[first, *text] for text in begun])


@torch.no_grad()
def surprise(target, prompts: Sequence[Sequence[int]]) -> float:
    """The target's loss in nats per token of the prompts, without their first; a uniform guess costs `ln V`."""
    total = count = 0
    rows = target.get_input_embeddings().weight.shape[0]
    for prompt in prompts:
        if len(prompt) > 1 and max(prompt) < rows:
            ids = torch.tensor([list(prompt)], device=target.device)
            total += float(target(ids, labels=ids).loss) * (len(prompt) - 1)
            count += len(prompt) - 1
    return total / max(count, 1)


def encoded(encoder: RowEncoder, rows: Sequence[dict], raw: bool = False) -> list[list[int]]:
    """
    The ids of the prompts; empty if the template rejects a row.

    Raises:
        `ValueError`: a row has no prompt; the message names it.
    """
    prompts = []
    for index, row in enumerate(rows):
        if row.get("input_ids") is not None:
            prompts.append(given_ids(row))
            continue
        try:
            prompt, tools = prompt_of(row, not raw and bool(encoder.tokenizer.chat_template)), tools_of(row)
        except ValueError as error:
            raise ValueError(f"Row {index} of the prompts: {error}") from error
        if raw and not isinstance(prompt, str):
            prompt = "\n".join(map(text_of, prompt))
        try:
            prompts.append(ids_of_prompt(encoder, prompt, tools))
        except UnusableRow:
            prompts.append([])
    return prompts
