"""Decoding side by side: the target alone, with a drafter or its own heads. Speed, acceptance, losslessness."""

import contextlib
import copy
import functools
import gc
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from dflash_hf import __version__
from dflash_hf._io.files import digest_of
from dflash_hf._io.names import dtype_name
from dflash_hf._io.progress import without_bars
from dflash_hf._io.repositories import origin
from dflash_hf.decoding.packing import packed_weights
from dflash_hf.evaluation.decoded import Decoded, DecodedRuns, ProgressFile, Records, read_progress, runs_of_records
from dflash_hf.evaluation.distribution import DistributionTest, find_deviations
from dflash_hf.evaluation.divergence import Divergence, find_divergences
from dflash_hf.evaluation.figures import method_report
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
from dflash_hf.evaluation.ranks import ALONE, Ranks
from dflash_hf.evaluation.report import EvalReport
from dflash_hf.modeling.target_dflash import decoder_layers
from dflash_hf.targets.digests import digest_of_parameters, digest_of_target
from dflash_hf.targets.generation import forked_rng, generate_one, image_inputs


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
    block_size: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    ranks: Ranks = ALONE,
    progress_folder: Path | None = None,
) -> EvalReport:
    """
    Decode every prompt, one at a time, by each method in turn, `runs` times.

    The methods alternate prompt by prompt and change their order from run to run, so that other load on the machine
    affects all of them. Each is warmed up first, compiled methods on every prompt. Packing weights is not timed. The
    number of threads is not changed; the report names it. Both models decode in evaluation mode; their modes are
    restored at the end.

    Samples follow the target's own distribution at a temperature, without top-k and top-p. Each prompt has its own
    seed, the same for all methods and runs; torch's generators are as before at the end.

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
        block_size (`int`, *optional*): Tokens of a whole block, anchor included: as many slots are in the drafter's
            forward. At most, and by default, the block size of training, unless `draft.decoding_config` has another.
        temperature (`float`): At which is sampled; 0 is greedy.
        seed (`int`): Of the first prompt's samples; the others follow it.
        ranks ([`~dflash_hf.evaluation.ranks.Ranks`]): The processes that call this together, with equal arguments.
            Each decodes its share of the prompts, and all return the report.
        progress_folder (`Path`, *optional*): Folder of a file to which each process appends what it has decoded. A
            call with the same models, prompts and settings goes on behind it;
            [`~dflash_hf.evaluation.report_files.save_report`] removes it. Not with `other_methods`.

    Returns:
        [`EvalReport`].

    Raises:
        `ValueError`: there are no prompts or runs, a method is unknown, or one that others are compared with is
            missing; `block_size` or `temperature` is out of range; both `progress_folder` and `other_methods`.
    """
    _check_arguments(prompts, runs, methods, temperature)
    if progress_folder is not None and other_methods:
        raise ValueError(
            f"progress_folder={str(progress_folder)!r} cannot go on with other_methods ({', '.join(other_methods)}): "
            "the file knows their names only. Leave one of the two out."
        )
    drafters = drafters_of_methods(draft, tree_nodes, block_size)
    calls = _calls_of_methods(target, draft, methods, other_methods or {}, drafters)
    setting = _setting_of(target, draft, max_new_tokens, runs)
    setting |= {"temperature": temperature, "block_size": drafters[WHOLE_BLOCKS].decoding_config.block_size}
    if temperature:
        setting["seed"] = seed
    if any(METHODS[name].trees for name in methods):
        setting["tree_nodes"] = tree_nodes
    if ranks.size > 1:
        setting["processes"] = ranks.size
    with _evaluation_mode(target, draft):
        decode = _Decoder(target, max_new_tokens, calls, temperature, seed)
        # 1. Warm up: the first calls compile, probe and allocate; compiled methods do so for each size. They come
        # last: other methods may leave hooks on the target, and it would be compiled again.
        warmup_seconds = {}
        for name in sorted(calls, key=lambda name: calls[name].compiled):
            warmup_prompts = ranks.share(prompts) if calls[name].compiled else prompts[:1]
            warmup_seconds[name] = sum(decode(name, prompt).seconds for prompt in warmup_prompts)
        # 2. Alternate.
        with contextlib.ExitStack() as files:
            finished: Records = {}
            file = None
            if progress_folder is not None:
                key = _key_of(target, draft, prompts, list(calls), setting)
                file = files.enter_context(ProgressFile.opened(progress_folder, ranks.rank, key))
                finished = read_progress(progress_folder, key)
            records = _decode_in_turn(decode, prompts, runs, ranks, finished, file, progress)
        records = functools.reduce(dict.__or__, ranks.gather(records))
        # 3. The report of all answers.
        report = None
        if ranks.is_main:
            decoded = runs_of_records(records, runs, len(prompts))
            report = _report(decode, draft, prompts, decoded, warmup_seconds, setting)
    return ranks.from_main(report)


def _report(
    decode: "_Decoder",
    draft,
    prompts: Sequence[Sequence[int]],
    decoded: DecodedRuns,
    warmup_seconds: dict[str, float],
    setting: dict,
) -> EvalReport:
    """The report of the answers to all prompts."""
    # 1. What differs from the target's own answers, and whether rounding or chance explains it.
    own_answers = [answer.ids for answer in decoded[-1][TARGET_ALONE]]
    divergences: list[Divergence] = []
    rounding = None
    distribution_tests: list[DistributionTest] = []
    if decode.temperature:
        distribution_tests = find_deviations(decode.target, prompts, decoded, decode.options)
    else:
        answers_of_methods = {}
        for name in decode.calls:
            answers_of_methods[name] = [_first_different_answer(decoded, name, i) for i in range(len(prompts))]
        divergences, rounding = find_divergences(
            decode.target, prompts, own_answers, answers_of_methods, draft.config.max_block_tokens
        )
    # 2. Medians.
    reports = {}
    for name, call in decode.calls.items():
        reports[name] = method_report(decoded, name, warmup_seconds[name], call.compiled)
    return EvalReport(
        methods=reports,
        acceptance_lengths=[answer.acceptance_lengths for answer in decoded[-1][WHOLE_BLOCKS]],
        responses=own_answers,
        block_size=setting["block_size"],
        setting=setting,
        divergences=divergences,
        rounding=rounding,
        prompt_lengths=[len(prompt) for prompt in prompts],
        distribution_tests=distribution_tests,
    )


def _check_arguments(prompts: Sequence[Sequence[int]], runs: int, methods: Sequence[str], temperature: float) -> None:
    """See the errors of [`evaluate`]."""
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise ValueError(f"prompts holds {len(prompts)} prompts; pass the ids of at least one, none of them empty.")
    if runs < 1:
        raise ValueError(f"runs={runs} must be at least 1.")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be 0, greedy, or a positive number.")
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


def _calls_of_methods(target, draft, methods: Sequence[str], other_methods: dict, drafters: dict) -> dict[str, _Call]:
    """The call of each method, by name: of [`evaluate`]'s arguments, and of [`drafters_of_methods`]."""
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


class _Decoder:
    """
    Decodes a prompt by a method, and measures the time.

    Args:
        target (`PreTrainedModel`): The target.
        max_new_tokens (`int`): Maximum length of an answer.
        calls (`dict[str, _Call]`): How each method decodes.
        temperature, seed: As of [`evaluate`].

    Attributes:
        options (`dict`): Arguments of `generate` that all methods share.
    """

    def __init__(self, target, max_new_tokens: int, calls: dict[str, _Call], temperature: float, seed: int):
        self.target = target
        self.calls = calls
        self.temperature = temperature
        self.seed = seed
        self.options: dict = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
        if temperature:  # the distribution itself: targets' own settings often cut it by top-k and top-p
            self.options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}

    def __call__(self, method: str, prompt: Sequence[int], index: int = 0) -> Decoded:
        """The answer of a method to a prompt, whose samples have the seed of this index."""
        call = self.calls[method]
        output = None
        counter = None
        prefill_seconds = None
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(forked_rng(self.target.device, enabled=self.temperature > 0))
            if self.temperature:
                torch.manual_seed(self.seed + index)
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
                output = generate_one(self.target, prompt, streamer=first_token, **self.options, **call.arguments)
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
        return Decoded(ids, seconds, prefill_seconds, forwards, lengths, getattr(output, "draft_sizes", None))


def _decode_in_turn(
    decode: _Decoder,
    prompts: Sequence[Sequence[int]],
    runs: int,
    ranks: Ranks,
    finished: Records,
    file: ProgressFile | None,
    progress: Callable[[Iterable], Iterable],
) -> Records:
    """
    Decode this process's share of the prompts by each method, method by method; which of them begins changes with run
    and prompt. What is in `finished` is not decoded again; what is decoded is added to `file`.
    """
    methods = list(decode.calls)
    share = [(run, index) for run in range(runs) for index in ranks.share(range(len(prompts)))]
    records = {place: finished[place] for place in share if place in finished}
    gc.collect()  # what warming up left behind must not be collected while a method is timed
    for run, index in progress([place for place in share if place not in records]):
        shift = (run + index) % len(methods)
        answers = {}
        for method in (*methods[shift:], *methods[:shift]):
            answers[method] = decode(method, prompts[index], index)
        records[run, index] = {method: answers[method] for method in methods}
        if file is not None:
            file.append(run, index, records[run, index])
    return records


def _key_of(target, draft, prompts: Sequence[Sequence[int]], methods: list[str], setting: dict) -> str:
    """
    The digest of what an answer and its time depend on: models, prompts, and the report's setting, which has a digest
    of the drafter's weights. Runs and processes may become more or fewer.
    """
    images = []  # of each prompt
    for prompt in prompts:
        tensors = image_inputs(target, prompt)
        images.append(digest_of_parameters(tensors.items()) if tensors else None)
    settings = {name: value for name, value in setting.items() if name not in ("runs", "processes")}
    configs = [target.config, target.generation_config, draft.config]
    return digest_of(
        {
            "target": digest_of_target(target),
            "configs": [config.to_json_string() for config in configs],
            "decoding_config": str(draft.decoding_config),
            "prompts": [list(prompt) for prompt in prompts],
            "images": images,
            "methods": methods,
            "settings": {**settings, "dflash_hf": __version__},
        }
    )


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
        "runs": runs,
        "prompt_lookup_num_tokens": LOOKUP_TOKENS,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _first_different_answer(decoded: DecodedRuns, method: str, index: int) -> list[int]:
    """A method's answer to a prompt, from the first run in which it differs from the target's own if there is one."""
    own = decoded[-1][TARGET_ALONE][index].ids
    answers = [run[method][index].ids for run in decoded]
    return next((ids for ids in answers if ids != own), own)


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


def drafters_of_methods(draft, tree_nodes: int = TREE_NODES, block_size: int | None = None) -> dict:
    """
    The drafter set up for each method that drafts a fixed size, by name; the arguments are those of [`evaluate`].

    Raises:
        `ValueError`: `block_size` is larger than the block of training, or less than 1.
    """
    if block_size is None:
        whole_blocks = with_whole_blocks(draft)
    elif 1 <= block_size <= draft.config.max_block_tokens:
        whole_blocks = with_decoding_config(draft, block_size=block_size)
    else:
        raise ValueError(
            f"block_size={block_size} must be from 1 to {draft.config.max_block_tokens}, the tokens of a block that "
            "the drafter was trained on."
        )
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
