"""Requests for a CUDA device, which get the CPU: moves, factories, saved files, autocast, loss scalers, loaders.

A request means the CPU whoever passes it on: on a machine without GPUs no code of torch makes one by itself, so the
device is the script's. Devices that a script makes keep their type and index, and tensors say that they are on the
CPU.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType

import torch
import torch.utils._device
import torch.utils.data.dataloader
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from smp_core.torch.cuda_stand_in import answers
from smp_core.torch.cuda_stand_in.views import inside

_CPU = torch.device("cpu")
_Device, _Generator = torch.device, torch.Generator


def host(device: object) -> object:
    """The CPU in place of a CUDA device, which may be a name, a number or an object; anything else as it is."""
    if isinstance(device, str):
        if not device.startswith(("cuda", "gpu")):
            return device
        answers.index_of(device)
    elif isinstance(device, _Device):
        if device.type != "cuda":
            return device
        answers.checked(device.index)
    elif type(device) is int:
        if device >= 0:  # -1 is what a tensor of the CPU answers to get_device()
            answers.checked(device)
    else:
        return device
    return _CPU


def _type_name(name: str) -> str:
    return "cpu" if name.partition(":")[0] in ("cuda", "gpu") else name


# Devices and generators


class _Posing(type):
    """The class of classes that stand for one of torch's, which cannot be derived from: calls make objects of torch's
    class, and these are instances.
    """

    truth: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.truth)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.truth)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.truth

    def __hash__(cls) -> int:
        return hash(cls.truth)

    def __getattr__(cls, name: str) -> object:
        return getattr(cls.truth, name)


def _posing(truth: type, make: Callable[..., object]) -> type:
    posing = _Posing(truth.__name__, (), {"truth": truth, "__new__": make})
    posing.__module__, posing.__qualname__ = truth.__module__, truth.__qualname__
    return posing


def _make_device(_: type, *args: str | int, **kwargs: str | int) -> torch.device:
    """``torch.device(...)``, where ``"gpu"`` and a bare number mean a CUDA device."""
    if args:
        first = args[0]
        if isinstance(first, str) and first.startswith("gpu"):
            first = f"cuda{first[3:]}"
        elif type(first) is int:
            first = f"cuda:{first}"
        args = (first, *args[1:])
    return _Device(*args, **kwargs)


def _make_generator(_: type, device: str | torch.device | int = "cpu") -> torch.Generator:
    return _Generator("cpu" if host(device) is _CPU else device)


# Factories


def factories() -> Iterator[tuple[ModuleType, str]]:
    """The functions of torch that take ``device=``, by module and name: those that torch lists, and those that take
    another tensor's device by default.
    """
    names = {function: name for name, function in vars(torch).items() if callable(function)}
    for function in torch.utils._device._device_constructors():
        if function in names:
            yield torch, names[function]
    yield from ((torch.fft, "fftfreq"), (torch.fft, "rfftfreq"), (torch.nested, "nested_tensor"))
    for kind in ("empty", "full", "ones", "rand", "randint", "randn", "zeros"):
        yield torch, f"{kind}_like"


def on_host(function: Callable[..., object]) -> Callable[..., object]:
    """The factory, with the CPU in place of a CUDA device, and memory that is not pinned."""

    @functools.wraps(function)
    def make(*args: object, **kwargs: object) -> object:
        if "device" in kwargs:
            kwargs["device"] = host(kwargs["device"])
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return make


# Moves. Each takes the function that it replaces.


def _move(original: Callable[..., object]) -> Callable[..., object]:
    def to(self: object, *args: object, **kwargs: object) -> object:
        if args:
            device = host(args[0])
            if device is not args[0]:
                args = (device, *args[1:])
        if "device" in kwargs:
            kwargs["device"] = host(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _cuda(original: Callable[..., object]) -> Callable[..., object]:
    def cuda(
        self: torch.Tensor,
        device: object = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> object:
        answers.index_of(device)
        return self if memory_format is None else self.to(memory_format=memory_format)

    return cuda


def _itself(original: Callable[..., object]) -> Callable[..., object]:
    def pin_memory(self: object, device: object = None) -> object:
        return self

    return pin_memory


def _record_stream(original: Callable[..., object]) -> Callable[..., object]:
    def record_stream(self: object, stream: object) -> None:
        """Nothing is to be recorded: a tensor's memory is free once the tensor is."""

    return record_stream


def _cast(original: Callable[..., object]) -> Callable[..., object]:
    def type(self: object, dtype: object = None, *args: object, **kwargs: object) -> object:
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return original(self, dtype, *args, **kwargs)

    return type


# Constructors


def _first_device(original: Callable[..., object]) -> Callable[..., object]:
    """For ``torch.utils._device.DeviceContext``: ``with torch.device(...)`` and ``torch.set_default_device``."""

    def __init__(self: object, device: object) -> None:
        original(self, host(device))

    return __init__


def _cpu_loader(original: Callable[..., object]) -> Callable[..., object]:
    """For the iterator of a DataLoader, which pins no memory."""

    def __init__(self: object, loader: DataLoader[object]) -> None:
        pinned, loader.pin_memory = loader.pin_memory, False
        try:
            original(self, loader)
        finally:
            loader.pin_memory = pinned

    return __init__


def _cpu_scaler(original: Callable[..., object]) -> Callable[..., object]:
    """For ``torch.amp.GradScaler``, whose default device is ``"cuda"``."""

    def __init__(self: object, device: str = "cuda", *args: object, **kwargs: object) -> None:
        original(self, _type_name(device), *args, **kwargs)

    return __init__


def _cpu_autocast(original: Callable[..., object]) -> Callable[..., object]:
    """For ``torch.autocast``. The default dtype stays the one of CUDA, and so does what torch asks for by itself:
    ``torch.utils.checkpoint`` restores the state of all kinds of devices.
    """

    def __init__(
        self: object, device_type: str, dtype: object = None, *args: object, **kwargs: object
    ) -> None:
        caller = sys._getframe(1)
        by_script = (
            not inside(caller) or caller.f_globals["__name__"] == "torch.cuda.amp.autocast_mode"
        )
        if by_script and isinstance(device_type, str) and _type_name(device_type) != device_type:
            dtype = torch.get_autocast_dtype("cuda") if dtype is None else dtype
            device_type = "cpu"
        original(self, device_type, dtype, *args, **kwargs)

    return __init__


def _cpu_replica(original: Callable[..., object]) -> Callable[..., object]:
    """For ``DistributedDataParallel``, which takes no device numbers for a module of the CPU."""
    signature = inspect.signature(original)

    def __init__(*args: object, **kwargs: object) -> None:
        given = signature.bind(*args, **kwargs)
        given.arguments.pop("device_ids", None)
        given.arguments.pop("output_device", None)
        original(*given.args, **given.kwargs)

    return __init__


_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")

#: A function of the one that it replaces.
Wrap = Callable[[Callable[..., object]], Callable[..., object]]

#: Methods of torch's classes that are replaced for everyone.
METHODS: tuple[tuple[type, str, Wrap], ...] = (
    (torch.Tensor, "to", _move),
    (torch.Tensor, "cuda", _cuda),
    (torch.Tensor, "pin_memory", _itself),
    (torch.Tensor, "record_stream", _record_stream),
    (torch.Tensor, "type", _cast),
    *((torch.Tensor, name, on_host) for name in _NEW),
    (torch.nn.Module, "to", _move),
    (torch.UntypedStorage, "cuda", _cuda),
    (torch.UntypedStorage, "to", _move),
    (torch.UntypedStorage, "pin_memory", _itself),
    (torch.TypedStorage, "cuda", _cuda),
    (torch.TypedStorage, "to", _move),
    (torch.TypedStorage, "pin_memory", _itself),
    (torch.utils._device.DeviceContext, "__init__", _first_device),
    (torch.utils.data.dataloader._BaseDataLoaderIter, "__init__", _cpu_loader),
    (torch.amp.GradScaler, "__init__", _cpu_scaler),
    (torch.autocast, "__init__", _cpu_autocast),
    (DistributedDataParallel, "__init__", _cpu_replica),
)


@contextlib.contextmanager
def replaced(owner: type, name: str, wrap: Wrap) -> Iterator[None]:
    """While entered, the class has the wrapped method; afterwards its namespace is as it was."""
    own = vars(owner).get(name)
    setattr(owner, name, functools.wraps(getattr(owner, name))(wrap(getattr(owner, name))))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextlib.contextmanager
def moving_lazy_parameters() -> Iterator[None]:
    """While entered, parameters without a shape allow the moves that replace torch's, as they allow torch's."""
    allowed: list[object] = vars(torch.nn.parameter)["UninitializedTensorMixin"]._allowed_methods
    moves = [torch.Tensor.to, torch.Tensor.cuda]
    allowed.extend(moves)
    try:
        yield
    finally:
        for move in moves:
            allowed.remove(move)


# Saved files


_Storage = torch.types.Storage | torch.TypedStorage | torch.UntypedStorage


def _locate(storage: object) -> None:
    """Nothing is saved as being on a GPU."""


def _restore(storage: _Storage, location: str) -> _Storage | None:
    """A storage that was on a GPU, or shall be moved to one, stays on the CPU."""
    return None if host(location) is location else storage


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """While entered, ``torch.load`` and ``map_location`` take CUDA devices for the CPU."""
    registry = torch.serialization._package_registry
    entry = (5, _locate, _restore)  # before torch's own, which have 10 and more
    registry.insert(0, entry)
    try:
        yield
    finally:
        registry.remove(entry)


# Names in the modules that a script reads


def _get_autocast(name: str) -> Callable[..., object]:
    """``torch.is_autocast_enabled`` and its like, whose device is CUDA unless they are told another."""
    original = getattr(torch, name)

    @functools.wraps(original)
    def get(*args: object) -> object:
        if args and isinstance(args[0], str):
            return original(_type_name(args[0]), *args[1:])
        return original("cpu", *args)  # the older form, without a device

    return get


def _custom(original: Callable[..., object]) -> Callable[..., object]:
    """``torch.amp.custom_fwd`` and ``custom_bwd``, for autocast as a script sees it."""

    @functools.wraps(original)
    def decorate(function: object = None, *, device_type: str = "cuda", **kwargs: object) -> object:
        return original(function, device_type=_type_name(device_type), **kwargs)

    return decorate


def _set_default_tensor_type(kind: str | type[torch.Tensor]) -> None:
    torch.set_default_tensor_type(
        kind.replace("torch.cuda.", "torch.") if isinstance(kind, str) else kind
    )


def _fork_rng(devices: object = None, enabled: bool = True, **_: object) -> object:
    """``torch.random.fork_rng``: all devices have the CPU's generator, which is forked anyway."""
    return torch.random.fork_rng((), enabled)


def _names_of(source: object, *names: str) -> dict[str, object]:
    return {name: getattr(source, name) for name in names}


_MEMORY = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached",
    "max_memory_cached", "memory_stats", "memory_stats_as_nested_dict", "memory_summary", "memory_snapshot",
    "mem_get_info", "list_gpu_processes", "reset_peak_memory_stats", "reset_accumulated_memory_stats",
    "reset_max_memory_allocated", "reset_max_memory_cached", "set_per_process_memory_fraction", "empty_cache",
)  # fmt: skip
_RANDOM = (
    "manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed", "get_rng_state", "get_rng_state_all",
    "set_rng_state", "set_rng_state_all",
)  # fmt: skip
_DEVICES = (
    "is_available", "is_initialized", "init", "device_count", "current_device", "set_device", "device", "device_of",
    "get_device_name", "get_device_capability", "get_device_properties", "get_arch_list", "is_bf16_supported",
    "is_tf32_supported", "can_device_access_peer", "ipc_collect", "synchronize", "utilization", "memory_usage",
    "Stream", "StreamContext", "Event", "stream", "current_stream", "default_stream", "set_stream",
    "is_current_stream_capturing", "cudart",
)  # fmt: skip


def _old_types() -> dict[str, object]:
    """``torch.cuda.FloatTensor`` and the like, and those of storages."""
    return {
        name: getattr(torch, name)
        for name in vars(torch.cuda)
        if name.endswith(("Tensor", "Storage")) and hasattr(torch, name)
    }


def _accelerator() -> dict[str, object]:
    return {
        "is_available": answers.is_available,
        "device_count": answers.device_count,
        "current_accelerator": lambda check_available=False: _Device("cuda"),
        "current_device_index": answers.current_device,
        "current_device_idx": answers.current_device,
        "set_device_index": answers.set_device,
        "set_device_idx": answers.set_device,
        "current_stream": answers.current_stream,
        "set_stream": answers.set_stream,
        "synchronize": answers.synchronize,
        "empty_cache": answers.empty_cache,
        "memory_stats": answers.memory_stats,
        **_names_of(answers, "memory_allocated", "max_memory_allocated", "memory_reserved"),
        **_names_of(answers, "max_memory_reserved", "reset_peak_memory_stats"),
        "reset_accumulated_memory_stats": answers.reset_peak_memory_stats,
    }


def _nvtx() -> dict[str, object]:
    marks = _names_of(answers, "range_push", "range_pop", "range_start", "range_end", "mark")
    return {**marks, "range": answers.marked_range}


def views() -> Iterator[tuple[ModuleType, Mapping[str, object]]]:
    """The modules of torch in which a script sees the stand-in, with the names."""
    asked = (
        "is_autocast_enabled",
        "get_autocast_dtype",
        "set_autocast_enabled",
        "set_autocast_dtype",
    )
    made: dict[ModuleType, dict[str, object]] = {
        torch: {
            "device": _posing(_Device, _make_device),
            "Generator": _posing(_Generator, _make_generator),
            **{name: _get_autocast(name) for name in asked},
            "get_autocast_gpu_dtype": lambda: torch.get_autocast_dtype("cpu"),
            "set_default_tensor_type": _set_default_tensor_type,
        },
        torch.random: {"fork_rng": _fork_rng},
    }
    for module, name in factories():
        made.setdefault(module, {})[name] = on_host(getattr(module, name))
    yield from made.items()
    decorators = {name: _custom(getattr(torch.amp, name)) for name in ("custom_fwd", "custom_bwd")}
    for module in (
        torch.amp,
        torch.amp.autocast_mode,
        torch.cuda.amp,
        torch.cuda.amp.autocast_mode,
    ):
        yield module, decorators
    yield (
        torch.cuda,
        {
            **_names_of(answers, *_DEVICES, *_MEMORY, *_RANDOM),
            **_old_types(),
            "default_generators": (torch.default_generator,) * answers.count,
        },
    )
    yield torch.cuda.memory, _names_of(answers, *_MEMORY)
    yield torch.cuda.random, _names_of(answers, *_RANDOM)
    yield torch.cuda.streams, _names_of(answers, "Stream", "Event")
    yield torch.cuda.nvtx, _nvtx()
    nothing = {"start": answers.init, "stop": answers.init, "profile": answers.marked_range}
    yield torch.cuda.profiler, nothing
    yield torch.accelerator, _accelerator()
