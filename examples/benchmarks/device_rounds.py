"""
What a round asks of an accelerator: kernels, copies from and to the host, and waits of the host, by line of code.

    OMP_NUM_THREADS=1 python examples/benchmarks/device_rounds.py > examples/benchmarks/results/device_rounds.md

No accelerator is needed: a pretend one (`tests/support/pretend`) counts what a real one would be asked for. A random
pair with the layers of Qwen3-8B and its drafter, 36 + 5, and tiny widths; drafts are right in 88 of 100 slots. A round
is what happens from one forward of the target to the next. Figures are means of the second half of a call's rounds,
without the last two: they leave out what a call does once, and drafts that are short because the text ends. Every text
is compared with that of the target alone on the CPU.
"""

import argparse
import contextlib
import copy
import datetime
import functools
import platform
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from unittest import mock

import torch
import transformers
from other_loops import candidates_loop, cropping_loop, native_loop


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.calls import Collected
from support.pairs import VOCAB, make_draft, make_target
from support.pretend import Counts, PretendAccelerator

from dflash_hf import DFlashDecodingConfig
from dflash_hf.decoding.session import SlotSession
from dflash_hf.evaluation.scripted_draft import ScriptedDraft


ACCURACY = 0.88  # of the drafts, slot by slot
# What pretends to be a trained drafter is not counted.
UNCOUNTED = ("scripted_draft.py", "random_pairs.py", "device_rounds.py")
SEED = 7
SHOWN_LINES = 12  # of a mode, in the list of waits


@dataclass(frozen=True)
class Mode:
    """
    A way to decode.

    Args:
        decoding (`dict`, *optional*): Fields of the drafter's `decoding_config`; `None`: the target alone.
        is_block (`bool`): Whether every round verifies a whole block.
        head (`dict`): Fields of the drafter's configuration.
        is_sampled (`bool`): Whether tokens are sampled.
        rows (`int`): Prompts in the batch.
        is_streamed (`bool`): Whether a streamer follows.
        loop (`Callable`, *optional*): Another loop than the package's, of `other_loops.py`.
    """

    decoding: dict | None = field(default_factory=dict)
    is_block: bool = False
    head: dict = field(default_factory=dict)
    is_sampled: bool = False
    rows: int = 1
    is_streamed: bool = False
    loop: Callable | None = None


@dataclass(frozen=True)
class Shape:
    """Sizes of a pair, of its prompts, and of the text; and the models' dtype."""

    layers: int = 36
    draft_layers: int = 5
    block_size: int = 16
    prompt: int = 64
    tokens: int = 128
    dtype: str = "float32"


@dataclass
class Result:
    """
    What a mode asks for.

    Attributes:
        rounds (`int`): Rounds that were counted.
        tokens (`float`): Tokens that a round commits, of all rounds.
        counts ([`Counts`]): What the counted rounds ask for, all together.
        is_same_text (`bool`): Whether the text is that of the target alone on the CPU.
    """

    rounds: int
    tokens: float
    counts: Counts
    is_same_text: bool

    def per_round(self, kind: str) -> float:
        """Of one kind, the name of an attribute of [`Counts`]."""
        return sum(getattr(self.counts, kind).values()) / self.rounds


SELECTOR = {"selector_rank": 16, "selector_top_k": 8, "conv_kernel_size": 2, "conv_group_size": 8}
MARKOV = {"markov_rank": 16}
DOMINO = {"gru_hidden_dim": 16, "emb_dim": 16}


MODES = {
    "target alone": Mode(decoding=None),
    "target alone, sampled": Mode(decoding=None, is_sampled=True),
    "loop of z-lab's shape": Mode(loop=cropping_loop),
    'transformers\' own, `speculation_type="dflash"`': Mode(loop=native_loop),
    "transformers' loop, `DFlashCandidateGenerator`": Mode(loop=candidates_loop),
    "plain call": Mode(),
    "block": Mode(is_block=True),
    "tree of 63": Mode(decoding={"tree_nodes": 63}),
    "block, sampled": Mode(is_block=True, is_sampled=True),
    "plain call, sampled": Mode(is_sampled=True),
    "plain call, four rows": Mode(rows=4),
    "block, selector head": Mode(is_block=True, head=SELECTOR),
    "block, Markov head": Mode(is_block=True, head=MARKOV),
    "block, Domino head": Mode(is_block=True, head=DOMINO),
    "block, streamer": Mode(is_block=True, is_streamed=True),
    "plain call, CUDA graphs": Mode(decoding={"cuda_graphs": True}),
    "block, CUDA graphs": Mode(is_block=True, decoding={"cuda_graphs": True}),
    "tree of 63, CUDA graphs": Mode(decoding={"tree_nodes": 63, "cuda_graphs": True}),
    "block, sampled, CUDA graphs": Mode(is_block=True, is_sampled=True, decoding={"cuda_graphs": True}),
}


# ----------------------------------------------------------------------------------------------------------- measuring


def target_of(shape: Shape, device: str):
    """
    A random target on a device, the same on each; `cuda` inside of a pretend accelerator. Each mode has its own: some
    loops leave hooks on a target.
    """
    dtype = getattr(torch, shape.dtype)
    return make_target("qwen3", dtype, num_hidden_layers=shape.layers, max_position_embeddings=4096).to(device)


def oracle_of(mode: Mode, shape: Shape, texts: torch.LongTensor) -> ScriptedDraft:
    """
    A drafter that is right in `ACCURACY` of all slots, and as sure as it is right; in half of the others its second
    token is right.

    Args:
        mode ([`Mode`]), shape ([`Shape`]): Its settings, and its sizes.
        texts (`torch.LongTensor`): `[R, S]`, of the target.
    """
    draft = make_draft(
        target_of(shape, "cpu"),
        block_size=shape.block_size,
        num_hidden_layers=shape.draft_layers,
        target_layer_ids=spread_layers(shape),
        **mode.head,
    )
    block_size = shape.block_size if mode.is_block else None
    draft.decoding_config = DFlashDecodingConfig(block_size=block_size, **mode.decoding)
    draws = torch.rand(texts.shape, generator=torch.Generator().manual_seed(SEED))
    is_wrong = draws >= ACCURACY
    is_wrong[:, : shape.prompt] = False
    first = torch.where(is_wrong, (texts + 1) % VOCAB, texts)
    second = torch.where(is_wrong & (draws < (1 + ACCURACY) / 2), texts, (texts + 2) % VOCAB)
    oracle = ScriptedDraft.of(draft, list(texts), list(torch.stack([first, second], dim=-1)), certainty=ACCURACY)
    oracle.is_certain_in_blocks = mode.is_block  # else sizes are chosen by how sure it is
    return oracle


class RoundMarks:
    """
    What has been counted whenever a forward of the target begins. One object serves a whole process, since a target is
    tried again where its forward is another function.

    Args:
        kind (`type`): A class of targets; or `SlotSession`, which also verifies where a graph replaces the forward.
        method (`str`): The name of the method that begins it.

    Attributes:
        counts (`list[Counts]`): For each forward, the counts before it.
    """

    def __init__(self, kind: type, method: str = "forward"):
        self.kind = kind
        self.method = method
        self.accelerator: PretendAccelerator | None = None
        self.counts: list[Counts] = []
        original = getattr(kind, method)

        @functools.wraps(original)
        def marked(instance, *args, **kwargs):
            if self.accelerator is not None:
                self.counts.append(self.accelerator.counts.copy())
            return original(instance, *args, **kwargs)

        self.marked = marked

    @contextlib.contextmanager
    def of(self, accelerator: PretendAccelerator):
        """Marks of the forwards that begin in this context."""
        self.accelerator = accelerator
        with mock.patch.object(self.kind, self.method, self.marked):
            yield self
        self.accelerator = None


@functools.cache
def round_marks(kind: type, method: str = "forward") -> RoundMarks:
    """The marks of a class of targets, or of [`SlotSession`]."""
    return RoundMarks(kind, method)


def measure(mode: Mode, shape: Shape) -> Result:
    """
    Decode on a pretend accelerator, after the same text was written by the target alone on the CPU.

    Args:
        mode ([`Mode`]): How.
        shape ([`Shape`]): The pair and the text.

    Raises:
        `RuntimeError`: hardly a draft was accepted, so that the rounds are not those of a drafter.
    """
    target = target_of(shape, "cpu")
    prompts = torch.randint(2, VOCAB - 2, (mode.rows, shape.prompt), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts), "do_sample": mode.is_sampled}
    inputs["pad_token_id"] = 0
    if mode.is_sampled:
        inputs |= {"temperature": 0.9, "top_k": 20, "top_p": 0.95}
    torch.manual_seed(SEED)
    script = target.generate(**inputs, max_new_tokens=shape.tokens + shape.block_size + 1)
    text = script[:, : shape.prompt + shape.tokens]
    inputs["max_new_tokens"] = shape.tokens
    if mode.loop is not cropping_loop:  # models have a token that ends a text; this one never says it
        inputs["eos_token_id"] = min(set(range(1, VOCAB - 1)) - set(script.flatten().tolist()))
    drafter = None if mode.decoding is None else oracle_of(mode, shape, script)

    with PretendAccelerator(uncounted=UNCOUNTED) as accelerator:
        target = target_of(shape, "cuda")
        inputs = {name: value.to("cuda") if torch.is_tensor(value) else value for name, value in inputs.items()}
        if drafter is not None:
            drafter = _on_device(drafter)
        has_graphs = bool(mode.decoding and mode.decoding.get("cuda_graphs"))
        begins = (SlotSession, "verify") if has_graphs else (type(target), "forward")
        with round_marks(*begins).of(accelerator) as marks:
            # The first call tries what the target supports. A copy of the drafter is none that it has learned about.
            decode(mode, target, copy.copy(drafter), {**inputs, "max_new_tokens": 2})
            marks.counts.clear()
            written = decode(mode, target, drafter, inputs)
        is_same_text = torch.equal(written.cpu(), text)
    rounds = len(marks.counts)
    if not has_graphs:
        rounds -= 1  # the first forward reads the prompt
    if drafter is not None and shape.tokens / rounds < 1.5:
        raise RuntimeError(f"{shape.tokens / rounds:.2f} tokens in a round: drafts are not accepted")
    first = len(marks.counts) - rounds + rounds // 2
    last = len(marks.counts) - 2
    return Result(
        last - first, (shape.tokens - 1) / rounds, marks.counts[last].since(marks.counts[first]), is_same_text
    )


def _on_device(drafter: ScriptedDraft) -> ScriptedDraft:
    """The drafter with its script, which does not move with the model."""
    drafter.to("cuda")
    for name in ("texts", "likely", "codes", "base", "log_odds"):
        setattr(drafter, name, getattr(drafter, name).to("cuda"))
    drafter.begin(drafter.texts[:1, :1])
    return drafter


def spread_layers(shape: Shape) -> list[int]:
    """The layers that a drafter reads, as many as it has, spread over the target's."""
    step = max((shape.layers - 3) // max(shape.draft_layers - 1, 1), 1)
    return [min(1 + step * i, shape.layers - 2) for i in range(shape.draft_layers)]


def decode(mode: Mode, target, drafter, inputs: dict) -> torch.LongTensor:
    """The text `[R, S]`."""
    torch.manual_seed(SEED)
    if mode.loop is not None:
        return mode.loop(target, drafter, inputs)
    if mode.is_streamed:
        inputs = {**inputs, "streamer": Collected()}
    return target.generate(**inputs, assistant_model=drafter)


# ------------------------------------------------------------------------------------------------------------ the file


def table_line(name: str, result: Result, kernels_alone: float) -> str:
    """A line of the table."""
    cells = [name, f"{result.tokens:.1f}"]
    cells += [f"{result.per_round(kind):.1f}" for kind in ("waits", "from_host", "to_host")]
    kernels = result.per_round("kernels")
    cells += [f"{kernels:.0f}", f"{kernels / kernels_alone:.2f}", "yes" if result.is_same_text else "NO"]
    return f"| {' | '.join(cells)} |"


def line_list(counter: Counter, rounds: int) -> str:
    """Lines of code with what they ask for in a round, the most first; rare ones are left out."""
    each = {line: count / rounds for line, count in counter.items() if count / rounds >= 0.05}
    lines = sorted(each, key=lambda line: (-each[line], line))
    shown = [f"{each[line]:.1f} {line}" for line in lines[:SHOWN_LINES]]
    if len(lines) > SHOWN_LINES:
        shown.append(f"{len(lines) - SHOWN_LINES} more")
    return ", ".join(shown) or "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), metavar="MODE")
    for size in fields(Shape):
        parser.add_argument(f"--{size.name.replace('_', '-')}", type=type(size.default), default=size.default)
    arguments = parser.parse_args()
    shape = Shape(**{size.name: getattr(arguments, size.name) for size in fields(Shape)})
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    results = {}
    for name in arguments.modes:
        results[name] = measure(MODES[name], shape)
        print(f"{name}: {results[name].rounds} rounds", file=sys.stderr, flush=True)

    alone = results.get("target alone") or measure(MODES["target alone"], shape)
    print("# What a round asks of an accelerator\n")
    print(
        f"Counted on a pretend accelerator, per round. {shape.layers} + {shape.draft_layers} layers of Qwen3's, tiny"
    )
    print(f"widths, {shape.dtype}, blocks of {shape.block_size}, a prompt of {shape.prompt} tokens; drafts right in")
    print(
        f"{ACCURACY:.0%} of slots; {shape.tokens} new tokens, means of the second half of the rounds. A copy that is"
    )
    print(
        "not asynchronous is a wait, too; a kernel is an operator that is no view, attention is one. No time, and no"
    )
    print("choice of kernels, is in these figures.\n")
    print("```\nOMP_NUM_THREADS=1 python examples/benchmarks/device_rounds.py > \\")
    print("    examples/benchmarks/results/device_rounds.md\n```\n")
    print(f"{datetime.date.today()}, transformers {transformers.__version__}, torch {torch.__version__},")
    print(f"{platform.machine()}.\n")
    print("| | tokens | waits | copies from the host | to the host | kernels | of the target alone | same text |")
    print("|---|---|---|---|---|---|---|---|")
    for name, result in results.items():
        print(table_line(name, result, alone.per_round("kernels")))
    print("\n## Waits by line\n")
    for name, result in results.items():
        print(f"- {name}: {line_list(result.counts.waits, result.rounds)}")
    print("\n## Kernels by file\n")
    for name, result in results.items():
        by_file: Counter = Counter()
        for line, count in result.counts.kernels.items():
            by_file[line.rpartition(":")[0]] += count
        print(f"- {name}: {line_list(by_file, result.rounds)}")


if __name__ == "__main__":
    main()
