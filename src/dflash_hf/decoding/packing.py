"""
Weights packed for the processor: linear layers multiply by copies that are laid out for a few tokens at a time,
instead of repeating the layout in every forward. In bf16 and fp16, oneDNN packs them and multiplies; in fp32, MKL does
where PyTorch was built with it.

The life of a layer:

1. *Plain*: an `nn.Linear`.
2. *Packed*: [`packed_weights`] makes a `_Pack` of its weight and sets its class to [`PackedLinear`], whose forward
   multiplies by the packed copy. Its parameters stay as they are.
3. *Packed, not used*: a forward that the copy does not serve (a single token in fp32, autocast, gradients, another
   dtype) multiplies by the weight itself.
4. *Changed*: the weight was written since it was packed. The next forward notices, and packs it again; if it cannot be
   packed any more, it multiplies by the weight itself from then on.
5. *Plain again*: the last `packed_weights` that has packed it is restored.
"""

import contextlib
import functools
import itertools
import sys
import threading
import weakref
from typing import NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.utils import logging

from dflash_hf.decoding.cpu_dtypes import SUPPORT_QUERIES, is_emulated, warn_if_emulated
from dflash_hf.targets.memory import free_memory


logger = logging.get_logger(__name__)

_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
# MKL, which PyTorch multiplies fp32 by on x86: its layout multiplies 2 to 16 tokens in 0.7 to 0.8 of the time of
# oneDNN's (Xeon, with AVX2 and with AVX-512; `examples/benchmarks/results/avx2.md`).
_mkl_linear = getattr(torch.ops.mkl, "_mkl_linear", None) if torch.backends.mkl.is_available() else None
_mkl_reorder = getattr(torch.ops.mkl, "_mkl_reorder_linear_weight", None)
DEFAULT_TOKENS = 16  # of a forward, for which the layout is optimised
# For which MKL's layout is optimised at least: one for 16 tokens is 1.2x as slow for 32, and no faster for fewer.
MIN_MKL_TOKENS = 64
# Of an fp32 layer; below, calling the library takes longer than it saves.
MIN_FP32_WEIGHTS = 1 << 17 if _mkl_linear is None else 1 << 14

# Who owns what. A `packed_weights` keeps the `_Pack`s of its layers alive through `_owners`. A `_Pack` keeps its
# weight alive, so that the weight's `id`, by which `_packs` finds it, stays unique. When the last owner has restored a
# layer, its `_Pack` disappears from `_packs`. Every forward looks its weight up there, in compiled graphs too; without
# a `_Pack` it multiplies by the weight itself.
_packs: "weakref.WeakValueDictionary[int, _Pack]" = weakref.WeakValueDictionary()
# Layer -> the key of each `packed_weights` that has packed it -> its `_Pack`.
_owners: "weakref.WeakKeyDictionary[nn.Linear, dict[object, _Pack]]" = weakref.WeakKeyDictionary()
_lock = threading.RLock()


@contextlib.contextmanager
def _exclusive():
    """
    Meanwhile no other thread packs, restores or compiles; forwards continue. Dynamo reads the class of a layer for a
    graph and again for its guards: it must not change between the two.
    """
    dynamo = sys.modules.get("torch._dynamo.convert_frame")  # nothing compiles before it is imported
    with getattr(dynamo, "compile_lock", contextlib.nullcontext()), _lock:
        yield


def _can_be_packed(weight: torch.Tensor) -> bool:
    """Whether a library supports such a weight here, and PyTorch counts its changes."""
    if weight.device.type != "cpu" or weight.dtype not in SUPPORT_QUERIES or not weight.is_contiguous():
        return False
    if weight.dim() != 2 or weight.numel() == 0:  # placeholders of ZeRO-3 and others for a weight stored elsewhere
        return False
    if weight.is_inference() or (weight.dtype == torch.float32 and weight.numel() < MIN_FP32_WEIGHTS):
        return False
    return not is_emulated(weight.dtype)


_optimizer_steps = 0  # of all optimizers in this process


def _count_optimizer_step(optimizer, args, kwargs) -> None:
    global _optimizer_steps
    if not torch.compiler.is_compiling():  # PyTorch counts the writes of a compiled step
        _optimizer_steps += 1


@functools.cache
def _count_optimizer_steps() -> None:
    """
    Install a hook that counts optimizer steps, once in a process: PyTorch counts neither the writes of a fused step
    nor those that copy its result to weights.
    """
    register_optimizer_step_post_hook(_count_optimizer_step)


def _fingerprint(weight: torch.Tensor) -> tuple:
    """Differs after a weight was changed in place or by an optimizer, moved, cast, or given other data."""
    writes = None if weight.is_inference() else weight._version
    steps = _optimizer_steps if weight.requires_grad else None
    return writes, steps, weight.data_ptr(), weight.dtype, weight.shape, weight.stride()


class _PackedCopy(NamedTuple):
    """A copy of a weight that is laid out for the processor."""

    version: tuple  # of the weight when it was copied
    tensor: torch.Tensor | None  # `None`: the weight can no longer be packed
    storage: torch.UntypedStorage  # of the weight; kept alive so that nothing else is allocated at its address


class _Pack:
    """
    A weight and its packed copy, which may be renewed by any thread: the copy is replaced as a whole. If two threads
    renew it at once, both copy the same weight, and one copy is dropped.
    """

    def __init__(self, weight: nn.Parameter, tokens: int):
        self.weight = weight
        self.renew(tokens)

    def renew(self, tokens: int) -> None:
        """Pack the current weight, for forwards over `tokens` tokens."""
        self.tokens = tokens
        # First: a change while the weight is copied is detected by the next forward.
        version = _fingerprint(self.weight)
        storage = self.weight.untyped_storage()
        tensor = _packed_copy_of(self.weight.detach(), tokens) if _can_be_packed(self.weight) else None
        self.packed_copy = _PackedCopy(version, tensor, storage)

    def current(self) -> torch.Tensor | None:
        """The packed copy of the current weight; `None` if it can no longer be packed."""
        if self.packed_copy.version != _fingerprint(self.weight):
            self.renew(self.tokens)
        return self.packed_copy.tensor


def _is_packed_by_mkl(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and _mkl_linear is not None


def _packed_copy_of(weight: torch.Tensor, tokens: int) -> torch.Tensor:
    """A copy of a weight in the layout of the library that multiplies its dtype, for forwards over `tokens` tokens."""
    if _is_packed_by_mkl(weight.dtype):
        return _mkl_reorder(weight, max(tokens, MIN_MKL_TOKENS))
    return _reorder(weight, tokens)


def _multiply_packed(
    x: torch.Tensor, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply by the packed copy of a weight."""
    if _is_packed_by_mkl(weight.dtype):
        num_tokens = x.numel() // x.shape[-1]  # another number would be multiplied by the weight itself
        return _mkl_linear(x, packed, weight, bias, num_tokens)
    return _linear(x, packed, bias, "none", [], "")


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    pack = _packs.get(id(weight))
    # In fp32 oneDNN's layout makes a single token up to 1.7x as slow (AMD EPYC: equally fast, or 1.15x as slow with
    # AVX2); with MKL's it is as fast as with the weight itself.
    is_single_fp32 = x.dtype == torch.float32 and x.numel() == x.shape[-1]
    packed = None
    if pack is not None and not is_single_fp32 and x.dtype == weight.dtype:
        packed = pack.current()
    if packed is None:
        return nn.functional.linear(x, weight, bias)
    return _multiply_packed(x, packed, weight, bias)


def _shape_of_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _unused_operator_name() -> str:
    """
    A name under which no operator is registered: one can be registered once in a process, but this file may be loaded
    several times.
    """
    names = (f"packed_linear_{number}" for number in itertools.count())
    return next(name for name in names if not hasattr(torch.ops.dflash_hf, name))


# `_multiply` as an operator, for graphs: no compiler can read the layout, and packs may change after compilation.
_operator_name = _unused_operator_name()
_library = torch.library.Library("dflash_hf", "FRAGMENT")
_library.define(f"{_operator_name}(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl(_operator_name, _multiply, "CompositeExplicitAutograd")  # on a GPU too, if the layer is moved there
_library.impl(_operator_name, _shape_of_product, "Meta")
_operator = getattr(torch.ops.dflash_hf, _operator_name)


class PackedLinear(nn.Linear):
    """
    The class of an `nn.Linear` while its weight is packed. Its parameters are unchanged; copies and pickles of it are
    plain layers.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        bias = self.bias
        tensors = (input, weight, bias)
        needs_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        if needs_gradient or torch.is_autocast_enabled("cpu"):  # autocast multiplies in its own dtype
            return nn.functional.linear(input, weight, bias)
        if torch.compiler.is_compiling():
            return _operator(input, weight, bias)
        return _multiply(input, weight, bias)

    def __reduce_ex__(self, protocol):
        plain = object.__new__(nn.Linear)
        vars(plain).update(vars(self))
        return plain.__reduce_ex__(1)  # protocol 1 stores the class of `plain`; later ones that of `self`


def packable(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer whose weight can be packed."""
    if type(module) not in (nn.Linear, PackedLinear) or "forward" in vars(module) or _linear is None:
        return False
    weight = module._parameters.get("weight")  # no parameter if the weight is computed, as by parametrizations
    return torch.backends.mkldnn.is_available() and type(weight) is nn.Parameter and _can_be_packed(weight)


def fit_memory(layers: list[nn.Linear]) -> bool:
    """Whether packed copies of layers take less than a third of the free memory."""
    return sum(layer.weight.nbytes for layer in layers) < free_memory(torch.device("cpu")) / 3


def _pack_of(weight: nn.Parameter, tokens: int) -> _Pack:
    """The pack of a weight, renewed: the weight may have been changed in a way that PyTorch does not count."""
    pack = _packs.get(id(weight))
    if pack is None:
        pack = _Pack(weight, tokens)
        _packs[id(weight)] = pack
    else:
        pack.renew(tokens)
    return pack


class packed_weights:  # lower case, as `torch.no_grad`
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
    `torch.compile`, or by other processes into shared memory. After such a change, pack again: each call packs the
    current weights.

    Args:
        models (`nn.Module`): Models whose layers to pack, such as a target and its drafter, or only a target.
        tokens (`int`): Tokens per forward for which the layout is optimised; other numbers work too. In bf16, of 1, 8,
            16 and 32 all but 1 were equally fast for forwards over 1 to 32 tokens, within noise; 1 was up to a third
            slower. MKL's layout (fp32) is optimised for 64 or more.

    Attributes:
        layers (`list[nn.Linear]`): The packed layers.

    Raises:
        `ValueError`: no models, something that is not a model, or a number of tokens below 1.
    """

    def __init__(self, *models: nn.Module, tokens: int = DEFAULT_TOKENS):
        if not models or not all(isinstance(model, nn.Module) for model in models):
            raise ValueError(
                f"packed_weights packs the layers of models, but got {[type(model).__name__ for model in models]}: "
                "pass the target, and the drafter if there is one."
            )
        if tokens < 1:
            raise ValueError(f"tokens={tokens} must be the number of tokens of a typical forward, at least 1.")
        _count_optimizer_steps()
        self._key = object()
        modules = dict.fromkeys(module for model in models for module in model.modules())
        self.layers = [module for module in modules if packable(module)]
        for model in models:
            warn_if_emulated(model)
        if not self.layers:
            names = ", ".join(type(model).__name__ for model in models)
            logger.warning_once(f"No linear layer of {names} can be packed.")
        try:
            with _exclusive():
                weights = {id(layer.weight): layer.weight for layer in self.layers}  # layers may share one
                packs = {weight_id: _pack_of(weight, tokens) for weight_id, weight in weights.items()}
                for layer in self.layers:
                    _owners.setdefault(layer, {})[self._key] = packs[id(layer.weight)]
                for layer in self.layers:  # in one step: a concurrent compilation must not see a mixture
                    layer.__class__ = PackedLinear
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Restore the layers that no other call has packed. May be called again."""
        with _exclusive():
            for layer in self.layers:
                packs = _owners.get(layer, {})
                packs.pop(self._key, None)
                if not packs:
                    _owners.pop(layer, None)
                    if type(layer) is PackedLinear:  # not if its class was changed meanwhile
                        layer.__class__ = nn.Linear
        self.layers = []

    def __enter__(self) -> "packed_weights":
        return self

    def __exit__(self, *error) -> None:
        self.restore()
