"""
The tau of held-out prompts that are decoded during training (`eval_decode`).

`simulated_tau` counts accepted tokens in finished texts, where each block begins at a random token. This is the real
one: `generate` decodes the prompts with the drafter as it is at that step, and the tokens that each verification
commits are counted, as by `dflash eval`.
"""

import torch

from dflash_hf.data.examples import has_rows
from dflash_hf.evaluation.measure import with_whole_blocks
from dflash_hf.targets.generation import context_length_of, forked_rng, generate_one
from dflash_hf.training.block_attention import without_groups


MAX_NEW_TOKENS = 128  # of each answer


def check_decoding(eval_dataset, target, num_prompts: int) -> None:
    """
    Args:
        eval_dataset: That of a trainer: rows, several of them by name, or `None`.
        target (`PreTrainedModel`): The target.
        num_prompts (`int`): `eval_decode`.

    Raises:
        `ValueError`: there is nothing to decode, or nothing that decodes it.
    """
    setting = f"eval_decode={num_prompts}"
    datasets = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    if not any(dataset is not None and has_rows(dataset) for dataset in datasets):
        raise ValueError(
            f"{setting} has no rows whose prompts could be decoded: give evaluation data that is no stream, or leave "
            "it out."
        )
    if hasattr(target, "weights_digest"):  # see `drop_layers`
        raise ValueError(
            f"{setting} decodes with the target, of whose layers a run on stored features has none: train on the data "
            "themselves (store_rows keeps their features for the run), or leave it out."
        )


def prompts_of(rows, count: int) -> list[list[int]]:
    """
    The prompts of some rows, spread evenly over a dataset: the tokens before the first one that is trained on.

    Args:
        rows: Rows with `input_ids` and `loss_mask`. Those with images are left out.
        count (`int`): How many prompts; all if there are fewer.
    """
    prompts = []
    count = min(count, len(rows))
    for number in range(count):
        row = rows[number * len(rows) // count]
        if row.get("images"):
            continue
        ids = torch.as_tensor(row["input_ids"]).tolist()
        first_trained = torch.as_tensor(row["loss_mask"]).bool().int().argmax().item()
        prompts.append(ids[: max(first_trained, 1)])
    return prompts


def decoded_tau(trainer, rows) -> float:
    """
    The mean number of tokens that a verification commits, over all verifications of the prompts of some rows: greedy,
    in whole blocks, at most [`MAX_NEW_TOKENS`] an answer. The processes of a run share the prompts; each gets the
    result. Neither the drafter nor any state of a random generator is changed.

    Args:
        trainer (`DFlashTrainer`): Its drafter, in evaluation mode, and its target; `eval_decode` is the number of
            prompts.
        rows: See [`prompts_of`].

    Returns:
        `float`: NaN if no answer has a second token.
    """
    args = trainer.args
    context_length = context_length_of(trainer.target) or float("inf")
    prompts = prompts_of(rows, args.eval_decode)
    sums = torch.zeros(2, device=args.device)  # committed tokens, verifications
    draft = with_whole_blocks(trainer.draft)
    with forked_rng(args.device), without_groups(draft.config):
        for prompt in prompts[args.process_index :: args.world_size]:
            max_new_tokens = min(MAX_NEW_TOKENS, context_length - len(prompt))
            if max_new_tokens < 2:  # the first token is the prefill's
                continue
            output = generate_one(
                trainer.target, prompt, max_new_tokens=max_new_tokens, do_sample=False, assistant_model=draft
            )
            lengths = output.acceptance_lengths[0]
            sums += torch.tensor([sum(lengths), len(lengths)], device=args.device)
    committed, verifications = trainer.accelerator.reduce(sums, "sum").tolist()
    return committed / verifications if verifications else float("nan")
