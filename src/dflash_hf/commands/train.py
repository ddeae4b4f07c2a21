"""
`dflash train`.

    dflash train --target Qwen/Qwen3-0.6B --data responses.jsonl --output my-drafter bf16=true
    dflash train --config recipe.yaml learning_rate=3e-4 --dry-run
    dflash train --keys save
    accelerate launch -m dflash_hf.cli train --config recipe.yaml       # several GPUs

settings to change first:
    per_device_train_batch_size  rows at a time; 1 if memory is short (a step keeps its rows, by accumulation)
    max_minutes                  the length of the run (default: 3,000 steps on a CPU, else 6 passes over the data)
    learning_rate                (default: 1e-3 on a CPU, else 6e-4)
    bf16                         true on a GPU that supports it
"""

import json
import shlex
from dataclasses import replace

from dflash_hf.data.sources import check_files
from dflash_hf.terminal import Outcome, is_secret, note


LONG = 3072  # tokens, the paper's longest texts
# Memory at a hidden size of 4096 of a slot of a block, its activations stored or recomputed, and of a token of a text,
# from measurements of a tiny target (examples/benchmarks/results/long_texts.md).
GB_PER_SLOT_STORED = 1.5e-3
GB_PER_SLOT_RECOMPUTED = 0.55e-3
GB_PER_TOKEN = 0.48e-3
AGAIN = "the same command with resume_from_checkpoint=auto goes on from the last checkpoint (see save_steps), or anew"
_FLAGS = {"target": "target", "draft": "draft", "data": "data", "output": "output_dir"}


def add_arguments(parser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML recipe (examples/recipes has some)")
    parser.add_argument("--target", help="the target: a folder or Hub name; short for target=TARGET")
    parser.add_argument("--draft", help="a drafter to start from: a folder or Hub name; short for draft=DRAFT")
    parser.add_argument("--data", help="its responses (`dflash regenerate`) or a dataset; short for data=DATA")
    parser.add_argument("--output", metavar="FOLDER", help="for the drafter; short for output_dir=FOLDER")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="other settings of the recipe; key.inner=value too"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the settings, and who decided each")
    parser.add_argument(
        "--keys", nargs="?", const="", metavar="WORD", help="list the settings (that contain WORD) with their defaults"
    )


def remedy(unknown: list[str], words: list[str]) -> str:
    """What to write instead of options that `dflash train` does not have, among the words of its command line."""
    settings = []
    for option in unknown:
        if not option.startswith("--"):
            continue
        name, equals, value = option.removeprefix("--").partition("=")
        following = words[words.index(option) + 1 :] if option in words else []
        if not equals:
            has_value = bool(following) and not following[0].startswith("--") and "=" not in following[0]
            value = following[0] if has_value else "true"
        settings.append(shlex.quote(f"{name.replace('-', '_')}={value}"))
    return f"write {' '.join(settings)}" if settings else "settings are written as key=value"


def overrides_of(arguments) -> list[str]:
    """The settings given as flags and as `key=value`, all as `key=value`."""
    settings = {key: getattr(arguments, flag) for flag, key in _FLAGS.items()}
    return [f"{key}={value}" for key, value in settings.items() if value is not None] + arguments.overrides


def run(arguments, echo) -> Outcome:
    from dflash_hf.smollm2 import folder_of
    from dflash_hf.training.recipe import as_arguments, decide, key_lines

    if arguments.keys is not None:
        lines = key_lines(arguments.keys)
        for line in lines:
            echo(line)
        return Outcome(facts={"keys": lines})
    settings = decide(arguments.config, overrides_of(arguments))
    recipe, training = as_arguments(settings)
    recipe = replace(recipe, target=folder_of(recipe.target), draft=folder_of(recipe.draft, drafter=True))
    if not training.get("output_dir"):
        raise ValueError("No output folder is given; name the folder for the drafter with --output.")
    for name in ("data", "eval_data"):
        check_files(name, getattr(recipe, name))
    unread = [name for name in ("eval_data", "eval_split", "eval_features") if getattr(recipe, name)]
    if unread and training.get("eval_strategy", "no") == "no":
        raise ValueError(
            f"{unread[0]}={getattr(recipe, unread[0])!r} is never read with eval_strategy=no: set eval_strategy=steps "
            "and eval_steps, or leave it out."
        )
    if arguments.dry_run:
        _warn_of_long_texts(recipe, training)
        return _dry_run(settings, echo)
    from dflash_hf.training.held_out import closing_line, taus
    from dflash_hf.training.train import leave_group, train

    trainer = train(recipe, training, echo)
    if trainer.args.process_index == 0:
        echo(f"The drafter is in {trainer.args.output_dir}")
        target = arguments.target_name or recipe.target
        words = ["dflash", "eval", "--target", target, "--draft", trainer.args.output_dir, "--data", "held_out.jsonl"]
        echo(f"Next, on prompts that it was not trained on: {shlex.join(words)}")
        echo(closing_line(trainer))
    last = {f"{kind}_simulated_tau": tau for kind, tau in taus(trainer.state.log_history).items()}
    outcome = Outcome(facts={"output_dir": trainer.args.output_dir, "steps": trainer.state.global_step, **last})
    del trainer
    leave_group()
    return outcome


def _warn_of_long_texts(recipe, training: dict) -> None:
    """Say what memory a step takes if its texts are longer than the paper's."""
    if recipe.max_length <= LONG:
        return
    slots = training.get("num_anchors", 512) * (recipe.block_size or 16)
    rows = training.get("per_device_train_batch_size", 8)
    text = GB_PER_TOKEN * recipe.max_length
    stored = rows * (GB_PER_SLOT_STORED * slots + text)
    recomputed = rows * (GB_PER_SLOT_RECOMPUTED * slots + text)
    note(
        f"max_length={recipe.max_length}: beside the weights, a step takes about {stored:.0f} GB for a target with a "
        f"hidden size of 4096, and in proportion for others; {recomputed:.0f} GB with activation_checkpointing=true. "
        "Where that is too much: fewer rows at a time, fewer num_anchors, a shorter max_length."
    )


def _dry_run(settings: dict, echo) -> Outcome:
    """The settings of a run, each with who decided it, as a recipe."""
    shown = {key: "(set)" if is_secret(key) else setting.value for key, setting in settings.items()}
    for key, value in shown.items():
        echo(f"{f'{key}: {json.dumps(value)}':40}  # {settings[key].origin}")
    return Outcome(facts=shown)
