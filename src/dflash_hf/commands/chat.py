"""`dflash chat`: a conversation in the terminal."""

from dflash_hf.commands.pair import NamedPair
from dflash_hf.commands.shared import add_examples, add_loading, add_sampling, add_speed, sampling_options
from dflash_hf.terminal import (
    Outcome,
    UsageError,
    add_color,
    add_template_arguments,
    positive,
    wants_color,
)


AGAIN = "the same command begins a new conversation"


def add_arguments(parser) -> None:
    parser.add_argument("--target", help="folder or Hub name of the target; default: SmolLM2-135M with its drafter")
    parser.add_argument("--draft", help="folder or Hub name of its drafter; without it the target answers alone")
    add_template_arguments(parser)
    parser.add_argument("--max-new-tokens", type=positive, default=512, help="of an answer; default: %(default)s")
    add_sampling(parser)
    parser.add_argument("--threads", type=positive, help="CPU threads of this process; default: as torch chooses")
    add_color(parser, "accepted draft tokens")
    add_loading(parser)
    add_speed(parser)
    add_examples(
        parser,
        "dflash chat",
        "dflash chat --target Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --temperature 0.7",
        "dflash chat --target T --draft D < questions.txt   # one message a line",
    )


def run(arguments, echo) -> Outcome:
    sampling = sampling_options(arguments)
    if arguments.draft and not arguments.target:
        raise UsageError("--draft needs --target, the model that it drafts for.")
    conversation = _conversation(arguments, sampling, echo)
    from dflash_hf.serving.chat import Chat

    return Outcome(facts={"turns": Chat(conversation, echo, wants_color(arguments.color, echo.stream)).run()})


def _conversation(arguments, sampling: dict, echo):
    if not arguments.target:
        from dflash_hf.smollm2 import drafter_folder, smollm2_folder

        arguments.target, arguments.draft = str(smollm2_folder()), str(drafter_folder())
        echo.note("SmolLM2-135M-Instruct with its drafter; --target and --draft name another pair.")
    pair = NamedPair(arguments, echo.note)
    from transformers import set_seed

    from dflash_hf.pairs import pack
    from dflash_hf.serving.conversation import Conversation

    tokenizer, draft, target = pair.tokenizer, pair.draft(), pair.target()
    pack(arguments.packed, target, draft)
    set_seed(arguments.seed)
    options = {"max_new_tokens": arguments.max_new_tokens, **sampling}
    return Conversation(target, tokenizer, draft, pair.template(), options)
