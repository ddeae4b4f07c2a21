"""
Every decoding method, ours and others', side by side in one run, and where the time of a round goes.

    python examples/benchmarks/side_by_side.py --shape 100m --forced-acceptance 6.5
    python examples/benchmarks/side_by_side.py --target T --draft D --data prompts.jsonl --reference CHECKOUT

The others are transformers' own `speculation_type="dflash"`, prompt lookup, a static cache, a small autoregressive
model and, from a checkout of z-lab/dflash, the published implementation in a separate process. `--shape` times random
weights of a given shape, drafted by an oracle that is right as often as a trained drafter would be, so that the shapes
of real models can be timed anywhere.
"""

import argparse
import contextlib
import gc
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from published import Reference
from random_pairs import SHAPES, native_oracle, oracle_text, random_pair
from transformers import AutoModel

from dflash_hf._io.argument_types import output_folder, positive
from dflash_hf._io.names import DTYPES
from dflash_hf.commands.pair import NamedPair
from dflash_hf.commands.shared import add_loading, add_output, add_pair, add_template_arguments, add_threads
from dflash_hf.conversion.convert import convert
from dflash_hf.decoding.packing import packed_weights
from dflash_hf.evaluation.forwards import Forwards, time_forwards
from dflash_hf.evaluation.measure import drafters_of_methods, evaluate, now
from dflash_hf.evaluation.methods import (
    DRAFT_TREES,
    DRAFTED,
    PLAIN_CALL,
    PROMPT_LOOKUP,
    TARGET_ALONE,
    TARGET_PACKED,
    TREE_NODES,
    WHOLE_BLOCKS,
    WHOLE_BLOCKS_COMPILED,
)
from dflash_hf.evaluation.plots import plot_report
from dflash_hf.evaluation.prompts import prompts_of
from dflash_hf.evaluation.report import EvalReport
from dflash_hf.evaluation.scripted_draft import ScriptedDraft, slot_accuracy
from dflash_hf.evaluation.sets import eval_rows
from dflash_hf.evaluation.text import summary_lines
from dflash_hf.pairs.devices import available_device
from dflash_hf.pairs.loading import Loading, load_draft, load_target
from dflash_hf.smollm2 import drafter_folder, smollm2_folder


NATIVE = "native"
REFERENCE = "reference"
STATIC = "target_static"
ASSISTANT = "assistant"
METHODS = (TARGET_ALONE, PLAIN_CALL, WHOLE_BLOCKS, DRAFT_TREES, WHOLE_BLOCKS_COMPILED, NATIVE, PROMPT_LOOKUP)
ON_CPU = (TARGET_ALONE, TARGET_PACKED, *METHODS[1:])  # the default there
ALL = (TARGET_ALONE, TARGET_PACKED, *DRAFTED, NATIVE, STATIC, PROMPT_LOOKUP)


@dataclass
class RoundReport:
    """
    Where the time of a round goes.

    Args:
        plain (`Forwards`): The bare forwards.
        packed (`Forwards`, *optional*): The same with packed weights, which our methods use, if the packed target was
            timed.
        rounds (`dict[str, float]`): Seconds of a whole round for each method that drafts; see `time_round`.
        tau (`float`): Tokens committed per verification.
    """

    plain: Forwards
    packed: Forwards | None
    rounds: dict[str, float]
    tau: float

    @property
    def own(self) -> Forwards:
        """The bare forwards with the weights that our methods use."""
        return self.packed or self.plain

    @property
    def overhead(self) -> dict[str, float]:
        """Time of a round relative to its two forwards."""
        return {name: seconds / (self.own.verify + self.own.draft) for name, seconds in self.rounds.items()}

    def attained(self, report: EvalReport) -> dict[str, float]:
        """Share of the speed-up that the bare forwards allow over the target alone with the same weights."""
        return {name: report.methods[name].gain / self.own.attainable(self.tau) for name in self.rounds}

    def lines(self, report: EvalReport) -> list[str]:
        lines = [self.plain.line(self.tau, packed=False)]
        lines += [] if self.packed is None else [self.packed.line(self.tau, packed=True)]
        for name, seconds in self.rounds.items():
            lines.append(f"round             {1e3 * seconds:.2f} ms {name}: {self.overhead[name]:.2f} of its forwards")
        reached = ", ".join(f"{share:.2f} {name}" for name, share in self.attained(report).items())
        lines.append(f"attained          of the attainable speed-up: {reached}")
        peers = [report.methods[name] for name in (NATIVE, REFERENCE) if name in report.methods]
        if peers:
            best = max(peer.speedup for peer in peers)
            ratios_of_methods = {
                name: method.speedup / best for name, method in report.methods.items() if name in DRAFTED
            }
            ratios = ", ".join(f"{ratio:.2f}x {name}" for name, ratio in ratios_of_methods.items())
            lines.append(f"over best peer    {ratios}{'' if self.packed is None else '; ours alone is packed'}")
        return lines


def bench(
    target,
    draft,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 128,
    runs: int = 5,
    methods: Sequence[str] = METHODS,
    forced_acceptance: float | None = None,
    reference: str | Path | None = None,
    reference_python: str | None = None,
    assistant=None,
    tree_nodes: int = TREE_NODES,
    peers_draft=None,
) -> tuple[EvalReport, RoundReport]:
    """
    Time a pair with every method, alternating, in one process (the reference in a separate process).

    Args:
        target, draft: The pair.
        prompts (`Sequence[Sequence[int]]`): Prompt ids.
        max_new_tokens (`int`): Longest answer.
        runs (`int`): Timed repetitions.
        methods (`Sequence[str]`): Those of [`~dflash_hf.evaluation.measure.evaluate`], and `"native"`, transformers'
            own `speculation_type="dflash"`, and `"target_static"`, the target with a static cache.
        forced_acceptance (`float`, *optional*): Tokens per verification that an oracle draft should reach.
        reference (path, *optional*): A checkout of z-lab/dflash to time as well.
        reference_python (`str`, *optional*): Its interpreter; default: this one.
        assistant (*optional*): A small autoregressive model to time as drafter as well.
        tree_nodes (`int`): Tokens of a draft tree.
        peers_draft (*optional*): A drafter without a head, for the others if they cannot read `draft`.

    Raises:
        `ValueError`: `forced_acceptance` is outside 1..block size.
    """
    size = draft.config.block_size
    texts = None
    drafter = draft
    if forced_acceptance is not None:
        texts = [oracle_text(target, prompt, max_new_tokens, size, forced_acceptance) for prompt in prompts]
        drafter = ScriptedDraft.of(draft, texts, certainty=slot_accuracy(forced_acceptance, size))
        drafter.is_certain_in_blocks = False  # the plain call chooses sizes by how sure the drafter is
    other_methods: dict = {STATIC: {"cache_implementation": "static"}} if STATIC in methods else {}
    if assistant is not None:
        other_methods[ASSISTANT] = {"assistant_model": assistant}
    their_draft = draft if peers_draft is None else peers_draft
    with tempfile.TemporaryDirectory() as scratch:
        if NATIVE in methods:
            try:
                folder = convert(_saved(their_draft, scratch), Path(scratch) / "native", to="native")
                native = AutoModel.from_pretrained(folder, dtype=draft.dtype).to(draft.device).eval()
                other_methods[NATIVE] = {"assistant_model": native, "speculation_type": "dflash"}
            except ValueError as error:
                print(f"native            left out: {error}")
        server = None
        if reference is not None:
            target.save_pretrained(Path(scratch) / "target")
            server = Reference(
                reference, scratch, _saved(their_draft, scratch), target, max_new_tokens, texts, reference_python
            )
            other_methods[REFERENCE] = server
        our_methods = [method for method in methods if method not in (NATIVE, STATIC)]
        try:
            with native_oracle(texts, prompts):
                report = evaluate(
                    target,
                    drafter,
                    prompts,
                    max_new_tokens,
                    runs,
                    our_methods,
                    other_methods=other_methods,
                    tree_nodes=tree_nodes,
                )
        finally:
            if server is not None:
                server.close()
    # The prompt with the longest answer, of which the rounds of the second half are timed.
    prompt, answer = max(zip(prompts, report.responses, strict=True), key=lambda pair: len(pair[1]))
    context = len(prompt) + 3 * len(answer) // 4
    drafters = {
        name: variant for name, variant in drafters_of_methods(drafter, tree_nodes).items() if name in report.methods
    }
    packed = TARGET_PACKED in methods
    rounds = _round_report(target, draft, drafters, prompt, len(answer), context, report.tau, packed)
    report.setting.update(
        forced_acceptance=forced_acceptance,
        target_parameters=sum(p.numel() for p in target.parameters()),
        draft_parameters=sum(p.numel() for p in draft.parameters()),
        context=context,
    )
    return report, rounds


def _round_report(
    target, draft, drafters: dict, prompt, max_new_tokens: int, context: int, tau: float, packed: bool
) -> RoundReport:
    forwards: dict[bool, list[Forwards]] = {False: [], **({True: []} if packed else {})}
    times: dict[str, list[float]] = {name: [] for name in drafters}
    gc.collect()
    for _ in range(7):  # in turn, since a machine's own speed drifts
        for packs, timed in forwards.items():
            with packed_weights(target, draft) if packs else contextlib.nullcontext():
                timed.append(time_forwards(target, draft, prompt, context))
        for name, drafter in drafters.items():
            times[name].append(time_round(target, drafter, prompt, max_new_tokens))
    medians = {
        packs: Forwards(*map(statistics.median, zip(*(vars(sample).values() for sample in timed), strict=True)))
        for packs, timed in forwards.items()
    }
    rounds = {name: statistics.median(seconds) for name, seconds in times.items()}
    return RoundReport(medians[False], medians.get(True), rounds, tau)


def _saved(draft, scratch) -> Path:
    folder = Path(scratch) / "draft"
    if not folder.exists():
        draft.save_pretrained(folder)
    return folder


def time_round(target, draft, prompt: Sequence[int], max_new_tokens: int) -> float:
    """
    Seconds per round: the extra time of a whole answer over half of it, divided by its extra rounds, so that the
    prompt and all one-time work of a call are excluded.
    """
    ids = torch.tensor([list(prompt)], device=target.device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "return_dict_in_generate": True}

    def call(tokens: int) -> tuple[float, int]:
        start = now(target.device)
        output = target.generate(ids, max_new_tokens=tokens, assistant_model=draft, **options)
        return now(target.device) - start, len(output.acceptance_lengths[0])

    seconds_of_half, rounds_of_half = call(max(max_new_tokens // 2, 1))
    seconds, rounds = call(max_new_tokens)
    return (seconds - seconds_of_half) / max(rounds - rounds_of_half, 1)


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, checked as far as that is possible without a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair(parser)
    parser.add_argument("--data", help="prompts: a .txt, .jsonl, .json, .parquet or .csv file, or a Hub dataset")
    add_template_arguments(parser)
    parser.add_argument("--prompts", type=positive, default=4, help="number of prompts (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=positive, default=128, help="longest answer (default: %(default)s)")
    parser.add_argument("--runs", type=positive, default=5, help="timed repetitions (default: %(default)s)")
    parser.add_argument(
        "--methods",
        metavar="A,B,...",
        help=f"{', '.join(ALL)} (default: {', '.join(ON_CPU)}; on a GPU without the packed target)",
    )
    parser.add_argument("--tree-nodes", type=positive, default=TREE_NODES, help="default: %(default)s")
    parser.add_argument("--assistant", help="also time a small autoregressive model as drafter")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of that shape, instead of a pair")
    parser.add_argument("--forced-acceptance", type=float, help="tokens per verification of an oracle draft")
    parser.add_argument("--reference", help="a checkout of z-lab/dflash to time as well")
    parser.add_argument("--reference-python", help="its interpreter; default: this one")
    parser.add_argument("--peers-draft", help="a drafter for the others, if they cannot read --draft")
    add_threads(parser)
    add_output(parser, "for bench.json, bench.md and bench.png", output_folder)
    add_loading(parser)
    parser.set_defaults(dtype="float32")
    arguments = parser.parse_args(argv)
    if (arguments.shape is None) == (arguments.target is None or arguments.draft is None or arguments.data is None):
        parser.error("give either --shape, or --target, --draft and --data")
    if arguments.shape is not None and arguments.forced_acceptance is None:
        parser.error(f"--shape {arguments.shape} has random weights: give --forced-acceptance TAU")
    if arguments.dtype == "auto":
        parser.error(f"--dtype auto: timings need a fixed dtype; choose {', '.join(DTYPES)}")
    arguments.methods = None if arguments.methods is None else arguments.methods.split(",")
    unknown = set(arguments.methods or ()) - set(ALL)
    if unknown:
        parser.error(f"--methods names {sorted(unknown)[0]}; choose from {', '.join(ALL)}")
    return arguments


def load(arguments) -> tuple:
    """Target, drafter and prompts; rows are read before anything large is loaded."""
    if arguments.shape is not None:
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        kind = getattr(torch, arguments.dtype)
        return random_pair(arguments.shape, kind, available_device(arguments.device), arguments.prompts)
    for name in ("target", "draft"):
        if getattr(arguments, name) == "smollm2":
            setattr(arguments, name, str(drafter_folder() if name == "draft" else smollm2_folder()))
    pair = NamedPair(arguments)
    rows = eval_rows(arguments.data, arguments.prompts)
    encoder = pair.encoder(pair.template())
    target = pair.target()
    draft = pair.draft()
    draft.decoding_config.tree_nodes = None  # trees are methods of their own
    asked = (rows, encoder, arguments.data)
    return target, draft, prompts_of(*asked, target=target, max_new_tokens=arguments.max_new_tokens)


def show(title: str, lines: list[str], facts: dict, report: EvalReport, output: Path | None) -> None:
    """Print the table, and write it to a folder with the plot."""
    setting = report.setting
    versions = f"torch {setting['torch']}, transformers {setting['transformers']}"
    lines = [f"{title}; {setting['hardware']}; {versions}", "", *lines]
    print("\n".join(lines))
    if output is None:
        return
    output.mkdir(parents=True, exist_ok=True)
    (output / "bench.md").write_text("```\n" + "\n".join(lines) + "\n```\n", encoding="utf-8")
    (output / "bench.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    try:
        plot_report(report, output / "bench.png", title)
    except ImportError as error:
        print(f"no plot: {error}")
    print(f"written to {output}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 if an output of ours is WRONG, see `divergence`."""
    arguments = arguments_of(argv)
    name = arguments.shape or arguments.target
    target, draft, prompts = load(arguments)
    assistant = None
    if arguments.assistant is not None:
        assistant = load_target(arguments.assistant, Loading(arguments.dtype), target.device)
    default = ON_CPU if target.device.type == "cpu" else METHODS
    peers_draft = None
    if arguments.peers_draft is not None:
        peers_draft = load_draft(arguments.peers_draft, Loading(arguments.dtype), target.device)
    report, rounds = bench(
        target,
        draft,
        prompts,
        arguments.max_new_tokens,
        arguments.runs,
        arguments.methods or default,
        arguments.forced_acceptance,
        arguments.reference,
        arguments.reference_python,
        assistant,
        arguments.tree_nodes,
        peers_draft,
    )
    forced = "" if arguments.forced_acceptance is None else f", FORCED acceptance {arguments.forced_acceptance}"
    setting = report.setting
    title = (
        f"{Path(name).name}, {arguments.dtype}, {setting['threads']} threads{forced}: target "
        f"{setting['target_parameters'] / 1e6:.1f} M, drafter {setting['draft_parameters'] / 1e6:.1f} M parameters"
    )
    facts = json.loads(report.to_json()) | {"round": {**asdict(rounds), "overhead": rounds.overhead}}
    show(title, summary_lines(report) + rounds.lines(report), facts, report, arguments.output)
    return int(report.is_wrong)


if __name__ == "__main__":
    raise SystemExit(main())
