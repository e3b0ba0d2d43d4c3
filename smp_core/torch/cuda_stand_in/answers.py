"""``torch.cuda`` as a script sees it while the stand-in is installed: devices that all are the CPU.

Public names have the signatures and results of their namesakes. Where torch.cuda tells of GPUs, these tell:

- memory: 0 bytes of a GPU are allocated or reserved; a device's memory is the machine's;
- random generators: every device has the CPU's generator, because all numbers are drawn there;
- streams and events: an operation ends before its call returns; an event records the time of the CPU;
- a device's name says what it is, and its capability is that of an A100, which means that it computes in bfloat16.

The current device belongs to a rank: where ranks are threads, each hand-over switches ``current_index``
(pytest_smp.ranks.rank_state).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import time
from collections.abc import Iterable, Iterator
from types import SimpleNamespace, TracebackType

import torch

from smp_core.torch.exceptions import StandInError

#: The number of devices, and the rank's current one.
count = 0
current_index = 0

NAME = "CPU, in place of a GPU"
CAPABILITY = (8, 0)


def checked(index: int | None) -> int:
    """The index of a device, the current one's for None; StandInError where there is no such device."""
    if index is None:
        return current_index
    if not 0 <= index < count:
        raise StandInError(
            f"CUDA error: invalid device ordinal: cuda:{index} does not exist, there are {count} devices. The stand-in "
            "for torch.cuda was installed with that number (smp-run: ranks of one host)"
        )
    return index


@functools.cache
def _index_in(name: str) -> int | None:
    return torch.device("cuda" + name.removeprefix("cuda").removeprefix("gpu")).index


def index_of(device: object) -> int:
    """The index that a device's name, number or object means; any device without an index is the current one."""
    if device is None or isinstance(device, int):
        return checked(device)
    if isinstance(device, str):
        return checked(_index_in(device))
    if not isinstance(device, torch.device):
        raise TypeError(f"a device is a name, a number or a torch.device, not {device!r}")
    return checked(device.index if device.type == "cuda" else None)


# Devices


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


def device_count() -> int:
    return count


def current_device() -> int:
    return current_index


def set_device(device: object) -> None:
    global current_index
    if not isinstance(device, int) or device >= 0:  # torch ignores negative numbers, too
        current_index = index_of(device)


class device:
    """While entered, the device is the current one."""

    def __init__(self, device: object) -> None:
        negative = isinstance(device, int) and device < 0
        self.idx = -1 if negative else index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_index
        set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        set_device(self.prev_idx)


class device_of(device):
    """While entered, the device of the tensor is the current one: it stays, since tensors are on the CPU."""

    def __init__(self, obj: object) -> None:
        super().__init__(-1)


def get_device_name(device: object = None) -> str:
    index_of(device)
    return NAME


def get_device_capability(device: object = None) -> tuple[int, int]:
    index_of(device)
    return CAPABILITY


def get_device_properties(device: object = None) -> SimpleNamespace:
    index_of(device)
    return SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=_memory("SC_PHYS_PAGES"),
        multi_processor_count=os.cpu_count() or 1,
        is_integrated=1,
        is_multi_gpu_board=0,
    )


def get_arch_list() -> list[str]:
    return []


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def is_tf32_supported() -> bool:
    return False


def can_device_access_peer(device: object, peer_device: object) -> bool:
    index_of(device), index_of(peer_device)
    return True


# Memory


def _memory(pages: str) -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)


def mem_get_info(device: object = None) -> tuple[int, int]:
    """The machine's memory: bytes that are free, and all."""
    index_of(device)
    return _memory("SC_AVPHYS_PAGES"), _memory("SC_PHYS_PAGES")


def memory_allocated(device: object = None) -> int:
    index_of(device)
    return 0


max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated
memory_cached = max_memory_cached = memory_usage = utilization = memory_allocated


def memory_stats(device: object = None) -> dict[str, int]:
    """A dict in which every figure is 0."""
    index_of(device)
    return collections.Counter()


memory_stats_as_nested_dict = memory_stats


def memory_summary(device: object = None, abbreviated: bool = False) -> str:
    return f"cuda:{index_of(device)} is the CPU: no memory of a GPU is in use\n"


def memory_snapshot(*_: object, **__: object) -> list[object]:
    return []


def list_gpu_processes(device: object = None) -> str:
    return f"GPU:{index_of(device)}\nno processes are running"


def reset_peak_memory_stats(device: object = None) -> None:
    index_of(device)


reset_accumulated_memory_stats = reset_max_memory_allocated = reset_peak_memory_stats
reset_max_memory_cached = reset_peak_memory_stats


def set_per_process_memory_fraction(fraction: float, device: object = None) -> None:
    index_of(device)


def empty_cache() -> None:
    pass


def ipc_collect() -> None:
    pass


# Random generators


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


manual_seed_all = manual_seed


def seed() -> None:
    torch.default_generator.seed()


seed_all = seed


def initial_seed() -> int:
    return torch.initial_seed()


def get_rng_state(device: object = "cuda") -> torch.Tensor:
    index_of(device)
    return torch.get_rng_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [torch.get_rng_state() for _ in range(count)]


def set_rng_state(new_state: torch.Tensor, device: object = "cuda") -> None:
    index_of(device)
    torch.set_rng_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the current device's state, or the last one of fewer devices: one generator cannot have several states."""
    states = list(new_states)
    if states:
        set_rng_state(states[min(current_index, len(states) - 1)])


# Streams and events


class Stream:
    """A queue of operations, each of which has ended when its call returns."""

    def __init__(self, device: object = None, priority: int = 0, **_: object) -> None:
        self.device_index = index_of(device)
        self.device = torch.device("cuda", self.device_index)
        self.priority, self.cuda_stream, self.stream_id = priority, 0, 0

    def wait_event(self, event: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        event = CpuEvent() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.device_index == self.device_index

    def __hash__(self) -> int:
        return hash(self.device_index)


class CpuEvent:
    """A point in time, as the CPU's clock has it."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        **_: object,
    ) -> None:
        self._timed = enable_timing
        self._time: float | None = None
        self.device = torch.device("cuda", current_index)

    def record(self, stream: object = None) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """The milliseconds from this event to the other one."""
        if not (self._timed and end_event._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._time is None or end_event._time is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._time - self._time) * 1000

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass


Event = CpuEvent


class StreamContext:
    """While entered, operations go to the stream, which changes nothing."""

    def __init__(self, stream: object) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass


stream = StreamContext


def current_stream(device: object = None) -> Stream:
    return Stream(device)


default_stream = current_stream


def set_stream(stream: object) -> None:
    pass


def synchronize(device: object = None) -> None:
    index_of(device)


def is_current_stream_capturing() -> bool:
    return False


# Marks for NVIDIA's profilers


def range_push(msg: str) -> int:
    return 0


range_pop = range_start = lambda *_: 0


def range_end(range_id: int) -> None:
    pass


def mark(msg: str) -> None:
    pass


@contextlib.contextmanager
def marked_range(msg: str, *args: object, **kwargs: object) -> Iterator[None]:
    """``torch.cuda.nvtx.range`` and ``torch.cuda.profiler.profile``."""
    yield


class _Runtime:
    """``torch.cuda.cudart()``: every call succeeds and does nothing."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: 0


def cudart() -> _Runtime:
    return _Runtime()
