"""`dflash train`."""

from dflash_hf.commands.shared import add_examples


AGAIN = "the same command with resume_from_checkpoint=auto goes on from the last checkpoint"
# What a run is changed by first; the others are well as they are.
FIRST = (
    ("target", "folder or Hub name of the model to draft for"),
    ("data", "its own responses: a .jsonl file of `dflash regenerate`, or a dataset"),
    ("output_dir", "folder for the drafter"),
    ("per_device_train_batch_size", "rows at a time; 1 where memory is short"),
    ("num_train_epochs", "passes over the data; 6"),
    ("learning_rate", "6e-4"),
    ("bf16", "true on a GPU that has it"),
)


def add_arguments(parser) -> None:
    parser.add_argument("--config", help="YAML file of keys and values; `dflash recipes` has some")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="replaces or adds a key; key.inner=value too"
    )
    parser.add_argument("--dry-run", action="store_true", help="check the recipe, print it, and load nothing")
    parser.add_argument(
        "--keys",
        nargs="?",
        const="",
        metavar="WORD",
        help="list the keys that hold WORD, or all, with defaults: pair and data, training, transformers' own",
    )
    add_examples(
        parser,
        "dflash train target=Qwen/Qwen3-0.6B data=responses.jsonl output_dir=my-drafter bf16=true",
        "dflash train --config recipe.yaml learning_rate=3e-4 --dry-run",
        "dflash train --keys save",
        "accelerate launch -m dflash_hf.cli train --config recipe.yaml       # several GPUs",
        after=AGAIN,
    )
    first = "\n".join(f"  {name:28} {what}" for name, what in FIRST)
    parser.epilog = f"the keys that matter first:\n{first}\n\n{parser.epilog}"


def run(arguments, echo):
    from dflash_hf.training.train import run

    return run(arguments, echo)
