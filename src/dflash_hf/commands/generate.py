"""
`dflash generate`: stream the answer to a prompt, and print its speed.

    dflash generate --prompt "What is a cache?" --show-drafts
    dflash generate --target Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --prompt "Write a haiku."
    cat question.txt | dflash generate --target T --draft D --prompt - --compile --compare
"""

import time

from dflash_hf._io.errors import UsageError
from dflash_hf._io.terminal import Outcome, hold_back_logs, marks_around, stdin_lines, wants_color
from dflash_hf.commands.pair import NamedPair, take_default
from dflash_hf.commands.shared import add_answering, add_pair, sampling_options


def add_arguments(parser) -> None:
    add_pair(parser, default=True)
    parser.add_argument("--prompt", required=True, help="the user's message; - reads it from standard input")
    parser.add_argument("--raw", action="store_true", help="use the prompt as it is, without the chat template")
    parser.add_argument(
        "--show-drafts",
        action="store_true",
        help="draft whole blocks, and print the text again with accepted drafts marked",
    )
    parser.add_argument("--compare", action="store_true", help="also decode with the target alone")
    add_answering(parser)


def run(arguments, echo) -> Outcome:
    sampling = sampling_options(arguments)
    prompt = "".join(stdin_lines()) if arguments.prompt == "-" else arguments.prompt
    if not prompt.strip():
        raise UsageError("--prompt is empty; pass some text.")
    if any("\ud800" <= char <= "\udfff" for char in prompt):  # undecodable bytes from the shell
        raise UsageError("--prompt is not UTF-8; convert it first, for example with iconv.")
    take_default(arguments, echo.note)
    if arguments.draft is None and (arguments.compare or arguments.show_drafts):
        raise UsageError("--compare and --show-drafts need a drafter; pass --draft.")
    pair = NamedPair(arguments, echo.note)
    import torch
    from transformers import set_seed

    from dflash_hf.serving.pieces import PieceStreamer
    from dflash_hf.targets.generation import cut_reason, generate_one, max_answer_tokens

    tokenizer = pair.tokenizer
    prompt_ids = _prompt_ids(pair, prompt)
    target, draft = pair.ready()
    if draft is not None and arguments.show_drafts:
        settings = draft.decoding_config
        if settings.tree_nodes is None and not settings.compile:
            settings.block_size = draft.config.max_block_tokens  # in every round, even where nothing would be faster
    packed = ", packed" if pair.packed else ""
    limit = max_answer_tokens(target, len(prompt_ids), arguments.max_new_tokens)

    def decode(**extra):
        """The output of `generate`, the ids of the answer, and the seconds that it took."""
        set_seed(arguments.seed)
        start = time.perf_counter()
        output = generate_one(target, prompt_ids, max_new_tokens=limit, **sampling, **extra)
        return output, output.sequences[0, len(prompt_ids) :].tolist(), time.perf_counter() - start

    streamer = None if arguments.json else PieceStreamer(tokenizer, lambda piece, source: echo.write(piece))
    assistant = {} if draft is None else {"assistant_model": draft}
    with hold_back_logs():
        output, ids, seconds = decode(streamer=streamer, **assistant)
        if streamer is not None:
            echo("")
    # Figures go to standard error, so that only the text is piped.
    lengths = (getattr(output, "acceptance_lengths", None) or [[]])[0]
    facts = {"text": tokenizer.decode(ids, skip_special_tokens=True), "tokens": len(ids), "seconds": seconds}
    where = cut_reason(ids, arguments.max_new_tokens, target.generation_config)
    facts["cut"] = bool(where)
    speed = _speed(ids, seconds) + (f", cut off at {where}" if where else "")
    if lengths:
        facts |= {"tau": sum(lengths) / len(lengths), "acceptance_lengths": lengths}
        speed += f", tau {facts['tau']:.2f} over {len(lengths)} verifications"
        facts |= {"draft_sizes": output.draft_sizes, "estimated_speedup": output.estimated_speedup}
        if arguments.show_drafts:
            from dflash_hf.evaluation.text import chosen_line, colored_answer, token_texts

            pieces = token_texts(tokenizer, ids)
            color = wants_color(arguments.color, echo.stream)
            marks = marks_around("".join(pieces), echo.stream)
            echo.note(f"\ndrafted and accepted: {'green' if color else 'between these marks'.join(marks)}")
            echo(colored_answer(pieces, lengths, color, marks))
            if output.draft_sizes:
                echo.note(f"\n{chosen_line(output.draft_sizes, output.estimated_speedup)}")
    echo.note(f"\n{'target alone' if draft is None else 'with the drafter'}{packed}: {speed}")
    if arguments.compare and draft is not None:
        _, ids_alone, seconds = decode()
        equal = ids_alone == ids
        facts |= {"equal": equal, "seconds_alone": seconds}
        comparison = "the same tokens" if equal else "other tokens"
        if not equal and target.dtype in (torch.bfloat16, torch.float16):
            dtype = str(target.dtype).removeprefix("torch.")
            comparison += f", as rounding in {dtype} allows; compare with --dtype float32"
        echo.note(f"target alone{packed}: {_speed(ids_alone, seconds)}; {comparison}")
    return Outcome(facts=facts)


def _prompt_ids(pair: NamedPair, prompt: str) -> list[int]:
    """
    The ids of the prompt, formatted with the chat template unless `--raw` is given.

    Raises:
        `ValueError`: it cannot be encoded, or has no ids.
    """
    from dflash_hf.data.messages import UnusableRow
    from dflash_hf.data.prompts import ids_of_prompt
    from dflash_hf.data.row_layouts import conversation_of

    raw = pair.arguments.raw
    encoder = pair.encoder({} if raw else pair.template())
    as_chat = bool(pair.tokenizer.chat_template) and not raw
    conversation = conversation_of({"prompt": prompt}, answers=False)
    try:
        ids = ids_of_prompt(encoder, conversation.prompt(as_chat))
    except UnusableRow as reason:
        raise ValueError(f"--prompt: {reason}.") from reason
    if not ids:
        raise ValueError("--prompt is empty under this tokenizer; pass some text.")
    return ids


def _speed(ids: list[int], seconds: float) -> str:
    return f"{len(ids)} tokens in {seconds:.2f} s, {len(ids) / seconds:.1f} tokens/s"
