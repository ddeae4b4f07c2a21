"""
`dflash doctor`: find the cause of low acceptance by experiment.

    dflash doctor --target Qwen/Qwen3-0.6B --draft my-drafter --data prompts.jsonl
    dflash doctor --target my-quantised-model --base Qwen/Qwen3-0.6B --draft my-drafter

The exit status is 1 if a cause was found.
"""

from dflash_hf._io.argument_types import positive
from dflash_hf._io.progress import bar
from dflash_hf._io.terminal import Outcome
from dflash_hf.commands import shared
from dflash_hf.commands.pair import NamedPair


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
    """`echo` the experiments, and the likeliest cause with its remedy; the exit status is 1 if there is a cause."""
    from dataclasses import replace

    from dflash_hf.doctor import PairCase, TrainingHistory, diagnose
    from dflash_hf.evaluation.sets import eval_rows, rows_of_every_kind
    from dflash_hf.pairs.configs import check_pair_configs
    from dflash_hf.pairs.loading import Loading, load_target
    from dflash_hf.targets.frozen import freeze

    pair = NamedPair(arguments)
    if arguments.base is not None:
        check_pair_configs(arguments.base, None, Loading(), target_argument="base")
    rows = rows_of_every_kind(arguments.prompts)
    if arguments.data is not None:
        rows = eval_rows(arguments.data, arguments.prompts, arguments.split)
    draft = pair.draft()
    target = freeze(pair.target())
    encoder = pair.encoder(pair.template())
    encoder = replace(encoder, template=replace(encoder.template, reader=None))  # its experiments are of texts
    base = None
    if arguments.base is not None:
        loading = Loading(arguments.dtype, trust_remote_code=arguments.trust_remote_code)
        base = freeze(load_target(arguments.base, loading, pair.device))
    case = PairCase(target, draft, rows, encoder, base, arguments.max_new_tokens, arguments.blocks)
    case.training = TrainingHistory.from_folder(arguments.draft)
    result = diagnose(case, bar("trying"))
    for line in result.lines():
        echo(line)
    return Outcome(0 if result.cause is None else 1, result.facts())
