"""Decoding side by side: the target alone, with a drafter or its own heads. Speed, acceptance, losslessness."""

import contextlib
import copy
import functools
import gc
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import transformers

from dflash_hf._io.progress import without_bars
from dflash_hf._io.repositories import origin
from dflash_hf.decoding.packing import packed_weights
from dflash_hf.evaluation.divergence import find_divergences
from dflash_hf.evaluation.methods import (
    ALONE,
    AUTO,
    DFLASH,
    DRAFTED,
    FIXED_SIZE,
    LOOKUP_TOKENS,
    METHODS,
    MTP,
    TARGET,
    TARGET_PACKED,
    TREE_METHODS,
    TREE_NODES,
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
    methods: Sequence[str] = METHODS,
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
        methods (`Sequence[str]`): `"target"` and `"dflash"`, plus any of `ALONE` and `DRAFTED`. With
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
    drafters = {**drafters_of_methods(draft, tree_nodes), AUTO: draft}
    assisted = {name: {"assistant_model": drafter} for name, drafter in drafters.items()}
    arguments = {**ALONE, **assisted, **other_methods}
    packed: dict[str, tuple] = {}  # the models that a method packs
    if TARGET_PACKED in methods:
        packed = {TARGET_PACKED: (target,), MTP: (target,), **dict.fromkeys(drafters, (target, draft))}
    decode = _decoder(target, max_new_tokens, arguments, packed)
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
    answers = [answer.ids for answer in decoded[-1][TARGET]]
    answers_of = {}
    for method in methods:
        answers_of[method] = [_diverging_answer(decoded, method, i) for i in range(len(prompts))]
    divergences, rounding = find_divergences(target, prompts, answers, answers_of, draft.config.max_block_tokens)
    return EvalReport(
        methods={name: _method_report(decoded, name, warmup[name], name in compiled) for name in methods},
        acceptance_lengths=[answer.acceptance_lengths for answer in decoded[-1][DFLASH]],
        responses=answers,
        block_size=draft.config.max_block_tokens,
        setting={
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
            **({"tree_nodes": tree_nodes} if TREE_METHODS & set(methods) else {}),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        divergences=divergences,
        rounding=rounding,
    )


def _check_arguments(prompts: Sequence[Sequence[int]], runs: int, methods: Sequence[str]) -> None:
    """See the errors of [`evaluate`]."""
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise ValueError(f"prompts holds {len(prompts)} prompts; pass the ids of at least one, none of them empty.")
    if runs < 1:
        raise ValueError(f"runs={runs} must be at least 1.")
    choices = {*ALONE, *DRAFTED}
    unknown = set(methods) - choices
    if unknown:
        raise ValueError(f"methods={list(methods)} names {sorted(unknown)}; choose from {sorted(choices)}.")
    missing = {TARGET, DFLASH} - set(methods)
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


def _decoder(target, max_new_tokens: int, arguments: dict, packed: dict) -> Callable[[str, Sequence[int]], _Decoded]:
    """A function that decodes a prompt by a method and measures the time."""

    def decode(method: str, prompt: Sequence[int]) -> _Decoded:
        how = arguments[method]  # a function, or what `generate` is given
        output = None
        # A hook would be compiled too; without a drafter, a compiled target makes one forward per token.
        is_counted = method not in DRAFTED and not callable(how) and "cache_implementation" not in how
        count = [0]
        with contextlib.ExitStack() as contexts:
            if method == MTP:
                contexts.enter_context(without_bars())  # its heads are loaded in each call
            if is_counted:
                count = contexts.enter_context(_count_forwards(target))
            if method in packed:
                contexts.enter_context(packed_weights(*packed[method]))
            start = now(target.device)
            if callable(how):
                ids = how(prompt)
            else:
                output = generate_one(target, prompt, max_new_tokens=max_new_tokens, do_sample=False, **how)
                ids = output.sequences[0, len(prompt) :].tolist()
            seconds = now(target.device) - start
        lengths_of_rows = getattr(output, "acceptance_lengths", None) or [[]]  # if a DFlash drafter was used
        lengths = list(lengths_of_rows[0])
        if method in DRAFTED:
            forwards = 1 + len(lengths)
        else:
            forwards = count[0] or len(ids)
        return _Decoded(ids, seconds, forwards, lengths, getattr(output, "draft_sizes", None))

    return decode


def _diverging_answer(decoded: list[dict[str, list[_Decoded]]], method: str, index: int) -> list[int]:
    """A method's answer to a prompt; if any run differs from the target's own answer, the first that does."""
    own = decoded[-1][TARGET][index].ids
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
        equal += all(run[method][index].ids == run[TARGET][index].ids for run in decoded)
    return MethodReport(
        tokens_per_second=statistics.median(speeds(method)),
        speedup=speedup(TARGET),
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


def variant(draft, **changes):
    """The drafter with changes to its `decoding_config`; its weights are shared."""
    twin = copy.copy(draft)
    twin.decoding_config = replace(draft.decoding_config, **changes)
    return twin


def in_blocks(draft):
    """The drafter with its trained block size, unless another is set, so that acceptance lengths can be compared."""
    return variant(draft, block_size=draft.decoding_config.block_size or draft.config.max_block_tokens)


def drafters_of_methods(draft, tree_nodes: int = TREE_NODES) -> dict:
    """The drafter set up for each method of `FIXED_SIZE`, by name."""
    whole_blocks = in_blocks(draft)
    values = {"tree_nodes": tree_nodes, "compile": True}
    drafters = {}
    for method, fields in FIXED_SIZE.items():
        drafters[method] = variant(whole_blocks, **{field: values[field] for field in fields})
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


@contextlib.contextmanager
def _count_forwards(target):
    """A list with one entry, the number of the target's forward passes."""
    count = [0]

    def add_one(module, args):
        count[0] += 1

    handle = decoder_layers(target)[0].register_forward_pre_hook(add_one)
    try:
        yield count
    finally:
        handle.remove()
