"""One pass over the rows of a dataset before training: are they fit to train on, and which tokens do they hold?"""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from dflash_hf.data.examples import check_example


_BATCH = 10_000  # rows


class _Batch(NamedTuple):
    """`T` tokens of some rows, one row after the other."""

    ids: torch.Tensor  # [T]
    mask: torch.Tensor  # [T]
    lengths: torch.Tensor  # [rows]


def validate_and_count(dataset) -> torch.LongTensor:
    """
    Read a dataset once, and reject rows that cannot be trained on: training on nothing would fail silently.

    Args:
        dataset (`Sequence[dict]` or `datasets.Dataset`): Rows with `input_ids` and `loss_mask`; an Arrow table is read
            as it lies in memory.

    Returns:
        `torch.LongTensor` `[V]`: How often each token is supervised, up to the largest id.

    Raises:
        `ValueError`: there are no rows, or [`~dflash_hf.data.examples.check_example`] rejects one.
    """
    counts = torch.zeros(0, dtype=torch.long)
    for batch in _read_batches(dataset):
        batch_counts = batch.ids[batch.mask.bool()].bincount(minlength=len(counts))
        counts = batch_counts + torch.nn.functional.pad(counts, (0, len(batch_counts) - len(counts)))
    return counts


def digest_of_rows(dataset) -> str:
    """A digest of all ids and loss masks of a dataset, whose rows are checked as in [`validate_and_count`]."""
    digest = hashlib.sha256()
    for ids, mask, lengths in _read_batches(dataset):
        for tensor in (ids.int(), mask.byte(), lengths.int()):
            digest.update(tensor.numpy().data)
    return digest.hexdigest()[:16]


def lengths_of(dataset) -> torch.Tensor:
    """The tokens of each row, `[rows]`; of an Arrow table without reading the rows."""
    if not _is_table(dataset):
        return torch.tensor([len(row["input_ids"]) for row in dataset])
    import pyarrow.compute as pc

    tables = dataset.select_columns("input_ids").with_format("arrow").iter(_BATCH)
    lengths = [pc.list_value_length(table.column("input_ids").combine_chunks()) for table in tables]
    return torch.cat([torch.from_dlpack(array.fill_null(0)).long() for array in lengths])


def _is_table(dataset) -> bool:
    """Whether a dataset is an Arrow table with the two columns."""
    columns = getattr(dataset, "column_names", None)
    return hasattr(dataset, "with_format") and columns is not None and {"input_ids", "loss_mask"} <= set(columns)


def _read_batches(dataset) -> Iterator[_Batch]:
    """All rows of a dataset, checked, in batches."""
    if len(dataset) == 0:
        raise ValueError("A dataset has no rows; give at least one to train or evaluate on.")
    return _read_table(dataset) if _is_table(dataset) else _read_list(dataset)


def _read_table(dataset) -> Iterator[_Batch]:
    """The rows of an Arrow table, all of them checked."""
    for number, table in enumerate(dataset.with_format("arrow").iter(_BATCH)):
        first = number * _BATCH
        columns = [_read_column(table, name) for name in ("input_ids", "loss_mask")]
        is_fit = False
        if all(column is not None for column in columns):
            (ids, lengths), (mask, mask_lengths) = columns
            is_fit = torch.equal(lengths, mask_lengths) and _is_fit_mask(mask, lengths)
        if not is_fit:  # row by row, to name the row that cannot be trained on
            for index in range(first, first + table.num_rows):
                check_example(dataset[index], f"Row {index}")
        yield _Batch(ids, mask, lengths)


def _is_fit_mask(mask: torch.Tensor, lengths: torch.Tensor) -> bool:
    """Whether the mask of each row is of zeros and ones, and not of zeros only."""
    supervised = torch.nn.functional.pad(mask.cumsum(0, dtype=torch.long), (1, 0))  # [T + 1], before each token
    ends = lengths.cumsum(0)
    return bool(((mask == 0) | (mask == 1)).all() and (supervised[ends] > supervised[ends - lengths]).all())


def _read_column(table, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The values of a column of lists, one list after the other, and the length of each; `None` if any is null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = table.column(name).combine_chunks()
    values = column.flatten()
    if column.null_count or values.null_count:
        return None
    if pa.types.is_boolean(values.type):  # bits, which torch does not read
        values = values.cast(pa.int8())
    return torch.from_dlpack(values), torch.from_dlpack(pc.list_value_length(column)).long()


def _read_list(dataset) -> Iterator[_Batch]:
    """The rows of any other dataset, all of them checked."""
    for start in range(0, len(dataset), _BATCH):
        rows = [dataset[index] for index in range(start, min(start + _BATCH, len(dataset)))]
        for index, row in enumerate(rows, start):
            check_example(row, f"Row {index}")
        ids = torch.cat([torch.as_tensor(row["input_ids"]) for row in rows])
        mask = torch.cat([torch.as_tensor(row["loss_mask"]) for row in rows])
        yield _Batch(ids, mask, torch.tensor([len(row["input_ids"]) for row in rows]))
