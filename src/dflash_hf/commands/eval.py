"""
`dflash eval`: measure acceptance, speedup and losslessness of a pair.

    dflash eval --target Qwen/Qwen3-0.6B --draft my-drafter --data prompts.txt --output my-drafter
    dflash eval --target Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16 --data gsm8k --output gsm8k
    dflash eval --compare before/eval_report.json after/eval_report.json
    dflash eval --server http://127.0.0.1:8000 --data math500 --concurrency 8
    dflash eval --pretend-tau 3.5 --target Qwen/Qwen3-0.6B
"""

import json
from pathlib import Path

from dflash_hf._io.argument_types import amount, output_folder, positive, readable_file
from dflash_hf._io.errors import UsageError
from dflash_hf._io.names import dtype_name
from dflash_hf._io.progress import bar
from dflash_hf._io.terminal import Outcome, note
from dflash_hf.commands import shared
from dflash_hf.commands.eval_server import add_server_arguments, run_server
from dflash_hf.commands.pair import NamedPair
from dflash_hf.evaluation.methods import TREE_NODES, methods_of_eval
from dflash_hf.evaluation.sets import GENERATED, NAMED, NEW_TOKENS, set_name


# With `--pretend-tau`, what is decoded unless given: a script decides what is accepted, so a few texts are enough.
PRETEND_DATA = "arithmetic"
PRETEND_PROMPTS = 2
PRETEND_NEW_TOKENS = 128


def add_arguments(parser) -> None:
    shared.add_pair(parser)
    sets = f"benchmark ({', '.join(NAMED)}) or generated set ({', '.join(GENERATED)})"
    parser.add_argument(
        "--data", help=f"prompts: a file, Hub dataset, {sets}; NAME=FILE: a benchmark's rows in a file"
    )
    parser.add_argument("--split", help="split of the dataset (default: train, or the only one)")
    parser.add_argument("--prompts", type=positive, help="number of prompts (default: the benchmark's, else 40)")
    parser.add_argument("--runs", type=positive, default=3, help="timed repetitions (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=positive, help="longest answer (default: 256, for benchmarks 2048)")
    parser.add_argument("--raw", action="store_true", help="use prompts that are text without the chat template")
    shared.add_template_arguments(parser)
    thinking = "the chat template's enable_thinking (default: off for benchmarks, else --template-args)"
    parser.add_argument("--thinking", action="store_true", help=thinking)
    parser.add_argument("--prompt-lookup", action="store_true", help="also time transformers' prompt lookup")
    heads = "also time transformers' multi-token prediction, of a target that has heads for it"
    parser.add_argument("--mtp", action="store_true", help=heads)
    shared.add_threads(parser)
    parser.add_argument("--compare", nargs=2, type=readable_file, metavar="REPORT", help="two reports, side by side")
    pretend = "no drafter: what one with this acceptance length would bring; of --draft only its config.json is read"
    parser.add_argument("--pretend-tau", type=amount, help=pretend)
    lengths = "with --pretend-tau: lengths to which prompts are extended (default: as they are)"
    parser.add_argument("--context", type=positive, nargs="+", metavar="N", help=lengths)
    shared.add_sampling(parser)  # TEMPORARY
    add_server_arguments(parser)
    shared.add_output(parser, "for eval_report.json and .png; the drafter's folder for its model card", output_folder)
    shared.add_loading(parser)
    shared.add_speed(parser, "also time draft trees of N tokens")


def run(arguments, echo) -> Outcome:
    """`echo` the table and write the report; the exit status is 1 if an output is WRONG."""
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
    if arguments.pretend_tau is not None:
        return _pretend(arguments, echo)
    if arguments.context:
        raise UsageError("--context is for --pretend-tau: the prompts of a measurement stay as they are.")
    if arguments.compare:
        from dflash_hf.evaluation.compare import compare

        return Outcome(facts=compare(*arguments.compare, echo))
    missing = [f"--{name}" for name in ("target", "draft", "data") if getattr(arguments, name) is None]
    if missing:
        raise UsageError(f"Give {', '.join(missing)}, or two reports to --compare.")
    _check_output(arguments.output, Path(arguments.draft))
    from dflash_hf.evaluation.report_files import save_report
    from dflash_hf.evaluation.text import headline, summary_lines

    report = _measure(arguments)
    for line in summary_lines(report):
        echo(line)
    if arguments.output is not None:
        target_name = Path(arguments.target_name or arguments.target).name
        title = f"{target_name} + {Path(arguments.draft).name}\n{headline(report)}"
        for path in save_report(report, arguments.output, title):
            echo(f"written           {path}")
    return Outcome(1 if report.is_wrong else 0, json.loads(report.to_json()))


def _pretend(arguments, echo) -> Outcome:
    """`echo` what a drafter of this acceptance length would bring."""
    if arguments.target is None:
        raise UsageError("--pretend-tau needs --target, the model that a drafter would draft for.")
    names = ("compare", "prompt_lookup", "mtp", "output", "compile", "cuda_graphs", "tree_nodes")
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
        arguments.runs,
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


def _measure(arguments):
    """The report of evaluating the named pair on the named data."""
    from dflash_hf._io.files import digest_of
    from dflash_hf.evaluation.measure import evaluate
    from dflash_hf.evaluation.mtp import seconds_to_load_heads
    from dflash_hf.evaluation.prompts import prompts_of
    from dflash_hf.evaluation.sets import dataset_name, eval_rows
    from dflash_hf.pairs.packing_choice import should_pack

    pair = NamedPair(arguments)
    template = pair.template(_thinking_arguments(arguments, pair))
    encoder = pair.encoder(template)
    max_new_tokens = arguments.max_new_tokens or (256 if set_name(arguments.data) is None else NEW_TOKENS)
    # Prompts are read before anything large is loaded; only second turns need the target's answers.
    rows = eval_rows(arguments.data, arguments.prompts, arguments.split)
    prompts = None
    if not any(row.get("turns") for row in rows):
        prompts = prompts_of(rows, encoder, arguments.data, arguments.raw)
    draft = pair.draft()
    draft.decoding_config.tree_nodes = None  # trees are measured in addition to blocks, not instead
    target = pair.target()
    loading = {"mtp_loading_seconds": seconds_to_load_heads(target)} if arguments.mtp else {}
    packed = should_pack(arguments.packed, target, draft)
    methods = methods_of_eval(packed, bool(arguments.tree_nodes), arguments.prompt_lookup, arguments.mtp)
    if draft.dtype != target.dtype:
        draft_dtype = dtype_name(draft.dtype)
        target_dtype = dtype_name(target.dtype)
        note(
            f"the drafter is {draft_dtype}, its target {target_dtype}: --dtype sets one for both, bfloat16, or "
            "float32 on a processor without units for it"
        )
    if prompts is None:
        options = (target, max_new_tokens, bar("first turns"))
        prompts = prompts_of(rows, encoder, arguments.data, arguments.raw, *options)
    report = evaluate(
        target,
        draft,
        prompts,
        max_new_tokens=max_new_tokens,
        runs=arguments.runs,
        methods=methods,
        progress=bar("decoding"),
        tree_nodes=arguments.tree_nodes or TREE_NODES,
    )
    report.setting |= {"dataset": dataset_name(arguments.data), "chat_template_kwargs": template, **loading}
    report.setting["thinking"] = template.get("enable_thinking")  # None: the template decides, or has no such mode
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
