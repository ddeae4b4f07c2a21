"""
`dflash train`: train a drafter.

    dflash train --target Qwen/Qwen3-0.6B --data responses.jsonl --output-dir my-drafter
    dflash train --config recipe.yaml --learning-rate 3e-4 --dry-run --card H200
    dflash train --keys save
    accelerate launch -m dflash_hf.cli train --config recipe.yaml       # several GPUs

every setting is an option and a recipe key (--max-minutes, max_minutes); --keys lists all, with transformers' own:
    lists are several words: --target-layer-ids 8 15 22; null unsets a setting of a recipe or preset
    mappings are YAML, or one option per entry: --peft-config '{r: 16}' or --peft-config.r 16
    if memory is short: --per-device-train-batch-size 1; gradient accumulation keeps the rows of a step
"""

import argparse
import dataclasses
import json
import re
import shlex
import typing
from dataclasses import replace

from dflash_hf._io.errors import UsageError, is_secret
from dflash_hf._io.terminal import Outcome, note
from dflash_hf.data.sources import check_files
from dflash_hf.training.arguments import DFlashOptions, ScriptArguments, allowed_types, help_of
from dflash_hf.training.presets import PAPER


PAPER_MAX_LENGTH = PAPER["max_length"].value  # tokens of the paper's longest texts
# Memory of a training step for a target with a hidden size of 4096, in proportion for others. Estimated from
# measurements of a tiny target (examples/benchmarks/results/long_texts.md).
GB_PER_SLOT_STORED = 1.5e-3  # for each slot of a block, if its activations are stored
GB_PER_SLOT_RECOMPUTED = 0.55e-3  # with --activation-checkpointing
GB_PER_TOKEN = 0.48e-3  # for each token of a text
DEFAULT_CARD = "H200"  # the paper's
RESUME_HINT = (
    "the same command with --resume-from-checkpoint auto goes on from the last checkpoint, written every --save-steps "
    "steps and at Ctrl-C, or starts again if there is none"
)
# Spellings of version 0.2, and today's: the old ones work, and a note names the new one. `key=value` stands for
# every setting.
OLD_SPELLINGS = {"--output": "--output-dir", "key=value": "--key value"}

# The settings that `--help` lists; `--keys` lists all.
LISTED = (
    "preset",
    "target",
    "draft",
    "data",
    "features",
    "eval_data",
    "output_dir",
    "mask_token_id",
    "num_draft_layers",
    "block_size",
    "head",
    "draft_vocab_size",
    "share_head",
    "max_length",
    "max_minutes",
    "learning_rate",
    "num_anchors",
    "loss_type",
)
_RECIPE_ONLY = frozenset({"debug"})  # a setting of transformers whose option means something else in all commands


def add_arguments(parser) -> None:
    parser.allow_abbrev = False  # a setting has one spelling
    parser.add_argument("--config", metavar="FILE", help="YAML recipe (examples/recipes has some)")
    parser.add_argument("--dry-run", action="store_true", help="print the settings, who decided them, and costs")
    card = f"GPU of the costs (default: {DEFAULT_CARD}); --assume NAME=X for what they assume"
    parser.add_argument("--card", metavar="NAME", help=card)
    parser.add_argument("--assume", nargs="+", metavar="NAME=X", default=[], help=argparse.SUPPRESS)
    parser.add_argument(
        "--keys", nargs="?", const="", metavar="WORD", help="list the settings (that contain WORD) with their defaults"
    )
    _add_options(parser.add_argument_group("target, drafter and data"), ScriptArguments)
    _add_options(parser.add_argument_group("training"), DFlashOptions)
    # `--peft-config.r 16` as `--entry peft_config.r=16`: argparse has no options with variable names. See `translate`.
    parser.add_argument("--entry", action="append", help=argparse.SUPPRESS)


def add_more_arguments(parser) -> None:
    """The options of transformers' `TrainingArguments`, which needs torch; `--help` does not list them."""
    from dflash_hf.training.training_args import DFlashTrainingArguments

    _add_options(parser, DFlashTrainingArguments, without=_RECIPE_ONLY.union(DFlashOptions.__annotations__))


class _StoreSetting(argparse.Action):
    """Stores the value of a setting, not its text; without the option, the namespace has no attribute for it."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        try:
            setattr(namespace, self.dest, _parse_words(self.dest, values))
        except (ValueError, ImportError) as error:
            raise argparse.ArgumentError(self, str(error)) from error


def _parse_words(name: str, words: str | list[str]):
    """The value of a setting from the words after its option: a list may be several words, or one in YAML."""
    from dflash_hf.training.recipe import HINTS, parse_option

    if not isinstance(words, list):
        return parse_option(name, words)
    kinds = allowed_types(HINTS[name])
    text = " ".join(words)
    if text == "null" or text.startswith("["):
        return parse_option(name, text)
    if len(words) == 1 and str in kinds:
        return words[0]
    return parse_option(name, f"[{', '.join(words)}]") if list[int] in kinds else words


def _add_options(parser, dataclass_type: type, without: frozenset = frozenset()) -> None:
    """Add an option for each field of a dataclass, `without` some."""
    hints = typing.get_type_hints(dataclass_type)
    for field in dataclasses.fields(dataclass_type):
        if not field.init or field.name in without:
            continue
        kinds = [typing.get_origin(kind) or kind for kind in allowed_types(hints[field.name])]
        help_text = help_of(field, hints[field.name], is_short=True).replace("%", "%%")
        options: dict = {"metavar": _metavar(field.name, kinds)}
        options["help"] = help_text if field.name in LISTED else argparse.SUPPRESS
        if bool in kinds:
            options |= {"nargs": "?", "const": "true"}
        elif list in kinds:
            options |= {"nargs": "+"}
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, dest=field.name, action=_StoreSetting, default=argparse.SUPPRESS, **options)


def _metavar(name: str, kinds: list) -> str:
    """What help calls the value of an option."""
    if bool in kinds:
        return "BOOL"
    if dict in kinds:
        return "YAML"
    if str not in kinds and typing.Literal not in kinds:
        return "X" if float in kinds else "N"
    return name.rpartition("_")[2].upper()


def translate(words: list[str], parser) -> list[str]:
    """
    The words of a command line as argparse can read them. Each word is one of these, tried in this order:

    1. the value of the option before it: it stays as it is, whatever it looks like. A further value of a list does,
       too, unless it is `key=value` with the name of a setting;
    2. an old spelling, `learning_rate=3e-4` or `--output`: it becomes the new one, which a note names;
    3. an entry of a mapping, `--peft-config.r 16` or `--peft-config.r=16`: it becomes the value of `--entry`, written
       `peft_config.r=16`, because argparse has no options with variable names;
    4. anything else: it stays as it is.
    """
    options = parser.options
    translated: list[str] = []
    new_spellings = []
    remaining = list(words)
    is_value = False  # whether the next word is the value of the option before it
    in_list = False  # whether the next word may be a further value of a list
    while remaining:
        word = remaining.pop(0)
        if not is_value and not (in_list and _is_further_value(word, options)):
            word, new_spelling = _in_new_spelling(word)
            if new_spelling is not None:
                new_spellings.append(new_spelling)
            if re.match(r"--[a-z][\w-]*\.[\w.]+(=|$)", word):  # an entry of a mapping
                name, equals, text = word.partition("=")
                if not equals and remaining:
                    text = remaining.pop(0)
                setting, _, entry = name.removeprefix("--").partition(".")
                translated += ["--entry", f"{setting.replace('-', '_')}.{entry}={text}"]
                in_list = False
                continue
        translated.append(word)
        if is_value:
            is_value = False
        elif word.startswith("--"):
            is_value = word in options and options[word].nargs in (None, "+")
            in_list = word in options and options[word].nargs == "+"
    if new_spellings:
        note(f"dflash train: settings are options since 0.3; write {' '.join(new_spellings)}")
    return translated


def _is_further_value(word: str, options: dict) -> bool:
    """Whether a word after the values of a list is another one: not an option, nor `key=value` of a setting."""
    setting = re.split("[.=]", word)[0]
    return not word.startswith("--") and f"--{setting.replace('_', '-')}" not in options


def _in_new_spelling(word: str) -> tuple[str, str | None]:
    """
    A word in the spelling of today.

    Returns:
        The word; and how a note names its new spelling, without secrets, `None` if the spelling has not changed.
    """
    name, equals, text = word.partition("=")
    if equals and re.fullmatch(r"[a-z]\w*(\.\w+)*", name):  # key=value
        setting, dot, entry = name.partition(".")
        option = f"--{setting.replace('_', '-')}{dot}{entry}"
        return f"{option}={text}", f"{option} {'...' if is_secret(setting) else shlex.quote(text)}"
    if name in OLD_SPELLINGS:
        option = OLD_SPELLINGS[name]
        return f"{option}{equals}{text}", option
    return word, None


def remedy(unknown: list[str], words: list[str], parser) -> str:
    """What to write instead of options that `dflash train` does not have; or that a file of data does not exist."""
    sentences = []
    for word in unknown:
        option = word.partition("=")[0].replace("_", "-")
        if option.startswith("--"):
            sentences.append(f"did you mean {parser.nearest_option(option, cutoff=0.0)}?")
    for option in ("--data", "--eval-data"):
        if option in words[:-1]:
            try:
                check_files(option, words[words.index(option) + 1])
            except FileNotFoundError as error:
                sentences.append(str(error))
    return " ".join(sentences) or "settings are written as --name value"


def settings_of(arguments) -> dict[str, typing.Any]:
    """The settings of a command line by name; an entry of a mapping as `peft_config.r`."""
    from dflash_hf.training.recipe import HINTS, parse_option

    names = HINTS.keys() - _RECIPE_ONLY
    settings = {name: value for name, value in vars(arguments).items() if name in names}
    for entry in arguments.entry or ():
        name, _, text = entry.partition("=")
        settings[name] = parse_option(name, text)
    return settings


def run(arguments, echo) -> Outcome:
    from dflash_hf.training.recipe import as_arguments, decide, key_lines, machine_lines

    if arguments.keys is not None:
        lines = key_lines(arguments.keys)
        for line in lines:
            echo(line)
        return Outcome(facts={"keys": lines})
    settings = decide(arguments.config, settings_of(arguments))
    script, training = as_arguments(settings)
    # Before its data are made, a recipe says what they would cost.
    wants_costs = bool(script.mixture or arguments.card or arguments.assume)
    may_lack_data = arguments.dry_run and wants_costs and "data" not in settings_of(arguments)
    script, training = _checked(script, training, may_lack_data)
    if arguments.dry_run:
        _warn_of_long_texts(script, training)
        outcome = _dry_run(settings, echo)
        costs = _costs(arguments, script, training, echo)
        if costs is not None:
            outcome.facts["costs"] = costs
        return outcome
    if arguments.card or arguments.assume:
        raise UsageError("--card and --assume are for --dry-run, which says what a run costs; add it.")
    from dflash_hf.training.held_out import closing_line, taus
    from dflash_hf.training.train import leave_group, train

    trainer = train(script, training, echo, machine_lines=machine_lines(settings))
    if trainer.args.process_index == 0:
        echo(f"The drafter is in {trainer.args.output_dir}")
        target = arguments.target_name or script.target
        words = ["dflash", "eval", "--target", target, "--draft", trainer.args.output_dir, "--data", "held_out.jsonl"]
        echo(f"Next, on prompts that it was not trained on: {shlex.join(words)}")
        echo(closing_line(trainer))
    last = {f"{kind}_simulated_tau": tau for kind, tau in taus(trainer.state.log_history).items()}
    outcome = Outcome(facts={"output_dir": trainer.args.output_dir, "steps": trainer.state.global_step, **last})
    del trainer
    leave_group()
    return outcome


def _checked(script, training: dict, may_lack_data: bool) -> tuple:
    """
    The arguments of a run, with the names of packaged models in a recipe resolved; `cli` has resolved those of the
    command line. With `may_lack_data`, a file of training data need not exist.

    Raises:
        `ValueError`: there is no output folder, or evaluation data is never read.
        `FileNotFoundError`: a file of data does not exist.
    """
    from dflash_hf.pairs.packaged_targets import folder_of
    from dflash_hf.smollm2 import draft_folder_of

    script = replace(script, target=folder_of(script.target), draft=draft_folder_of(script.draft))
    if not training.get("output_dir"):
        raise ValueError("No output folder is given; name the folder for the drafter with --output-dir.")
    for name in ("data", "eval_data"):
        if not (may_lack_data and name == "data"):
            check_files(name, getattr(script, name))
    unread = [name for name in ("eval_data", "eval_split", "eval_features") if getattr(script, name)]
    if unread and training.get("eval_strategy", "no") == "no":
        raise ValueError(
            f"{unread[0]}={getattr(script, unread[0])!r} is never read with eval_strategy=no: set eval_strategy=steps "
            "and eval_steps, or leave it out."
        )
    return script, training


def _warn_of_long_texts(script, training: dict) -> None:
    """Print a note about the memory of a step, if the texts may be longer than the paper's."""
    if script.max_length <= PAPER_MAX_LENGTH:
        return
    slots = training["num_anchors"] * (script.block_size or PAPER["block_size"].value)
    rows = training["per_device_train_batch_size"]
    text = GB_PER_TOKEN * script.max_length
    stored = rows * (GB_PER_SLOT_STORED * slots + text)
    recomputed = rows * (GB_PER_SLOT_RECOMPUTED * slots + text)
    note(
        f"max_length={script.max_length}: beside the weights, a step takes about {stored:.0f} GB for a target with a "
        f"hidden size of 4096, and in proportion for others; {recomputed:.0f} GB with --activation-checkpointing. "
        "Where that is too much: fewer rows at a time, fewer num_anchors, a shorter max_length."
    )


def _costs(arguments, script, training: dict, echo) -> dict | None:
    """
    `echo` what a run costs, as comments of the recipe that `--dry-run` prints, if a mixture says how many rows there
    are, or the command line asks for it.

    Raises:
        `UsageError`: an unknown card.
        `ValueError`, `OSError`: the costs that the command line asks for cannot be estimated.
    """
    is_asked = bool(arguments.card or arguments.assume)
    if not is_asked and not script.mixture:
        return None
    from dflash_hf.data.mixture import read_mixture
    from dflash_hf.training.costs import CARDS, cost_lines, estimate, make_assumptions

    name = re.sub(r"[\s_-]", "", arguments.card or DEFAULT_CARD).upper()
    if name not in CARDS:
        raise UsageError(f"--card {arguments.card} must be one of {', '.join(CARDS)}.")
    try:
        rows = read_mixture(script.mixture).num_rows if script.mixture else None
        thinks = bool((script.chat_template_kwargs or {}).get("enable_thinking"))
        assumed = make_assumptions(rows, thinks, arguments.assume)
        costs = estimate(script, training, CARDS[name], assumed)
    except (ValueError, OSError) as error:
        if is_asked:
            raise
        note(f"costs are not estimated: {error}")
        return None
    for line in cost_lines(costs, CARDS[name], assumed, bool(script.features)):
        echo(f"# {line}")
    return {
        "card": name,
        **dataclasses.asdict(costs),
        "answer_hours": costs.answer_hours,
        "online_hours": costs.online_hours,
        "offline_hours": costs.offline_hours,
        "assumed": dataclasses.asdict(assumed),
    }


def _dry_run(settings: dict, echo) -> Outcome:
    """Print the settings of a run as a recipe, each with where it comes from."""
    shown = {key: "(set)" if is_secret(key) else setting.value for key, setting in settings.items()}
    for key, value in shown.items():
        echo(f"{f'{key}: {json.dumps(value)}':40}  # {settings[key].origin}")
    return Outcome(facts=shown)
