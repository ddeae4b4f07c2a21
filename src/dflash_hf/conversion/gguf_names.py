"""
Names in a drafter's GGUF file, for writing and reading it: keys and tensors are those of llama.cpp b11549
(`src/models/dflash.cpp`). llama.cpp's keys do not cover a whole configuration, and they have no digest of the weights,
so the file holds both under keys of this package as well.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from dflash_hf._io.errors import requires_extra
from dflash_hf.modeling.configuration_dflash import CONVOLUTION_KEYS
from dflash_hf.modeling.heads_dflash import PathSelector


ARCH = "dflash"
FILE_PATTERNS = ("dflash-*.gguf", "dspark-*.gguf")  # dspark-: drafters with a Markov head
CONFIG_KEY = "dflash_hf.config"  # the drafter's config.json
WEIGHTS_KEY = "dflash_hf.weights"  # a digest of the weights that the file was made of
TOKENS_KEY = "tokenizer.ggml.tokens"
TOKEN_TYPES_KEY = "tokenizer.ggml.token_type"
_TABLES = json.loads(Path(__file__).with_name("llama_cpp.json").read_text(encoding="utf-8"))
# The drafter's field by llama.cpp's key, which follows "dflash."; fields with their default value are not written.
FIELD_OF_KEY: dict[str, str] = {**_TABLES["keys"], **{key: key for key in (*CONVOLUTION_KEYS, *PathSelector.sizes)}}
# llama.cpp's names of the tensors that are unknown to `gguf`, by published name without `layers.N.`.
_TENSOR_NAMES: dict[str, str] = _TABLES["tensors"]
# Target architectures whose layers' inputs llama.cpp exposes, and those whose last layer's output it exposes as well.
EXPOSED_TARGETS: list[str] = _TABLES["targets"]
TARGETS_WITH_LAST_LAYER: list[str] = _TABLES["last_layer"]


def gguf_files_in(folder: Path) -> list[Path]:
    """The files in a drafter's folder that llama.cpp finds by their names."""
    files = [file for pattern in FILE_PATTERNS for file in folder.glob(pattern)]
    return sorted(files)


def gguf_in(folder: Path) -> Path | None:
    """The first of [`gguf_files_in`], or `None` if there is none."""
    return next(iter(gguf_files_in(folder)), None)


def llama_cpp_names(tensor_names: Iterable[str], num_layers: int) -> dict[str, str]:
    """
    llama.cpp's name of each of a drafter's tensors, by published name; `gguf` knows Qwen3's names.

    Raises:
        `ValueError`: llama.cpp has no such tensor.
    """
    gguf = import_gguf()
    qwen3_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, num_layers)
    names = {}
    for published in tensor_names:
        prefix = ""
        part = published
        if published.startswith("layers."):
            _, layer, part = published.split(".", 2)
            prefix = f"blk.{layer}."
        if part in _TENSOR_NAMES:
            name = prefix + _TENSOR_NAMES[part]
        else:
            name = qwen3_names.get_name(f"model.{published}", try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"{published} cannot be written to a drafter's GGUF file: llama.cpp has no such part.")
        names[published] = name
    return names


def import_gguf():
    """
    The package `gguf`, imported when a GGUF file is read or written.

    Raises:
        `ImportError`: it is not installed.
    """
    with requires_extra("GGUF files need `gguf`", "gguf"):
        import gguf
    return gguf
