"""
A training run as flat keys: those of [`RecipeArguments`] and of `DFlashTrainingArguments`.

Each key is decided once: by the command line, else by the recipe, else by the preset of the machine (`presets.py`),
else by the default of its field.
"""

import dataclasses
import difflib
import os
import re
import types
import typing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from transformers import HfArgumentParser

from dflash_hf import examples
from dflash_hf.data.sources import check_files
from dflash_hf.layouts.configuration import DFlashDraftConfig
from dflash_hf.terminal import is_secret, needs, read_text
from dflash_hf.training.presets import PAPER, check_keys_with_effect, preset
from dflash_hf.training.training_args import DFlashTrainingArguments, key


# The drafter's configuration fields for each head, with their published values (a selector of half the rank was as
# good), and its loss. vLLM serves DFlash 2 only with its convolution, which a fresh drafter begins without effect.
HEADS: dict[str, tuple[dict, dict]] = {
    "dspark": (
        {"markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True},
        {"loss_type": "dspark"},
    ),
    "domino": ({"gru_hidden_dim": 1024, "emb_dim": 256, "pure_draft_prefix_len": 1}, {}),
    "jetspec": ({"is_causal": True}, {"loss_type": "kl"}),
    "dflash2": ({"selector_rank": 128, "selector_top_k": 16, "conv_kernel_size": 2, "conv_group_size": 16}, {}),
}


@dataclass
class RecipeArguments:
    """
    Pair and data of a training run; the rest is [`~dflash_hf.DFlashTrainingArguments`].

    Raises:
        `ValueError`: names key, value and remedy.
    """

    target: str | None = key("Folder or Hub name of the target.")
    target_revision: str | None = key("Commit of the target on the Hub.")
    target_dtype: str = key("auto, float32, bfloat16 or float16.", "auto")
    trust_remote_code: bool = key("Run the target's own code.", False)
    attn_implementation: str | None = key("Attention of the target, such as sdpa or flash_attention_2.")
    draft: str | None = key("Folder or Hub name of a drafter to start from; default: a new one.")
    draft_revision: str | None = key("Commit of `draft` on the Hub.")
    num_draft_layers: int | None = key("Layers of a new drafter; default: 2 on a CPU, else 5.")
    block_size: int | None = key("Block size of a new drafter, including the anchor; default: 4 on a CPU, else 16.")
    init_layers: list[int] | None = key(
        "Layers of the target that initialise a new drafter's, such as [28, 29]; [-2, -1]: the last two, if they fit."
    )
    draft_vocab_size: int | None = key(
        "Vocabulary size of a new drafter: the most frequent tokens of the data; -1: by their number, 8,192 at most."
    )
    target_layer_ids: list[int] | None = key(
        "Target layers of a new drafter; default: the layers of the features, or the paper's rule."
    )
    mask_token_id: int | None = key("Default: the drafter's, or the target's first spare embedding row.")
    head: str | None = key(
        "Head of the drafter, and its loss: dflash2, dspark, domino or jetspec; draft_config and loss_type say more."
    )
    draft_config: dict = key("Further configuration of a new drafter; a `draft` only takes additional parts.", {})
    peft_config: dict | None = key("Train an adapter on the drafter, such as {peft_type: LORA, r: 16}.")
    data: list[str] | str | None = key("File, files or Hub name of the training data.")
    data_name: str | None = key("Configuration of a Hub dataset.")
    data_revision: str | None = key("Commit of a Hub dataset.")
    split: str | None = key("Split of the data; default: train, or the only one.")
    eval_data: list[str] | str | None = key("Evaluation data, as `data`.")
    eval_split: str | None = key("Split of `eval_data`, or of `data` without it.")
    held_out_rows: int | None = key(
        "Rows of `data` or `features` that are not trained on: a run ends with their tau. Default without evaluation "
        "data: 5 %, of 80 or more at least 8, at most 256; a tenth of 20 or more; 0: none."
    )
    max_length: int = key("Maximum number of tokens of an example.", 3072)
    chat_template: str | None = key("Jinja file to use instead of the tokenizer's template.")
    chat_template_kwargs: dict | None = key("Arguments of the chat template, such as {enable_thinking: false}.")
    num_proc: int | None = key("Processes that encode the data.")
    overwrite_output_dir: bool = key("Start over in an output_dir that has a run or a drafter.", False)
    features: list[str] | str | None = key("Folder or folders of stored features, instead of `data`.")
    eval_features: list[str] | str | None = key("Stored features to evaluate on.")
    store_rows: int = key(
        "First store the features of N rows of `data` in output_dir, train on them, and remove them; -1: of all rows "
        "that a third of max_minutes and half of the disk allow.",
        0,
    )

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
        for name, value in PAPER.items():
            if not self.draft and getattr(self, name) is None:
                setattr(self, name, value)
        if self.init_layers and len(self.init_layers) != self.num_draft_layers:
            raise ValueError(
                f"init_layers={self.init_layers} must name one layer of the target for each of num_draft_layers="
                f"{self.num_draft_layers}."
            )
        if self.head not in (None, *HEADS):
            raise ValueError(f"head={self.head!r} must be one of {', '.join(HEADS)}.")
        for name, minimum in (("num_draft_layers", 1), ("block_size", 2), ("max_length", 1)):  # a block has its anchor
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"{name}={value} must be at least {minimum}.")

    @property
    def evaluates(self) -> bool:
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


# What upstream's configurations read besides their fields.
_UPSTREAM_CONFIG_KEYS = {
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "max_window_layers",
    "attn_implementation",
    "torch_dtype",
}
_RECIPE_HINTS = typing.get_type_hints(RecipeArguments)
_HINTS = {**_RECIPE_HINTS, **typing.get_type_hints(DFlashTrainingArguments)}


@dataclass(frozen=True)
class Setting:
    """The value of a key, and who decided it."""

    value: typing.Any
    origin: str


def read_recipe(path: str | Path | None, overrides: typing.Sequence[str] = ()) -> tuple[RecipeArguments, dict]:
    """
    Read a recipe and apply overrides; see [`decide`].

    Returns:
        The pair and data, and the arguments of `DFlashTrainingArguments`, all of the declared types.
    """
    return as_arguments(decide(path, overrides))


def decide(path: str | Path | None, overrides: typing.Sequence[str] = ()) -> dict[str, Setting]:
    """
    The settings of a run: of the preset of this machine, of a recipe, and of the command line, which replaces the
    recipe's, which replaces the preset's.

    Args:
        path (`str` or `Path`, *optional*): A YAML file of keys and values.
        overrides (`Sequence[str]`): `key=value`, the value as in YAML; `key.inner=value` sets an entry of a mapping.

    Raises:
        `ValueError`: unknown keys (suggests the nearest known ones, and names files of data that do not exist, too), a
            value of the wrong type, or not YAML.
        `OSError`: the file does not exist.
    """
    # 1. The keys that the recipe and the command line set, and where each was set.
    values = {} if path is None else _read_yaml(Path(path))
    origins = dict.fromkeys(values, f"recipe {path}")
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator or not name:
            raise ValueError(f"{override!r} is not an override; write key=value.")
        is_text = _HINTS.get(name) in (str, str | None) and text != "null"  # a commit such as 12e4 is no number
        _set_entry(values, name.split("."), text if is_text else _parse_yaml(text, f"the value of {name}"))
        origins[name.partition(".")[0]] = "command line"
    unknown = [name for name in values if name not in _HINTS]
    if unknown:
        problems = [_describe_unknown_key(name, list(_HINTS)) for name in unknown]
        problems += [_describe_missing_file(name, values.get(name)) for name in ("data", "eval_data")]
        raise ValueError(f"{' '.join(filter(None, problems))} `dflash train --keys` lists all keys.")
    values = _convert_values(values)
    check_keys_with_effect(values)
    settings = {name: Setting(values[name], origin) for name, origin in origins.items()}

    # 2. What the head sets. Its loss comes before the preset's, which does not replace it.
    fields, loss = HEADS.get(values.get("head"), ({}, {}))
    if fields:
        origin = settings["draft_config"].origin if "draft_config" in settings else settings["head"].origin
        settings["draft_config"] = Setting({**fields, **values.get("draft_config", {})}, origin)
    for name, value in loss.items():
        settings.setdefault(name, Setting(value, f"head {values['head']}"))

    # 3. What the preset of this machine sets.
    machine, preset_values, reasons = preset(values)
    for name, value in preset_values.items():
        reason = f": {reasons[name]}" if name in reasons else ""
        settings.setdefault(name, Setting(value, f"preset {machine}{reason}"))
    return settings


def as_arguments(settings: dict[str, Setting]) -> tuple[RecipeArguments, dict]:
    """The arguments of a run's pair and data, and those of `DFlashTrainingArguments`."""
    values = {name: setting.value for name, setting in settings.items()}
    recipe = RecipeArguments(**{name: value for name, value in values.items() if name in _RECIPE_HINTS})
    config_keys = DFlashDraftConfig.field_names() | _UPSTREAM_CONFIG_KEYS
    unknown = [name for name in recipe.draft_config if name not in config_keys]
    if unknown:
        raise ValueError(f"draft_config: {_describe_unknown_key(unknown[0], sorted(config_keys))}")
    return recipe, {name: value for name, value in values.items() if name not in _RECIPE_HINTS}


def key_lines(word: str = "") -> list[str]:
    """The keys whose name or help contains `word`, with their defaults: pair and data, DFlash's, transformers'."""
    fields = [*dataclasses.fields(RecipeArguments), *dataclasses.fields(DFlashTrainingArguments)]
    fields = [field for field in fields if field.init]
    own_names = {*RecipeArguments.__annotations__, *DFlashTrainingArguments.__annotations__}
    lines = []
    for field in sorted(fields, key=lambda field: field.name not in own_names):  # those of transformers last
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = None if default is dataclasses.MISSING else getattr(default, "value", default)
        help = " ".join(field.metadata.get("help", "").replace("%%", "%").split())
        lines.append(f"{field.name}={default}  {help}".rstrip())
    return [line for line in lines if word.lower() in line.lower()] or [f"No key contains {word!r}."]


def _set_entry(values: dict, names: list[str], value) -> None:
    """Set an entry of nested mappings, which are copied."""
    for name, inner in pairwise(names):
        if not isinstance(values.get(name) or {}, dict):
            raise ValueError(f"{name}={values[name]!r} has no entry {inner!r}; write {name}=value.")
        values[name] = dict(values.get(name) or {})
        values = values[name]
    values[names[-1]] = value


def _describe_missing_file(name: str, data) -> str:
    """Which file of some data does not exist; empty if all do."""
    try:
        check_files(name, _expand_home(data) if isinstance(data, str | list) else None)
    except FileNotFoundError as error:
        return str(error)
    return ""


def _describe_unknown_key(name: str, keys: typing.Sequence[str]) -> str:
    nearest = difflib.get_close_matches(str(name), keys, n=1, cutoff=0.0)[0]
    return f"Unknown key {name!r}; did you mean {nearest!r}?"


def _read_yaml(path: Path) -> dict:
    if path.is_dir():
        raise IsADirectoryError(f"--config {path} is a folder; name a file.")
    if not path.is_file():
        bundled = Path(examples.__file__).parent / "recipes"
        raise FileNotFoundError(f"--config {path}: there is no such file; bundled recipes are in {bundled}.")
    values = _parse_yaml(read_text(path), f"--config {path}")
    if not isinstance(values, dict):
        raise ValueError(f"--config {path} must hold keys and values, such as `target: Qwen/Qwen3-8B`.")
    return values


def _parse_yaml(text: str, what: str):
    """A YAML value, with numbers such as `6e-4`, which YAML 1.1 reads as strings; `what` names it in an error."""
    with needs("A recipe needs pyyaml", "train"):
        import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML's loader with a resolver of its own; copies of the lists keep PyYAML's unchanged."""

        yaml_implicit_resolvers = {
            first: list(resolvers) for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    exponent = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, list("-+0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        place = " ".join(str(error).split())
        raise ValueError(f"{what} is not YAML: {place}.") from error


class _Parser(HfArgumentParser):
    """Upstream's parser; errors are raised, and name key and value."""

    def error(self, message: str):
        """
        Raises:
            `ValueError`: always; instead of a usage message and an exit.
        """
        name, _, problem = message.removeprefix("argument --").partition(": ")
        name = name.partition("/")[0]
        if is_secret(name):
            raise ValueError(f"{name}: (not shown) has the wrong type.")
        raise ValueError(f"{name}: {problem}.")


def _convert_values(values: dict) -> dict:
    """The values of a run's keys: scalars as `HfArgumentParser` reads them, lists and mappings as in YAML."""
    parser = _Parser((RecipeArguments, DFlashTrainingArguments), allow_abbrev=False)
    converted = {}
    scalars = []  # for the parser
    for name, value in values.items():
        hint = _HINTS[name]
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        members = typing.get_args(hint) if is_union else (hint,)
        allowed = [typing.get_origin(member) or member for member in members]
        if type(value) in allowed:
            converted[name] = _expand_home(value)
        elif value is None or isinstance(value, dict | list):
            names = [kind.__name__ for kind in allowed if isinstance(kind, type) and kind is not type(None)]
            raise ValueError(f"{name}={value!r} must be of type {' or '.join(names)}.")
        elif value is False and bool not in allowed:  # YAML reads `no` as a truth value
            scalars.append(f"--{name}=no")
        else:
            scalars.append(f"--{name}={value}")
    parsed = vars(parser.parse_args(scalars))
    for name in values:
        if name not in converted:
            converted[name] = _expand_home(parsed[name])
    return converted


def _expand_home(value):
    """A value whose paths begin with the home folder in place of `~`, which no shell expands in a file."""
    if isinstance(value, list):
        return [_expand_home(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) else value
