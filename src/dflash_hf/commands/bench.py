"""`dflash bench`."""

from dflash_hf.commands.shared import add_examples, add_loading, add_output
from dflash_hf.terminal import amount, positive


SHAPES = ("100m", "demo", "qwen3-0.6b", "qwen3-4b", "qwen3-8b", "tiny")  # of evaluation.bench_pairs, held to it
METHODS = "target,dflash,dflash_tree,dflash_compiled,native,prompt_lookup"  # of evaluation.bench, likewise


def add_arguments(parser) -> None:
    parser.add_argument("--target", help="the target: a folder or a repository")
    parser.add_argument("--draft", help="its drafter")
    parser.add_argument("--data", help="prompts: a .txt, JSON Lines, JSON, CSV or Parquet file, or a dataset")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of that shape, instead of a pair")
    parser.add_argument("--forced-acceptance", type=amount, help="tokens per verification of an oracle draft")
    parser.add_argument("--prompts", type=positive, default=4, help="how many; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=positive, default=128, help="default: %(default)s")
    parser.add_argument("--runs", type=positive, default=5, help="timed repetitions; default: %(default)s")
    parser.add_argument(
        "--methods",
        default=METHODS,
        help="separated by commas; also target_static, and dflash_ with any of tree, compiled, packed joined by _; "
        "default: %(default)s",
    )
    parser.add_argument("--assistant", help="a small autoregressive assistant to time as well")
    parser.add_argument("--reference", help="a checkout of z-lab/dflash to time as well")
    parser.add_argument("--reference-python", help="its interpreter; default: this one")
    parser.add_argument("--threads", type=positive, help="CPU threads of this process; default: as torch chooses")
    add_output(parser, "folder for bench.json, bench.md and bench.png")
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
