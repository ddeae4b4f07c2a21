"""Loading a drafter of any published layout, by the loader of transformers."""

import copy

import torch
from transformers import PreTrainedConfig
from transformers.integrations.peft import maybe_load_adapters

from dflash_hf.layouts.checkpoint import Checkpoint, read_checkpoint
from dflash_hf.modeling import modeling_dflash


_ROWS_OF_CPU_KERNEL = 32  # of bitsandbytes 0.50's kernels for 4-bit weights
_HUB_ARGUMENTS = (
    "subfolder",
    "revision",
    "token",
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "user_agent",
    "repo_type",
    "_commit_hash",
)


def load_drafter(
    model_class, name, model_args: tuple = (), config=None, key_mapping: dict[str, str] | None = None, **kwargs
) -> tuple:
    """
    Load a drafter.

    Args:
        model_class (`type[DFlashDraftModel]`): The class of the package.
        name (`str`, `Path`, *optional*): A folder or repository, of a drafter or of an adapter; `None` for a
            `state_dict`.
        model_args (`tuple`): Further positional arguments of the model.
        config (`PreTrainedConfig` or `str`, *optional*): In place of the folder's.
        key_mapping (`dict[str, str]`, *optional*): See `DFlashDraftModel.from_pretrained`.
        kwargs: Further arguments of `from_pretrained`, and fields of the configuration.

    Returns:
        The drafter, and what was loaded, as upstream's `output_loading_info` gives it.

    Raises:
        `ValueError`: names the file and the key or tensor.
        `OSError`: a file is missing.
    """
    # 1. An adapter's folder names the drafter that it was trained on. Revision and subfolder are the adapter's.
    hub_arguments = {key: kwargs[key] for key in _HUB_ARGUMENTS if kwargs.get(key) is not None}
    adapter, base, _ = maybe_load_adapters(name, hub_arguments)
    if base != name:
        kwargs.pop("revision", None)
        kwargs.pop("subfolder", None)
        model, info = load_drafter(model_class, base, model_args, config, key_mapping, **kwargs)
        model.load_adapter(adapter, **hub_arguments)
        return model, info
    # 2. The configuration, with the fields that the caller changes.
    config, kwargs = _read_config(model_class, name, config, hub_arguments, kwargs)
    # 3. The names, shapes and dtypes of the stored tensors, before any of them is read.
    files = {"variant": kwargs.get("variant"), "state_dict": kwargs.get("state_dict")}
    checkpoint = read_checkpoint(name, model_class, config, key_mapping, hub_arguments, **files)
    kwargs.pop("force_download", None)  # the headers were read from fresh files
    # 4. The weights, and a check that every parameter was loaded.
    model, info = _load_weights(model_class, name, model_args, config, checkpoint, **kwargs)
    checkpoint.check_loaded(model, info)
    check_cpu_kernels(str(name), model)
    check_quantised_dtype(str(name), model)
    # 5. What other files hold, or other projects store in another order.
    if checkpoint.mask_embedding is not None:
        model.mask_embedding.data.copy_(checkpoint.mask_embedding)
    if config.interleaved_rotary:
        _deinterleave_rotary(model)
    # 6. It is saved under published names, and its vocabulary is a valid one.
    _forget_renamings(model, checkpoint)
    model.check_draft_vocabulary()
    return model, info


def _read_config(model_class, name, config, hub_arguments: dict, kwargs: dict) -> tuple[PreTrainedConfig, dict]:
    """A private copy of the configuration, and the arguments that are not fields of it."""
    if isinstance(config, PreTrainedConfig):
        return copy.deepcopy(config), kwargs
    fields = model_class.config_class.field_names() - {"dtype"}
    changes = {key: value for key, value in kwargs.items() if key in fields}
    source = name if config is None else config
    config = model_class.config_class.from_pretrained(source, **hub_arguments, **changes)
    return config, {key: value for key, value in kwargs.items() if key not in fields}


def _load_weights(model_class, name, model_args: tuple, config, checkpoint: Checkpoint, **kwargs) -> tuple:
    """The drafter with the weights of its files, and what was loaded, by the loader of transformers."""
    kwargs |= {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
    # The published class has a `from_pretrained` for code beside weights, which accepts fewer layouts and gives errors
    # that name nothing: it is skipped.
    load = super(modeling_dflash.DFlashDraftModel, model_class).from_pretrained
    try:
        return load(name, *model_args, config=config, key_mapping=checkpoint.renamings, **kwargs)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    except RuntimeError as error:
        if not checkpoint.is_quantized and kwargs.get("quantization_config") is None:
            raise
        raise ValueError(
            f"{name}: its quantization_config cannot be applied on this machine: {error} Use another method, or load "
            "the drafter unquantised."
        ) from error
    except ImportError as error:
        if not checkpoint.is_quantized:
            raise
        raise ImportError(f"{name} is quantised, and its library is missing: {error}") from error


def check_cpu_kernels(name: str, model) -> None:
    """
    Check that bitsandbytes can multiply by a model's 4-bit weights: where a processor has hardware support for bf16,
    its kernels take multiples of 32 rows, and other layers fail in the first forward.

    Raises:
        `ValueError`: a layer has another number of rows.
    """
    for path, module in model.named_modules():
        has_kernel = getattr(module, "support_avx512bf16_for_cpu", False) and module.weight.device.type == "cpu"
        if has_kernel and module.out_features % _ROWS_OF_CPU_KERNEL:
            raise ValueError(
                f"{name}: {path} has {module.out_features} rows, but bitsandbytes multiplies by 4-bit weights on this "
                f"processor in multiples of {_ROWS_OF_CPU_KERNEL}: leave it out of quantization_config, with "
                f"llm_int8_skip_modules=[{path.rpartition('.')[2]!r}, ...]."
            )


def check_quantised_dtype(name: str, model) -> None:
    """
    Check that torchao's weights have the dtype of the others. They keep the one that they were quantised from, and
    most of their products fail with states of another.

    Raises:
        `ValueError`: a weight has another dtype; names it.
    """
    dtype = model.norm.weight.dtype  # a norm is not quantised
    for path, parameter in model.named_parameters():
        is_quantised = type(parameter).dequantize is not torch.Tensor.dequantize
        if is_quantised and parameter.dtype != dtype:
            remedy = str(parameter.dtype).removeprefix("torch.")  # as commands take it, too
            raise ValueError(
                f"{name}: its {path} is quantised in {parameter.dtype}, and {dtype} was asked for: load the drafter "
                f"with dtype={remedy}, or without a dtype."
            )


def _forget_renamings(model, checkpoint: Checkpoint) -> None:
    """
    Have the model saved under published names. When it saves, upstream would undo each renaming of loading, and
    quantise weights again that it turned into plain ones on loading.
    """
    conversions = getattr(model, "_weight_conversions", None) or []
    if checkpoint.is_quantized and getattr(model.config, "quantization_config", None) is None:
        conversions = []  # upstream has turned the weights into plain ones
    renamings = set(checkpoint.renamings)
    model._weight_conversions = [
        conversion for conversion in conversions if not renamings.intersection(conversion.source_patterns)
    ]


@torch.no_grad()
def _deinterleave_rotary(model) -> None:
    """Convert interleaved rotary pairs (`rope_is_neox_style: false`) to halves: even channels come first."""
    head_dim = model.config.head_dim
    rotated = int(head_dim * model.config.rope_parameters.get("partial_rotary_factor", 1.0))
    even = torch.arange(0, rotated, 2)
    odd = torch.arange(1, rotated, 2)
    order = torch.cat([even, odd, torch.arange(rotated, head_dim)])
    for layer in model.layers:
        attention = layer.self_attn
        projections = (*attention.q_proj.parameters(), *attention.k_proj.parameters())
        for weight in (*projections, attention.q_norm.weight, attention.k_norm.weight):
            by_head = weight.unflatten(0, (-1, head_dim))
            weight.copy_(by_head[:, order.to(weight.device)].flatten(0, 1))
    model.config.interleaved_rotary = False
