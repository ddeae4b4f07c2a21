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
# A given key, those that would have no effect beside it, and why.
_WITHOUT_EFFECT = {
    "features": (
        *("data_name", "data_revision", "split", "max_length", "num_proc", "attn_implementation", "eval_data"),
        *("eval_split", "store_rows"),
        "stored features are read as they are, without the target's layers",
    ),
    "data": ("eval_features", "features of `eval_data` are computed"),
    **dict.fromkeys(
        ("eval_data", "eval_split", "eval_features"),
        ("held_out_rows", "a run is judged by its evaluation data, and trains on all others"),
    ),
    "draft": ("init_layers", "draft_vocab_size", "a trained drafter has its weights and vocabulary"),
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


def check_apart(given: dict) -> None:
    """
    Raises:
        `ValueError`: of the keys that were given, one has no effect beside another.
    """
    for name, (*others, why) in _WITHOUT_EFFECT.items():
        for other in others:
            if given.get(name) and given.get(other):
                raise ValueError(
                    f"{other}={given[other]!r} has no effect with {name}={given[name]!r}: {why}; leave one out."
                )


def preset(given: dict) -> tuple[str, dict, dict[str, str]]:
    """
    The settings for this kind of machine.

    Args:
        given (`dict`): The keys that are set already.

    Returns:
        The preset's name, its values, and the reason for each value that is not the paper's.
    """
    on_cpu = given.get("use_cpu") or not torch.accelerator.is_available()
    device = "cpu" if on_cpu else torch.accelerator.current_accelerator().type
    small = device in ("cpu", "mps")
    values: dict[str, Any] = {name: row[0 if small else 1] for name, row in _TABLE.items()}
    reasons = {name: row[2] for name, row in _TABLE.items()} if small else {}
    if at_once := given.get("per_device_train_batch_size"):
        rows = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
        values["gradient_accumulation_steps"] = max(rows // at_once, 1)
        reasons["gradient_accumulation_steps"] = f"a step has {rows} rows, however many are read at a time"
    if small:
        layers = int(given.get("num_draft_layers") or values["num_draft_layers"])
        values["init_layers"] = list(range(-layers, 0))
        reasons["init_layers"] = "start as the target's last layers, which understand its features"
    if device == "cpu":
        values["use_cpu"], reasons["use_cpu"] = True, "there is no accelerator"
        values["bf16"] = not emulated(torch.bfloat16)
        values["target_dtype"] = "bfloat16" if values["bf16"] else "float32"
        reasons["bf16"] = f"this processor has {'' if values['bf16'] else 'no '}units for bf16"
    elif device == "cuda":
        values["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
    if small and given.get("draft"):
        values["learning_rate"], reasons["learning_rate"] = 5e-4, "a trained drafter has less to learn"
    if given.get("load_best_model_at_end"):  # upstream demands whole evaluations between two checkpoints
        values["save_steps"] = given.get("eval_steps") or given.get("logging_steps") or values["logging_steps"]
    unwanted = {key for name, keys in _DECIDES.items() if given.get(name) for key in keys}
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        unwanted.add("store_rows")  # one process would store while the others wait
    return device, {name: value for name, value in values.items() if name not in unwanted}, reasons
