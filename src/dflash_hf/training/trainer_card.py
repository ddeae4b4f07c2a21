"""Files that `DFlashTrainer` writes next to a drafter's weights: the facts of its model card, and its report."""

import shutil
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from pathlib import Path

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from dflash_hf.evaluation.measure import EvalReport
from dflash_hf.evaluation.report import PLOT_FILE, REPORT_FILE, save_report
from dflash_hf.files import digest_of_file
from dflash_hf.hub.card import FACTS_FILE, save_training_facts
from dflash_hf.target import digest_of_parameters


class WeightsHaveFigures(TrainerCallback):
    """
    Keeps a trainer's `eval_report` in sync with its weights, so that no folder holds figures of other weights, and
    pushes a drafter's code with its weights.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.report = None
        self.steps = None  # of the weights, if the best were reloaded

    @property
    def report(self) -> EvalReport | None:
        """The last report, if the drafter still has the weights that it was measured with."""
        same = self._report is not None and self._digest == self._digest_of_weights()
        return self._report if same else None

    @report.setter
    def report(self, report: EvalReport | None) -> None:
        self._report, self._digest = report, "" if report is None else self._digest_of_weights()

    def _digest_of_weights(self) -> str:
        return digest_of_parameters(self.trainer.draft.named_parameters())

    def on_step_begin(self, args, state, control, **kwargs):
        """The weights are about to change."""
        self.report = self.steps = None

    def on_train_end(self, args, state, control, **kwargs):
        """The best weights were loaded: their report is next to them."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            report = Path(state.best_model_checkpoint) / REPORT_FILE
            found = EvalReport.load(report) if report.is_file() else None
            self.report, self.steps = found, state.best_global_step

    def on_push_begin(self, args, state, control, **kwargs):
        """Upstream pushes only config and weights of a checkpoint: add the code that config.json names."""
        folder = Path(args.output_dir)
        source = folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if state.is_world_process_zero and source.is_dir():
            (folder / "custom_generate").mkdir(exist_ok=True)
            for path in (*source.glob("*_dflash.py"), source / "custom_generate/generate.py", source / FACTS_FILE):
                if path.is_file():  # an adapter has no code
                    shutil.copyfile(path, folder / path.relative_to(source))


@contextmanager
def kept_report(folder: Path) -> Iterator[None]:
    """Save a drafter in a folder that may hold the same weights already, evaluated later: their report stays."""

    def weights() -> dict[str, str]:
        return {path.name: digest_of_file(path) for path in folder.glob("*.safetensors")}

    report = [(path, path.read_bytes()) for path in (folder / REPORT_FILE, folder / PLOT_FILE) if path.is_file()]
    before = weights() if report else None
    yield
    if report and weights() == before:
        for path, content in report:
            path.write_bytes(content)


def save_facts(trainer, folder: Path) -> None:
    """Write `card_facts.json` and, if a trainer's weights were evaluated, the report and its plot."""
    steps = trainer.figures.steps
    measured = {"optimizer_steps": trainer.state.global_step if steps is None else steps}
    if isinstance(trainer.train_dataset, Sized):
        measured["train_examples"] = len(trainer.train_dataset)
    folder.mkdir(parents=True, exist_ok=True)  # FSDP may have written nothing there yet
    save_training_facts(folder, trainer.target, trainer.args, measured)
    if trainer.eval_report is not None:
        save_report(trainer.eval_report, folder)
    else:
        for name in (REPORT_FILE, PLOT_FILE):  # of the previous weights
            (folder / name).unlink(missing_ok=True)
