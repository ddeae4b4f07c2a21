"""Decoding side by side: the target alone, with a drafter or its own heads. Speed, acceptance, losslessness."""

import contextlib
import copy
import functools
import gc
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import transformers

from dflash_hf._io.progress import without_bars
from dflash_hf._io.repositories import origin
from dflash_hf.decoding.packing import packed_weights
from dflash_hf.evaluation.divergence import find_divergences
from dflash_hf.evaluation.methods import (
    DEFAULT_METHODS,
    DRAFTED,
    FIXED_SIZE,
    LOOKUP_TOKENS,
    MTP,
    PLAIN_CALL,
    TABLE,
    TARGET_ALONE,
    TARGET_PACKED,
    TREE_METHODS,
    TREE_NODES,
    WHOLE_BLOCKS,
    WITHOUT_DRAFTER,
)
from dflash_hf.evaluation.report import EvalReport, MethodReport
from dflash_hf.modeling.target_dflash import decoder_layers
from dflash_hf.targets.digests import digest_of_parameters
from dflash_hf.targets.generation import generate_one


def evaluate(
    target,
    draft,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 256,
    runs: int = 3,
    methods: Sequence[str] = DEFAULT_METHODS,
    progress: Callable[[Iterable], Iterable] = iter,
    other_methods: dict[str, dict | Callable] | None = None,
    tree_nodes: int = TREE_NODES,
) -> EvalReport:
    """
    Decode every prompt greedily, one at a time, by each method in turn, `runs` times.

    The methods alternate prompt by prompt and change their order from run to run, so that other load on the machine
    affects all of them. Each is warmed up first, compiled methods on every prompt. Packing weights is not timed. The
    number of threads is not changed; the report names it.

    Args:
        target, draft (`PreTrainedModel`): The pair.
        prompts (`Sequence[Sequence[int]]`): Prompt ids.
        max_new_tokens (`int`): Maximum length of an answer.
        runs (`int`): Timed repetitions; the medians are reported.
        methods (`Sequence[str]`): `"target"` and `"dflash"`, plus any of [`~dflash_hf.evaluation.methods.TABLE`]. With
            `"target_packed"`, a target with packed weights, drafters and `"mtp"` decode packed too.
        progress: Wraps the iteration over runs and prompts.
        other_methods (`dict`, *optional*): Further methods by name: arguments of `generate`, or a function from prompt
            ids to answer ids.
        tree_nodes (`int`): Tokens of a draft tree, for the methods that draft trees.

    Returns:
        [`EvalReport`].

    Raises:
        `ValueError`: there are no prompts or runs, a method is unknown, or one that others are compared with is
            missing.
    """
    _check_arguments(prompts, runs, methods)
    other_methods = other_methods or {}
    methods = (*methods, *other_methods)
    drafters = {**drafters_of_methods(draft, tree_nodes), PLAIN_CALL: draft}
    assisted = {name: {"assistant_model": drafter} for name, drafter in drafters.items()}
    arguments = {**WITHOUT_DRAFTER, **assisted, **other_methods}
    packed: dict[str, tuple] = {}  # the models that a method packs
    if TARGET_PACKED in methods:
        packed = {TARGET_PACKED: (target,), MTP: (target,), **dict.fromkeys(drafters, (target, draft))}
    decode = _Decoder(target, max_new_tokens, arguments, packed)
    compiled = {name for name, drafter in drafters.items() if drafter.decoding_config.compile}
    target.eval()
    draft.eval()
    # 1. Warm up: the first calls compile, probe and allocate; compiled methods do so for each size. They come last:
    # other methods may leave hooks on the target, and it would be compiled again.
    warmup = {}
    for method in sorted(methods, key=lambda name: name in compiled):
        warmup_prompts = prompts if method in compiled else prompts[:1]
        warmup[method] = sum(decode(method, prompt).seconds for prompt in warmup_prompts)
    # 2. Alternate. `decoded[run][method]` gets one entry per prompt.
    decoded: list[dict[str, list[_Decoded]]] = [{method: [] for method in methods} for _ in range(runs)]
    gc.collect()  # what warming up left behind is not collected in someone's time
    for run, index in progress(list(itertools.product(range(runs), range(len(prompts))))):
        shift = (run + index) % len(methods)
        for method in (*methods[shift:], *methods[:shift]):
            decoded[run][method].append(decode(method, prompts[index]))
    # 3. Medians. Ratios are taken within a run, where the load was the same.
    answers = [answer.ids for answer in decoded[-1][TARGET_ALONE]]
    answers_of_methods = {}
    for method in methods:
        answers_of_methods[method] = [_diverging_answer(decoded, method, i) for i in range(len(prompts))]
    divergences, rounding = find_divergences(
        target, prompts, answers, answers_of_methods, draft.config.max_block_tokens
    )
    setting = _setting_of(target, draft, max_new_tokens, runs)
    if TREE_METHODS & set(methods):
        setting["tree_nodes"] = tree_nodes
    return EvalReport(
        methods={name: _method_report(decoded, name, warmup[name], name in compiled) for name in methods},
        acceptance_lengths=[answer.acceptance_lengths for answer in decoded[-1][WHOLE_BLOCKS]],
        responses=answers,
        block_size=draft.config.max_block_tokens,
        setting=setting,
        divergences=divergences,
        rounding=rounding,
    )


def _check_arguments(prompts: Sequence[Sequence[int]], runs: int, methods: Sequence[str]) -> None:
    """See the errors of [`evaluate`]."""
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise ValueError(f"prompts holds {len(prompts)} prompts; pass the ids of at least one, none of them empty.")
    if runs < 1:
        raise ValueError(f"runs={runs} must be at least 1.")
    unknown = set(methods) - TABLE.keys()
    if unknown:
        raise ValueError(f"methods={list(methods)} names {sorted(unknown)}; choose from {sorted(TABLE)}.")
    missing = {TARGET_ALONE, WHOLE_BLOCKS} - set(methods)
    if missing:
        raise ValueError(f"methods={list(methods)} lacks {sorted(missing)}, which the others are compared with.")


@dataclass
class _Decoded:
    """One answer of one method."""

    ids: list[int]
    seconds: float
    forwards: int  # of the target
    acceptance_lengths: list[int]
    draft_sizes: list[int] | None = None


class _Decoder:
    """
    Decodes a prompt by a method, and measures the time.

    Args:
        target (`PreTrainedModel`): The target.
        max_new_tokens (`int`): Maximum length of an answer.
        arguments (`dict[str, dict | Callable]`): For each method the arguments of `generate`, or a function from
            prompt ids to answer ids.
        packed (`dict[str, tuple]`): For each method that packs weights, the models whose weights it packs.
    """

    def __init__(self, target, max_new_tokens: int, arguments: dict, packed: dict[str, tuple]):
        self.target = target
        self.max_new_tokens = max_new_tokens
        self.arguments = arguments
        self.packed = packed

    def __call__(self, method: str, prompt: Sequence[int]) -> _Decoded:
        """The answer of a method to a prompt."""
        arguments = self.arguments[method]
        output = None
        counter = None
        with contextlib.ExitStack() as contexts:
            if method == MTP:
                contexts.enter_context(without_bars())  # its heads are loaded in each call
            if self._can_count_forwards(method):
                counter = contexts.enter_context(_count_forwards(self.target))
            if method in self.packed:
                contexts.enter_context(packed_weights(*self.packed[method]))
            start = now(self.target.device)
            if callable(arguments):
                ids = arguments(prompt)
            else:
                options = {"max_new_tokens": self.max_new_tokens, "do_sample": False, **arguments}
                output = generate_one(self.target, prompt, **options)
                ids = output.sequences[0, len(prompt) :].tolist()
            seconds = now(self.target.device) - start
        lengths_of_rows = getattr(output, "acceptance_lengths", None) or [[]]  # if a DFlash drafter was used
        lengths = list(lengths_of_rows[0])
        if method in DRAFTED:
            forwards = 1 + len(lengths)
        elif counter is not None:
            forwards = counter.count
        else:
            forwards = len(ids)
        return _Decoded(ids, seconds, forwards, lengths, getattr(output, "draft_sizes", None))

    def _can_count_forwards(self, method: str) -> bool:
        """Not where a hook would be compiled too; without a drafter, a compiled target makes one forward per token."""
        arguments = self.arguments[method]
        return method not in DRAFTED and not callable(arguments) and "cache_implementation" not in arguments


def _setting_of(target, draft, max_new_tokens: int, runs: int) -> dict:
    """What was measured, where and how: [`EvalReport.setting`]."""
    return {
        "target": origin(target).get("base_model"),
        "weights": digest_of_parameters(draft.named_parameters()),
        "device": str(target.device),
        "hardware": hardware(target.device),
        "threads": torch.get_num_threads(),
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "draft_dtype": str(draft.dtype).removeprefix("torch."),
        "max_new_tokens": max_new_tokens,
        "runs": runs,
        "prompt_lookup_num_tokens": LOOKUP_TOKENS,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _diverging_answer(decoded: list[dict[str, list[_Decoded]]], method: str, index: int) -> list[int]:
    """A method's answer to a prompt; if any run differs from the target's own answer, the first that does."""
    own = decoded[-1][TARGET_ALONE][index].ids
    answers = [run[method][index].ids for run in decoded]
    return next((ids for ids in answers if ids != own), own)


def _method_report(
    decoded: list[dict[str, list[_Decoded]]], method: str, warmup: float, compiled: bool
) -> MethodReport:
    """The figures of a method; `decoded[run][method]` has an answer for each prompt."""

    def speeds(name: str) -> list[float]:
        """Tokens per second of each run."""
        speeds = []
        for run in decoded:
            tokens = sum(len(answer.ids) for answer in run[name])
            speeds.append(tokens / sum(answer.seconds for answer in run[name]))
        return speeds

    def speedup(base: str) -> float:
        ratios = [speed / base_speed for speed, base_speed in zip(speeds(method), speeds(base), strict=True)]
        return statistics.median(ratios)

    last_answers = decoded[-1][method]
    lengths = list(chain.from_iterable(answer.acceptance_lengths for answer in last_answers))
    sizes = list(chain.from_iterable(answer.draft_sizes or () for answer in last_answers))
    equal = 0
    for index in range(len(last_answers)):
        equal += all(run[method][index].ids == run[TARGET_ALONE][index].ids for run in decoded)
    return MethodReport(
        tokens_per_second=statistics.median(speeds(method)),
        speedup=speedup(TARGET_ALONE),
        runs=speeds(method),
        tokens=sum(len(answer.ids) for answer in last_answers),
        target_forwards=sum(answer.forwards for answer in last_answers),
        equal=equal,
        warmup_seconds=warmup,
        compiled=compiled,
        speedup_over_packed=speedup(TARGET_PACKED) if TARGET_PACKED in decoded[-1] else None,
        tau=statistics.fmean(lengths) if lengths else None,
        draft_sizes=sizes or None,
    )


def with_decoding_config(draft, **changes):
    """
    The drafter with changes to its `decoding_config`. Its weights are shared, but not the acceptance statistics, which
    belong to a module: each variant learns its own.
    """
    changed = copy.copy(draft)
    changed.decoding_config = replace(draft.decoding_config, **changes)
    return changed


def with_whole_blocks(draft):
    """The drafter with its trained block size, unless another is set, so that acceptance lengths can be compared."""
    return with_decoding_config(draft, block_size=draft.decoding_config.block_size or draft.config.max_block_tokens)


def drafters_of_methods(draft, tree_nodes: int = TREE_NODES) -> dict:
    """The drafter set up for each method of `FIXED_SIZE`, by name."""
    whole_blocks = with_whole_blocks(draft)
    values = {"tree_nodes": tree_nodes, "compile": True}
    drafters = {}
    for method, fields in FIXED_SIZE.items():
        drafters[method] = with_decoding_config(whole_blocks, **{field: values[field] for field in fields})
    return drafters


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


def now(device: torch.device) -> float:
    """The time, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _ForwardCounter:
    """A hook that counts the forward passes of its module."""

    def __init__(self):
        self.count = 0

    def __call__(self, module, args) -> None:
        self.count += 1


@contextlib.contextmanager
def _count_forwards(target) -> Iterator[_ForwardCounter]:
    """Count the target's forward passes."""
    counter = _ForwardCounter()
    handle = decoder_layers(target)[0].register_forward_pre_hook(counter)
    try:
        yield counter
    finally:
        handle.remove()
