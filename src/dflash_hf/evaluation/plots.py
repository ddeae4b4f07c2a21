"""The plot of a report: speed and acceptance."""

from pathlib import Path

from dflash_hf.evaluation.measure import EvalReport
from dflash_hf.evaluation.methods import DFLASH, DRAFTED, PROMPT_LOOKUP, TARGET, TARGET_PACKED
from dflash_hf.evaluation.text import LABELS, rate
from dflash_hf.files import atomic
from dflash_hf.terminal import needs


_COLORS = {TARGET: "#8a8f98", TARGET_PACKED: "#8a8f98", PROMPT_LOOKUP: "#c98a2b"}
_COLORS |= dict.fromkeys(DRAFTED, "#1a7f5a")
_COMPILED_COLOR, _OTHER_COLOR = "#0f5a3e", "#6b7fb3"


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
    with needs("Pictures need matplotlib", "plots"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    # With its own canvas: the user's backend and open figures are not touched.
    height = max(3.2, 0.9 + 0.36 * len(report.methods)) + (0.4 if title else 0)  # inches
    figure = Figure(figsize=(9, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold")
    places = figure.subplots(1, 2, width_ratios=[1.5, 1])
    for axes, draw in zip(places, (_draw_speed, _draw_positions), strict=True):
        draw(axes, report)
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    path = Path(path)
    with atomic(path) as half:
        figure.savefig(half, format="png")
    return path


def headline(report: EvalReport) -> str:
    """The best speed-up over the fairest baseline and tau, as a title."""
    over = " over the packed target" if TARGET_PACKED in report.methods else ""
    return f"{report.methods[report.fastest].gain:.2f}x{over}, tau {report.tau:.2f} in blocks"


def _draw_speed(axes, report: EvalReport) -> None:
    names, runs = list(report.methods), len(report.methods[DFLASH].runs)
    for place, name in enumerate(names):
        method = report.methods[name]
        speed, slowest, fastest = method.tokens_per_second, min(method.runs), max(method.runs)
        color = _COMPILED_COLOR if method.compiled else _COLORS.get(name, _OTHER_COLOR)
        axes.barh(place, speed, color=color, height=0.7)
        if runs > 1:
            spread = [[speed - slowest], [fastest - speed]]
            axes.errorbar(speed, place, xerr=spread, color="#333333", capsize=3, linewidth=1)
        axes.text(fastest * 1.02, place, f" {rate(speed)} ({method.gain:.2f}x)", va="center", fontsize=8.5)
    axes.set_yticks(range(len(names)), [LABELS.get(name, name) for name in names], fontsize=8.5)
    axes.invert_yaxis()
    baseline = "the packed target" if TARGET_PACKED in names else "the target alone"
    spread = f"; median of {runs} runs, slowest to fastest" if runs > 1 else ""
    longest = max(max(method.runs) for method in report.methods.values()) * 1.28
    title = f"Speed (in brackets: over {baseline}){spread}"
    axes.set(xlim=(0, longest), xlabel="tokens per second", title=title)


def _draw_positions(axes, report: EvalReport) -> None:
    shares = report.acceptance_by_position
    slots = range(1, len(shares) + 1)
    axes.bar(slots, [100 * share for share in shares], color=_COLORS[DFLASH])
    axes.set(ylim=(0, 100), xticks=slots, xlabel="slot of the block", ylabel="slot accepted, % of verifications")
    axes.set_title(f"Acceptance by slot, tau {report.tau:.2f}")
