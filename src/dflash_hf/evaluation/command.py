"""The prompts of a dataset, and `dflash eval`, which decodes them with and without a drafter."""

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prepare import load_tokenizer, template_arguments
from dflash_hf.data.sources import load_rows
from dflash_hf.evaluation.measure import DFLASH, METHODS, PROMPT_LOOKUP, EvalReport, evaluate
from dflash_hf.evaluation.report import save_report
from dflash_hf.evaluation.text import summary_lines
from dflash_hf.pairs import Loading, check_pair, device_of, load_draft, load_target, set_decoding
from dflash_hf.terminal import Outcome, read_text


def prompt_ids(encoder: RowEncoder, row: Mapping, raw: bool = False) -> list[int]:
    """
    What the target is given of a row; it answers by itself.

    Args:
        encoder (`RowEncoder`): Tokenizer and chat template.
        row (`Mapping`): With `messages`, of which the last answer is dropped; `prompt`, text or messages; or
            `input_ids`, up to the first supervised one.
        raw (`bool`): Text is no user's message but the beginning of the target's own text.

    Raises:
        `ValueError`: no such column, or an empty prompt.
    """
    row = {name: value for name, value in row.items() if value is not None}
    if "input_ids" in row:
        ids = list(row["input_ids"])
        labels = row.get("labels", [])
        mask = list(row["loss_mask"] if "loss_mask" in row else [value != -100 for value in labels])
        ids = ids[: mask.index(True)] if True in mask else ids
    elif "messages" in row or "prompt" in row:
        messages = row["messages"] if "messages" in row else row["prompt"]
        # Beside a completion in text a prompt is text: that is how training reads such a row.
        text = isinstance(messages, str) and (raw or "completion" in row or not encoder.tokenizer.chat_template)
        if text:
            ids = encoder.tokenizer(messages)["input_ids"]
        else:
            if isinstance(messages, str):
                messages = [{"role": "user", "content": messages}]
            messages = [{key: value for key, value in one.items() if value is not None} for one in messages]
            while messages and messages[-1].get("role") == "assistant":
                messages.pop()
            encoder.template(row.get("tools"))  # there is one, or an error that says so
            ids = encoder.render(messages, row.get("tools"), add_generation_prompt=True) if messages else []
    else:
        raise ValueError(f"There is no prompt, only {sorted(row)}; give `messages`, `prompt` or `input_ids`.")
    if not ids:
        raise ValueError("The prompt is empty.")
    return ids


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

    from dflash_hf.modeling.configuration_dflash import DFlashDraftConfig

    loading = Loading.of(arguments)
    check_pair(arguments.target, arguments.draft, loading)
    device = device_of(loading.device)
    if arguments.template_args is None:
        options = {"revision": loading.draft_revision} if loading.draft_revision else {}
        nested = DFlashDraftConfig.from_pretrained(arguments.draft, **options).dflash_config or {}
        template_kwargs = nested.get("chat_template_kwargs") or {}
    else:
        template_kwargs = template_arguments(arguments.template_args)
    encoder = RowEncoder(
        load_tokenizer(arguments.target, None, loading.revision, loading.trust_remote_code),
        chat_template_kwargs=template_kwargs,
    )
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
        methods=[method for method in METHODS if arguments.prompt_lookup or method != PROMPT_LOOKUP],
        progress=lambda rounds: logging.tqdm(rounds, desc="decoding", disable=None, leave=False),
    )
