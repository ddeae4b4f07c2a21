"""`dflash bench`."""

from dflash_hf.commands.shared import add_examples, add_loading, add_output
from dflash_hf.terminal import add_template_arguments, amount, output_folder, positive


SHAPES = ("100m", "demo", "qwen3-0.6b", "qwen3-4b", "qwen3-8b", "tiny")  # of evaluation.bench_pairs, held to it
# Of evaluation.bench, likewise: all, and those that a CPU times by default.
METHODS = (
    "target",
    "target_packed",
    "dflash",
    "dflash_packed",
    "dflash_compiled",
    "dflash_compiled_packed",
    "dflash_tree",
    "dflash_tree_packed",
    "dflash_tree_compiled",
    "dflash_tree_compiled_packed",
    "target_static",
    "native",
    "prompt_lookup",
)
ON_CPU = (
    "target",
    "target_packed",
    "dflash",
    "dflash_packed",
    "dflash_tree",
    "dflash_compiled",
    "native",
    "prompt_lookup",
)


def add_arguments(parser) -> None:
    parser.add_argument("--target", help="the target: a folder or a repository")
    parser.add_argument("--draft", help="its drafter")
    parser.add_argument("--data", help="prompts: a .txt, JSON Lines, JSON, CSV or Parquet file, or a dataset")
    add_template_arguments(parser)
    parser.add_argument("--shape", choices=SHAPES, help="random weights of that shape, instead of a pair")
    parser.add_argument("--forced-acceptance", type=amount, help="tokens per verification of an oracle draft")
    parser.add_argument("--prompts", type=positive, default=4, help="how many; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=positive, default=128, help="default: %(default)s")
    parser.add_argument("--runs", type=positive, default=5, help="timed repetitions; default: %(default)s")
    parser.add_argument(
        "--methods",
        help=f"separated by commas: {', '.join(METHODS)}; default: {','.join(ON_CPU)} on a CPU, else without the "
        "packed ones",
    )
    parser.add_argument("--assistant", help="a small autoregressive assistant to time as well")
    parser.add_argument("--reference", help="a checkout of z-lab/dflash to time as well")
    parser.add_argument("--reference-python", help="its interpreter; default: this one")
    parser.add_argument("--threads", type=positive, help="CPU threads of this process; default: as torch chooses")
    add_output(parser, "folder for bench.json, bench.md and bench.png", output_folder)
    add_loading(parser)
    parser.set_defaults(dtype="float32")
    add_examples(
        parser,
        "dflash bench --target Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --data prompts.jsonl --dtype bf16",
        "dflash bench --shape 100m --forced-acceptance 6.5",
    )


def run(arguments, echo):
    from dflash_hf.evaluation.bench import run

    return run(arguments, echo)
