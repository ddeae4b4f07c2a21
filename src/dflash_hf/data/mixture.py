"""
Mixtures: prompts from several datasets, with a number of rows of each, in an order that a seed decides.

A mixture is a YAML file:

    seed: 0
    sources:
      - data: nvidia/Nemotron-Post-Training-Dataset-v2
        split: chat
        rows: 350424
        license: CC BY 4.0
        access: gated
      - data: local.jsonl
        rows: 20000

The same file gives the same rows in the same order, whenever it is read: `dflash regenerate` continues after an
interruption with the rows that are missing. What happens to a row, in this order:

1. The rows of a source are shuffled, by the mixture's seed and the source's own name, split and configuration. So a
   larger number of rows has all rows of a smaller one, and no source depends on another.
2. Rows without a prompt are passed over, so that the mixture has as many rows of each source as it says.
3. The sources are interleaved at random, by the seed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random

from dflash_hf._io.errors import one_line, requires_extra
from dflash_hf._io.files import read_text
from dflash_hf.data.messages import UnusableRow
from dflash_hf.data.row_layouts import conversation_of
from dflash_hf.data.sources import MIXTURE_SUFFIXES, load_rows


@dataclass(frozen=True)
class Source:
    """
    A dataset of a mixture.

    Args:
        data (`str`): A file, or the name of a dataset on the Hub.
        rows (`int`): How many of its rows are drawn.
        split, name, revision (`str`, *optional*): As for [`~dflash_hf.data.sources.load_rows`].
        license, access (`str`, *optional*): Under which terms it may be used, and how to get it; shown to the user.

    Raises:
        `ValueError`: a value has the wrong type, or there are no rows.
    """

    data: str
    rows: int
    split: str | None = None
    name: str | None = None
    revision: str | None = None
    license: str | None = None
    access: str | None = None

    def __post_init__(self):
        if type(self.rows) is not int or self.rows < 1:
            raise ValueError(
                f"rows={self.rows!r} must be a whole number of at least 1; leave a source without rows out."
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "rows" and not isinstance(value, str | None):
                raise ValueError(f"{field.name}={value!r} must be text; write it in quotes.")
        if not self.data:
            raise ValueError("data is empty; name a file, or a dataset on the Hub.")

    @property
    def key(self) -> str:
        """What tells it from other sources: its name, configuration and split."""
        return ":".join(part for part in (self.data, self.name, self.split) if part)


@dataclass(frozen=True)
class Mixture:
    """
    What a mixture's file says.

    Args:
        sources (`tuple[Source, ...]`): The datasets.
        seed (`int`): Decides which rows are drawn, and in which order.

    Raises:
        `ValueError`: there are no sources, or one comes twice.
    """

    sources: tuple[Source, ...]
    seed: int = 0

    def __post_init__(self):
        if type(self.seed) is not int:
            raise ValueError(f"seed={self.seed!r} must be a whole number.")
        if not self.sources:
            raise ValueError("sources is empty; name at least one dataset.")
        key, times = Counter(source.key for source in self.sources).most_common(1)[0]
        if times > 1:
            raise ValueError(f"sources names {key} {times} times; a row would come twice. Add their rows.")

    @property
    def num_rows(self) -> int:
        """The rows of all sources."""
        return sum(source.rows for source in self.sources)


def is_mixture(data) -> bool:
    """Whether some data are the file of a mixture."""
    return isinstance(data, str | Path) and Path(data).suffix.lower() in MIXTURE_SUFFIXES


def read_mixture(path: str | Path) -> Mixture:
    """
    Read the file of a mixture.

    Raises:
        `ValueError`: it is not YAML, or a key is unknown, missing or has a wrong value; names file, source and key.
        `OSError`: there is no such file.
    """
    with requires_extra("A mixture needs pyyaml", "train"):
        import yaml

    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"The mixture {path} does not exist; its path is relative to the current folder.")
    try:
        content = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {one_line(error)}.") from error
    try:
        fields_of_mixture = _checked_keys(content, Mixture)
        sources = fields_of_mixture["sources"]
        if not isinstance(sources, list):
            raise ValueError(f"sources={one_line(repr(sources), 60)} must be a list, each with `data` and `rows`.")
        parsed = []
        for number, source in enumerate(sources, start=1):
            try:
                parsed.append(Source(**_checked_keys(source, Source)))
            except ValueError as error:
                raise ValueError(f"source {number}: {error}") from error
        return Mixture(**{**fields_of_mixture, "sources": tuple(parsed)})
    except ValueError as error:
        raise ValueError(f"{path} is not a mixture: {error}") from error


def _checked_keys(content, dataclass_type: type) -> dict:
    """The mapping of a YAML file that has the fields of a dataclass, without those that are null."""
    names = [field.name for field in fields(dataclass_type)]
    if not isinstance(content, dict):
        raise ValueError(f"{one_line(repr(content), 60)} must have the keys {', '.join(names)}.")
    unknown = [key for key in content if key not in names]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; it may have {', '.join(names)}.")
    values = {key: value for key, value in content.items() if value is not None}
    required = {Source: ("data", "rows"), Mixture: ("sources",)}[dataclass_type]
    for name in required:
        if name not in values:
            raise ValueError(f"the key {name!r} is missing.")
    return values


def mixed_rows(mixture: Mixture, passed_over: Counter | None = None) -> Iterator[dict]:
    """
    The rows of a mixture, in its order; see the top of this file.

    Args:
        mixture (`Mixture`): Its sources; all are opened before the first row.
        passed_over (`Counter`, *optional*): Counts the rows without a prompt, by source and reason.

    Raises:
        `ValueError`: a source has too few rows.
        `OSError`: a source cannot be read.
    """
    passed_over = Counter() if passed_over is None else passed_over
    rows_of_sources = [_shuffled_rows(source, mixture.seed, passed_over) for source in mixture.sources]
    order = [number for number, source in enumerate(mixture.sources) for _ in range(source.rows)]
    Random(mixture.seed).shuffle(order)
    return (next(rows_of_sources[number]) for number in order)


def _shuffled_rows(source: Source, seed: int, passed_over: Counter) -> Iterator[dict]:
    """Opens a source; returns as many of its rows as it says, shuffled."""
    rows = load_rows(source.data, source.split, source.name, source.revision)
    if len(rows) < source.rows:
        raise ValueError(f"The source {source.key} has {len(rows):,} rows, not rows={source.rows}; ask for fewer.")
    order = list(range(len(rows)))
    Random(f"{seed} {source.key}").shuffle(order)

    def drawn_rows() -> Iterator[dict]:
        count = 0
        for row in rows.select(order):
            reason = _unusable(row, source)
            if reason is not None:
                passed_over[f"{source.key}: {reason}"] += 1
                continue
            yield _without_blank_system_prompt(row)
            count += 1
            if count == source.rows:
                return
        raise ValueError(
            f"The source {source.key} has {count:,} rows with a prompt, not rows={source.rows}; ask for fewer."
        )

    return drawn_rows()


def _unusable(row: Mapping, source: Source) -> str | None:
    """Why a row has no prompt; `None` if it has one."""
    try:
        if conversation_of(row, answers=False, ids=False).prompt(as_chat=True):
            return None
    except UnusableRow as reason:
        return str(reason)
    except ValueError as error:
        raise ValueError(f"A row of {source.key}: {error}") from error
    return "its prompt is empty"


def _without_blank_system_prompt(row: Mapping) -> dict:
    """A row without a system message that is blank: chat templates would write an empty turn for it."""
    row = dict(row)
    messages = row.get("messages")
    if isinstance(messages, list) and len(messages) > 1:
        first = messages[0] or {}
        content = first.get("content")
        if first.get("role") == "system" and (content is None or (isinstance(content, str) and not content.strip())):
            row["messages"] = messages[1:]
    return row
