"""The prompts of a dataset, and `dflash eval`, which decodes them with and without a drafter."""

import json
from itertools import islice
from pathlib import Path

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prepare import load_tokenizer
from dflash_hf.data.prompts import prompt_ids, template_kwargs
from dflash_hf.evaluation.journal import JOURNAL_FILE, Journal
from dflash_hf.evaluation.measure import (
    DFLASH,
    PACKED,
    PROMPT_LOOKUP,
    TARGET,
    TARGET_PACKED,
    TREE,
    TREE_NODES,
    TREE_PACKED,
    EvalReport,
    evaluate,
)
from dflash_hf.evaluation.report import save_report
from dflash_hf.evaluation.sets import GENERATED, NAMED, NEW_TOKENS, conversations, rows_of
from dflash_hf.evaluation.text import summary_lines
from dflash_hf.files import digest_of
from dflash_hf.pairs import (
    Loading,
    check_pair,
    device_of,
    draft_config_of,
    drafter_of,
    load_target,
    positions_of,
)
from dflash_hf.target import digest_of_parameters, digest_of_target
from dflash_hf.terminal import Outcome, UsageError, note, template_arguments


NO_THINKING = {"enable_thinking": False}  # as the field measures, where nothing else is said


def read_prompts(data: str, encoder: RowEncoder, limit: int, split: str | None = None, raw: bool = False):
    """
    The first `limit` prompts of a dataset, see [`~dflash_hf.evaluation.sets.rows_of`].

    Raises:
        `ValueError`: a row without a prompt; names it.
    """
    prompts = []
    for index, row in enumerate(islice(iter(rows_of(data, split)), limit)):
        try:
            prompts.append(prompt_ids(encoder, row, raw))
        except ValueError as error:
            raise ValueError(f"Row {index} of {data}: {error}") from error
    return prompts


def prompts_of_conversations(
    target, encoder: RowEncoder, said: list[list[str]], max_new_tokens: int, progress=iter, raw: bool = False
):
    """
    The prompt of every turn of every conversation, in order; answers in between are the target's own, greedy.

    Args:
        said (`list[list[str]]`): Of each conversation what the user says, turn by turn.
        raw (`bool`): Each turn is text by itself, as it is where there is no chat template.
    """
    import torch

    prompts = []
    for turns in progress(said):
        messages: list[dict] = []
        for number, turn in enumerate(turns, start=1):
            messages.append({"role": "user", "content": turn})
            row = {"messages": messages} if encoder.tokenizer.chat_template and not raw else {"prompt": turn}
            prompts.append(list(prompt_ids(encoder, row, raw)))
            if number < len(turns):
                ids = torch.tensor([prompts[-1]], device=target.device)
                mask = torch.ones_like(ids)
                output = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens)
                answer = encoder.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
                messages.append({"role": "assistant", "content": answer})
    return prompts


def run(arguments, echo) -> Outcome:
    """`dflash eval`: `echo` the table, write the report; 1 when an output is WRONG."""
    if arguments.compare:
        from dflash_hf.evaluation.compare import run as compare

        return compare(arguments.compare, echo)
    missing = [f"--{name}" for name in ("target", "draft") if getattr(arguments, name) is None]
    if missing or (arguments.data is None) == (arguments.dataset is None):
        raise UsageError(f"Give {', '.join(missing) or 'either --dataset or --data'}, or two reports to --compare.")
    if arguments.dataset not in (None, *NAMED, *GENERATED):
        arguments.data, arguments.dataset = arguments.dataset, None
    report = _measure(arguments)
    for line in summary_lines(report):
        echo(line)
    if arguments.output is not None:
        title = f"{report.methods[DFLASH].speedup:.2f}x, tau {report.tau:.2f}"
        for path in save_report(report, arguments.output, title):
            echo(f"written           {path}")
        (arguments.output / JOURNAL_FILE).unlink(missing_ok=True)
    return Outcome(1 if report.is_wrong else 0, json.loads(report.to_json()))


def _measure(arguments) -> EvalReport:
    import torch
    from transformers.utils import logging

    loading = Loading.of(arguments)
    config = check_pair(arguments.target, arguments.draft, loading)
    device = device_of(loading.device)
    tokenizer = load_tokenizer(arguments.target, None, loading.revision, loading.trust_remote_code)
    kwargs = _template_kwargs(arguments, tokenizer, draft_config_of(arguments.draft, loading))
    encoder = RowEncoder(tokenizer, chat_template_kwargs=kwargs, positions=positions_of(config))
    named = NAMED.get(arguments.dataset)
    max_new_tokens = arguments.max_new_tokens or (NEW_TOKENS if named else 256)
    methods = [
        *([TARGET, TARGET_PACKED, DFLASH, PACKED] if arguments.packed else [TARGET, DFLASH]),
        *(([TREE, TREE_PACKED] if arguments.packed else [TREE]) if arguments.tree_nodes else []),
        *([PROMPT_LOOKUP] if arguments.prompt_lookup else []),
    ]
    # What is asked is read before anything large is loaded.
    prompts = said = None
    if arguments.dataset is None:
        local = Path(arguments.data).expanduser()
        said, repository = _turns_of_file(arguments), local.name if local.exists() else arguments.data
        if said is None:
            prompts = read_prompts(arguments.data, encoder, arguments.prompts or 40, arguments.split, arguments.raw)
    else:
        said, repository = conversations(arguments.dataset, arguments.prompts)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    draft = drafter_of(arguments, loading, device)
    draft.decoding_config.tree_nodes = None  # drafted beside blocks, not in their place
    target = load_target(arguments.target, loading, device)
    journal = None
    if arguments.output is not None:
        what = _what(arguments, target, draft, said or prompts, kwargs, methods, max_new_tokens)
        journal = Journal(arguments.output / JOURNAL_FILE, what)

    def bar(desc):
        return lambda some: logging.tqdm(some, desc=desc, disable=None, leave=False)

    if journal is not None and journal.prompts is not None:
        prompts = journal.prompts
        note(f"{len(journal.records)} of {len(prompts) * arguments.runs} answers are in {journal.path}: going on")
    else:
        if prompts is None:
            asked = (target, encoder, said, max_new_tokens, bar("first turns"), arguments.raw)
            prompts = prompts_of_conversations(*asked)
        if journal is not None and prompts:
            journal.begin([list(prompt) for prompt in prompts])
    report = evaluate(
        target,
        draft,
        prompts,
        max_new_tokens=max_new_tokens,
        runs=arguments.runs,
        methods=methods,
        progress=bar("decoding"),
        journal=journal,
        tree_nodes=arguments.tree_nodes or TREE_NODES,
    )
    report.setting |= {"dataset": repository, "prompts_digest": digest_of([list(one) for one in prompts])}
    return report


def _turns_of_file(arguments) -> list[list[str]] | None:
    """
    Of `--data`, what the user says turn by turn, where its rows have `turns`.

    Raises:
        `ValueError`: a row has others than texts; names it.
    """
    if arguments.data.endswith(".txt"):
        return None
    rows = list(islice(iter(rows_of(arguments.data, arguments.split)), arguments.prompts or 40))
    if not rows or "turns" not in rows[0]:
        return None
    for index, row in enumerate(rows):
        turns = row["turns"]
        if not (isinstance(turns, list) and turns and all(isinstance(one, str) and one for one in turns)):
            raise ValueError(f"Row {index} of {arguments.data}: turns={turns!r} must be a list of the user's texts.")
    return [list(row["turns"]) for row in rows]


def _template_kwargs(arguments, tokenizer, draft_config) -> dict:
    given = template_arguments(arguments.template_args)
    trained_with = (draft_config.dflash_config or {}).get("chat_template_kwargs")
    if given is None and trained_with is None and arguments.dataset in NAMED:
        given = NO_THINKING if "enable_thinking" in str(tokenizer.chat_template) else None
    return template_kwargs(given, draft_config=draft_config, say=note)


def _what(arguments, target, draft, asked, kwargs: dict, methods: list[str], max_new_tokens: int) -> dict:
    """What decides the outcome, for a journal."""
    import torch

    return {
        "target": digest_of_target(target),
        "draft": digest_of_parameters(draft.named_parameters()),
        "draft_config": digest_of(draft.config.to_diff_dict()),
        "asked": digest_of(asked),
        "chat_template_kwargs": kwargs,
        "methods": methods,
        "runs": arguments.runs,
        "max_new_tokens": max_new_tokens,
        "raw": arguments.raw,
        "dtype": str(target.dtype),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "compile": arguments.compile,
        "tree_nodes": arguments.tree_nodes,
    }
