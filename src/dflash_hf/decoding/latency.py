"""
The latency model: how long a round takes, by how many tokens it verifies in each row and whether they were drafted.

Measured during normal rounds and interpolated in between. What has not been measured is assumed. A call chooses its
draft lengths by a snapshot taken at its start, so that a call that is repeated makes the same choices; what it
measures serves later calls. Draft lengths depend on ratios of times alone: the unit is a round without a draft.
"""

import copy
import statistics
import weakref
from bisect import bisect_left
from collections import defaultdict
from typing import NamedTuple

import torch

from dflash_hf.decoding.adapters import adapters_of
from dflash_hf.decoding.timing import TimedStreamer, clock


# For each drafter and target, the latency model of each way in which rounds are computed.
_latency_models: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


class DraftSize(NamedTuple):
    """What a round verifies in each row, besides the last committed token."""

    tokens: int
    drafted: bool  # by the drafter, whose forward is part of the round; otherwise copied from the text


NO_DRAFT = DraftSize(0, False)


class LatencyModel:
    """
    Seconds per round of one pair on one device, by rows, context length and draft size.

    Args:
        drafter_share (`float`): The time of a drafter forward relative to a round without a draft, assumed until it
            is measured: the ratio of their weights.
        device_type (`str`): `"cpu"` or another.
    """

    SAMPLES = 24  # the newest of each draft size; the model follows a machine that changes
    ENOUGH = 3  # samples from which a time counts as measured: one may be an outlier
    # Assumed until measured: how much slower a round becomes by verifying at all, and by each token of each row. Too
    # low rather than too high: a length that seems cheap is tried, and then known; one that seems dear never is.
    CPU = (0.05, 0.01)
    ACCELERATOR = (0.05, 0.001)

    def __init__(self, drafter_share: float, device_type: str):
        self.drafter_share = drafter_share
        self.verifying, self.per_token = self.CPU if device_type == "cpu" else self.ACCELERATOR
        # (rows, bucket of context lengths) -> draft size -> seconds.
        self.samples: dict[tuple[int, int], dict[DraftSize, tuple[float, ...]]] = defaultdict(dict)

    @staticmethod
    def bucket(context: int) -> int:
        """Context lengths in one bucket cost about the same: up to 511 tokens, up to 1,023, up to 2,047, ..."""
        return max(context, 256).bit_length()

    def record(self, rows: int, rounds: list[tuple[int, DraftSize, float]]) -> None:
        """
        Add the rounds of a call: context length, draft size, seconds.

        Their times are divided by the load of the machine during the call: how much slower than before its rounds of
        known sizes were. Otherwise a call without drafts on a busy machine would make drafts look fast ever after.
        """
        rounds = [(context, size, seconds) for context, size, seconds in rounds if seconds > 0]  # 0: a coarse clock
        slowdowns = []
        for context, size, seconds in rounds:
            samples = self._samples(rows, context, size)
            if len(samples) >= self.ENOUGH:
                slowdowns.append(seconds / statistics.median(samples))
        load = statistics.median(slowdowns) if slowdowns else 1.0
        for context, size, seconds in rounds:
            samples = (*self._samples(rows, context, size), seconds / load)
            self.samples[rows, self.bucket(context)][size] = samples[-self.SAMPLES :]

    def snapshot(self) -> "LatencyModel":
        """A copy that later rounds do not change."""
        snapshot = copy.copy(self)
        snapshot.samples = defaultdict(dict)
        for key, samples in list(self.samples.items()):  # a list: other threads may be adding keys
            snapshot.samples[key] = dict(samples)
        return snapshot

    def count(self, rows: int, context: int, size: DraftSize) -> int:
        """The number of samples."""
        return len(self._samples(rows, context, size))

    def _samples(self, rows: int, context: int, size: DraftSize) -> tuple[float, ...]:
        return self.samples.get((rows, self.bucket(context)), {}).get(size, ())

    def latencies(self, rows: int, context: int, max_draft: int, drafted: bool) -> list[float]:
        """
        Latencies of rounds that verify 0, 1, ... `max_draft` tokens in each row, in rounds without a draft.

        What is assumed is scaled by measured / assumed: interpolated between the draft sizes that were measured, and
        constant outside of them. No round takes longer than a larger one: other load makes rounds slower, not faster.
        """
        assumed = [self._assumed(rows, DraftSize(tokens, drafted)) for tokens in range(max_draft + 1)]
        measured = self._measured(rows, context)
        # The unit: measured, or else what the times of other sizes suggest.
        ratios = sorted(seconds / self._assumed(rows, size) for size, seconds in measured.items())
        unit = measured.get(NO_DRAFT) or (ratios[len(ratios) // 2] if ratios else 1.0)
        corrections = {}
        for size, seconds in sorted(measured.items()):
            if size.drafted == drafted:
                corrections[size.tokens] = seconds / (unit * self._assumed(rows, size))
        latencies = assumed
        if corrections:
            latencies = [latency * interpolate(corrections, tokens) for tokens, latency in enumerate(assumed)]
        for tokens in reversed(range(max_draft)):
            latencies[tokens] = min(latencies[tokens], latencies[tokens + 1])
        return latencies

    def _assumed(self, rows: int, size: DraftSize) -> float:
        latency = 1.0
        if size.tokens:
            latency += self.verifying + self.per_token * rows * size.tokens
        if size.drafted:
            latency += self.drafter_share
        return latency

    def _measured(self, rows: int, context: int) -> dict[DraftSize, float]:
        """Typical seconds of each draft size, at the nearest context length that was measured."""
        wanted = self.bucket(context)
        buckets = [bucket for sampled_rows, bucket in self.samples if sampled_rows == rows]
        for bucket in sorted(buckets, key=lambda bucket: abs(bucket - wanted)):
            samples = self.samples[rows, bucket].items()
            typical = {size: lower_quartile(seconds) for size, seconds in samples if len(seconds) >= self.ENOUGH}
            if typical:
                return typical
        return {}


def latency_model_of(target, draft) -> LatencyModel:
    """That of a pair on this device, by dtype, kinds of layers (packed, quantised), adapters and threads."""
    layers = frozenset(type(module) for module in target.modules())
    threads = torch.get_num_threads() if target.device.type == "cpu" else None
    key = (target.device, target.dtype, layers, adapters_of(draft), threads)
    models = _latency_models.setdefault(draft, weakref.WeakKeyDictionary()).setdefault(target, {})
    if key not in models:
        models[key] = LatencyModel(_drafter_share(target, draft), target.device.type)
    return models[key]


def _drafter_share(target, draft) -> float:
    """The weights that a forward of the drafter reads, its head included, over the target's."""
    weights = sum(parameter.numel() for parameter in draft.parameters())
    if not draft.config.has_own_lm_head:
        weights += target.get_output_embeddings().weight.numel()
    return weights / max(sum(parameter.numel() for parameter in target.parameters()), 1)


def lower_quartile(values) -> float:
    """Other load makes rounds slower, never faster."""
    return sorted(values)[len(values) // 4]


def interpolate(values: dict[int, float], x: int) -> float:
    """Linear interpolation between the keys of `values`, which are sorted; constant outside of them."""
    keys = list(values)
    x = min(max(x, keys[0]), keys[-1])
    right = bisect_left(keys, x)
    if keys[right] == x:
        return values[x]
    before = keys[right - 1]
    after = keys[right]
    return values[before] + (values[after] - values[before]) * (x - before) / (after - before)


class RoundTimer:
    """
    Times the rounds of one call. It is made when the call begins to read its prompt.

    Args:
        device (`torch.device`): The target's.
        streamer (`TimedStreamer`, *optional*): The call's.
    """

    def __init__(self, device: torch.device, streamer: TimedStreamer | None = None):
        self.device = device
        self.streamer = streamer
        self.rounds: list[tuple[int, DraftSize, float]] = []  # context length, draft size, seconds
        self.prompt_started = self.now()
        self.first_round_started: float | None = None
        self.ended = self.prompt_started

    def now(self) -> float:
        """Seconds, without those spent in the streamer."""
        seconds = clock(self.device)
        return seconds if self.streamer is None else seconds - self.streamer.seconds

    def record(self, context: int, size: DraftSize, started: float) -> None:
        """A round ends now. The first one of a call is slower than the others and not kept."""
        self.ended = self.now()
        if self.first_round_started is None:
            self.first_round_started = started
        else:
            self.rounds.append((context, size, self.ended - started))

    def count(self, size: DraftSize) -> int:
        """The number of rounds of a size."""
        return sum(timed == size for _, timed, _ in self.rounds)

    def speedup(self, rounds_speedup: float) -> float:
        """The speedup of the whole call, prompt included, if that of its rounds is `rounds_speedup`."""
        if self.first_round_started is None:
            return rounds_speedup
        prompt = self.first_round_started - self.prompt_started
        rounds = self.ended - self.first_round_started
        if prompt + rounds <= 0:
            return rounds_speedup
        return (prompt + rounds_speedup * rounds) / (prompt + rounds)
