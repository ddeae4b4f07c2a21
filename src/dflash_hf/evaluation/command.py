"""The prompts of a dataset, and `dflash eval`, which decodes them with and without a drafter."""

import json
from itertools import islice
from pathlib import Path

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prepare import load_tokenizer
from dflash_hf.data.prompts import prompt_ids, template_kwargs
from dflash_hf.data.sources import load_rows
from dflash_hf.evaluation.measure import DFLASH, PACKED, PROMPT_LOOKUP, TARGET, TARGET_PACKED, EvalReport, evaluate
from dflash_hf.evaluation.report import save_report
from dflash_hf.evaluation.text import summary_lines
from dflash_hf.pairs import (
    Loading,
    check_pair,
    device_of,
    draft_config_of,
    load_draft,
    load_target,
    positions_of,
    set_decoding,
)
from dflash_hf.terminal import Outcome, note, read_text, template_arguments


def read_prompts(data: str, encoder: RowEncoder, limit: int, split: str | None = None, raw: bool = False):
    """
    The first `limit` prompts of a dataset, see [`~dflash_hf.data.sources.load_rows`]; of a `.txt` file, each line is
    one.

    Raises:
        `ValueError`: a row without a prompt; names it.
    """
    if Path(data).suffix == ".txt":
        lines = read_text(Path(data)).splitlines()
        rows = [{"prompt": line} for line in lines if line.strip()]
    else:
        rows = load_rows(data, split)
    prompts = []
    for index, row in enumerate(islice(iter(rows), limit)):
        try:
            prompts.append(prompt_ids(encoder, row, raw))
        except ValueError as error:
            raise ValueError(f"Row {index} of {data}: {error}") from error
    return prompts


def run(arguments, echo) -> Outcome:
    """`dflash eval`: `echo` the table, write the report; 1 when an output is not the target's own."""
    report = _measure(arguments)
    for line in summary_lines(report):
        echo(line)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        title = f"{report.methods[DFLASH].speedup:.2f}x, tau {report.tau:.2f}"
        for path in save_report(report, arguments.output, title):
            echo(f"written           {path}")
    return Outcome(0 if report.lossless else 1, json.loads(report.to_json()))


def _measure(arguments) -> EvalReport:
    import torch
    from transformers.utils import logging

    loading = Loading.of(arguments)
    config = check_pair(arguments.target, arguments.draft, loading)
    device = device_of(loading.device)
    given = template_arguments(arguments.template_args)
    kwargs = template_kwargs(given, draft_config=draft_config_of(arguments.draft, loading), say=note)
    tokenizer = load_tokenizer(arguments.target, None, loading.revision, loading.trust_remote_code)
    encoder = RowEncoder(tokenizer, chat_template_kwargs=kwargs, positions=positions_of(config))
    prompts = read_prompts(arguments.data, encoder, arguments.prompts, arguments.split, arguments.raw)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    draft = load_draft(arguments.draft, loading, device)
    set_decoding(draft, arguments)
    target = load_target(arguments.target, loading, device)
    return evaluate(
        target,
        draft,
        prompts,
        max_new_tokens=arguments.max_new_tokens,
        runs=arguments.runs,
        methods=[
            *([TARGET, TARGET_PACKED, DFLASH, PACKED] if arguments.packed else [TARGET, DFLASH]),
            *([PROMPT_LOOKUP] if arguments.prompt_lookup else []),
        ],
        progress=lambda rounds: logging.tqdm(rounds, desc="decoding", disable=None, leave=False),
    )
