"""The prompts of a dataset, and `dflash eval`, which decodes them with and without a drafter."""

from itertools import islice
from pathlib import Path

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prepare import load_tokenizer
from dflash_hf.data.prompts import prompt_ids, template_kwargs
from dflash_hf.data.sources import load_rows
from dflash_hf.evaluation.measure import DFLASH, PACKED, PROMPT_LOOKUP, TARGET, TARGET_PACKED, EvalReport, evaluate
from dflash_hf.evaluation.report import save_report
from dflash_hf.evaluation.text import summary_lines
from dflash_hf.pairs import load_pair
from dflash_hf.terminal import add_template_arguments, note, positive, template_arguments


def read_prompts(data: str, encoder: RowEncoder, limit: int, split: str | None = None, raw: bool = False):
    """
    The first `limit` prompts of a dataset, see [`~dflash_hf.data.sources.load_rows`]; of a `.txt` file, each line is
    one.

    Raises:
        `ValueError`: a row without a prompt; names it.
    """
    if Path(data).suffix == ".txt":
        lines = Path(data).read_text(encoding="utf-8").splitlines()
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


def add_arguments(parser) -> None:
    """Arguments of `dflash eval`."""
    parser.add_argument("--target", required=True, help="folder or Hub name of the target")
    parser.add_argument("--draft", required=True, help="folder or Hub name of its drafter")
    parser.add_argument("--data", required=True, help="prompts: .jsonl, .json, .parquet, .csv, .txt, or a Hub dataset")
    parser.add_argument("--split", help="default: train, or the only one")
    parser.add_argument("--prompts", type=positive, default=40, help="take the first so many; default: %(default)s")
    parser.add_argument("--runs", type=positive, default=3, help="timed repetitions; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=positive, default=256, help="default: %(default)s")
    parser.add_argument("--raw", action="store_true", help="feed text as it is, without the chat template")
    add_template_arguments(parser)
    parser.add_argument("--prompt-lookup", action="store_true", help="also decode with transformers' prompt lookup")
    parser.add_argument(
        "--packed", action="store_true", help="also decode with packed weights, alone and drafted (CPU)"
    )
    parser.add_argument("--dtype", default="auto", help="of both models: auto, float32, bfloat16, float16")
    parser.add_argument("--device", help="cpu, cuda, ... or auto, to spread a large target; default: a GPU if any")
    parser.add_argument("--threads", type=positive, help="CPU threads of this process; default: as torch chooses")
    parser.add_argument(
        "--output",
        type=Path,
        help="write eval_report.json and eval_report.png here; in the drafter's folder its card shows them",
    )


def run(arguments, echo) -> int:
    """`dflash eval`: `echo` the table, write the report; 1 when an output is not the target's own."""
    report = _measure(arguments)
    for line in summary_lines(report):
        echo(line)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        title = f"{report.methods[DFLASH].speedup:.2f}x, tau {report.tau:.2f}"
        for path in save_report(report, arguments.output, title):
            echo(f"written           {path}")
    return 0 if report.lossless else 1


def _measure(arguments) -> EvalReport:
    import torch
    from transformers import AutoConfig
    from transformers.utils import logging

    from dflash_hf.modeling.configuration_dflash import DFlashDraftConfig

    AutoConfig.from_pretrained(arguments.target)  # says more clearly than the tokenizer that there is no model
    given = template_arguments(arguments.template_args)
    kwargs = template_kwargs(given, draft_config=DFlashDraftConfig.from_pretrained(arguments.draft), say=note)
    encoder = RowEncoder(load_tokenizer(arguments.target), chat_template_kwargs=kwargs)
    prompts = read_prompts(arguments.data, encoder, arguments.prompts, arguments.split, arguments.raw)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    target, draft = load_pair(arguments)
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
