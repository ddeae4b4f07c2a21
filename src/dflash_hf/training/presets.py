"""
Presets: values for the settings that the user leaves out. `recipe.py` says in which order settings are decided.

`paper` is the paper's drafter and recipe (DFlash, arXiv 2602.06036, sections 4.2, 5 and A.1), for GPUs; its optimizer,
AdamW, is the default of transformers. On a CPU a drafter learns best from many small steps: `cpu` is the best of 23
variants of a short run (`examples/benchmarks/results/ablation`), with still shorter blocks (`ways_to_learn.md` there).
vLLM, SGLang and transformers serve the drafters of both.

A run that names no preset gets the one of its machine, and says so. A preset has the same values everywhere. The few
settings that do depend on the machine are in [`machine_settings`]; a run also prints those.
"""

import os
from typing import Any, NamedTuple


class PresetValue(NamedTuple):
    """The value of a setting in a preset, and the reason, which `--dry-run` prints."""

    value: Any
    reason: str


PAPER: dict[str, PresetValue] = {
    # The drafter.
    "num_draft_layers": PresetValue(5, "the paper's"),
    "num_target_features": PresetValue(5, "the paper's, for drafters of any depth"),
    "block_size": PresetValue(16, "the paper's, the anchor included"),
    "init_layers": PresetValue(None, "the paper's: random weights"),
    "draft_vocab_size": PresetValue(None, "the paper's: all tokens of the target"),
    # A step.
    "max_length": PresetValue(3072, "the paper's"),
    "num_anchors": PresetValue(512, "the paper's"),
    "anchor_sampling": PresetValue("random", "the paper's"),
    "loss_type": PresetValue("ce", "the paper's: slot k weighs exp(-(k - 1) / gamma)"),
    "per_device_train_batch_size": PresetValue(
        1, "the paper names no batch size: eight rows on each GPU, one at a time"
    ),
    "gradient_accumulation_steps": PresetValue(
        8, "the paper names no batch size: eight rows on each GPU, one at a time"
    ),
    # The run.
    "learning_rate": PresetValue(6e-4, "the paper's"),
    "lr_scheduler_type": PresetValue("cosine", "the paper's"),
    "warmup_steps": PresetValue(0.04, "the paper's, a share of all steps"),
    "max_grad_norm": PresetValue(1.0, "the paper's"),
    "num_train_epochs": PresetValue(6.0, "the paper's"),
    "bf16": PresetValue(True, "the paper's"),
    "logging_steps": PresetValue(10, "a line every few seconds"),
    "save_steps": PresetValue(1000, "at most minutes are lost"),
}
CPU: dict[str, PresetValue] = {
    # The drafter.
    "num_draft_layers": PresetValue(2, "fewer layers make more steps"),
    "block_size": PresetValue(4, "in 6 minutes tau 1.65, with blocks of 8 1.55; take 8 for hours"),
    "init_layers": PresetValue([-2, -1], "start as the target's last layers, which already process such features"),
    "draft_vocab_size": PresetValue(-1, "about as many tokens as the data have: in 6 minutes tau 1.58, with all 1.41"),
    "share_head": PresetValue(True, "every engine serves it, at the same tau (plain_train.md)"),
    # A step.
    "max_length": PAPER["max_length"],
    "num_anchors": PresetValue(16, "more steps beat larger steps"),
    "loss_type": PresetValue("dpace", "in 150 s it reached tau 1.20, the paper's ce 1.11"),
    "per_device_train_batch_size": PresetValue(4, "more steps beat larger steps"),
    "gradient_accumulation_steps": PresetValue(1, "more steps beat larger steps"),
    "store_rows": PresetValue(-1, "the target reads each row once, in a third of the time at most"),
    # The run.
    "learning_rate": PresetValue(1e-3, "the paper's 6e-4 is for days"),
    "lr_scheduler_type": PAPER["lr_scheduler_type"],
    "warmup_steps": PAPER["warmup_steps"],
    "max_grad_norm": PAPER["max_grad_norm"],
    "max_steps": PresetValue(3000, "2,321 steps on 500 answers reached tau 1.49, 4,903 steps on 4,000 answers 1.71"),
    "target_dtype": PresetValue("bfloat16", "half the memory to read"),
    "bf16": PresetValue(True, "in 150 s tau 1.20, in fp32 1.10"),
    "logging_steps": PresetValue(50, "a line every few seconds"),
    "save_steps": PresetValue(250, "at most minutes are lost"),
}
PRESETS = {"paper": PAPER, "cpu": CPU}
LEARNING_RATE_FOR_TRAINED_DRAFTER = 5e-4  # in the preset `cpu`

_NO_ROWS_HELD_OUT = "a run with evaluation data holds out no rows"
# For each setting, the settings that would have no effect beside it, and why. [`check_settings_with_effect`] rejects
# both together if the user has named them.
_CONFLICTS: dict[str, tuple[tuple[str, ...], str]] = {
    "features": (
        (
            "num_target_features",
            "data_name",
            "data_revision",
            "split",
            "max_length",
            "num_proc",
            "attn_implementation",
            "eval_data",
            "eval_split",
            "store_rows",
        ),
        "stored features are read as they are, without the target's layers",
    ),
    "target_layer_ids": (("num_target_features",), "the layers are named"),
    "data": (("eval_features",), "features of `eval_data` are computed"),
    "eval_data": (("held_out_rows",), _NO_ROWS_HELD_OUT),
    "eval_split": (("held_out_rows",), _NO_ROWS_HELD_OUT),
    "eval_features": (("held_out_rows",), _NO_ROWS_HELD_OUT),
    "draft": (
        ("init_layers", "draft_vocab_size", "num_target_features"),
        "a trained drafter has its weights, vocabulary and features",
    ),
}
# For each setting, the values of a preset that [`preset_settings`] leaves out beside it: the run has no use for them,
# or the setting decides them itself.
_SUPERSEDES = {
    "features": ("store_rows", "max_length", "num_target_features"),
    "target_layer_ids": ("num_target_features",),
    "draft": (
        "num_draft_layers",
        "num_target_features",
        "block_size",
        "init_layers",
        "draft_vocab_size",
        "share_head",
    ),
    "head": ("share_head",),  # most heads have weights for each token that is drafted
    "draft_config": ("share_head",),
    "head_only": ("loss_type", "learning_rate"),  # a head has its own
    "peft_config": ("store_rows",),
    "max_minutes": ("max_steps", "num_train_epochs", "lr_scheduler_type"),
    "max_steps": ("num_train_epochs",),
    "num_train_epochs": ("max_steps",),
    "fp16": ("bf16",),
}


def check_settings_with_effect(values: dict) -> None:
    """
    Check that each setting of a recipe and a command line has an effect beside the others.

    Args:
        values (`dict`): Settings and values.

    Raises:
        `ValueError`: names the two settings, their values and the reason.
    """
    for name, (names_without_effect, why) in _CONFLICTS.items():
        for other in names_without_effect:
            if values.get(name) and values.get(other):
                raise ValueError(
                    f"{other}={values[other]!r} has no effect with {name}={values[name]!r}: {why}; leave one out."
                )


def default_preset(values: dict) -> PresetValue:
    """
    The preset of a run that names none: `paper` on a GPU, else `cpu`.

    Args:
        values (`dict`): The settings that are decided already.

    Returns:
        `PresetValue`: Its name, and a sentence about it for the user.
    """
    device = device_type(values)
    if device == "cpu":
        why = "use_cpu is set" if values.get("use_cpu") else "no GPU was found"
        return PresetValue("cpu", f"{why}; --preset paper trains the paper's drafter")
    if device == "mps":
        return PresetValue(
            "cpu", "Metal is too slow for the paper's recipe; --preset paper trains the paper's drafter"
        )
    return PresetValue("paper", f"{device} was found; --preset cpu trains a smaller drafter in less time")


def preset_settings(name: str, values: dict) -> dict[str, PresetValue]:
    """
    The settings of a preset for a run.

    Args:
        name (`str`): A key of [`PRESETS`].
        values (`dict`): The settings that are decided already.

    Returns:
        `dict[str, PresetValue]`: The others, by name.
    """
    settings = dict(PRESETS[name])

    # 1. What follows from settings that are decided already.
    batch_size = values.get("per_device_train_batch_size")
    if batch_size:
        rows = settings["per_device_train_batch_size"].value * settings["gradient_accumulation_steps"].value
        reason = f"a step has {rows} rows, however many are read at a time"
        settings["gradient_accumulation_steps"] = PresetValue(max(rows // batch_size, 1), reason)
    if "init_layers" in settings and values.get("num_draft_layers"):
        last = list(range(-values["num_draft_layers"], 0))
        settings["init_layers"] = PresetValue(last, settings["init_layers"].reason)
    if name == "cpu" and values.get("draft"):
        reason = "a trained drafter has less to learn"
        settings["learning_rate"] = PresetValue(LEARNING_RATE_FOR_TRAINED_DRAFTER, reason)
    if values.get("load_best_model_at_end"):
        interval = values.get("eval_steps") or values.get("logging_steps") or settings["logging_steps"].value
        settings["save_steps"] = PresetValue(interval, "transformers loads the best one only where it was evaluated")

    # 2. What they replace.
    for setting, superseded in _SUPERSEDES.items():
        if values.get(setting):
            for name_of_superseded in superseded:
                settings.pop(name_of_superseded, None)
    return {setting: value for setting, value in settings.items() if setting not in values}


def machine_settings(settings: dict[str, PresetValue], values: dict) -> dict[str, PresetValue]:
    """
    The settings that depend on the machine; none of them changes the drafter's shape or its recipe.

    Args:
        settings (`dict[str, PresetValue]`): Those of the preset.
        values (`dict`): The settings that are decided already.

    Returns:
        `dict[str, PresetValue]`: In place of the preset's, by name.
    """
    import torch

    from dflash_hf.decoding.cpu_dtypes import is_emulated

    device = device_type(values)
    changed: dict[str, PresetValue] = {}
    if device == "cpu":
        changed["use_cpu"] = PresetValue(True, "there is no accelerator")
    why_slow = ""  # why bf16 is slow here
    target_dtype = "auto"
    if device == "cpu" and is_emulated(torch.bfloat16):
        why_slow = "this processor has no hardware support for bf16"
        target_dtype = "float32"
    elif device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        why_slow = "this GPU has no hardware support for bf16"
    elif device == "mps":
        why_slow = "bf16 was not tried on Metal"
    if why_slow and "bf16" in settings:
        changed["bf16"] = PresetValue(False, why_slow)
    if why_slow and (device == "cpu" or "target_dtype" in settings):
        changed["target_dtype"] = PresetValue(target_dtype, why_slow)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and "store_rows" in settings:
        changed["store_rows"] = PresetValue(0, "one process would store features while the others wait")
    return {name: value for name, value in changed.items() if name not in values}


def device_type(values: dict) -> str:
    """The kind of device of a run: `"cpu"`, `"cuda"`, `"mps"`, ..."""
    import torch

    if values.get("use_cpu") or not torch.accelerator.is_available():
        return "cpu"
    return torch.accelerator.current_accelerator().type
