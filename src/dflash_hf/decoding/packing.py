"""
Weights packed for the processor: linear layers multiply by copies that oneDNN has laid out for a few tokens at a time,
instead of repeating the layout in every forward.
"""

import contextlib
import functools
import itertools
import sys
import threading
import weakref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.utils import logging

from dflash_hf.decoding.cpu_dtypes import SUPPORT_QUERIES, is_emulated, warn_if_emulated
from dflash_hf.targets.memory import free_memory


logger = logging.get_logger(__name__)

_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
TOKENS = 16  # per forward, for which the layout is optimised
SMALLEST = 1 << 17  # weights of an fp32 layer, below which calling oneDNN takes longer than it saves

# The pack of each weight, by its `id`: a `_Pack` keeps its weight alive, so that the id stays unique.
# Every forward looks it up, even in compiled graphs; without a pack it multiplies by the weight itself.
_packs: "weakref.WeakValueDictionary[int, _Pack]" = weakref.WeakValueDictionary()
# References that keep a `_Pack` alive: each layer with the weight, for each call that has packed the layer.
_held: "weakref.WeakKeyDictionary[nn.Linear, dict[object, _Pack]]" = weakref.WeakKeyDictionary()
_lock = threading.RLock()


@contextlib.contextmanager
def _alone():
    """
    No other thread packs, restores or compiles meanwhile; forwards continue. Dynamo reads the class of a layer once
    for a graph and again for its guards: it must not change between the two.
    """
    dynamo = sys.modules.get("torch._dynamo.convert_frame")  # nothing compiles before it is imported
    with getattr(dynamo, "compile_lock", contextlib.nullcontext()), _lock:
        yield


def _can_be_packed(weight: torch.Tensor) -> bool:
    """Whether oneDNN supports such a weight here, and PyTorch counts its changes."""
    if weight.device.type != "cpu" or weight.dtype not in SUPPORT_QUERIES or not weight.is_contiguous():
        return False
    if weight.dim() != 2 or weight.numel() == 0:  # placeholders of ZeRO-3 and others for a weight stored elsewhere
        return False
    if weight.is_inference() or (weight.dtype == torch.float32 and weight.numel() < SMALLEST):
        return False
    return not is_emulated(weight.dtype)


_steps = 0  # steps of all optimizers in this process


def _count_step(optimizer, args, kwargs) -> None:
    global _steps
    if not torch.compiler.is_compiling():  # PyTorch counts the writes of a compiled step
        _steps += 1


@functools.cache
def _count_steps() -> None:
    """From now on: a fused step writes to weights without being counted, and so does copying its result to them."""
    register_optimizer_step_post_hook(_count_step)


def _mark(weight: torch.Tensor) -> tuple:
    """A mark that differs after a weight was changed in place or by an optimizer, moved, cast, or given other data."""
    version = None if weight.is_inference() else weight._version
    steps = _steps if weight.requires_grad else None
    return version, steps, weight.data_ptr(), weight.dtype, weight.shape, weight.stride()


class _Pack:
    """A weight, and its copy laid out for the processor."""

    def __init__(self, weight: nn.Parameter):
        self.weight = weight

    def renew(self) -> None:
        """Pack the current weight."""
        # The mark is read first: a change while the weight is read is detected by the next forward. The storage is
        # kept alive, so that nothing else can be allocated at its address.
        mark, storage = _mark(self.weight), self.weight.untyped_storage()
        copy = _reorder(self.weight.detach(), self.tokens) if _can_be_packed(self.weight) else None
        self.made = mark, copy, storage

    def copy(self) -> torch.Tensor | None:
        """The packed copy of the current weight; `None` if it can no longer be packed."""
        if self.made[0] != _mark(self.weight):
            self.renew()
        return self.made[1]


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    pack = _packs.get(id(weight))
    # In fp32 the layout makes a single token up to 1.7x as slow (AMD EPYC: equally fast, or 1.15x as slow with AVX2).
    single = x.dtype == torch.float32 and x.numel() == x.shape[-1]
    copy = None if pack is None or single or x.dtype != weight.dtype else pack.copy()
    if copy is None:
        return nn.functional.linear(x, weight, bias)
    return _linear(x, copy, bias, "none", [], "")


def _shape_of_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


# `_multiply` as an operator, for graphs: no compiler can read the layout, and packs may change after compilation. Each
# copy of this file that is loaded has its own.
_library = torch.library.Library("dflash_hf", "FRAGMENT")
_name = next(name for i in itertools.count() if not hasattr(torch.ops.dflash_hf, name := f"packed_linear_{i}"))
_library.define(f"{_name}(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl(_name, _multiply, "CompositeExplicitAutograd")  # and if the layer is moved to a GPU
_library.impl(_name, _shape_of_product, "Meta")
_operator = getattr(torch.ops.dflash_hf, _name)


class PackedLinear(nn.Linear):
    """
    The class of an `nn.Linear` while its weight is packed. Its parameters are unchanged; copies and pickles of it are
    plain layers.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled("cpu") or (  # which multiplies in its own dtype
            torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (input, weight, bias))
        ):
            return nn.functional.linear(input, weight, bias)
        if torch.compiler.is_compiling():
            return _operator(input, weight, bias)
        return _multiply(input, weight, bias)

    def __reduce_ex__(self, protocol):
        plain = object.__new__(nn.Linear)
        vars(plain).update(vars(self))
        return plain.__reduce_ex__(1)  # names the class to create; later protocols use that of `self`


def packable(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer whose weight can be packed."""
    if type(module) not in (nn.Linear, PackedLinear) or "forward" in vars(module) or _linear is None:
        return False
    weight = module._parameters.get("weight")  # whoever computes it has put an attribute in its place, or nothing yet
    return torch.backends.mkldnn.is_available() and type(weight) is nn.Parameter and _can_be_packed(weight)


def fit_memory(layers: list[nn.Linear]) -> bool:
    """Whether packed copies of layers take less than a third of the free memory."""
    return sum(layer.weight.nbytes for layer in layers) < free_memory(torch.device("cpu")) / 3


def _pack_of(weight: nn.Parameter, tokens: int) -> _Pack:
    """The pack of a weight, made anew: it may have been changed in a way that PyTorch does not count."""
    pack = _packs.get(id(weight)) or _Pack(weight)
    pack.tokens = tokens
    pack.renew()
    _packs[id(weight)] = pack
    return pack


class packed_weights:
    """
    Pack the linear layers of models for the processor, until restored:

    ```python
    packed_weights(target, draft)  # permanently

    with packed_weights(target, draft) as packed:  # or temporarily; calls packed.restore() on exit
        target.generate(**inputs, assistant_model=draft)
    ```

    The models compute the same, up to rounding; their parameters, state dicts, copies and pickles are unchanged. The
    packed copies take as much memory as the weights. Layers packed by several calls stay packed until all of them are
    restored. Entering and leaving is safe while other threads decode, and waits while they compile; a graph that was
    compiled before packing is not used after it, and vice versa.

    Every forward checks whether the weight is still the packed one, and packs again after a change in place
    (`load_state_dict`), `.to(dtype)`, new `.data` or, if it requires a gradient, a step of any optimizer. Everything
    that cannot be packed is multiplied as usual: a replaced parameter, inputs of another dtype, anything under
    autocast or that needs a gradient, weights created in inference mode, small layers and single tokens in fp32, and
    anything that is not a plain `nn.Linear` on a CPU.

    Changes that PyTorch does not count are *not* detected: values written through `weight.data`, as in `weight.data +=
    delta` (the way PEFT merges an adapter), through `weight.numpy()`, by a fused optimizer's step inside
    `torch.compile`, or by other processes into shared memory. After such a change, call again: each call packs anew.

    Args:
        models (`nn.Module`): Models whose layers to pack, such as a target and its drafter, or only a target.
        tokens (`int`): Tokens per forward for which the layout is optimised; other numbers work too. Of 1, 8, 16 and
            32, all but 1 were equally fast for forwards over 1 to 32 tokens, within noise; 1 was up to a third slower.

    Attributes:
        layers (`list[nn.Linear]`): The packed layers.

    Raises:
        `ValueError`: no models, something that is not a model, or a number of tokens below 1.
    """

    def __init__(self, *models: nn.Module, tokens: int = TOKENS):
        if not models or not all(isinstance(model, nn.Module) for model in models):
            raise ValueError(
                f"packed_weights packs the layers of models, but got {[type(model).__name__ for model in models]}: "
                "pass the target, and the drafter if there is one."
            )
        if tokens < 1:
            raise ValueError(f"tokens={tokens} must be the number of tokens of a typical forward, at least 1.")
        _count_steps()
        self._key = object()
        modules = dict.fromkeys(module for model in models for module in model.modules())
        self.layers = [module for module in modules if packable(module)]
        for model in models:
            warn_if_emulated(model)
        if not self.layers:
            names = ", ".join(type(model).__name__ for model in models)
            logger.warning_once(f"No linear layer of {names} can be packed.")
        try:
            with _alone():
                weights = {id(layer.weight): layer.weight for layer in self.layers}  # layers may share one
                packs = {identity: _pack_of(weight, tokens) for identity, weight in weights.items()}
                for layer in self.layers:
                    _held.setdefault(layer, {})[self._key] = packs[id(layer.weight)]
                for layer in self.layers:  # in one step: a concurrent compilation must not see a mixture
                    layer.__class__ = PackedLinear
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Restore the layers that no other call has packed. May be called again."""
        with _alone():
            for layer in self.layers:
                held = _held.get(layer, {})
                held.pop(self._key, None)
                if not held:
                    _held.pop(layer, None)
                    if type(layer) is PackedLinear:  # not if its class was changed meanwhile
                        layer.__class__ = nn.Linear
        self.layers = []

    def __enter__(self) -> "packed_weights":
        return self

    def __exit__(self, *error) -> None:
        self.restore()
