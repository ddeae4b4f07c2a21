"""`dflash bench`: every decoding method of a pair, side by side in one run."""

import json
from pathlib import Path

from dflash_hf.commands.pair import NamedPair
from dflash_hf.commands.shared import add_examples, add_loading, add_output, add_pair, add_threads
from dflash_hf.evaluation import methods as ways
from dflash_hf.names import DTYPES
from dflash_hf.terminal import (
    Outcome,
    UsageError,
    add_template_arguments,
    note,
    output_folder,
    positive,
)


def add_arguments(parser) -> None:
    add_pair(parser, required=True)
    parser.add_argument(
        "--data", required=True, help="prompts: a .txt, .jsonl, .json, .parquet or .csv file, or a Hub dataset"
    )
    add_template_arguments(parser)
    parser.add_argument("--prompts", type=positive, default=4, help="number of prompts (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=positive, default=128, help="longest answer (default: %(default)s)")
    parser.add_argument("--runs", type=positive, default=5, help="timed repetitions (default: %(default)s)")
    parser.add_argument(
        "--methods",
        metavar="A,B,...",
        help=f"{', '.join(ways.BENCH)} (default: {', '.join(ways.BENCH_ON_CPU)}; on a GPU without the packed ones)",
    )
    parser.add_argument(
        "--tree-nodes", type=positive, default=ways.TREE_NODES, help="tokens of a draft tree (default: %(default)s)"
    )
    parser.add_argument("--assistant", help="also time a small autoregressive model as drafter")
    add_threads(parser)
    add_output(parser, "for bench.json, bench.md and bench.png", output_folder)
    add_loading(parser)
    parser.set_defaults(dtype="float32")
    add_examples(
        parser,
        "dflash bench --target Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --data prompts.jsonl --dtype bf16",
        "dflash bench --target smollm2 --draft smollm2 --data prompts.txt --methods target,dflash,dflash_tree",
    )


def run(arguments, echo) -> Outcome:
    """`echo` the table, write it; exit status 1 if an output of ours is WRONG, see `divergence`."""
    methods = None if arguments.methods is None else arguments.methods.split(",")
    if unknown := set(methods or ()) - set(ways.BENCH):
        raise UsageError(
            f"--methods {arguments.methods} names {sorted(unknown)[0]}; choose from {', '.join(ways.BENCH)}."
        )
    if arguments.dtype == "auto":
        raise UsageError(f"--dtype auto: timings need a fixed dtype; choose {', '.join(DTYPES)}.")
    import contextlib
    from dataclasses import asdict

    from dflash_hf.evaluation.forwards import time_forwards
    from dflash_hf.evaluation.measure import evaluate
    from dflash_hf.evaluation.text import summary_lines
    from dflash_hf.packed_linear import packed_weights
    from dflash_hf.pairs import Loading, load_target

    target, draft, prompts = load(arguments)
    methods = methods or (ways.BENCH_ON_CPU if target.device.type == "cpu" else ways.BENCH_ELSEWHERE)
    others = {ways.STATIC: {"cache_implementation": "static"}} if ways.STATIC in methods else {}
    if arguments.assistant is not None:
        others[ways.ASSISTANT] = {
            "assistant_model": load_target(arguments.assistant, Loading(arguments.dtype), target.device)
        }
    report = evaluate(
        target,
        draft,
        prompts,
        arguments.max_new_tokens,
        arguments.runs,
        [name for name in methods if name not in others],
        others=others,
        tree_nodes=arguments.tree_nodes,
    )
    # Bare forwards at three quarters of the longest answer.
    prompt, answer = max(zip(prompts, report.responses, strict=True), key=lambda pair: len(pair[1]))
    context, forwards = len(prompt) + 3 * len(answer) // 4, {}
    for packed in (False, True):
        if not packed or ways.PACKED_METHODS & set(methods):
            with packed_weights(target, draft) if packed else contextlib.nullcontext():
                forwards[packed] = time_forwards(target, draft, prompt, context)
    lines = summary_lines(report) + [timed.line(report.tau, packed) for packed, timed in forwards.items()]
    title = f"{Path(arguments.target).name}, {arguments.dtype}, {report.setting['threads']} threads"
    facts = json.loads(report.to_json())
    facts["forwards"] = {"packed" if packed else "plain": asdict(timed) for packed, timed in forwards.items()}
    show(title, lines, facts, report, arguments.output, echo)
    return Outcome(1 if report.is_wrong else 0, facts)


def load(arguments) -> tuple:
    """Target, drafter and prompts; prompts are read before anything large is loaded."""
    from dflash_hf.evaluation.prompts import read_prompts

    pair = NamedPair(arguments, note)
    prompts = read_prompts(arguments.data, pair.encoder(pair.template()), arguments.prompts)
    return pair.target(), pair.draft_as_saved(), [list(prompt) for prompt in prompts]


def show(title: str, lines: list[str], facts: dict, report, output: Path | None, echo) -> None:
    """Print the table, and write it to a folder with the plot."""
    setting = report.setting
    versions = f"torch {setting['torch']}, transformers {setting['transformers']}"
    lines = [f"{title}; {setting['hardware']}; {versions}", "", *lines]
    for line in lines:
        echo(line)
    if output is None:
        return
    output.mkdir(parents=True, exist_ok=True)
    (output / "bench.md").write_text("```\n" + "\n".join(lines) + "\n```\n", encoding="utf-8")
    (output / "bench.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    try:
        from dflash_hf.evaluation.plots import plot_report

        plot_report(report, output / "bench.png", title)
    except ImportError as error:
        echo(f"no plot: {error}")
    echo(f"written to {output}")
