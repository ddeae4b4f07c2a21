"""`dflash eval`."""

import json
from pathlib import Path

from dflash_hf.commands.pair import NamedPair
from dflash_hf.commands.shared import add_examples, add_loading, add_output, add_speed
from dflash_hf.evaluation.methods import (
    AUTO,
    AUTO_PACKED,
    DFLASH,
    PACKED,
    PROMPT_LOOKUP,
    TARGET,
    TARGET_PACKED,
    TREE,
    TREE_NODES,
    TREE_PACKED,
)
from dflash_hf.evaluation.sets import GENERATED, NAMED, NEW_TOKENS
from dflash_hf.terminal import (
    Outcome,
    UsageError,
    add_template_arguments,
    note,
    output_folder,
    positive,
    readable_file,
)


AGAIN = "with --output, the same command goes on with the answers that are missing"
NO_THINKING = {"enable_thinking": False}  # as the field measures, where nothing else is said


def add_arguments(parser) -> None:
    parser.add_argument("--target", help="folder or Hub name of the target")
    parser.add_argument("--draft", help="folder or Hub name of its drafter")
    parser.add_argument(
        "--dataset",
        help=f"{', '.join(NAMED)}, prompted as the field does; {', '.join(GENERATED)}, made by rule; or as --data",
    )
    parser.add_argument("--server", metavar="URL", help="measure a running server's drafts, in place of a pair's here")
    parser.add_argument(
        "--alone", metavar="URL", help="with --server: one that serves the same target without a drafter"
    )
    parser.add_argument("--data", help="prompts: .jsonl, .json, .parquet, .csv, .txt, or a Hub dataset")
    parser.add_argument("--split", help="default: train, or the only one")
    parser.add_argument("--prompts", type=positive, help="so many; default: the field's number for the set, else 40")
    parser.add_argument("--runs", type=positive, default=3, help="timed repetitions; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=positive, help="default: 2048 for the field's sets, else 256")
    parser.add_argument("--raw", action="store_true", help="feed text as it is, without the chat template")
    add_template_arguments(parser)
    parser.add_argument("--prompt-lookup", action="store_true", help="also decode with transformers' prompt lookup")
    parser.add_argument("--threads", type=positive, help="CPU threads of this process; default: as torch chooses")
    parser.add_argument(
        "--compare", nargs=2, type=readable_file, metavar="REPORT", help="show two reports side by side, and no more"
    )
    what = "write eval_report.json and eval_report.png into this folder; in the drafter's its card shows them"
    add_output(parser, what, output_folder)
    add_loading(parser)
    add_speed(
        parser,
        "also decode with packed weights, alone and drafted (CPU)",
        "also decode with draft trees of so many tokens",
    )
    add_examples(
        parser,
        "dflash eval --target Qwen/Qwen3-0.6B --draft my-drafter --data prompts.txt --output my-drafter",
        "dflash eval --target Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16 --dataset gsm8k --output gsm8k",
        "dflash eval --server http://127.0.0.1:8080 --data prompts.txt --output on-llama-cpp",
        "dflash eval --compare before/eval_report.json after/eval_report.json",
        after=AGAIN,
    )


def run(arguments, echo) -> Outcome:
    """`echo` the table, write the report; 1 when an output is WRONG."""
    if arguments.server is not None:
        from dflash_hf.evaluation.server import run as measure_server

        return measure_server(arguments, echo)
    if arguments.alone is not None:
        raise UsageError("--alone is compared with --server; name both.")
    if arguments.compare:
        from dflash_hf.evaluation.compare import compare

        return Outcome(facts=compare(*arguments.compare, echo))
    missing = [f"--{name}" for name in ("target", "draft") if getattr(arguments, name) is None]
    if missing or (arguments.data is None) == (arguments.dataset is None):
        raise UsageError(f"Give {', '.join(missing) or 'either --dataset or --data'}, or two reports to --compare.")
    if arguments.dataset not in (None, *NAMED, *GENERATED):
        arguments.data, arguments.dataset = arguments.dataset, None
    from dflash_hf.evaluation.journal import JOURNAL_FILE
    from dflash_hf.evaluation.report import save_report
    from dflash_hf.evaluation.text import summary_lines

    report = _measure(arguments)
    for line in summary_lines(report):
        echo(line)
    if arguments.output is not None:
        title = f"{report.methods[DFLASH].speedup:.2f}x, tau {report.tau:.2f}"
        for path in save_report(report, arguments.output, title):
            echo(f"written           {path}")
        (arguments.output / JOURNAL_FILE).unlink(missing_ok=True)
    return Outcome(1 if report.is_wrong else 0, json.loads(report.to_json()))


def _measure(arguments):
    from transformers.utils import logging

    from dflash_hf.evaluation.journal import JOURNAL_FILE, Journal
    from dflash_hf.evaluation.measure import evaluate
    from dflash_hf.evaluation.prompts import prompts_of_conversations, read_prompts, turns_of_file
    from dflash_hf.evaluation.sets import conversations
    from dflash_hf.files import digest_of

    pair = NamedPair(arguments, note)
    kwargs = pair.template(_no_thinking(arguments, pair))
    encoder = pair.encoder(kwargs)
    named = NAMED.get(arguments.dataset)
    max_new_tokens = arguments.max_new_tokens or (NEW_TOKENS if named else 256)
    methods = [
        *([TARGET, TARGET_PACKED, DFLASH, PACKED, AUTO, AUTO_PACKED] if arguments.packed else [TARGET, DFLASH, AUTO]),
        *(([TREE, TREE_PACKED] if arguments.packed else [TREE]) if arguments.tree_nodes else []),
        *([PROMPT_LOOKUP] if arguments.prompt_lookup else []),
    ]
    # What is asked is read before anything large is loaded.
    prompts = said = None
    if arguments.dataset is None:
        local = Path(arguments.data).expanduser()
        repository, limit = local.name if local.exists() else arguments.data, arguments.prompts or 40
        said = turns_of_file(arguments.data, limit, arguments.split)
        if said is None:
            prompts = read_prompts(arguments.data, encoder, limit, arguments.split, arguments.raw)
    else:
        said, repository = conversations(arguments.dataset, arguments.prompts)
    draft = pair.draft()
    draft.decoding_config.tree_nodes = None  # drafted beside blocks, not in their place
    target = pair.target()
    journal = None
    if arguments.output is not None:
        what = _what(arguments, target, draft, said or prompts, kwargs, methods, max_new_tokens)
        journal = Journal(arguments.output / JOURNAL_FILE, what)

    def bar(desc):
        return lambda some: logging.tqdm(some, desc=desc, disable=None, leave=False)

    if journal is not None and journal.prompts is not None:
        prompts = journal.prompts
        note(f"{len(journal.records)} of {len(prompts) * arguments.runs} answers are in {journal.path}: going on")
    else:
        if prompts is None:
            asked = (target, encoder, said, max_new_tokens, bar("first turns"), arguments.raw)
            prompts = prompts_of_conversations(*asked)
        if journal is not None and prompts:
            journal.begin([list(prompt) for prompt in prompts])
    report = evaluate(
        target,
        draft,
        prompts,
        max_new_tokens=max_new_tokens,
        runs=arguments.runs,
        methods=methods,
        progress=bar("decoding"),
        journal=journal,
        tree_nodes=arguments.tree_nodes or TREE_NODES,
    )
    report.setting |= {"dataset": repository, "prompts_digest": digest_of([list(one) for one in prompts])}
    return report


def _no_thinking(arguments, pair: NamedPair) -> dict | None:
    """For the field's sets, where the drafter was not made with other arguments."""
    asked = arguments.dataset in NAMED and "enable_thinking" in str(pair.tokenizer.chat_template)
    trained_with = (pair.draft_config.dflash_config or {}).get("chat_template_kwargs")
    return NO_THINKING if asked and trained_with is None else None


def _what(arguments, target, draft, asked, kwargs: dict, methods: list[str], max_new_tokens: int) -> dict:
    """What decides the outcome, for a journal."""
    import torch

    from dflash_hf.files import digest_of
    from dflash_hf.target import digest_of_parameters, digest_of_target

    return {
        "target": digest_of_target(target),
        "draft": digest_of_parameters(draft.named_parameters()),
        "draft_config": digest_of(draft.config.to_diff_dict()),
        "asked": digest_of(asked),
        "chat_template_kwargs": kwargs,
        "methods": methods,
        "runs": arguments.runs,
        "max_new_tokens": max_new_tokens,
        "raw": arguments.raw,
        "dtype": str(target.dtype),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "compile": arguments.compile,
        "tree_nodes": arguments.tree_nodes,
    }
