"""What `dflash check` reports of a drafter."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """
    A problem for an engine.

    Args:
        severity (`str`): `"error"`: it will not load, or not draft as trained. `"warning"`: check before serving.
        engines (`tuple[str, ...]`): The engines affected.
        key (`str`): Key of `config.json`, tensor or file.
        message (`str`): The problem and the remedy.
    """

    severity: str
    engines: tuple[str, ...]
    key: str
    message: str


def readers(findings: Sequence[Finding], engines: Sequence[str]) -> dict[str, bool]:
    """
    Whether each engine can read the drafter: it can, if no error concerns it.

    Args:
        findings (`Sequence[Finding]`): From [`check`].
        engines (`Sequence[str]`): The engines by their names, without versions.
    """
    unable: set[str] = set()
    for finding in findings:
        if finding.severity == "error":
            unable.update(finding.engines)
    return {engine: engine not in unable for engine in engines}


def render(findings: Sequence[Finding]) -> str:
    """A table of findings for a terminal, or one line if there are none."""
    if not findings:
        return "No findings."
    rows = [(finding.severity, ", ".join(finding.engines), finding.key, finding.message) for finding in findings]
    rows.insert(0, ("severity", "engines", "key", "finding"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = []
    for *cells, message in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths)]
        lines.append("  ".join([*padded, message]))
    return "\n".join(lines)
