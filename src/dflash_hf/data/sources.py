"""Rows of a dataset: local files, folders and Hub names, through `datasets`."""

import contextlib
import csv
import glob
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from dflash_hf.data.messages import without_none
from dflash_hf.repositories import SECONDS, looks_local
from dflash_hf.terminal import needs, not_utf8, one_line, read_text


_LOADERS = {
    **dict.fromkeys((".jsonl", ".jsonl.gz", ".ndjson", ".json"), "json"),
    **{".parquet": "parquet", ".csv": "csv", ".tsv": "csv"},
}
_LINE = "line"  # the column of JSON text
_HALF = re.compile(r"\\ud[89a-f]", re.IGNORECASE)  # of a surrogate pair, perhaps without its other half


def check_files(name: str, data: str | Sequence[str] | None) -> None:
    """
    Check that files of rows exist, before anything is loaded; other names may be datasets on the Hub.

    Args:
        name (`str`): The argument to name in the error.
        data: As for [`load_rows`].

    Raises:
        `FileNotFoundError`: one does not.
    """
    for one in [data] if isinstance(data, str) else data or []:
        if _suffix(Path(one)) in _LOADERS and not Path(one).exists():
            raise FileNotFoundError(f"{name}={one!r}: there is no such file.")


def load_rows(
    data: str | Path | Sequence[str | Path],
    split: str | None = None,
    streaming: bool = False,
    name: str | None = None,
    revision: str | None = None,
):
    """
    The rows of a dataset.

    Args:
        data: A file (`.jsonl`, `.jsonl.gz`, `.json`, `.parquet`, `.csv`) or several of one kind, a folder written by
            `save_to_disk`, or the name of a dataset on the Hub.
        split (`str`): Default: `"train"`, or the only split; also `"train[:1%]"`, unless streaming.
        streaming (`bool`): Read rows as they are needed; the dataset then has no length.
        name, revision (`str`): Configuration and commit of a dataset on the Hub.

    Returns:
        `datasets.Dataset`, or `datasets.IterableDataset` when streaming.

    Raises:
        `ValueError`: a file is empty, damaged or of an unknown kind, or the split does not exist.
        `OSError`: a file does not exist, or the Hub cannot be reached.
        `ImportError`: `datasets` is not installed.
    """
    with needs("Reading a dataset needs `datasets`", "train"):
        import datasets

    paths = [Path(one).expanduser() for one in ([data] if isinstance(data, str | Path) else data)]
    if not paths:
        raise ValueError("data is empty; name a file or a dataset on the Hub.")
    kinds = {_LOADERS.get(_suffix(path)) for path in paths}
    if len(paths) == 1 and paths[0].is_dir():
        return _of_folder(datasets, paths[0], split, streaming)
    first = str(data if isinstance(data, str | Path) else data[0])
    local = looks_local(first) or paths[0].suffix.lower() in (".txt", ".gz")
    if kinds == {None} and len(paths) == 1 and not paths[0].exists() and not local:
        return _of_hub(datasets, first, split, streaming, name, revision)

    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"data={str(path)!r}: there is no such file.")
        if path.stat().st_size == 0:
            raise ValueError(f"data={str(path)!r} is an empty file.")
    if len(kinds) != 1 or None in kinds:
        raise ValueError(f"data={_names(paths)} must be of one kind: {', '.join(_LOADERS)}.")
    (kind,) = kinds
    if kind == "json":
        return _of_json(datasets, paths, split or "train", streaming)
    options = _text_columns(datasets, paths) if kind == "csv" else {}
    return as_written(_of_files(datasets, kind, paths, split or "train", streaming, options))


def _of_files(datasets, kind: str, paths: list[Path], split: str, streaming: bool, options: dict):
    """What a loader makes of files, or an error that names them."""
    files = [glob.escape(str(path.resolve())) for path in paths]  # a name may have brackets
    try:
        rows = datasets.load_dataset(kind, data_files=files, split=split, streaming=streaming, **options)
    except OSError:
        raise
    except Exception as error:  # from datasets, pyarrow or pandas
        if "corresponds to no data" in str(error):
            raise ValueError(f"data={_names(paths)} has no rows.") from error
        raise ValueError(f"data={_names(paths)} cannot be read as {kind}: {error.__cause__ or error}.") from error
    if not streaming and len(rows) == 0:
        raise ValueError(f"data={_names(paths)} has no rows.")
    return rows


def as_written(rows):
    """
    A dataset without the keys that tables add: a table has every key of its other rows in every mapping, as `None`.
    A `None` that was written cannot be told from these, except in JSON files, JSON text and columns of type `Json`.
    """
    from datasets import IterableDataset

    merged = [name for name, feature in (rows.features or {}).items() if _has_mapping(feature)]
    if not merged:
        return rows
    clean = partial(_without_added, merged)
    return rows.map(clean, batched=True) if isinstance(rows, IterableDataset) else rows.with_transform(clean)


def _has_mapping(feature) -> bool:
    inner = getattr(feature, "feature", feature)  # of a list, in its own type or in brackets
    if isinstance(inner, list):
        return any(map(_has_mapping, inner))
    return isinstance(inner, dict) or inner is not feature and _has_mapping(inner)


def _without_added(merged: list[str], batch: dict) -> dict:
    return {name: without_none(values) if name in merged else values for name, values in batch.items()}


def _of_json(datasets, paths: list[Path], split: str, streaming: bool):
    """
    Rows of JSON files as they were written. The loader of `datasets` has one type for all values of a column: it adds
    keys of other rows, rounds numbers to ten digits, and makes a mapping of a text that is JSON.
    """
    listed = any(path.suffix.lower() == ".json" and not _is_lines(path) for path in paths)
    columns: dict[str, None] = {}
    texts, blank = [], False
    for row in (row for path in paths for row in _objects(path)):
        columns |= dict.fromkeys(row or ())
        blank |= row is None
        if listed and row is not None:
            texts.append(json.dumps(row))
    if listed:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute({"train": len(texts)})
        rows = datasets.Dataset.from_dict({_LINE: [text for one in parts for text in texts[one.from_ : one.to]]})
        if len(rows) == 0:
            raise ValueError(f"data={_names(paths)} has no rows.")
        rows = rows.to_iterable_dataset() if streaming else rows
    else:
        options = {"encoding": "utf-8-sig", "features": datasets.Features({_LINE: datasets.Value("string")})}
        rows = _of_files(datasets, "text", paths, split, streaming, options)
        rows = rows.filter(_is_written, input_columns=_LINE) if blank else rows
    read = partial(_parsed, list(columns))
    return rows.map(read, batched=True, remove_columns=_LINE) if streaming else rows.with_transform(read)


def _is_written(line: str) -> bool:
    return bool(line.strip())


def _parsed(columns: list[str], batch: dict) -> dict:
    rows = [_value(line) for line in batch[_LINE]]
    return {name: [row.get(name) for row in rows] for name in columns}


def _value(text: str):
    """The value of JSON text, with "?" for half a surrogate pair, which no tokenizer reads."""
    value = json.loads(text)
    if _HALF.search(text):
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return value


def _is_lines(path: Path) -> bool:
    """Whether a .json file is JSON Lines: its first line is an object."""
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    with contextlib.suppress(ValueError, RecursionError):
        return isinstance(json.loads(first.decode("utf-8-sig")), dict)
    return False


def _suffix(path: Path) -> str:
    """The suffix of a file name, with the one before `.gz`."""
    return "".join(path.suffixes[-2:] if path.suffix.lower() == ".gz" else path.suffixes[-1:]).lower()


def _names(paths: list[Path]) -> str:
    return ", ".join(repr(str(path)) for path in paths)


def _objects(path: Path) -> Iterator[dict | None]:
    """
    The objects of a JSON file, `None` for each empty line.

    Raises:
        `ValueError`: something else is there; names the line.
    """
    if path.suffix.lower() == ".json" and not _is_lines(path):
        try:
            value = json.loads(read_text(path))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"data={str(path)!r} cannot be read as json: {error}.") from error
        rows = value if isinstance(value, list) else [value]
        for number, row in enumerate(rows):
            if not isinstance(row, dict):
                raise ValueError(f"Row {number} of {path} is {one_line(repr(row), 60)}, not a JSON object; remove it.")
        yield from rows
        return
    try:
        with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                yield _object(path, number, line)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"data={str(path)!r} is damaged ({error}); compress or download it again.") from error


def _object(path: Path, number: int, content: bytes) -> dict | None:
    try:
        line = content.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(path, number)) from error
    try:
        value = json.loads(line) if line.strip() else None
        if value is None and line.strip() or not isinstance(value, dict | None):
            raise ValueError("not an object")
        return value
    except RecursionError:
        raise ValueError(f"Line {number} of {path} is nested too deeply; remove it.") from None
    except ValueError as error:
        half = "" if line.endswith("\n") else "; it is the last line, perhaps half written"
        raise ValueError(f"Line {number} of {path} is not a JSON object ({error}){half}. Fix or remove it.") from error


def _text_columns(datasets, paths: list[Path]) -> dict:
    """
    Options that read all cells of tables as text: `5.` is not a number, nor `NA` a missing value.

    Raises:
        `ValueError`: a line has more fields than the header, which the loader would shift or drop.
    """
    separator = "\t" if paths[0].suffix.lower() == ".tsv" else ","
    headers = [_check_table(path, separator) for path in paths]
    named = [name or f"Unnamed: {number}" for number, name in enumerate(headers[0])]  # as pandas names them
    text = datasets.Features({name: datasets.Value("string") for name in named})
    return {"sep": separator, "keep_default_na": False, "index_col": False, "features": text}


def _check_table(path: Path, separator: str) -> list[str]:
    """The header of a table, all of whose lines have no more fields."""
    limit = csv.field_size_limit(2**31 - 1)  # of 128 kB, for all readers
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, delimiter=separator)
            names = next(filter(None, lines), None)
            if names is None:
                raise ValueError(f"data={str(path)!r} is an empty file.")
            for fields in lines:
                if any(fields[len(names) :]):
                    raise ValueError(
                        f"Line {lines.line_num} of {path} has {len(fields)} fields, its header {len(names)}: put "
                        "texts that contain the separator in quotes."
                    )
    except UnicodeDecodeError:
        read_text(path)  # raises with the number of a line
        raise
    except csv.Error as error:
        raise ValueError(f"Line {lines.line_num} of {path} cannot be read as a table: {error}.") from error
    finally:
        csv.field_size_limit(limit)
    return names


def _of_folder(datasets, folder: Path, split: str | None, streaming: bool):
    if not any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        raise ValueError(
            f"data={str(folder)!r} is a folder without dataset_info.json, which `save_to_disk` writes; name its files."
        )
    rows = datasets.load_from_disk(str(folder))
    if isinstance(rows, datasets.DatasetDict):
        rows = _choose_split(rows, split, str(folder))
    return as_written(rows.to_iterable_dataset() if streaming else rows)


def _of_hub(datasets, repo: str, split: str | None, streaming: bool, name: str | None, revision: str | None):
    where = f"The dataset {repo!r}"
    try:
        _ask_once(datasets, repo, revision)
        options = {"name": name, "revision": revision, "streaming": streaming}
        if split is not None:
            return as_written(datasets.load_dataset(repo, split=split, **options))
        return as_written(_choose_split(datasets.load_dataset(repo, **options), None, repo))
    except (ValueError, ImportError):
        raise
    except Exception as error:  # from datasets, huggingface_hub or their HTTP library
        raise OSError(
            f"{where} could not be loaded from the Hub, and there is no file of that name: {error}"
        ) from error


def _ask_once(datasets, repo: str, revision: str | None) -> None:
    """Fail early if the Hub does not have a dataset, instead of the retries of `datasets`; cached ones need no Hub."""
    from huggingface_hub import HfApi, constants

    cached = Path(datasets.config.HF_DATASETS_CACHE) / repo.replace("/", "___")
    if not constants.HF_HUB_OFFLINE and not cached.exists():
        HfApi().dataset_info(repo, revision=revision, timeout=SECONDS)


def _choose_split(splits, split: str | None, where: str):
    name = split or ("train" if "train" in splits or len(splits) != 1 else next(iter(splits)))
    if name not in splits:
        raise ValueError(f"split={name!r} is not in {where}, which has {', '.join(splits)}.")
    return splits[name]
