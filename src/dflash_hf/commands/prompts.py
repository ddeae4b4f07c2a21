"""
`dflash prompts`: have the target write prompts to train on.

    dflash prompts --target Qwen/Qwen3-0.6B --count 10000 --kinds chat,code,math --output prompts.jsonl
    dflash regenerate --target Qwen/Qwen3-0.6B --data prompts.jsonl --output responses.jsonl
    dflash prompts --target gemma3-270m --count 2000 --data texts.jsonl --max-new-tokens 32 --output prompts.jsonl

a base model, without a chat template, writes beginnings of texts; --data takes those of your own texts instead
"""

from dflash_hf._io.argument_types import amount, count, output_lines, positive, probability, template_arguments
from dflash_hf._io.errors import UsageError
from dflash_hf._io.terminal import Outcome
from dflash_hf.commands.pair import NamedPair
from dflash_hf.commands.shared import add_loading, add_output, add_packed, add_template, options_given


_OF_SAMPLING = ("kinds", "begin", "seed", "batch_size", "template_args")
RESUME_HINT = "the same command continues with the prompts that are missing"


def add_arguments(parser) -> None:
    parser.add_argument("--target", required=True, help="a folder or Hub name")
    parser.add_argument("--count", required=True, type=positive, help="number of prompts")
    add_output(parser, ".jsonl file; continued if it exists", output_lines, required=True)
    parser.add_argument(
        "--data", help="take the beginnings of these texts: a .jsonl, .txt, .parquet file or Hub dataset"
    )
    parser.add_argument("--kinds", help="chat,code,math,rewrite,task,json in turn; repeat to weigh (default: chat)")
    parser.add_argument("--begin", action="append", default=[], help="first words of a prompt; repeatable")
    parser.add_argument("--temperature", type=amount, default=1.0, help="above 0 (default: %(default)s)")
    parser.add_argument("--top-p", type=probability, default=0.95, help="nucleus sampling (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=positive, default=128, help="longest prompt (default: %(default)s)")
    parser.add_argument("--seed", type=count, default=0, help="sampling seed (default: %(default)s)")
    parser.add_argument("--batch-size", type=positive, help="rows at a time (default: by memory, at most 256)")
    add_template(parser, "none")
    add_packed(add_loading(parser, draft=False))


def run(arguments, echo) -> Outcome:
    """Append prompts to the output until it has `--count` of them."""
    from collections import Counter
    from contextlib import closing

    from transformers.utils import logging

    from dflash_hf.data.template import digests_of_tokenizer
    from dflash_hf.synthetic.magpie import checked_row
    from dflash_hf.synthetic.response_file import ResponseFile

    pair = NamedPair(arguments)
    settings = _settings(arguments, pair)
    left_out: Counter[str] = Counter()
    new = 0
    made_with = {**settings, **digests_of_tokenizer(pair.tokenizer)}
    with ResponseFile(arguments.output, made_with, checked_row, echo) as output:
        before = list(output.finished.values())
        echo(f"{len(before)} of {arguments.count} prompts are done")
        missing = arguments.count - len(before)
        if missing <= 0:
            return Outcome(facts={"requests": len(before), "new": 0})
        samples = _samples(arguments, pair, before, output)
        with closing(samples), logging.tqdm(total=arguments.count, initial=len(before), unit="prompt") as bar:
            for row, reason in samples:
                if row is None:
                    left_out[reason] += 1
                    continue
                output.write_row(row)
                new += 1
                bar.update()
                if new == missing:
                    break
    echo(f"{len(before) + new} prompts are in {arguments.output}, {new} of them new")
    for reason, number in left_out.most_common():
        echo(f"  {number} samples left out: {reason}")
    if new < missing:
        echo.note(
            f"--data {arguments.data} has no more texts: {missing - new} of {arguments.count} prompts are missing"
        )
    return Outcome(facts={"requests": len(before) + new, "new": new, "left_out": dict(left_out)})


def _settings(arguments, pair: NamedPair) -> dict:
    """
    All that the prompts depend on, besides the target's weights and tokenizer.

    Raises:
        `UsageError`: options of sampling are given with `--data`.
        `ValueError`: see [`~dflash_hf.synthetic.magpie.PromptSettings`] and
            [`~dflash_hf.synthetic.magpie.user_turn`].
    """
    from dataclasses import asdict

    from dflash_hf.synthetic.magpie import user_turn

    if arguments.data is None:
        settings = _sampling(arguments)
        user_turn(pair.tokenizer, settings)  # raises before anything is written
        return asdict(settings)
    unread = options_given(arguments, _OF_SAMPLING)
    if unread:
        raise UsageError(f"--data takes the beginnings of texts, and samples nothing: leave out {', '.join(unread)}.")
    return {"data": arguments.data, "max_new_tokens": arguments.max_new_tokens}


def _sampling(arguments):
    """The `PromptSettings` of a command line."""
    from dataclasses import fields

    from dflash_hf.synthetic.magpie import PromptSettings

    names = {field.name for field in fields(PromptSettings)}
    options = {name: value for name, value in vars(arguments).items() if name in names}
    options["kinds"] = [kind.strip() for kind in arguments.kinds.split(",")] if arguments.kinds else []
    return PromptSettings(**options, chat_template_kwargs=template_arguments(arguments.template_args) or {})


def _samples(arguments, pair: NamedPair, before: list[dict], output):
    """Prompts, or the reason to leave one out: of the texts of `--data`, or sampled by the target."""
    from transformers import GenerationConfig

    from dflash_hf.pairs.packing_choice import pack_if_chosen
    from dflash_hf.synthetic.beginnings import text_beginnings
    from dflash_hf.synthetic.magpie import sample_prompts
    from dflash_hf.synthetic.responses import rows_that_fit
    from dflash_hf.targets.digests import digest_of_target
    from dflash_hf.targets.generation import eos_ids

    if arguments.data is not None:
        from dflash_hf.data.sources import load_rows

        rows = load_rows(arguments.data)
        return text_beginnings(rows, arguments.data, pair.tokenizer, arguments.max_new_tokens, before)
    settings = _sampling(arguments)
    target = pair.target()
    ends = sorted(eos_ids(target.generation_config))
    output.add_settings({"weights": digest_of_target(target), "dtype": str(target.dtype), "eos_token_ids": ends})
    pack_if_chosen(arguments.packed, target)
    length = 64 + settings.max_new_tokens // 2
    batch_size = arguments.batch_size or rows_that_fit(target, GenerationConfig(), length, arguments.count)
    return sample_prompts(target, pair.tokenizer, arguments.count, settings, batch_size, before)
