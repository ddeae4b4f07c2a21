"""Images of messages as the target's processor reads them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.utils import logging

from dflash_hf.data.messages import UnusableRow
from dflash_hf.pairs import Loading, is_multimodal
from dflash_hf.responses import ImagePrompt
from dflash_hf.terminal import one_line


logger = logging.get_logger(__name__)


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
        """The tokens that stand for images."""
        several = getattr(self.processor, "image_token_ids", None) or []
        return [self.processor.image_token_id, *several]

    def ids(self, text: str, images: Sequence[str]) -> list[int]:
        """
        The ids of a rendered conversation, with as many tokens for each image as the target reads of it.

        Raises:
            `UnusableRow`: an image cannot be read, or the chat template has no place for it.
        """
        loaded = [load(one) for one in images]
        try:
            return list(self.processor(text=[text], images=[loaded], add_special_tokens=False)["input_ids"][0])
        except ValueError as error:
            raise UnusableRow(f"the processor refuses its images ({one_line(error, 100)})") from error

    def inputs(self, input_ids: torch.LongTensor, images: Sequence[Sequence[str]]) -> dict[str, torch.Tensor]:
        """
        What a forward of the target takes besides ids `[N, S]` of [`ids`] with these images: pixels, their layout, and
        which tokens are of images. Positions of several axes follow from these, as in `generate`.
        """
        parts = [[{"type": "image", "image": load(one)} for one in row] for row in images]
        chats = [[{"role": "user", "content": [*row, {"type": "text", "text": "."}]}] for row in parts]
        texts = [self.processor.apply_chat_template(chat) for chat in chats]
        loaded = [[part["image"] for part in row] for row in parts]
        found = dict(self.processor(text=texts, images=loaded, padding=True, return_tensors="pt"))
        ids, _ = found.pop("input_ids"), found.pop("attention_mask")
        for name in [name for name in found if name.endswith("token_type_ids")]:
            found[name] = torch.isin(input_ids, ids[found[name] == 1].unique().to(input_ids)).long()
        return found

    def prompt(self, ids: Sequence[int], images: Sequence[str]) -> ImagePrompt:
        """Ids of a prompt, with all that `generate` needs of its images."""
        return ImagePrompt(ids, self.inputs(torch.tensor([list(ids)]), [images]))


def load(image: str):
    """
    The image of a path or a `data:` URI, by transformers' own loader.

    Raises:
        `UnusableRow`: it is damaged.
    """
    from transformers.image_utils import load_image

    try:
        return load_image(image)
    except ImportError:
        raise
    except Exception as error:  # of PIL, which has many
        raise UnusableRow(f"an image cannot be read ({type(error).__name__})") from error


def load_image_reader(name: str, config: dict, tokenizer, loading: Loading):
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
