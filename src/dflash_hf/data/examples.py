"""Token examples and their batches: ids and a loss mask that is 1 on the target's own response."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from dflash_hf._io.errors import one_line
from dflash_hf.data.images import ImageReader


def make_example(prompt_ids: Sequence[int], response_ids: Sequence[int], max_length: int | None = None) -> dict:
    """
    Make a training example: the prompt is context only, the response is supervised.

    Args:
        prompt_ids, response_ids (`Sequence[int]`): Ids under the target's tokenizer and chat template.
        max_length (`int`): Maximum number of tokens; the end is cut off.

    Raises:
        `ValueError`: no token of the response is left.
    """
    input_ids = [*prompt_ids, *response_ids][:max_length]
    loss_mask = ([0] * len(prompt_ids) + [1] * len(response_ids))[:max_length]
    if 1 not in loss_mask:
        raise ValueError(
            f"No token to learn from: {len(prompt_ids)} prompt ids and {len(response_ids)} response ids with "
            f"max_length={max_length}; raise max_length or leave the example out."
        )
    return {"input_ids": input_ids, "loss_mask": loss_mask}


def check_example(example: dict, name: str) -> None:
    """
    Raises:
        `ValueError`: a row lacks a column, its two lists differ in length, or its loss mask is not of zeros and ones,
            or of zeros only. The message calls it `name`.
    """
    missing = {"input_ids", "loss_mask"} - set(example)
    if missing:
        raise ValueError(
            f"{name} has no column {sorted(missing)}, only {sorted(example)}; `make_example(prompt_ids, "
            "response_ids)` makes both."
        )
    num_ids = len(numbers_of(example, "input_ids", name))
    mask = numbers_of(example, "loss_mask", name)
    if num_ids != len(mask):
        raise ValueError(f"{name} has {num_ids} input_ids but {len(mask)} loss_mask entries; give one for each token.")
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"{name} has a loss_mask of {mask.unique().tolist()[:3]}; it must hold zeros and ones only.")
    if not mask.any():
        raise ValueError(
            f"{name} has a loss_mask of zeros only ({len(mask)} tokens): the response is missing or was cut off; "
            "leave the row out, or allow more tokens."
        )


def numbers_of(example: dict, column: str, name: str) -> torch.Tensor:
    """
    The numbers in a column of a row, `[T]`.

    Raises:
        `ValueError`: it holds something else, such as null. The message calls the row `name`.
    """
    value = example[column]
    try:
        numbers = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        numbers = None
    if numbers is None or numbers.ndim != 1:
        shown = one_line(repr(value), 60)
        nulls = []
        if isinstance(value, Sequence):
            nulls = [index for index, number in enumerate(value) if number is None]
        if nulls:
            shown = f"null at token {nulls[0]}"
        raise ValueError(
            f"{name} has {shown} in its {column}; give a flat list with a number for each token, or leave the row out."
        )
    return numbers


def has_rows(dataset) -> bool:
    """Whether rows of a dataset can be read by number: not those of a stream, which may have a length."""
    return hasattr(dataset, "__len__") and not isinstance(dataset, torch.utils.data.IterableDataset)


@dataclass
class DFlashCollator:
    """
    Pads examples on the right.

    Args:
        pad_token_id (`int`): Any id of the target's embedding; padding is never attended to.
        reader (`ImageReader`, *optional*): Of a target that reads images.

    Returns:
        `input_ids`, `attention_mask` and `loss_mask`, each `[N, S]`. For rows of stored features also `stored`, which
        reads them when they are needed; for rows with images also `images`, see [`read_images`].
    """

    pad_token_id: int = 0
    reader: ImageReader | None = None

    def __call__(self, examples: list[dict]) -> dict:
        for example in examples:  # those of streams, and of `evaluate(dataset)`, were never checked
            check_example(example, "A row of a batch")
        batch = {
            "input_ids": padded([example["input_ids"] for example in examples], self.pad_token_id),
            "attention_mask": padded([torch.ones(len(example["input_ids"])) for example in examples]),
            "loss_mask": padded([example["loss_mask"] for example in examples]),
        }
        if "stored" in examples[0]:
            batch["stored"] = [example["stored"] for example in examples]
        images = [example.get("images") or [] for example in examples]
        if any(images) and "stored" not in batch:
            if self.reader is None:
                raise ValueError("A batch has images; give `DFlashCollator` the target's `ImageReader`.")
            batch["images"] = images
        return batch

    def read_images(self, batch: dict) -> dict[str, torch.Tensor] | None:
        """
        What the target's forward takes besides ids, if a batch has images. Not read before it runs, since all batches
        of a step exist at once; and the reader is no part of a batch, which workers would pickle with all of it.
        """
        return self.reader.inputs(batch["input_ids"], batch["images"]) if "images" in batch else None


def padded(rows: Sequence, value: int = 0) -> torch.LongTensor:
    """Rows of integers as one tensor `[N, S]`, padded on the right."""
    return pad_sequence([torch.as_tensor(row).long() for row in rows], batch_first=True, padding_value=value)
