"""Rows of a dataset: local files, folders and Hub names, through `datasets`."""

import csv
import glob
import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

from dflash_hf.repositories import SECONDS, looks_local
from dflash_hf.terminal import needs, not_utf8, read_text


_LOADERS = {
    **dict.fromkeys((".jsonl", ".jsonl.gz", ".ndjson", ".json"), "json"),
    **{".parquet": "parquet", ".csv": "csv", ".tsv": "csv"},
}


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
        _check_json(paths, thoroughly=streaming)  # a stream would fail in the middle of its use
    options = _text_columns(datasets, paths) if kind == "csv" else {}
    files = [glob.escape(str(path.resolve())) for path in paths]  # a name may have brackets
    try:
        rows = datasets.load_dataset(kind, data_files=files, split=split or "train", streaming=streaming, **options)
    except OSError:
        raise
    except Exception as error:  # from datasets, pyarrow or pandas
        if kind == "json":
            _check_json(paths, thoroughly=True)  # raises with the number of a line
        if "corresponds to no data" in str(error):
            raise ValueError(f"data={_names(paths)} has no rows.") from error
        raise ValueError(f"data={_names(paths)} cannot be read as {kind}: {error.__cause__ or error}.") from error
    if not streaming and len(rows) == 0:
        raise ValueError(f"data={_names(paths)} has no rows.")
    return rows


def _suffix(path: Path) -> str:
    """The suffix of a file name, with the one before `.gz`."""
    return "".join(path.suffixes[-2:] if path.suffix.lower() == ".gz" else path.suffixes[-1:]).lower()


def _names(paths: list[Path]) -> str:
    return ", ".join(repr(str(path)) for path in paths)


def _check_json(paths: list[Path], thoroughly: bool) -> None:
    """
    Raise with the number of a line that is not a JSON object; the loader would name bytes of a chunk, and read `null`
    and arrays as rows. Parsing takes as long as loading: unless `thoroughly`, it is left to the loader where a line
    begins and ends as an object does.
    """
    for path in paths:
        if path.suffix.lower() != ".json":
            try:
                with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as lines:
                    for number, line in enumerate(lines, start=1):
                        _check_line(path, number, line, thoroughly)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"data={str(path)!r} is damaged ({error}); compress or download it again.") from error


def _check_line(path: Path, number: int, content: bytes, thoroughly: bool) -> None:
    try:
        line = content.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(path, number)) from error
    if not thoroughly and line[:1] == "{" and line.rstrip()[-1:] == "}":
        return
    try:
        if line.strip() and not isinstance(json.loads(line), dict):
            raise ValueError("not an object")
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
    return rows.to_iterable_dataset() if streaming else rows


def _of_hub(datasets, repo: str, split: str | None, streaming: bool, name: str | None, revision: str | None):
    where = f"The dataset {repo!r}"
    try:
        _ask_once(datasets, repo, revision)
        options = {"name": name, "revision": revision, "streaming": streaming}
        if split is not None:
            return datasets.load_dataset(repo, split=split, **options)
        return _choose_split(datasets.load_dataset(repo, **options), None, repo)
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
