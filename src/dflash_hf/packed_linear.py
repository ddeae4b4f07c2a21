"""
Weights packed for the processor: the linear layers of models multiply by copies that oneDNN has laid out for a few
tokens at a time, which it otherwise does anew in every forward. Nothing here knows of drafters.
"""

import contextlib
import sys
import threading
import weakref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.utils import logging


logger = logging.get_logger(__name__)

_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_DTYPES = {torch.float32: "", torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
SMALLEST = 1 << 17  # weights of a layer in fp32, below which asking oneDNN takes longer than it saves

# What a weight is packed to, by its `id`: a `_Pack` keeps its weight alive, so that no other has that id meanwhile.
# Every forward looks here, those of compiled graphs too; where it finds nothing it multiplies by the weight itself.
_packs: "weakref.WeakValueDictionary[int, _Pack]" = weakref.WeakValueDictionary()
# What keeps a `_Pack` alive: each layer that has the weight, for each call that has packed the layer.
_held: "weakref.WeakKeyDictionary[nn.Linear, dict[object, _Pack]]" = weakref.WeakKeyDictionary()
_lock = threading.RLock()


@contextlib.contextmanager
def _alone():
    """
    No other thread packs, restores or compiles meanwhile; forwards go on. Dynamo reads the class of a layer once for a
    graph and again for its guards: between the two it must not change.
    """
    dynamo = sys.modules.get("torch._dynamo.convert_frame")  # nobody compiles before it is imported
    with getattr(dynamo, "compile_lock", contextlib.nullcontext()), _lock:
        yield


def _can_be_packed(weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies by such a weight here, and PyTorch counts how often it is changed."""
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES or not weight.is_contiguous():
        return False
    if weight.dim() != 2 or weight.numel() == 0:  # what ZeRO-3 and others leave of a weight that lies elsewhere
        return False
    if weight.is_inference() or (weight.dtype == torch.float32 and weight.numel() < SMALLEST):
        return False
    supported = _DTYPES[weight.dtype]
    return not supported or getattr(torch.ops.mkldnn, supported)()


_steps = 0  # of all optimizers of this process


def _count_step(optimizer, args, kwargs) -> None:
    global _steps
    if not torch.compiler.is_compiling():  # the writes of a compiled step are counted by PyTorch
        _steps += 1


# A fused step writes to weights without counting it, and so does whoever copies its result to them.
register_optimizer_step_post_hook(_count_step)


def _mark(weight: torch.Tensor) -> tuple:
    """What differs after a weight was changed in place, by an optimizer, moved, cast, or given other data."""
    version = None if weight.is_inference() else weight._version
    steps = _steps if weight.requires_grad else None
    return version, steps, weight.data_ptr(), weight.dtype, weight.shape, weight.stride()


class _Pack:
    """A weight, and the copy of it that is laid out for the processor."""

    def __init__(self, weight: nn.Parameter, tokens: int):
        self.weight, self.tokens = weight, tokens
        self.renew()

    def renew(self) -> None:
        # The mark is read first: a change that comes while the weight is read is seen by the next forward. The storage
        # is kept, so that nothing else can come to lie where it is.
        mark, storage = _mark(self.weight), self.weight.untyped_storage()
        copy = _reorder(self.weight.detach(), self.tokens) if _can_be_packed(self.weight) else None
        self.made = mark, copy, storage

    def copy(self) -> torch.Tensor | None:
        """The copy of the weight as it is now; `None` where it can no longer be packed."""
        if self.made[0] != _mark(self.weight):
            self.renew()
        return self.made[1]


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    pack = _packs.get(id(weight))
    copy = None if pack is None or x.dtype != weight.dtype else pack.copy()
    if copy is None:
        return nn.functional.linear(x, weight, bias)
    return _linear(x, copy, bias, "none", [], "")


def _shape_of_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


# `_multiply` as an operator, for graphs: no compiler reads the layout, and what is packed may change behind a graph.
_library = torch.library.Library("dflash_hf", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("packed_linear", _multiply, "CompositeExplicitAutograd")  # and if the layer is moved to a GPU
_library.impl("packed_linear", _shape_of_product, "Meta")


class PackedLinear(nn.Linear):
    """
    What an `nn.Linear` is as long as its weight is packed. Its parameters are those it had; copies and pickles of it
    are plain layers.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled("cpu") or (  # which multiplies in a type of its own
            torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (input, weight, bias))
        ):
            return nn.functional.linear(input, weight, bias)
        if torch.compiler.is_compiling():
            return torch.ops.dflash_hf.packed_linear(input, weight, bias)
        return _multiply(input, weight, bias)

    def __reduce_ex__(self, protocol):
        plain = object.__new__(nn.Linear)
        vars(plain).update(vars(self))
        return plain.__reduce_ex__(1)  # which names the class to make; later protocols take that of `self`


def packable(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer whose weight can be packed."""
    if type(module) not in (nn.Linear, PackedLinear) or "forward" in vars(module) or _linear is None:
        return False
    weight = module.weight
    return torch.backends.mkldnn.is_available() and type(weight) is nn.Parameter and _can_be_packed(weight)


class packed_weights:
    """
    Pack the linear layers of models for the processor, once, until told otherwise:

    ```python
    packed_weights(target, draft)  # for good

    with packed_weights(target, draft) as packed:  # or for a while; the same as packed.restore() in the end
        target.generate(**inputs, assistant_model=draft)
    ```

    The models compute the same, up to rounding; their parameters, state dicts, copies and pickles are as ever. The
    packed copies take as much memory as the weights. Layers that several calls have packed stay so until the last of
    them is restored. Entering and leaving is safe while other threads decode, and waits while they compile; a graph
    that was compiled before is not used after, and the other way round.

    Every forward looks whether the weight is the one that was packed, and packs again after a change in place
    (`load_state_dict`), `.to(dtype)`, other `.data` or, if it requires a gradient, a step of any optimizer. What
    cannot be packed is multiplied as ever: a parameter that has taken the place of another, inputs of another dtype,
    anything under autocast or that needs a gradient, weights made in inference mode, small layers in fp32, and all
    that is not a plain `nn.Linear` on a CPU.

    *Not* seen is a change that PyTorch does not count: values written through `weight.data`, as in `weight.data +=
    delta` (the way PEFT merges an adapter), through `weight.numpy()`, by a fused optimizer's step that was given to
    `torch.compile`, or by other processes into shared memory. After one, call again: each call packs all weights anew.

    Args:
        models (`nn.Module`): Whose layers, such as a target and its drafter, or a target alone.
        tokens (`int`): Tokens of a forward for which the layout is chosen; others are multiplied too. Of 1, 8, 16 and
            32, all but 1 were equally fast for forwards over 1 to 32 tokens, within the noise; 1 was up to a third
            slower.

    Attributes:
        layers (`list[nn.Linear]`): What was packed.

    Raises:
        `ValueError`: no models, something that is none, or a number of tokens below 1.
    """

    def __init__(self, *models: nn.Module, tokens: int = 16):
        if not models or not all(isinstance(model, nn.Module) for model in models):
            raise ValueError(
                f"packed_weights packs the layers of models, but got {[type(model).__name__ for model in models]}: "
                "pass the target, and the drafter if there is one."
            )
        if tokens < 1:
            raise ValueError(f"tokens={tokens} must be the number of tokens of a usual forward, at least 1.")
        self._key = object()
        modules = dict.fromkeys(module for model in models for module in model.modules())
        self.layers = [module for module in modules if packable(module)]
        if not self.layers:
            logger.warning_once(
                f"No linear layer of {', '.join(type(model).__name__ for model in models)} can be packed."
            )
        try:
            with _alone():
                for layer in self.layers:
                    pack = _packs.get(id(layer.weight))
                    if pack is None:
                        pack = _packs[id(layer.weight)] = _Pack(layer.weight, tokens)
                    else:
                        pack.renew()
                    _held.setdefault(layer, {})[self._key] = pack
                for layer in self.layers:  # all at once: whoever compiles meanwhile finds no mixture
                    layer.__class__ = PackedLinear
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Make plain layers of those that no other call has packed. May be called again."""
        with _alone():
            for layer in self.layers:
                held = _held.get(layer, {})
                held.pop(self._key, None)
                if not held:
                    _held.pop(layer, None)
                    if type(layer) is PackedLinear:  # and not what others have made of it meanwhile
                        layer.__class__ = nn.Linear
        self.layers = []

    def __enter__(self) -> "packed_weights":
        return self

    def __exit__(self, *error) -> None:
        self.restore()
