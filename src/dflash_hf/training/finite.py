"""Stops training at the first NaN or inf: later steps would learn nothing, with an apparent loss of 0."""

import math
from pathlib import Path

import torch

from dflash_hf.data.examples import has_rows
from dflash_hf.terminal import DetailedError
from dflash_hf.training.checkpoints import checkpoints_of
from dflash_hf.training.features import StoredFeatures, parts_of
from dflash_hf.weights import check_finite_weights, is_finite


_SHOWN = 8  # rows, and ids of a row


class NotFiniteError(DetailedError):
    """A loss, gradient or weight is inf or NaN; the message names the place, the probable cause and the remedy."""


class FiniteGuard:
    """
    Checks the loss and the gradient before every step, and all weights that a trainer saves.

    Upstream checks losses too, but logs an average instead of NaN. Gradients skipped by an fp16 scaler are part of its
    search for a scale; they are ignored.

    Args:
        trainer (`DFlashTrainer`): The trainer to check.
    """

    def __init__(self, trainer):
        self.trainer, self.of_this_step = trainer, []  # micro-batches

    def check_step(self, norm) -> None:
        """
        Check a whole step, before the optimizer's: all processes have its gradient, and none waits for another.

        Raises:
            `NotFiniteError`: its loss or the norm of its gradient is not finite.
        """
        loss = self.trainer.meter.statistics.loss.item()  # summed since the last line of the log
        if not math.isfinite(loss):
            raise self._not_finite(f"the loss is {loss}")
        if norm is not None and self.trainer.accelerator.scaler is None and not math.isfinite(norm):
            raise self._not_finite(f"the norm of the gradient is {float(norm)}")

    def check_weights(self) -> None:
        """
        Raises:
            `NotFiniteError`: the weights are not finite.
        """
        if not is_finite(self.trainer.model.parameters()):
            raise self._not_finite("the drafter's weights are not finite, and are not saved")

    def _not_finite(self, what: str) -> NotFiniteError:
        cause, remedy, rows = self._cause()
        good = last_good_checkpoint(Path(self.trainer.args.output_dir))
        again = f"The last good checkpoint is {good}." if good else "There is no good checkpoint before it."
        return NotFiniteError(f"Step {self.trainer.state.global_step + 1}: {what}. {cause}{rows}. {again} {remedy}")

    def _cause(self) -> tuple[str, str, str]:
        """The cause, the remedy and the rows: those with such features, otherwise all of the step."""
        trainer = self.trainer
        for name, parameter in trainer.draft.named_parameters():
            if not is_finite([parameter]):
                return f"{name} of the drafter is not finite already", "Start from finite weights.", ""
        rows = []
        for inputs in self.of_this_step:
            inputs = trainer._prepare_inputs(inputs)
            features = trainer.objective.read(inputs).features  # [N, S, L*H_t]
            by_layer = features.unflatten(-1, (len(trainer.draft.config.target_layer_ids), -1))  # [N, S, L, H_t]
            real = inputs["attention_mask"].bool()[..., None]
            wrong = (~by_layer.isfinite().all(-1) & real).any(1)  # [N, L]
            if wrong.any():
                layer = trainer.draft.config.target_layer_ids[int(wrong.any(0).nonzero()[0])]
                return (
                    f"The target's features of layer {layer} are not finite",
                    "Load the target in bfloat16 or float32 (target_dtype), or store its features in that dtype.",
                    self._named(inputs, wrong.any(1)),
                )
            rows.append(self._named(inputs, torch.ones(len(features), dtype=torch.bool)))
        remedy = (
            f"Lower learning_rate={trainer.args.learning_rate}, warm up longer, or use bf16 instead of fp16; a "
            "checkpoint given as the model to start from (`draft=` of `dflash train`) may use other settings."
        )
        return "The target's features are finite, so the drafter overflows", remedy, "".join(rows)

    def _named(self, inputs: dict, guilty: torch.Tensor) -> str:
        """Rows of a batch, by number in the training data or by their first ids."""
        names = []
        for place in guilty.nonzero().flatten().tolist()[:_SHOWN]:
            length = int(inputs["attention_mask"][place].sum())
            ids = inputs["input_ids"][place, :length].tolist()
            number = self._number_of(ids)
            beginning = f"a row of {length} ids beginning with {ids[:_SHOWN]}"
            names.append(beginning if number is None else f"row {number} ({length} ids beginning with {ids[:_SHOWN]})")
        return f", in {'; '.join(names)}"

    def _number_of(self, ids: list[int]) -> int | None:
        rows = self.trainer.train_dataset
        if not has_rows(rows) or isinstance(parts_of(rows)[0], StoredFeatures):  # a stream, or slow to read
            return None
        return next((i for i in range(len(rows)) if list(rows[i]["input_ids"]) == ids), None)


def last_good_checkpoint(folder: Path) -> Path | None:
    """The latest checkpoint of a run with finite weights."""
    for checkpoint in checkpoints_of(folder):
        try:
            check_finite_weights(checkpoint)
        except ValueError:
            continue
        except OSError:  # an adapter, or weights in the parts of several processes
            pass
        return checkpoint
    return None
