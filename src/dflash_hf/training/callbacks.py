"""`DecodingCallback`: real decoding during training, so that the best checkpoint is chosen by how it decodes."""

from collections.abc import Sequence
from itertools import islice

from transformers import TrainerCallback

from dflash_hf.data.encode import given_ids
from dflash_hf.evaluation.measure import evaluate
from dflash_hf.evaluation.methods import DFLASH, TARGET
from dflash_hf.training.processes import in_first_process


class DecodingCallback(TrainerCallback):
    """
    Decodes a few prompts with the current drafter at each evaluation, and logs `eval_tau`, `eval_speedup` and
    `eval_lossless` (the share of outputs that are the target's own). They are also metrics, so that
    `metric_for_best_model="tau"` with `load_best_model_at_end=True` keeps the best drafter.

        trainer.add_callback(DecodingCallback(trainer, prompts))

    The first process decodes, the others wait for its figures. The speed-up is measured in the dtype of training;
    `dflash eval` measures it as in serving. Simulated tau is teacher-forced: if `eval_tau` stays far below
    `eval_simulated_tau` on the target's own text, decoding differs from training, and `dflash doctor` finds out how.

    Args:
        trainer (`DFlashTrainer`): The trainer to add it to, before an `EarlyStoppingCallback` that watches tau.
        prompts (`Sequence[Sequence[int]]`): Prompt ids. Default: the prompts of the first `num_prompts` rows of
            the evaluation dataset, else of the training dataset.
        num_prompts (`int`): Rows to take the default prompts from.
        max_new_tokens (`int`): Longest answer.

    Raises:
        `ValueError`: no prompts, or a drafter whose weights are sharded over processes.
    """

    def __init__(
        self, trainer, prompts: Sequence[Sequence[int]] | None = None, num_prompts: int = 8, max_new_tokens: int = 128
    ):
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError(
                "DecodingCallback decodes on one process, but FSDP or DeepSpeed shard the drafter over several: "
                "leave the callback out, and run `dflash eval` on the saved checkpoints."
            )
        if any(parameter.is_meta for parameter in trainer.target.parameters()):
            raise ValueError(
                "DecodingCallback decodes with the target, whose layers were dropped: leave the callback out, or load "
                "the target whole."
            )
        self.trainer, self.max_new_tokens = trainer, max_new_tokens
        self.prompts = prompts_of_rows(trainer, num_prompts) if prompts is None else [list(one) for one in prompts]
        if not self.prompts or not all(self.prompts):
            raise ValueError(f"prompts={self.prompts} must be non-empty lists of token ids.")

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        with self.trainer.meter.paused():
            figures = in_first_process(self._decode)
        self.trainer.log(dict(figures))
        metrics.update(figures)

    def _decode(self) -> dict[str, float]:
        model, methods = self.trainer.draft, (TARGET, DFLASH)
        was_training = model.training
        try:
            report = evaluate(self.trainer.target, model, self.prompts, self.max_new_tokens, runs=1, methods=methods)
        finally:
            model.train(was_training)
        method = report.methods[DFLASH]
        figures = {"tau": report.tau, "speedup": method.speedup, "lossless": method.equal / report.num_prompts}
        return {f"eval_{name}": value for name, value in figures.items()}


def prompts_of_rows(trainer, count: int) -> list[list[int]]:
    """The ids before the first supervised one, of the first rows of a trainer's evaluation or training dataset."""
    rows = trainer.train_dataset if trainer.eval_dataset is None else trainer.eval_dataset
    if isinstance(rows, dict):
        rows = next(iter(rows.values()))
    if rows is None:
        raise ValueError("prompts is None and the trainer has no dataset to take them from; pass lists of token ids.")
    reader, first = getattr(trainer.data_collator, "reader", None), islice(iter(rows), count)
    pairs = [(given_ids(row), row.get("images")) for row in first]
    return [reader.prompt(ids, images) if reader and images else ids for ids, images in pairs]
