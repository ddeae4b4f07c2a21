"""
`dflash prompts`: have the target write prompts to train on.

    dflash prompts --target Qwen/Qwen3-0.6B --count 10000 --kinds chat,code,math --output prompts.jsonl
    dflash regenerate --target Qwen/Qwen3-0.6B --data prompts.jsonl --output responses.jsonl
"""

from dflash_hf._io.argument_types import amount, count, output_lines, positive, probability, template_arguments
from dflash_hf._io.terminal import Outcome
from dflash_hf.commands.pair import NamedPair
from dflash_hf.commands.shared import add_loading, add_output, add_packed, add_template


RESUME_HINT = "the same command continues with the prompts that are missing"


def add_arguments(parser) -> None:
    parser.add_argument("--target", required=True, help="a chat model: a folder or Hub name")
    parser.add_argument("--count", required=True, type=positive, help="number of prompts")
    add_output(parser, ".jsonl file; continued if it exists", output_lines, required=True)
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
    from dataclasses import asdict, fields

    from transformers import GenerationConfig
    from transformers.utils import logging

    from dflash_hf.data.template import digests_of_tokenizer
    from dflash_hf.pairs.packing_choice import pack_if_chosen
    from dflash_hf.synthetic.magpie import PromptSettings, checked_row, sample_prompts, user_turn
    from dflash_hf.synthetic.response_file import ResponseFile
    from dflash_hf.synthetic.responses import rows_that_fit
    from dflash_hf.targets.digests import digest_of_target
    from dflash_hf.targets.generation import eos_ids

    names = {field.name for field in fields(PromptSettings)}
    options = {name: value for name, value in vars(arguments).items() if name in names}
    options["kinds"] = [kind.strip() for kind in arguments.kinds.split(",")] if arguments.kinds else []
    settings = PromptSettings(**options, chat_template_kwargs=template_arguments(arguments.template_args) or {})
    pair = NamedPair(arguments)
    tokenizer = pair.tokenizer
    user_turn(tokenizer, settings)  # raises before anything is written
    left_out: Counter[str] = Counter()
    new = 0
    made_with = {**asdict(settings), **digests_of_tokenizer(tokenizer)}
    with ResponseFile(arguments.output, made_with, checked_row, echo) as output:
        before = list(output.finished.values())
        echo(f"{len(before)} of {arguments.count} prompts are done")
        if len(before) >= arguments.count:
            return Outcome(facts={"requests": len(before), "new": 0})
        target = pair.target()
        ends = sorted(eos_ids(target.generation_config))
        output.add_settings({"weights": digest_of_target(target), "dtype": str(target.dtype), "eos_token_ids": ends})
        pack_if_chosen(arguments.packed, target)
        length = 64 + settings.max_new_tokens // 2
        rows = arguments.batch_size or rows_that_fit(target, GenerationConfig(), length, arguments.count)
        with logging.tqdm(total=arguments.count, initial=len(before), unit="prompt") as bar:
            for row, reason in sample_prompts(target, tokenizer, arguments.count, settings, rows, before):
                if row:
                    output.write_row(row)
                    new += 1
                    bar.update()
                else:
                    left_out[reason] += 1
    echo(f"{len(before) + new} prompts are in {arguments.output}, {new} of them new")
    for reason, number in left_out.most_common():
        echo(f"  {number} samples left out: {reason}")
    return Outcome(facts={"requests": len(before) + new, "new": new, "left_out": dict(left_out)})
