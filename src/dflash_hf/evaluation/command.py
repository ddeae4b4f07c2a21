"""The prompts of a dataset, and `dflash eval`, which decodes them with and without a drafter."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prepare import load_tokenizer, template_arguments
from dflash_hf.data.sources import load_rows
from dflash_hf.evaluation.measure import DFLASH, PACKED, PROMPT_LOOKUP, TARGET, TARGET_PACKED, EvalReport, evaluate
from dflash_hf.evaluation.report import save_report
from dflash_hf.evaluation.text import summary_lines
from dflash_hf.terminal import positive


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
    parser.add_argument(
        "--template-args",
        metavar="JSON",
        help="arguments of the chat template, such as '{\"enable_thinking\": false}'; default: those of training",
    )
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
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    from dflash_hf.modeling.configuration_dflash import DFlashDraftConfig
    from dflash_hf.modeling.modeling_dflash import DFlashDraftModel

    AutoConfig.from_pretrained(arguments.target)  # says more clearly than the tokenizer that there is no model
    if arguments.template_args is None:
        nested = DFlashDraftConfig.from_pretrained(arguments.draft).dflash_config or {}
        template_kwargs = nested.get("chat_template_kwargs") or {}
    else:
        template_kwargs = template_arguments(arguments.template_args)
    encoder = RowEncoder(load_tokenizer(arguments.target), chat_template_kwargs=template_kwargs)
    prompts = read_prompts(arguments.data, encoder, arguments.prompts, arguments.split, arguments.raw)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    loading = {"dtype": arguments.dtype, "device_map": device}
    target = AutoModelForCausalLM.from_pretrained(arguments.target, **loading).eval()
    draft = DFlashDraftModel.from_pretrained(arguments.draft, **loading).eval()
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
