"""`dflash demo`."""

import sys

from dflash_hf.commands.shared import add_examples
from dflash_hf.terminal import Outcome, add_color, count, output_path, positive, wants_color


AGAIN = "the same command trains anew; a half-trained pair is not kept"


def add_arguments(parser) -> None:
    parser.add_argument("--fresh", action="store_true", help="train even if a trained pair is in the cache")
    parser.add_argument(
        "--cache-dir",
        type=output_path,
        help="where pair, figures and picture are kept; default: ~/.cache/dflash_hf/demo",
    )
    parser.add_argument("--seed", type=count, default=0, help="of data, weights and anchors; default: %(default)s")
    parser.add_argument("--self-generate", action="store_true", help="train the drafter on the target's own answers")
    parser.add_argument("--source", help="folder of Python files to learn from; default: the standard library")
    parser.add_argument("--prompts", type=positive, default=40, help="held-out lines to decode; default: %(default)s")
    parser.add_argument("--runs", type=positive, default=2, help="timed repetitions; default: %(default)s")
    parser.add_argument("--target-steps", type=positive, help="optimizer steps of the target")
    parser.add_argument("--draft-steps", type=positive, help="optimizer steps of the drafter")
    add_color(parser, "accepted draft tokens")
    add_examples(parser, "dflash demo", "dflash demo --fresh --seed 1 --prompts 100")


def run(arguments, echo) -> Outcome:
    import json
    from pathlib import Path

    from dflash_hf.demo.cache import default_cache_dir
    from dflash_hf.demo.run import DemoSettings, run_demo

    if arguments.source and not Path(arguments.source).is_dir():
        raise FileNotFoundError(f"--source {arguments.source}: there is no such folder.")
    chosen = {
        "seed": arguments.seed,
        "self_generate": arguments.self_generate,
        "source": arguments.source and str(Path(arguments.source).resolve()),
        "target_steps": arguments.target_steps,
        "draft_steps": arguments.draft_steps,
    }
    report = run_demo(
        DemoSettings(**{name: value for name, value in chosen.items() if value is not None}),
        arguments.cache_dir or default_cache_dir(),
        arguments.fresh,
        arguments.prompts,
        arguments.runs,
        wants_color(arguments.color, sys.stdout),
        say=echo,
    )
    return Outcome(1 if report.is_wrong else 0, json.loads(report.to_json()))
