"""The files of a checkpoint, and their headers."""

import json
import os

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from dflash_hf.modeling.modeling_dflash import MASK_EMBEDDING


def checkpoint_files(name_or_path: str, variant: str | None = None, **hub_arguments) -> list[str]:
    """
    Paths of the safetensors files of a folder or repository, which are downloaded if necessary.

    Args:
        name_or_path (`str`): Folder or repository.
        variant (`str`, *optional*): As in `from_pretrained`.
        hub_arguments: `subfolder`, `revision`, `token`, `cache_dir` and the like, as in `cached_file`.

    Raises:
        `OSError`: there are none, or a shard is missing.
        `ValueError`: the index is damaged, or names a file outside the folder.
    """

    def find(name: str) -> str | None:
        return cached_file(name_or_path, name, _raise_exceptions_for_missing_entries=False, **hub_arguments)

    def with_variant(name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        return name if variant is None else f"{stem}.{variant}.{suffix}"

    single = find(with_variant(SAFE_WEIGHTS_NAME))
    if single is not None:
        return [single]
    index = find(with_variant(SAFE_WEIGHTS_INDEX_NAME))
    if index is None:
        raise OSError(
            f"{name_or_path} holds neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}. Only safetensors are "
            "read; write other tensors with `safetensors.torch.save_file`."
        )
    try:
        with open(index, encoding="utf-8") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is not an index of safetensors files ({error!r}); download it again.") from error
    if not names:
        raise ValueError(f"{index} names no file; download it again.")
    files = []
    for name in names:
        if not isinstance(name, str) or name != os.path.basename(name) or not name.endswith(".safetensors"):
            raise ValueError(f"{index} names {name!r}, which is not a safetensors file next to it.")
        path = find(name)
        if path is None:
            raise OSError(f"{index} names {name}, which is missing; download it again.")
        files.append(path)
    return files


def read_mask_embedding(name_or_path: str, config, **hub_arguments) -> torch.Tensor | None:
    """
    The drafter's own mask embedding `[H]`, from the separate file beside the weights; `None` without such a file.

    Raises:
        `ValueError`: it is damaged, of the wrong width, or for another token.
    """
    path = cached_file(name_or_path, MASK_EMBEDDING, _raise_exceptions_for_missing_entries=False, **hub_arguments)
    if path is None:
        return None
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        embedding = stored["embedding"].reshape(-1)
        token = int(stored.get("mask_token_id", config.mask_token_id))
    except Exception as error:  # torch's loader fails in many ways on other files
        raise ValueError(f"{path} must hold {{'embedding', 'mask_token_id'}}: {error!r}") from error
    if embedding.shape != (config.hidden_size,) or not embedding.is_floating_point() or token != config.mask_token_id:
        raise ValueError(
            f"{path} holds an embedding of shape {list(embedding.shape)} for token {token}, but config.json says "
            f"hidden_size={config.hidden_size} and mask_token_id={config.mask_token_id}."
        )
    return embedding


def read_header(path: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """
    Names, dtypes and shapes of the tensors of a safetensors file.

    Raises:
        `ValueError`: the file is truncated or damaged; names it.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {}
            for name in file.keys():
                tensor = file.get_slice(name)
                tensors[name] = (tensor.get_dtype(), tuple(tensor.get_shape()))
            return tensors
    except (SafetensorError, OverflowError) as error:  # holes, overlaps, wrong lengths and forged headers
        raise ValueError(f"{path} is damaged: {error}; download or write it again.") from error
