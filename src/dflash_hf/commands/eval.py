"""`dflash eval`."""

from dflash_hf.commands.shared import add_examples, add_loading, add_output, add_speed
from dflash_hf.terminal import UsageError, add_template_arguments, output_folder, positive, readable_file


AGAIN = "with --output, the same command goes on with the answers that are missing"
SETS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "alpaca")  # of evaluation.sets, held to it
GENERATED = ("arithmetic", "json", "rewriting")


def add_arguments(parser) -> None:
    parser.add_argument("--target", help="folder or Hub name of the target")
    parser.add_argument("--draft", help="folder or Hub name of its drafter")
    parser.add_argument(
        "--dataset",
        help=f"{', '.join(SETS)}, prompted as the field does; {', '.join(GENERATED)}, made by rule; or as --data",
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


def run(arguments, echo):
    if arguments.server is not None:
        from dflash_hf.evaluation.server import run as measure_server

        return measure_server(arguments, echo)
    if arguments.alone is not None:
        raise UsageError("--alone is compared with --server; name both.")
    from dflash_hf.evaluation.command import run

    return run(arguments, echo)
