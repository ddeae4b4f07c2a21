"""
The settings of a training run, from a recipe (a YAML file) and a command line to the two objects of a run.

Each setting is decided once, by [`decide`], and this is the only place that states the order. The first of these that
has a value for it wins:

1. `command line`: an option.
2. `recipe`: the YAML file.
3. `head`: what `--head NAME` stands for (`head_presets.py`). Its `draft_config` is completed by the user's, whose
   entries win.
4. `machine`: what a processor or GPU cannot do (`presets.machine_settings`), and which preset is taken if none is
   named.
5. `preset`: `paper` or `cpu` (`presets.py`), except for what the settings above replace (`presets._SUPERSEDES`).
6. The default of the field (`arguments.py`, or upstream's).

The names are those of [`Setting.source`], which `dflash train --dry-run` prints for each setting.
"""

import dataclasses
import difflib
import json
import os
import re
import typing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from transformers import HfArgumentParser

from dflash_hf import examples
from dflash_hf._io.errors import is_secret, requires_extra
from dflash_hf._io.files import read_text
from dflash_hf.data.sources import check_files
from dflash_hf.layouts.configuration import DFlashDraftConfig
from dflash_hf.training.arguments import DFlashOptions, ScriptArguments, allowed_types, help_of
from dflash_hf.training.head_presets import head_presets
from dflash_hf.training.presets import (
    check_settings_with_effect,
    default_preset,
    machine_settings,
    preset_settings,
)
from dflash_hf.training.training_args import DFlashTrainingArguments


# What upstream's configurations read besides their fields.
_UPSTREAM_CONFIG_FIELDS = {
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "max_window_layers",
    "attn_implementation",
    "torch_dtype",
}
_SCRIPT_HINTS = typing.get_type_hints(ScriptArguments)
HINTS = {**_SCRIPT_HINTS, **typing.get_type_hints(DFlashTrainingArguments)}


@dataclass(frozen=True)
class Setting:
    """
    The value of a setting, and where it comes from.

    Args:
        value: Of the field's type.
        source (`str`): `"command line"`, `"recipe"`, `"head"`, `"machine"` or `"preset"`; see the top of this module.
        reason (`str`): The recipe's path, the head's or preset's name, or why.
    """

    value: typing.Any
    source: str
    reason: str = ""

    @property
    def origin(self) -> str:
        """Source and reason as text."""
        separator = ": " if self.source == "machine" else " "
        return f"{self.source}{separator}{self.reason}" if self.reason else self.source


def read_recipe(
    path: str | Path | None, options: typing.Mapping[str, typing.Any] | None = None
) -> tuple[ScriptArguments, dict]:
    """
    Read a recipe and the options of a command line; see [`decide`].

    Returns:
        Target, drafter and data, and the arguments of `DFlashTrainingArguments`, all of the declared types.
    """
    return as_arguments(decide(path, options))


def decide(path: str | Path | None, options: typing.Mapping[str, typing.Any] | None = None) -> dict[str, Setting]:
    """
    The settings of a run, each decided once, in the order that stands at the top of this module.

    Args:
        path (`str` or `Path`, *optional*): A YAML file of names and values.
        options (`Mapping[str, Any]`, *optional*): Names and values of the command line, see [`parse_option`]; a name
            such as `peft_config.r` is an entry of a mapping.

    Returns:
        `dict[str, Setting]`: By name, without those that have the default of their field.

    Raises:
        `ValueError`: unknown names (suggests the nearest known ones, and names files of data that do not exist, too),
            a value of the wrong type, or not YAML.
        `OSError`: the file does not exist.
    """
    # 1. What the recipe and the command line set.
    options = options or {}
    values = {} if path is None else _read_yaml(Path(path))
    for name, value in options.items():
        _set_entry(values, name.split("."), value)
    unknown = [name for name in values if name not in HINTS]
    if unknown:
        problems = [_describe_unknown_name(name, list(HINTS)) for name in unknown]
        problems += [_describe_missing_file(name, values.get(name)) for name in ("data", "eval_data")]
        raise ValueError(f"{' '.join(filter(None, problems))} `dflash train --keys` lists all settings.")
    values = _convert_values(values)
    check_settings_with_effect(values)
    names_of_options = {name.partition(".")[0] for name in options}
    settings = {}
    for name, value in values.items():
        if name in names_of_options:
            settings[name] = Setting(value, "command line")
        else:
            settings[name] = Setting(value, "recipe", str(path))

    # 2. What the head sets.
    if values.get("head") is not None:
        _apply_head(settings)

    # 3. The preset: as named, else that of the machine.
    values = {name: setting.value for name, setting in settings.items()}
    if values.get("preset") is None:
        name, reason = default_preset(values)
        settings = {"preset": Setting(name, "machine", reason), **settings}
    preset_name = settings["preset"].value

    # 4. What the preset sets, and what the machine sets in its place.
    preset_values = preset_settings(preset_name, values)
    machine_values = machine_settings(preset_values, values)
    for name, (value, reason) in preset_values.items():
        settings[name] = Setting(value, "preset", f"{preset_name}: {reason}")
    for name, (value, reason) in machine_values.items():
        settings[name] = Setting(value, "machine", reason)
    return settings


def _apply_head(settings: dict[str, Setting]) -> None:
    """Add to the settings of a command line and a recipe those of their `head`, in place."""
    name = settings["head"].value
    presets = head_presets()
    if name not in presets:
        raise ValueError(f"head={name!r} must be one of {', '.join(presets)}; leave it out for a drafter without one.")
    preset = presets[name]
    user_fields = settings.get("draft_config")
    if user_fields is None:
        settings["draft_config"] = Setting(preset.draft_config, "head", name)
    else:
        reason = f"{user_fields.reason} and head {name}".strip()
        settings["draft_config"] = Setting({**preset.draft_config, **user_fields.value}, user_fields.source, reason)
    if preset.loss_type is not None:
        settings.setdefault("loss_type", Setting(preset.loss_type, "head", name))


def machine_lines(settings: dict[str, Setting]) -> list[str]:
    """The lines of a run's log about settings that the machine has decided: the preset, and what differs from it."""
    lines = []
    for name, setting in settings.items():
        if setting.source == "machine" and name != "use_cpu":
            value = setting.value if name == "preset" else json.dumps(setting.value)
            lines.append(f"{name:17} {value}: {setting.reason}")
    return lines


def as_arguments(settings: dict[str, Setting]) -> tuple[ScriptArguments, dict]:
    """
    Target, drafter and data of a run, and the arguments of `DFlashTrainingArguments`.

    Raises:
        `ValueError`: names field, value and remedy.
    """
    values = {name: setting.value for name, setting in settings.items()}
    script = ScriptArguments(**{name: value for name, value in values.items() if name in _SCRIPT_HINTS})
    config_fields = DFlashDraftConfig.field_names() | _UPSTREAM_CONFIG_FIELDS
    unknown = [name for name in script.draft_config if name not in config_fields]
    if unknown:
        raise ValueError(f"draft_config: {_describe_unknown_name(unknown[0], sorted(config_fields))}")
    return script, {name: value for name, value in values.items() if name not in _SCRIPT_HINTS}


def key_lines(word: str = "") -> list[str]:
    """
    The settings whose name or help contains `word`, with their defaults: target, drafter and data, DFlash's,
    transformers'.
    """
    fields = [*dataclasses.fields(ScriptArguments), *dataclasses.fields(DFlashTrainingArguments)]
    fields = [field for field in fields if field.init]
    own_names = {*ScriptArguments.__annotations__, *DFlashOptions.__annotations__}
    lines = []
    for field in sorted(fields, key=lambda field: field.name not in own_names):  # those of transformers last
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = None if default is dataclasses.MISSING else getattr(default, "value", default)
        allowed = tuple(head_presets()) if field.name == "head" else ()
        lines.append(f"{field.name}={default}  {help_of(field, HINTS[field.name], allowed=allowed)}".rstrip())
    return [line for line in lines if word.lower() in line.lower()] or [f"No setting contains {word!r}."]


def parse_option(name: str, text: str) -> typing.Any:
    """
    The value of an option of the command line.

    Args:
        name (`str`): A setting, or an entry of a mapping such as `peft_config.r`.
        text (`str`): The value as YAML, but for settings that are text; `null` is `None`.

    Raises:
        `ValueError`: not YAML.
    """
    hint = HINTS.get(name)
    if text != "null" and hint in (str, str | None):  # a commit such as 12e4 is no number
        return text
    return _parse_yaml(text, f"the value of {name}")


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


def _describe_unknown_name(name: str, names: typing.Sequence[str]) -> str:
    nearest = difflib.get_close_matches(str(name), names, n=1, cutoff=0.0)[0]
    return f"Unknown setting {name!r}; did you mean {nearest!r}?"


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
    with requires_extra("A recipe needs pyyaml", "train"):
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
    """
    The values of a run's settings, each of the type of its field.

    A value that has the type already stays as YAML gives it. Any other scalar is written as an option of a command
    line, `--name=value`, which upstream's parser reads: so a recipe converts `3` to `3.0` and rejects wrong values in
    the same way as transformers' scripts. Lists and mappings have no such form, and must have the type.
    """
    parser = _Parser((ScriptArguments, DFlashTrainingArguments), allow_abbrev=False)
    converted = {}
    scalars = []  # for the parser
    for name, value in values.items():
        allowed = [typing.get_origin(kind) or kind for kind in allowed_types(HINTS[name])]
        if type(value) in allowed:
            converted[name] = _expand_home(value)
        elif value is None or isinstance(value, dict | list):
            names = [kind.__name__ for kind in allowed if isinstance(kind, type) and kind is not type(None)]
            raise ValueError(f"{name}={value!r} must be of type {' or '.join(names)}.")
        elif value is False and bool not in allowed:  # YAML reads the word `no`, as in `eval_strategy: no`, as false
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
