"""Rows of a dataset: local files, folders and Hub names, through `datasets`."""

import csv
import glob
import gzip
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, dropwhile
from pathlib import Path
from typing import TextIO

from dflash_hf._io.errors import one_line, requires_extra
from dflash_hf._io.files import read_text
from dflash_hf._io.progress import without_bars
from dflash_hf._io.repositories import SECONDS, looks_local


# Added to the name of a file that `dflash regenerate` wrote: how it was made.
SETTINGS_SUFFIX = ".settings.json"
MIXTURE_SUFFIXES = (".yaml", ".yml")
_KINDS = {
    ".jsonl": "json",
    ".jsonl.gz": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "txt",
}
_JSON_TEXT = "text"  # the column of rows as JSON text
_SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)  # half of a pair, perhaps without its other half


def check_files(name: str, data: str | Sequence[str] | None) -> None:
    """
    Check that files of rows exist, before anything is loaded; other names may be datasets on the Hub.

    Args:
        name (`str`): The argument to name in the error.
        data: As for [`load_rows`].

    Raises:
        `FileNotFoundError`: one does not.
    """
    files = [data] if isinstance(data, str) else data or []
    for file in files:
        if _suffix(Path(file)) in (*_KINDS, *MIXTURE_SUFFIXES) and not Path(file).exists():
            raise FileNotFoundError(f"{name}='{file}': there is no such file.")


def load_rows(
    data: str | Path | Sequence[str | Path],
    split: str | None = None,
    name: str | None = None,
    revision: str | None = None,
):
    """
    The rows of a dataset.

    Args:
        data: A file (`.jsonl`, `.jsonl.gz`, `.json`, `.parquet`, `.csv`; `.txt` with a prompt in each line) or several
            of one kind, a folder written by `save_to_disk`, or the name of a dataset on the Hub.
        split (`str`): Default: `"train"`, or the only split; also `"train[:1%]"`, or several with `+`. Files, and a
            folder of one dataset, are `"train"`.
        name, revision (`str`): Configuration and commit of a dataset on the Hub.

    Returns:
        `datasets.Dataset`.

    Raises:
        `ValueError`: a file is empty, damaged or of an unknown kind, or the split does not exist.
        `OSError`: a file does not exist, or the Hub cannot be reached.
        `ImportError`: `datasets` is not installed.
    """
    with requires_extra("Reading a dataset needs `datasets`", "train"):
        import datasets

    names = [data] if isinstance(data, str | Path) else list(data)
    paths = [Path(path).expanduser() for path in names]
    if not paths:
        raise ValueError("data is empty; name a file or a dataset on the Hub.")
    first = str(names[0])
    if paths[0].suffix.lower() in MIXTURE_SUFFIXES:
        raise ValueError(
            f"data='{first}' is a mixture, whose rows have prompts and no answers of the target: have it answer them "
            "with `dflash regenerate`, and give what that writes."
        )
    if len(paths) == 1 and paths[0].is_dir():
        return _load_folder(datasets, paths[0], split, first)
    kinds = {_KINDS.get(_suffix(path)) for path in paths}
    is_local = looks_local(first) or paths[0].suffix.lower() in (".txt", ".gz")
    if kinds == {None} and len(paths) == 1 and not paths[0].exists() and not is_local:
        return _load_from_hub(datasets, first, split, name, revision)
    return _load_files(datasets, paths, kinds, split)


def _load_folder(datasets, folder: Path, split: str | None, name: str):
    """The rows of a folder written by `save_to_disk`."""
    try:
        rows = datasets.load_from_disk(str(folder))
    except FileNotFoundError as error:
        raise ValueError(
            f"data='{name}' is a folder without dataset_info.json, which `save_to_disk` writes; name its files."
        ) from error
    except IndexError as error:  # of `datasets`, which writes no shard of a dataset without rows
        raise ValueError(f"data='{name}' has no rows.") from error
    splits = rows if isinstance(rows, datasets.DatasetDict) else {"train": rows}
    return drop_null_keys(_select_split(splits, split, name))


def _load_files(datasets, paths: list[Path], kinds: set[str | None], split: str | None):
    """The rows of files, which must be of one kind."""
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"data='{path}': there is no such file.")
        if path.stat().st_size == 0:
            raise ValueError(f"data='{path}' is an empty file.")
    if len(kinds) != 1 or None in kinds:
        raise ValueError(f"data={_names(paths)} must be of one kind: {', '.join(_KINDS)}; see the guide on data.")
    (kind,) = kinds
    try:
        with without_bars():
            rows = _read_files(datasets, kind, paths)
    except OSError:
        raise
    except Exception as error:  # from datasets, pyarrow, json or csv
        reason = one_line(error.__cause__ or error, 300)
        if "codec can't decode" in reason:
            for path in paths:
                read_text(path)  # raises with the number of a line
        raise ValueError(f"data={_names(paths)} cannot be read: {reason}.") from error
    rows = _select_split({"train": rows}, split, _names(paths))
    return drop_null_keys(rows) if kind == "parquet" else rows.with_transform(_parse_rows)


def _read_files(datasets, kind: str, paths: list[Path]):
    """The rows of files of one kind: a table, or a column of JSON text."""
    if kind == "parquet":
        files = [glob.escape(str(path.resolve())) for path in paths]  # a name may have brackets
        return datasets.load_dataset(kind, data_files=files, split="train")
    # With size and time: a file that has changed is read again, not taken from the cache.
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    features = datasets.Features({_JSON_TEXT: datasets.Value("string")})
    return datasets.Dataset.from_generator(_rows_as_text, features=features, gen_kwargs={"files": files})


def _rows_as_text(files: Sequence[tuple[str, int, int]]) -> Iterator[dict]:
    """
    Rows as JSON text. The loaders of `datasets` have one type for all values of a column: they add keys of other rows,
    round numbers to ten digits, and make a mapping of a text that is JSON, a number of `5.`, a null of `NA`.
    """
    is_empty = True
    for name, *_ in files:
        path = Path(name)
        read_rows = _READERS[_KINDS[_suffix(path)]]
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as binary:
            file = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")
            for text in read_rows(file, path.suffix.lower()):
                yield {_JSON_TEXT: text}
                is_empty = False
    if is_empty:
        raise ValueError("it has no rows")


def _read_json_rows(file: TextIO, suffix: str) -> Iterator[str]:
    """The rows of JSON Lines; a .json file whose first line is no object is one JSON value."""
    lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
    first = next(lines, None)
    if first is not None and suffix == ".json" and not isinstance(_value(first[1]), dict):
        value = json.loads(first[1] + file.read())
        rows = value if isinstance(value, list) else [value]
        for number, row in enumerate(rows):
            if not isinstance(row, dict):
                raise ValueError(f"row {number} is {one_line(repr(row), 60)}, not a JSON object; remove it")
            yield json.dumps(row)
        return
    for number, line in chain([first] if first else (), lines):
        value = _value(line)
        if not isinstance(value, dict):
            reason = value if isinstance(value, Exception) else "another value"
            raise ValueError(f"line {number} is not a JSON object ({reason}): {line[:60]!r}; fix or remove it")
        yield line


def _value(line: str):
    """The value of JSON text, or why it has none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return error


def _read_table_rows(file: TextIO, suffix: str) -> Iterator[str]:
    """The rows of a table, all of whose cells are text."""
    limit = csv.field_size_limit(2**31 - 1)  # of 128 kB, for all readers
    try:
        rows = csv.DictReader(dropwhile(str.isspace, file), delimiter="\t" if suffix == ".tsv" else ",", strict=True)
        for row in rows:
            if any(row.pop(None, ())):  # beyond the header
                remedy = "put texts that contain the separator in quotes"
                raise ValueError(f"line {rows.line_num} has more fields than the header; {remedy}")
            yield json.dumps(row)
    finally:
        csv.field_size_limit(limit)


def _read_text_rows(file: TextIO, suffix: str) -> Iterator[str]:
    """The lines of a text, each a prompt."""
    for line in file:
        if line.strip():
            yield json.dumps({"prompt": line.rstrip("\r\n")})


_READERS = {"json": _read_json_rows, "csv": _read_table_rows, "txt": _read_text_rows}


def _parse_rows(batch: dict) -> dict:
    """JSON text as columns."""
    rows = []
    for text in batch[_JSON_TEXT]:
        row = json.loads(text)
        if _SURROGATE.search(text):  # "?" for half a surrogate pair, which no tokenizer reads
            row = json.loads(json.dumps(row, ensure_ascii=False).encode(errors="replace"))
        rows.append(row)
    names: dict[str, None] = {}  # of all rows, in order
    for row in rows:
        names |= dict.fromkeys(row)
    return {name: [row.get(name) for row in rows] for name in names}


def drop_null_keys(rows):
    """
    A dataset without the keys that tables add: a table has every key of its other rows in every mapping, as `None`.
    A `None` that was written cannot be told from these, except in JSON files, JSON text and columns of type `Json`.
    """
    for name, feature in rows.features.items():
        stored = _without_image_decoding(feature)
        if stored != feature:
            rows = rows.cast_column(name, stored)
    merged = [name for name, feature in rows.features.items() if _has_mapping(feature)]
    if not merged:
        return rows
    return rows.with_transform(partial(_without_added_keys, merged))


def _without_image_decoding(feature):
    """A feature with its images as they are stored: a damaged one is its row's fault, not that of reading."""
    from datasets import Image

    if isinstance(feature, Image):
        return Image(decode=False)
    if isinstance(feature, dict):
        return {name: _without_image_decoding(value) for name, value in feature.items()}
    if isinstance(feature, list):
        return [_without_image_decoding(item) for item in feature]
    inner = getattr(feature, "feature", None)
    return feature if inner is None else replace(feature, feature=_without_image_decoding(inner))


def _has_mapping(feature) -> bool:
    """Whether values of a feature are mappings, or have some inside of lists."""
    inner = getattr(feature, "feature", feature)  # of a list, in its own type or in brackets
    if isinstance(inner, list):
        return any(map(_has_mapping, inner))
    return isinstance(inner, dict) or (inner is not feature and _has_mapping(inner))


def _without_added_keys(merged: list[str], batch: dict) -> dict:
    """A batch without the keys that are null, in the columns `merged`."""
    return {name: _without_none(values) if name in merged else values for name, values in batch.items()}


def _without_none(value):
    """A value without the keys of its mappings that are null."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def _suffix(path: Path) -> str:
    """The suffix of a file name, with the one before `.gz`."""
    count = 2 if path.suffix.lower() == ".gz" else 1
    return "".join(path.suffixes[-count:]).lower()


def _names(paths: list[Path]) -> str:
    """Paths for a message."""
    return ", ".join(f"'{path}'" for path in paths)


def _load_from_hub(datasets, repo: str, split: str | None, name: str | None, revision: str | None):
    """The rows of a dataset on the Hub, or in the cache."""
    from huggingface_hub import HfApi, constants

    cached = Path(datasets.config.HF_DATASETS_CACHE) / repo.replace("/", "___")
    try:
        if not constants.HF_HUB_OFFLINE and not cached.exists():
            HfApi().dataset_info(repo, revision=revision, timeout=SECONDS)  # `datasets` would try it for half a minute
        options = {"name": name, "revision": revision}
        if split is not None:
            return drop_null_keys(datasets.load_dataset(repo, split=split, **options))
        return drop_null_keys(_select_split(datasets.load_dataset(repo, **options), None, repo))
    except (ValueError, ImportError):
        raise
    except Exception as error:  # from datasets, huggingface_hub or their HTTP library
        raise OSError(
            f"The dataset {repo!r} could not be loaded from the Hub, and there is no file of that name: {error}"
        ) from error


def _select_split(splits: Mapping, split: str | None, where: str):
    """The rows of a split, of a slice of one, or of several; see [`load_rows`]."""
    from datasets import ReadInstruction, concatenate_datasets

    default = next(iter(splits)) if len(splits) == 1 else "train"
    name = split or default
    if name in splits:
        return splits[name]
    try:
        slices = ReadInstruction.from_spec(name).to_absolute({key: len(rows) for key, rows in splits.items()})
    except ValueError as error:
        raise ValueError(f"split={name!r} is not in {where}: {error}") from error
    parts = [splits[part.splitname].select(range(part.from_, part.to)) for part in slices if part.from_ < part.to]
    if not parts:
        raise ValueError(f"split={name!r} has no rows in {where}; choose another.")
    return concatenate_datasets(parts)
