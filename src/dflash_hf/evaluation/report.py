"""The result of an evaluation: the figures of each method, derived figures, and the JSON that holds them."""

import bisect
import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

from dflash_hf._io.files import atomic, json_text, read_text
from dflash_hf.evaluation.distribution import FOLLOWS, DistributionTest
from dflash_hf.evaluation.divergence import EQUAL, WRONG, Divergence, Rounding, worst_verdict
from dflash_hf.evaluation.methods import DRAFTED, PLAIN_CALL, TARGET_ALONE, TARGET_PACKED, WHOLE_BLOCKS


DEPTHS = (256, 1024, 4096, 16384, 65536)  # tokens of text at which acceptance is told apart


@dataclass
class MethodReport:
    """
    The figures of one decoding method over all prompts.

    Args:
        tokens_per_second (`float`): Median over the runs; the prompt counts in the time but not in the tokens.
        speedup (`float`): Ratio to the target alone in the same run; median over the runs.
        speedup_over_packed (`float`, *optional*): Ratio to the packed target alone, if that was measured too.
        runs (`list[float]`): Tokens per second of each run.
        tokens (`int`): New tokens of one run.
        target_forwards (`int`): Forward passes of the target in one run, prompts included.
        tau (`float`, *optional*): Mean tokens committed per verification, if a DFlash drafter was used.
        warmup_seconds (`float`): Time of the first calls: compilation, probes, allocation.
        compiled (`bool`): Whether the drafter's rounds are compiled.
        equal (`int`): Number of prompts whose output equals the target's own, token for token, in every run.
        draft_sizes (`list[int]`, *optional*): Tokens verified by each round of the last run, if sizes were
            chosen round by round.
        tau_of_responses (`float`, *optional*): The mean over responses of each response's mean tokens per
            verification: the definition of the paper and of the reference implementation.
        prefill_seconds (`float`, *optional*): Time from the call to the first new token, the drafter's part
            included: mean over the responses, median over the runs. `None` for functions, whose tokens are not seen.
        decode_seconds_per_token (`float`, *optional*): Time after the first new token, per new token: mean over the
            responses of more than one token, median over the runs.
        decode_speedup (`float`, *optional*): Ratio of `decode_seconds_per_token` of the target alone to this method's,
            in the same run; median over the runs. The paper's speedup.
        decode_speedup_over_packed (`float`, *optional*): The same over the packed target alone.
    """

    tokens_per_second: float
    speedup: float
    runs: list[float]
    tokens: int
    target_forwards: int
    equal: int
    warmup_seconds: float = 0.0
    compiled: bool = False
    speedup_over_packed: float | None = None
    tau: float | None = None
    draft_sizes: list[int] | None = None
    tau_of_responses: float | None = None
    prefill_seconds: float | None = None
    decode_seconds_per_token: float | None = None
    decode_speedup: float | None = None
    decode_speedup_over_packed: float | None = None

    @property
    def tokens_per_forward(self) -> float:
        """New tokens per forward of the target, the prompt's forward included."""
        return self.tokens / self.target_forwards

    @property
    def gain(self) -> float:
        """The speedup over the fairest baseline that was measured, see [`EvalReport.baseline`]."""
        return self.speedup_over_packed or self.speedup

    @property
    def decode_gain(self) -> float | None:
        """The speedup of decoding after the prefill, over the same baseline."""
        return self.decode_speedup_over_packed or self.decode_speedup


@dataclass
class DepthReport:
    """
    Acceptance where the text, prompt included, has a certain length.

    Args:
        begin (`int`), end (`int`, *optional*): Tokens before the round: from `begin`, below `end`; `None`: any more.
        verifications (`int`): Number of rounds.
        tau (`float`): Mean tokens committed by them.
    """

    begin: int
    end: int | None
    verifications: int
    tau: float


def depth_index(tokens: int) -> int:
    """Which range of lengths a text of so many tokens is in, counted from 0; [`DEPTHS`] separates the ranges."""
    return bisect.bisect_right(DEPTHS, tokens)


def depth_reports(rounds: Iterable[tuple[int, float]]) -> list[DepthReport]:
    """
    Acceptance at each of [`DEPTHS`] that occurs.

    Args:
        rounds (`Iterable[tuple[int, float]]`): Of each round the tokens of the text before it, and those it commits.
    """
    lengths_of_depths: list[list[float]] = [[] for _ in range(len(DEPTHS) + 1)]
    for tokens, length in rounds:
        lengths_of_depths[depth_index(tokens)].append(length)
    depths = []
    for begin, end, lengths in zip((0, *DEPTHS), (*DEPTHS, None), lengths_of_depths, strict=True):
        if lengths:
            depths.append(DepthReport(begin, end, len(lengths), statistics.fmean(lengths)))
    return depths


@dataclass
class EvalReport:
    """
    The result of [`~dflash_hf.evaluation.measure.evaluate`]. It can be written as JSON and read back.

    Args:
        methods (`dict[str, MethodReport]`): Figures by name, see [`~dflash_hf.evaluation.methods.METHODS`]: of the
            target alone, of whole blocks, and of any other method.
        acceptance_lengths (`list[list[int]]`): For each prompt, the tokens committed by each verification of whole
            blocks, from which `tau` and `acceptance_by_position` follow. The bonus token is included, the prompt's own
            forward is not.
        responses (`list[list[int]]`): The target's own answers.
        block_size (`int`): Tokens of a drafted block, the anchor included.
        setting (`dict`): The target's repository, a digest of the drafter's weights, hardware, threads, versions,
            dtypes, limits; `temperature` (0: greedy) and `block_size`.
        divergences (`list[Divergence]`): Where outputs diverge from the target's own, and whether rounding explains
            it.
        rounding (`Rounding`, *optional*): The target compared with itself, if anything diverged.
        prompt_lengths (`list[int]`): Tokens of each prompt; empty in reports of earlier versions.
        distribution_tests (`list[DistributionTest]`): Of sampled outputs that are not the target's own: whether they
            follow its distribution.
    """

    methods: dict[str, MethodReport]
    acceptance_lengths: list[list[int]]
    responses: list[list[int]]
    block_size: int
    setting: dict = field(default_factory=dict)
    divergences: list[Divergence] = field(default_factory=list)
    rounding: Rounding | None = None
    prompt_lengths: list[int] = field(default_factory=list)
    distribution_tests: list[DistributionTest] = field(default_factory=list)

    @property
    def num_prompts(self) -> int:
        return len(self.responses)

    @property
    def fastest(self) -> str:
        """The method with the drafter that gains most."""
        return max(self.drafted, key=lambda name: self.methods[name].gain)

    @property
    def default_method(self) -> str:
        """The method of a user who sets nothing: the plain call; whole blocks if it was not measured."""
        return PLAIN_CALL if PLAIN_CALL in self.methods else WHOLE_BLOCKS

    @property
    def baseline(self) -> str:
        """The method over which each `gain` is: the packed target alone if it was measured, else the target alone."""
        return TARGET_PACKED if TARGET_PACKED in self.methods else TARGET_ALONE

    @property
    def verifications(self) -> list[int]:
        """Tokens committed by each verification of whole blocks, of all prompts."""
        return list(chain.from_iterable(self.acceptance_lengths))

    @property
    def tau(self) -> float:
        """Mean tokens committed per verification of whole blocks, bonus included, over all verifications."""
        return statistics.fmean(self.verifications or [0.0])

    @property
    def tau_per_response(self) -> float:
        """The mean over responses of each response's mean: `tau_of_responses` of whole blocks."""
        return statistics.fmean([statistics.fmean(lengths) for lengths in self.acceptance_lengths if lengths] or [0.0])

    @property
    def acceptance_by_position(self) -> list[float]:
        """
        Entry `k - 1`: the share of verifications that commit more than `k` tokens, `k = 1..B-1`; `tau` is one plus
        their sum. The end of an answer cuts its last block short, which counts as not accepted.
        """
        lengths = self.verifications
        return [sum(n > k for n in lengths) / max(len(lengths), 1) for k in range(1, self.block_size)]

    @property
    def tau_by_depth(self) -> list[DepthReport]:
        """Tau of whole blocks by the length of the text before the round, as far as there are such rounds."""
        rounds = []
        # Without `prompt_lengths`, in a report of an earlier version, no depth is known.
        for prompt_length, lengths in zip(self.prompt_lengths, self.acceptance_lengths):
            tokens = prompt_length + 1  # the prompt's forward writes the first
            for length in lengths:
                rounds.append((tokens, length))
                tokens += length
        return depth_reports(rounds)

    @property
    def decode_gain(self) -> float | None:
        """The speedup of whole blocks as the paper measures it, over `baseline`; `None` if it was not measured."""
        blocks = self.methods.get(WHOLE_BLOCKS)
        return None if blocks is None else blocks.decode_gain

    @property
    def draft_share_of_prefill(self) -> float | None:
        """
        The drafter's share of the time until the first new token in whole blocks: what it exceeds the target's own by,
        in units of itself. As the difference of two measured times it may be slightly below 0. `None` if they are
        unknown.
        """
        times = []
        for name in (WHOLE_BLOCKS, self.baseline):
            method = self.methods.get(name)
            if method is None or method.prefill_seconds is None:
                return None
            times.append(method.prefill_seconds)
        return 1 - times[1] / times[0]

    @property
    def drafted(self) -> dict[str, MethodReport]:
        """The methods that decode with the drafter, by name."""
        return {name: method for name, method in self.methods.items() if name in DRAFTED}

    @property
    def lossless(self) -> bool:
        """Whether every output of every method with the drafter equals the target's own."""
        return all(method.equal == self.num_prompts for method in self.drafted.values())

    def verdict(self) -> str:
        """
        `"equal"`, `"differs at a near-tie"`, of samples `"follows the target's distribution"`, or `"WRONG"`, the only
        alarm: the worst output of all methods with the drafter.
        """
        if not self.setting.get("temperature"):
            return worst_verdict(self.divergences, self.drafted)
        verdicts = {test.verdict for test in self.distribution_tests if test.method in self.drafted}
        if WRONG in verdicts:
            return WRONG
        return FOLLOWS if verdicts else EQUAL

    @property
    def is_wrong(self) -> bool:
        """Whether any output with the drafter has a token that rounding does not explain."""
        return self.verdict() == WRONG

    def to_json(self) -> str:
        """The report as JSON; `summary` has the derived figures, for people who read the file."""
        summary = {
            "tau": self.tau,
            "tau_per_response": self.tau_per_response,
            "tau_by_depth": [asdict(depth) for depth in self.tau_by_depth],
            "acceptance_by_position": self.acceptance_by_position,
            "speedup": self.methods[self.default_method].gain,
            "speedup_of": self.default_method,
            "speedup_over": self.baseline,
            "decode_speedup": self.decode_gain,
            "draft_share_of_prefill": self.draft_share_of_prefill,
            "lossless": self.lossless,
            "verdict": self.verdict(),
            "prompts": self.num_prompts,
        }
        return json_text({"summary": summary, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> "EvalReport":
        """The report that [`to_json`] wrote; fields of earlier versions are left out."""

        def read(kind, values: dict):
            return kind(**{name: value for name, value in values.items() if name in kind.__dataclass_fields__})

        report = read(cls, json.loads(text))
        report.methods = {name: read(MethodReport, method) for name, method in report.methods.items()}
        report.divergences = [read(Divergence, divergence) for divergence in report.divergences]
        report.distribution_tests = [read(DistributionTest, test) for test in report.distribution_tests]
        if report.rounding is not None:
            report.rounding = read(Rounding, {"ways": [], **report.rounding})
        return report

    @classmethod
    def load(cls, path: str | Path) -> "EvalReport":
        """
        The report in a file.

        Raises:
            `ValueError`: the file holds something else.
        """
        try:
            return cls.from_json(read_text(Path(path)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a report of `dflash eval` ({error!r}); remove or replace it.") from error

    def save(self, path: str | Path) -> Path:
        """Write the report to `path`; returns it."""
        path = Path(path)
        with atomic(path) as half:
            half.write_text(self.to_json() + "\n", encoding="utf-8")
        return path
