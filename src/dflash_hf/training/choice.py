"""What `dflash train` reports before it starts: the settings it chooses, and the time they take."""

import os
from collections.abc import Set
from dataclasses import asdict, fields
from pathlib import Path

import torch
from transformers import AutoConfig

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.sources import load_rows
from dflash_hf.data.time_left import duration
from dflash_hf.pairs import Loading, about_remote_code, draft_config_of
from dflash_hf.training.recipe import RecipeArguments
from dflash_hf.training.run_file import read_run
from dflash_hf.training.settings_for import FEWEST_STEPS, Data, Machine, Settings, settings_for
from dflash_hf.training.training_args import DFlashTrainingArguments


_LOOKED_AT = 64  # rows


def choose(
    recipe: RecipeArguments, training: dict, given: Set[str] | None, tokenizer, say, resume: str | None = None
) -> dict:
    """
    Choose the settings that are not given, for this machine, its data and its time. A resumed run keeps its choices.

    Args:
        recipe, training: The result of [`~dflash_hf.training.recipe.read_recipe`].
        given (`Set[str]`, *optional*): The keys that are given. Default: all of them, as in a recipe file; nothing is
            chosen then.
        tokenizer: The target's tokenizer.
        say: Called with each choice, and with the number of steps.
        resume (`str`, *optional*): The checkpoint to resume from.

    Returns:
        `dict`: The chosen keys and values.
    """
    if recipe.streaming or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if os.environ.get("RANK", "0") == "0" and given is not None:
            why = "a stream has no length" if recipe.streaming else "there are several processes"
            say(f"settings          settings not given stay at the paper's, since {why}")
        return {}
    before = read_run(Path(resume).resolve().parent) if resume else None
    chosen = before["chosen"] if before else _chosen_here(recipe, training, given, tokenizer, say)
    return {} if given is None else {key: value for key, value in chosen.items() if key not in given}


def _chosen_here(recipe: RecipeArguments, training: dict, given: Set[str] | None, tokenizer, say) -> dict:
    """The choices for this machine, which are reported."""
    on_cpu = training.get("use_cpu") or not torch.accelerator.is_available()
    device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()
    config, fixed, data = _config_of(recipe), _fixed(recipe, training, given), _look(recipe, tokenizer)
    machine, minutes = Machine.here(device, Path(training["output_dir"])), training.get("max_minutes")
    found = settings_for(machine, config, data, minutes, fixed)
    say(f"machine           {machine}")
    for key, value in found.values.items():
        say(f"  {f'{key}={value}':32}{found.reasons[key]}")
    for line in time_lines(found, minutes, data.rows):
        say(line)
    chosen = {**found.values, "logging_steps": min(max(found.steps // 20, 1), 500)}
    return {**chosen, "save_steps": saved_every({**chosen, **training}, min(max(found.steps // 4, 1), 500))}


def saved_every(training: dict, steps: int) -> float:
    """About `steps`, as `save_steps`: whole evaluations if the best checkpoint is loaded, as upstream demands."""
    evaluated = training.get("eval_steps") or training.get("logging_steps")
    if not training.get("load_best_model_at_end") or not evaluated:
        return steps
    return int(evaluated * max(steps // evaluated, 1)) if evaluated >= 1 else evaluated  # a share of all steps


def time_lines(found: Settings, minutes: float | None, rows: int) -> list[str]:
    """The number of steps of a run, the time they take, and what a similar run reached."""
    whole = f"{minutes:g} min" if minutes else f"about {duration(found.seconds)}"
    first = f"{duration(found.feature_seconds)} for features, " if found.feature_seconds else ""
    of = f" {found.rows:,} of" if found.rows < rows else ""
    lines = [
        f"time              {whole}: {first}about {found.steps:,} steps of {found.step_seconds:.2g} s, "
        f"{found.passes:.1f} passes over{of} {rows:,} row{'s' * (rows != 1)}"
    ]
    if found.steps < FEWEST_STEPS:
        lines.append(
            f"warning           in fewer than {FEWEST_STEPS} steps a fresh drafter learns almost nothing: give it "
            "more time, more threads or an accelerator, or smaller settings"
        )
    elif found.reached:
        lines.append(f"                  a similar run of SmolLM2-135M reached tau {found.reached:.1f} on new text")
    return lines


def _fixed(recipe: RecipeArguments, training: dict, given: Set[str] | None) -> dict:
    """The keys that must not be chosen, with their values: given keys, and those of a drafter to start from."""
    defaults = {one.name: one.default for one in fields(DFlashTrainingArguments)}
    keys = {**defaults, **asdict(recipe), **training}
    if given is not None:
        keys = {key: value for key, value in keys.items() if key in given}
    if recipe.draft:
        config = draft_config_of(recipe.draft, Loading())
        keys |= {"block_size": config.block_size, "num_draft_layers": config.num_hidden_layers}
        keys |= {"draft_vocab_size": config.draft_vocab_size if config.has_own_head else None, "init_layers": None}
    return keys


def _config_of(recipe: RecipeArguments):
    options = {"trust_remote_code": recipe.trust_remote_code, "revision": recipe.target_revision or "main"}
    try:
        return AutoConfig.from_pretrained(recipe.target, **options)
    except ValueError as error:
        raise ValueError(about_remote_code(f"target={recipe.target}", error)) from error


def _look(recipe: RecipeArguments, tokenizer) -> Data:
    """The number of rows, and token counts from a sample of them."""
    if recipe.features:
        rows = sum(one.examples for one in recipe.manifests.values())
        tokens = sum(one.tokens for one in recipe.manifests.values()) / max(rows, 1)
        return Data(rows, tokens, 0.75 * tokens)
    rows = load_rows(recipe.data, recipe.split, False, recipe.data_name, recipe.data_revision)
    encoder = RowEncoder(tokenizer, recipe.max_length, recipe.chat_template_kwargs or {})
    examples = []
    for index in range(0, len(rows), max(len(rows) // _LOOKED_AT, 1)):
        try:
            examples += encoder(rows[index])
        except ValueError:  # reported when all rows are encoded
            continue
    if not examples:
        return Data(len(rows), recipe.max_length / 2, recipe.max_length / 4)
    tokens = sum(len(one["input_ids"]) for one in examples) / len(examples)
    learned = sum(sum(one["loss_mask"]) for one in examples) / len(examples)
    return Data(len(rows), tokens, learned)
