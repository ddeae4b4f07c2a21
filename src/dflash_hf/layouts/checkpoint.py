"""
Checks that a drafter's weights fit its configuration. Names, shapes and dtypes are compared before anything is loaded:
the error for a wrong file names the tensor, and no memory is allocated. After loading, every parameter must have its
value from a file.
"""

import os
import re
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

import torch
from transformers.quantizers import AutoHfQuantizer

from dflash_hf.layouts.checkpoint_files import checkpoint_files, read_header, read_mask_embedding
from dflash_hf.layouts.tensor_names import is_ignored, published_name, tensor_names


_WEIGHTS = ("F64", "F32", "F16", "BF16")
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MASK_TENSOR = "mask_embedding"
# Methods whose weights upstream turns into plain ones while it loads them. Layers that stay quantised need kernels for
# certain GPUs, or are unpacked by a forward of the whole model, which drafting never calls.
_DEQUANTIZED = ("compressed-tensors", "fp8", "mxfp8", "nvfp4", "mxfp4")


@dataclass
class Checkpoint:
    """
    What is known of a drafter's files before the weights are loaded.

    Args:
        name (`str`): Folder or repository, for errors.
        renamings (`dict[str, str]`): The `key_mapping` for transformers' loader. Its keys are regular expressions that
            match exactly one tensor name of the files; its values are the published names.
        mask_embedding (`torch.Tensor`, *optional*): `[H]`, the drafter's own mask embedding, if a separate file holds
            one.
        is_quantized (`bool`): Whether `config.json` names a quantisation.
    """

    name: str
    renamings: dict[str, str] = field(default_factory=dict)
    mask_embedding: torch.Tensor | None = None
    is_quantized: bool = False

    def check_loaded(self, model, info: dict) -> None:
        """
        Check that every parameter of a drafter was loaded, and every tensor of its files.

        Args:
            model (`DFlashDraftModel`): The drafter.
            info (`dict`): From `output_loading_info` of `from_pretrained`.

        Raises:
            `ValueError`: a parameter or tensor was not loaded, or a quantised layer was not turned into plain weights.
        """
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            keys = set(info[problem])
            if self.mask_embedding is not None:
                keys.discard(_MASK_TENSOR)
            if keys:
                first = ", ".join(sorted(map(str, keys))[:5])
                raise ValueError(f"{self.name}: {problem.replace('_', ' ')}: {first} ({len(keys)} in all).")
        if self.is_quantized:
            _check_plain_weights(self.name, model)


def read_checkpoint(
    name_or_path,
    model_class,
    config,
    key_mapping: dict[str, str] | None,
    hub_arguments: dict,
    variant: str | None = None,
    state_dict: dict | None = None,
) -> Checkpoint:
    """
    Read the headers of a drafter's files, and compare them with its configuration.

    Args:
        name_or_path (`str` or `Path`, *optional*): Folder or repository; `None` for a `state_dict`.
        model_class, config: The model to build. The configuration is changed in place: whether the drafter has its own
            embeddings, and how its quantised weights are loaded.
        key_mapping (`dict[str, str]`, *optional*): Further renamings of tensors, applied first, as by `re.sub`.
        hub_arguments (`dict`): As in [`checkpoint_files`].
        variant (`str`, *optional*): As in `from_pretrained`.
        state_dict (`dict`, *optional*): Tensors in place of files.

    Raises:
        `ValueError`: names the file, and the key or tensor that is wrong.
        `OSError`: a file is missing.
    """
    names = {**(key_mapping or {}), **tensor_names(config)}
    checkpoint = Checkpoint(str(name_or_path))
    checkpoint.is_quantized = _prepare_quantization(checkpoint.name, config)
    if name_or_path is None:
        checkpoint.renamings = _exact_renamings(state_dict or {}, names)
        return checkpoint
    files = checkpoint_files(checkpoint.name, variant=variant, **hub_arguments)
    headers = {path: read_header(path) for path in files}
    stored_names = [stored for header in headers.values() for stored in header]
    checkpoint.renamings = _exact_renamings(stored_names, names)
    # The separate file overrides a tensor of the same name, as in the engines.
    checkpoint.mask_embedding = read_mask_embedding(checkpoint.name, config, **hub_arguments)
    config.own_mask_embedding |= checkpoint.mask_embedding is not None
    config.has_embed_tokens |= _has_own_embedding(stored_names, config, names)
    if not checkpoint.is_quantized:  # quantised files have other tensors; `check_loaded` checks them after loading
        stored_elsewhere = () if checkpoint.mask_embedding is None else (_MASK_TENSOR,)
        _check_tensors(headers, model_class, config, names, stored_elsewhere)
    elif config.interleaved_rotary:
        raise ValueError(f"{checkpoint.name}: rope_is_neox_style=False needs weights whose rows can be permuted.")
    return checkpoint


def _exact_renamings(stored_names, names: dict[str, str]) -> dict[str, str]:
    """
    A renaming for each tensor, for `key_mapping` of transformers. Its patterns do not work as in `re.sub`: only the
    first group is replaced, and a pattern ends where a word ends. With complete names, both do the same.
    """
    renamed = {}
    for stored in stored_names:
        published = published_name(stored, names)
        if published != stored:
            renamed[stored] = published
    # Renamings are applied one after the other, so a tensor must be renamed before another tensor takes its name.
    order = TopologicalSorter({stored: [published] for stored, published in renamed.items()}).static_order()
    return {f"^{re.escape(name)}$": renamed[name] for name in order if name in renamed}


def _prepare_quantization(name: str, config) -> bool:
    """
    Prepare a configuration for a quantised checkpoint, which upstream's quantisers load; those of `_DEQUANTIZED` are
    asked for plain weights.

    Args:
        name (`str`): Folder or repository, for errors.
        config (`PreTrainedConfig`): Changed in place.

    Returns:
        `bool`: Whether the checkpoint is quantised.

    Raises:
        `ValueError`: upstream has no quantiser for it, and would load the codes as weights.
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


def _check_plain_weights(name: str, model) -> None:
    """
    Check that upstream's quantisers left plain weights in all layers.

    Raises:
        `ValueError`: the layer of a quantised checkpoint holds codes instead of weights.
    """
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if type(module) is torch.nn.Linear and (weight is None or weight.dtype not in _DTYPES):
            stored = "packed" if weight is None else f"of {weight.dtype}"
            raise ValueError(
                f"{name}: {path}.weight is still {stored} after loading: the checkpoint lacks its scales, or this "
                "version of transformers cannot turn its weights into plain ones; upgrade it, or load weights in bf16."
            )


def _has_own_embedding(stored_names: list[str], config, names: dict[str, str]) -> bool:
    """Whether a checkpoint has its own token embeddings, which engines then use as well."""
    name = "embed_tokens.weight"
    if config.vocab_size is None or is_ignored(name, config):
        return False
    return any(published_name(stored, names) == name for stored in stored_names)


def _check_tensors(
    headers: dict[str, dict[str, tuple[str, tuple[int, ...]]]],
    model_class,
    config,
    names: dict[str, str],
    stored_elsewhere: tuple[str, ...] = (),
) -> None:
    """
    Compare the tensors of a checkpoint with the model that a configuration describes.

    Args:
        headers (`dict`): Dtypes and shapes of the tensors by name, from [`read_header`], by file.
        model_class, config: The model to build.
        names (`dict[str, str]`): Renamings of tensors, as in [`published_name`].
        stored_elsewhere (`tuple[str]`): Published names of tensors that are not in these files.

    Raises:
        `ValueError`: names the tensor that is missing, unexpected, duplicated, or of the wrong shape or dtype.
    """
    # 1. The files' tensors, by published names.
    stored = {}  # dtype and shape, by published name
    sources = {}  # names in the files, by published name
    for path, tensors in headers.items():
        for name in tensors:
            published = published_name(name, names)
            if is_ignored(published, config):
                continue
            if published in stored:
                raise ValueError(f"{path}: tensors {sources[published]} and {name} are both {published}; remove one.")
            stored[published] = tensors[name]
            sources[published] = name

    # 2. The model's tensors. A wrong number of layers is detected first, before that many layers are built.
    layers = {name.split(".")[1] for name in stored if name.startswith("layers.")}
    files = list(headers)
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
        "missing keys": [name for name in wanted if name not in stored and name not in stored_elsewhere],
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
