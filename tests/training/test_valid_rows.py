"""Rows before training: read once, from a table or one by one, and rejected by name if they cannot be trained on."""

import datasets
import pytest
import torch

from dflash_hf.training.rows import digest_of_rows, lengths_of, validate_and_count


ROWS = [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"input_ids": [4, 2], "loss_mask": [0, 1]}]


def test_table_reads_as_a_list_of_rows():
    table = datasets.Dataset.from_list(ROWS)
    assert validate_and_count(table).tolist() == validate_and_count(ROWS).tolist() == [0, 0, 2, 1]
    assert lengths_of(table).tolist() == lengths_of(ROWS).tolist() == [3, 2]
    assert digest_of_rows(table) == digest_of_rows(ROWS)


@pytest.mark.parametrize("last", [1, None])
def test_transformed_dataset_counts_its_rows(last):
    """It counted what lies in the table, or raised `UnboundLocalError` if that could not be trained on."""
    rows = [{"input_ids": [1, 2], "loss_mask": [0, last]}] * 3

    def transform(batch):
        return {"input_ids": [[7, 8, 9]] * len(batch["input_ids"]), "loss_mask": [[0, 1, 1]] * len(batch["loss_mask"])}

    dataset = datasets.Dataset.from_list(rows).with_transform(transform)
    counts = torch.zeros(10, dtype=torch.long)
    counts[[8, 9]] = 3
    assert torch.equal(validate_and_count(dataset), counts)
    assert lengths_of(dataset).tolist() == [3, 3, 3]


@pytest.mark.parametrize("ids", [[[1], [2]], 3, ["a", "b"], "ab", [1, None], None])
def test_table_with_other_values_names_the_row(ids):
    """Columns of anything but flat lists of numbers raised an error of Arrow, without the row."""
    dataset = datasets.Dataset.from_list([{"input_ids": ids, "loss_mask": [0, 1]}])
    with pytest.raises(ValueError, match="Row 0 has .* in its input_ids"):
        validate_and_count(dataset)
