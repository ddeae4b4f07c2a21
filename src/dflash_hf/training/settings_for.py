"""
Default settings of a training run, chosen for the machine, the target, the data and the time.

On a CPU a drafter learns best from many small steps: the settings are the best of 23 variants of a short run
(`examples/benchmarks/results/ablation`). An accelerator uses the paper's if there is enough time.
"""

import math
import shutil
import statistics
import timeit
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from dflash_hf.layouts.configuration import DFlashDraftConfig


FEWEST_STEPS = 200  # with fewer, a drafter commits at most 1.1 tokens
ENOUGH_STEPS = 500  # with fewer, steps are made smaller
PAPER = {"block_size": 16, "num_anchors": 512, "num_draft_layers": 5, "per_device_train_batch_size": 8}
# Block, anchors and rows of a step: the next entry is used if the time allows too few steps.
_ON_CPU = ((8, 16, 4), (6, 16, 4), (6, 8, 4), (6, 8, 2))
_ON_GPU = ((16, 512, 8), (16, 256, 8), (16, 128, 8), (16, 64, 8), (16, 32, 8))
_SMALL = {"num_draft_layers": 2, "loss_type": "dpace", "learning_rate": 1e-3}
_LARGEST_DRAFT_VOCABULARY = 8192
_FEATURES_SHARE = 1 / 3  # maximum share of the time
_ENDS_SHARE = 0.05  # share of the time for loading and saving
# Share of the matrix-product throughput that a step reaches: it also adds, masks and moves data.
_EFFICIENCY = {"half": 0.35, "full": 0.8, "forward": 0.55}
_SMALL_STEP, _LONG_STEP = 2e12, 20.0  # no warning below this many operations; a warning above this many seconds
# Sequences seen, rows, and tau on held-out text, of SmolLM2-135M with two layers and blocks of 8.
_REACHED = (
    (2_850, 60, 1.24),
    (6_850, 500, 1.52),
    (1_820, 6_151, 1.38),
    (7_000, 6_151, 1.67),
    (20_900, 6_151, 1.93),
    (52_000, 6_151, 2.20),
)


@dataclass(frozen=True)
class Machine:
    """
    The machine that trains.

    Args:
        device (`str`): Device type, such as `"cpu"` or `"cuda"`.
        threads (`int`): CPU threads.
        memory, disk (`float`): Free bytes.
        full, half (`float`): Operations per second of a matrix product in fp32 and bf16.
    """

    device: str
    threads: int
    memory: float
    disk: float
    full: float
    half: float

    @classmethod
    def here(cls, device: torch.device, folder: Path) -> "Machine":
        """This machine, and the disk of a folder; its speed is measured within a few tenths of a second."""
        from dflash_hf.responses import free_memory

        there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
        full, half = (_operations(device, dtype) for dtype in (torch.float32, torch.bfloat16))
        memory = free_memory(device if device.type == "cuda" else torch.device("cpu"))
        disk = shutil.disk_usage(there).free
        return cls(device.type, torch.get_num_threads(), memory, disk, full, half)

    @property
    def small(self) -> bool:
        """Whether the paper's settings are too large for it."""
        return self.device in ("cpu", "mps")

    @property
    def halves(self) -> bool:
        """Whether bf16 pays off; upstream's Trainer does not support it on Metal."""
        return self.device != "mps" and self.half > 1.2 * self.full

    def __str__(self) -> str:
        threads = f", {self.threads} thread{'s' if self.threads > 1 else ''}" if self.device == "cpu" else ""
        return f"{self.device}{threads}: {self.full / 1e9:,.0f} GFLOPS in fp32, {self.half / 1e9:,.0f} in bf16"


@dataclass(frozen=True)
class Data:
    """Number of rows of a training run, and the tokens and supervised tokens of a typical row."""

    rows: int
    tokens: float
    learned: float


@dataclass(frozen=True)
class Settings:
    """
    The chosen settings.

    Args:
        values (`dict`): Keys of a recipe.
        reasons (`dict[str, str]`): The reason for each key.
        steps (`int`): Number of steps that the time, or the number of epochs, allows.
        step_seconds, feature_seconds (`float`): Seconds per step; seconds for storing features beforehand.
        rows (`int`): Rows to train on.
        passes (`float`): Passes over them.
        known (`bool`): Whether these are the settings for CPUs, which were measured.
    """

    values: dict
    reasons: dict[str, str]
    steps: int
    step_seconds: float
    feature_seconds: float
    rows: int
    passes: float
    known: bool = False

    @property
    def seconds(self) -> float:
        """Seconds of the run, without loading."""
        return self.feature_seconds + self.steps * self.step_seconds

    @property
    def reached(self) -> float | None:
        """Tau of the longest known run with at most as many sequences and rows as this run."""
        seen = 1.2 * self.passes * self.rows if self.known else 0
        runs = [tau for sequences, rows, tau in _REACHED if sequences <= seen and rows <= 2 * self.rows]
        return max(runs, default=None)


def settings_for(machine: Machine, config, data: Data, minutes: float | None, given: dict) -> Settings:
    """
    The keys of a recipe that are not given, and the resulting run.

    Args:
        machine (`Machine`): The machine that trains.
        config (`PreTrainedConfig`): The target's configuration.
        data (`Data`): The training data.
        minutes (`float`, *optional*): Duration of the run, everything included. Default: as long as its epochs take.
        given (`dict`): The keys that are given; with `draft`, also `block_size`, `num_draft_layers`,
            `draft_vocab_size` and `init_layers` of its configuration.
    """
    text = config.get_text_config()
    values: dict = {} if given.get("fp16") else {"bf16": machine.halves}
    if machine.small:
        layers = given.get("num_draft_layers") or _SMALL["num_draft_layers"]
        values |= {**_SMALL, "target_dtype": "bfloat16" if machine.halves else "float32"}
        if machine.device == "cpu":
            values["use_cpu"] = True
        size = 1024 * math.ceil(16 * math.sqrt(data.rows * data.learned) / 1024)  # distinct words: Heaps' law
        size = min(size, _LARGEST_DRAFT_VOCABULARY)
        if size < text.vocab_size / 2:
            values["draft_vocab_size"] = size
        if layers <= text.num_hidden_layers:
            values["init_layers"] = list(range(text.num_hidden_layers - layers, text.num_hidden_layers))
        if given.get("draft"):
            values["learning_rate"] = 5e-4
        if given.get("head_only"):  # a head has its own loss and learning rate
            del values["loss_type"], values["learning_rate"]
    for block, anchors, rows in _ON_CPU if machine.small else _ON_GPU:
        sizes = {"block_size": block, "num_anchors": anchors, "per_device_train_batch_size": rows}
        chosen = {key: value for key, value in {**values, **sizes}.items() if key not in given}
        found = _plan(machine, config, data, minutes, chosen, given)
        if found.steps >= ENOUGH_STEPS or minutes is None:
            break
    values = {key: value for key, value in found.values.items() if key not in given}
    reasons = {key: _reason(key, machine, text, found) for key in values}
    return replace(found, values=values, reasons=reasons, known=machine.small and not given.get("draft"))


def _plan(machine: Machine, config, data: Data, minutes: float | None, chosen: dict, given: dict) -> Settings:
    """The run that results from settings: what fits in memory, whether features are stored first, number of steps."""
    keys = {**PAPER, "num_train_epochs": 6, "max_steps": -1, **chosen, **given}
    keys.setdefault("block_attention", "dense" if machine.small else "flex")
    work = Work(config, data, keys)
    # 1. As many rows per forward as half of the free memory holds; the others are accumulated.
    while work.memory > machine.memory / 2 and work.batch > 1 and "per_device_train_batch_size" not in given:
        chosen["per_device_train_batch_size"] = keys["per_device_train_batch_size"] = work.batch // 2
        chosen["gradient_accumulation_steps"] = 2 * chosen.get("gradient_accumulation_steps", 1)
    together = work.batch * chosen.get("gradient_accumulation_steps", keys.get("gradient_accumulation_steps", 1))
    # 2. Seconds of a step of the drafter, and of the target over a row.
    dtype = "half" if keys.get("bf16") or keys.get("fp16") else "full"
    step = together * work.row / (_EFFICIENCY[dtype] * getattr(machine, dtype))
    half = machine.halves and keys.get("target_dtype") != "float32"
    target = work.target_row / (_EFFICIENCY["forward"] * (machine.half if half else machine.full))
    # 3. As many steps as the time or the epochs allow: from stored features if there is a second pass.
    if minutes is None and machine.small and "num_train_epochs" not in given and keys["max_steps"] < 0:
        chosen["num_train_epochs"] = min(max(math.ceil(2000 * together / data.rows), 6), 30)
    epochs = chosen.get("num_train_epochs", keys["num_train_epochs"])
    wanted = keys["max_steps"] if keys["max_steps"] > 0 else math.ceil(epochs * data.rows / together)
    seconds = math.inf if minutes is None else 60 * minutes * (1 - _ENDS_SHARE)
    online = step + together * target

    def planned(rows: int, per_step: float) -> Settings:
        before = rows * target if rows else 0.0
        steps = wanted if minutes is None else int(max(seconds - before, 0) / per_step)
        rows = rows or data.rows
        return Settings(chosen, {}, steps, per_step, before, rows, steps * together / rows)

    if keys.get("features"):
        return planned(0, step)
    stored = int(min(data.rows, max(_FEATURES_SHARE * seconds / target, 1)))
    stored = keys.get("store_rows", stored)
    fits = work.stored_bytes * stored < machine.disk / 2 and not (keys.get("packing") or keys.get("peft_config"))
    with_features = planned(stored, step)
    if stored and ("store_rows" in given or (machine.small and fits and with_features.passes >= 2)):
        chosen["store_rows"] = stored
        return with_features
    return planned(0, online)


@dataclass(frozen=True)
class Work:
    """
    Operations and bytes of a run.

    Args:
        config (`PreTrainedConfig`): The target's configuration.
        data (`Data`): The training data.
        keys (`dict`): All keys that affect them.
    """

    config: PreTrainedConfig
    data: Data
    keys: dict

    @property
    def batch(self) -> int:
        """Rows per forward."""
        return self.keys["per_device_train_batch_size"]

    @property
    def slots(self) -> float:
        """Slots in all blocks of a row."""
        return min(self.keys["num_anchors"], max(self.data.learned, 1)) * self.keys["block_size"]

    @property
    def shape(self) -> DFlashDraftConfig:
        """Width and parts of a layer, which the drafter shares with the target."""
        return DFlashDraftConfig.for_target(self.config, 0, 1, 2)

    @property
    def layer(self) -> int:
        """Weights of a layer."""
        one = self.shape
        heads = 2 * (one.num_attention_heads + one.num_key_value_heads) * one.head_dim
        return one.hidden_size * (heads + 3 * one.intermediate_size)

    @property
    def target_row(self) -> float:
        """Operations of the target's forward over a row."""
        return 2 * self.config.get_text_config().num_hidden_layers * self.layer * self.data.tokens

    @property
    def row(self) -> float:
        """Operations of the drafter's forward and backward over a row."""
        shape, layers, tokens = self.shape, self.keys["num_draft_layers"], self.data.tokens
        width = shape.hidden_size
        blocks = 6 * layers * self.layer * self.slots
        context = 6 * layers * 2 * width * width * tokens  # `fc`, keys and values
        attention = 12 * layers * width * self.slots * (tokens + self.slots)
        head = 4 * width * (self.keys.get("draft_vocab_size") or shape.vocab_size) * self.slots
        return blocks + context + attention + head

    @property
    def memory(self) -> float:
        """Approximate bytes of a forward and backward beyond the models: states of all slots, a mask of all pairs."""
        shape = self.shape
        states = 4 * self.keys["num_draft_layers"] * (12 * shape.hidden_size + 3 * shape.intermediate_size)
        mask = 0 if self.keys.get("block_attention") == "flex" else 4 * (self.slots + self.data.tokens)
        return self.batch * self.slots * (states + mask)

    @property
    def stored_bytes(self) -> float:
        """Bytes of a row's features on disk."""
        layers = len(self.keys.get("target_layer_ids") or range(self.keys["num_draft_layers"]))
        return self.data.tokens * (2 * layers * self.shape.hidden_size + 9)


def warning_of(args, draft_config, target_config, row: dict) -> str | None:
    """
    The warning for a `DFlashTrainer` on a CPU whose steps take tens of seconds, as with the paper's settings.

    Args:
        args (`DFlashTrainingArguments`), draft_config, target_config (`PreTrainedConfig`): Its arguments and models.
        row (`dict`): A row of its dataset.
    """
    if args.device.type != "cpu":
        return None
    shape = {"block_size": draft_config.block_size, "num_draft_layers": draft_config.num_hidden_layers}
    shape |= {"num_anchors": args.num_anchors, "per_device_train_batch_size": args.per_device_train_batch_size}
    size = draft_config.draft_vocab_size if draft_config.has_own_head else None
    learned = sum(map(int, row["loss_mask"]))
    work = Work(target_config, Data(1, len(row["input_ids"]), learned), {**shape, "draft_vocab_size": size})
    operations = work.batch * args.gradient_accumulation_steps * work.row
    if operations < _SMALL_STEP:
        return None
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    seconds = operations / (_EFFICIENCY["half" if args.bf16 else "full"] * _operations(args.device, dtype))
    if seconds < _LONG_STEP:
        return None
    return (
        f"A step takes about {seconds:.0f} s here, and a drafter needs at least {FEWEST_STEPS}: num_anchors="
        f"{args.num_anchors}, per_device_train_batch_size={args.per_device_train_batch_size} and block_size="
        f"{draft_config.block_size} suit an accelerator. On a CPU use num_anchors=16, per_device_train_batch_size=4, "
        "bf16=True, and a drafter of 2 layers with block_size=8 and draft_vocab_size=8192, as `dflash train` does."
    )


def _reason(key: str, machine: Machine, text, found: Settings) -> str:
    ratio = machine.half / machine.full
    return {
        "bf16": f"it is {ratio:.1f} times as fast as fp32 here",
        "target_dtype": f"bf16 is {ratio:.1f} times as fast as fp32 here",
        "use_cpu": "there is no accelerator",
        "num_draft_layers": "the paper uses 5; fewer layers allow more steps",
        "loss_type": "in 150 s it reached tau 1.20 on a CPU, the paper's ce 1.11",
        "learning_rate": "the paper's 6e-4 is for days",
        "draft_vocab_size": f"of {text.vocab_size:,} tokens, about those in the data: the head costs most",
        "init_layers": "start as the target's last layers, which already understand its features",
        "block_size": "the paper uses 16" + ("; short blocks allow more steps" if machine.small else ""),
        "num_anchors": "the paper uses 512" + ("; more steps beat larger steps on a CPU" if machine.small else ""),
        "per_device_train_batch_size": "more steps beat larger steps" if machine.small else "as memory allows",
        "gradient_accumulation_steps": "memory holds no larger batch",
        "num_train_epochs": "passes, for a few thousand steps",
        "store_rows": f"features once, then {found.passes:,.0f} passes over them",
    }[key]


def _operations(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a matrix product, the median of several."""
    rows, width = (512, 1024) if device.type == "cpu" else (4096, 4096)
    options = {"device": device, "dtype": dtype}
    left, right = torch.ones(rows, width, **options), torch.ones(width, width, **options)
    seconds = timeit.repeat(lambda: (left @ right)[0, 0].item(), number=1, repeat=6)  # `item` waits
    return 2 * rows * width * width / statistics.median(seconds[1:])
