"""How the parts of a run decode and measure: the time of a round, the lines that wait, the kernels of a forward."""

import collections
import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from setting import Setting


REPEATS = 3


def synchronize(device: str) -> None:
    """Wait for everything that was launched."""
    if device != "cpu":
        torch.cuda.synchronize()


def answers(device: str) -> bool:
    """Whether the device still does: an assertion that failed in a kernel ends the process's context."""
    try:
        synchronize(device)
    except Exception:
        return False
    return True


# ------------------------------------------------------------------------------------------------------------ decoding


@dataclass
class Decoded:
    """
    What a call returned.

    Attributes:
        text (`torch.LongTensor`): `[R, S]`.
        rounds (`list[int]`): Of each row, or those of all rows together; without a drafter, one for each token.
        sizes (`list[int]`): Drafted tokens of each round, where they are chosen round by round.
    """

    text: torch.LongTensor
    rounds: list[int]
    sizes: list[int]


def arguments_of(ids: torch.LongTensor, tokens: int, options: dict) -> dict:
    """The arguments of `generate` for `tokens` new tokens after prompts `[R, S]`; greedy unless `options` sample."""
    defaults = {"do_sample": False, "pad_token_id": 0}
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": tokens,
        **defaults,
        **options,
    }


def decode(target, draft, ids: torch.LongTensor, tokens: int, options: dict) -> Decoded:
    """`target.generate`, with a drafter or, where `draft` is `None`, without."""
    inputs = arguments_of(ids, tokens, options)
    output = target.generate(**inputs, assistant_model=draft, return_dict_in_generate=True)
    if draft is None:
        return Decoded(output.sequences, [tokens] * len(ids), [])
    rounds = [len(counts) for counts in output.acceptance_lengths]
    return Decoded(output.sequences, rounds, list(output.draft_sizes or []))


def decode_by_loop(loop: Callable, target, draft, ids: torch.LongTensor, tokens: int) -> Decoded:
    """A loop of `other_loops.py`, one row. Its rounds are the target's forwards."""
    forwards: list[int] = []
    handle = target.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        text = loop(target, draft, arguments_of(ids, tokens, {}))
    finally:
        handle.remove()
    return Decoded(text, [len(forwards)], [])


# ------------------------------------------------------------------------------------------------------------- timing


@dataclass
class Timing:
    """
    Attributes:
        seconds (`float`): Of a round; of a token where nothing drafts.
        tau (`float`): Tokens that a round commits in a row.
        tokens_per_second (`float`): Of all rows together.
        first_seconds (`float`): Of the first call, in which kernels are loaded or compiled.
        decoded (`Decoded`): The long call.
    """

    seconds: float
    tau: float
    tokens_per_second: float
    first_seconds: float
    decoded: Decoded


def time_rounds(call: Callable[[int], Decoded], setting: Setting, tokens: int, warm_up: int = 2) -> Timing:
    """
    The difference between a long and a short call, over the difference of their rounds: neither the prompt nor what a
    call does once is in it.

    Args:
        call (`Callable`): `call(tokens)` writes so many tokens to each row.
        setting (`Setting`): Where it runs; a dry run times it once.
        tokens (`int`): Of the long call; the short one writes a quarter.
        warm_up (`int`): Long calls before the clock counts. The plain call learns from them what sizes cost.
    """
    first_seconds = 0.0
    for number in range(warm_up):
        elapsed, _ = _timed(call, tokens, setting.device)
        if number == 0:
            first_seconds = elapsed
    short_tokens = tokens // 4
    long_seconds = []
    short_seconds = []
    for _ in range(1 if setting.is_tiny else REPEATS):
        elapsed, long = _timed(call, tokens, setting.device)
        long_seconds.append(elapsed)
        elapsed, short = _timed(call, short_tokens, setting.device)
        short_seconds.append(elapsed)
    # On a noisy machine a tiny model's short call may last as long as its long one.
    more_seconds = max(statistics.median(long_seconds) - statistics.median(short_seconds), 1e-9)
    more_tokens = len(long.text) * (tokens - short_tokens)
    return Timing(
        seconds=more_seconds / max(max(long.rounds) - max(short.rounds), 1),
        tau=(tokens - short_tokens) * len(long.rounds) / max(sum(long.rounds) - sum(short.rounds), 1),
        tokens_per_second=more_tokens / more_seconds,
        first_seconds=first_seconds,
        decoded=long,
    )


def _timed(call: Callable[[int], Decoded], tokens: int, device: str) -> tuple[float, Decoded]:
    synchronize(device)
    start = time.perf_counter()
    decoded = call(tokens)
    synchronize(device)
    return time.perf_counter() - start, decoded


def median_seconds(function: Callable[[], object], device: str, repeats: int = 5) -> float:
    """Of a call that has been warmed up twice, until the device has finished it."""
    seconds = []
    for _ in range(2 + repeats):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def kernel_seconds(function: Callable[[], object]) -> float:
    """Of all kernels of a call together, without the gaps between them. CUDA only."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6


def replay_seconds(function: Callable[[], object]) -> float:
    """Of a call that is replayed from a CUDA graph. CUDA only."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what is done once, such as loading a library, cannot be captured
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return median_seconds(graph.replay, "cuda")


# -------------------------------------------------------------------------------------------------------------- waits


@contextlib.contextmanager
def counted_waits(setting: Setting) -> Iterator[collections.Counter]:
    """
    Count where the host waits for the device, by file and line: what `torch.cuda.set_sync_debug_mode` warns of, or
    what the pretend accelerator counts. Nothing on a CPU. The counter is complete when the context ends.
    """
    waits: collections.Counter = collections.Counter()
    if setting.accelerator is not None:
        before = setting.accelerator.counts.copy()
        yield waits
        counts = setting.accelerator.counts.since(before)
        waits.update(counts.waits)
        return
    if setting.device == "cpu":
        yield waits
        return

    def note(message, category, filename, lineno, *_more) -> None:
        if "synchroniz" in str(message).lower():
            file = Path(filename)
            waits[f"{file.parent.name}/{file.name}:{lineno}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
