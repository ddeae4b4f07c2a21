"""
`dflash demo`: a real model answers prompts that its drafter was not trained on, with each decoding method in turn.

    1. prompts    held out from the drafter's data, one of each kind in turn, and some sums
    2. compare    target-only decoding, the same with packed weights, and the drafter   (evaluation)
    3. show       one answer as it was drafted, the table, the plot
"""

import gzip
import json
import sys
from collections.abc import Callable
from itertools import chain, zip_longest
from pathlib import Path

import torch
from transformers.utils import logging

from dflash_hf._io.names import dtype_name
from dflash_hf._io.progress import bar
from dflash_hf._io.terminal import marks_around
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import prompt_ids
from dflash_hf.data.template import ChatTemplate
from dflash_hf.evaluation.measure import evaluate
from dflash_hf.evaluation.methods import PLAIN_CALL, TARGET_ALONE, TARGET_PACKED, WHOLE_BLOCKS
from dflash_hf.evaluation.report import EvalReport
from dflash_hf.evaluation.report_files import save_report
from dflash_hf.evaluation.text import colored_answer, headline, summary_lines, token_texts
from dflash_hf.smollm2 import LoadedPair, data_folder


logger = logging.get_logger(__name__)
Say = Callable[[str], None]
_KINDS = ("chat", "code", "task", "math", "rewrite", "json")  # of the data, in this order
_SUMMANDS = ((17, 25), (48, 36), (120, 99), (305, 47))


def demo_prompts(count: int) -> list[dict]:
    """
    The first `count` prompts of the demo: rows with `kind` and `messages`, held out from the drafter's data, one of
    each kind in turn, every seventh a sum.

    Raises:
        `ValueError`: there are fewer than `count`.
    """
    with gzip.open(data_folder() / "held_out.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    rows_of_kinds = [[row for row in rows if row["kind"] == kind] for kind in _KINDS]
    rows_of_kinds.append([_sum_prompt(first, second) for first, second in _SUMMANDS])
    in_turn = [row for row in chain.from_iterable(zip_longest(*rows_of_kinds)) if row is not None]
    if count > len(in_turn):
        raise ValueError(f"prompts={count}, but only {len(in_turn)} prompts are held out; ask for fewer.")
    return in_turn[:count]


def _sum_prompt(first: int, second: int) -> dict:
    text = f"What is {first} + {second}? Explain step by step."
    return {"kind": "sum", "messages": [{"role": "user", "content": text}]}


def run_demo(
    pair: LoadedPair,
    rows: list[dict],
    max_new_tokens: int = 40,
    runs: int = 1,
    output: Path | None = None,
    color: bool = False,
    say: Say = logger.info,
) -> EvalReport:
    """
    Compare the methods, save the report, and show it.

    Args:
        pair ([`~dflash_hf.smollm2.LoadedPair`]): The pair to decode with.
        rows (`list[dict]`): Rows of [`demo_prompts`].
        max_new_tokens, runs (`int`): Longest answer, and timed runs of each.
        output (`Path`, *optional*): Folder for figures and plot.
        color (`bool`): Colour the sample with ANSI codes.
        say: Called with each line of output.
    """
    encoder = RowEncoder(ChatTemplate(pair.tokenizer))
    prompts = [prompt_ids(encoder, row) for row in rows]
    dtype = dtype_name(pair.target.dtype)
    say(
        f"compare   {len(rows)} prompts, greedy, {max_new_tokens} tokens at most, {dtype}, "
        f"{torch.get_num_threads()} thread(s), every method in turn"
    )
    report = evaluate(
        pair.target,
        pair.draft,
        prompts,
        max_new_tokens,
        runs,
        [TARGET_ALONE, TARGET_PACKED, PLAIN_CALL, WHOLE_BLOCKS],
        progress=bar("compare"),
    )
    title = f"SmolLM2-135M-Instruct with its drafter\n{headline(report)}"
    # The report is saved before it is shown: it is there even if what reads the output goes away.
    paths = [] if output is None else save_report(report, output, title)
    lines = [*sample_lines(pair, rows, report, color), "", *summary_lines(report)]
    if output is not None:
        lines += ["", *(f"written   {path}" for path in paths)]
    for line in lines:
        say(line)
    return report


def sample_lines(pair: LoadedPair, rows: list[dict], report: EvalReport, color: bool) -> list[str]:
    """
    Lines that show an answer of median acceptance as it was drafted; none if no answer is equal to the target's own.
    """
    diverging = {divergence.prompt for divergence in report.divergences if divergence.method == WHOLE_BLOCKS}
    lengths = report.acceptance_lengths  # empty for an answer that prefill alone generated
    indices = [i for i in range(len(rows)) if i not in diverging]
    if not indices:
        return []
    indices.sort(key=lambda i: sum(lengths[i]) / max(len(lengths[i]), 1))
    index = indices[len(indices) // 2]
    answer = [token for token in report.responses[index] if token != pair.tokenizer.eos_token_id]
    pieces = token_texts(pair.tokenizer, answer)
    rounds = lengths[index]
    marks = marks_around("".join(pieces), sys.stdout)
    marked = "green" if color else "between these marks".join(marks)
    return [
        "",
        rows[index]["messages"][-1]["content"].splitlines()[0],
        f"({len(pieces)} tokens in {len(rounds)} verifications; drafted and accepted: {marked})",
        colored_answer(pieces, rounds, color, marks),
    ]
