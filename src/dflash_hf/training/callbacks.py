"""`DecodingCallback`: real decoding during training, so that the best checkpoint is chosen by how it decodes."""

from collections.abc import Sequence
from itertools import islice

from transformers import TrainerCallback
from transformers.utils import logging

from dflash_hf.data.encode import given_ids
from dflash_hf.evaluation.measure import EvalReport, evaluate
from dflash_hf.evaluation.methods import DFLASH, TARGET
from dflash_hf.training.processes import in_first_process


logger = logging.get_logger(__name__)


class DecodingCallback(TrainerCallback):
    """
    Decodes a few prompts with the current drafter, at each evaluation and every `decode_steps` steps, and logs `tau`,
    `speedup` and `lossless` (the share of outputs that are the target's own). At an evaluation, of whatever dataset,
    they are also metrics (`eval_tau`, ...), so that `metric_for_best_model="tau"` with `load_best_model_at_end=True`
    keeps the best drafter; its report is saved next to the weights.

        trainer.add_callback(DecodingCallback(trainer, prompts))

    The first process decodes, the others wait for its figures. The speed-up is measured in the dtype of training;
    `dflash eval` measures it as in serving.

    Simulated tau is teacher-forced, so a bug in decoding alone does not lower it: a warning is logged if the number of
    accepted draft tokens, `tau - 1`, differs from the simulated number by more than a factor of `max_ratio` and by
    more than 0.2 tokens.

    Args:
        trainer (`DFlashTrainer`): The trainer to add it to, before an `EarlyStoppingCallback` that watches tau.
        prompts (`Sequence[Sequence[int]]`): Prompt ids. Default: the prompts of the first `num_prompts` rows of
            the evaluation dataset, else of the training dataset.
        num_prompts (`int`): Rows to take the default prompts from.
        max_new_tokens (`int`): Longest answer.
        decode_steps (`int`, *optional*): Also decode every N steps.
        max_ratio (`float`): See above.

    Raises:
        `ValueError`: no prompts, or a drafter whose weights are sharded over processes.
    """

    def __init__(
        self,
        trainer,
        prompts: Sequence[Sequence[int]] | None = None,
        num_prompts: int = 8,
        max_new_tokens: int = 128,
        decode_steps: int | None = None,
        max_ratio: float = 2.0,
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
        if decode_steps is not None and decode_steps < 1:
            raise ValueError(f"decode_steps={decode_steps} must be at least 1; None decodes at evaluations only.")
        if not max_ratio > 1:
            raise ValueError(f"max_ratio={max_ratio} must be greater than 1, the ratio of two equal figures.")
        self.trainer, self.decode_steps, self.max_ratio = trainer, decode_steps, max_ratio
        self.prompts = prompts_of_rows(trainer, num_prompts) if prompts is None else [list(one) for one in prompts]
        self.max_new_tokens = max_new_tokens
        if not self.prompts or not all(self.prompts):
            raise ValueError(f"prompts={self.prompts} must be non-empty lists of token ids.")

    def on_step_end(self, args, state, control, **kwargs):
        if self.decode_steps and state.global_step % self.decode_steps == 0:
            should_log = control.should_log
            self.log_figures("")
            control.should_log = should_log  # the training loss is still to be logged

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics.update(self.log_figures("eval_"))

    def log_figures(self, prefix: str) -> dict[str, float]:
        """Decode, unless these weights were decoded already; log and return the figures."""
        if self.trainer.eval_report is None:
            self.trainer.eval_report = self.measure()
        report = self.trainer.eval_report
        method = report.methods[DFLASH]
        figures = {"tau": report.tau, "speedup": method.speedup, "lossless": method.equal / report.num_prompts}
        figures = {f"{prefix}{name}": value for name, value in figures.items()}
        self.trainer.log(dict(figures))
        simulated = self.latest(f"{prefix}simulated_tau")
        if simulated is not None and parted(report.tau, simulated, self.max_ratio):
            logger.warning(
                f"At step {self.trainer.state.global_step} decoding commits {report.tau:.2f} tokens per verification, "
                f"but training simulates {simulated:.2f}. If the data is the target's own text, including its chat "
                "template, then training and decoding draft differently."
            )
        if report.is_wrong:
            logger.warning(
                f"At step {self.trainer.state.global_step} only {method.equal} of {report.num_prompts} outputs are "
                "the target's own, and rounding does not explain the difference: this is a bug."
            )
        return figures

    def measure(self) -> EvalReport:
        """The report of the first process, on every process."""
        with self.trainer.meter.paused():
            return EvalReport.from_json(in_first_process(self._decode))

    def _decode(self) -> str:
        model, target, methods = self.trainer.draft, self.trainer.target, (TARGET, DFLASH)
        was_training = model.training
        try:
            return evaluate(target, model, self.prompts, self.max_new_tokens, runs=1, methods=methods).to_json()
        finally:
            model.train(was_training)

    def latest(self, name: str) -> float | None:
        """The last logged value of a figure."""
        return next((line[name] for line in reversed(self.trainer.state.log_history) if name in line), None)


def parted(tau: float, simulated: float, max_ratio: float) -> bool:
    """Whether real and simulated tau differ by more than noise and different texts can explain."""
    low, high = sorted((tau - 1, simulated - 1))
    return high > max_ratio * low and high - low > 0.2


def prompts_of_rows(trainer, count: int) -> list[list[int]]:
    """The ids before the first supervised one, of the first rows of a trainer's evaluation or training dataset."""
    rows = trainer.train_dataset if trainer.eval_dataset is None else trainer.eval_dataset
    if isinstance(rows, dict):
        rows = next(iter(rows.values()))
    if rows is None:
        raise ValueError("prompts is None and the trainer has no dataset to take them from; pass lists of token ids.")
    return [given_ids(row) for row in islice(iter(rows), count)]
