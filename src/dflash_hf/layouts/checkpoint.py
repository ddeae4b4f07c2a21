"""
Checks that a drafter's weights fit its configuration. Names, shapes and dtypes are compared before anything is loaded:
the error for a wrong file names the tensor, and no memory is allocated. After loading, every parameter must have its
value from a file.
"""

import os
import re
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import NamedTuple

import torch
from transformers.quantizers import AutoHfQuantizer

from dflash_hf.layouts.checkpoint_files import checkpoint_files, read_header, read_mask_embedding
from dflash_hf.layouts.tensor_names import is_ignored, published_name, tensor_names


_WEIGHTS = ("F64", "F32", "F16", "BF16")
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MASK_TENSOR = "mask_embedding"
# Methods whose weights upstream turns into plain ones while it loads them, if it is asked to. Layers that stay
# quantised need kernels for certain GPUs, or are unpacked by a forward of the whole model, which drafting never calls.
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
        model_class, config: The model to build. `_complete_config` changes the configuration in place: whether the
            drafter has its own embeddings, and how its quantised weights are loaded.
        key_mapping (`dict[str, str]`, *optional*): Further renamings of tensors, applied first, as by `re.sub`.
        hub_arguments (`dict`): As in [`checkpoint_files`].
        variant (`str`, *optional*): As in `from_pretrained`.
        state_dict (`dict`, *optional*): Tensors in place of files.

    Raises:
        `ValueError`: names the file, and the key or tensor that is wrong.
        `OSError`: a file is missing.
    """
    # 1. What the files hold.
    names = {**(key_mapping or {}), **tensor_names(config)}
    checkpoint = Checkpoint(str(name_or_path), is_quantized=_is_quantized(str(name_or_path), config))
    if name_or_path is None:
        checkpoint.renamings = _exact_renamings(state_dict or {}, names)
        _complete_config(config, checkpoint)
        return checkpoint
    files = checkpoint_files(checkpoint.name, variant=variant, **hub_arguments)
    headers = {path: read_header(path) for path in files}
    stored_names = [stored for header in headers.values() for stored in header]
    checkpoint.renamings = _exact_renamings(stored_names, names)
    # The separate file overrides a tensor of the same name, as in the engines.
    checkpoint.mask_embedding = read_mask_embedding(checkpoint.name, config, **hub_arguments)
    # 2. The configuration, with what only the files show.
    _complete_config(config, checkpoint, has_own_embedding=_has_own_embedding(stored_names, config, names))
    # 3. Both compared. Quantised files have other tensors, which `check_loaded` checks after loading.
    if not checkpoint.is_quantized:
        stored_elsewhere = () if checkpoint.mask_embedding is None else (_MASK_TENSOR,)
        _check_tensors(headers, model_class, config, names, stored_elsewhere)
    elif config.interleaved_rotary:
        raise ValueError(f"{checkpoint.name}: rope_is_neox_style=False needs weights whose rows can be permuted.")
    return checkpoint


def _complete_config(config, checkpoint: Checkpoint, has_own_embedding: bool = False) -> None:
    """
    Write into a configuration what only the files show, and how they are to be loaded. Nothing else changes it.

    Args:
        config (`DFlashDraftConfig`): Changed in place.
        checkpoint (`Checkpoint`): What is known of the files.
        has_own_embedding (`bool`): Whether they hold the drafter's own token embeddings.
    """
    if checkpoint.mask_embedding is not None:
        config.own_mask_embedding = True
    if has_own_embedding:
        config.has_embed_tokens = True
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict) and quantization["quant_method"] in _DEQUANTIZED:
        config.quantization_config = {"dequantize": True, **quantization}


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


def _is_quantized(name: str, config) -> bool:
    """
    Whether a configuration describes quantised weights, which upstream's quantisers load.

    Args:
        name (`str`): Folder or repository, for errors.
        config (`PreTrainedConfig`): The drafter's configuration.

    Raises:
        `ValueError`: upstream has no quantiser for them, and would load the codes as weights.
    """
    remedy = "load its weights in bf16 if they are published, or have the engine that they were made for serve it"
    if isinstance(getattr(config, "quantization", None), dict):
        raise ValueError(f"{name} is quantised for MLX (`quantization` in config.json), which is not read: {remedy}.")
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict) and not AutoHfQuantizer.supports_quant_method(quantization):
        method = quantization["quant_method"]
        raise ValueError(
            f"{name} is quantised with quant_method={method!r}, for which transformers has no quantiser: {remedy}."
        )
    return quantization is not None


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


class _Tensor(NamedTuple):
    """A tensor in a drafter's files, with the name, dtype and shape that it has there."""

    name: str
    dtype: str
    shape: tuple[int, ...]


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
    files = list(headers)
    where = files[0] if len(files) == 1 else os.path.dirname(files[0])
    stored = _published_tensors(headers, config, names)
    _check_number_of_layers(where, stored, config.num_hidden_layers)  # before that many layers are built
    with torch.device("meta"):
        wanted = model_class(config).state_dict()
    _check_names_and_shapes(where, stored, wanted, stored_elsewhere)
    _check_dtypes(where, stored, wanted)


def _published_tensors(headers: dict, config, names: dict[str, str]) -> dict[str, _Tensor]:
    """
    The tensors of the files by their published names, without those that are not loaded.

    Raises:
        `ValueError`: two tensors have one published name.
    """
    stored: dict[str, _Tensor] = {}
    for path, tensors in headers.items():
        for name, (dtype, shape) in tensors.items():
            published = published_name(name, names)
            if is_ignored(published, config):
                continue
            if published in stored:
                raise ValueError(
                    f"{path}: tensors {stored[published].name} and {name} are both {published}; remove one."
                )
            stored[published] = _Tensor(name, dtype, shape)
    return stored


def _check_number_of_layers(where: str, stored: dict[str, _Tensor], num_layers: int) -> None:
    """
    Raises:
        `ValueError`: the files hold fewer layers than the configuration names.
    """
    layers = {name.split(".")[1] for name in stored if name.startswith("layers.")}
    if len(layers) < num_layers:
        raise ValueError(
            f"{where}: missing keys: num_hidden_layers={num_layers}, but the tensors belong to {len(layers)} layers; "
            "correct config.json or load the whole checkpoint."
        )


def _check_names_and_shapes(
    where: str, stored: dict[str, _Tensor], wanted: dict[str, torch.Tensor], stored_elsewhere: tuple[str, ...]
) -> None:
    """
    Raises:
        `ValueError`: a tensor of the model is missing or has another shape, or the files hold one that it lacks.
    """
    problems = {
        "missing keys": [name for name in wanted if name not in stored and name not in stored_elsewhere],
        "unexpected keys": [tensor.name for name, tensor in stored.items() if name not in wanted],
        "mismatched keys": [
            f"{stored[name].name} has shape {list(stored[name].shape)} instead of {list(tensor.shape)}"
            for name, tensor in wanted.items()
            if name in stored and stored[name].shape != tuple(tensor.shape)
        ],
    }
    for problem, keys in problems.items():
        if keys:
            named = f"{', '.join(keys[:5])} ({len(keys)} in all)"
            raise ValueError(f"{where}: {problem}: {named}; load the weights that belong to this config.json.")


def _check_dtypes(where: str, stored: dict[str, _Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """
    Raises:
        `ValueError`: a weight is not in floating point, or the vocabulary's map not in integers.
    """
    for name, tensor in stored.items():
        is_weight = wanted[name].is_floating_point()
        allowed = _WEIGHTS if is_weight else ("I64",)
        if tensor.dtype in allowed:
            continue
        message = f"{where}: tensor {tensor.name} has dtype {tensor.dtype}, not one of {allowed}"
        if is_weight:
            raise ValueError(
                f"{message}: it is quantised, but config.json has no quantization_config that says how; load the "
                "weights in bf16."
            )
        raise ValueError(f"{message}.")
