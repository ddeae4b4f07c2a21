"""
Policies for the draft length, by replay of recorded rounds: no model runs, and no clock.

    python examples/benchmarks/recorded_rounds.py answers ANSWERS.pt
    python examples/benchmarks/policy.py ANSWERS.pt [--only "adaptive length"]

Replayed are 48 calls per cell, which learn from each other: one, two, four or eight answers of up to 64 tokens of one
kind of text, or of all kinds in turn (*mixed*). What would be drafted was recorded at each token, so each policy
drafts and verifies what it would have. Rounds last as long as they do on a device:

- *bf16 units*, *AVX2*: SmolLM2-135M with its drafter, timed by `recorded_rounds.py latencies`;
- *simulated H100*: Qwen3-8B and its drafter, rounds in CUDA graphs, see `simulated_gpu.py`.

A cell is the time over that of the planner of version 0.2.0 (commit 3b4478e), in the same replay, from
`results/policy/before.json`: the median of its calls; below 1.00, the policy is faster. *Worst* is the slowest cell.
*Random drafter*: the time over that of the target alone, with a drafter of random weights. Prompt lookup costs nothing
in a replay, but more with each row in a call.
"""

import argparse
import bisect
import json
import multiprocessing
import platform
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import transformers
from recorded_rounds import ROWS, Answer
from simulated_gpu import GPUS
from simulated_gpu import Costs as GPUCosts
from transformers.utils import logging

from dflash_hf.decoding import adaptive, calibration, latency, prompt_lookup
from dflash_hf.decoding.acceptance import Acceptance
from dflash_hf.decoding.adaptive import AdaptiveLength, DraftStatistics
from dflash_hf.decoding.calibration import AcceptanceCalibration
from dflash_hf.decoding.latency import DraftSize, LatencyModel
from dflash_hf.decoding.state import GenerationState
from dflash_hf.decoding.trees import Tree


RESULTS = Path(__file__).parent / "results"
BLOCK = 8  # tokens of the bundled drafter's block
VOCABULARY = 49_152
DRAFTER_SHARE = 0.3  # of the weights: the bundled drafter's, its head included, over the target's
CALLS = 48


# ------------------------------------------------------------------------------------------------------------- devices


def interpolate(values: dict[int, float], x: int) -> float:
    """Linear interpolation between the keys of `values`, which are sorted; constant outside of them."""
    keys = list(values)
    x = min(max(x, keys[0]), keys[-1])
    right = bisect.bisect_left(keys, x)
    if keys[right] == x:
        return values[x]
    before = keys[right - 1]
    after = keys[right]
    return values[before] + (values[after] - values[before]) * (x - before) / (after - before)


class CPU:
    """Seconds of rounds, interpolated between those that were timed."""

    type = "cpu"

    def __init__(self, name: str, processor: str):
        self.processor = processor
        self.seconds: dict[tuple[int, bool], dict[int, float]] = {}
        for rows, sizes in json.loads((RESULTS / "policy" / f"{name}.json").read_text(encoding="utf-8")).items():
            for drafted in (False, True):
                timed = {size: seconds for size, was_drafted, seconds in sizes if was_drafted == drafted}
                self.seconds[int(rows), drafted] = timed

    def round(self, rows: int, size: int, drafted: bool) -> float:
        timed = self.seconds[rows, drafted]
        return interpolate(timed, size)


class GPU:
    """Seconds of rounds on a simulated GPU."""

    type = "cuda"
    processor = "accelerator"
    KERNELS = {"nothing": 1802, "block": 2105, "tree": 2376}  # `results/simulated_gpu.md`
    BLOCK = 16

    def __init__(self, name: str, launch: float):
        self.costs = GPUCosts(*GPUS[name], self.KERNELS, launch)

    def round(self, rows: int, size: int, drafted: bool) -> float:
        if drafted:
            return self.costs.round(rows, size, "tree")
        if size == 0:
            return self.costs.round(rows, -1)
        return self.costs.round(rows, size, "nothing") - self.costs.forward(self.costs.drafter, rows * self.BLOCK, 0)


DEVICES: dict[str, Callable] = {
    "bf16 units": lambda: CPU("bf16", "cpu with bf16 units"),
    "AVX2": lambda: CPU("avx2", "cpu"),
    "simulated H100": lambda: GPU("H100", 1e-6),
}


# -------------------------------------------------------------------------------------------------------------- replay


class Replay(GenerationState):
    """The rows of a text, which are written as they were recorded."""

    def __init__(self, rows: list[Answer]):
        longest = max(len(row.prompt) for row in rows)
        self.limits = [len(row.tokens) for row in rows]
        most = max(self.limits)
        self.prompt = torch.tensor([[0] * (longest - len(row.prompt)) + row.prompt for row in rows])
        selector = SimpleNamespace(streamer=None, requested_outputs=(), input_length=longest, max_new_tokens=most)
        super().__init__(self.prompt, selector)
        self.answers = rows
        written = torch.tensor([row.tokens + [0] * (most - len(row.tokens)) for row in rows])
        self.buffer = torch.cat([self.prompt, written], dim=1)
        self._advance([1] * len(rows))

    def _advance(self, counts: list[int]) -> None:
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.unfinished = [length < limit for length, limit in zip(self.lengths, self.limits, strict=True)]
        last = [row.tokens[length - 1] for row, length in zip(self.answers, self.lengths, strict=True)]
        self.anchors = torch.tensor(last)

    def drafted(self, nodes: int) -> Tree:
        """The recorded tree after the last token of each row."""
        trees = []
        for row, length in zip(self.answers, self.lengths, strict=True):
            trees.append(row.trees[min(length, len(row.trees)) - 1])
        tensors = zip(*(tree[: len(Tree._fields) - 1] for tree in trees), strict=True)  # all fields but `slots`
        return Tree(*map(torch.cat, tensors)).first(nodes + 1)

    def accept(self, draft, logits=None) -> Acceptance:
        """Follow the recorded answers as far as the draft does."""
        paths = []
        for row, (length, unfinished) in enumerate(zip(self.lengths, self.unfinished, strict=True)):
            children = draft.child_by_token(row)
            path: list[int] = []
            place = 0 if unfinished else None
            while place is not None and length + len(path) < self.limits[row]:
                path.append(place)
                place = children.get((place, self.answers[row].tokens[length + len(path) - 1]))
            paths.append(path)
        counts = [len(path) for path in paths]
        self.committed = []
        for row, length, count in zip(self.answers, self.lengths, counts, strict=True):
            self.committed.append(row.tokens[length : length + count])
        self._advance(counts)
        return Acceptance.from_paths(paths)


class Trial:
    """
    A policy, with other parts where a trial names them.

    Args:
        policy (`type`), latency_model (`type`), statistics (`type`), calibration (`type`): The parts.
    """

    def __init__(
        self,
        policy: type = AdaptiveLength,
        latency_model: type = LatencyModel,
        statistics: type = DraftStatistics,
        calibration: type = AcceptanceCalibration,
    ):
        self.policy = policy
        self.latency_model = latency_model
        self.statistics = statistics
        self.calibration = calibration

    def replay(self, rows: list[Answer], device, memory: dict, sampled: bool) -> float:
        """
        Seconds of a call.

        Args:
            rows (`list[Answer]`): What it writes.
            device (`CPU` or `GPU`): How long its rounds take.
            memory (`dict`): What earlier calls of the cell learned; extended.
            sampled (`bool`): Not greedily.
        """
        text = Replay(rows)
        if not memory:
            key = (len(rows), sampled, ())
            memory["latency model"] = self.latency_model(DRAFTER_SHARE, device.processor)
            memory["statistics"] = {key: self.statistics(calibration=self.calibration())}

        class Replayed(self.policy):
            def _shared_latency_model(self):
                return memory["latency model"]

            def _shared_statistics(self):
                return memory["statistics"]

            def room(self, state):
                return state.remaining_tokens

            def supports_trees(self, state):
                return True

            def draft_tree(self, state, nodes, top_k=None):
                return state.drafted(nodes)

        passed = 0.0
        with mock.patch.object(latency, "clock", lambda device: passed):
            policy = Replayed(fake_call(text, device, sampled), SimpleNamespace(block_tokens=BLOCK))
            while not text.done:
                draft = policy.get_candidates(text)
                passed += device.round(len(rows), draft.tokens.shape[1] - 1, policy.round.size.by_drafter)
                policy.update_candidate_strategy(text, draft, text.accept(draft))
            policy.finish()
        return passed


def fake_call(text: Replay, device, sampled: bool) -> SimpleNamespace:
    """As much of a call as policies read."""
    text_config = SimpleNamespace(vocab_size=VOCABULARY)
    target = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda decoder: text_config), device=torch.device(device.type)
    )
    return SimpleNamespace(
        target=target,
        draft=torch.nn.Module(),
        prompt=text.prompt,
        rows=len(text.prompt),
        prompt_length=text.prompt.shape[1],
        selector=text.selector,
        config=SimpleNamespace(do_sample=sampled),
    )


def batches(answers: list[Answer], rows: int) -> list[list[Answer]]:
    """`CALLS` batches of answers, each answer as often as any other."""
    draws = random.Random(rows)
    order = list(range(len(answers)))
    drawn: list[list[int]] = []
    while len(drawn) < CALLS:
        draws.shuffle(order)
        drawn += [order[first : first + rows] for first in range(0, len(order) - rows + 1, rows)]
    return [[answers[number] for number in batch] for batch in drawn[:CALLS]]


# Device, kind of text, rows -> time of each call over the target alone.
Cells = dict[tuple[str, str, int], list[float]]


def cells(trial: Trial, texts: dict[str, list[Answer]]) -> Cells:
    """All calls; those of a cell in turn, as in one process."""
    times: Cells = {}
    for name, make_device in DEVICES.items():
        device = make_device()
        for text, answers in texts.items():
            for rows in ROWS:
                memory: dict = {}
                times[name, text, rows] = []
                for batch in batches(answers, rows):
                    seconds = trial.replay(batch, device, memory, text.endswith("T = 1"))
                    longest = max(len(answer.tokens) for answer in batch)
                    alone = (longest - 1) * device.round(rows, 0, False)
                    times[name, text, rows].append(seconds / alone)
    return times


def cells_before() -> Cells:
    """Those of the planner of version 0.2.0."""
    lines = json.loads((RESULTS / "policy" / "before.json").read_text(encoding="utf-8"))
    return {(device, text, rows): times for device, text, rows, times in lines}


# -------------------------------------------------------------------------------------------------------------- trials


class PerRank(AdaptiveLength):
    """Expected tokens are averages of what was accepted at each rank of the tree, whatever the drafter says."""

    MEMORY = 40

    def choose_length(self, expected, latencies, active):
        ranks = self.statistics.__dict__.setdefault("ranks", [0.5 * 0.75**rank for rank in range(64)])
        totals = [0.0]
        for rank in range(len(expected) - 1):
            totals.append(totals[-1] + active * ranks[rank])
        return super().choose_length(totals, latencies, active)

    def update_candidate_strategy(self, state, candidates, acceptance):
        if self.round.tree is not None:
            ranks = self.statistics.ranks
            for path in acceptance.paths:
                for node in range(1, self.round.size.num_drafted + 1) if path else ():
                    ranks[node - 1] += ((node in path) - ranks[node - 1]) / self.MEMORY
        super().update_candidate_strategy(state, candidates, acceptance)


class PerCall(AdaptiveLength):
    """One length per call, for the average draft so far."""

    ROUNDS = 10**9  # until it is chosen again
    chosen_at = -(10**9)
    length = 0

    def choose_length(self, expected, latencies, active):
        per_row = [tokens / active for tokens in expected]
        per_row += [per_row[-1]] * (1 + self.max_nodes - len(per_row))
        average = self.statistics.__dict__.setdefault("average", per_row)
        average = [0.9 * old + 0.1 * new for old, new in zip(average, per_row, strict=True)]
        self.statistics.average = average
        if len(self.rounds) - self.chosen_at >= self.ROUNDS:
            self.chosen_at = len(self.rounds)
            self.length = super().choose_length(average, latencies, 1)
        return min(self.length, len(expected) - 1)


class WorthItsTime(AdaptiveLength):
    """One more token as long as it adds more than its time is worth at the speed of recent rounds (Dinkelbach)."""

    def choose_length(self, expected, latencies, active):
        speed = active * self.statistics.speed
        gains = [tokens - speed * latency for tokens, latency in zip(expected, latencies)]
        return gains.index(max(gains))


class PowersOfTwo(AdaptiveLength):
    """Lengths that are powers of two with the anchor, so that each is soon measured, and the longest."""

    def choose_length(self, expected, latencies, active):
        longest = len(expected) - 1
        lengths = [length for length in range(longest) if (length + 1).bit_count() == 1] + [longest]
        return max(lengths, key=lambda length: (active + expected[length]) / latencies[length])


class Affine(LatencyModel):
    """A round without a draft, and for all others one line, with an offset for the drafter, by least squares."""

    def latencies(self, rows, context, max_draft, drafted):
        measured = self._measured(rows, context)
        unit = self._seconds_without_draft(rows, measured)
        points = [(size, seconds / unit, 8.0) for size, (seconds, _) in measured.items()]
        for tokens in (0, 1, max_draft):
            for by_drafter in (False, True):
                size = DraftSize(tokens, by_drafter)
                points.append((size, self._assumed(rows, size), 0.5))
        rows_of_features = [[1, size.num_drafted > 0, size.num_drafted, size.by_drafter] for size, _, _ in points]
        features = torch.tensor(rows_of_features).double()
        weights = torch.tensor([[weight] for _, _, weight in points]).double().sqrt()
        values = torch.tensor([[value] for _, value, _ in points]).double()
        plain, verifying, per_token, drafting = (
            torch.linalg.lstsq(weights * features, weights * values).solution[:, 0].clamp(min=0).tolist()
        )
        line = [plain + drafted * drafting]
        for tokens in range(1, max_draft + 1):
            line.append(plain + verifying + tokens * per_token + drafted * drafting)
        return [cost / plain for cost in line]


class OneRatio(AcceptanceCalibration):
    """One ratio of accepted to expected tokens."""

    BINS = 1

    def __init__(self):
        super().__init__()
        self.said = 0.0

    def record(self, probability, accepted):
        super().record(probability, accepted)
        self.said += probability

    def __call__(self, probability):
        return min(probability * (self.accepted[0] + 10) / (self.said + 10), 1.0)


class Doubling(DraftStatistics):
    """Each back-off is twice as long as the one before, until drafting pays."""

    def _back_off(self, latency):
        failures = self.__dict__.setdefault("failures", 0)
        speed = self.tokens / self.relative_time
        if speed >= 1:
            self.failures = 0
        elif self.relative_time > 1.5 * latency:
            self.tokens = latency * speed
            self.relative_time = latency
            self.rounds_to_pause = 4 * 2**failures
            self.failures = min(failures + 1, 6)


TRIALS = {
    "adaptive length": Trial(),
    "(a) averages of what was accepted, by rank": Trial(policy=PerRank),
    "(b) one length per call": Trial(policy=PerCall),
    "(c) threshold at the speed of recent rounds": Trial(policy=WorthItsTime),
    "(c) lengths that are powers of two": Trial(policy=PowersOfTwo),
    "(c) affine latencies": Trial(latency_model=Affine),
    "(c) one calibration ratio": Trial(calibration=OneRatio),
    "(c) back-off by doubling": Trial(statistics=Doubling),
}
# Constant, its value, others.
CONSTANTS = [
    (calibration.AcceptanceCalibration, "BINS", (5,)),
    (calibration.AcceptanceCalibration, "PRIOR", (16.0,)),
    (calibration.AcceptanceCalibration, "HALVE_AT", (100, 10**9)),
    (adaptive.DraftStatistics, "ASSUMED_TOKENS", (1.2, 2.5)),
    (adaptive.DraftStatistics, "ASSUMED_ROUNDS", (8,)),
    (adaptive.DraftStatistics, "DECAY", (0.8,)),
    (adaptive.DraftStatistics, "MAX_LOSS", (0.005, 0.05)),
    (adaptive.AdaptiveLength, "LOOKUP_ROWS", (1, 8)),
    (adaptive.AdaptiveLength, "CPU_LIMITS", (adaptive.CandidateLimits(8, 32, 2),)),
    (adaptive.AdaptiveLength, "ACCELERATOR_LIMITS", (adaptive.CandidateLimits(16, 512, 16),)),
    (latency.LatencyModel, "MIN_SAMPLES", (1, 8)),
    (latency.LatencyModel, "MAX_SAMPLES", (8,)),
    (latency.LatencyModel, "OCTAVE_WEIGHT", (0.05, 0.5)),
    (
        latency.LatencyModel,
        "ASSUMED",
        (
            {"cpu": (0.05, 0.02), "cpu with bf16 units": (0.05, 0.02), "accelerator": (0.0, 0.0)},
            {"cpu": (0.2, 0.1), "cpu with bf16 units": (0.1, 0.05), "accelerator": (0.1, 0.05)},
        ),
    ),
    (prompt_lookup.PromptLookup, "NGRAM", (3,)),
    (prompt_lookup.PromptLookup, "MAX_TOKENS", (0, 8)),
]
OF_CONSTANTS = ("chat, T = 0", "code, T = 1", "rewriting, T = 0", "random drafter")


recorded: dict[str, list[Answer]] = {}  # by kind of text; processes are forked with it


def run(name: str, constant: tuple | None = None) -> Cells:
    """All cells of a trial; of a few kinds of text, if a constant has another value: its holder, name, value."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    if constant is None:
        return cells(TRIALS[name], recorded)
    with mock.patch.object(*constant):
        return cells(Trial(), {text: recorded[text] for text in OF_CONSTANTS})


def jobs() -> Iterator[tuple]:
    """Arguments of [`run`]."""
    for name in TRIALS:
        yield name, None
    for holder, field, values in CONSTANTS:
        for value in values:
            yield f"{field} = {getattr(holder, field)} | {value}", (holder, field, value)


# -------------------------------------------------------------------------------------------------------------- report


def ratios(times: Cells, base: Cells) -> dict[tuple[str, str, int], float]:
    """Of each cell, the median of its calls."""
    return {cell: statistics.median(a / b for a, b in zip(calls, base[cell])) for cell, calls in times.items()}


def summary(name: str, times: Cells, base: Cells) -> str:
    """A line: geometric means of the cells of each device and number of rows, the worst cell, the random drafter."""
    of_cells = ratios(times, base)
    parts = []
    for device in DEVICES:
        for rows in ROWS:
            values = [value for (of, _, number), value in of_cells.items() if (of, number) == (device, rows)]
            parts.append(f"{statistics.geometric_mean(values):.3f}")
    slow = sum(value > 1.03 for value in of_cells.values())
    fast = sum(value < 0.97 for value in of_cells.values())
    useless = max(statistics.median(calls) for (_, text, _), calls in times.items() if text == "random drafter")
    parts += [f"{max(of_cells.values()):.3f}", f"{slow}, {fast}", f"{useless:.3f}"]
    return f"| {name} | {' | '.join(parts)} |"


def report(results: dict[str, Cells]) -> list[str]:
    base = cells_before()
    heads = [f"{device}, {rows}" for device in DEVICES for rows in ROWS]
    lines = [
        "# Policies for the draft length",
        "",
        __doc__.strip(),
        "",
        f"{date.today():%d %B %Y}, {processor()}, torch {torch.__version__}, transformers {transformers.__version__}.",
        "",
        "## Policies",
        "",
        "For each device and number of rows the geometric mean of all kinds of text; the worst cell; how many of "
        f"{len(base)} cells are above 1.03 and below 0.97; and the random drafter.",
        "",
        f"| | {' | '.join(heads)} | worst | > 1.03, < 0.97 | random drafter |",
        "|---" * (len(heads) + 4) + "|",
        summary("before", base, base),
    ]
    lines += [summary(name, results[name], base) for name in TRIALS]
    lines += ["", "## Adaptive length, cell by cell", ""]
    of_cells = ratios(results["adaptive length"], base)
    lines += [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for text in dict.fromkeys(text for _, text, _ in base):
        values = [f"{of_cells[device, text, rows]:.3f}" for device in DEVICES for rows in ROWS]
        lines.append(f"| {text} | {' | '.join(values)} |")
    usual = {cell: calls for cell, calls in results["adaptive length"].items() if cell[1] in OF_CONSTANTS}
    lines += [
        "",
        "## Constants",
        "",
        "The time with another value over that with the policy's, geometric mean (worst cell) of "
        f"{', '.join(OF_CONSTANTS)}: above 1.00, the policy's value is better.",
        "",
        f"| constant | instead | {' | '.join(DEVICES)} | random drafter |",
        "|---" * (len(DEVICES) + 3) + "|",
    ]
    for name, times in results.items():
        if "|" in name:
            of_cells = ratios(times, usual)
            parts = []
            for device in DEVICES:
                values = [value for (of, _, _), value in of_cells.items() if of == device]
                parts.append(f"{statistics.geometric_mean(values):.3f} ({max(values):.2f})")
            useless = max(statistics.median(calls) for (_, text, _), calls in times.items() if "random" in text)
            lines.append(f"| {name} | {' | '.join(parts)} | {useless:.3f} |")
    return lines


def processor() -> str:
    """The name of this processor."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--only", help="trials whose name contains this; writes nothing")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    sys.modules["__main__"].Answer = Answer  # by which the file was written
    recorded.update(torch.load(arguments.answers, weights_only=False))
    for temperature in ("T = 0", "T = 1"):
        of_kinds = [answers for text, answers in recorded.items() if text.endswith(temperature)]
        recorded[f"mixed, {temperature}"] = [answers[number] for number in range(4) for answers in of_kinds][:16]
    wanted = [job for job in jobs() if (arguments.only or "") in job[0]]
    results: dict[str, Cells] = {}
    with multiprocessing.get_context("fork").Pool(arguments.processes) as pool:
        running = [(job[0], pool.apply_async(run, job)) for job in wanted]
        for name, job in running:
            results[name] = job.get()
            print(summary(name, results[name], cells_before()), flush=True)
    if not arguments.only:
        (RESULTS / "policy.md").write_text("\n".join(report(results)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
