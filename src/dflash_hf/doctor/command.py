"""`dflash doctor`."""

import json
from itertools import islice
from pathlib import Path

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prepare import load_tokenizer
from dflash_hf.data.prompts import template_kwargs
from dflash_hf.evaluation.sets import GENERATED, generated_rows, rows_of
from dflash_hf.pairs import Loading, check_pair, device_of, load_draft, load_target
from dflash_hf.terminal import Outcome, note, template_arguments


def run(arguments, echo) -> Outcome:
    """`dflash doctor`: `echo` what was tried, the likeliest cause and its remedy; 1 when there is one."""
    import torch
    from transformers.utils import logging

    from dflash_hf.doctor.diagnosis import diagnose
    from dflash_hf.doctor.experiments import Case
    from dflash_hf.doctor.texts import Writer
    from dflash_hf.target import freeze

    loading = Loading.of(arguments)
    check_pair(arguments.target, arguments.draft, loading)
    if arguments.base is not None:
        check_pair(arguments.base, None, Loading(), form="--base {1}")
    rows = default_rows(arguments.prompts)
    if arguments.data is not None:
        rows = list(islice(rows_of(arguments.data, arguments.split), arguments.prompts))
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = device_of(loading.device)
    draft = load_draft(arguments.draft, loading, device)
    given = template_arguments(arguments.template_args)
    kwargs = template_kwargs(given, draft_config=draft.config, say=note)
    tokenizer = load_tokenizer(arguments.target, None, loading.revision, loading.trust_remote_code)
    target = freeze(load_target(arguments.target, loading, device))
    base = None
    if arguments.base is not None:
        same = Loading(loading.dtype, loading.device, trust_remote_code=loading.trust_remote_code)
        base = freeze(load_target(arguments.base, same, device))
    case = Case(
        target,
        draft,
        Writer(target, draft.config.block_size, arguments.max_new_tokens, arguments.blocks),
        rows,
        RowEncoder(tokenizer, chat_template_kwargs=kwargs),
        base,
        _tokenizers(arguments),
        _names(arguments),
    )
    result = diagnose(case, lambda some: logging.tqdm(some, desc="trying", disable=None, leave=False))
    for line in result.lines():
        echo(line)
    return Outcome(0 if result.cause is None else 1, result.facts())


def default_rows(count: int) -> list[dict]:
    """Requests made by rule, of every kind in turn."""
    each = [generated_rows(kind, -(-count // len(GENERATED))) for kind in GENERATED]
    return [row for some in zip(*each, strict=True) for row in some][:count]


def _names(arguments) -> dict[str, str]:
    names = {"target": arguments.target, "draft": arguments.draft, "drafter": arguments.draft}
    if arguments.base is not None:
        names["base"] = names["origin"] = arguments.base
    facts = Path(arguments.draft).expanduser() / "card_facts.json"
    if "origin" not in names and facts.is_file():
        names["origin"] = json.loads(facts.read_text(encoding="utf-8")).get("base_model") or "REPOSITORY"
    return names


def _tokenizers(arguments) -> dict:
    """Those of the base and of the drafter's folder, where they have one."""
    found = {}
    for origin, name in (("base", arguments.base), ("drafter", arguments.draft)):
        if name is not None and (origin == "base" or (Path(name).expanduser() / "tokenizer.json").is_file()):
            found[origin] = load_tokenizer(name, None, None, arguments.trust_remote_code)
    return found
