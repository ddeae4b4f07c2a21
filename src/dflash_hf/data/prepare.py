"""Training examples from a dataset, with a count of the rows that were left out."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter, not_
from typing import NamedTuple

import numpy as np
from transformers.utils import logging

from dflash_hf.data.encode import Example, RowEncoder
from dflash_hf.data.hold_out import conversation_key
from dflash_hf.data.messages import UnusableRow
from dflash_hf.data.row_layouts import columns_of_ids, conversation_of
from dflash_hf.data.sources import drop_null_keys


logger = logging.get_logger(__name__)
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line break
CONVERSATION = "conversation"  # the column of an example's conversation


@dataclass
class DataReport:
    """
    Counts of the rows of a dataset and of the examples made from them.

    Args:
        rows (`int`): Rows read.
        examples (`int`): Examples made from them; a conversation may give one per turn.
        tokens, supervised (`int`): Tokens of the examples, and supervised ones.
        longest (`int`): Tokens of the longest example.
        dropped (`dict[str, int]`): Rows left out, by reason.
    """

    rows: int = 0
    examples: int = 0
    tokens: int = 0
    supervised: int = 0
    longest: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: int, tables: Iterable) -> "DataReport":
        """The report of rows, from the tables of [`_encode_batch`]."""
        import pyarrow.compute as pc

        report = cls(rows)
        for table in tables:
            lengths = pc.list_value_length(table["input_ids"])
            report.examples += table["left_out"].null_count
            report.tokens += pc.sum(lengths).as_py()
            report.supervised += pc.sum(pc.list_flatten(table["loss_mask"])).as_py() or 0
            report.longest = max(report.longest, pc.max(lengths).as_py())
            for reason, number in Counter(table["left_out"].drop_null().to_pylist()).items():
                report.dropped[reason] = report.dropped.get(reason, 0) + number
        return report

    def check(self) -> None:
        """
        Raises:
            `ValueError`: there is nothing to train on.
        """
        if self.rows == 0:
            raise ValueError("The dataset has no rows.")
        if self.examples == 0:
            reasons = "; ".join(f"{count} because {reason}" for reason, count in self.dropped.items())
            raise ValueError(f"None of {self.rows} rows can be trained on: {reasons}.")

    def lines(self) -> list[str]:
        """The report for a terminal."""
        share = self.supervised / max(self.tokens, 1)
        mean = self.tokens / max(self.examples, 1)
        lines = [
            f"rows              {self.rows:,}",
            f"examples          {self.examples:,}, {mean:,.0f} tokens on average, {self.longest:,} at most",
            f"tokens            {self.tokens:,}",
            f"supervised        {self.supervised:,} tokens, {share:.1%}",
            f"rows left out     {sum(self.dropped.values()):,}",
        ]
        for reason, count in sorted(self.dropped.items(), key=itemgetter(1), reverse=True):
            lines.append(f"  {count:,}: {reason}")
        return lines


def prepare_dataset(
    rows,
    encoder: RowEncoder,
    num_proc: int | None = None,
    source: str = "the data",
    conversations: bool = False,
):
    """
    Encode a dataset.

    Args:
        rows (`datasets.Dataset`): See [`~dflash_hf.data.sources.load_rows`].
        encoder (`RowEncoder`): Makes examples from rows.
        num_proc (`int`): Number of processes.
        source (`str`): Name of the dataset, for messages.
        conversations (`bool`): Keep the column `conversation`, see
            [`~dflash_hf.data.hold_out.conversation_key`]: one number for all examples of a row.

    Returns:
        The dataset with `input_ids` and `loss_mask`, and a [`DataReport`].

    Raises:
        `ValueError`: a row is invalid (the message names it), or no row can be trained on.
    """
    from datasets import Features, Value
    from datasets import Sequence as ListOf

    features = {"input_ids": ListOf(Value("int32")), "loss_mask": ListOf(Value("int8"))}
    if encoder.template.reader is not None:
        features["images"] = ListOf(Value("string"))
    rows = _with_arrays(drop_null_keys(rows))
    encoded = rows.map(
        partial(_encode_batch, encoder, source),
        with_indices=True,
        batched=True,
        features=Features({**features, CONVERSATION: Value("int64"), "left_out": Value("string")}),
        remove_columns=rows.column_names,
        num_proc=num_proc,
        desc="encoding",
    )
    encoded = encoded.with_format(None)  # not that of the rows
    report = DataReport.of(len(rows), encoded.with_format("arrow").iter(10_000))
    report.check()
    if report.dropped:
        encoded = encoded.filter(not_, input_columns="left_out")
    unwanted = ["left_out"] if conversations else ["left_out", CONVERSATION]
    return encoded.remove_columns(unwanted), report


def _with_arrays(rows):
    """Rows of nothing but ids as arrays: lists would have an object for every token. Other rows are unchanged."""
    import pyarrow as pa

    names = columns_of_ids(rows.column_names)
    if not names or rows.format["type"] is not None:
        return rows
    columns = [rows.data.column(name) for name in names]
    types = [getattr(column.type, "value_type", column.type) for column in columns]
    if any(column.null_count for column in columns) or not all(map(pa.types.is_integer, types)):
        return rows
    return rows.select_columns(names).with_format("numpy")


class _EncodedExample(NamedTuple):
    """A row of the table that [`_encode_batch`] returns."""

    example: Example
    key: int  # of its conversation
    left_out: str | None  # the reason, if the row was left out; the example is empty then


def _encode_batch(encoder: RowEncoder, source: str, batch: dict, indices: Sequence[int]):
    """An Arrow table of examples. A row that is left out has an empty one, with the reason in `left_out`."""
    encoded = []
    for position, index in enumerate(indices):
        row = {name: values[position] for name, values in batch.items()}
        try:
            examples = encoder.encode(conversation_of(row))
        except UnusableRow as unusable:
            encoded.append(_EncodedExample(Example(np.zeros(0), np.zeros(0)), 0, str(unusable)))
            continue
        except ValueError as error:
            raise ValueError(f"Row {index} of {source}: {error}") from error
        key = _key_of(examples[0])
        encoded += [_EncodedExample(example, key, None) for example in examples]
    return _table_of(encoded, with_images=encoder.template.reader is not None)


def _table_of(encoded: Sequence[_EncodedExample], with_images: bool):
    """The Arrow table of encoded examples."""
    import pyarrow as pa

    examples = [row.example for row in encoded]
    ends = pa.array(np.cumsum([0, *(len(example.ids) for example in examples)], dtype=np.int32))
    flat_ids = pa.array(np.concatenate([example.ids for example in examples]).astype(np.int32))
    flat_masks = pa.array(np.concatenate([example.mask for example in examples]).astype(np.int8))
    columns = {
        "input_ids": pa.ListArray.from_arrays(ends, flat_ids),
        "loss_mask": pa.ListArray.from_arrays(ends, flat_masks),
    }
    if with_images:
        columns["images"] = pa.array([list(example.images) for example in examples], pa.list_(pa.string()))
    columns[CONVERSATION] = pa.array([row.key for row in encoded], pa.int64())
    columns["left_out"] = pa.array([row.left_out for row in encoded], pa.string())
    return pa.table(columns)


def _key_of(example: Example) -> int:
    """The key of the conversation that an example belongs to: the first of its row."""
    return conversation_key(np.asarray(example.ids), np.asarray(example.mask), example.images)


def colored_example(example: dict, tokenizer, color: bool, longest_run: int = 120) -> str:
    """The text of an example, with supervised tokens in green or in brackets; long runs are shortened."""
    text = ""
    for supervised, pairs in groupby(zip(example["input_ids"], example["loss_mask"]), key=itemgetter(1)):
        run = [token for token, _ in pairs]
        if len(run) > longest_run:
            half = longest_run // 2
            left_out = f" ... {len(run) - 2 * half} tokens ... "
            piece = tokenizer.decode(run[:half]) + left_out + tokenizer.decode(run[-half:])
        else:
            piece = tokenizer.decode(run)
        piece = _CONTROL_CHARACTERS.sub(lambda match: ascii(match[0])[1:-1], piece)
        if supervised:
            piece = f"\x1b[32m{piece}\x1b[0m" if color else f"[{piece}]"
        text += piece
    return text
