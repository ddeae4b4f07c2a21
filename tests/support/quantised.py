"""Linear layers whose weights are codes, as those of bitsandbytes, without its kernels."""

import torch
from torch import nn


class Coded8(nn.Linear):
    """Integers and one scale per row: a weight of the plain shape, whose values are not the weight's."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        weight = layer.weight.detach()
        self.scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
        self.bias = layer.bias
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def plain(self) -> torch.Tensor:
        return self.weight * self.scale

    def forward(self, x):
        return nn.functional.linear(x, self.plain().to(x.dtype), self.bias)


class Coded4(Coded8):
    """The same in bytes of another shape, `[n, 1]`, as 4-bit weights are stored."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer)
        self.rows = len(self.weight)
        self.weight = nn.Parameter(self.weight.view(torch.uint8).reshape(-1, 1), requires_grad=False)

    def plain(self) -> torch.Tensor:
        return self.weight.view(torch.int8).view(self.rows, -1) * self.scale


def with_codes(model: nn.Module, kind: type[Coded8], skipped: tuple[str, ...] = ()) -> nn.Module:
    """The model, with codes in place of the weights of its linear layers; changed in place."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name not in skipped:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, kind(module))
    return model


def with_plain_weights(model: nn.Module) -> nn.Module:
    """The model with plain layers that multiply by what the codes stand for; changed in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Coded8):
            parent, _, attribute = name.rpartition(".")
            layer = nn.Linear(module.in_features, module.out_features, module.bias is not None)
            layer.weight = nn.Parameter(module.plain())
            layer.bias = module.bias
            setattr(model.get_submodule(parent), attribute, layer)
    return model
