"""The table and the picture of `ablation.py`, from its finished runs."""

import json
import statistics
from pathlib import Path


# Of the base's own drafters: what they accept when only the first half of their blocks is verified.
USE_8 = "block 16, 8 verified"
BASE_IS = {
    "anchors": "random anchors",
    "context": "KV injection",
    "draft layers": "3 draft layers",
    "features": "3 features",
    "block size": "block 16",
    "loss": "decaying weights",
    "data": "text of the files",
}


def summarise(runs: list[dict], axes: dict[str, str]) -> list[dict]:
    """A row for each variant, in the order of `axes`, which names what it changes."""
    rows = []
    for name, axis in {**axes, USE_8: "block size"}.items():
        taus = [run["tau"] for run in runs if run["variant"] == name]
        if taus:
            mine = [run for run in runs if run["variant"] == name]
            rows.append(
                {
                    "variant": name,
                    "axis": axis,
                    "tau_mean": statistics.fmean(taus),
                    "tau_sd": statistics.stdev(taus) if len(taus) > 1 else None,
                    "taus": taus,
                    "steps": statistics.fmean(run["steps"] for run in mine),
                    "parameters": mine[0]["parameters"],
                    "equal": sum(run["equal"] for run in mine),
                    "prompts": sum(run["prompts"] for run in mine),
                }
            )
    return rows


def table(rows: list[dict]) -> str:
    """The rows as markdown."""
    base = next((row["taus"] for row in rows if row["variant"] == "base"), None)
    lines = ["| axis | variant | steps | parameters | tau, mean | s.d. | each seed | against the base |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in rows:
        taus, sd = row["taus"], row["tau_sd"]
        if base is None or row["variant"] == "base" or len(taus) < 2:
            verdict = ""
        elif min(taus) > max(base):
            verdict = "every seed better than every one of the base"
        elif max(taus) < min(base):
            verdict = "every seed worse than every one of the base"
        else:
            verdict = "not separated"
        if row["variant"] in ("block 8", USE_8):
            verdict = "at most 8 tokens: compare these two rows"
        lines.append(
            f"| {row['axis']} | {row['variant']} | {row['steps']:.0f} | {row['parameters'] / 1e6:.2f} M | "
            f"{row['tau_mean']:.3f} | {'' if sd is None else f'{sd:.3f}'} | "
            f"{', '.join(f'{tau:.2f}' for tau in taus)} | {verdict} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict], path: Path, title: str) -> None:
    """One line for each variant: its seeds, their mean, and the range of the base."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    base = next((row["taus"] for row in rows if row["variant"] == "base"), None)
    if base:
        axes.axvspan(min(base), max(base), color="#1a7f5a", alpha=0.15, label="range of the base's seeds")
    for place, row in enumerate(reversed(rows)):
        axes.plot(row["taus"], [place] * len(row["taus"]), "o", color="#1a7f5a", alpha=0.6, markersize=6)
        axes.plot([row["tau_mean"]], [place], "|", color="#222222", markersize=18)
    names = [row["variant"] if row["variant"] != "base" else "base (see text)" for row in reversed(rows)]
    axes.set_yticks(range(len(rows)), names)
    axes.set_xlabel("tau: tokens committed per verification, held-out prompts (dots: seeds, bar: mean)")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    if base:
        figure.legend(fontsize=8, loc="outside lower right")
    figure.savefig(path)


def write_results(runs: list[dict], axes: dict[str, str], setting: dict, folder: Path) -> None:
    """The table, the figures and the picture."""
    rows = summarise(runs, axes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ablation.json").write_text(
        json.dumps({"setting": setting, "rows": rows, "runs": runs}, indent=1) + "\n"
    )
    base = "; ".join(BASE_IS.values())
    text = (
        f"# Ablation on the demo's task\n\nThe base: {base}. Each other row changes one thing.\n\n{table(rows)}\n\n"
        f"{sum(row['equal'] for row in rows)} of {sum(row['prompts'] for row in rows)} texts are the target's own, "
        "token for token.\n\n"
        "tau is the mean over all verifications, bonus included, prompt excluded. Seeds change weights, order and "
        "anchors of the drafter; target, prompts and rows stay. A drafter trains until its process has used "
        f"{setting['cpu_seconds']:g} CPU seconds, forwards of the target included, so dearer variants take fewer "
        "steps. Regular blocks leave some anchor slots of short answers empty.\n\n"
        + "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in setting.items())
        + "\n\n![tau of every variant and seed](ablation.png)\n"
    )
    (folder / "ablation.md").write_text(text, encoding="utf-8")
    draw(rows, folder / "ablation.png", f"Each drafter: {setting['cpu_seconds']:g} CPU seconds of training")
    print(table(rows), flush=True)
