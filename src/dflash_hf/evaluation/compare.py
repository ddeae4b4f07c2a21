"""
Two measurements over the same texts: is the difference between their means more than chance?

Blocks of one text are not independent but texts are, so the unit is the text. With `a` accepted tokens and `n` blocks
in a text, `mu = sum a / sum n`. To first order, the difference between two measurements over the same prompts is the
sum of the contributions `d_i = (a'_i - mu' n'_i) / sum n' - (a_i - mu n_i) / sum n`. Its standard error is the
square root of `M / (M - 1) * sum d_i^2`. If the blocks are the same too, this is the paired standard error.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from dflash_hf.evaluation.methods import LABELS
from dflash_hf.evaluation.report import EvalReport


AcceptedAndBlocks: TypeAlias = Sequence[tuple[int, int]]  # of each text: accepted tokens, and blocks


def mean_difference(before: AcceptedAndBlocks, after: AcceptedAndBlocks) -> tuple[float, float]:
    """
    The gain in accepted tokens per block, and the same gain in standard errors; zeros if there are no blocks. With
    fewer than four texts, which say little about chance, it is 0 standard errors.
    """
    total_before = sum(blocks for _, blocks in before)
    total_after = sum(blocks for _, blocks in after)
    if not total_before or not total_after:
        return 0.0, 0.0
    mean_before = sum(accepted for accepted, _ in before) / total_before
    mean_after = sum(accepted for accepted, _ in after) / total_after
    gain = mean_after - mean_before
    texts = len(before)
    contributions = []  # d_i
    for (accepted_before, blocks_before), (accepted_after, blocks_after) in zip(before, after, strict=True):
        part_before = (accepted_before - mean_before * blocks_before) / total_before
        part_after = (accepted_after - mean_after * blocks_after) / total_after
        contributions.append(part_after - part_before)
    if texts < 4 or gain == 0:
        return gain, 0.0
    error = math.sqrt(texts / (texts - 1) * sum(contribution**2 for contribution in contributions))
    if error == 0:
        return gain, math.copysign(math.inf, gain)
    return gain, gain / error


def compare(before: Path, after: Path, echo) -> dict:
    """
    Compare two reports.

    Args:
        before, after (`Path`): Files of reports.
        echo (`Callable`): Called with each line of output.

    Returns:
        `dict`: The figures, for `--json`; `gain` and `standard_errors` only if the prompts are the same.

    Raises:
        `ValueError`: a file is no report.
    """
    first = EvalReport.load(before)
    second = EvalReport.load(after)
    echo(f"{'':30}{'A':>12}{'B':>12}{'B / A':>9}")
    facts: dict = {"tau": [first.tau, second.tau], "methods": {}}
    rows = [("tau", first.tau, second.tau), ("tau, mean of answers", first.tau_per_response, second.tau_per_response)]
    for name in [name for name in first.methods if name in second.methods]:
        first_speedup = first.methods[name].speedup
        second_speedup = second.methods[name].speedup
        facts["methods"][name] = {"speedup": [first_speedup, second_speedup]}
        if first_speedup is not None and second_speedup is not None:  # unknown in 0.1's reports of servers
            rows.append((f"speedup, {LABELS.get(name, name)}"[:30], first_speedup, second_speedup))
        first_decoding = first.methods[name].decode_speedup
        second_decoding = second.methods[name].decode_speedup
        if first_decoding is not None and second_decoding is not None:  # not in reports of 0.2
            rows.append((f"after prefill, {LABELS.get(name, name)}"[:30], first_decoding, second_decoding))
    for name, first_figure, second_figure in rows:
        ratio = f"{second_figure / first_figure:9.2f}" if first_figure else ""
        echo(f"{name:30}{first_figure:12.2f}{second_figure:12.2f}{ratio}")
    for name in sorted(first.setting.keys() | second.setting.keys()):
        first_value = first.setting.get(name)
        second_value = second.setting.get(name)
        if first_value != second_value:
            echo(f"{name:30}{first_value!s:>12}{second_value!s:>12}")
    for path, report in zip("AB", (first, second)):
        echo(f"slot accepted, %, {path}  " + " ".join(f"{100 * share:.0f}" for share in report.acceptance_by_position))
    digest = first.setting.get("prompts_digest")
    same_prompts = digest is not None and digest == second.setting.get("prompts_digest")
    if same_prompts and first.num_prompts == second.num_prompts:
        gain, errors = mean_difference(_accepted_and_blocks(first), _accepted_and_blocks(second))
        facts |= {"gain": gain, "standard_errors": errors}
        chance = "more than chance" if abs(errors) >= 2 else "no more than chance"
        echo(f"the same prompts: tau {gain:+.3f}, {errors:+.1f} standard errors, {chance}")
    return facts


def _accepted_and_blocks(report: EvalReport) -> AcceptedAndBlocks:
    return [(sum(lengths) - len(lengths), len(lengths)) for lengths in report.acceptance_lengths]
