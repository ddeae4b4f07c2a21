"""The plot of a report: speed and acceptance."""

import textwrap
from pathlib import Path

from dflash_hf._io.errors import requires_extra
from dflash_hf._io.files import atomic
from dflash_hf.evaluation.methods import DRAFTED, LABELS, PROMPT_LOOKUP, TARGET_ALONE, TARGET_PACKED, WHOLE_BLOCKS
from dflash_hf.evaluation.report import EvalReport
from dflash_hf.evaluation.text import rate


_COLORS = {TARGET_ALONE: "#8a8f98", TARGET_PACKED: "#8a8f98", PROMPT_LOOKUP: "#c98a2b"}
_COLORS |= dict.fromkeys(DRAFTED, "#1a7f5a")
_COMPILED_COLOR = "#0f5a3e"
_OTHER_COLOR = "#6b7fb3"
_FIGURE_WIDTH = 9  # inches
_TITLE_LINE_HEIGHT = 0.25  # inches
_MAX_LABEL_WIDTH = 26  # characters of a line of a method's name


def plot_report(report: EvalReport, path: str | Path, title: str = "") -> Path:
    """
    Draw a report as a PNG file.

    Args:
        report (`EvalReport`): What to draw.
        path (`str` or `Path`): Output file.
        title (`str`): Title of the figure.

    Returns:
        `Path`: `path`.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    figure = draw_report(report, title)
    path = Path(path)
    with atomic(path) as half:
        figure.savefig(half, format="png")
    return path


def draw_report(report: EvalReport, title: str = ""):
    """
    The figure of a report, as a `matplotlib.figure.Figure`. No text in it leaves the figure, however long the title or
    a method's name is: long texts are broken into lines, and the figure grows.

    Args:
        report (`EvalReport`): What to draw.
        title (`str`): Title of the figure; may have several lines.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    with requires_extra("Pictures need matplotlib", "plots"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    # With its own canvas: the user's backend and open figures are not touched.
    height = max(3.2, 0.9 + 0.36 * len(report.methods))  # inches
    figure = Figure(figsize=(_FIGURE_WIDTH, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        heading = figure.suptitle(title, fontsize=12, fontweight="bold")
        _break_lines(heading, 0.97 * figure.bbox.width)
        figure.set_figheight(height + _TITLE_LINE_HEIGHT * (1 + heading.get_text().count("\n")))
    speed_axes, positions_axes = figure.subplots(1, 2, width_ratios=[1.5, 1])
    _draw_speed(speed_axes, report)
    _draw_positions(positions_axes, report)
    for axes in (speed_axes, positions_axes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    figure.draw_without_rendering()  # places the axes, whose widths limit their titles
    for axes in (speed_axes, positions_axes):
        _break_lines(axes.title, axes.get_window_extent().width)
    return figure


def _break_lines(text, width: float) -> None:
    """Break a matplotlib `Text` into lines of at most `width` pixels: between words, at hyphens, else anywhere."""
    lines = text.get_text().splitlines()
    longest = max(map(len, lines), default=0)  # characters
    while longest > 1 and text.get_window_extent().width > width:
        longest -= 1
        shorter_lines = []
        for line in lines:
            shorter_lines += textwrap.wrap(line, longest)
        text.set_text("\n".join(shorter_lines))


def _draw_speed(axes, report: EvalReport) -> None:
    names = list(report.methods)
    runs = len(report.methods[WHOLE_BLOCKS].runs)
    for place, name in enumerate(names):
        method = report.methods[name]
        speed = method.tokens_per_second
        slowest = min(method.runs)
        fastest = max(method.runs)
        color = _COMPILED_COLOR if method.compiled else _COLORS.get(name, _OTHER_COLOR)
        axes.barh(place, speed, color=color, height=0.7)
        if runs > 1:
            error_bar = [[speed - slowest], [fastest - speed]]
            axes.errorbar(speed, place, xerr=error_bar, color="#333333", capsize=3, linewidth=1)
        axes.text(fastest * 1.02, place, f" {rate(speed)} ({method.gain:.2f}x)", va="center", fontsize=8.5)
    labels = [textwrap.fill(LABELS.get(name, name), _MAX_LABEL_WIDTH) for name in names]
    axes.set_yticks(range(len(names)), labels, fontsize=8.5)
    axes.invert_yaxis()
    baseline = "the packed target" if TARGET_PACKED in names else "the target alone"
    spread = f"; median of {runs} runs, slowest to fastest" if runs > 1 else ""
    longest = max(max(method.runs) for method in report.methods.values()) * 1.28
    title = f"Speed (in brackets: over {baseline}){spread}"
    axes.set(xlim=(0, longest), xlabel="tokens per second", title=title)


def _draw_positions(axes, report: EvalReport) -> None:
    shares = report.acceptance_by_position
    slots = range(1, len(shares) + 1)
    if not shares:  # blocks of one token: nothing is drafted
        axes.set_axis_off()
        return
    axes.bar(slots, [100 * share for share in shares], color=_COLORS[WHOLE_BLOCKS])
    axes.set(ylim=(0, 100), xticks=slots, xlabel="slot of the block", ylabel="slot accepted, % of verifications")
    axes.set_title(f"Acceptance by slot, tau {report.tau:.2f}")
