"""The input of a diagnosis: a pair, prompts with the target's answers, and how the drafter was trained."""

import contextlib
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from dflash_hf._io.files import read_json
from dflash_hf._io.names import FACTS_FILE
from dflash_hf.data.encode import RowEncoder
from dflash_hf.evaluation.prompts import prompts_of
from dflash_hf.synthetic.responses import generate_responses
from dflash_hf.training.anchors import sample_anchors


@dataclass(eq=False)
class DraftedText:
    """A prompt with its answer, `input_ids` `[1, S]`, and the `anchors` `[1, A]` of the blocks to draft."""

    input_ids: torch.LongTensor
    anchors: torch.LongTensor

    @classmethod
    def with_anchors(
        cls, prompt: Sequence[int], answer: Sequence[int], anchors: int, seed: int
    ) -> "DraftedText | None":
        """Draw anchors in the answer; `None` if it is too short."""
        ids = torch.tensor([[*prompt, *answer]])
        answer_mask = (torch.arange(ids.shape[1]) >= len(prompt)).long()[None]
        positions, valid = sample_anchors(answer_mask, anchors, torch.Generator().manual_seed(seed))
        if not valid.any():
            return None
        return cls(ids, positions[valid][None])


DraftedTexts = list[DraftedText | None]  # one for each prompt; `None` where there is none


@dataclass(frozen=True)
class TrainingHistory:
    """
    How a drafter was trained.

    Args:
        rows (`int`): Training examples.
        passes (`float`): How often each was read.
        tau (`float`, *optional*): The last `simulated_tau` of the training log, over these rows.
    """

    rows: int
    passes: float
    tau: float | None = None

    @classmethod
    def from_folder(cls, folder: str | Path) -> "TrainingHistory | None":
        """
        Read what `dflash train` wrote beside the weights, into `card_facts.json`, and into the log of the last
        checkpoint; `None` if it is not there, or `folder` is a repository's name.
        """
        try:
            training = read_json(Path(folder, FACTS_FILE))["training"]
            batch_factors = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
            batch_size = math.prod(training.get(name, 1) for name in batch_factors)
            rows = training["train_examples"]
            passes = training["optimizer_steps"] * batch_size / rows
        except (ValueError, KeyError, TypeError, ZeroDivisionError):
            return None
        return cls(rows, passes, _last_logged_tau(Path(folder)))


def _last_logged_tau(folder: Path) -> float | None:
    """The last `simulated_tau` over training rows in the logs of a run; `None` if there is none."""
    paths = [folder / "trainer_state.json", *folder.glob("checkpoint-*/trainer_state.json")]
    logged: list[tuple[int, float]] = []  # step, tau
    for path in paths:
        with contextlib.suppress(ValueError, TypeError):
            history = read_json(path).get("log_history") or []
            # A file that breaks off in the middle of its history contributes nothing.
            logged += [
                (entry["step"], entry["simulated_tau"])
                for entry in history
                if {"step", "simulated_tau"} <= entry.keys()
            ]
    if not logged:
        return None
    _, tau = max(logged)
    return tau


@dataclass
class PairCase:
    """
    A pair and the prompts to measure it on.

    Args:
        target, draft: The pair.
        rows (`list[dict]`): Rows with prompts.
        encoder (`RowEncoder`): Tokenizer and arguments of the chat template, as the pair is used.
        base (`PreTrainedModel`, *optional*): The model that the target was made from, if the drafter was trained for
            it.
        max_new_tokens (`int`): Maximum length of an answer.
        blocks (`int`): Blocks per text.
        batch_size (`int`): Answers generated together.
        training ([`TrainingHistory`], *optional*): How the drafter was trained, if its folder says so.
    """

    target: object
    draft: object
    rows: Sequence[dict]
    encoder: RowEncoder
    base: object = None
    max_new_tokens: int = 128
    blocks: int = 16
    batch_size: int = 8
    training: "TrainingHistory | None" = None

    @cached_property
    def prompts(self) -> list[list[int]]:
        """The ids of each prompt, as the pair is used; encoded once."""
        return self.encode_prompts()

    @cached_property
    def texts(self) -> DraftedTexts:
        """Each prompt with the target's answer; generated once."""
        return self.answer_prompts(self.prompts)

    def encode_prompts(self, raw: bool = False, chat_template_kwargs: dict | None = None) -> list[list[int]]:
        """The ids of each prompt, with other arguments of the chat template; `raw` leaves the template out."""
        encoder = self.encoder
        if chat_template_kwargs is not None:
            template = replace(encoder.template, chat_template_kwargs=chat_template_kwargs)
            encoder = replace(encoder, template=template)
        return prompts_of(self.rows, encoder, "the prompts", raw, self.target, self.max_new_tokens)

    def answer_prompts(self, prompts: Sequence[Sequence[int]], target=None) -> DraftedTexts:
        """
        Each prompt with the greedy answer of `target` (default: the pair's); `None` if the target lacks its ids, or if
        the answer is too short for a block.
        """
        target = target or self.target
        vocab_size = target.get_input_embeddings().weight.shape[0]
        greedy = copy.deepcopy(target.generation_config)
        greedy.update(do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None)
        answerable = [i for i, prompt in enumerate(prompts) if max(prompt) < vocab_size]
        answers = generate_responses(
            target, [prompts[i] for i in answerable], self.max_new_tokens, None, self.batch_size, greedy
        )
        texts: DraftedTexts = [None] * len(prompts)
        for i, answer in zip(answerable, answers, strict=True):
            texts[i] = DraftedText.with_anchors(prompts[i], answer, self.blocks, seed=i)
        return texts


@torch.no_grad()
def loss_on(target, prompts: Sequence[Sequence[int]]) -> float:
    """The target's loss in nats per token of the prompts, without their first; a uniform guess costs `ln V`."""
    total = 0.0
    predicted_tokens = 0
    vocab_size = target.get_input_embeddings().weight.shape[0]
    for prompt in prompts:
        if len(prompt) > 1 and max(prompt) < vocab_size:
            ids = torch.tensor([list(prompt)], device=target.device)
            total += float(target(ids, labels=ids).loss) * (len(prompt) - 1)
            predicted_tokens += len(prompt) - 1
    return total / max(predicted_tokens, 1)
