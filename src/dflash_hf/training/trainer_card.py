"""What `DFlashTrainer` writes next to a drafter's weights: the facts of its model card, and its code."""

import shutil
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from pathlib import Path

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from dflash_hf.evaluation.report import PLOT_FILE, REPORT_FILE
from dflash_hf.files import digest_of_file
from dflash_hf.hub.card import FACTS_FILE, save_training_facts


class PushesCode(TrainerCallback):
    """Adds the code that config.json names to what upstream pushes of a checkpoint: its config and weights."""

    def on_push_begin(self, args, state, control, **kwargs):
        folder = Path(args.output_dir)
        source = folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if state.is_world_process_zero and source.is_dir():
            (folder / "custom_generate").mkdir(exist_ok=True)
            for path in (*source.glob("*_dflash.py"), source / "custom_generate/generate.py", source / FACTS_FILE):
                if path.is_file():  # an adapter has no code
                    shutil.copyfile(path, folder / path.relative_to(source))


@contextmanager
def without_stale_report(folder: Path) -> Iterator[None]:
    """Save weights in a folder; the report of an evaluation that lies there stays only if they are the same."""

    def weights() -> dict[str, str]:
        return {path.name: digest_of_file(path) for path in folder.glob("*.safetensors")}

    reports = [path for path in (folder / REPORT_FILE, folder / PLOT_FILE) if path.is_file()]
    before = weights() if reports else None
    yield
    if reports and weights() != before:
        for path in reports:
            path.unlink(missing_ok=True)


def save_facts(trainer, folder: Path, steps: int) -> None:
    """Write `card_facts.json` of weights after some steps."""
    measured = {"optimizer_steps": steps}
    if isinstance(trainer.train_dataset, Sized):
        measured["train_examples"] = len(trainer.train_dataset)
    folder.mkdir(parents=True, exist_ok=True)  # FSDP may have written nothing there yet
    save_training_facts(folder, trainer.target, trainer.args, measured)
