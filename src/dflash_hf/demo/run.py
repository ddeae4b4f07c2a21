"""
`dflash demo`: a real model answers requests that its drafter never saw, with each decoding method in turn.

    1. pair       SmolLM2-135M-Instruct and the drafter of `examples/smollm2-135m-dflash`   (smollm2)
    2. requests   held out from the drafter's data, one of each kind in turn, and some sums
    3. compare    target alone, packed, with prompt lookup, with the drafter               (evaluation)
    4. show       one answer as it was drafted, the table, the plot
"""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import prompt_ids
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.evaluation import methods as ways
from dflash_hf.evaluation.measure import EvalReport
from dflash_hf.evaluation.measure import evaluate as decode_side_by_side
from dflash_hf.evaluation.plots import headline
from dflash_hf.evaluation.report import save_report
from dflash_hf.evaluation.text import colored_answer, summary_lines, token_texts
from dflash_hf.pairs import Loading, load_draft, load_target
from dflash_hf.smollm2 import data_folder, drafter_folder, smollm2_folder
from dflash_hf.terminal import bar


logger = logging.get_logger(__name__)
Say = Callable[[str], None]
_KINDS = ("chat", "code", "task", "math", "rewrite", "json")  # of the data, in this order
_SUMS = tuple(f"What is {a} + {b}? Explain step by step." for a, b in ((17, 25), (48, 36), (120, 99), (305, 47)))


@dataclass
class DemoPair:
    """A target with its drafter, and its tokenizer."""

    target: torch.nn.Module
    draft: DFlashDraftModel
    tokenizer: object


def load_pair(dtype: str = "auto", draft: str | Path | None = None) -> DemoPair:
    """
    The pair that needs no Hub, on the CPU.

    Args:
        dtype (`str`): Dtype of both models, as in [`~dflash_hf.pairs.Loading`].
        draft (`str` or `Path`, *optional*): Another drafter's folder.

    Raises:
        `FileNotFoundError`: one of the models is missing; says how to get it.
    """
    folder, loading = str(smollm2_folder()), Loading(dtype, device="cpu")
    return DemoPair(
        load_target(folder, loading),
        load_draft(str(draft or drafter_folder()), loading),
        AutoTokenizer.from_pretrained(folder),
    )


def requests(count: int) -> list[dict]:
    """
    The first `count` requests: rows with `kind` and `messages`, held out from the drafter's data, one of each kind in
    turn, every sixth a sum.

    Raises:
        `ValueError`: there are fewer than `count`.
    """
    with gzip.open(data_folder() / "held_out.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    sums = [{"kind": "sum", "messages": [{"role": "user", "content": text}]} for text in _SUMS]
    by_kind = [[row for row in rows if row["kind"] == kind] for kind in _KINDS]
    found = [row for row in chain.from_iterable(zip_longest(*by_kind, sums)) if row is not None]
    if count > len(found):
        raise ValueError(f"prompts={count}, but only {len(found)} requests are held out; ask for fewer.")
    return found[:count]


def run_demo(
    pair: DemoPair,
    num_prompts: int = 12,
    max_new_tokens: int = 40,
    runs: int = 1,
    output: Path | None = None,
    color: bool = False,
    say: Say = logger.info,
) -> EvalReport:
    """
    Stages 2 to 4.

    Args:
        pair (`DemoPair`): The pair to decode with.
        num_prompts, max_new_tokens, runs (`int`): Number of requests, longest answer, and timed runs of each.
        output (`Path`, *optional*): Folder for figures and plot.
        color (`bool`): Colour the sample with ANSI codes.
        say: Called with each line of output.
    """
    rows = requests(num_prompts)
    encoder = RowEncoder(pair.tokenizer)
    prompts = [prompt_ids(encoder, row) for row in rows]
    dtype = str(pair.target.dtype).removeprefix("torch.")
    say(
        f"compare   {num_prompts} requests, greedy, {max_new_tokens} tokens at most, {dtype}, "
        f"{torch.get_num_threads()} thread(s), every method in turn"
    )
    report = decode_side_by_side(
        pair.target,
        pair.draft,
        prompts,
        max_new_tokens,
        runs,
        [ways.TARGET, ways.TARGET_PACKED, ways.PROMPT_LOOKUP, ways.AUTO, ways.DFLASH],
        progress=bar("compare"),
    )
    request, pieces, lengths = sample_of(pair, rows, report)
    say("")
    say(request.splitlines()[0])
    marked = "green" if color else "[in brackets]"
    say(f"({len(pieces)} tokens in {len(lengths)} verifications; drafted and accepted: {marked})")
    say(colored_answer(pieces, lengths, color))
    say("")
    for line in summary_lines(report):
        say(line)
    if output is not None:
        say("")
        for path in save_report(report, output, f"SmolLM2-135M-Instruct with its drafter: {headline(report)}"):
            say(f"written   {path}")
    return report


def sample_of(pair: DemoPair, rows: list[dict], report: EvalReport) -> tuple[str, list[str], list[int]]:
    """An answer of average acceptance: its request, the texts of its tokens, its verifications."""
    lengths = report.acceptance_lengths  # none if the answer ends with the prompt's own token
    order = sorted(range(len(rows)), key=lambda i: sum(lengths[i]) / max(len(lengths[i]), 1))
    index = order[len(order) // 2]
    answer = [token for token in report.responses[index] if token != pair.tokenizer.eos_token_id]
    request = rows[index]["messages"][-1]["content"]
    return request, token_texts(pair.tokenizer, answer), lengths[index]
