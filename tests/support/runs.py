"""Short runs of the trainer."""

from transformers import PreTrainedModel

from dflash_hf.training.recipe import parse_option
from dflash_hf.training.trainer import DFlashTrainer
from dflash_hf.training.training_args import DFlashTrainingArguments
from support.pairs import make_draft


BLOCK = 4
NEW_NAME = hasattr(PreTrainedModel, "activation_checkpointing_enable")  # from transformers 5.23 on
CHECKPOINTING = "activation_checkpointing" if NEW_NAME else "gradient_checkpointing"


def make_trainer(folder, target, rows, draft=None, eval_rows=None, kwargs=None, **overrides):
    """A trainer of a short run, with other `kwargs`, and with `overrides` of its arguments."""
    fields = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "num_anchors": 6,
        "max_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **overrides,
    }
    draft = make_draft(target, block_size=BLOCK) if draft is None else draft
    return DFlashTrainer(draft, target, DFlashTrainingArguments(**fields), rows, eval_rows, **(kwargs or {}))


# Settings of `dflash train` for a run of two steps of a drafter with one layer.
TINY_RECIPE = (
    "mask_token_id=null",
    "target_layer_ids=[0, 2]",
    "num_draft_layers=1",
    "block_size=4",
    "init_layers=null",
    "draft_config.intermediate_size=32",
    "max_steps=2",
    "logging_steps=1",
    "disable_tqdm=true",
    "report_to=none",
    "num_anchors=4",
    "per_device_train_batch_size=2",
    "gradient_accumulation_steps=1",
    "bf16=false",
    "use_cpu=true",
    "target_dtype=float32",
)
# With these, one step moves every parameter by minus its gradient.
PLAIN_SGD = {
    "optim": "sgd",
    "learning_rate": 1.0,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "max_grad_norm": 0.0,
    "train_sampling_strategy": "sequential",
}


def as_settings(words):
    """Words such as `bf16=false` as the settings that `read_recipe` takes."""
    settings = {}
    for word in words:
        name, _, text = word.partition("=")
        settings[name] = parse_option(name, text)
    return settings


def as_options(words):
    """Words such as `bf16=false` as options of `dflash train`; other words are left alone."""
    options = []
    for word in words:
        name, equals, text = word.partition("=")
        is_setting = equals and not name.startswith("-")
        setting, dot, entry = name.partition(".")
        options.append(f"--{setting.replace('_', '-')}{dot}{entry}={text}" if is_setting else word)
    return options


def history(trainer, key):
    """The values that a trainer has logged under a key, in order."""
    return [line[key] for line in trainer.state.log_history if key in line]
