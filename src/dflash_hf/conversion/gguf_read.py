"""GGUF files: a drafter's configuration and weights, and the configuration of a target."""

import json
from functools import lru_cache
from pathlib import Path

import torch

from dflash_hf._io.names import dtype_name
from dflash_hf._io.repositories import is_gguf
from dflash_hf.conversion.gguf_names import (
    ARCH,
    CONFIG_KEY,
    FIELD_OF_KEY,
    TOKENS_KEY,
    WEIGHTS_KEY,
    import_gguf,
    llama_cpp_names,
)
from dflash_hf.conversion.safetensors_folder import save_folder
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.layouts.configuration import DFlashDraftConfig
from dflash_hf.modeling.heads_dflash import PathSelector, TokenHead
from dflash_hf.pairs.configs import read_config
from dflash_hf.targets.config_fields import text_part


# llama.cpp's keys, without "dflash.", of which a configuration is derived; and those that every drafter needs.
_CONFIG_KEYS = {
    *FIELD_OF_KEY,
    TOKENS_KEY,
    "tokenizer.ggml.mask_token_id",
    "target_layers",
    "sample_from_anchor",
    "attention.causal",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
}
_REQUIRED_KEYS = [key for key, field in FIELD_OF_KEY.items() if field in ("num_hidden_layers", "head_dim")]


def unpack_gguf(file: Path, folder: Path) -> Path:
    """
    Unpack a GGUF drafter into a folder of safetensors, which `DFlashDraftModel.from_pretrained` reads.

    Raises:
        `ValueError`: the file is damaged, or not a drafter.
    """
    gguf = import_gguf()
    reader = open_gguf(file)
    config = gguf_config(file)
    parsed = DFlashDraftConfig.from_dict(dict(config))
    with torch.device("meta"):
        expected = DFlashDraftModel(parsed).state_dict()
    stored = {tensor.name: tensor for tensor in reader.tensors}
    stored_type = stored["fc.weight"].tensor_type.name if "fc.weight" in stored else "F32"
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(stored_type, torch.float32)  # quantised: fp32
    tensors = {}
    names = llama_cpp_names([name for name in expected if name != "mask_embedding"], parsed.num_hidden_layers)
    for published, name in names.items():
        if name not in stored:
            continue
        tensor = stored[name]
        shape = expected[published].shape
        if name == "d2t":  # from ids to differences
            ids = torch.tensor(tensor.data).reshape(shape).to(torch.int64)
            tensors["d2t"] = ids - torch.arange(len(ids))
        else:
            numbers = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
            tensors[published] = numbers.reshape(shape).to(dtype)
    if parsed.own_mask_embedding:
        table = stored.get("token_embd.weight")
        if table is None:
            raise ValueError(f"{file} is damaged: it has no token_embd.weight, which holds its mask embedding.")
        row = gguf.dequantize(table.data, table.tensor_type)[parsed.mask_token_id]
        tensors["mask_embedding"] = torch.tensor(row).to(dtype)
    return save_folder(folder, {**config, "dtype": dtype_name(dtype)}, tensors)


def gguf_config(file: str | Path) -> dict:
    """
    The `config.json` of a GGUF drafter: the original if it is stored, else derived from llama.cpp's keys.

    Raises:
        `ValueError`: the file is damaged, or not a drafter.
    """
    reader = open_gguf(file)
    fields = {name.removeprefix(f"{ARCH}."): field for name, field in reader.fields.items()}
    architecture = fields["general.architecture"].contents()
    if architecture != ARCH:
        raise ValueError(f"{file} is not a DFlash drafter but a model of llama.cpp's architecture {architecture!r}.")
    if CONFIG_KEY in fields:
        return json.loads(fields[CONFIG_KEY].contents())

    values = {name: field.contents() for name, field in fields.items() if name in _CONFIG_KEYS}
    shapes = {tensor.name: tensor.shape for tensor in reader.tensors}
    for key in _REQUIRED_KEYS:
        if key not in values:
            raise ValueError(f"{file} is incomplete: it has no {ARCH}.{key}.")
    sizes = {field: values[key] for key, field in FIELD_OF_KEY.items() if key in values}
    head_class = PathSelector if PathSelector.is_configured(sizes) else TokenHead
    return {
        "architectures": [head_class.architecture],
        "model_type": "qwen3",
        **sizes,
        **_markov_fields(values, shapes),
        **_layer_fields(values, sizes["num_hidden_layers"]),
        "target_layer_ids": [i - 1 for i in values.get("target_layers", [])],  # features are the inputs of these
        "mask_token_id": values.get("tokenizer.ggml.mask_token_id"),
        "vocab_size": len(values.get(TOKENS_KEY, [])) or None,
        "rope_parameters": _rope_of(file, values, shapes, sizes["head_dim"]),
        "draft_vocab_size": int(shapes["d2t"][0]) if "d2t" in shapes else None,
        "has_embed_tokens": "token_embd.weight" in shapes,
    }


def _markov_fields(values: dict, shapes: dict) -> dict:
    """The fields of a Markov head; empty if the file has none."""
    if "markov_w1.weight" not in shapes:
        return {}
    return {
        "markov_rank": int(shapes["markov_w1.weight"][0]),
        "markov_head_type": "vanilla",
        "sample_from_anchor": values.get("sample_from_anchor", True),
        "confidence_head_with_markov": True,
        "enable_confidence_head": "conf_proj.weight" in shapes,
    }


def _layer_fields(values: dict, num_layers: int) -> dict:
    """The fields of the layers' attention."""
    are_sliding = values.get("attention.sliding_window_pattern", [False] * num_layers)
    return {
        "layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in are_sliding],
        "sliding_window": values.get("attention.sliding_window"),
        "use_sliding_window": any(are_sliding),
        "is_causal": values.get("attention.causal", False),
    }


def _rope_of(file: str | Path, values: dict, shapes: dict, head_dim: int) -> dict:
    """
    `rope_parameters` of a file.

    Raises:
        `ValueError`: they have a scaling that no key describes.
    """
    rope = {"rope_type": "default", "rope_theta": values.get("rope.freq_base", 10_000.0)}
    if values.get("rope.scaling.type", "none") not in ("none", "linear") or "rope_freqs.weight" in shapes:
        raise ValueError(f"{file} scales its rotary embedding in an unsupported way; convert the original drafter.")
    if "rope.scaling.factor" in values:
        rope |= {"rope_type": "linear", "factor": values["rope.scaling.factor"]}
    rotated = values.get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    return rope


def weights_digest_of(file: str | Path) -> str | None:
    """The digest of the weights that a GGUF drafter was made of; `None` if the file does not contain it."""
    fields = open_gguf(file).fields
    return fields[WEIGHTS_KEY].contents() if WEIGHTS_KEY in fields else None


def open_gguf(file: str | Path):
    """
    The reader of a GGUF file.

    Raises:
        `ValueError`: it is not a complete GGUF file.
        `ImportError`: `gguf` is not installed.
    """
    path = Path(file).expanduser()
    import_gguf()  # first: without it, every file would be called incomplete
    if not path.is_file():
        raise FileNotFoundError(f"{file}: there is no such file.")
    try:
        stat = path.stat()
        return _cached_reader(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    except Exception as error:  # gguf checks little and fails in many ways
        raise ValueError(
            f"{file} is not a complete GGUF file ({error or type(error).__name__}); download it again."
        ) from error


@lru_cache(maxsize=2)  # a pair: commands need a file several times, and a vocabulary takes seconds to read
def _cached_reader(path: Path, file_state: tuple[int, ...]):
    """
    The reader of a file in this state: inode, size and times. Size and modification time would not be enough; those of
    a file from an archive may equal those of the file that it replaces.
    """
    reader = import_gguf().GGUFReader(path)
    reader.fields["general.architecture"].contents()
    return reader


def target_config(target: str | Path) -> dict:
    """
    The configuration of a target for [`~dflash_hf.conversion.llama_cpp_limits.llama_cpp_limits`]: its text
    configuration, or the same keys from a GGUF file.

    Raises:
        `ValueError`, `OSError`: it cannot be read.
    """
    if not is_gguf(target):
        config = read_config(str(target), f"target={target}")
        return text_part(config)
    fields = open_gguf(target).fields
    architecture = fields["general.architecture"].contents()
    if ARCH in architecture:
        raise ValueError(f"{target} is a drafter; name the GGUF file of the target that it drafts for.")
    keys = {"embedding_length": "hidden_size", "block_count": "num_hidden_layers"}
    sizes = {}
    for key, field in keys.items():
        if f"{architecture}.{key}" in fields:
            sizes[field] = fields[f"{architecture}.{key}"].contents()
    if TOKENS_KEY not in fields or len(sizes) < len(keys):
        raise ValueError(f"{target} is not a language model with a tokenizer; name the target's GGUF file or folder.")
    config = {"model_type": architecture, "vocab_size": len(fields[TOKENS_KEY].data), **sizes}
    if f"{architecture}.rope.dimension_sections" in fields:
        config["rope_parameters"] = {"mrope_section": []}
    return config
