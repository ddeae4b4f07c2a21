"""
`dflash demo`: train a small target and its drafter on this machine, then decode side by side.

    1. data     lines of the standard library and their syntax trees, split by file   (demo_task)
    2. target   a small Qwen3, from scratch                                           (demo_training)
    3. drafter  DFlashTrainer, on the text or on the target's own answers             (demo_training)
    4. compare  target alone, with the drafter, with prompt lookup, on held-out lines (evaluation)

A trained pair is kept in a cache folder, whole or not at all.
"""

import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from dflash_hf.cache import DamagedFolderError, check_whole, whole_folder
from dflash_hf.demo.task import MASK, Pair, decode_answer, encode_pairs, is_correct, read_task, train_tokenizer
from dflash_hf.evaluation.measure import COMPILED, DFLASH, PROMPT_LOOKUP, TARGET, EvalReport, evaluate
from dflash_hf.evaluation.plots import plot_report
from dflash_hf.evaluation.text import colored_answer, summary_lines
from dflash_hf.modeling.modeling_dflash import DFlashDraftModel


_LAYOUT = 2  # of a pair's folder; another number never reads it
_HELD_OUT = 200  # held-out lines that are kept with a pair
_SELF_GENERATED_SECONDS = 40.0
_MAX_NEW_TOKENS = 224  # the longest held-out answers fit

_logger = logging.get_logger(__name__)
Say = Callable[[str], None]


@dataclass(frozen=True)
class DemoSettings:
    """
    Everything that a trained pair depends on; another value trains another pair.

    Args:
        seed (`int`): Of data, weights and anchors.
        self_generate (`bool`): Train the drafter on the target's own answers instead of the text.
        source (`str`): Folder of Python files; empty for the standard library.
        target_steps, draft_steps (`int`): Optimizer steps.
        target_seconds, draft_seconds (`float`): A slower machine stops here instead, after a full learning-rate decay.
    """

    seed: int = 0
    self_generate: bool = False
    source: str = ""
    train_pairs: int = 24_000
    vocab_size: int = 1024
    hidden_size: int = 128
    target_layers: int = 6
    target_heads: int = 4
    target_tokens_per_step: int = 1024
    target_steps: int = 1000
    target_seconds: float = 137.0
    draft_layers: int = 2
    target_layer_ids: tuple[int, ...] = (1, 3, 5)
    block_size: int = 12
    draft_batch_size: int = 16
    num_anchors: int = 10
    loss_type: str = "dpace"
    draft_steps: int = 300
    draft_seconds: float = 57.0

    @property
    def key(self) -> str:
        """Names the pair's folder: readable, and different for every difference."""
        facts = {**asdict(self), "layout": _LAYOUT, "python": platform.python_version_tuple()[:2]}
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:10]
        return f"pair-seed{self.seed}-{'own' if self.self_generate else 'text'}-{digest}"


@dataclass
class DemoPair:
    """A trained pair, with lines that neither model has seen."""

    target: Any
    draft: DFlashDraftModel
    tokenizer: Any
    held_out: list[Pair]
    facts: dict  # what training was: steps, seconds, files


def load_pair(folder: Path) -> DemoPair:
    """
    Read a pair from the cache.

    Raises:
        `FileNotFoundError`: there is none.
        [`DamagedFolderError`]: a file is missing, was added or has changed.
    """
    check_whole(folder)
    task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    return DemoPair(
        target=AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval(),
        draft=DFlashDraftModel.from_pretrained(folder / "draft", dtype=torch.float32).eval(),
        tokenizer=AutoTokenizer.from_pretrained(folder / "target"),
        held_out=[Pair(*pair) for pair in task["held_out"]],
        facts=task["facts"],
    )


def obtain_pair(
    settings: DemoSettings, cache_dir: Path, fresh: bool = False, num_prompts: int = 1, say: Say = _logger.info
) -> DemoPair:
    """
    The pair of these settings, from the cache or trained now.

    Args:
        settings (`DemoSettings`): What to train.
        cache_dir (`Path`): Where pairs are kept.
        fresh (`bool`): Train even if there is one.
        num_prompts (`int`): Held-out lines that will be decoded.
        say: Called with a line for each stage.

    Raises:
        `ValueError`: fewer lines can be held out.
    """
    folder = cache_dir / settings.key
    if not fresh:
        try:
            pair = load_pair(folder)
            _check_enough(pair.held_out, num_prompts)
            say(f"pair      read from {folder} (--fresh trains another)")
            return pair
        except FileNotFoundError:
            pass
        except DamagedFolderError as error:
            say(f"pair      damaged, training it again: {error}")
    with whole_folder(folder) as building:
        train_pair(settings, building, num_prompts, say)
    say(f"pair      kept in {folder}")
    return load_pair(folder)


def _check_enough(held_out: list[Pair], num_prompts: int) -> None:
    if num_prompts > len(held_out):
        raise ValueError(f"prompts={num_prompts}, but only {len(held_out)} lines are held out; ask for fewer.")


# ----------------------------------------------------------------------------------------------------------- training


def train_pair(settings: DemoSettings, folder: Path, num_prompts: int, say: Say) -> None:
    """Stages 1 to 3; writes `target/` (with the tokenizer), `draft/` and `task.json` into `folder`."""
    # Not needed to run a cached pair, and slow to import.
    from dflash_hf.demo.training import fastest_threads, train_drafter, train_target

    clock = _Clock()
    with _bar("data") as bar:
        data = read_task(settings.train_pairs, _HELD_OUT, settings.seed, settings.source or None, progress=bar.over)
        _check_enough(data.held_out, num_prompts)
        tokenizer = train_tokenizer(data.train[:4000], settings.vocab_size)
        rows = encode_pairs(tokenizer, data.train)
    say(
        f"data      {len(rows):,} lines of {data.train_files} files to train on, {len(data.held_out)} new lines of "
        f"{data.held_out_files} other files held out ({clock.lap():.0f} s)"
    )

    with _bar("target", settings.target_steps, "loss") as bar, fastest_threads():
        target, steps = train_target(
            rows,
            tokenizer,
            settings.target_steps,
            settings.target_seconds,
            settings.seed,
            settings.hidden_size,
            settings.target_layers,
            settings.target_heads,
            settings.target_tokens_per_step,
            bar.show,
        )
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    facts = {"target_steps": steps, "target_seconds": clock.lap()}
    say(
        f"target    {target.num_parameters() / 1e6:.1f} M parameters, {settings.target_layers} layers: "
        f"{_steps(steps, settings.target_steps)}, loss {bar.figure:.3f} ({facts['target_seconds']:.0f} s)"
    )

    mask_token_id = tokenizer.convert_tokens_to_ids(MASK)
    if settings.self_generate:
        rows = _own_answers(target.eval(), rows, mask_token_id)
        say(f"answers   {len(rows):,} written by the target itself ({clock.lap():.0f} s)")
    bar = _bar("drafter", settings.draft_steps, "simulated tau")
    with bar, fastest_threads(), tempfile.TemporaryDirectory() as scratch:
        draft, steps = train_drafter(
            rows,
            target,
            mask_token_id,
            settings.draft_steps,
            settings.draft_seconds,
            settings.seed,
            scratch,
            settings.draft_layers,
            settings.block_size,
            list(settings.target_layer_ids),
            settings.draft_batch_size,
            settings.num_anchors,
            settings.loss_type,
            bar.show,
        )
    draft.save_pretrained(folder / "draft")
    facts.update(draft_steps=steps, draft_seconds=clock.lap())
    say(
        f"drafter   {draft.num_parameters() / 1e6:.1f} M parameters, {settings.draft_layers} layers, blocks of "
        f"{settings.block_size}: {_steps(steps, settings.draft_steps)} ({facts['draft_seconds']:.0f} s)"
    )
    task = {"held_out": data.held_out, "facts": facts}
    (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")


def _own_answers(target, rows, mask_token_id: int):
    from dflash_hf.target import generate_responses

    end = time.monotonic() + _SELF_GENERATED_SECONDS
    answered: list = []
    with _bar("answers") as bar:
        for start in bar.over(range(0, len(rows), 64)):
            prompts = [prompt for prompt, _ in rows[start : start + 64]]
            answers = generate_responses(target, prompts, _MAX_NEW_TOKENS, mask_token_id, batch_size=64)
            answered += zip(prompts, answers, strict=True)
            if time.monotonic() > end:
                break
    return answered


def _steps(done: int, planned: int) -> str:
    return f"{done} steps" if done == planned else f"{done} of {planned} steps, the time was up"


# ---------------------------------------------------------------------------------------------------------- comparing


def compare(pair: DemoPair, num_prompts: int, runs: int) -> EvalReport:
    """Stage 4, on held-out lines; rounds are compiled too where there is a C++ compiler."""
    chosen = pair.held_out[:num_prompts]
    prompts = [prompt for prompt, _ in encode_pairs(pair.tokenizer, chosen)]
    with _bar("compare") as bar:
        return evaluate(
            pair.target,
            pair.draft,
            prompts,
            max_new_tokens=_MAX_NEW_TOKENS,
            runs=runs,
            methods=[TARGET, DFLASH, *[COMPILED] * has_compiler(), PROMPT_LOOKUP],
            check=lambda i, answer: is_correct(chosen[i].code, decode_answer(pair.tokenizer, answer)),
            progress=bar.over,
        )


def has_compiler() -> bool:
    """Whether `torch.compile` can build kernels for this CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name)


def sample_of(pair: DemoPair, report: EvalReport) -> tuple[str, list[str], list[int]]:
    """A right answer of middling length and acceptance: its line, the texts of its tokens, its verifications."""
    indices = [i for i, right in enumerate(report.correct) if right] or list(range(report.num_prompts))
    indices = [i for i in indices if len(report.responses[i]) >= 60] or indices
    indices.sort(key=lambda i: len(report.responses[i]) / max(len(report.acceptance_lengths[i]), 1))
    index = indices[len(indices) // 2]
    answer = report.responses[index]
    if answer and answer[-1] == pair.tokenizer.eos_token_id:
        answer = answer[:-1]
    return pair.held_out[index].code, [pair.tokenizer.decode([i]) for i in answer], report.acceptance_lengths[index]


def run_demo(
    settings: DemoSettings,
    cache_dir: Path,
    fresh: bool = False,
    num_prompts: int = 40,
    runs: int = 2,
    color: bool = False,
    say: Say = _logger.info,
) -> EvalReport:
    """
    The whole demo. Trains on as many threads as help on this machine, and sets this process to one thread for the
    comparison: decoding models this small, two only contend.

    Args:
        settings (`DemoSettings`): The pair.
        cache_dir (`Path`): Where pairs, report and picture are kept.
        fresh (`bool`): Train even if there is a pair.
        num_prompts, runs (`int`): Held-out lines, and how often each is timed.
        color (`bool`): Colour the sample with ANSI codes.
        say: Called with each line of output.
    """
    threads = torch.get_num_threads()
    try:
        pair = obtain_pair(settings, cache_dir, fresh, num_prompts, say)
        torch.set_num_threads(1)
        say(f"compare   {num_prompts} held-out lines, greedy, fp32, one thread for every method, {runs} runs in turn")
        if not has_compiler():
            say("          (no C++ compiler here, so no compiled rounds)")
        report = compare(pair, num_prompts, runs)
    finally:
        torch.set_num_threads(threads)
    say("")
    for line in summary_lines(report):
        say(line)
    code, pieces, lengths = sample_of(pair, report)
    say("")
    say(
        f"{code}    ->    {len(pieces)} tokens in {len(lengths)} verifications; drafted and accepted: "
        + ("green" if color else "[in brackets]")
    )
    say(colored_answer(pieces, lengths, color))
    say("")
    report.setting.update(pair.facts)
    say(f"figures   {report.save(cache_dir / 'demo.json')}")
    try:
        factors = " / ".join(f"{report.methods[n].speedup:.2f}x" for n in (DFLASH, COMPILED) if n in report.methods)
        title = f"A line of Python to its syntax tree: {factors}, tau {report.tau:.2f}"
        say(f"picture   {plot_report(report, cache_dir / 'demo.png', title, (code, pieces, lengths))}")
    except ImportError as error:
        say(f"picture   none: {error}")
    return report


class _Clock:
    """Seconds since the last lap."""

    def __init__(self):
        self.last = time.monotonic()

    def lap(self) -> float:
        now = time.monotonic()
        seconds, self.last = now - self.last, now
        return seconds


class _bar:
    """A progress bar on a terminal, nothing elsewhere: over an iterable, or step by step with a running figure."""

    def __init__(self, name: str, total: int | None = None, figure_name: str = ""):
        self.name, self.total, self.figure_name, self.figure = name, total, figure_name, 0.0

    def __enter__(self):
        self.tqdm = None
        return self

    def __exit__(self, *exc):
        if self.tqdm is not None:
            self.tqdm.close()

    def over(self, iterable):
        self.tqdm = logging.tqdm(iterable, desc=self.name, disable=None, leave=False)
        return self.tqdm

    def show(self, step: int, figure: float) -> None:
        if self.tqdm is None:
            self.tqdm = logging.tqdm(total=self.total, desc=self.name, disable=None, leave=False)
        self.figure = figure
        self.tqdm.set_postfix({self.figure_name: f"{figure:.2f}"}, refresh=False)
        self.tqdm.update(1)
