"""The names in torch's modules that answer a script by the stand-in: module by module, with what the script gets.

torch and our own packages read the truth under the same names (views.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType

import torch
import torch.utils._device

from smp_core.torch.cuda_stand_in import answers
from smp_core.torch.cuda_stand_in.requests import host, on_host, type_name

_Device, _Generator = torch.device, torch.Generator


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
    return _Generator("cpu" if host(device) is not device else device)


# Factories

#: The packages of torch that hand a script's device to factories.
PASSING_ON = ("torch.nn", "torch.distributed", "torch.optim")


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


# Functions of autocast, types and generators


def _get_autocast(name: str) -> Callable[..., object]:
    """``torch.is_autocast_enabled`` and its like, whose device is CUDA unless they are told another."""
    original = getattr(torch, name)

    @functools.wraps(original)
    def get(*args: object) -> object:
        if args and isinstance(args[0], str):
            return original(type_name(args[0]), *args[1:])
        return original("cpu", *args)  # the older form, without a device

    return get


def _custom(original: Callable[..., object]) -> Callable[..., object]:
    """``torch.amp.custom_fwd`` and ``custom_bwd``, for autocast as a script sees it."""

    @functools.wraps(original)
    def decorate(function: object = None, *, device_type: str = "cuda", **kwargs: object) -> object:
        return original(function, device_type=type_name(device_type), **kwargs)

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
