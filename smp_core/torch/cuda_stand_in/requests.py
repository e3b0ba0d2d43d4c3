"""Requests for a CUDA device, which get the CPU: moves, factories, saved files, autocast, loss scalers, loaders.

A request means the CPU whoever passes it on: on a machine without GPUs no code of torch makes one by itself, so the
device is the script's. Devices that a script makes keep their type and index, and tensors say that they are on the
CPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import torch
import torch.utils._device
import torch.utils.data.dataloader
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from smp_core.torch.cuda_stand_in import answers
from smp_core.torch.cuda_stand_in.views import inside

_CPU = torch.device("cpu")


def host(device: object) -> object:
    """The CPU in place of a CUDA device, which may be a name, a number or an object; anything else as it is."""
    if isinstance(device, str):
        if not device.startswith(("cuda", "gpu")):
            return device
        answers.index_of(device)
    elif isinstance(device, torch.device):
        if device.type != "cuda":
            return device
        answers.checked(device.index)
    elif type(device) is int:
        if device >= 0:  # -1 is what a tensor of the CPU answers to get_device()
            answers.checked(device)
    else:
        return device
    return _CPU


def type_name(name: str) -> str:
    return "cpu" if name.partition(":")[0] in ("cuda", "gpu") else name


# Factories


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
        original(self, type_name(device), *args, **kwargs)

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
        if by_script and isinstance(device_type, str) and type_name(device_type) != device_type:
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


def _cpu_mesh(original: Callable[..., object]) -> Callable[..., object]:
    """For ``DeviceMesh``, whose kind of device decides where tensors of its ranks are."""

    def __init__(self: object, device_type: str, *args: object, **kwargs: object) -> None:
        original(self, type_name(device_type), *args, **kwargs)

    return __init__


def _cpu_shards(original: Callable[..., object]) -> Callable[..., object]:
    """For ``FullyShardedDataParallel``, which looks for a GPU unless it is told the CPU."""
    signature = inspect.signature(original)

    def __init__(*args: object, **kwargs: object) -> None:
        given = signature.bind(*args, **kwargs)
        given.arguments["device_id"] = _CPU
        original(*given.args, **given.kwargs)

    return __init__


def _cpu_stage(original: Callable[..., object]) -> Callable[..., object]:
    """For stages of ``torch.distributed.pipelining``, which receive on their device."""
    signature = inspect.signature(original)

    def __init__(*args: object, **kwargs: object) -> None:
        given = signature.bind(*args, **kwargs)
        given.arguments["device"] = host(given.arguments["device"])
        original(*given.args, **given.kwargs)

    return __init__


def _unchecked(original: Callable[..., object]) -> Callable[..., object]:
    """For FSDP's check that states to be broadcast are on a GPU."""

    def check(module_states: object) -> None:
        """Any backend of ranks on the CPU broadcasts them."""

    return check


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
    (DeviceMesh, "__init__", _cpu_mesh),
)


@contextlib.contextmanager
def replaced(owner: object, name: str, wrap: Wrap) -> Iterator[None]:
    """While entered, the class or module has the wrapped function; afterwards its namespace is as it was."""
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


# Parts of torch that a script imports, because their import takes seconds


#: The functions that are replaced when their module is loaded, by its name: class ("" for none), function, and wrap.
LATE: dict[str, tuple[str, str, Wrap]] = {
    "torch.distributed.fsdp._init_utils": (
        "",
        "_check_module_states_for_sync_module_states",
        _unchecked,
    ),
    "torch.distributed.fsdp.fully_sharded_data_parallel": (
        "FullyShardedDataParallel",
        "__init__",
        _cpu_shards,
    ),
    "torch.distributed.pipelining.stage": ("_PipelineStageBase", "__init__", _cpu_stage),
}


class _LateModules(importlib.abc.MetaPathFinder):
    """Calls a function with each module of LATE that is imported from now on."""

    def __init__(self, patch: Callable[[ModuleType], None]) -> None:
        self._patch = patch

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in LATE else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextlib.contextmanager
def late_parts() -> Iterator[None]:
    """While entered, FSDP and pipeline stages compute on the CPU, whenever a script imports them."""
    with contextlib.ExitStack() as stack:

        def patch(module: ModuleType) -> None:
            owner, name, wrap = LATE[module.__name__]
            stack.enter_context(replaced(getattr(module, owner) if owner else module, name, wrap))

        for name in LATE:
            if name in sys.modules:
                patch(sys.modules[name])
        finder = _LateModules(patch)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield


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
