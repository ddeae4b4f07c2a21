"""The plot of a report: speed, acceptance, and one answer coloured by verification."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dflash_hf.evaluation.measure import EvalReport
from dflash_hf.evaluation.methods import COMPILED_METHODS, DFLASH, DRAFTED, PROMPT_LOOKUP, TARGET, TARGET_PACKED
from dflash_hf.evaluation.text import LABELS, origins
from dflash_hf.terminal import install


_COLORS = {TARGET: "#8a8f98", TARGET_PACKED: "#8a8f98", PROMPT_LOOKUP: "#c98a2b"}
_COLORS |= {method: "#0f5a3e" if method in COMPILED_METHODS else "#1a7f5a" for method in DRAFTED}
_OTHER_COLOR = "#6b7fb3"
# Blocks of one answer alternate between two greens; the target's own tokens are grey.
_BLOCK_COLORS = ("#bfe5d2", "#8fd0b0")
_OWN_COLOR = "#dfe1e5"
_COLUMNS = 118  # characters per line of an answer


def plot_report(
    report: EvalReport,
    path: str | Path,
    title: str = "",
    sample: tuple[str, Sequence[str], Sequence[int]] | None = None,
) -> Path:
    """
    Draw a report as a PNG file.

    Args:
        report (`EvalReport`): What to draw.
        path (`str` or `Path`): Output file.
        title (`str`): Title of the figure.
        sample (`tuple`, *optional*): A prompt's text, the texts of its answer's tokens, and its `acceptance_lengths`.

    Returns:
        `Path`: `path`.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"Pictures need matplotlib: {install('plots')}.") from error

    # With its own canvas: the user's backend and open figures are not touched.
    lines = _lines_of(sample[1], sample[2]) if sample else []
    text = 0.75 + 0.27 * len(lines) if sample else 0.0  # inches
    chart = max(3.2, 0.9 + 0.36 * len(report.methods))
    figure = Figure(figsize=(11, chart + text + (0.4 if title else 0)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    rows = [["speed", "position", "length"], ["sample"] * 3] if sample else [["speed", "position", "length"]]
    ratios = {"height_ratios": [chart, text] if sample else [1], "width_ratios": [1.5, 1, 1]}
    axes = figure.subplot_mosaic(rows, **ratios)
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold")
    _draw_speed(axes["speed"], report)
    _draw_positions(axes["position"], report)
    _draw_lengths(axes["length"], report)
    if sample:
        _draw_sample(axes["sample"], sample[0], lines, len(sample[1]), len(sample[2]))
    for name in ("speed", "position", "length"):
        axes[name].spines[["top", "right"]].set_visible(False)
        axes[name].title.set_fontsize(10)
    path = Path(path)
    figure.savefig(path)
    return path


def headline(report: EvalReport) -> str:
    """The best speed-up over the fairest baseline and tau, as a title."""
    ours = [method for name, method in report.methods.items() if name in DRAFTED]
    if TARGET_PACKED in report.methods:
        speed = f"{max(method.speedup_over_packed for method in ours):.2f}x over the packed target"
    else:
        speed = f"{max(method.speedup for method in ours):.2f}x"
    return f"{speed}, tau {report.tau:.2f} in blocks"


def _draw_speed(axes, report: EvalReport) -> None:
    names, runs = list(report.methods), len(report.methods[DFLASH].runs)
    for place, name in enumerate(names):
        method = report.methods[name]
        speed, slowest, fastest = method.tokens_per_second, min(method.runs), max(method.runs)
        axes.barh(place, speed, color=_COLORS.get(name, _OTHER_COLOR), height=0.7)
        if runs > 1:
            spread = [[speed - slowest], [fastest - speed]]
            axes.errorbar(speed, place, xerr=spread, color="#333333", capsize=3, linewidth=1)
        over = method.speedup_over_packed
        factor = f"{method.speedup:.2f}x" if over is None else f"{over:.2f}x"
        axes.text(fastest * 1.02, place, f" {speed:.0f} ({factor})", va="center", fontsize=8.5)
    axes.set_yticks(range(len(names)), [LABELS.get(name, name) for name in names], fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, max(max(method.runs) for method in report.methods.values()) * 1.28)
    axes.set_xlabel("tokens per second")
    baseline = "the packed target" if TARGET_PACKED in names else "the target alone"
    spread = f"; median of {runs} runs, slowest to fastest" if runs > 1 else ""
    axes.set_title(f"Speed (in brackets: over {baseline}){spread}")


def _draw_positions(axes, report: EvalReport) -> None:
    shares = report.acceptance_by_position
    axes.bar(range(1, len(shares) + 1), [100 * share for share in shares], color=_COLORS[DFLASH])
    axes.set_ylim(0, 100)
    axes.set_xticks(range(1, len(shares) + 1))
    axes.set_xlabel("slot of the block")
    axes.set_ylabel("slot accepted, % of verifications")
    axes.set_title("Acceptance by slot")


def _draw_lengths(axes, report: EvalReport) -> None:
    counts = Counter(report.verifications)
    total = sum(counts.values())
    sizes = range(1, report.block_size + 1)
    axes.bar(sizes, [100 * counts[size] / max(total, 1) for size in sizes], color=_COLORS[DFLASH])
    axes.axvline(report.tau, color="#333333", linestyle="--", linewidth=1)
    axes.set_xticks(sizes)
    axes.annotate(
        f"tau {report.tau:.2f}",
        (report.tau, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        va="top",
        fontsize=9,
    )
    axes.set_xlabel(f"tokens committed ({total:,} blocks)")
    axes.set_ylabel("% of verifications")
    axes.set_title("Tokens per verification")


def _lines_of(pieces: Sequence[str], lengths: Sequence[int]) -> list[list[tuple[str, str]]]:
    """The answer in lines of at most `_COLUMNS` characters: its tokens, each with the colour of its verification."""
    lines: list[list[tuple[str, str]]] = [[]]
    for piece, source in zip(pieces, origins(lengths, len(pieces))):
        if sum(len(one) for one, _ in lines[-1]) + len(piece) > _COLUMNS:
            lines.append([])
        lines[-1].append((piece, _OWN_COLOR if source == 0 else _BLOCK_COLORS[source % 2]))
    return lines


def _draw_sample(axes, prompt: str, lines: list[list[tuple[str, str]]], tokens: int, verifications: int) -> None:
    """The answer as running text; the background of each token shows the verification that committed it."""
    axes.set_axis_off()
    axes.set_xlim(0, _COLUMNS)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_title(
        f"{prompt}\n{tokens} tokens in {verifications} verifications; green: drafted and accepted (one shade for "
        "each block), grey: the target's own",
        loc="left",
        fontsize=9,
    )
    for y, line in enumerate(lines):
        x = 0
        for piece, color in line:
            axes.add_patch(_rectangle(x, y - 0.42, len(piece), color))
            for offset, letter in enumerate(piece):  # one by one: the grid does not depend on the font's width
                place, shown = x + offset + 0.5, letter.replace("$", r"\$")
                axes.text(place, y, shown, ha="center", va="center", family="monospace", fontsize=8.2)
            x += len(piece)


def _rectangle(x: float, y: float, width: float, color: str):
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, 0.84, facecolor=color, edgecolor="white", linewidth=0.6)
