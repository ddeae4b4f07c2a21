"""`dflash features`."""

from dflash_hf.commands.shared import add_data, add_examples, add_loading, add_output
from dflash_hf.names import DTYPES
from dflash_hf.terminal import amount, count, output_folder, positive, token_id


AGAIN = "the same command goes on after the last complete shard"


def add_arguments(parser) -> None:
    add_data(parser)
    parser.add_argument("--target", required=True, help="folder or Hub name of the target")
    add_output(parser, "folder; an existing one is continued", output_folder, required=True)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--draft-config", help="config.json, folder or Hub name of the drafter that will read them")
    which.add_argument(
        "--target-layer-ids",
        type=count,
        nargs="+",
        help="layers of the target, from 0; default: five by the paper's rule, fewer of a shallow target",
    )
    parser.add_argument(
        "--states",
        action="store_true",
        help="also the final hidden states, for loss_type=kl or dpace_kl, or label_source=target",
    )
    parser.add_argument("--max-length", type=positive, default=3072, help="cut examples here; default: %(default)s")
    parser.add_argument("--mask-token-id", type=token_id, help="the drafter's mask token; rows that hold it drop out")
    parser.add_argument(
        "--store-dtype",
        choices=DTYPES,
        default="bfloat16",
        help="default: %(default)s",
    )
    parser.add_argument("--shard-size", type=amount, default=1.0, help="GB; default: %(default)s")
    parser.add_argument("--batch-size", type=positive, default=8, help="default: %(default)s")
    parser.add_argument("--num-proc", type=positive, help="processes that encode the dataset")
    add_loading(parser, draft=False)
    add_examples(
        parser,
        "dflash features responses.jsonl --target Qwen/Qwen3-8B --output features",
        "dflash train target=Qwen/Qwen3-8B features=features output_dir=my-drafter",
        after=AGAIN,
    )


def run(arguments, echo):
    from dflash_hf.training.offline import run

    return run(arguments, echo)
