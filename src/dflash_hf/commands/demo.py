"""
`dflash demo`: compare SmolLM2-135M with and without its drafter.

    dflash demo
    dflash demo --dtype float32 --prompts 30
"""

from dflash_hf._io.argument_types import output_folder, positive
from dflash_hf._io.terminal import Outcome, wants_color
from dflash_hf.commands import shared


RESUME_HINT = "the same command starts again"


def add_arguments(parser) -> None:
    parser.add_argument("--draft", help="another drafter of SmolLM2-135M-Instruct (default: the bundled one)")
    parser.add_argument("--prompts", type=positive, default=8, help="number of prompts (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=positive, default=40, help="longest answer (default: %(default)s)")
    parser.add_argument("--runs", type=positive, default=1, help="timed repetitions (default: %(default)s)")
    shared.add_dtype(parser, ("auto", "bfloat16", "float32"), "auto")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads (default: %(default)s)")
    parser.add_argument("--output", type=output_folder, help="for the results (default: ~/.cache/dflash_hf/demo)")
    shared.add_color(parser, "accepted draft tokens")


def run(arguments, echo) -> Outcome:
    import json

    import torch

    from dflash_hf._io.files import default_cache_dir
    from dflash_hf.demo.run import demo_prompts, run_demo
    from dflash_hf.pairs.configs import read_config
    from dflash_hf.smollm2 import load_pair

    if arguments.draft is not None:
        read_config(arguments.draft, f"--draft {arguments.draft}")  # fail before the target is loaded
    rows = demo_prompts(arguments.prompts)  # likewise
    output = arguments.output or default_cache_dir() / "demo"
    torch.set_num_threads(arguments.threads)
    pair = load_pair(arguments.dtype, arguments.draft)
    color = wants_color(arguments.color, echo.stream)
    report = run_demo(pair, rows, arguments.max_new_tokens, arguments.runs, output, color, say=echo)
    return Outcome(1 if report.is_wrong else 0, json.loads(report.to_json()))
