"""The figures of a method, from its answers in all runs."""

import statistics
from collections.abc import Sequence
from itertools import chain

from dflash_hf.evaluation.decoded import DecodedRuns
from dflash_hf.evaluation.methods import TARGET_ALONE, TARGET_PACKED
from dflash_hf.evaluation.report import MethodReport


def method_report(decoded: DecodedRuns, method: str, warmup_seconds: float, compiled: bool) -> MethodReport:
    """The figures of a method; `warmup_seconds` and `compiled` as there."""
    last_answers = decoded[-1][method]
    lengths = list(chain.from_iterable(answer.acceptance_lengths for answer in last_answers))
    means = [statistics.fmean(answer.acceptance_lengths) for answer in last_answers if answer.acceptance_lengths]
    sizes = list(chain.from_iterable(answer.draft_sizes or () for answer in last_answers))
    equal = 0
    for index in range(len(last_answers)):
        equal += all(run[method][index].ids == run[TARGET_ALONE][index].ids for run in decoded)
    speeds = _speeds(decoded, method)
    decode_times = _decode_times(decoded, method)
    report = MethodReport(
        tokens_per_second=statistics.median(speeds),
        speedup=_median_ratio(speeds, _speeds(decoded, TARGET_ALONE)),
        runs=speeds,
        tokens=sum(len(answer.ids) for answer in last_answers),
        target_forwards=sum(answer.forwards for answer in last_answers),
        equal=equal,
        warmup_seconds=warmup_seconds,
        compiled=compiled,
        tau=statistics.fmean(lengths) if lengths else None,
        draft_sizes=sizes or None,
        tau_of_responses=statistics.fmean(means) if means else None,
        prefill_seconds=_prefill_seconds(decoded, method),
        decode_seconds_per_token=statistics.median(decode_times) if decode_times else None,
        decode_speedup=_decode_speedup(decoded, method, TARGET_ALONE),
    )
    if TARGET_PACKED in decoded[-1]:
        report.speedup_over_packed = _median_ratio(speeds, _speeds(decoded, TARGET_PACKED))
        report.decode_speedup_over_packed = _decode_speedup(decoded, method, TARGET_PACKED)
    return report


def _speeds(decoded: DecodedRuns, method: str) -> list[float]:
    """Tokens per second of a method in each run."""
    speeds = []
    for run in decoded:
        tokens = sum(len(answer.ids) for answer in run[method])
        speeds.append(tokens / sum(answer.seconds for answer in run[method]))
    return speeds


def _median_ratio(speeds: Sequence[float], base_speeds: Sequence[float]) -> float:
    """The median ratio of two speeds. Ratios are taken within a run, where the load was the same."""
    return statistics.median(speed / base for speed, base in zip(speeds, base_speeds, strict=True))


def _decode_times(decoded: DecodedRuns, method: str) -> list[float]:
    """
    Seconds per new token after the prefill in each run: the mean over the responses, not over the tokens, as the paper
    reports it. Empty if a method's tokens are not seen, or no response has a second one.
    """
    means = []
    for run in decoded:
        times = [answer.decode_seconds_per_token for answer in run[method]]
        times_of_responses = [time for time in times if time is not None]
        if times_of_responses:
            means.append(statistics.fmean(times_of_responses))
    return means


def _decode_speedup(decoded: DecodedRuns, method: str, baseline: str) -> float | None:
    """The ratio of a baseline's time per new token after the prefill to a method's."""
    times = _decode_times(decoded, method)
    base_times = _decode_times(decoded, baseline)
    if len(times) != len(base_times) or not times:
        return None
    return _median_ratio(base_times, times)


def _prefill_seconds(decoded: DecodedRuns, method: str) -> float | None:
    """Seconds until the first new token: the mean over the responses, the median over the runs."""
    means = []
    for run in decoded:
        times = [answer.prefill_seconds for answer in run[method]]
        if None in times:
            return None
        means.append(statistics.fmean(times))
    return statistics.median(means)
