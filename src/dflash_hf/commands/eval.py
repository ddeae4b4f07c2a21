"""`dflash eval`."""

from dflash_hf.commands.shared import add_examples, add_loading, add_output, add_speed
from dflash_hf.terminal import add_template_arguments, positive


def add_arguments(parser) -> None:
    parser.add_argument("--target", required=True, help="folder or Hub name of the target")
    parser.add_argument("--draft", required=True, help="folder or Hub name of its drafter")
    parser.add_argument("--data", required=True, help="prompts: .jsonl, .json, .parquet, .csv, .txt, or a Hub dataset")
    parser.add_argument("--split", help="default: train, or the only one")
    parser.add_argument("--prompts", type=positive, default=40, help="take the first so many; default: %(default)s")
    parser.add_argument("--runs", type=positive, default=3, help="timed repetitions; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=positive, default=256, help="default: %(default)s")
    parser.add_argument("--raw", action="store_true", help="feed text as it is, without the chat template")
    add_template_arguments(parser)
    parser.add_argument("--prompt-lookup", action="store_true", help="also decode with transformers' prompt lookup")
    parser.add_argument(
        "--packed", action="store_true", help="also decode with packed weights, alone and drafted (CPU)"
    )
    parser.add_argument("--threads", type=positive, help="CPU threads of this process; default: as torch chooses")
    add_output(parser, "write eval_report.json and eval_report.png here; in the drafter's folder its card shows them")
    add_loading(parser)
    add_speed(parser)
    add_examples(
        parser,
        "dflash eval --target Qwen/Qwen3-0.6B --draft my-drafter --data prompts.txt --output my-drafter",
    )


def run(arguments, echo):
    from dflash_hf.evaluation.command import run

    return run(arguments, echo)
