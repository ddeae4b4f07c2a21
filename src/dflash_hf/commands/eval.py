"""
`dflash eval`: measure acceptance, speedup and losslessness of a pair.

    dflash eval --target Qwen/Qwen3-0.6B --draft my-drafter --data prompts.txt --output my-drafter
    accelerate launch -m dflash_hf.cli eval --target Qwen/Qwen3-4B --draft my-drafter --data gsm8k --output gsm8k
    dflash eval --target Qwen/Qwen3-4B --draft my-drafter --table paper --output table
    dflash eval --server http://127.0.0.1:8000 --data math500 --concurrency 8
"""

import argparse
import json
from itertools import chain
from pathlib import Path

from dflash_hf._io import argument_types
from dflash_hf._io.argument_types import amount, output_folder, positive, readable_file
from dflash_hf._io.errors import UsageError
from dflash_hf._io.names import dtype_name
from dflash_hf._io.progress import bar
from dflash_hf._io.terminal import Outcome, note
from dflash_hf.commands import shared
from dflash_hf.commands.eval_server import add_server_arguments, run_server
from dflash_hf.commands.eval_table import add_table_arguments, run_table
from dflash_hf.commands.pair import NamedPair
from dflash_hf.evaluation.methods import PLAIN_CALL, TREE_NODES, methods_of_eval
from dflash_hf.evaluation.sets import GENERATED, NAMED, NEW_TOKENS, set_name, without_set_name


RUNS = 3
RESUME_HINT = "run the same command again; with --output, a pair goes on behind the prompts that it has decoded"
# With `--pretend-tau`, what is decoded unless given: a script decides what is accepted, so a few texts are enough.
PRETEND_DATA = "arithmetic"
PRETEND_PROMPTS = 2
PRETEND_NEW_TOKENS = 128


def add_arguments(parser) -> None:
    shared.add_pair(parser)
    data = f"file, Hub dataset, {', '.join([*GENERATED, *NAMED])}; NAME=FILE: a set's rows"
    parser.add_argument("--data", help=data)
    parser.add_argument("--split", help="split of the dataset (default: train, or the only one)")
    parser.add_argument("--prompts", type=positive, help="number of prompts (default: the benchmark's, else 40)")
    runs = f"timed repetitions (default: {RUNS}; of a table 1)"
    parser.add_argument("--runs", type=positive, help=runs)
    parser.add_argument("--max-new-tokens", type=positive, help="longest answer (default: 256, for benchmarks 2048)")
    temperature = "of samples, whose seed is --seed N; 0 is greedy (default: %(default)s)"
    parser.add_argument("--temperature", type=argument_types.temperature, default=0.0, help=temperature)
    parser.add_argument("--seed", type=argument_types.seed, default=0, help=argparse.SUPPRESS)
    block_size = "tokens of a whole block, at most the trained block size (default: that)"
    parser.add_argument("--block-size", type=positive, metavar="N", help=block_size)
    parser.add_argument("--raw", action="store_true", help="use prompts that are text without the chat template")
    shared.add_template_arguments(parser)
    thinking = "turn the template's thinking mode on (default: off for benchmarks)"
    parser.add_argument("--thinking", action="store_true", help=thinking)
    parser.add_argument("--prompt-lookup", action="store_true", help="also time transformers' prompt lookup")
    heads = "also time multi-token prediction, of a target with heads for it"
    parser.add_argument("--mtp", action="store_true", help=heads)
    shared.add_threads(parser)
    compare = "two reports or tables, side by side"
    parser.add_argument("--compare", nargs=2, type=readable_file, metavar="REPORT", help=compare)
    pretend = "what a drafter of this tau would bring; --context N: longer prompts"
    parser.add_argument("--pretend-tau", type=amount, help=pretend)
    parser.add_argument("--context", type=positive, nargs="+", metavar="N", help=argparse.SUPPRESS)
    add_table_arguments(parser)
    add_server_arguments(parser)
    shared.add_output(parser, "for eval_report.json and .png; the drafter's folder for its model card", output_folder)
    shared.add_loading(parser)
    shared.add_speed(parser, "also time draft trees of N tokens")


def run(arguments, echo) -> Outcome:
    """`echo` the table and write the report; the exit status is 1 if an output is WRONG."""
    if arguments.data is not None:
        from dflash_hf.data.sources import check_files

        check_files("data", without_set_name(arguments.data))
    is_named = arguments.data is not None and (set_name(arguments.data) or arguments.data in GENERATED)
    if arguments.split is not None and is_named:
        raise UsageError(f"--split {arguments.split}: --data {arguments.data} has a split of its own; leave it out.")
    if arguments.mtp and arguments.revision:
        raise UsageError(
            "--mtp --revision: transformers loads heads of the newest revision; give a folder as --target."
        )
    if arguments.thinking and arguments.template_args:
        raise UsageError("--thinking and --template-args both set the template's arguments; give one of them.")
    if arguments.server is not None:
        return run_server(arguments, echo)
    if arguments.concurrency > 1:
        raise UsageError("--concurrency is for --server; prompts of a local pair are decoded one at a time.")
    if arguments.pretend_tau is not None:
        return _pretend(arguments, echo)
    if arguments.context:
        raise UsageError("--context is for --pretend-tau: the prompts of a measurement stay as they are.")
    if arguments.compare:
        from dflash_hf.evaluation.compare import compare
        from dflash_hf.evaluation.paper_table import compare_tables, is_table

        compare_files = compare_tables if any(map(is_table, arguments.compare)) else compare
        return Outcome(facts=compare_files(*arguments.compare, echo))
    if arguments.table is not None:
        return _table(arguments, echo)
    if arguments.sets:
        raise UsageError("--sets is for --table; --data names the prompts of a single measurement.")
    missing = [f"--{name}" for name in ("target", "draft", "data") if getattr(arguments, name) is None]
    if missing:
        raise UsageError(f"Give {', '.join(missing)}, or two reports to --compare.")
    _check_output(arguments.output, Path(arguments.draft))
    from dflash_hf.evaluation.ranks import device_of_rank, launched_ranks
    from dflash_hf.evaluation.text import summary_lines

    with launched_ranks() as ranks:
        arguments.device = device_of_rank(arguments.device)
        report = _measure(arguments, ranks, NamedPair(arguments))
    if not ranks.is_main:
        arguments.json = False  # the main process prints the result
        return Outcome(1 if report.is_wrong else 0)
    for line in summary_lines(report):
        echo(line)
    if arguments.output is not None:
        for path in _save(report, arguments):
            echo(f"written           {path}")
    return Outcome(1 if report.is_wrong else 0, json.loads(report.to_json()))


def _table(arguments, echo) -> Outcome:
    """`echo` the paper's table, of sets that are measured one after the other."""
    from dflash_hf.evaluation.ranks import device_of_rank, launched_ranks

    def measure(arguments_of_set, pair, ranks):
        report = _measure(arguments_of_set, ranks, pair)
        if ranks.is_main:
            _save(report, arguments_of_set)
        return report

    if arguments.draft is not None:
        _check_output(arguments.output, Path(arguments.draft))
    with launched_ranks() as ranks:
        arguments.device = device_of_rank(arguments.device)
        outcome = run_table(arguments, ranks, echo, measure)
    if not ranks.is_main:
        arguments.json = False  # the main process prints the result
    return outcome


def _pretend(arguments, echo) -> Outcome:
    """`echo` what a drafter of this acceptance length would bring."""
    if arguments.target is None:
        raise UsageError("--pretend-tau needs --target, the model that a drafter would draft for.")
    names = ["compare", "prompt_lookup", "mtp", "output", "compile", "cuda_graphs", "tree_nodes"]
    names += ["temperature", "block_size"]
    useless = shared.options_given(arguments, names)
    if useless:
        raise UsageError(
            f"--pretend-tau with {', '.join(useless)}: it times the target alone, whole blocks and default settings, "
            "and writes no report of a drafter; leave it out."
        )
    if arguments.draft is None and arguments.draft_revision:
        raise UsageError(f"--draft-revision {arguments.draft_revision} needs --draft.")
    from dflash_hf.evaluation.pretended import PAPER_BLOCK_SIZE, pretend, random_draft
    from dflash_hf.evaluation.prompts import prompts_of
    from dflash_hf.evaluation.sets import dataset_name, eval_rows
    from dflash_hf.evaluation.text import pretend_lines
    from dflash_hf.pairs.packing_choice import pack_if_chosen

    pair = NamedPair(arguments)
    block_size = PAPER_BLOCK_SIZE if pair.draft_config is None else pair.draft_config.max_block_tokens
    if not 1 <= arguments.pretend_tau <= block_size:
        raise UsageError(
            f"--pretend-tau {arguments.pretend_tau:g} must be between 1, nothing accepted, and {block_size}, the "
            "tokens of a block: tau counts the target's own token, too."
        )
    data = arguments.data or PRETEND_DATA
    rows = eval_rows(data, arguments.prompts or PRETEND_PROMPTS, arguments.split)
    encoder = pair.encoder(pair.template())
    max_new_tokens = arguments.max_new_tokens or PRETEND_NEW_TOKENS
    target = pair.target()
    prompts = prompts_of(rows, encoder, data, arguments.raw, target, max_new_tokens)
    draft = random_draft(target, pair.draft_config)
    packed = pack_if_chosen(arguments.packed, target, draft)
    report = pretend(
        target,
        draft,
        prompts,
        arguments.pretend_tau,
        max_new_tokens,
        arguments.runs or RUNS,
        arguments.context or (),
        bar("decoding"),
    )
    report.setting |= {
        "target": arguments.target_name or arguments.target,
        "draft": None if arguments.draft is None else Path(arguments.draft).name,
        "packed": packed,
        "dataset": dataset_name(data),
    }
    for line in pretend_lines(report):
        echo(line)
    return Outcome(facts=json.loads(report.to_json()))


def _check_output(output: Path | None, draft: Path) -> None:
    """Reject the folder of another drafter, whose card would show the report; a `draft` may also be a Hub name."""
    if output is None or not any(output.glob("model*.safetensors*")):  # one file, or shards
        return
    if not draft.is_dir() or not output.samefile(draft):
        raise UsageError(f"--output {output} holds another model than --draft {draft}, and its card would show this.")


def _save(report, arguments) -> list[Path]:
    """Write a report into `--output`; returns the files."""
    from dflash_hf.evaluation.report_files import save_report
    from dflash_hf.evaluation.text import headline

    target_name = Path(arguments.target_name or arguments.target).name
    title = f"{target_name} + {Path(arguments.draft).name}\n{headline(report)}"
    return save_report(report, arguments.output, title)


def _measure(arguments, ranks, pair: NamedPair):
    """The report of evaluating a pair on the named data, by all processes together."""
    from dflash_hf._io.files import digest_of
    from dflash_hf.evaluation.measure import evaluate
    from dflash_hf.evaluation.mtp import seconds_to_load_heads
    from dflash_hf.evaluation.prompts import prompts_of
    from dflash_hf.evaluation.sets import dataset_name, eval_rows
    from dflash_hf.pairs.packing_choice import should_pack

    template = pair.template(_thinking_arguments(arguments, pair))
    encoder = pair.encoder(template)
    max_new_tokens = arguments.max_new_tokens or (256 if set_name(arguments.data) is None else NEW_TOKENS)
    # Prompts are read before anything large is loaded; only second turns need the target's answers.
    rows = eval_rows(arguments.data, arguments.prompts, arguments.split)
    prompts = None
    if not any(len(row.get("turns") or ()) > 1 for row in rows):
        prompts = prompts_of(rows, encoder, arguments.data, arguments.raw)
    draft = pair.draft()
    draft.decoding_config.tree_nodes = None  # trees are measured in addition to blocks, not instead
    target = pair.target()
    loading = {"mtp_loading_seconds": seconds_to_load_heads(target)} if arguments.mtp else {}
    packed = should_pack(arguments.packed, target, draft)
    methods = methods_of_eval(packed, bool(arguments.tree_nodes), arguments.prompt_lookup, arguments.mtp)
    if arguments.table is not None:
        methods.remove(PLAIN_CALL)  # the paper has whole blocks alone
    if draft.dtype != target.dtype:
        draft_dtype = dtype_name(draft.dtype)
        target_dtype = dtype_name(target.dtype)
        note(
            f"the drafter is {draft_dtype}, its target {target_dtype}: --dtype sets one for both, bfloat16, or "
            "float32 on a processor without hardware support for it"
        )
    if prompts is None:  # each process decodes the first turns of its rows
        own_rows = ranks.share(rows)
        progress = bar("first turns") if ranks.is_main else iter
        options = (target, max_new_tokens, progress, arguments.temperature)
        own_prompts = iter(prompts_of(own_rows, encoder, arguments.data, arguments.raw, *options))
        by_row = [[next(own_prompts) for _ in row.get("turns") or [None]] for row in own_rows]
        prompts = list(chain.from_iterable(ranks.collect(by_row, len(rows))))
    report = evaluate(
        target,
        draft,
        prompts,
        max_new_tokens=max_new_tokens,
        runs=arguments.runs or RUNS,
        methods=methods,
        progress=bar("decoding") if ranks.is_main else iter,
        tree_nodes=arguments.tree_nodes or TREE_NODES,
        block_size=arguments.block_size,
        temperature=arguments.temperature,
        seed=arguments.seed,
        ranks=ranks,
        progress_folder=arguments.output,
    )
    report.setting |= {"dataset": dataset_name(arguments.data), "chat_template_kwargs": template, **loading}
    report.setting |= {
        "rows": len(rows),
        "thinking": template.get("enable_thinking"),  # None: the template decides, or has no such mode
        "attention": target.config._attn_implementation,
    }
    report.setting["prompts_digest"] = digest_of([list(prompt) for prompt in prompts])
    return report


def _thinking_arguments(arguments, pair: NamedPair) -> dict | None:
    """
    Template arguments that turn thinking on if `--thinking` asks for it, and off for benchmarks unless the drafter was
    trained with arguments, as in published results.

    Raises:
        `UsageError`: the template has no thinking mode.
    """
    may_think = "enable_thinking" in str(pair.tokenizer.chat_template)
    if arguments.thinking and not may_think:
        raise UsageError("--thinking: the chat template of this target has no `enable_thinking`; leave it out.")
    if arguments.thinking:
        return {"enable_thinking": True}
    trained_with = (pair.draft_config.dflash_config or {}).get("chat_template_kwargs")
    is_published = set_name(arguments.data) is not None and trained_with is None
    return {"enable_thinking": False} if is_published and may_think else None
