"""The cost of rounds on this machine: measured during normal rounds, constant during a call."""

import copy
import weakref
from bisect import bisect_left
from collections import defaultdict, deque

import torch

from dflash_hf.decoding.adapters import adapters_of
from dflash_hf.decoding.cpu_dtypes import is_emulated
from dflash_hf.decoding.timing import TimedStreamer, clock


# For each target, the cost of rounds by everything that affects it.
_tables: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()

SAMPLES = 24  # kept per size; older samples are dropped
# The cost of a forward pass over N tokens, in passes over one token: assumed until it is measured.
_CPU = {1: 1.0, 4: 1.1, 8: 1.3, 16: 1.7, 32: 2.7, 64: 4.6}
_CPU_BF16 = {1: 1.0, 2: 1.1, 8: 1.17, 16: 1.25, 32: 1.45, 64: 1.7}  # with units for it
_GPU = {1: 1.0, 64: 1.05, 128: 1.3, 256: 2.2, 512: 4.2}
# Tokens that a round verifies in each row besides the anchor, and whether they were drafted, rather than copied.
Work = tuple[int, bool]
NOTHING: Work = (0, False)  # a round without a draft
ENOUGH = 3  # measurements of a size, after which its cost is known; 1 and 8: within 3 %, where none is off


class CostTable:
    """
    Seconds per round, by rows, length of the text and number of tokens verified per row.

    Args:
        drafting (`float`): Weights of the drafter and its head relative to the target's: the assumed cost of a drafter
            forward until it is measured.
        block_size (`int`): Tokens per row of such a forward.
        device (`torch.device`), dtype (`torch.dtype`): Of the target.
    """

    STEADY = 1.15  # how much slower or faster than usual all rounds of a call must be for another load of the machine

    def __init__(self, drafting: float, block_size: int, device: torch.device, dtype: torch.dtype = torch.float32):
        self.drafting, self.block_size = drafting, block_size
        on_cpu = _CPU_BF16 if dtype == torch.bfloat16 and not is_emulated(dtype) else _CPU
        self.forwards = on_cpu if device.type == "cpu" else _GPU
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
        rounds = [one for one in rounds if one[-1] > 0]  # 0: a coarse clock
        usual = [self._known(rows, columns, work) for rows, columns, work, _ in rounds]
        load = _typical([one[-1] / _typical(of) for one, of in zip(rounds, usual, strict=True) if len(of) >= ENOUGH])
        load = 1.0 if 1 / self.STEADY < load < self.STEADY else load
        for rows, columns, work, seconds in rounds:
            times = [*self._known(rows, columns, work), seconds / load]
            self.samples[rows, self.bucket(columns)][work] = deque(times, maxlen=SAMPLES)  # new: others may be reading

    def count(self, rows: int, columns: int, work: Work) -> int:
        """The number of measurements."""
        return len(self._known(rows, columns, work))

    def _known(self, rows: int, columns: int, work: Work):
        return self.samples.get((rows, self.bucket(columns)), {}).get(work, ())

    def copy(self) -> "CostTable":
        """A copy that later measurements do not affect."""
        other = copy.copy(self)
        other.curves = {}
        other.samples = defaultdict(dict, {place: dict(known) for place, known in list(self.samples.items())})
        return other

    def curve(self, rows: int, columns: int, max_draft: int, drafted: bool = True) -> list[float]:
        """
        Costs of rounds that verify 0, 1, ... `max_draft` tokens besides the anchor, with or without drafting a block
        before, in units of a round without either: measured if there are enough samples, otherwise interpolated and
        extrapolated along the expected shape; never decreasing.
        """
        key = rows, self.bucket(columns), max_draft, drafted
        if key not in self.curves:
            self.curves[key] = self._curve(rows, columns, max_draft, drafted)
        return self.curves[key]

    def _curve(self, rows: int, columns: int, max_draft: int, drafted: bool) -> list[float]:
        drafting = self.drafting * self._forward(rows * self.block_size) if drafted else 0.0
        expected = [drafting + self._forward(rows * (n + 1)) for n in range(max_draft + 1)]
        plain, known = self._forward(rows), self._nearest(rows, columns)
        found = {size: value for (size, made), value in known.items() if made == drafted}
        # A larger round is never cheaper: where samples say so, their mean is likelier than the highest of them.
        rising = _rising([(n, *found[n]) for n in sorted(found)])
        measured = {n: seconds / expected[min(n, max_draft)] for n, seconds in rising.items()}
        unit = [known[NOTHING][0] / plain] if NOTHING in known else []
        ratios = sorted([*measured.values(), *unit]) or [1.0]
        scale = ratios[len(ratios) // 2]
        places = sorted(rising)
        curve = [value * (_line(places, measured, n) if places else scale) for n, value in enumerate(expected)]
        for n in range(1, max_draft + 1):
            curve[n] = max(curve[n], curve[n - 1])
        return [value / (plain * (unit or [scale])[0]) for value in curve]

    def _nearest(self, rows: int, columns: int) -> dict[Work, tuple[float, int]]:
        """Typical seconds and their number of samples, at the nearest length with samples."""
        bucket = self.bucket(columns)
        for _, length in sorted((abs(length - bucket), length) for of, length in self.samples if of == rows):
            noted = self.samples[rows, length].items()
            if known := {work: (_typical(seconds), len(seconds)) for work, seconds in noted if len(seconds) >= ENOUGH}:
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


class Costs:
    """
    The costs by which one call chooses sizes, and what it measures for later ones.

    Args:
        table (`CostTable`): The cost of rounds on this machine; extended by `close`.
        rows (`int`): Rows of the call.
        columns (`int`): Tokens of a row before the first round.
        device (`torch.device`): The target's device.
        streamer (`TimedStreamer`, *optional*): The call's streamer.
    """

    def __init__(
        self, table: CostTable, rows: int, columns: int, device: torch.device, streamer: TimedStreamer | None = None
    ):
        self.table, self.known, self.rows, self.columns = table, table.copy(), rows, columns
        self.device, self.streamer = device, streamer
        self.rounds_began: float | None = None
        self.begin()
        self.timed: dict[Work, list[tuple[int, int, Work, float]]] = defaultdict(list)

    def begin(self) -> None:
        """The prompt is read from now on."""
        self.began = self.ended = self.now()

    def now(self) -> float:
        """Seconds, without those spent in the streamer."""
        return clock(self.device) - (self.streamer.seconds if self.streamer is not None else 0.0)

    def curve(self, written: int, max_draft: int, drafted: bool = True) -> list[float]:
        """See [`CostTable.curve`], after `written` tokens."""
        return self.known.curve(self.rows, self.columns + written, max_draft, drafted)

    def note(self, written: int, work: Work, began: float) -> None:
        """Record a round that ends now. The first one of a call is slower than the others."""
        ended = self.now()
        if self.rounds_began is None:
            self.rounds_began = began
        else:
            self.timed[work].append((self.rows, self.columns + written, work, ended - began))
        self.ended = ended

    def speedup(self, of_rounds: float) -> float:
        """Speedup of the call, if its rounds, unlike its prompt, are `of_rounds` times as fast as the target's."""
        reading, rounds = self.rounds_began - self.began, self.ended - self.rounds_began
        return (reading + of_rounds * rounds) / (reading + rounds) if reading + rounds > 0 else of_rounds

    def is_new(self, written: int, work: Work) -> bool:
        """Whether a size has not been tried often enough to know its cost."""
        return self.known.count(self.rows, self.columns + written, work) + len(self.timed[work]) < ENOUGH

    def close(self) -> None:
        """Serve later calls."""
        self.table.note([one for rounds in self.timed.values() for one in rounds])


def table_of(target, draft) -> CostTable:
    """The cost table of a pair here: for its device, dtype, kinds of layers (packed, quantised), and threads."""
    kinds = frozenset(type(module) for module in target.modules())
    threads = torch.get_num_threads() if target.device.type == "cpu" else None
    how = kinds, adapters_of(draft), target.device, target.dtype, threads, draft.decoding_config.compile
    tables = _tables.setdefault(target, weakref.WeakKeyDictionary()).setdefault(draft, {})
    if how not in tables:
        weights, of_target = (sum(p.numel() for p in model.parameters()) for model in (draft, target))
        head = 0 if draft.config.has_own_lm_head else target.get_output_embeddings().weight.numel()
        drafting, block_size = (weights + head) / max(of_target, 1), draft.config.block_size
        tables[how] = CostTable(drafting, block_size, target.device, target.dtype)
    return tables[how]
