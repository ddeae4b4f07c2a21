"""The weights of linear layers that may be quantised."""

import torch
from torch import nn


_PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer's weight is a tensor of numbers: neither codes nor a subclass of `torch.Tensor`."""
    weight = getattr(layer, "weight", None)
    return type(weight) in (nn.Parameter, torch.Tensor) and weight.dtype in _PLAIN_DTYPES


def quantised_layer(model: nn.Module) -> str | None:
    """The name of a model's first linear layer whose weight is quantised; `None` if all are plain."""
    for name, module in model.named_modules():
        # Not every library's layer is a subclass.
        is_linear = isinstance(module, nn.Linear) or "Linear" in type(module).__name__
        if is_linear and not is_plain(module):
            return name
    return None


@torch.no_grad()
def plain_weight(layer: nn.Linear) -> torch.Tensor:
    """
    The weight of a linear layer, `[out, in]`; of a quantised one, what it multiplies by. Every library stores codes in
    its own way: the product with the identity matrix is the weight in all of them.
    """
    if is_plain(layer):
        return layer.weight
    bias = layer.bias
    # A weight of codes says nothing of the dtype of the input, to which its layer then casts.
    dtype = layer.weight.dtype if layer.weight.dtype in _PLAIN_DTYPES else torch.get_default_dtype()
    columns = layer(torch.eye(layer.in_features, dtype=dtype, device=layer.weight.device))  # [in, out]
    if bias is not None:
        columns = columns - bias
    return columns.T
