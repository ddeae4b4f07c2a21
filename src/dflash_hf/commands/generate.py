"""
`dflash generate`: stream the answer to a prompt, and print its speed.

    dflash generate --prompt "What is a cache?" --show-drafts
    dflash generate --target Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --prompt "Write a haiku."
    cat question.txt | dflash generate --target T --draft D --prompt - --compile --compare
"""

import time
from functools import partial
from typing import Any, NamedTuple

from dflash_hf._io.errors import UsageError
from dflash_hf._io.names import dtype_name
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


class _Answer(NamedTuple):
    """
    An answer, and what it took.

    Args:
        output (`ModelOutput`): The output of `generate`.
        ids (`list[int]`): Token ids of the answer.
        seconds (`float`): Time of the call.
    """

    output: Any
    ids: list[int]
    seconds: float

    @property
    def acceptance_lengths(self) -> list[int]:
        """Tokens that each verification committed; empty without a drafter."""
        return (getattr(self.output, "acceptance_lengths", None) or [[]])[0]

    @property
    def speed(self) -> str:
        """Tokens, seconds, and tokens per second."""
        return f"{len(self.ids)} tokens in {self.seconds:.2f} s, {len(self.ids) / self.seconds:.1f} tokens/s"


def run(arguments, echo) -> Outcome:
    """Stream the answer to standard output. Figures go to standard error, so that only the text is piped."""
    # 1. What can be checked before the models are loaded.
    sampling = sampling_options(arguments)
    prompt = _read_prompt(arguments.prompt)
    take_default(arguments)
    if arguments.draft is None and (arguments.compare or arguments.show_drafts):
        raise UsageError("--compare and --show-drafts need a drafter; pass --draft.")
    pair = NamedPair(arguments)
    prompt_ids = _prompt_ids(pair, prompt)
    # 2. The models.
    target, draft = pair.ready()
    if draft is not None and arguments.show_drafts:
        _draft_whole_blocks(draft)
    decode = partial(_decode, target, prompt_ids, arguments.max_new_tokens, arguments.seed, sampling)
    # 3. The answer.
    answer = _stream(decode, None if arguments.json else pair.tokenizer, draft, echo)
    # 4. Its figures.
    from dflash_hf.targets.generation import cut_reason

    packed = ", packed" if pair.packed else ""
    limit = arguments.max_new_tokens
    cut = cut_reason(answer.ids, limit, target.generation_config, f"--max-new-tokens {limit}")
    text = pair.tokenizer.decode(answer.ids, skip_special_tokens=True)
    facts = {"text": text, "tokens": len(answer.ids), "seconds": answer.seconds, "cut": bool(cut)}
    speed = answer.speed + (f", cut off at {cut}" if cut else "")
    lengths = answer.acceptance_lengths
    if lengths:
        facts |= {"tau": sum(lengths) / len(lengths), "acceptance_lengths": lengths}
        facts |= {"draft_sizes": answer.output.draft_sizes, "estimated_speedup": answer.output.estimated_speedup}
        speed += f", tau {facts['tau']:.2f} over {len(lengths)} verifications"
        if arguments.show_drafts:
            _show_drafts(answer, pair.tokenizer, arguments.color, echo)
    echo.note(f"\n{'target alone' if draft is None else 'with the drafter'}{packed}: {speed}")
    # 5. The same without the drafter.
    if arguments.compare and draft is not None:
        alone = decode()
        facts |= {"equal": alone.ids == answer.ids, "seconds_alone": alone.seconds}
        echo.note(f"target alone{packed}: {alone.speed}; {_comparison(alone.ids == answer.ids, target)}")
    return Outcome(facts=facts)


def _read_prompt(prompt: str) -> str:
    """
    The value of `--prompt`, or standard input for `-`.

    Raises:
        `UsageError`: it is empty, or not UTF-8.
    """
    if prompt == "-":
        prompt = "".join(stdin_lines())
    if not prompt.strip():
        raise UsageError("--prompt is empty; pass some text.")
    if any("\ud800" <= char <= "\udfff" for char in prompt):  # undecodable bytes from the shell
        raise UsageError("--prompt is not UTF-8; convert it first, for example with iconv.")
    return prompt


def _draft_whole_blocks(draft) -> None:
    """Draft whole blocks in every round, even where less would be faster; not trees, nor in graphs."""
    config = draft.decoding_config
    if config.tree_nodes is None and not config.compile:
        config.block_size = draft.config.max_block_tokens


def _decode(target, prompt_ids: list[int], max_new_tokens: int, seed: int, sampling: dict, **options) -> _Answer:
    """Call `generate` for one prompt, with more of its `options`."""
    from transformers import set_seed

    from dflash_hf.targets.generation import generate_one, max_answer_tokens

    limit = max_answer_tokens(target, len(prompt_ids), max_new_tokens)
    set_seed(seed)
    start = time.perf_counter()
    output = generate_one(target, prompt_ids, max_new_tokens=limit, **sampling, **options)
    return _Answer(output, output.sequences[0, len(prompt_ids) :].tolist(), time.perf_counter() - start)


def _stream(decode, tokenizer, draft, echo) -> _Answer:
    """Call `decode` with the drafter, if any, and `echo` the text as it grows; not without a tokenizer."""
    from dflash_hf.serving.pieces import PieceStreamer

    options = {} if draft is None else {"assistant_model": draft}
    if tokenizer is not None:
        options["streamer"] = PieceStreamer(tokenizer, lambda piece, source: echo.write(piece))
    with hold_back_logs():
        answer = decode(**options)
        if tokenizer is not None:
            echo("")
    return answer


def _show_drafts(answer: _Answer, tokenizer, color: bool | None, echo) -> None:
    """`echo` the text again, with the accepted drafts marked."""
    from dflash_hf.evaluation.text import chosen_line, colored_answer, token_texts

    pieces = token_texts(tokenizer, answer.ids)
    color = wants_color(color, echo.stream)
    marks = marks_around("".join(pieces), echo.stream)
    echo.note(f"\ndrafted and accepted: {'green' if color else 'between these marks'.join(marks)}")
    echo(colored_answer(pieces, answer.acceptance_lengths, color, marks))
    if answer.output.draft_sizes:
        echo.note(f"\n{chosen_line(answer.output.draft_sizes, answer.output.estimated_speedup)}")


def _comparison(is_equal: bool, target) -> str:
    """Whether the target alone gave the same tokens, and why it may not have."""
    import torch

    if is_equal:
        return "the same tokens"
    if target.dtype in (torch.bfloat16, torch.float16):
        dtype = dtype_name(target.dtype)
        return f"other tokens, as rounding in {dtype} allows; compare with --dtype float32"
    return "other tokens"


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
