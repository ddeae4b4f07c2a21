"""
What a training run sets where neither the recipe nor the command line does: one column for CPUs, one for GPUs.

The GPU's column is the paper's (DFlash, arXiv 2602.06036). On a CPU a drafter learns best from many small steps: its
column is the best of 23 variants of a short run (`examples/benchmarks/results/ablation`), with still shorter blocks
(`ways_to_learn.md` there).
"""

import os
from typing import Any

import torch

from dflash_hf.decoding.packing import emulated


PAPER = {"num_draft_layers": 5, "block_size": 16}
LARGEST_DRAFT_VOCABULARY = 8192
# Key: the value on a CPU (or Metal), the value on a GPU, and the reason for the CPU's.
_TABLE: dict[str, tuple[Any, Any, str]] = {
    "num_draft_layers": (2, 5, "fewer layers make more steps"),
    "block_size": (4, 16, "in 6 minutes tau 1.65, with blocks of 8 1.55; take 8 for hours"),
    "num_anchors": (16, 512, "more steps beat larger steps"),
    "per_device_train_batch_size": (4, 1, "more steps beat larger steps"),
    "gradient_accumulation_steps": (1, 8, "more steps beat larger steps"),
    "loss_type": ("dpace", "ce", "in 150 s it reached tau 1.20, the paper's ce 1.11"),
    "max_steps": (3000, -1, "2,321 steps on 500 answers reached tau 1.49, 4,903 steps on 4,000 answers 1.71"),
    "learning_rate": (1e-3, 6e-4, "the paper's 6e-4 is for days"),
    "draft_vocab_size": (-1, None, "about as many tokens as the data have: the head costs most"),
    "store_rows": (-1, 0, "the target reads each row once, in a third of the time at most"),
    "logging_steps": (50, 10, "a line every few seconds"),
    "save_steps": (250, 1000, "at most minutes are lost"),
}
_JUDGED = "a run is judged by its evaluation data, and trains on all others"
# Key: the keys that would have no effect beside it, and why.
_WITHOUT_EFFECT: dict[str, tuple[tuple[str, ...], str]] = {
    "features": (
        (
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
    "data": (("eval_features",), "features of `eval_data` are computed"),
    "eval_data": (("held_out_rows",), _JUDGED),
    "eval_split": (("held_out_rows",), _JUDGED),
    "eval_features": (("held_out_rows",), _JUDGED),
    "draft": (("init_layers", "draft_vocab_size"), "a trained drafter has its weights and vocabulary"),
}
# Keys of the preset that a run with another key has no use for, or that the other decides.
_DECIDES = {
    "features": ("store_rows",),
    "draft": ("num_draft_layers", "block_size", "init_layers", "draft_vocab_size"),
    "head_only": ("loss_type", "learning_rate"),  # a head has its own
    "peft_config": ("store_rows",),
    "max_minutes": ("max_steps",),
    "num_train_epochs": ("max_steps",),
    "fp16": ("bf16",),
}


def check_keys_with_effect(settings: dict) -> None:
    """
    Check that each of the keys that a recipe and the command line set has an effect beside the others.

    Args:
        settings (`dict`): Keys and values.

    Raises:
        `ValueError`: names the two keys, their values and the reason.
    """
    for name, (keys_without_effect, why) in _WITHOUT_EFFECT.items():
        for key in keys_without_effect:
            if settings.get(name) and settings.get(key):
                raise ValueError(
                    f"{key}={settings[key]!r} has no effect with {name}={settings[name]!r}: {why}; leave one out."
                )


def preset(settings: dict) -> tuple[str, dict, dict[str, str]]:
    """
    The settings for this kind of machine.

    Args:
        settings (`dict`): The keys that are set already, and their values.

    Returns:
        The preset's name, its values, and the reason for each value that is not the paper's.
    """
    on_cpu = settings.get("use_cpu") or not torch.accelerator.is_available()
    device = "cpu" if on_cpu else torch.accelerator.current_accelerator().type
    is_small = device in ("cpu", "mps")
    values: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name, (cpu_value, gpu_value, reason) in _TABLE.items():
        if is_small:
            values[name] = cpu_value
            reasons[name] = reason
        else:
            values[name] = gpu_value
    batch_size = settings.get("per_device_train_batch_size")
    if batch_size:
        rows = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
        values["gradient_accumulation_steps"] = max(rows // batch_size, 1)
        reasons["gradient_accumulation_steps"] = f"a step has {rows} rows, however many are read at a time"
    if is_small:
        layers = int(settings.get("num_draft_layers") or values["num_draft_layers"])
        values["init_layers"] = list(range(-layers, 0))
        reasons["init_layers"] = "start as the target's last layers, which understand its features"
    if device == "cpu":
        values["use_cpu"] = True
        reasons["use_cpu"] = "there is no accelerator"
        if emulated(torch.bfloat16):
            values["bf16"] = False
            values["target_dtype"] = "float32"
            reasons["bf16"] = "this processor has no units for bf16"
        else:
            values["bf16"] = True
            values["target_dtype"] = "bfloat16"
            reasons["bf16"] = "this processor has units for bf16"
    elif device == "cuda":
        values["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
    if is_small and settings.get("draft"):
        values["learning_rate"] = 5e-4
        reasons["learning_rate"] = "a trained drafter has less to learn"
    if settings.get("load_best_model_at_end"):  # upstream demands whole evaluations between two checkpoints
        values["save_steps"] = settings.get("eval_steps") or settings.get("logging_steps") or values["logging_steps"]
    unwanted = set()
    for name, keys in _DECIDES.items():
        if settings.get(name):
            unwanted.update(keys)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        unwanted.add("store_rows")  # one process would store while the others wait
    return device, {name: value for name, value in values.items() if name not in unwanted}, reasons
