"""
`dflash doctor`.

    dflash doctor --target Qwen/Qwen3-0.6B --draft my-drafter --data prompts.jsonl
    dflash doctor --target my-quantised-model --base Qwen/Qwen3-0.6B --draft my-drafter

The exit status is 1 if a cause was found.
"""

from itertools import islice
from pathlib import Path

from dflash_hf.commands import shared
from dflash_hf.commands.pair import NamedPair
from dflash_hf.terminal import Outcome, bar, note, positive


def add_arguments(parser) -> None:
    shared.add_pair(parser, required=True)
    parser.add_argument("--base", help="the original of a quantised or fine-tuned target, to compare with")
    parser.add_argument("--data", help="prompts, as for `dflash eval` (default: bundled prompts)")
    parser.add_argument("--split", help="split of the dataset (default: train, or the only one)")
    parser.add_argument("--prompts", type=positive, default=24, help="number of prompts (default: %(default)s)")
    parser.add_argument("--blocks", type=positive, default=16, help="blocks per text (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=positive, default=128, help="longest text (default: %(default)s)")
    shared.add_template_arguments(parser)
    shared.add_threads(parser)
    shared.add_loading(parser)


def run(arguments, echo) -> Outcome:
    """`dflash doctor`: `echo` the experiments, the likeliest cause and its remedy; exit status 1 if there is one."""
    from dflash_hf.configs import check_names
    from dflash_hf.doctor.diagnosis import diagnose
    from dflash_hf.doctor.experiments import Case
    from dflash_hf.doctor.texts import Writer
    from dflash_hf.evaluation.sets import rows_of, rows_of_every_kind
    from dflash_hf.pairs import Loading, load_target
    from dflash_hf.target import freeze

    pair = NamedPair(arguments, note)
    if arguments.base is not None:
        check_names(arguments.base, None, Loading(), form="--base {1}")
    rows = rows_of_every_kind(arguments.prompts)
    if arguments.data is not None:
        rows = list(islice(rows_of(arguments.data, arguments.split), arguments.prompts))
    draft, encoder, target = pair.draft(), pair.encoder(pair.template()), freeze(pair.target())
    base = None
    if arguments.base is not None:
        same = Loading(arguments.dtype, trust_remote_code=arguments.trust_remote_code)
        base = freeze(load_target(arguments.base, same, pair.device))
    writer = Writer(target, draft.config.block_size, arguments.max_new_tokens, arguments.blocks)
    case = Case(target, draft, writer, rows, encoder, base, _tokenizers(arguments), _names(arguments))
    result = diagnose(case, bar("trying"))
    for line in result.lines():
        echo(line)
    return Outcome(0 if result.cause is None else 1, result.facts())


def _names(arguments) -> dict[str, str]:
    from dflash_hf.files import read_json

    names = {"target": arguments.target, "draft": arguments.draft, "drafter": arguments.draft}
    if arguments.base is not None:
        names["base"] = names["origin"] = arguments.base
    facts = Path(arguments.draft) / "card_facts.json"
    if "origin" not in names and facts.is_file():
        names["origin"] = read_json(facts).get("base_model") or "REPOSITORY"
    return names


def _tokenizers(arguments) -> dict:
    """The tokenizers of the base model and of the drafter's folder, if they have one."""
    from dflash_hf.data.prepare import load_tokenizer

    found = {}
    for origin, name in (("base", arguments.base), ("drafter", arguments.draft)):
        if name is not None and (origin == "base" or (Path(name) / "tokenizer.json").is_file()):
            found[origin] = load_tokenizer(name, None, None, arguments.trust_remote_code)
    return found
