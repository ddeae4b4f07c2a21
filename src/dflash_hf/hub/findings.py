"""The findings of `dflash check`."""

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
        leaves_open (`bool`): Whether it remains unknown if these engines can read the drafter.
    """

    severity: str
    engines: tuple[str, ...]
    key: str
    message: str
    leaves_open: bool = False


def can_read_by_engine(findings: Sequence[Finding], engines: Sequence[str]) -> dict[str, bool | None]:
    """
    Whether each engine can read the drafter: it can, if no error is about it.

    Args:
        findings (`Sequence[Finding]`): From [`~dflash_hf.hub.check.check`].
        engines (`Sequence[str]`): The engines by their names, without versions.

    Returns:
        `dict[str, bool | None]`: By engine; `None` where it is not known.
    """
    can_read: dict[str, bool | None] = dict.fromkeys(engines, True)
    for finding in findings:
        for engine in can_read.keys() & {*finding.engines}:
            if finding.severity == "error":
                can_read[engine] = False
            elif finding.leaves_open and can_read[engine]:
                can_read[engine] = None
    return can_read


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
