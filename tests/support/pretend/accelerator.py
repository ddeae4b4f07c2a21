"""The pretend accelerator: the two modes that see what a program asks of it, and what torch answers meanwhile."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from support.pretend.counts import Counts, calling_line
from support.pretend.graph import PretendGraph, PretendStream
from support.pretend.memory import HOST, Mark, as_device, device_of, mark_of, set_mark, tensors_in


# Operators that launch nothing, besides those that torch itself calls views.
_WITHOUT_KERNEL = {
    "_local_scalar_dense",
    "_unsafe_view",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "is_same_size",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "set_",
}
# Operators whose result, or its shape, the host has to know.
_WAITS = {
    "_unique2",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "repeat_interleave",  # of a tensor of counts
    "unique_consecutive",
    "unique_dim",
}
_INDEXED_READS = {"index", "_unsafe_index"}
_INDEXED_WRITES = {"index_put", "index_put_", "_index_put_impl_"}
# Operators that copy a tensor of one value on the CPU to the device; others pass it to the kernel, as an argument.
_COPIES_SCALARS = {"where", *_INDEXED_WRITES}


class PretendAccelerator:
    """
    Inside of `with PretendAccelerator() as accelerator:` there are devices `cuda:0` to `cuda:N-1`, in this thread; see
    the docstring of this package. On leaving, everything in torch is as before; tensors and models that were moved
    are ordinary ones of the CPU.

    Operators that mix devices raise a `RuntimeError`, as on CUDA. A tensor of one value on the CPU may be mixed with
    all others, and an index may be on the CPU, at the price of a copy.

    Args:
        devices (`int`): Their number.
        uncounted (`Iterable[str]`): Names of files whose lines are not counted: for example, of a drafter that is told
            what to draft.

    Attributes:
        counts ([`Counts`]): What was asked for since entering.
        generators (`tuple[torch.Generator]`): The default generator of each device, seeded by `torch.manual_seed`.
    """

    def __init__(self, devices: int = 1, uncounted: Iterable[str] = ()):
        self.devices = devices
        self.uncounted = tuple(f"{file}:" for file in uncounted)
        self.counts = Counts()
        self.generators = tuple(_Generator(torch.device("cuda", index)) for index in range(devices))
        # Where a function that is running makes new tensors; `None`: on the device of its arguments.
        self.current_device: torch.device | None = None
        self.graph: PretendGraph | None = None  # that is being captured
        self._awaited: list[Mark] = []  # memory that asynchronous copies write to

    def __enter__(self) -> "PretendAccelerator":
        self._exit = contextlib.ExitStack()
        try:
            for owner, name, replacement in self._replacements():
                self._exit.enter_context(mock.patch.object(owner, name, replacement))
            self._exit.enter_context(_Operators(self))
            self._exit.enter_context(_Functions(self))
        except BaseException:
            self._exit.close()
            raise
        return self

    def __exit__(self, *error) -> None:
        self._exit.close()

    def _replacements(self) -> list[tuple]:
        """What the modes cannot see: generators, which are no tensors, and functions that take none."""
        return [
            (torch, "Generator", _Generator),
            (torch, "Event", functools.partial(_Event, self)),
            (torch.cuda, "Event", functools.partial(_Event, self)),
            (torch.cuda, "synchronize", lambda device=None: self.wait()),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "default_generators", self.generators),
            (torch.cuda, "manual_seed_all", self._manual_seed_all),
            (torch.cuda, "CUDAGraph", functools.partial(PretendGraph, self)),
            (torch.cuda, "graph_pool_handle", lambda: (0, 0)),
            (torch.cuda, "Stream", PretendStream),
            (torch.cuda, "stream", contextlib.nullcontext),
            (torch.cuda, "current_stream", PretendStream),
        ]

    def _manual_seed_all(self, seed: int) -> None:
        for generator in self.generators:
            generator.manual_seed(seed)

    # ------------------------------------------------------------------------------------------------------- counting

    def is_counted(self, line: str) -> bool:
        """Whether a line of code is counted."""
        return not any(file in line for file in self.uncounted)

    def note(self, *kinds: str) -> None:
        """
        Count what the current line asks for, once in each of these kinds: names of attributes of [`Counts`].

        Raises:
            `RuntimeError`: a graph is being captured, which holds no waits and no copies from the host.
        """
        line = calling_line()
        forbidden = {"waits", "from_host", "to_host"} & set(kinds)
        if self.graph is not None and forbidden:
            raise RuntimeError(f"operation not permitted when stream is capturing: {', '.join(forbidden)} at {line}")
        if not self.is_counted(line):
            return
        for kind in kinds:
            getattr(self.counts, kind)[line] += 1

    def wait(self) -> None:
        """The host waits for everything that was launched."""
        self.note("waits")
        self._arrive()

    def _arrive(self) -> None:
        for mark in self._awaited:
            mark.is_awaited = False
        self._awaited.clear()

    @property
    def is_awaiting(self) -> bool:
        """Whether there are asynchronous copies to the host for which it has not waited."""
        return bool(self._awaited)

    def check_arrived(self, tensor: torch.Tensor) -> None:
        """
        Raises:
            `RuntimeError`: a copy to this memory may not have ended.
        """
        mark = mark_of(tensor)
        if mark is not None and mark.is_awaited:
            raise RuntimeError(
                f"{calling_line()} reads memory of the host that an asynchronous copy writes to: wait for it first, "
                "for example with `Event.synchronize()`."
            )

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as the host reads it, from any device."""
        if device_of(tensor) == HOST:
            self.check_arrived(tensor)
        else:
            self.note("to_host", "waits")
            self._arrive()
        return tensor

    # ---------------------------------------------------------------------------------------------------------- moves

    def move(
        self,
        tensor: torch.Tensor,
        device: torch.device,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> torch.Tensor:
        """A copy on another device. It is converted before it is copied, as on CUDA."""
        source = device_of(tensor)
        with self.running_on(source):
            if dtype is not None:
                tensor = tensor.to(dtype)
        with self.running_on(device):
            copied = torch.empty_like(tensor, memory_format=memory_format or torch.preserve_format)
        if device == HOST and non_blocking:
            set_mark(copied, HOST, is_pinned=True)  # torch allocates pinned memory here
        return copied.copy_(tensor, non_blocking)

    def count_copy(self, destination: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        """Count a copy between two devices, one of which may be the host. An empty one does nothing."""
        if destination.numel() == 0:
            return
        devices = device_of(source), device_of(destination)
        if HOST not in devices:
            self.note("between_devices")
            return
        kind = "from_host" if devices[0] == HOST else "to_host"
        host_mark = mark_of(source if devices[0] == HOST else destination)
        is_asynchronous = non_blocking and host_mark is not None and host_mark.is_pinned
        if not is_asynchronous:
            self.note(kind, "waits")
            self._arrive()
            return
        self.note(kind)
        if kind == "to_host":
            host_mark.is_awaited = True
            self._awaited.append(host_mark)

    @contextlib.contextmanager
    def running_on(self, device: torch.device | None) -> Iterator[None]:
        """In this context, functions make new tensors on a device."""
        before = self.current_device
        self.current_device = device
        try:
            yield
        finally:
            self.current_device = before


class _Generator(torch.Generator):
    """A generator of any device: that of the CPU, which says that it is elsewhere."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")

    def __init__(self, device="cpu"):
        self._device = as_device(device)

    @property
    def device(self) -> torch.device:
        return self._device


class _Event:
    """An event of a stream; whatever was launched before has ended by the time that the host asks."""

    def __init__(self, accelerator: PretendAccelerator, *args, **kwargs):
        self._accelerator = accelerator

    def record(self, stream=None) -> None:
        """Nothing: there is one stream, and it is always up to date."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._accelerator.wait()


# ----------------------------------------------------------------------------------------------------------- functions


class _Functions(TorchFunctionMode):
    """
    Sees each function and method of torch that Python code calls. It answers questions about devices, moves tensors
    between them, and sets where all other functions make new tensors.
    """

    def __init__(self, accelerator: PretendAccelerator):
        self.accelerator = accelerator

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self.accelerator, func, *args, **kwargs)
        if getattr(func, "__name__", None) == "__get__":  # an attribute, such as `shape`
            return func(*args, **kwargs)
        device = kwargs.get("device")
        if device is not None:
            device = as_device(device)
            kwargs = {**kwargs, "device": HOST if device.type == "cuda" else device}
        else:
            device = _device_among((*args, *kwargs.values()))
        is_pinned = kwargs.get("pin_memory", False)
        if is_pinned:
            kwargs = {**kwargs, "pin_memory": False}
        with self.accelerator.running_on(device):
            result = func(*args, **kwargs)
        return set_mark(result, HOST, is_pinned=True) if is_pinned else result


def _device_among(values: Iterable) -> torch.device | None:
    """The first device other than the host of the tensors among some arguments, and in their lists; or `None`."""
    for value in values:
        if isinstance(value, torch.Tensor):
            device = device_of(value)
            if device != HOST:
                return device
        elif isinstance(value, list | tuple):
            device = _device_among(value)
            if device is not None:
                return device
    return None


def _device(accelerator, func, tensor):
    return device_of(tensor)


def _is_cuda(accelerator, func, tensor):
    return device_of(tensor).type == "cuda"


def _is_cpu(accelerator, func, tensor):
    return device_of(tensor).type == "cpu"


def _get_device(accelerator, func, tensor):
    device = device_of(tensor)
    return -1 if device == HOST else device.index


def _to(accelerator, func, tensor, *args, copy: bool = False, **kwargs):
    """`Tensor.to`, with all of its signatures."""
    if "other" in kwargs:
        args = (kwargs.pop("other"), *args)
    if args and isinstance(args[0], torch.Tensor):
        args = (device_of(args[0]), args[0].dtype, *args[1:])
    if args and isinstance(args[0], int):
        args = (as_device(args[0]), *args[1:])
    if len(args) > 2 and isinstance(args[0], torch.dtype):  # dtype, non_blocking, copy
        copy = copy or args[2]
        args = args[:2]
    elif len(args) > 3:  # device, dtype, non_blocking, copy
        copy = copy or args[3]
        args = args[:3]
    if isinstance(kwargs.get("device"), int):
        kwargs["device"] = as_device(kwargs["device"])
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    source = device_of(tensor)
    device = source if device is None else as_device(device)
    if device != source and "meta" not in (device.type, source.type):
        return accelerator.move(tensor, device, dtype, non_blocking, memory_format)
    where = {"device": device} if "meta" in (device.type, source.type) else {}
    with accelerator.running_on(source):
        form = memory_format or torch.preserve_format
        return func(tensor, dtype=dtype or tensor.dtype, copy=copy, memory_format=form, **where)


def _cpu(accelerator, func, tensor, memory_format=None):
    return _to(accelerator, torch.Tensor.to, tensor, HOST, memory_format=memory_format)


def _cuda(accelerator, func, tensor, device=None, non_blocking=False, memory_format=None):
    device = as_device("cuda" if device is None else device)
    return _to(accelerator, torch.Tensor.to, tensor, device, non_blocking=non_blocking, memory_format=memory_format)


def _tolist(accelerator, func, tensor):
    return func(accelerator.read(tensor))


def _numpy(accelerator, func, tensor, *args, **kwargs):
    if device_of(tensor) != HOST:
        raise TypeError(f"can't convert {device_of(tensor)} device type tensor to numpy. Use Tensor.cpu() first.")
    return func(accelerator.read(tensor), *args, **kwargs)


def _pin_memory(accelerator, func, tensor, device=None):
    if device_of(tensor) != HOST:
        raise RuntimeError(f"cannot pin a tensor on {device_of(tensor)}: only memory of the host can be pinned")
    return tensor if _is_pinned(accelerator, func, tensor) else set_mark(tensor.clone(), HOST, is_pinned=True)


def _is_pinned(accelerator, func, tensor, device=None):
    mark = mark_of(tensor)
    return mark is not None and mark.is_pinned


def _from_data(accelerator, func, data, *args, device=None, pin_memory=False, **kwargs):
    """`torch.tensor` and the like: made on the host, then copied."""
    if isinstance(data, torch.Tensor) and device is None:
        device = device_of(data)
    with accelerator.running_on(_device_among([data])):
        made = func(data, *args, **kwargs)
    if pin_memory:
        set_mark(made, HOST, is_pinned=True)
    device = HOST if device is None else as_device(device)
    return made if device == device_of(made) else accelerator.move(made, device)


def _new_tensor(accelerator, func, tensor, data, dtype=None, device=None, **kwargs):
    device = device_of(tensor) if device is None else device
    dtype = tensor.dtype if dtype is None else dtype
    return _from_data(accelerator, torch.tensor, data, dtype=dtype, device=device, **kwargs)


_SPECIAL: dict[Callable, Callable] = {
    torch.Tensor.device.__get__: _device,
    torch.Tensor.is_cuda.__get__: _is_cuda,
    torch.Tensor.is_cpu.__get__: _is_cpu,
    torch.Tensor.get_device: _get_device,
    torch.Tensor.to: _to,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.tolist: _tolist,
    torch.Tensor.numpy: _numpy,
    torch.Tensor.__array__: _numpy,
    torch.Tensor.pin_memory: _pin_memory,
    torch.Tensor.is_pinned: _is_pinned,
    torch.Tensor.new_tensor: _new_tensor,
    torch.tensor: _from_data,
    torch.as_tensor: _from_data,
    torch.asarray: _from_data,
}


# ----------------------------------------------------------------------------------------------------------- operators


class _Operators(TorchDispatchMode):
    """
    Sees each operator that runs, also those inside of functions of torch. It rejects operators that mix devices, marks
    the memory of results, and counts.
    """

    def __init__(self, accelerator: PretendAccelerator):
        super().__init__()
        self.accelerator = accelerator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _is_composite(func):  # in inference mode operators arrive whole, else in parts
            with self:
                return func.decompose(*args, **kwargs)
        accelerator = self.accelerator
        name = func.overloadpacket.__name__
        tensors = list(tensors_in((*args, *kwargs.values())))
        if accelerator.is_awaiting:
            for tensor in tensors:
                accelerator.check_arrived(tensor)
        devices = [device_of(tensor) for tensor in tensors]
        if name == "copy_" and devices[0] != devices[1]:
            accelerator.count_copy(args[0], args[1], bool(args[2]) if len(args) > 2 else False)
            return func(*args, **kwargs)
        if name == "_foreach_copy_" and len(set(devices)) > 1:  # on several devices torch copies one after another
            with self:
                for destination, source in zip(*args[:2]):
                    destination.copy_(source)
            return None
        device = self._device_of(name, tensors, devices)
        if _makes_tensors(func) and accelerator.current_device is not None:
            device = accelerator.current_device
        if device == HOST or device.type == "meta":
            return func(*args, **kwargs)

        if _takes_generator(func) and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": accelerator.generators[device.index]}
        self._count_waits(name, args, kwargs)
        if accelerator.graph is not None and not func.is_view and name not in _WITHOUT_KERNEL:
            result = accelerator.graph.run(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        results = list(tensors_in((result,)))
        for tensor in results:
            if mark_of(tensor) is None:
                set_mark(tensor, device)
        if accelerator.graph is None and _launches(func, name, results):
            accelerator.note("kernels")
        return result

    @staticmethod
    def _device_of(name: str, tensors: list[torch.Tensor], devices: list[torch.device]) -> torch.device:
        """
        Where an operator runs whose tensors are on these devices.

        Raises:
            `RuntimeError`: they are on several.
        """
        accelerators = {device for device in devices if device != HOST}
        if not accelerators:
            return HOST
        is_index = name in _INDEXED_READS | _INDEXED_WRITES and devices[0] != HOST
        is_mixed = any(device == HOST and tensor.dim() > 0 for tensor, device in zip(tensors, devices))
        if len(accelerators) > 1 or (is_mixed and not is_index):
            names = " and ".join(sorted({str(device) for device in devices}))
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {name} got tensors on {names} at "
                f"{calling_line()}."
            )
        return accelerators.pop()

    def _count_waits(self, name: str, args: tuple, kwargs: dict) -> None:
        """Count what an operator on a device does besides its kernel."""
        accelerator = self.accelerator
        if name == "_local_scalar_dense":
            accelerator.read(args[0])
        elif name in _WAITS and not (name == "repeat_interleave" and kwargs.get("output_size") is not None):
            accelerator.wait()
        if name in _COPIES_SCALARS:
            arguments = args if name == "where" else args[2:3]
            for tensor in tensors_in(arguments):
                if device_of(tensor) == HOST and not _fills_by_mask(name, args):
                    accelerator.note("from_host", "waits")
        if name in _INDEXED_READS | _INDEXED_WRITES:
            indices = [index for index in args[1] if index is not None]
            for index in indices:
                if device_of(index) == HOST:
                    accelerator.note("from_host", "waits")
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices) and not _fills_by_mask(name, args):
                accelerator.wait()  # for the number of places


def _fills_by_mask(name: str, args: tuple) -> bool:
    """Whether a write `x[mask] = 0` is a `masked_fill`, which does not need to know how many places there are."""
    if name not in _INDEXED_WRITES:
        return False
    value = args[2]
    masks = [index for index in args[1] if index is not None]
    return value.numel() == 1 and device_of(value) == HOST and len(masks) == 1 and masks[0].dtype == torch.bool


@functools.cache
def _is_composite(func) -> bool:
    """Whether an operator is made of others on every device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@functools.cache
def _makes_tensors(func) -> bool:
    """Whether an operator takes the device of its result."""
    return any(argument.name == "device" for argument in func._schema.arguments)


@functools.cache
def _takes_generator(func) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


def _launches(func, name: str, results: list[torch.Tensor]) -> bool:
    """Whether an operator on a device launches a kernel."""
    if func.is_view or name in _WITHOUT_KERNEL:
        return False
    return name == "equal" or any(tensor.numel() > 0 for tensor in results)
