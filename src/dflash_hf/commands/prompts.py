"""`dflash prompts`."""

from dflash_hf.commands.shared import PACKED, add_examples, add_loading, add_output
from dflash_hf.terminal import add_template_arguments, count, positive, probability, readable_file, temperature


AGAIN = "the same command goes on with the requests that are missing"


def add_arguments(parser) -> None:
    parser.add_argument("--target", required=True, help="folder or Hub name of a chat model")
    parser.add_argument("--count", required=True, type=positive, help="requests wanted")
    add_output(parser, ".jsonl file; an existing one is continued", required=True)
    parser.add_argument(
        "--kinds",
        help="of chat,code,math,rewrite,task,json, in turn; one named twice is sampled twice as often; default: chat",
    )
    parser.add_argument("--begin", action="append", default=[], help="first words of a request; may be repeated")
    parser.add_argument("--system", help="a system prompt, kept in the rows; default: the template's own")
    parser.add_argument("--temperature", type=temperature, default=1.0, help="default: %(default)s")
    parser.add_argument("--top-p", type=probability, default=0.95, help="default: %(default)s")
    parser.add_argument("--max-new-tokens", type=positive, default=128, help="default: %(default)s")
    parser.add_argument("--min-chars", type=count, default=16, help="default: %(default)s")
    parser.add_argument("--max-chars", type=positive, default=1000, help="default: %(default)s")
    parser.add_argument("--seed", type=count, default=0, help="default: %(default)s")
    parser.add_argument("--batch-size", type=positive, help="rows at a time; default: what is fastest here, measured")
    parser.add_argument("--chat-template", type=readable_file, help="Jinja file in place of the tokenizer's own")
    add_template_arguments(parser)
    add_loading(parser, draft=False).add_argument("--packed", action="store_true", help=PACKED)
    add_examples(
        parser,
        "dflash prompts --target Qwen/Qwen3-0.6B --count 10000 --kinds chat,code,math --output prompts.jsonl",
        "dflash regenerate prompts.jsonl --target Qwen/Qwen3-0.6B --output responses.jsonl",
        after=AGAIN,
    )


def run(arguments, echo):
    from dflash_hf.data.magpie import run

    return run(arguments, echo)
