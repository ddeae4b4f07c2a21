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

    found = find_drafters(arguments.target, arguments.limit)
    for one in found:
        echo(f"{one.downloads:>10,}  {one.repo}")
    if not found:
        echo(f"No drafter on the Hub names {arguments.target} as its base_model; train one with `dflash train`.")
    return Outcome(facts={"target": arguments.target, "drafters": [vars(one) for one in found]})
