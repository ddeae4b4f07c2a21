"""
`dflash chat`: chat with a target and its drafter in the terminal.

    dflash chat
    dflash chat --target Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --temperature 0.7
    dflash chat --target T --draft D < questions.txt   # one message per line
"""

from dflash_hf._io.terminal import Outcome, wants_color
from dflash_hf.commands.pair import NamedPair, take_default
from dflash_hf.commands.shared import add_answering, add_pair, sampling_options


RESUME_HINT = "the same command starts a new conversation"


def add_arguments(parser) -> None:
    add_pair(parser, default=True)
    add_answering(parser)


def run(arguments, echo) -> Outcome:
    sampling = sampling_options(arguments)
    take_default(arguments)
    pair = NamedPair(arguments)
    from functools import partial

    from transformers import set_seed

    from dflash_hf.data.prompts import ids_of_prompt
    from dflash_hf.serving.chat import Chat
    from dflash_hf.serving.decoder import Decoder

    encode = partial(ids_of_prompt, pair.encoder(pair.template()))
    target, draft = pair.ready()
    decoder = Decoder(target, pair.tokenizer, draft)
    set_seed(arguments.seed)
    options = {"max_new_tokens": arguments.max_new_tokens, **sampling}
    chat = Chat(decoder, encode, options, echo, wants_color(arguments.color, echo.stream))
    try:
        return Outcome(facts={"turns": chat.run()})
    finally:
        decoder.stop()
