"""
The latency model: how long a round takes, by how many tokens it verifies in each row and where these come from.

Measured during normal rounds, and averaged over similar sizes. What has not been measured is assumed. A call chooses
its draft lengths by a snapshot taken at its start, so that a call that is repeated makes the same choices; what it
measures serves later calls. Draft lengths depend on ratios of times alone: the unit is a round without a draft.
"""

import copy
import math
import statistics
import weakref
from collections import defaultdict
from typing import NamedTuple

import torch

from dflash_hf.decoding.adapters import adapters_of
from dflash_hf.decoding.cpu_dtypes import is_emulated
from dflash_hf.decoding.timing import TimedStreamer, clock


# For each drafter and target, the latency model of each way in which rounds are computed.
_latency_models: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


class DraftSize(NamedTuple):
    """What a round verifies in each row, besides the anchor."""

    num_drafted: int
    by_drafter: bool  # whose forward is part of the round; `False`: the tokens are copied from the text


NO_DRAFT = DraftSize(0, False)


class LatencyModel:
    """
    Seconds per round of one pair on one device, by rows, context length and draft size.

    What is assumed of a size is corrected by what was measured of other sizes `m`. With `unit` the seconds of a round
    without a draft, all for the same rows and context length:

        latency(size) = assumed(size) * mean over m of seconds(m) / (unit * assumed(m))

    The mean is weighted: sizes of about as many tokens, and those with more samples, count most. So noise decides
    little between lengths that cost about the same.

    Args:
        drafter_cost (`float`): The time of a drafter forward in rounds without a draft, assumed until it is measured:
            the ratio of the weights that both read.
        processor (`str`): A key of `ASSUMED`.
    """

    MAX_SAMPLES = 24  # the newest of each draft size; the model follows a machine that changes
    MIN_SAMPLES = 3  # from which a draft size counts as measured: one sample may be an outlier
    # The weight of a measured size for sizes with twice or half as many tokens; for its own, 1.
    OCTAVE_WEIGHT = 0.25
    # Assumed until measured, in rounds without a draft: the overhead of verifying at all, and the latency of each
    # token of each row. Too low rather than too high: a length that is assumed to be cheap is tried, and then
    # measured; one that is assumed to be expensive never is. By the makers' figures, cards of NVIDIA read weights for
    # about as long as they compute 130 to 220 tokens (H100, A10, RTX 4090), and an M2 Ultra (800 GB/s, 27 TFLOPS) 26.
    ASSUMED = {
        "cpu": (0.1, 0.05),
        "cpu with bf16 units": (0.05, 0.01),
        "accelerator": (0.05, 0.001),
        "mps": (0.05, 0.03),
    }

    def __init__(self, drafter_cost: float, processor: str):
        self.drafter_cost = drafter_cost
        self.overhead, self.per_token = self.ASSUMED[processor]
        # (rows, bucket of context lengths) -> draft size -> seconds.
        self.samples: dict[tuple[int, int], dict[DraftSize, tuple[float, ...]]] = defaultdict(dict)

    @staticmethod
    def bucket(context_length: int) -> int:
        """Context lengths in one bucket cost about the same: up to 511 tokens, up to 1,023, up to 2,047, ..."""
        return max(context_length, 256).bit_length()

    def record(self, rows: int, rounds: list[tuple[int, DraftSize, float]]) -> None:
        """
        Add the rounds of a call: context length, draft size, seconds.

        Their times are divided by the slowdown of the machine during the call: how much slower than before its rounds
        of measured sizes were. Otherwise a call without drafts on a busy machine would make drafts look fast ever
        after.
        """
        rounds = [(length, size, seconds) for length, size, seconds in rounds if seconds > 0]  # 0: a coarse clock
        slowdowns = []
        for context_length, size, seconds in rounds:
            samples = self._samples(rows, context_length, size)
            if len(samples) >= self.MIN_SAMPLES:
                slowdowns.append(seconds / statistics.median(samples))
        slowdown = statistics.median(slowdowns) if slowdowns else 1.0
        for context_length, size, seconds in rounds:
            samples = (*self._samples(rows, context_length, size), seconds / slowdown)
            self.samples[rows, self.bucket(context_length)][size] = samples[-self.MAX_SAMPLES :]

    def snapshot(self) -> "LatencyModel":
        """A copy that later rounds do not change."""
        snapshot = copy.copy(self)
        snapshot.samples = defaultdict(dict)
        for key, samples in list(self.samples.items()):  # a list: other threads may be adding keys
            snapshot.samples[key] = dict(samples)
        return snapshot

    def count(self, rows: int, context_length: int, size: DraftSize) -> int:
        """The number of samples."""
        return len(self._samples(rows, context_length, size))

    def _samples(self, rows: int, context_length: int, size: DraftSize) -> tuple[float, ...]:
        return self.samples.get((rows, self.bucket(context_length)), {}).get(size, ())

    def latencies(self, rows: int, context_length: int, max_draft: int, drafted: bool) -> list[float]:
        """
        Latencies of rounds with 0, 1, ... `max_draft` drafted tokens in each row, in rounds without a draft.

        Args:
            drafted (`bool`): Whether the drafter drafts them; `False`: they are copied.
        """
        measured = self._measured(rows, context_length)
        unit = self._seconds_without_draft(rows, measured)
        corrections = []
        for size, (seconds, count) in measured.items():
            if size.by_drafter == drafted:
                corrections.append((size.num_drafted, seconds / (unit * self._assumed(rows, size)), count))
        latencies = []
        for num_drafted in range(max_draft + 1):
            latency = self._assumed(rows, DraftSize(num_drafted, drafted))
            if corrections:
                latency *= self._correction(corrections, num_drafted)
            latencies.append(latency)
        return latencies

    def _correction(self, corrections: list[tuple[int, float, int]], num_drafted: int) -> float:
        """
        The weighted mean of corrections for a number of drafted tokens. Each correction comes with the number of
        drafted tokens that it was measured with, before it, and its number of samples, after it.
        """
        total = 0.0
        total_weight = 0.0
        for measured_drafted, correction, count in corrections:
            octaves = abs(math.log2((1 + num_drafted) / (1 + measured_drafted)))
            weight = count * self.OCTAVE_WEIGHT**octaves
            total += weight * correction
            total_weight += weight
        return total / total_weight

    def _seconds_without_draft(self, rows: int, measured: dict[DraftSize, tuple[float, int]]) -> float:
        """Seconds of a round without a draft: measured, or estimated from the times of other sizes."""
        if NO_DRAFT in measured:
            return measured[NO_DRAFT][0]
        if not measured:
            return 1.0
        return statistics.median(seconds / self._assumed(rows, size) for size, (seconds, _) in measured.items())

    def _assumed(self, rows: int, size: DraftSize) -> float:
        """The latency of a round, in rounds without a draft."""
        latency = 1.0
        if size.num_drafted:
            latency += self.overhead + self.per_token * rows * size.num_drafted
        if size.by_drafter:
            latency += self.drafter_cost
        return latency

    def _measured(self, rows: int, context_length: int) -> dict[DraftSize, tuple[float, int]]:
        """Typical seconds of each draft size and its number of samples, at the nearest length that was measured."""
        wanted = self.bucket(context_length)
        buckets = [bucket for sampled_rows, bucket in self.samples if sampled_rows == rows]
        for bucket in sorted(buckets, key=lambda bucket: abs(bucket - wanted)):
            typical = {}
            for size, seconds in self.samples[rows, bucket].items():
                if len(seconds) >= self.MIN_SAMPLES:
                    typical[size] = (lower_quartile(seconds), len(seconds))
            if typical:
                return typical
        return {}


def latency_model_of(target, draft) -> LatencyModel:
    """
    The latency model of a pair as both models are now: whatever changes how fast either computes has a model of its
    own.
    """
    threads = torch.get_num_threads() if target.device.type == "cpu" else None
    key = (threads, _computation_key(target), _computation_key(draft))
    models = _latency_models.setdefault(draft, weakref.WeakKeyDictionary()).setdefault(target, {})
    if key not in models:
        models[key] = LatencyModel(_drafter_cost(target, draft), _processor(target))
    return models[key]


def _computation_key(model) -> tuple:
    """What a model's speed depends on: device, dtype, kinds of layers (packed, quantised), active adapters."""
    layers = frozenset(type(module) for module in model.modules())
    return model.device, model.dtype, layers, adapters_of(model)


def _processor(target) -> str:
    """What computes the target, as a key of [`LatencyModel.ASSUMED`]."""
    if target.device.type == "mps":
        return "mps"
    if target.device.type != "cpu":
        return "accelerator"
    is_bf16_in_hardware = target.dtype == torch.bfloat16 and not is_emulated(torch.bfloat16)
    return "cpu with bf16 units" if is_bf16_in_hardware else "cpu"


def _drafter_cost(target, draft) -> float:
    """The weights that a forward of the drafter reads, LM head included, divided by those of the target."""
    weights = sum(parameter.numel() for parameter in draft.parameters())
    if not draft.config.has_own_lm_head:
        weights += target.get_output_embeddings().weight.numel()
    return weights / max(sum(parameter.numel() for parameter in target.parameters()), 1)


def lower_quartile(values) -> float:
    """The lower quartile of times, which is typical: other load of the machine makes rounds slower, never faster."""
    return sorted(values)[len(values) // 4]


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
        self.rounds: list[tuple[int, DraftSize, float]] = []  # context length, draft size, seconds; not the first
        self.prompt_started = self.now()
        self.first_round_started: float | None = None
        self.ended = self.prompt_started

    def now(self) -> float:
        """Seconds, without the time spent in the streamer."""
        seconds = clock(self.device)
        return seconds if self.streamer is None else seconds - self.streamer.seconds

    def record(self, context_length: int, size: DraftSize, started: float) -> None:
        """A round ends now. The first one of a call is slower than the others and not kept."""
        self.ended = self.now()
        if self.first_round_started is None:
            self.first_round_started = started
        else:
            self.rounds.append((context_length, size, self.ended - started))

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
