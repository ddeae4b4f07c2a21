"""The picture of a report: speed, acceptance, and one answer as it was committed."""

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


def plot_report(
    report: EvalReport,
    path: str | Path,
    title: str = "",
    sample: tuple[str, Sequence[str], Sequence[int]] | None = None,
) -> Path:
    """
    Draw a report as PNG.

    Args:
        report (`EvalReport`): What to draw.
        path (`str` or `Path`): File to write.
        title (`str`): Above the picture.
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

    # A figure of its own canvas: the user's backend and open figures are left alone.
    figure = Figure(figsize=(11, 6.4 if sample else 3.9), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    rows = [["speed", "position", "length"], ["sample"] * 3] if sample else [["speed", "position", "length"]]
    axes = figure.subplot_mosaic(rows, height_ratios=[1.25, 1] if sample else [1])
    figure.suptitle(title, fontsize=12, fontweight="bold")
    _draw_speed(axes["speed"], report)
    _draw_positions(axes["position"], report)
    _draw_lengths(axes["length"], report)
    if sample:
        _draw_sample(axes["sample"], *sample)
    for name in ("speed", "position", "length"):
        axes[name].spines[["top", "right"]].set_visible(False)
        axes[name].title.set_fontsize(10)
    path = Path(path)
    figure.savefig(path)
    return path


def _draw_speed(axes, report: EvalReport) -> None:
    names = list(report.methods)
    for place, name in enumerate(names):
        method = report.methods[name]
        spread = [
            [method.tokens_per_second - min(method.runs)],
            [max(method.runs) - method.tokens_per_second],
        ]
        axes.bar(place, method.tokens_per_second, color=_COLORS.get(name, _OTHER_COLOR), width=0.65)
        axes.errorbar(place, method.tokens_per_second, yerr=spread, color="#333333", capsize=4, linewidth=1)
        over = method.speedup_over_packed
        axes.text(
            place,
            max(method.runs) * 1.03,
            f"{method.tokens_per_second:.0f}\n{method.speedup:.2f}x" + ("" if over is None else f"\n({over:.2f}x)"),
            ha="center",
            va="bottom",
            fontsize=9 if len(names) <= 5 else 7.5 if over is None else 6.5,
        )
    labels = [LABELS.get(name, name) for name in names]
    if len(names) > 5:  # too many for words below one another
        axes.set_xticks(range(len(names)), labels, fontsize=7.5, rotation=40, ha="right", rotation_mode="anchor")
    else:
        axes.set_xticks(range(len(names)), [label.replace(" ", "\n") for label in labels], fontsize=8)
    axes.set_ylim(0, max(max(method.runs) for method in report.methods.values()) * 1.3)
    axes.set_ylabel("tokens per second")
    title = f"Speed, median of {len(report.methods[DFLASH].runs)} runs (bars: slowest to fastest)"
    axes.set_title(title + ("\nin brackets: over the target alone, packed" if TARGET_PACKED in names else ""))


def _draw_positions(axes, report: EvalReport) -> None:
    shares = report.acceptance_by_position
    axes.bar(range(1, len(shares) + 1), [100 * share for share in shares], color=_COLORS[DFLASH])
    axes.set_ylim(0, 100)
    axes.set_xlabel("slot of the block")
    axes.set_ylabel("verifications that get past it, %")
    axes.set_title("Acceptance by position")


def _draw_lengths(axes, report: EvalReport) -> None:
    counts = Counter(report.verifications)
    total = sum(counts.values())
    sizes = range(1, report.block_size + 1)
    axes.bar(sizes, [100 * counts[size] / max(total, 1) for size in sizes], color=_COLORS[DFLASH])
    axes.axvline(report.tau, color="#333333", linestyle="--", linewidth=1)
    axes.annotate(
        f"mean {report.tau:.2f}",
        (report.tau, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        va="top",
        fontsize=9,
    )
    axes.set_xlabel("tokens committed by one verification")
    axes.set_ylabel("verifications, %")
    axes.set_title(f"{total} verifications, {report.num_prompts} answers")


def _draw_sample(axes, prompt: str, pieces: Sequence[str], lengths: Sequence[int]) -> None:
    """The answer as running text, each token on the colour of the verification that brought it."""
    columns, line_height = 118, 1.35
    axes.set_axis_off()
    axes.set_xlim(0, columns)
    style = {"family": "monospace", "fontsize": 8.2, "va": "center"}
    axes.set_title(
        f"{prompt}\n{len(pieces)} tokens in {len(lengths)} verifications; green: drafted and accepted (one shade for "
        "each block), grey: the target's own",
        loc="left",
        fontsize=9,
    )
    x, y = 0, 0.0
    for piece, source in zip(pieces, origins(lengths, len(pieces))):
        if x + len(piece) > columns:
            x, y = 0, y - line_height
        color = _OWN_COLOR if source == 0 else _BLOCK_COLORS[source % 2]
        axes.add_patch(_rectangle(x, y - 0.5, len(piece), color))
        for offset, letter in enumerate(piece):  # letter by letter: the grid does not depend on the font's width
            axes.text(x + offset + 0.5, y, letter.replace("$", r"\$"), ha="center", **style)
        x += len(piece)
    axes.set_ylim(min(y, -4 * line_height) - 0.8, 0.8)


def _rectangle(x: float, y: float, width: float, color: str):
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, 1.0, facecolor=color, edgecolor="white", linewidth=0.6)
