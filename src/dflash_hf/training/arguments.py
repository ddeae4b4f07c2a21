"""
The arguments of a training run. A setting is one field here, or one of transformers' `TrainingArguments`, which
`training_args.py` adds. It has the same name in recipes and on the command line: `num_anchors`, `--num-anchors`. Its
type, default, help and allowed values come from the field.

The life of a setting: [`~dflash_hf.training.recipe.decide`] decides its value and remembers where it comes from, in
the order that stands in `recipe.py`; `as_arguments` makes the two objects of a run, which check it, once;
[`~dflash_hf.training.train.train`] reads them. CONTRIBUTING says what to edit when a setting is added.

Nothing here imports torch, so that help does not wait for it.
"""

import dataclasses
import typing
from dataclasses import dataclass, field
from types import UnionType

from dflash_hf.training.presets import PAPER, PRESETS


# The keys of `training.losses.LOSSES`, which imports torch.
LossType = typing.Literal["ce", "dpace", "auf", "kl", "dpace_kl", "auf_kl", "dspark"]

# Fields of a new drafter's configuration that are settings, by the name of the setting.
_SETTINGS_OF_FIELDS = {
    "block_size": "block_size",
    "num_hidden_layers": "num_draft_layers",
    "mask_token_id": "mask_token_id",
    "draft_vocab_size": "draft_vocab_size",
}


def option(help: str, default: typing.Any = None) -> typing.Any:
    """A field with a default, and its help."""
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"help": help})
    return field(default=default, metadata={"help": help})


def allowed_types(hint) -> tuple:
    """The types of a field that may have several: `(int, NoneType)` of `int | None`."""
    is_union = typing.get_origin(hint) in (typing.Union, UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def allowed_values(hint) -> tuple:
    """The values of an enumerated field, a `typing.Literal`; empty for others."""
    for kind in allowed_types(hint):
        if typing.get_origin(kind) is typing.Literal:
            return typing.get_args(kind)
    return ()


def help_of(field: dataclasses.Field, hint, is_short: bool = False, allowed: tuple = ()) -> str:
    """
    The help of a field: what it is (the first sentence if short), its allowed values, and its value in each preset.

    Args:
        allowed (`tuple`): The values that the field may have. Default: those of its type.
    """
    text = " ".join(str(field.metadata.get("help", "")).replace("%%", "%").split())
    if is_short:
        text = text.partition(". ")[0].removesuffix(".")
    allowed = allowed or allowed_values(hint)
    sentences = [text]
    if allowed:
        listed = ", ".join(map(str, allowed))
        sentences.append(f"({listed})" if is_short else f"One of {listed}.")
    values = {name: preset[field.name].value for name, preset in PRESETS.items() if field.name in preset}
    if len(values) == len(PRESETS) and len(set(map(str, values.values()))) == 1:
        sentences.append(f"(default: {next(iter(values.values()))})")
    elif values:
        sentences.append(f"({', '.join(f'{name}: {value}' for name, value in values.items())})")
    return " ".join(filter(None, sentences))


def check_values(arguments, dataclass_type: type, minima: dict[str, int]) -> None:
    """
    Check the enumerated fields of arguments, and those with a minimum.

    Args:
        arguments: An instance of a subclass of `dataclass_type`.
        dataclass_type (`type`): [`ScriptArguments`] or [`DFlashOptions`], whose enumerated fields are checked.
        minima (`dict[str, int]`): The smallest value of each field that has one; `None` passes.

    Raises:
        `ValueError`: names field, value and remedy.
    """
    for name, hint in typing.get_type_hints(dataclass_type).items():
        allowed = allowed_values(hint)
        value = getattr(arguments, name)
        if allowed and value is not None and value not in allowed:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(allowed)}.")
    for name, minimum in minima.items():
        value = getattr(arguments, name)
        if value is not None and value < minimum:
            raise ValueError(f"{name}={value} must be at least {minimum}.")


@dataclass
class ScriptArguments:
    """
    What a run of `dflash train` is given besides [`~dflash_hf.DFlashTrainingArguments`]: target, drafter and data.

    Raises:
        `ValueError`: names field, value and remedy.
    """

    preset: typing.Literal["paper", "cpu"] | None = option(
        "Values of all settings that you leave out. paper: the paper's drafter and recipe, for GPUs; cpu: what a "
        "laptop can train. Default: paper on a GPU, else cpu; the run says which."
    )

    # Target and drafter.
    target: str | None = option("Folder or Hub name of the target.")
    target_revision: str | None = option("Branch, tag or commit of the target on the Hub.")
    target_dtype: typing.Literal["auto", "float32", "bfloat16", "float16"] = option("Dtype of the target.", "auto")
    trust_remote_code: bool = option("Run the target's own code.", False)
    attn_implementation: str | None = option("Attention of the target, such as sdpa or flash_attention_2.")
    draft: str | None = option("Folder or Hub name of a drafter to start from. Default: a new one.")
    draft_revision: str | None = option("Branch, tag or commit of `draft` on the Hub.")
    num_draft_layers: int | None = option("Layers of a new drafter.")
    block_size: int | None = option("Block size of a new drafter, including the anchor.")
    init_layers: list[int] | None = option(
        "Layers of the target that initialise a new drafter's, such as 28 29; -2 -1: the last two, if they fit."
    )
    draft_vocab_size: int | None = option(
        "Vocabulary size of a new drafter: the data's most frequent tokens; -1: chosen by how many are supervised. "
        "The latter is at most 8,192."
    )
    share_head: bool = option(
        "Save a reduced vocabulary with the target's whole head. SGLang serves no drafter with a draft_vocab_size "
        "without it; this package drafts a little faster without.",
        False,
    )
    target_layer_ids: list[int] | None = option(
        "Target layers that a new drafter reads. Default: the layers of the features, or the paper's rule."
    )
    num_target_features: int | None = option(
        "How many target layers a new drafter reads, chosen by the paper's rule. Default: as many as it has layers."
    )
    mask_token_id: int | None = option(
        "Id of the mask token. Default: the drafter's, or the target's first spare embedding row."
    )
    head: str | None = option(
        "Head and its loss, such as dflash2 or dspark; `--keys head` lists all. `draft_config` and "
        "`loss_type` change them."
    )
    draft_config: dict = option("Further configuration of a new drafter; a `draft` only takes additional parts.", {})
    peft_config: dict | None = option("Train an adapter on the drafter, such as {peft_type: LORA, r: 16}.")

    # Data.
    data: list[str] | str | None = option("File, files or Hub name of the training data.")
    data_name: str | None = option("Configuration of a Hub dataset.")
    data_revision: str | None = option("Commit of a Hub dataset.")
    split: str | None = option("Split of the data. Default: train, or the only one.")
    mixture: str | None = option(
        "The .yaml file of the sources that the prompts of `data` are from; --dry-run counts its rows."
    )
    eval_data: list[str] | str | None = option("Evaluation data, as `data`.")
    eval_split: str | None = option("Split of `eval_data`, or of `data` without it.")
    held_out_rows: int | None = option(
        "Rows of `data` or `features` that are not trained on: a run ends with their tau. Default without evaluation "
        "data: 5 %%, of 80 or more at least 8, at most 256; a tenth of 20 or more. 0: none."
    )
    max_length: int = option("Maximum number of tokens of an example.", PAPER["max_length"].value)
    chat_template: str | None = option("Jinja file to use instead of the tokenizer's template.")
    chat_template_kwargs: dict | None = option("Arguments of the chat template, such as {enable_thinking: false}.")
    num_proc: int | None = option("Processes that encode the data.")
    features: list[str] | str | None = option("Folder or folders of stored features, instead of `data`.")
    eval_features: list[str] | str | None = option("Stored features to evaluate on.")
    store_rows: int = option(
        "First store the features of N rows of `data` in output_dir, train on them, and remove them; -1: of all rows "
        "that a third of max_minutes and half of the disk allow.",
        0,
    )
    overwrite_output_dir: bool = option("Start over in an output_dir that has a run or a drafter.", False)

    def __post_init__(self):
        if not self.target:
            raise ValueError("target is not given; name the model to draft for, such as --target Qwen/Qwen3-8B.")
        if bool(self.data) == bool(self.features):
            problem = "both are given" if self.data else "neither is given"
            raise ValueError(f"A run needs data or features, but {problem}; name one, as in --data FILE.")
        if self.draft_revision and not self.draft:
            raise ValueError(
                f"draft_revision={self.draft_revision!r} has no effect without a draft; name it, or leave it out."
            )
        if not self.draft:
            self.num_draft_layers = self.num_draft_layers or PAPER["num_draft_layers"].value
            self.block_size = self.block_size or PAPER["block_size"].value
            for field, setting in _SETTINGS_OF_FIELDS.items():
                if field in self.draft_config:
                    value = self.draft_config[field]
                    raise ValueError(
                        f"draft_config.{field}={value!r} is a setting of its own; write `{setting}={value!r}`."
                    )
        minima = {
            "num_draft_layers": 1,
            "num_target_features": 1,
            "block_size": 2,  # the anchor, and a token to predict
            "max_length": 1,
        }
        check_values(self, ScriptArguments, minima)
        if self.init_layers and len(self.init_layers) != self.num_draft_layers:
            raise ValueError(
                f"init_layers={self.init_layers} must name one layer of the target for each of num_draft_layers="
                f"{self.num_draft_layers}."
            )

    @property
    def has_eval_data(self) -> bool:
        """Whether it names evaluation data."""
        return bool(self.eval_data or self.eval_split or self.eval_features)

    @property
    def feature_folders(self) -> list[str]:
        """The folders of its stored features."""
        folders: list[str] = []
        for value in (self.features, self.eval_features):
            if isinstance(value, str):
                folders.append(value)
            elif value:
                folders.extend(value)
        return folders


@dataclass
class DFlashOptions:
    """What [`~dflash_hf.DFlashTrainingArguments`] adds to transformers' `TrainingArguments`, or sets otherwise."""

    output_dir: str | None = option("Folder for the drafter and the run's checkpoints.")
    learning_rate: float = option("Initial learning rate of AdamW.", PAPER["learning_rate"].value)
    lr_scheduler_type: str = option("Schedule of the learning rate.", PAPER["lr_scheduler_type"].value)
    warmup_steps: float = option("Warm-up: a share of all steps below 1, else steps.", PAPER["warmup_steps"].value)
    num_train_epochs: float = option("Passes over the data.", PAPER["num_train_epochs"].value)
    remove_unused_columns: bool = option(
        "Must stay off: the columns are not arguments of the drafter's forward.", False
    )
    logging_nan_inf_filter: bool = option("Must stay off: training stops at a loss that is not finite.", False)
    max_minutes: float | None = option("Minutes of the whole run. The learning rate decays over time, not steps.")
    num_anchors: int = option("Blocks sampled from each sequence at each step.", PAPER["num_anchors"].value)
    anchor_sampling: typing.Literal["random", "regular"] = option(
        "Where blocks begin. random: anywhere in an answer; regular: at its beginning and every block_size tokens.",
        PAPER["anchor_sampling"].value,
    )
    loss_type: LossType = option(
        "The loss. ce: cross-entropy with decaying slot weights; dpace: with D-PACE's; auf: up to the first mistake; "
        "kl, dpace_kl, auf_kl: divergence from the target; dspark: mostly total variation.",
        PAPER["loss_type"].value,
    )
    loss_decay_gamma: float | None = option(
        "Decay of the slot weights. Default: by block size (7, 5, 4 for 16, 10, 8)."
    )
    muon: bool = option("Train the layers' matrices with Muon, the rest with AdamW.", False)
    head_only: bool = option("Train only the drafter's head.", False)
    hub_card: dict = option(
        "Facts of the published card, such as {license: mit, base_model: user/name, datasets: [user/data]}.", {}
    )
    hub_strategy: str = option(
        "When to publish. every_save: each checkpoint and the trained drafter; end: only the latter.", "every_save"
    )
    eval_decode: int = option(
        "Prompts of the evaluation rows to decode at each evaluation: their real tau is `eval_tau` in the log.", 0
    )
    loss_chunk_size: int = option("Tokens whose logits exist at a time.", 512)
    block_attention: typing.Literal["auto", "flex", "dense"] = option(
        "Attention over blocks. dense: group by group, on any device; flex: skips tiles that no block sees, on CUDA; "
        "auto: flex if supported.",
        "auto",
    )
