"""The files of a report, which lie beside the weights that it is about."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils import logging

from dflash_hf._io.names import PLOT_FILE, REPORT_FILE
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.evaluation.decoded import remove_progress
from dflash_hf.evaluation.plots import plot_report
from dflash_hf.evaluation.report import EvalReport
from dflash_hf.targets.digests import digest_of_parameters


_logger = logging.get_logger(__name__)


def save_report(report: EvalReport, folder: str | Path, title: str = "") -> list[Path]:
    """
    Write a report beside the weights that it is about, where a card finds it: as JSON and, with matplotlib, as PNG.
    It replaces what an evaluation has written into the folder in order to go on after an interruption.

    Returns:
        `list[Path]`: The files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = [report.save(folder / REPORT_FILE)]
    remove_progress(folder)
    try:
        files.append(plot_report(report, folder / PLOT_FILE, title))
    except ImportError as error:
        (folder / PLOT_FILE).unlink(missing_ok=True)  # an earlier report's
        _logger.info(f"No picture of the report: {error}")
    return files


def check_report(folder: Path, draft: DFlashDraftModel, targets: Sequence[str]) -> None:
    """
    Check that the report in a drafter's folder, if there is one, is about its weights, and about one of the targets.

    Args:
        folder (`Path`): The drafter's.
        draft (`DFlashDraftModel`): The drafter in it.
        targets (`Sequence[str]`): Repositories that a card names as targets.

    Raises:
        `ValueError`: it is about others; says what to run.
    """
    if not (folder / REPORT_FILE).is_file():
        return
    setting = EvalReport.load(folder / REPORT_FILE).setting
    measured_as = getattr(torch, str(setting.get("draft_dtype")), draft.dtype)
    parameters = ((name, parameter.to(measured_as)) for name, parameter in draft.named_parameters())
    weights = digest_of_parameters(parameters)
    measured_target = setting.get("target") or targets[0]  # not named: it was loaded from a folder
    mismatch = ""
    if setting.get("weights") != weights:
        mismatch = "was not measured with these weights"
    elif measured_target not in targets:
        mismatch = f"was measured with target {measured_target}, not {targets[0]}"
    if mismatch:
        raise ValueError(
            f"{folder / REPORT_FILE} {mismatch}: run `dflash eval --target {targets[0]} --draft {folder} --data DATA "
            f"--output {folder}`, or remove {REPORT_FILE} and {PLOT_FILE}."
        )
