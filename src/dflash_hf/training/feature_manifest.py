"""The manifest of stored features: which target, layers, tokenizer and data they are of, and which files there are."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dflash_hf.data.template import digests_of_tokenizer
from dflash_hf.modeling.target_dflash import num_decoder_layers
from dflash_hf.targets.digests import digest_of_target


MANIFEST = "manifest.json"


@dataclass
class FeatureManifest:
    """
    The origin of stored features; sets of equal features have equal manifests.

    Args:
        target (`str`): Name or folder of the target.
        weights (`dict[str, str]`): Digests of the target's `ends` (embedding and head) and `layers`.
        layer_ids (`list[int]`): Layers whose outputs are stored, in this order.
        width (`int`): `L * H`.
        dtype (`str`): Dtype of the stored features.
        template (`str`): Digest of the chat template.
        chat_template_kwargs (`dict`): Its arguments.
        tokenizer (`str`): Digest of the vocabulary.
        max_length (`int`): Tokens at which examples were cut.
        states (`bool`): Whether the final hidden states are stored too.
        data (`str`): Digest of all ids and loss masks.
        shards (`list[int]`): Examples of each shard.
    """

    target: str
    weights: dict[str, str]
    layer_ids: list[int]
    width: int
    dtype: str
    template: str
    chat_template_kwargs: dict
    tokenizer: str
    max_length: int | None
    states: bool = False
    data: str = ""
    shards: list[int] = field(default_factory=list)

    @property
    def examples(self) -> int:
        """Examples of all shards."""
        return sum(self.shards)

    @property
    def token_bytes(self) -> int:
        """Bytes per token on disk."""
        width = self.width + (self.width // len(self.layer_ids) if self.states else 0)
        return width * getattr(torch, self.dtype).itemsize + 8 + 1

    def missing(self, folder: Path) -> list[int]:
        """The numbers of the shards that are not in a folder."""
        return [number for number in range(len(self.shards)) if not (folder / shard_name(number)).is_file()]

    @classmethod
    def load(cls, folder: Path) -> "FeatureManifest":
        """
        Raises:
            `ValueError`: the manifest is missing or damaged.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise ValueError(f"{folder} has no {MANIFEST}: it holds no stored features; run `dflash features` first.")
        try:
            manifest = cls(**json.loads(path.read_text(encoding="utf-8")))
            manifest.shards = [int(examples) for examples in manifest.shards]
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged, or of 0.1 ({error}); store the features again.") from error
        return manifest


def shard_name(number: int) -> str:
    """The file of a shard."""
    return f"features-{number:05d}.safetensors"


def manifest_of(target, name: str, layer_ids: list[int], encoder, dtype: str, states: bool = False) -> FeatureManifest:
    """
    The manifest of the features to store, without data and shards.

    Raises:
        `ValueError`: the target has no such layers, or one is named twice.
    """
    depth = num_decoder_layers(target.config)
    if not -1 <= min(layer_ids) <= max(layer_ids) < depth or len(set(layer_ids)) < len(layer_ids):
        raise ValueError(
            f"target layers {layer_ids} must be distinct and from 0 to {depth - 1}, or -1, the embedding; set "
            "target_layer_ids (--target-layer-ids), or load the drafter that was trained for this target."
        )
    return FeatureManifest(
        target=name,
        weights=digest_of_target(target),
        layer_ids=list(layer_ids),
        width=len(layer_ids) * target.config.get_text_config().hidden_size,
        dtype=dtype,
        **digests_of_tokenizer(encoder.template.tokenizer),
        chat_template_kwargs=encoder.template.chat_template_kwargs,
        max_length=encoder.max_length,
        states=states,
    )
