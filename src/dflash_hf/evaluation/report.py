"""Where a report lies: beside the weights that it is about."""

from pathlib import Path

from transformers.utils import logging

from dflash_hf.evaluation.measure import EvalReport
from dflash_hf.evaluation.methods import DFLASH
from dflash_hf.evaluation.plots import plot_report
from dflash_hf.evaluation.sets import NAMED


REPORT_FILE = "eval_report.json"
PLOT_FILE = "eval_report.png"
EVAL_RESULTS = ".eval_results/dflash.yaml"  # for the Hub's leaderboards; the model index of the card says the same
_logger = logging.get_logger(__name__)


def save_report(report: EvalReport, folder: str | Path, title: str = "") -> list[Path]:
    """
    Write a report beside the weights that it is about, where a card finds it: as JSON and, with matplotlib, as PNG; of
    a set of the Hub also as `.eval_results/*.yaml`.

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
    dataset = report.setting.get("dataset")
    (folder / EVAL_RESULTS).unlink(missing_ok=True)
    if dataset in {one.repository for one in NAMED.values()}:
        (folder / EVAL_RESULTS).parent.mkdir(exist_ok=True)
        summary = {"tau": report.tau, "speedup": report.methods[DFLASH].speedup}
        text = eval_results_yaml(summary, dataset, report.setting.get("hardware"))
        files.append(folder / EVAL_RESULTS)
        files[-1].write_text(text, encoding="utf-8")
    return files


def eval_results_yaml(summary: dict, dataset: str, notes: str | None) -> str:
    """The figures of a report as `.eval_results/*.yaml`, the Hub's newer form of the model index."""
    import yaml
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    entries = [
        EvalResultEntry(dataset, f"speculative_decoding_{key}", round(summary[key], 3), notes=notes)
        for key in ("tau", "speedup")
        if summary.get(key) is not None
    ]
    return yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False) if entries else ""
