"""`dflash demo --train MINUTES`: a fresh drafter from the bundled answers, with real decoding as it learns."""

import time
from collections.abc import Callable
from pathlib import Path

from transformers import TrainerCallback
from transformers.utils import logging

from dflash_hf.evaluation.measure import EvalReport
from dflash_hf.evaluation.report import REPORT_FILE
from dflash_hf.smollm2 import HUB_NAME, data_folder, smollm2_folder
from dflash_hf.training.callbacks import DecodingCallback
from dflash_hf.training.recipe import read_recipe
from dflash_hf.training.train import train


logger = logging.get_logger(__name__)
_BAR = 40  # characters of the longest bar, tau 4


class Curve(TrainerCallback):
    """Prints a line with a bar for each decoding, next to the tau of the bundled drafter."""

    def __init__(self, shipped: float | None, say: Callable[[str], None]):
        self.shipped, self.say, self.start, self.points = shipped, say, time.monotonic(), []

    def on_log(self, args, state, control, logs=None, **kwargs):
        tau = (logs or {}).get("tau")
        if tau is None:
            return
        minutes = (time.monotonic() - self.start) / 60
        self.points.append((round(minutes, 2), tau))
        mark = round(_BAR * (self.shipped - 1) / 3) if self.shipped else None
        bar = ["\u2588"] * max(round(_BAR * (tau - 1) / 3), 0)
        bar += [" "] * (_BAR - len(bar))
        if mark is not None and mark < len(bar):
            bar[mark] = "|"
        beside = "" if self.shipped is None else f"   (| the bundled drafter: {self.shipped:.2f})"
        self.say(f"{minutes:6.1f} min  tau {tau:4.2f}  {''.join(bar)}{beside}")


def train_live(minutes: float, output: Path, say: Callable[[str], None] = logger.info) -> list[tuple[float, float]]:
    """
    Train a drafter for a while with the recipe `smollm2-135m.yaml`, on answers instead of stored features.

    Args:
        minutes (`float`): Duration of training, including decoding.
        output (`Path`): Folder for the drafter.
        say: Called with each line of output.

    Returns:
        `list[tuple[float, float]]`: Minutes since the start, and the tau measured then.
    """
    from dflash_hf import examples

    data = data_folder()
    recipe, training = read_recipe(
        Path(examples.__file__).parent / "recipes" / "smollm2-135m.yaml",
        [
            *(f"target={smollm2_folder()}", f"base_model={HUB_NAME}", f"output_dir={output}"),
            *(f"data={data / 'answers.jsonl.gz'}", "features=null", "eval_features=null", "eval_strategy=no"),
            *(f"max_minutes={minutes}", "overwrite_output_dir=true", "save_strategy=no", "disable_tqdm=true"),
            *("logging_steps=1000000", "report_to=none", "decode_prompts=4", "decode_steps=60"),
            "decode_max_new_tokens=48",
        ],
    )
    report = data.parent / REPORT_FILE  # on other held-out requests, with longer answers
    shipped = EvalReport.load(report).tau if report.is_file() else None
    curve = Curve(shipped, say)
    trainer = train(recipe, training, say, callbacks=[curve])
    for one in trainer.callback_handler.callbacks:
        if isinstance(one, DecodingCallback):
            one.log_figures("")  # the finished drafter's
    return curve.points
