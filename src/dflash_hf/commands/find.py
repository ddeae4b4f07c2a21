"""
`dflash find`: drafters of a target on the Hub.

    dflash find Qwen/Qwen3-8B
"""

from dflash_hf.terminal import Outcome, positive


def add_arguments(parser) -> None:
    parser.add_argument("target", help="Hub name of the target")
    parser.add_argument("--limit", type=positive, default=20, help="maximum number of results (default: %(default)s)")


def run(arguments, echo) -> Outcome:
    from dflash_hf.hub.find import find_drafters
    from dflash_hf.smollm2 import HUB_NAME

    target = HUB_NAME if arguments.target_name else arguments.target
    found = find_drafters(target, arguments.limit)
    for one in found:
        echo(f"{one.downloads:>10,}  {one.repo}")
    if not found:
        echo(f"No drafter on the Hub names {target} as its base_model; train one with `dflash train`.")
    return Outcome(facts={"target": target, "drafters": [vars(one) for one in found]})
