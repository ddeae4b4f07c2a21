"""`dflash doctor`."""

from dflash_hf.commands.shared import add_examples, add_loading
from dflash_hf.terminal import add_template_arguments, positive


def add_arguments(parser) -> None:
    parser.add_argument("--target", required=True, help="folder or Hub name of the target")
    parser.add_argument("--draft", required=True, help="folder or Hub name of its drafter")
    parser.add_argument("--base", help="the model that a quantised or fine-tuned target was made from, to compare")
    parser.add_argument("--data", help="prompts, as for dflash eval; default: generated ones")
    parser.add_argument("--split", help="default: train, or the only one")
    parser.add_argument("--prompts", type=positive, default=24, help="take the first so many; default: %(default)s")
    parser.add_argument("--blocks", type=positive, default=16, help="of each text; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=positive, default=128, help="of a text; default: %(default)s")
    add_template_arguments(parser)
    parser.add_argument("--threads", type=positive, help="CPU threads of this process; default: as torch chooses")
    add_loading(parser)
    add_examples(
        parser,
        "dflash doctor --target Qwen/Qwen3-0.6B --draft my-drafter --data prompts.jsonl",
        "dflash doctor --target my-quantised-model --base Qwen/Qwen3-0.6B --draft my-drafter",
        after="run the same command again; the exit status is 1 where a cause was found",
    )


def run(arguments, echo):
    from dflash_hf.doctor.command import run

    return run(arguments, echo)
