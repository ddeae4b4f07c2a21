"""Decoding side by side: the target alone, with a drafter or its own heads. Speed, acceptance, losslessness."""

import contextlib
import copy
import functools
import gc
import itertools
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from dflash_hf._io.names import dtype_name
from dflash_hf._io.progress import without_bars
from dflash_hf._io.repositories import origin
from dflash_hf.decoding.packing import packed_weights
from dflash_hf.evaluation.divergence import find_divergences
from dflash_hf.evaluation.methods import (
    DEFAULT_METHODS,
    LOOKUP_TOKENS,
    METHODS,
    MTP,
    TARGET_ALONE,
    TARGET_PACKED,
    TREE_NODES,
    WHOLE_BLOCKS,
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
    number of threads is not changed; the report names it. Both models decode in evaluation mode; their modes are
    restored at the end.

    Args:
        target, draft (`PreTrainedModel`): The pair.
        prompts (`Sequence[Sequence[int]]`): Prompt ids.
        max_new_tokens (`int`): Maximum length of an answer.
        runs (`int`): Timed repetitions; the medians are reported.
        methods (`Sequence[str]`): `"target"` and `"dflash"`, plus any of
            [`~dflash_hf.evaluation.methods.METHODS`]. With `"target_packed"`, a target with packed weights, drafters
            and `"mtp"` decode packed too.
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
    with _evaluation_mode(target, draft):
        calls = _calls_of_methods(target, draft, methods, other_methods or {}, tree_nodes)
        decode = _Decoder(target, max_new_tokens, calls)
        # 1. Warm up: the first calls compile, probe and allocate; compiled methods do so for each size. They come
        # last: other methods may leave hooks on the target, and it would be compiled again.
        warmup_seconds = {}
        for name in sorted(calls, key=lambda name: calls[name].compiled):
            warmup_prompts = prompts if calls[name].compiled else prompts[:1]
            warmup_seconds[name] = sum(decode(name, prompt).seconds for prompt in warmup_prompts)
        # 2. Alternate.
        decoded = _decode_in_turn(decode, list(calls), prompts, runs, progress)
        # 3. What differs from the target's own answers, and whether rounding explains it.
        own_answers = [answer.ids for answer in decoded[-1][TARGET_ALONE]]
        answers_of_methods = {}
        for name in calls:
            answers_of_methods[name] = [_first_different_answer(decoded, name, i) for i in range(len(prompts))]
        divergences, rounding = find_divergences(
            target, prompts, own_answers, answers_of_methods, draft.config.max_block_tokens
        )
    # 4. Medians.
    reports = {}
    for name, call in calls.items():
        reports[name] = _method_report(decoded, name, warmup_seconds[name], call.compiled)
    setting = _setting_of(target, draft, max_new_tokens, runs)
    if any(METHODS[name].trees for name in methods):
        setting["tree_nodes"] = tree_nodes
    return EvalReport(
        methods=reports,
        acceptance_lengths=[answer.acceptance_lengths for answer in decoded[-1][WHOLE_BLOCKS]],
        responses=own_answers,
        block_size=setting["block_size"],
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
    unknown = set(methods) - METHODS.keys()
    if unknown:
        raise ValueError(f"methods={list(methods)} names {sorted(unknown)}; choose from {sorted(METHODS)}.")
    missing = {TARGET_ALONE, WHOLE_BLOCKS} - set(methods)
    if missing:
        raise ValueError(f"methods={list(methods)} lacks {sorted(missing)}, which the others are compared with.")


@contextlib.contextmanager
def _evaluation_mode(*models) -> Iterator[None]:
    """A context in which models are in evaluation mode; afterwards, each of their modules is in its own mode again."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


@dataclass(frozen=True)
class _Call:
    """
    How a method decodes a prompt.

    Args:
        arguments (`dict` or `Callable`): Arguments of `generate`, or a function from prompt ids to answer ids.
        drafts (`bool`): Whether they include a DFlash drafter.
        compiled (`bool`): Whether its rounds are compiled.
        packed (`tuple`): The models whose weights are packed.
    """

    arguments: dict | Callable
    drafts: bool = False
    compiled: bool = False
    packed: tuple = ()

    @property
    def can_count_forwards(self) -> bool:
        """
        Whether a hook on the target may count its forwards. A compiled target would be compiled with the hook; without
        a drafter, it makes one forward for each token.
        """
        return not self.drafts and not callable(self.arguments) and "cache_implementation" not in self.arguments


def _calls_of_methods(target, draft, methods: Sequence[str], other_methods: dict, tree_nodes: int) -> dict[str, _Call]:
    """The call of each method, by name; arguments as those of [`evaluate`]."""
    drafters = drafters_of_methods(draft, tree_nodes)
    calls = {}
    for name in methods:
        method = METHODS[name]
        models = (target, draft) if method.drafts else (target,)
        packed = models if method.packs and TARGET_PACKED in methods else ()
        if method.drafts:
            drafter = drafters.get(name, draft)
            calls[name] = _Call({"assistant_model": drafter}, True, drafter.decoding_config.compile, packed)
        else:
            calls[name] = _Call(method.arguments, packed=packed)
    for name, arguments in other_methods.items():
        calls[name] = _Call(arguments)
    return calls


@dataclass
class _Decoded:
    """One answer of one method."""

    ids: list[int]
    seconds: float
    prefill_seconds: float | None  # until the first new token; `None` for functions
    forwards: int  # of the target
    acceptance_lengths: list[int]
    draft_sizes: list[int] | None = None

    @property
    def decode_seconds_per_token(self) -> float | None:
        """
        The time after the first new token, divided by all new tokens as the reference implementation does; `None`
        without one, or if nothing follows it.
        """
        if self.prefill_seconds is None or len(self.ids) < 2:
            return None
        return (self.seconds - self.prefill_seconds) / len(self.ids)


# The answers of all runs: `decoded[run][method]` has one for each prompt.
_DecodedRuns: TypeAlias = list[dict[str, list[_Decoded]]]


class _Decoder:
    """
    Decodes a prompt by a method, and measures the time.

    Args:
        target (`PreTrainedModel`): The target.
        max_new_tokens (`int`): Maximum length of an answer.
        calls (`dict[str, _Call]`): How each method decodes.
    """

    def __init__(self, target, max_new_tokens: int, calls: dict[str, _Call]):
        self.target = target
        self.max_new_tokens = max_new_tokens
        self.calls = calls

    def __call__(self, method: str, prompt: Sequence[int]) -> _Decoded:
        """The answer of a method to a prompt."""
        call = self.calls[method]
        output = None
        counter = None
        prefill_seconds = None
        with contextlib.ExitStack() as contexts:
            if method == MTP:
                contexts.enter_context(without_bars())  # its heads are loaded in each call
            if call.can_count_forwards:
                counter = contexts.enter_context(_count_forwards(self.target))
            if call.packed:
                contexts.enter_context(packed_weights(*call.packed))
            start = now(self.target.device)
            if callable(call.arguments):
                ids = call.arguments(prompt)
            else:
                first_token = _FirstTokenTimer()
                options = {"max_new_tokens": self.max_new_tokens, "do_sample": False, **call.arguments}
                output = generate_one(self.target, prompt, streamer=first_token, **options)
                ids = output.sequences[0, len(prompt) :].tolist()
                prefill_seconds = first_token.time - start
            seconds = now(self.target.device) - start
        lengths_of_rows = getattr(output, "acceptance_lengths", None) or [[]]  # if a DFlash drafter was used
        lengths = list(lengths_of_rows[0])
        if call.drafts:
            forwards = 1 + len(lengths)
        elif counter is not None:
            forwards = counter.count
        else:
            forwards = len(ids)
        return _Decoded(ids, seconds, prefill_seconds, forwards, lengths, getattr(output, "draft_sizes", None))


def _decode_in_turn(
    decode: _Decoder,
    methods: Sequence[str],
    prompts: Sequence[Sequence[int]],
    runs: int,
    progress: Callable[[Iterable], Iterable],
) -> _DecodedRuns:
    """Decode every prompt by each method, method by method; which of them begins changes with run and prompt."""
    decoded: _DecodedRuns = [{method: [] for method in methods} for _ in range(runs)]
    gc.collect()  # what warming up left behind must not be collected while a method is timed
    for run, index in progress(list(itertools.product(range(runs), range(len(prompts))))):
        shift = (run + index) % len(methods)
        for method in (*methods[shift:], *methods[:shift]):
            decoded[run][method].append(decode(method, prompts[index]))
    return decoded


def _setting_of(target, draft, max_new_tokens: int, runs: int) -> dict:
    """What was measured, where and how: [`EvalReport.setting`]."""
    return {
        "target": origin(target).get("base_model"),
        "weights": digest_of_parameters(draft.named_parameters()),
        "device": str(target.device),
        "hardware": hardware(target.device),
        "threads": torch.get_num_threads(),
        "target_dtype": dtype_name(target.dtype),
        "draft_dtype": dtype_name(draft.dtype),
        "max_new_tokens": max_new_tokens,
        "temperature": 0.0,
        "block_size": with_whole_blocks(draft).decoding_config.block_size,
        "runs": runs,
        "prompt_lookup_num_tokens": LOOKUP_TOKENS,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _first_different_answer(decoded: _DecodedRuns, method: str, index: int) -> list[int]:
    """A method's answer to a prompt, from the first run in which it differs from the target's own if there is one."""
    own = decoded[-1][TARGET_ALONE][index].ids
    answers = [run[method][index].ids for run in decoded]
    return next((ids for ids in answers if ids != own), own)


def _method_report(decoded: _DecodedRuns, method: str, warmup_seconds: float, compiled: bool) -> MethodReport:
    """The figures of a method."""
    last_answers = decoded[-1][method]
    lengths = list(chain.from_iterable(answer.acceptance_lengths for answer in last_answers))
    sizes = list(chain.from_iterable(answer.draft_sizes or () for answer in last_answers))
    equal = 0
    for index in range(len(last_answers)):
        equal += all(run[method][index].ids == run[TARGET_ALONE][index].ids for run in decoded)
    speeds = _speeds(decoded, method)
    means = [statistics.fmean(answer.acceptance_lengths) for answer in last_answers if answer.acceptance_lengths]
    decode_times = _decode_times(decoded, method)
    return MethodReport(
        tokens_per_second=statistics.median(speeds),
        speedup=_median_ratio(speeds, _speeds(decoded, TARGET_ALONE)),
        runs=speeds,
        tokens=sum(len(answer.ids) for answer in last_answers),
        target_forwards=sum(answer.forwards for answer in last_answers),
        equal=equal,
        warmup_seconds=warmup_seconds,
        compiled=compiled,
        speedup_over_packed=(
            _median_ratio(speeds, _speeds(decoded, TARGET_PACKED)) if TARGET_PACKED in decoded[-1] else None
        ),
        tau=statistics.fmean(lengths) if lengths else None,
        draft_sizes=sizes or None,
        tau_of_responses=statistics.fmean(means) if means else None,
        prefill_seconds=_median_prefill(decoded, method),
        decode_seconds_per_token=statistics.median(decode_times) if decode_times else None,
        decode_speedup=_decode_speedup(decoded, method, TARGET_ALONE),
        decode_speedup_over_packed=(
            _decode_speedup(decoded, method, TARGET_PACKED) if TARGET_PACKED in decoded[-1] else None
        ),
    )


def _decode_times(decoded: _DecodedRuns, method: str) -> list[float]:
    """
    Seconds per new token after the prefill in each run: the mean over the responses, not over the tokens, as the paper
    reports it. Empty if a method's tokens are not seen, or no response has a second one.
    """
    means = []
    for run in decoded:
        times = [answer.decode_seconds_per_token for answer in run[method]]
        known_times = [time for time in times if time is not None]
        if known_times:
            means.append(statistics.fmean(known_times))
    return means


def _decode_speedup(decoded: _DecodedRuns, method: str, baseline: str) -> float | None:
    """The ratio of a baseline's time per new token after the prefill to a method's."""
    times = _decode_times(decoded, method)
    base_times = _decode_times(decoded, baseline)
    if not times or not base_times:
        return None
    return _median_ratio(base_times, times)


def _median_prefill(decoded: _DecodedRuns, method: str) -> float | None:
    """Seconds until the first new token: the mean over the responses, the median over the runs."""
    means = []
    for run in decoded:
        times = [answer.prefill_seconds for answer in run[method]]
        if None in times:
            return None
        means.append(statistics.fmean(times))
    return statistics.median(means)


def _speeds(decoded: _DecodedRuns, method: str) -> list[float]:
    """Tokens per second of a method in each run."""
    speeds = []
    for run in decoded:
        tokens = sum(len(answer.ids) for answer in run[method])
        speeds.append(tokens / sum(answer.seconds for answer in run[method]))
    return speeds


def _median_ratio(speeds: Sequence[float], base_speeds: Sequence[float]) -> float:
    """The median ratio of two speeds. Ratios are taken within a run, where the load was the same."""
    return statistics.median(speed / base for speed, base in zip(speeds, base_speeds, strict=True))


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
    """The drafter set up for each method that drafts a fixed size, by name."""
    whole_blocks = with_whole_blocks(draft)
    drafters = {}
    for name, method in METHODS.items():
        if not method.fixed_size:
            continue
        changes: dict = {}
        if method.trees:
            changes["tree_nodes"] = tree_nodes
        if method.compiles:
            changes["compile"] = True
        drafters[name] = with_decoding_config(whole_blocks, **changes)
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


class _FirstTokenTimer(BaseStreamer):
    """
    Notes when a call has its first new token: the prompt has been read then, by the drafter too. Each round of a loop
    waits for the device anyway, to see whether the text has ended; copying its tokens to the host is the same wait.
    """

    def __init__(self):
        self.time = math.nan
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, then with new tokens."""
        if not self._has_prompt:
            self._has_prompt = True
        elif math.isnan(self.time):
            self.time = time.perf_counter()

    def end(self) -> None:
        """Called after the last token."""


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
