"""
Weights packed for the processor: while a pair decodes, its linear layers multiply by copies that oneDNN has laid out
for blocks of a few tokens. The library that is asked otherwise lays them out anew in every forward.
"""

import contextlib
import re
import weakref

import torch
from torch import nn


_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_pack = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_DTYPES = {torch.float32: "", torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
SMALLEST = 1 << 17  # weights of a layer in fp32, below which asking oneDNN takes longer than it saves

# What was packed for each layer, with the mark of its weight; and, by address, for the layers that decode just now.
_kept: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()
_in_use: dict[int, torch.Tensor] = {}


def mark(weight: torch.Tensor) -> tuple:
    """
    What changes with a weight: where it lies, how often it was changed in place, and some of its values, since a
    change behind `.data`, as merging an adapter makes it, is not counted.
    """
    some = weight.detach().reshape(-1)[:: max(weight.numel() // 16, 1)]
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version, float(some.float().sum())


def _packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    packed = _in_use.get(weight.data_ptr())
    if packed is None or x.dtype != weight.dtype:
        return nn.functional.linear(x, weight, bias)
    return _linear(x, packed, bias, "none", [], "")


def _shape_of_packed_linear(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class _Operator:
    """`_packed_linear` as an operator, for graphs: what is packed has a layout that no compiler reads."""

    def __init__(self):
        # Named after this file, so that graphs that were compiled once are found again by other processes.
        space, schema = re.sub(r"\W", "_", __name__), "packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
        while True:
            self.library = torch.library.Library(space, "FRAGMENT")
            try:
                self.library.define(schema)
                break
            except RuntimeError:  # a process may have loaded this file before, under the same name
                space += "_"
        self.library.impl("packed_linear", _packed_linear, "CPU")
        self.library.impl("packed_linear", _shape_of_packed_linear, "Meta")
        self.call = getattr(torch.ops, space).packed_linear.default


_operator = None


class PackedLinear(nn.Linear):
    """What an `nn.Linear` is as long as its weight is packed."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return _operator.call(input, self.weight, self.bias)
        return _packed_linear(input, self.weight, self.bias)


def packable(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer on the CPU, of a type that oneDNN multiplies here."""
    if type(module) is not nn.Linear or "forward" in vars(module) or _linear is None or _pack is None:
        return False
    weight = module.weight
    if type(weight) is not nn.Parameter or weight.device.type != "cpu" or weight.dtype not in _DTYPES:
        return False
    if not weight.is_contiguous() or (weight.dtype == torch.float32 and weight.numel() < SMALLEST):
        return False
    supported = _DTYPES[weight.dtype]
    return torch.backends.mkldnn.is_available() and (not supported or getattr(torch.ops.mkldnn, supported)())


@contextlib.contextmanager
def packed_weights(*models, tokens: int):
    """
    A context in which the linear layers of models multiply by packed weights. They are packed at their first use,
    again after a change, and kept as long as the layer lives; they take as much memory again.

    Args:
        models (`PreTrainedModel`): Whose layers; those on another device than the CPU stay as they are.
        tokens (`int`): Tokens of a forward, for which the layout is chosen; others are multiplied too.
    """
    global _operator
    layers = []
    if not torch.is_autocast_enabled("cpu"):  # which multiplies in a type of its own
        layers = [module for model in models for module in model.modules() if packable(module)]
    if _operator is None and layers:
        _operator = _Operator()
    try:
        for layer in layers:
            made_for = (*mark(layer.weight), tokens)
            if layer not in _kept or _kept[layer][0] != made_for:
                _kept[layer] = made_for, _pack(layer.weight.detach(), tokens)
            _in_use[layer.weight.data_ptr()] = _kept[layer][1]
            layer.__class__ = PackedLinear
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear
            _in_use.pop(layer.weight.data_ptr(), None)
