"""Images of messages as the target's processor reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.utils import logging

from dflash_hf._io.errors import one_line
from dflash_hf.data.messages import UnusableRow
from dflash_hf.pairs.configs import is_multimodal


if TYPE_CHECKING:  # else the decoding engine would be imported
    from dflash_hf.pairs.loading import Loading


logger = logging.get_logger(__name__)


class ImagePrompt(list):
    """
    The ids of a prompt with images, and what else the target's forward takes.

    Args:
        ids (`Sequence[int]`): The ids, those of images among them.
        inputs (`dict[str, torch.Tensor]`): As [`ImageReader.inputs`] gives them, for one row.
    """

    def __init__(self, ids: Sequence[int], inputs: dict[str, torch.Tensor]):
        super().__init__(ids)
        self.inputs = inputs

    def __add__(self, more: Sequence[int]) -> "ImagePrompt":
        """The prompt with ids of text behind it."""
        inputs = dict(self.inputs)
        for name, tensor in self.inputs.items():
            if name.endswith("token_type_ids"):
                inputs[name] = torch.nn.functional.pad(tensor, (0, len(more)))
        return ImagePrompt([*self, *more], inputs)


@dataclass
class ImageReader:
    """
    Reads texts with images as the target does, by its processor.

    Args:
        processor (`ProcessorMixin`): The target's, with a chat template.
    """

    processor: object

    @property
    def token_ids(self) -> list[int]:
        """The tokens that stand for images; some processors have several."""
        others = getattr(self.processor, "image_token_ids", None) or []
        return [self.processor.image_token_id, *others]

    def ids(self, text: str, images: Sequence[str]) -> list[int]:
        """
        The ids of a rendered conversation, with as many tokens for each image as the target reads of it.

        Raises:
            `UnusableRow`: an image cannot be read, or the chat template has no place for it.
        """
        loaded = [load_image(image) for image in images]
        try:
            encoded = self.processor(text=[text], images=[loaded], add_special_tokens=False)
        except ValueError as error:
            raise UnusableRow(f"the processor refuses its images ({one_line(error, 100)})") from error
        return list(encoded["input_ids"][0])

    def inputs(self, input_ids: torch.LongTensor, images: Sequence[Sequence[str]]) -> dict[str, torch.Tensor]:
        """
        What a forward of the target takes besides ids `[N, S]` of [`ids`] with these images: pixels, their layout, and
        which tokens are of images. Positions of several axes follow from these, as in `generate`.
        """
        texts = []
        loaded = []
        for images_of_row in images:
            loaded_of_row = [load_image(image) for image in images_of_row]
            parts = [{"type": "image", "image": image} for image in loaded_of_row]
            user = {"role": "user", "content": [*parts, {"type": "text", "text": "."}]}
            texts.append(self.processor.apply_chat_template([user]))
            loaded.append(loaded_of_row)
        inputs = dict(self.processor(text=texts, images=loaded, padding=True, return_tensors="pt"))
        ids = inputs.pop("input_ids")
        inputs.pop("attention_mask")
        for name in [name for name in inputs if name.endswith("token_type_ids")]:
            image_ids = ids[inputs[name] == 1].unique().to(input_ids)
            inputs[name] = torch.isin(input_ids, image_ids).long()  # [N, S]
        return inputs

    def prompt(self, ids: Sequence[int], images: Sequence[str]) -> ImagePrompt:
        """Ids of a prompt, with all that `generate` needs of its images."""
        return ImagePrompt(ids, self.inputs(torch.tensor([list(ids)]), [images]))


def load_image(image: str):
    """
    The image of a path or a `data:` URI, by transformers' own loader.

    Raises:
        `UnusableRow`: it is damaged.
    """
    from transformers import image_utils

    try:
        return image_utils.load_image(image)
    except ImportError:
        raise
    except Exception as error:  # of PIL, which has many
        raise UnusableRow(f"an image cannot be read ({type(error).__name__})") from error


def load_image_reader(name: str, config: dict, tokenizer, loading: "Loading"):
    """
    The [`ImageReader`] of a target, with the chat template of its tokenizer; `None` if it reads no images, or if its
    processor cannot be loaded (a library may be missing), which is logged.

    Args:
        config (`dict`): Its configuration.
    """
    from transformers import AutoProcessor

    if not is_multimodal(config):
        return None
    try:
        options = {"revision": loading.revision or "main", "trust_remote_code": loading.trust_remote_code}
        processor = AutoProcessor.from_pretrained(name, **options)
    except (OSError, ValueError, ImportError) as error:
        warning = f"{name}: rows with images are left out, since its processor cannot be loaded"
        logger.warning_once(f"{warning} ({one_line(error, 160)})")
        return None
    if not hasattr(processor, "image_processor"):  # of a folder with a tokenizer alone
        return None
    tokenizer.chat_template = tokenizer.chat_template or processor.chat_template
    processor.chat_template = tokenizer.chat_template
    return ImageReader(processor)
