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

from dflash_hf.evaluation.measure import EvalReport
from dflash_hf.evaluation.text import LABELS


Sums = Sequence[tuple[int, int]]  # of each text: accepted tokens, and blocks


def mean_difference(before: Sums, after: Sums) -> tuple[float, float]:
    """
    The gain in accepted tokens per block, and that gain in standard errors; zeros if there are no blocks. Of fewer
    than four texts, which say little about chance, it is 0 standard errors.
    """
    means, parts = [], []
    for sums in (before, after):
        total = sum(n for _, n in sums)
        if not total:
            return 0.0, 0.0
        means.append(sum(a for a, _ in sums) / total)
        parts.append([(a - means[-1] * n) / total for a, n in sums])
    own = [now - then for then, now in zip(*parts, strict=True)]
    number, gain = len(own), means[1] - means[0]
    if number < 4:
        return gain, 0.0
    error = math.sqrt(number / (number - 1) * sum(one * one for one in own))
    return gain, 0.0 if gain == 0 else math.copysign(math.inf, gain) if error == 0 else gain / error


def compare(before: Path, after: Path, echo) -> dict:
    """Compare two reports, line by line to `echo`; returns the figures."""
    first, second = EvalReport.load(before), EvalReport.load(after)
    echo(f"{'':30}{'A':>12}{'B':>12}{'B / A':>9}")
    facts: dict = {"tau": [first.tau, second.tau], "methods": {}}
    rows = [("tau", first.tau, second.tau), ("tau, mean of answers", first.tau_per_response, second.tau_per_response)]
    for name in [name for name in first.methods if name in second.methods]:
        ours, theirs = first.methods[name], second.methods[name]
        facts["methods"][name] = {"speedup": [ours.speedup, theirs.speedup]}
        if ours.speedup is not None and theirs.speedup is not None:  # unknown in 0.1's reports of servers
            rows.append((f"speed-up, {LABELS.get(name, name)}"[:30], ours.speedup, theirs.speedup))
    for name, one, other in rows:
        echo(f"{name:30}{one:12.2f}{other:12.2f}" + (f"{other / one:9.2f}" if one else ""))
    for name in sorted(first.setting.keys() | second.setting.keys()):
        one, other = first.setting.get(name), second.setting.get(name)
        if one != other:
            echo(f"{name:30}{one!s:>12}{other!s:>12}")
    for path, report in zip("AB", (first, second)):
        echo(f"slot accepted, %, {path}  " + " ".join(f"{100 * share:.0f}" for share in report.acceptance_by_position))
    asked = [report.setting.get("prompts_digest") for report in (first, second)]
    if first.num_prompts == second.num_prompts and asked[0] == asked[1] is not None:
        sums = [[(sum(n) - len(n), len(n)) for n in report.acceptance_lengths] for report in (first, second)]
        gain, errors = mean_difference(*sums)
        facts |= {"gain": gain, "standard_errors": errors}
        chance = "more than chance" if abs(errors) >= 2 else "no more than chance"
        echo(f"the same prompts: tau {gain:+.3f}, {errors:+.1f} standard errors, {chance}")
    return facts
