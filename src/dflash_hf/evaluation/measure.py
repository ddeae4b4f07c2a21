"""Decoding side by side: the target alone, with a drafter, with prompt lookup. Speed, acceptance, losslessness."""

import contextlib
import copy
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, combinations
from pathlib import Path

import torch
import transformers

from dflash_hf.modeling.target_dflash import decoder_layers


TARGET, DFLASH, COMPILED, PROMPT_LOOKUP = "target", "dflash", "dflash_compiled", "prompt_lookup"
TREE = "dflash_tree"
# Ways of decoding with a drafter, and what each changes in its `decoding_config`: "dflash", "dflash_packed", ...,
# "dflash_tree_compiled_packed".
_CHANGES = {"tree": {"tree_nodes": 15}, "compiled": {"compile": True}, "packed": {"pack_weights": True}}
OURS: dict[str, dict] = {
    "_".join((DFLASH, *names)): {key: value for name in names for key, value in _CHANGES[name].items()}
    for count in range(len(_CHANGES) + 1)
    for names in combinations(_CHANGES, count)
}
COMPILED_METHODS = {method for method, changes in OURS.items() if "compile" in changes}
METHODS = (TARGET, DFLASH, PROMPT_LOOKUP)


@dataclass
class MethodReport:
    """
    One way of decoding, over all prompts.

    Args:
        tokens_per_second (`float`): Median over the runs, prompt included in the time, not in the tokens.
        speedup (`float`): Median over the runs of the ratio to the target alone in the same run.
        runs (`list[float]`): Tokens per second of each run.
        tokens (`int`): New tokens of one run.
        target_forwards (`int`): Forwards of the target in one run, prompts included.
        warmup_seconds (`float`): What the first calls took beyond decoding: compilation, probes, allocation.
        equal (`int`): Prompts whose output is the target's own, token for token, in every run.
    """

    tokens_per_second: float
    speedup: float
    runs: list[float]
    tokens: int
    target_forwards: int
    equal: int
    warmup_seconds: float = 0.0

    @property
    def tokens_per_forward(self) -> float:
        """New tokens per forward of the target, the prompt's forward included."""
        return self.tokens / self.target_forwards


@dataclass
class EvalReport:
    """
    What [`evaluate`] measured. All of it can be written as JSON and read back.

    Args:
        methods (`dict[str, MethodReport]`): By name: `"target"`, `"dflash"`, and what else was asked for.
        acceptance_lengths (`list[list[int]]`): For each prompt the tokens committed by each verification, bonus
            included, the prompt's own forward excluded.
        responses (`list[list[int]]`): The target's own answers.
        block_size (`int`): Tokens of a drafted block, the anchor included.
        correct (`list[bool]`, *optional*): Whether each of the target's answers is right, where that can be checked.
        setting (`dict`): Hardware threads, versions, data types, limits.
    """

    methods: dict[str, MethodReport]
    acceptance_lengths: list[list[int]]
    responses: list[list[int]]
    block_size: int
    correct: list[bool] | None = None
    setting: dict = field(default_factory=dict)

    @property
    def num_prompts(self) -> int:
        return len(self.responses)

    @property
    def verifications(self) -> list[int]:
        """Tokens committed by each verification of all prompts."""
        return list(chain.from_iterable(self.acceptance_lengths))

    @property
    def tau(self) -> float:
        """Mean tokens committed per verification, bonus included: over all verifications."""
        return statistics.fmean(self.verifications or [0.0])

    @property
    def tau_per_response(self) -> float:
        """The mean over responses of each response's mean: the reference's figure."""
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
    def lossless(self) -> bool:
        """Whether every output with the drafter is the target's own."""
        return self.methods[DFLASH].equal == self.num_prompts

    def to_json(self) -> str:
        """The report as JSON, with the derived figures under `summary` for those who read the file."""
        summary = {
            "tau": self.tau,
            "tau_per_response": self.tau_per_response,
            "acceptance_by_position": self.acceptance_by_position,
            "speedup": self.methods[DFLASH].speedup,
            "lossless": self.lossless,
            "correct": None if self.correct is None else sum(self.correct),
            "prompts": self.num_prompts,
        }
        return json.dumps({"summary": summary, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "EvalReport":
        """The report that [`to_json`] wrote."""
        fields = json.loads(text)
        fields.pop("summary", None)
        methods = {name: MethodReport(**method) for name, method in fields.pop("methods").items()}
        return cls(methods=methods, **fields)

    def save(self, path: str | Path) -> Path:
        """Write the report to `path`; returns it."""
        path = Path(path)
        path.write_text(self.to_json() + "\n", encoding="utf-8")
        return path


def evaluate(
    target,
    draft,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 256,
    runs: int = 3,
    methods: Sequence[str] = METHODS,
    prompt_lookup_num_tokens: int = 10,
    check: Callable[[int, list[int]], bool] | None = None,
    progress: Callable[[Iterable], Iterable] = iter,
    others: dict[str, dict | Callable] | None = None,
) -> EvalReport:
    """
    Decode every prompt greedily, one at a time, by each method in turn, `runs` times.

    The methods alternate prompt by prompt and change their order from run to run, so that other load on the machine
    falls on all of them. Each is warmed up, a compiled one on every prompt. Threads are left as they are, and named in
    the report.

    Args:
        target, draft (`PreTrainedModel`): The pair.
        prompts (`Sequence[Sequence[int]]`): Prompt ids.
        max_new_tokens (`int`): Longest answer.
        runs (`int`): Timed repetitions; the medians are reported.
        methods (`Sequence[str]`): `"target"` and `"dflash"`, and any of `OURS` and `"prompt_lookup"` if wanted.
        prompt_lookup_num_tokens (`int`): Candidate tokens of prompt lookup.
        check: Called with a prompt's number and the target's answer ids: whether the answer is right.
        progress: Wraps the iteration over runs and prompts.
        others (`dict`, *optional*): Further ways of decoding: name, and arguments of `generate` or a function from
            prompt ids to answer ids.

    Returns:
        [`EvalReport`].

    Raises:
        `ValueError`: no prompts, no runs, or a method that does not exist or is needed for comparison and missing.
    """
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise ValueError(f"prompts holds {len(prompts)} prompts, one of them empty or none at all; pass token ids.")
    if runs < 1:
        raise ValueError(f"runs={runs} must be at least 1.")
    known = {*METHODS, *OURS}
    if unknown := set(methods) - known:
        raise ValueError(f"methods={list(methods)} names {sorted(unknown)}; choose from {sorted(known)}.")
    if missing := {TARGET, DFLASH} - set(methods):
        raise ValueError(f"methods={list(methods)} lacks {sorted(missing)}, which the others are compared with.")

    arguments = {
        TARGET: {},
        **{method: {"assistant_model": variant(draft, **changes)} for method, changes in OURS.items()},
        PROMPT_LOOKUP: {"prompt_lookup_num_tokens": prompt_lookup_num_tokens},
        **(others or {}),
    }
    methods = (*methods, *(others or {}))
    target.eval()
    draft.eval()

    def decode(method: str, index: int):
        if callable(arguments[method]):
            return None, arguments[method](prompts[index])
        input_ids = torch.tensor([list(prompts[index])], device=target.device)
        output = target.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            **arguments[method],
        )
        return output, output.sequences[0, input_ids.shape[1] :].tolist()

    # 1. Warm up: the first calls of a method compile, probe and allocate, and again for each size of a compiled one,
    # which comes last: others may leave hooks on the target, for which it would be compiled again.
    warmup = {}
    for method in sorted(methods, key=lambda name: name in COMPILED_METHODS):
        start = _now(target)
        for index in range(len(prompts) if method in COMPILED_METHODS else 1):
            decode(method, index)
        warmup[method] = _now(target) - start
    # 2. Alternate. `tokens_per_second[method]` gets one entry from each run.
    tokens_per_second = {method: [] for method in methods}
    answers: list[list[int]] = [[] for _ in prompts]
    lengths: list[list[int]] = [[] for _ in prompts]
    tokens, forwards = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0)
    unequal = {method: set() for method in methods}
    seconds: dict[str, float] = {}
    with out_of_sight():
        for run, index in progress([(run, index) for run in range(runs) for index in range(len(prompts))]):
            if index == 0:
                seconds = dict.fromkeys(methods, 0.0)
                tokens, forwards = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0)
            shift = (run + index) % len(methods)
            outputs = {}
            for method in (*methods[shift:], *methods[:shift]):
                # A hook would be compiled, too; without a drafter a compiled target makes one forward for each token.
                way = arguments[method]
                counts = method not in OURS and not callable(way) and "cache_implementation" not in way
                with _count_forwards(target) if counts else contextlib.nullcontext([0]) as count:
                    start = _now(target)
                    output, outputs[method] = decode(method, index)
                    seconds[method] += _now(target) - start
                tokens[method] += len(outputs[method])
                if method in OURS:
                    count[0] = 1 + len(output.acceptance_lengths[0])
                forwards[method] += count[0] or len(outputs[method])
                if method == DFLASH:
                    lengths[index] = list(output.acceptance_lengths[0])
            answers[index] = outputs[TARGET]
            for method in methods:
                if outputs[method] != outputs[TARGET]:
                    unequal[method].add(index)
            if index == len(prompts) - 1:
                for method in methods:
                    tokens_per_second[method].append(tokens[method] / seconds[method])
    # 3. Medians; ratios are taken inside a run, where the load was the same.
    reports = {}
    for method in methods:
        ratios = [own / base for own, base in zip(tokens_per_second[method], tokens_per_second[TARGET], strict=True)]
        reports[method] = MethodReport(
            tokens_per_second=statistics.median(tokens_per_second[method]),
            speedup=statistics.median(ratios),
            runs=tokens_per_second[method],
            tokens=tokens[method],
            target_forwards=forwards[method],
            equal=len(prompts) - len(unequal[method]),
            warmup_seconds=warmup[method],
        )
    return EvalReport(
        methods=reports,
        acceptance_lengths=lengths,
        responses=answers,
        block_size=draft.config.block_size,
        correct=None if check is None else [bool(check(i, answer)) for i, answer in enumerate(answers)],
        setting={
            "device": str(target.device),
            "hardware": hardware(target.device),
            "threads": torch.get_num_threads(),
            "target_dtype": str(target.dtype).removeprefix("torch."),
            "draft_dtype": str(draft.dtype).removeprefix("torch."),
            "max_new_tokens": max_new_tokens,
            "runs": runs,
            "prompt_lookup_num_tokens": prompt_lookup_num_tokens,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    )


def variant(draft, **changes):
    """The same drafter, not copied, with changes to its `decoding_config`."""
    twin = copy.copy(draft)
    twin.decoding_config = replace(draft.decoding_config, **changes)
    return twin


@contextlib.contextmanager
def out_of_sight():
    """Objects that are there now, such as what compilers leave, cost the garbage collector no time in this context."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _count_forwards(target):
    """A list whose one entry counts the target's forwards."""
    count = [0]

    def add_one(module, args):
        count[0] += 1

    handle = decoder_layers(target)[0].register_forward_pre_hook(add_one)
    try:
        yield count
    finally:
        handle.remove()


def hardware(device: torch.device) -> str:
    """The name of an accelerator, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _now(target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
