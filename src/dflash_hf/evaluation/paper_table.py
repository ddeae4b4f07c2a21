"""
The sets of the paper at temperatures 0 and 1, beside the figures that it reports for the same target.

The paper's figures are in `paper_results.json` (arXiv 2602.06036, Table 1: speedup and acceptance length with the
Transformers backend). Both columns here have its definitions: speedup is the ratio of the decode time per new token
after the prefill, mean over the responses; tau is the mean of the responses' means. The paper's mean speedup is the
geometric mean of its columns, and its mean tau the arithmetic one; so are ours.

The set reports are the truth, and the table is computed from them: each lies in a folder of its own below the
table's, `greedy/gsm8k` or `sampled/gsm8k`.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dflash_hf._io.files import atomic, json_text, read_text
from dflash_hf._io.names import REPORT_FILE
from dflash_hf.evaluation.compare import mean_difference
from dflash_hf.evaluation.divergence import WRONG
from dflash_hf.evaluation.methods import WHOLE_BLOCKS
from dflash_hf.evaluation.report import EvalReport
from dflash_hf.evaluation.sets import NAMED, set_name


PAPER_SETS = (
    "gsm8k",
    "math500",
    "aime24",
    "aime25",
    "humaneval",
    "mbpp",
    "livecodebench",
    "swe-bench",
    "mt-bench",
    "alpaca",
)
TEMPERATURES = (0.0, 1.0)
TABLE_FILE = "paper_table.json"
MARKDOWN_FILE = "paper_table.md"
_MODES = {0.0: "greedy", 1.0: "sampled"}
_PAPER: dict = json.loads(Path(__file__).with_name("paper_results.json").read_text(encoding="utf-8"))
_MEAN = "mean"


@dataclass
class SetResult:
    """
    A set at a temperature: ours, and the paper's.

    Args:
        name (`str`), temperature (`float`): The set, and the temperature.
        dataset (`str`): The dataset, and the local file if there is one.
        rows (`int`), rows_of_paper (`int`): Rows of the set that were decoded, and of the published protocol.
        responses (`int`): Answers; a row with two turns has two.
        speedup (`float`, *optional*): Over the target alone, of the decode time; `None` if no answer has two tokens.
        tau (`float`, *optional*): Mean of the responses' means.
        verdict (`str`): Whether the outputs are the target's, see [`EvalReport.verdict`].
        prompts_digest (`str`, *optional*): Of the prompts, which two tables may share.
        accepted_and_blocks (`list[tuple[int, int]]`): Of each response, accepted drafted tokens and verifications.
        paper_speedup (`float`, *optional*), paper_tau (`float`, *optional*): The paper's, if it has them.
    """

    name: str
    temperature: float
    dataset: str
    rows: int
    rows_of_paper: int
    responses: int
    speedup: float | None
    tau: float | None
    verdict: str
    prompts_digest: str | None = None
    accepted_and_blocks: list[tuple[int, int]] = field(default_factory=list)
    paper_speedup: float | None = None
    paper_tau: float | None = None

    @classmethod
    def from_values(cls, values: dict) -> "SetResult":
        """The result in the values of JSON, which has no tuples."""
        result = cls(**values)
        result.accepted_and_blocks = [(accepted, blocks) for accepted, blocks in result.accepted_and_blocks]
        return result


@dataclass
class Mean:
    """
    The mean over sets at a temperature.

    Args:
        temperature (`float`): The temperature.
        sets (`list[str]`): The sets: the paper's, if all of them were measured; else those that were.
        speedup (`float`, *optional*): Geometric mean.
        tau (`float`, *optional*): Arithmetic mean.
        paper_speedup, paper_tau (`float`, *optional*): The paper's, over the same sets.
    """

    temperature: float
    sets: list[str]
    speedup: float | None
    tau: float | None
    paper_speedup: float | None = None
    paper_tau: float | None = None


@dataclass
class PaperTable:
    """
    The result of `dflash eval --table paper`; the schema of `paper_table.json`.

    Args:
        target (`str`), draft (`str`): The pair.
        paper_target (`str`, *optional*): The target whose figures of the paper stand beside; `None` if it has none.
        source (`str`): Where the paper's figures are from.
        results (`list[SetResult]`): One for each set and temperature.
        means (`list[Mean]`): One for each temperature.
        differences (`list[str]`): How the measurement differs from the paper's.
        setting (`dict`): What all sets share: weights, hardware, dtypes, versions, limits.
    """

    target: str
    draft: str
    paper_target: str | None
    source: str
    results: list[SetResult]
    means: list[Mean]
    differences: list[str]
    setting: dict

    @property
    def is_wrong(self) -> bool:
        """Whether any output with the drafter is not the target's own."""
        return any(result.verdict == WRONG for result in self.results)

    def to_json(self) -> str:
        """The table as JSON."""
        return json_text(asdict(self))

    def save(self, folder: Path) -> list[Path]:
        """Write the table into a folder, as JSON and as Markdown; returns the files."""
        texts = {TABLE_FILE: self.to_json(), MARKDOWN_FILE: "\n".join(markdown_lines(self))}
        for name, text in texts.items():
            with atomic(folder / name) as half:
                half.write_text(text + "\n", encoding="utf-8")
        return [folder / name for name in texts]

    @classmethod
    def load(cls, path: str | Path) -> "PaperTable":
        """
        The table in a file.

        Raises:
            `ValueError`: the file holds something else.
        """
        try:
            values = json.loads(read_text(Path(path)))
            values["results"] = [SetResult.from_values(result) for result in values["results"]]
            values["means"] = [Mean(**mean) for mean in values["means"]]
            return cls(**values)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is not a table of `dflash eval --table` ({error!r}); name another.") from error


def is_table(path: str | Path) -> bool:
    """Whether a file holds a table, and not a report."""
    return '"paper_target"' in read_text(Path(path))


def report_folder(folder: Path, data: str, temperature: float) -> Path:
    """Where the report of a set at a temperature lies, below the folder of a table."""
    return folder / _MODES[temperature] / str(set_name(data))


def paper_target_of(target: str) -> str | None:
    """The paper's target of this name: a repository, or a folder with the name of one; `None` if there is none."""
    for name in _PAPER["targets"]:
        if target == name or Path(target).name == Path(name).name:
            return name
    return None


def table_of(folder: Path, target: str, draft: str) -> PaperTable:
    """
    The table of the set reports below a folder.

    Args:
        folder (`Path`): The table's folder.
        target (`str`), draft (`str`): Names of the pair.

    Raises:
        `ValueError`: there are no reports, or one is damaged.
    """
    paper_target = paper_target_of(target)
    reports: dict[tuple[float, str], EvalReport] = {}
    for temperature in TEMPERATURES:
        for name in PAPER_SETS:
            path = report_folder(folder, name, temperature) / REPORT_FILE
            if path.exists():
                reports[temperature, name] = EvalReport.load(path)
    if not reports:
        raise ValueError(f"{folder} has no reports of sets; measure at least one.")
    results = []
    for (temperature, name), report in reports.items():
        results.append(_set_result(name, temperature, report, _paper_figures(paper_target, temperature, name)))
    measured = [temperature for temperature in TEMPERATURES if any(key[0] == temperature for key in reports)]
    means = [_mean(temperature, results, paper_target) for temperature in measured]
    return PaperTable(
        target=target,
        draft=draft,
        paper_target=paper_target,
        source=_PAPER["source"],
        results=results,
        means=means,
        differences=_differences(list(reports.values()), results, target, paper_target),
        setting=_shared_setting(list(reports.values())),
    )


def _paper_figures(target: str | None, temperature: float, name: str) -> tuple[float | None, float | None]:
    """The paper's speedup and tau of a set, or of the mean; `None` where it has none."""
    columns = _PAPER["targets"].get(target, {}).get(f"{temperature:g}", {})
    speedup, tau = columns.get(name, (None, None))
    return speedup, tau


def _set_result(
    name: str, temperature: float, report: EvalReport, paper: tuple[float | None, float | None]
) -> SetResult:
    """The line of a set's report."""
    method = report.methods[WHOLE_BLOCKS]
    return SetResult(
        name=name,
        temperature=temperature,
        dataset=report.setting["dataset"],
        rows=report.setting["rows"],
        rows_of_paper=NAMED[name].prompts,
        responses=report.num_prompts,
        speedup=method.decode_gain,
        tau=method.tau_of_responses,
        verdict=report.verdict(),
        prompts_digest=report.setting.get("prompts_digest"),
        accepted_and_blocks=[(sum(lengths) - len(lengths), len(lengths)) for lengths in report.acceptance_lengths],
        paper_speedup=paper[0],
        paper_tau=paper[1],
    )


def _mean(temperature: float, results: Sequence[SetResult], paper_target: str | None) -> Mean:
    """The mean at a temperature, over the paper's sets if all of them were measured."""
    of_temperature = [result for result in results if result.temperature == temperature]
    of_paper = [result for result in of_temperature if result.name in _PAPER["sets"]]
    has_all = len(of_paper) == len(_PAPER["sets"])
    chosen = of_paper if has_all else of_temperature
    speedups = [result.speedup for result in chosen if result.speedup]
    taus = [result.tau for result in chosen if result.tau is not None]
    paper_speedup, paper_tau = _paper_figures(paper_target, temperature, _MEAN) if has_all else (None, None)
    return Mean(
        temperature=temperature,
        sets=[result.name for result in chosen],
        speedup=math.exp(statistics.fmean(map(math.log, speedups))) if speedups else None,
        tau=statistics.fmean(taus) if taus else None,
        paper_speedup=paper_speedup,
        paper_tau=paper_tau,
    )


_SHARED = (
    "weights",
    "hardware",
    "device",
    "processes",
    "threads",
    "target_dtype",
    "draft_dtype",
    "attention",
    "thinking",
    "max_new_tokens",
    "block_size",
    "runs",
    "torch",
    "transformers",
)


def _shared_setting(reports: Sequence[EvalReport]) -> dict:
    """The values of `_SHARED`, each with all values that the sets have."""
    setting = {}
    for name in _SHARED:
        values = []
        for report in reports:
            value = report.setting.get(name)
            if value not in values:
                values.append(value)
        setting[name] = values[0] if len(values) == 1 else values
    return setting


def _differences(
    reports: Sequence[EvalReport], results: Sequence[SetResult], target: str, paper_target: str | None
) -> list[str]:
    """How a measurement differs from the paper's, in sentences."""
    paper = _PAPER["setting"]
    setting = _shared_setting(reports)
    lines = []
    if paper_target is None:
        measured = ", ".join(_PAPER["targets"])
        lines.append(f"target: {target}, for which there are no figures of the paper here; there are for {measured}")
    elif paper_target != target:
        lines.append(f"target: {target}, taken for {paper_target} by its name")
    lines.append(f"hardware: {_text(setting['hardware'])}; the paper: {paper['hardware']}")
    dtypes = {str(setting["target_dtype"]), str(setting["draft_dtype"])}
    if dtypes != {paper["dtype"]}:
        lines.append(f"dtype: {', '.join(sorted(dtypes))}; the paper: {paper['dtype']}")
    for name in ("attention", "max_new_tokens", "thinking"):
        if setting[name] != paper[name]:
            lines.append(f"{name.replace('_', ' ')}: {_text(setting[name])}; the paper: {_text(paper[name])}")
    short = [result for result in results if result.rows < result.rows_of_paper]
    if short:
        rows = {f"{result.name} {result.rows} of {result.rows_of_paper}" for result in short}
        lines.append(f"fewer rows than the protocol's: {', '.join(sorted(rows))}")
    local = sorted({result.dataset for result in results if ", rows of " in result.dataset})
    if local:
        lines.append(f"rows from local files: {'; '.join(local)}")
    missing = []
    for temperature in TEMPERATURES:
        measured_sets = {result.name for result in results if result.temperature == temperature}
        absent = [name for name in PAPER_SETS if name not in measured_sets]
        if absent:
            missing.append(f"T = {temperature:g}: {', '.join(absent)}")
    if missing:
        lines.append(f"not measured: {'; '.join(missing)}")
    if any(result.temperature for result in results):
        lines.append(
            "sampling at T = 1: a draft here is the drafter's own sample by the noise that the target's next samples "
            "are drawn with, which accepts more; the published loop drafts the most probable tokens"
        )
    return lines


def _text(value: object) -> str:
    """A value of a setting for readers."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return str(value)


def markdown_lines(table: PaperTable) -> list[str]:
    """A table in Markdown, padded so that a terminal shows it as well."""
    lines = [f"# {table.draft} for {table.target}, beside the paper", ""]
    if table.paper_target is not None:
        lines += [f"The paper's figures: {table.source}, {table.paper_target}. Speedups are of the decode time.", ""]
    else:
        lines += ["The paper has no figures of this target: the columns are ours alone.", ""]
    for mean in table.means:
        temperature = mean.temperature
        lines += [f"## T = {temperature:g}, {_MODES[temperature]}", ""]
        rows = [["set", "rows", "speedup", "tau", "paper's speedup", "paper's tau", "outputs"]]
        for result in table.results:
            if result.temperature != temperature:
                continue
            rows.append([result.name, f"{result.rows} of {result.rows_of_paper}", *_figures(result), result.verdict])
        rows.append([f"mean of {len(mean.sets)}", "", *_figures(mean), ""])
        if table.paper_target is None:
            rows = [[*row[:4], row[6]] for row in rows]
        lines += [*_padded(rows), ""]
    for mean in table.means:
        lines.append(
            f"The mean at T = {mean.temperature:g} is over {', '.join(mean.sets)}; of speedups the geometric mean."
        )
        lines.append("")
    lines += ["Differences from the paper's measurement:", ""]
    lines += [f"- {line}" for line in table.differences]
    return lines


def _figures(result: SetResult | Mean) -> list[str]:
    """The cells of speedup and tau, and of the paper's."""
    speedups = [_figure(result.speedup, "x"), _figure(result.paper_speedup, "x")]
    return [speedups[0], _figure(result.tau), speedups[1], _figure(result.paper_tau)]


def _figure(value: float | None, unit: str = "") -> str:
    """A figure in a cell; a dash where there is none."""
    return "-" if value is None else f"{value:.2f}{unit}"


def _padded(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table whose first row is its header; columns but the first and the last are numbers."""
    # A rule has at least three characters.
    widths = [max(3, *(len(row[column]) for row in rows)) for column in range(len(rows[0]))]
    last = len(widths) - 1
    lines = []
    for number, row in enumerate(rows):
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.ljust(width) if column in (0, last) else cell.rjust(width))
        lines.append(f"| {' | '.join(cells)} |")
        if number == 0:
            rules = [
                "-" * width if column in (0, last) else "-" * (width - 1) + ":" for column, width in enumerate(widths)
            ]
            lines.append(f"| {' | '.join(rules)} |")
    return lines


def compare_tables(before: Path, after: Path, echo) -> dict:
    """
    Compare the tables of two drafters, set by set.

    Args:
        before, after (`Path`): Files of tables.
        echo (`Callable`): Called with each line of output.

    Returns:
        `dict`: The figures, for `--json`.

    Raises:
        `ValueError`: a file is no table, or the two have no set in common.
    """
    tables = [PaperTable.load(path) for path in (before, after)]
    first, second = ({(result.temperature, result.name): result for result in table.results} for table in tables)
    common = [key for key in first if key in second]
    if not common:
        raise ValueError(f"{before} and {after} have no set in common.")
    for letter, table in zip("AB", tables, strict=True):
        echo(f"{letter}: {table.draft} for {table.target}")
    rows = [["set", "T", "tau A", "tau B", "B - A", "speedup A", "speedup B", "is it chance?"]]
    facts = []
    for key in common:
        a = first[key]
        b = second[key]
        gain = None
        errors = None
        verdict = "other prompts"
        if a.prompts_digest == b.prompts_digest and a.responses == b.responses:
            gain, errors = mean_difference(a.accepted_and_blocks, b.accepted_and_blocks)
            chance = "more than chance" if abs(errors) >= 2 else "no more than chance"
            verdict = f"{errors:+.1f} standard errors, {chance}"
        difference = None if a.tau is None or b.tau is None else b.tau - a.tau
        speedups = [_figure(a.speedup, "x"), _figure(b.speedup, "x")]
        shown = "-" if difference is None else f"{difference:+.2f}"
        rows.append([key[1], f"{key[0]:g}", _figure(a.tau), _figure(b.tau), shown, *speedups, verdict])
        facts.append(
            {
                "set": key[1],
                "temperature": key[0],
                "tau": [a.tau, b.tau],
                "speedup": [a.speedup, b.speedup],
                "gain": gain,
                "standard_errors": errors,
            }
        )
    for line in _padded(rows):
        echo(line)
    for name in tables[0].setting:
        values = [table.setting.get(name) for table in tables]
        if values[0] != values[1]:
            echo(f"{name}: {_text(values[0])}; {_text(values[1])}")
    return {"sets": facts}
