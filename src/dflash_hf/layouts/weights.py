"""
A checkpoint's contents, read from the headers of its safetensors files before anything is loaded: damaged files, and
tensors that do not match the configuration, are rejected by name before memory is allocated.
"""

import json
import os

import torch
from safetensors import SafetensorError, safe_open
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from dflash_hf.layouts.read import canonical_name, is_left_out
from dflash_hf.modeling.modeling_dflash import MASK_EMBEDDING


_WEIGHTS = ("F64", "F32", "F16", "BF16")
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Methods whose weights upstream can turn into plain ones as it loads them. Else their layers need kernels of some GPU,
# or wait for a forward of the whole model, which drafting never calls.
_DEQUANTIZED = ("compressed-tensors", "fp8", "mxfp8", "nvfp4", "mxfp4")


def check_quantization_is_read(name: str, config) -> bool:
    """
    Prepare a configuration for loading a quantised checkpoint by upstream's quantisers: weights in 8 or 4 bits of
    compressed-tensors and the like are loaded as plain ones.

    Args:
        name (`str`): Folder or repository, for errors.
        config (`PreTrainedConfig`): Changed in place.

    Returns:
        `bool`: Whether the checkpoint is quantised.

    Raises:
        `ValueError`: upstream has no quantiser for it, and would take the stored numbers for weights.
    """
    remedy = "load its weights in bf16 if they are published, or have the engine that they were made for serve it"
    if isinstance(getattr(config, "quantization", None), dict):
        raise ValueError(f"{name} is quantised for MLX (`quantization` in config.json), which is not read: {remedy}.")
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return False
    if not isinstance(quantization, dict):
        return True
    method = quantization["quant_method"]
    if not AutoHfQuantizer.supports_quant_method(quantization):
        raise ValueError(
            f"{name} is quantised with quant_method={method!r}, for which transformers has no quantiser: {remedy}."
        )
    if method in _DEQUANTIZED:
        config.quantization_config = {"dequantize": True, **quantization}
    return True


def check_weights_are_loaded(name: str, model) -> None:
    """
    Check that upstream's quantisers left plain weights in all layers.

    Raises:
        `ValueError`: a plain layer of a quantised checkpoint holds numbers that are no weights.
    """
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if type(module) is torch.nn.Linear and (weight is None or weight.dtype not in _DTYPES):
            stored = "packed" if weight is None else f"of {weight.dtype}"
            raise ValueError(
                f"{name}: {path}.weight is still {stored} after loading: the checkpoint lacks its scales, or this "
                "version of transformers cannot turn its weights into plain ones; upgrade it, or load weights in bf16."
            )


def checkpoint_files(name_or_path: str, variant: str | None = None, **hub_arguments) -> list[str]:
    """
    The safetensors files of a folder or repository, downloaded if necessary.

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
    The drafter's own mask embedding `[H]`, if a folder or repository has one next to the weights.

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


def has_own_table(files: list[str], config, names: dict[str, str]) -> bool:
    """Whether a checkpoint has token embeddings other than the target's; engines use them too."""
    name = "embed_tokens.weight"
    if config.vocab_size is None or is_left_out(name, config.source_layout, config.has_own_lm_head):
        return False
    for path in files:
        if any(canonical_name(stored, names) == name for stored in read_header(path)):
            return True
    return False


def check_checkpoint(
    files: list[str], model_class, config, names: dict[str, str], beside: tuple[str, ...] = ()
) -> None:
    """
    Compare the tensors of a checkpoint with the model that a configuration describes.

    Args:
        files (`list[str]`): Its safetensors files.
        model_class, config: The model to build.
        names (`dict[str, str]`): Renamings of tensors, as in `key_mapping` of `from_pretrained`.
        beside (`tuple[str]`): Tensors that are stored elsewhere.

    Raises:
        `ValueError`: names the tensor that is missing, unexpected, duplicated, or of the wrong shape or dtype.
    """
    # 1. The files' tensors, by published names.
    stored = {}  # dtype and shape, by published name
    sources = {}  # names in the files, by published name
    for path in files:
        tensors = read_header(path)
        for name in tensors:
            canonical = canonical_name(name, names)
            if is_left_out(canonical, config.source_layout, config.has_own_lm_head):
                continue
            if canonical in stored:
                raise ValueError(f"{path}: tensors {sources[canonical]} and {name} are both {canonical}; remove one.")
            stored[canonical] = tensors[name]
            sources[canonical] = name

    # 2. The model's tensors. A wrong number of layers is detected first, before that many layers are built.
    layers = {name.split(".")[1] for name in stored if name.startswith("layers.")}
    where = files[0] if len(files) == 1 else os.path.dirname(files[0])
    if len(layers) < config.num_hidden_layers:
        raise ValueError(
            f"{where}: missing keys: num_hidden_layers={config.num_hidden_layers}, but the tensors belong to "
            f"{len(layers)} layers; correct config.json or load the whole checkpoint."
        )
    with torch.device("meta"):
        wanted = model_class(config).state_dict()

    # 3. The difference.
    problems = {
        "missing keys": [name for name in wanted if name not in stored and name not in beside],
        "unexpected keys": [sources[name] for name in stored if name not in wanted],
        "mismatched keys": [
            f"{sources[name]} has shape {list(stored[name][1])} instead of {list(tensor.shape)}"
            for name, tensor in wanted.items()
            if name in stored and stored[name][1] != tuple(tensor.shape)
        ],
    }
    for problem, keys in problems.items():
        if keys:
            named = f"{', '.join(keys[:5])} ({len(keys)} in all)"
            raise ValueError(f"{where}: {problem}: {named}; load the weights that belong to this config.json.")
    for name, (dtype, _) in stored.items():
        is_weight = wanted[name].is_floating_point()
        allowed = _WEIGHTS if is_weight else ("I64",)
        if dtype in allowed:
            continue
        message = f"{where}: tensor {sources[name]} has dtype {dtype}, not one of {allowed}"
        if is_weight:
            raise ValueError(
                f"{message}: it is quantised, but config.json has no quantization_config that says how; load the "
                "weights in bf16."
            )
        raise ValueError(f"{message}.")
