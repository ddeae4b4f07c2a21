"""A training run as a YAML file of flat keys: those of [`RecipeArguments`] and of `DFlashTrainingArguments`."""

import contextlib
import dataclasses
import difflib
import os
import re
import types
import typing
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from dflash_hf.layouts.configuration import DFlashDraftConfig
from dflash_hf.terminal import is_secret, needs, read_text
from dflash_hf.training.features import FeatureManifest
from dflash_hf.training.settings_for import PAPER
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
    base_model: str | None = key("Hub name of the target, for the model card, if `target` is a folder.")
    draft: str | None = key("Folder or Hub name of a drafter to start from; default: a new one.")
    num_draft_layers: int | None = key("Layers of a new drafter; default: 5.")
    block_size: int | None = key("Block size of a new drafter, including the anchor; default: 16.")
    init_layers: list[int] | None = key(
        "Layers of the target that initialise a new drafter's, such as [28, 29].", of_run=True
    )
    draft_vocab_size: int | None = key("Vocabulary size of a new drafter: the most frequent tokens of the data.")
    target_layer_ids: list[int] | None = key(
        "Target layers of a new drafter; default: the layers of the features, or the paper's rule."
    )
    mask_token_id: int | None = key("Default: the drafter's, or the target's first spare embedding row.")
    head: str | None = key(
        "Head of the drafter, and its loss: dflash2, dspark, domino or jetspec; draft_config and loss_type say more."
    )
    draft_config: dict = key("Further configuration of a new drafter; a `draft` only takes additional parts.", {})
    peft_config: dict | None = key("Train an adapter on the drafter, such as {peft_type: LORA, r: 16}.", of_run=True)
    data: str | list[str] | None = key("File, files or Hub name of the training data.")
    data_name: str | None = key("Configuration of a Hub dataset.", of_run=True)
    data_revision: str | None = key("Commit of a Hub dataset.", of_run=True)
    split: str | None = key("Split of the data; default: train, or the only one.", of_run=True)
    eval_data: str | list[str] | None = key("Evaluation data, as `data`.")
    eval_split: str | None = key("Split of `eval_data`, or of `data` without it.")
    streaming: bool = key("Stream the data; needs `max_steps`.", False, of_run=True)
    max_length: int = key("Maximum number of tokens of an example.", 3072, of_run=True)
    packing: bool = key("Pack examples into rows of `max_length` tokens.", False, of_run=True)
    chat_template: str | None = key("Jinja file to use instead of the tokenizer's template.")
    chat_template_kwargs: dict | None = key("Arguments of the chat template, such as {enable_thinking: false}.")
    num_proc: int | None = key("Processes that encode the data.")
    overwrite_output_dir: bool = key("Start over in an output_dir that has a run or a drafter.", False)
    features: str | list[str] | None = key("Folder or folders of stored features, instead of `data`.")
    eval_features: str | list[str] | None = key("Stored features to evaluate on.")
    decode_prompts: int = key("Prompts to decode at each evaluation, to measure tau; 0: none.", 0)
    decode_steps: int | None = key("Also decode every N steps.")
    decode_max_new_tokens: int = key("Maximum number of tokens of their answers.", 128)
    store_rows: int = key(
        "First store the features of N rows of `data` in output_dir, train on them, and remove them.", 0, True
    )

    def __post_init__(self):
        if not self.target:
            raise ValueError("target is not given; name the model to draft for, such as --target Qwen/Qwen3-8B.")
        if bool(self.data) == bool(self.features):
            given = "both are given" if self.data else "neither is given"
            raise ValueError(f"A run needs data or features, but {given}; name one.")
        if self.features and (self.packing or self.streaming or self.eval_data):
            raise ValueError("features are read as stored: leave out packing, streaming and eval_data.")
        if self.features and self.decode_prompts:
            raise ValueError("decode_prompts needs the target's layers, which stored features replace; set it to 0.")
        if self.streaming and (self.num_proc or self.eval_split):
            raise ValueError("streaming=True reads in one process and one split: leave out num_proc and eval_split.")
        if self.streaming and self.draft_vocab_size:
            raise ValueError("draft_vocab_size counts the tokens of all rows, which streaming=True reads only once.")
        for name in ("init_layers", "draft_vocab_size"):
            if self.draft and getattr(self, name):
                raise ValueError(f"{name} is for a fresh drafter, but draft={self.draft!r} is given; leave one out.")
        for name in ("num_draft_layers", "block_size"):
            if not self.draft and getattr(self, name) is None:
                setattr(self, name, PAPER[name])
        if self.init_layers and len(self.init_layers) != self.num_draft_layers:
            raise ValueError(
                f"init_layers={self.init_layers} must name one layer of the target for each of num_draft_layers="
                f"{self.num_draft_layers}."
            )
        if self.store_rows and (self.features or self.packing or self.streaming):
            raise ValueError(
                f"store_rows={self.store_rows} stores rows of data: leave out features, packing, streaming."
            )
        if self.head not in (None, *HEADS):
            raise ValueError(f"head={self.head!r} must be one of {', '.join(HEADS)}.")
        for name in ("num_draft_layers", "block_size", "max_length"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.block_size == 1:
            raise ValueError(f"block_size={self.block_size} must be at least 2, the anchor and one drafted token.")

    @cached_property
    def manifests(self) -> dict[str, FeatureManifest]:
        """The manifests of its stored features, by folder."""
        folders = [self.features] if isinstance(self.features, str) else self.features or []
        return {folder: FeatureManifest.load(Path(folder)) for folder in folders}


# What upstream's configurations read besides their fields.
_OF_UPSTREAM = {"rope_theta", "rope_scaling", "partial_rotary_factor", "max_window_layers"}
_OF_UPSTREAM |= {"attn_implementation", "torch_dtype"}
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_OF_RECIPE = typing.get_type_hints(RecipeArguments)
_HINTS = {**_OF_RECIPE, **typing.get_type_hints(DFlashTrainingArguments)}


def read_recipe(path: str | Path | None, overrides: typing.Sequence[str] = ()) -> tuple[RecipeArguments, dict]:
    """
    Read a recipe and apply overrides.

    Args:
        path (`str` or `Path`, *optional*): A YAML file of keys and values.
        overrides (`Sequence[str]`): `key=value`, the value as in YAML; `key.inner=value` sets an entry of a mapping.

    Returns:
        The pair and data, and the arguments of `DFlashTrainingArguments`, all of the declared types.

    Raises:
        `ValueError`: an unknown key (suggests the nearest known key), a value of the wrong type, or not YAML.
        `OSError`: the file does not exist.
    """
    values = {} if path is None else _read_yaml(Path(path))
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ValueError(f"{override!r} is not an override; write key=value.")
        value = _parse(text, f"the value of {key}")
        names, entry = key.split("."), values
        for name, inner in pairwise(names):
            if not isinstance(entry.get(name) or {}, dict):
                raise ValueError(f"{name}={entry[name]!r} has no entry {inner!r}; write {name}=value.")
            entry[name] = dict(entry.get(name) or {})
            entry = entry[name]
        entry[names[-1]] = value
    if unknown := [key for key in values if key not in _HINTS]:
        raise ValueError(f"{_unknown(unknown[0], list(_HINTS))} `dflash train --keys` lists all keys.")
    of_recipe, arguments = _parts({key: _at_home(_typed(key, value)) for key, value in values.items()})
    fields, loss = HEADS.get(of_recipe.get("head"), ({}, {}))
    recipe = RecipeArguments(**{**of_recipe, "draft_config": {**fields, **of_recipe.get("draft_config", {})}})
    known = DFlashDraftConfig.field_names() | _OF_UPSTREAM
    if wrong := [name for name in recipe.draft_config if name not in known]:
        raise ValueError(f"draft_config: {_unknown(wrong[0], sorted(known))}")
    return recipe, {**loss, **arguments}


def given_keys(overrides: typing.Sequence[str], arguments: dict) -> set[str]:
    """
    The keys that a run without a recipe file is given, the loss of its head included.

    Args:
        overrides, arguments: As for and from [`read_recipe`].
    """
    return {override.partition("=")[0].partition(".")[0] for override in overrides} | arguments.keys()


def completed(recipe: RecipeArguments, arguments: dict, chosen: dict) -> tuple[RecipeArguments, dict]:
    """What [`read_recipe`] returned, with further keys and their values."""
    of_recipe, of_training = _parts(chosen)
    return dataclasses.replace(recipe, **of_recipe), {**arguments, **of_training}


def _parts(values: dict) -> tuple[dict, dict]:
    """Keys and values of a recipe: of its pair and data, and of its training."""
    of_recipe = {key: value for key, value in values.items() if key in _OF_RECIPE}
    return of_recipe, {key: value for key, value in values.items() if key not in _OF_RECIPE}


def _unknown(key: str, known: typing.Sequence[str]) -> str:
    nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
    return f"Unknown key {key!r}; did you mean {nearest!r}?"


def _at_home(value):
    """Paths in a file, where no shell expands `~`."""
    if isinstance(value, list):
        return [_at_home(one) for one in value]
    return os.path.expanduser(value) if isinstance(value, str) else value


def key_lines(word: str = "") -> list[str]:
    """The keys whose name or help contains `word`, with their defaults, each under its heading."""
    lines = []
    for title, cls, inherited in (
        ("pair and data", RecipeArguments, False),
        ("training, of DFlash", DFlashTrainingArguments, False),
        ("training, as in transformers.TrainingArguments", DFlashTrainingArguments, True),
    ):
        found = []
        for one in dataclasses.fields(cls):
            if not one.init or (one.name not in cls.__annotations__) != inherited:
                continue
            default = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
            default = None if default is dataclasses.MISSING else getattr(default, "value", default)
            help = " ".join(one.metadata.get("help", "").replace("%%", "%").split())
            line = f"  {one.name}={default}  {help}".rstrip()
            if word.lower() in line.lower():
                found.append(line)
        if found:
            lines += [f"{title}:", *found]
    return lines or [f"No key contains {word!r}."]


def _read_yaml(path: Path) -> dict:
    if path.is_dir():
        raise IsADirectoryError(f"--config {path} is a folder; name a file.")
    if not path.is_file():
        raise FileNotFoundError(f"--config {path}: there is no such file.")
    values = _parse(read_text(path), f"--config {path}")
    if not isinstance(values, dict):
        raise ValueError(f"--config {path} must hold keys and values, such as `target: Qwen/Qwen3-8B`.")
    return values


def _parse(text: str, what: str):
    with needs("A recipe needs pyyaml", "train"):
        import yaml
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        place = " ".join(str(error).split())
        raise ValueError(f"{what} is not YAML: {place}.") from error


def _with_floats(value):
    """The entries of a value, where YAML reads `6e-4` as a string too."""
    if isinstance(value, dict):
        return {name: _with_floats(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_with_floats(one) for one in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _whole(value) -> int:
    if not float(value).is_integer():
        raise ValueError(value)
    return int(float(value))


def _typed(key: str, value):
    """The value of a key as one of its types; YAML reads `6e-4` as a string and `3` as an integer."""
    hint = _HINTS[key]
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = [typing.get_origin(one) or one for one in (typing.get_args(hint) if union else (hint,))]
    classes = [kind for kind in kinds if isinstance(kind, type)]
    if any(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) for kind in classes):
        return _with_floats(value) if isinstance(value, dict) else value
    is_enum = any(issubclass(kind, Enum) for kind in classes)
    if value is False and is_enum:
        return "no"  # as in `save_strategy: no`, which YAML reads as a boolean
    if (value is False and typing.Literal in kinds) or (isinstance(value, str) and is_enum):
        return value
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        for kind, read in ((float, float), (int, _whole), (str, str)):
            if kind in kinds:
                with contextlib.suppress(ValueError):
                    return read(value)
    names = [getattr(kind, "__name__", str(kind)) for kind in kinds if kind is not type(None)]
    shown = "(not shown)" if is_secret(key) else repr(value)
    raise ValueError(f"{key}={shown} must be of type {' or '.join(names)}.")
