"""Where a report lies: beside the weights that it is about."""

from pathlib import Path

from transformers.utils import logging

from dflash_hf.evaluation.measure import EvalReport
from dflash_hf.evaluation.plots import plot_report


REPORT_FILE = "eval_report.json"
PLOT_FILE = "eval_report.png"
_logger = logging.get_logger(__name__)


def save_report(report: EvalReport, folder: str | Path, title: str = "") -> list[Path]:
    """
    Write a report beside the weights that it is about, where a card finds it: as JSON and, with matplotlib, as PNG.

    Returns:
        `list[Path]`: The files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = [report.save(folder / REPORT_FILE)]
    try:
        files.append(plot_report(report, folder / PLOT_FILE, title))
    except ImportError as error:
        (folder / PLOT_FILE).unlink(missing_ok=True)  # an earlier report's
        _logger.info(f"No picture of the report: {error}")
    return files
