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
    """Whether the rows of a dataset are those of an Arrow table: it has the two columns, and no transform."""
    columns = getattr(dataset, "column_names", None)
    if not hasattr(dataset, "with_format") or columns is None:
        return False
    is_transformed = dataset.format["type"] == "custom"  # by `set_transform`: rows are not what is in the table
    return {"input_ids", "loss_mask"} <= set(columns) and not is_transformed


def _read_batches(dataset) -> Iterator[_Batch]:
    """All rows of a dataset, checked, in batches."""
    if len(dataset) == 0:
        raise ValueError("A dataset has no rows; give at least one to train or evaluate on.")
    if not _is_table(dataset):
        for first in range(0, len(dataset), _BATCH):
            yield _batch_of_rows(dataset, range(first, min(first + _BATCH, len(dataset))))
        return
    for number, table in enumerate(dataset.with_format("arrow").iter(_BATCH)):
        batch = _batch_of_table(table)
        if batch is None:  # row by row, to name the row that cannot be trained on
            first = number * _BATCH
            batch = _batch_of_rows(dataset, range(first, first + table.num_rows))
        yield batch


def _batch_of_rows(dataset, indices: range) -> _Batch:
    """
    Some rows of a dataset, read one by one.

    Raises:
        `ValueError`: [`~dflash_hf.data.examples.check_example`] rejects one.
    """
    rows = [dataset[index] for index in indices]
    for index, row in zip(indices, rows, strict=True):
        check_example(row, f"Row {index}")
    ids = torch.cat([torch.as_tensor(row["input_ids"]) for row in rows])
    mask = torch.cat([torch.as_tensor(row["loss_mask"]) for row in rows])
    return _Batch(ids, mask, torch.tensor([len(row["input_ids"]) for row in rows]))


def _batch_of_table(table) -> _Batch | None:
    """The rows of an Arrow table; `None` if any of them cannot be trained on."""
    ids_and_lengths = _read_column(table, "input_ids")
    mask_and_lengths = _read_column(table, "loss_mask")
    if ids_and_lengths is None or mask_and_lengths is None:
        return None
    ids, lengths = ids_and_lengths
    mask, mask_lengths = mask_and_lengths
    if not torch.equal(lengths, mask_lengths) or not _is_fit_mask(mask, lengths):
        return None
    return _Batch(ids, mask, lengths)


def _is_fit_mask(mask: torch.Tensor, lengths: torch.Tensor) -> bool:
    """Whether the mask of each row is of zeros and ones, and not of zeros only."""
    supervised = torch.nn.functional.pad(mask.cumsum(0, dtype=torch.long), (1, 0))  # [T + 1], before each token
    ends = lengths.cumsum(0)
    return bool(((mask == 0) | (mask == 1)).all() and (supervised[ends] > supervised[ends - lengths]).all())


def _read_column(table, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """
    The numbers in a column of lists, one list after the other, and the length of each; `None` if the column holds
    anything else, or a null.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    column = table.column(name).combine_chunks()
    types = pa.types
    if not (types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)):
        return None
    values = column.flatten()
    if column.null_count or values.null_count:
        return None
    if types.is_boolean(values.type):  # bits, which torch does not read
        values = values.cast(pa.int8())
    if not types.is_integer(values.type) and not types.is_floating(values.type):
        return None
    return torch.from_dlpack(values), torch.from_dlpack(pc.list_value_length(column)).long()
