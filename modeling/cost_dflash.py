"""The cost of rounds on this machine: measured during normal rounds, constant during a call."""

import contextlib
import copy
import functools
import math
import os
import platform
import time
import weakref
from bisect import bisect_left
from collections import defaultdict, deque
from pathlib import Path

import torch

from .remembered_dflash import read, recall, remember
from .target_dflash import decoder_layers


# For each target, the cost of rounds by everything that affects it.
_tables: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()

SAMPLES = 24  # kept per size; older samples are dropped
# The cost of a forward pass over N tokens, in passes over one token: assumed until it is measured.
_CPU = {1: 1.0, 4: 1.1, 8: 1.3, 16: 1.7, 32: 2.7, 64: 4.6}
_GPU = {1: 1.0, 64: 1.05, 128: 1.3, 256: 2.2, 512: 4.2}
# Tokens that a round verifies in each row besides the anchor, and whether they were drafted, rather than copied.
Work = tuple[int, bool]
NOTHING: Work = (0, False)  # a round without a draft
_MADE = {"drafted": True, "copied": False}  # in files


class CostTable:
    """
    Seconds per round, by rows, length of the text and number of tokens verified per row.

    Args:
        drafting (`float`): Weights of the drafter and its head relative to the target's: the assumed cost of a drafter
            forward until it is measured.
        block_size (`int`): Tokens per row of such a forward.
        device (`torch.device`): The target's device.
        key (`dict`, *optional*): Identifies the pair and machine, so that later processes find these costs.
    """

    STEADY = 1.15  # how much slower or faster than usual all rounds of a call must be for another load of the machine

    def __init__(self, drafting: float, block_size: int, device: torch.device, key: dict | None = None):
        self.drafting, self.block_size, self.key = drafting, block_size, key
        self.pinned, self.new, self.total = False, 0, 0  # samples: since they were last saved, and in total
        self.forwards = _CPU if device.type == "cpu" else _GPU
        self.curves: dict[tuple, list[float]] = {}  # cached in copies, which no longer learn
        self.samples: dict[tuple, dict] = defaultdict(dict)  # (rows, bucket) -> {work: seconds}

    @staticmethod
    def bucket(columns: int) -> int:
        """The bucket of a text's length; lengths in a bucket cost about the same."""
        return max(columns, 256).bit_length()

    def note(self, rounds: list[tuple[int, int, Work, float]]) -> None:
        """
        Record the rounds of a call: rows, columns, work, seconds. Sizes follow from ratios of costs; if all rounds of
        a call took much longer than usual, so would have those that it had no use for, and its times are scaled back.
        """
        rounds = [] if self.pinned else [one for one in rounds if one[-1] > 0]  # 0: a coarse clock
        usual = [self._known(rows, columns, work) for rows, columns, work, _ in rounds]
        load = _typical([one[-1] / _typical(of) for one, of in zip(rounds, usual, strict=True) if len(of) > 2])
        load = 1.0 if 1 / self.STEADY < load < self.STEADY else load
        for rows, columns, work, seconds in rounds:
            self.new, self.total = self.new + 1, self.total + 1
            times = [*self._known(rows, columns, work), seconds / load]
            self.samples[rows, self.bucket(columns)][work] = deque(times, maxlen=SAMPLES)  # new: others may be reading

    def count(self, rows: int, columns: int, work: Work) -> int:
        """The number of measurements; the maximum in a pinned table."""
        return SAMPLES if self.pinned else len(self._known(rows, columns, work))

    def _known(self, rows: int, columns: int, work: Work):
        return self.samples.get((rows, self.bucket(columns)), {}).get(work, ())

    def copy(self) -> "CostTable":
        """A copy that later measurements do not affect."""
        other = copy.copy(self)
        other.curves = {}
        other.samples = defaultdict(dict, {place: dict(known) for place, known in list(self.samples.items())})
        return other

    def keep(self) -> None:
        """Save for later processes, less often as samples accumulate."""
        if self.new > 8 + (self.total - self.new) // 4 and self.key is not None:
            self.new = 0
            found = {}
            for (rows, bucket), known in list(self.samples.items()):
                works = [(size, "drafted" if made else "copied", times) for (size, made), times in list(known.items())]
                found[f"{rows} {bucket}"] = {f"{size} {made}": list(times) for size, made, times in works}
            remember("costs", self.key, found)

    def take(self, found) -> bool:
        """Load what `keep` wrote; returns whether it is valid."""
        samples = defaultdict(dict)
        try:
            for place, known in found.items():
                rows, bucket = map(int, place.split())
                for work, seconds in known.items():
                    size, made = work.split()
                    if not all(isinstance(s, float) and 0 < s < math.inf for s in seconds):
                        return False
                    samples[rows, bucket][int(size), _MADE[made]] = deque(seconds, maxlen=SAMPLES)
        except (AttributeError, KeyError, TypeError, ValueError):
            return False
        self.samples, self.total = samples, sum(len(s) for known in samples.values() for s in known.values())
        return True

    def curve(self, rows: int, columns: int, most: int, drafted: bool = True) -> list[float]:
        """
        Costs of rounds that verify 0, 1, ... `most` tokens besides the anchor, with or without drafting a block
        before, in units of a round without either: measured if there are enough samples, otherwise interpolated and
        extrapolated along the expected shape; never decreasing.
        """
        key = rows, self.bucket(columns), most, drafted
        if key not in self.curves:
            self.curves[key] = self._curve(rows, columns, most, drafted)
        return self.curves[key]

    def _curve(self, rows: int, columns: int, most: int, drafted: bool) -> list[float]:
        drafting = self.drafting * self._forward(rows * self.block_size) if drafted else 0.0
        expected = [drafting + self._forward(rows * (n + 1)) for n in range(most + 1)]
        plain, known = self._forward(rows), self._nearest(rows, columns)
        found = {size: value for (size, made), value in known.items() if made == drafted}
        # A larger round is never cheaper: where samples say so, their mean is likelier than the highest of them.
        rising = _rising([(n, *found[n]) for n in sorted(found)])
        measured = {n: seconds / expected[min(n, most)] for n, seconds in rising.items()}
        unit = [known[NOTHING][0] / plain] if NOTHING in known else []
        ratios = sorted([*measured.values(), *unit]) or [1.0]
        scale = ratios[len(ratios) // 2]
        places = sorted(rising)
        curve = [value * (_line(places, measured, n) if places else scale) for n, value in enumerate(expected)]
        for n in range(1, most + 1):
            curve[n] = max(curve[n], curve[n - 1])
        return [value / (plain * (unit or [scale])[0]) for value in curve]

    def _nearest(self, rows: int, columns: int) -> dict[Work, tuple[float, int]]:
        """Typical seconds and their number of samples, at the nearest length with samples."""
        bucket = self.bucket(columns)
        for _, length in sorted((abs(length - bucket), length) for of, length in self.samples if of == rows):
            noted = self.samples[rows, length].items()
            if known := {work: (_typical(seconds), len(seconds)) for work, seconds in noted if len(seconds) > 2}:
                return known
        return {}

    def _forward(self, tokens: int) -> float:
        sizes = list(self.forwards)
        return _line(sizes, self.forwards, tokens) * max(tokens / sizes[-1], 1.0)


def _typical(values) -> float:
    """The lower quartile: other load makes rounds slower, never faster. 1 if there are none."""
    return sorted(values)[len(values) // 4] if values else 1.0


def _rising(points: list[tuple[int, float, int]]) -> dict[int, float]:
    """Isotonic regression: the non-decreasing values nearest to `(place, value, weight)`, in order of their places."""
    pools: list[tuple[float, int, list[int]]] = []  # mean, weight, places
    for place, mean, weight in points:
        places = [place]
        while pools and pools[-1][0] > mean:
            before, more, others = pools.pop()
            mean, weight = (before * more + mean * weight) / (more + weight), more + weight
            places = [*others, *places]
        pools.append((mean, weight, places))
    return {place: mean for mean, _, places in pools for place in places}


def _line(places: list[int], values: dict[int, float], n: int) -> float:
    """Linear interpolation at `n`; constant outside of the places."""
    n = min(max(n, places[0]), places[-1])
    right = bisect_left(places, n)
    if places[right] == n:
        return values[n]
    a, b = places[right - 1], places[right]
    return values[a] + (values[b] - values[a]) * (n - a) / (b - a)


@functools.cache
def hardware(device: torch.device) -> str:
    """The name of an accelerator, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def clock(device: torch.device) -> float:
    """Seconds; with a single CPU thread its CPU time, which does not depend on other load."""
    return time.thread_time() if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()


def adapters_of(draft) -> tuple:
    """The adapters (LoRA) active on a drafter: PEFT's, however they were added."""
    layers = [module for module in draft.modules() if isinstance(getattr(module, "disable_adapters", None), bool)]
    return tuple(sorted({name for layer in layers if not layer.disable_adapters for name in layer.active_adapters}))


def table_of(target, draft, compiled: str | bool, ahead: int, running) -> CostTable:
    """
    The cost table of a pair: for its device, dtype, weight layout, threads, compilation and rounds ahead of the host.
    `running` is the copy of the target that a call runs, whose layers may be packed. Loaded from earlier processes, or
    pinned to the content of a file (`decoding_config.costs`, or the environment variable `DFLASH_HF_COSTS`).

    Raises:
        `ValueError`: the file does not hold costs.
    """
    config, pinned = draft.config, draft.decoding_config.costs or os.environ.get("DFLASH_HF_COSTS")
    layer = decoder_layers(running)[0]
    kinds = sorted({type(module).__name__ for module in layer.modules()})  # packed, quantised
    shape = [getattr(config, n) for n in ("num_hidden_layers", "hidden_size", "intermediate_size", "draft_vocab_size")]
    threads = torch.get_num_threads() if target.device.type == "cpu" else None
    weights = sum(parameter.numel() for parameter in draft.parameters())
    same = {
        "layers": kinds,
        "drafter": f"{type(draft).__name__} of {weights:,} parameters, blocks of {config.block_size}",
        "shape": shape,
        "head": config.head.name,
        "device": hardware(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": threads,
        "compiled": compiled,
        "look_ahead": ahead,
        "torch": torch.__version__,
    }
    tables, how = _tables.setdefault(target, {}), (repr(same), adapters_of(draft), target.device, pinned)
    if how in tables:
        return tables[how]
    of_target = sum(parameter.numel() for parameter in target.parameters())
    key = {"target": f"{type(target).__name__} of {of_target:,} parameters", **same}
    head = 0 if config.has_own_head else target.get_output_embeddings().weight.numel()
    table = CostTable((weights + head) / max(of_target, 1), config.block_size, target.device, key)
    if pinned:
        content = read(Path(pinned).expanduser())
        if content is None or not table.take(content["found"]):
            raise ValueError(
                f"{pinned} (decoding_config.costs, or DFLASH_HF_COSTS) does not hold costs of rounds: name a file "
                "that `dflash env` lists, or leave it out."
            )
        table.pinned = True
    else:
        table.take(recall("costs", key))
    tables[how] = table
    return table
