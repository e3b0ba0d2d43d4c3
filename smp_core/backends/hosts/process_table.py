"""What a process has once, beside what surroundings.py restores: limits, modes, tables of the
interpreter and of torch, and the functions of much used modules.

A rank process notes each value before a body and compares it afterwards. What the body has changed
is put back; what cannot be is told, and the rank is replaced. What a library has changed while it
was imported stays: the library would not work without it.
"""

from __future__ import annotations

import ctypes
import gc
import locale
import operator
import os
import resource
import socket
import sys
import sysconfig
import threading
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from smp_core.backends.frames import is_ours

_LIBRARIES = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_TINY, _ONE = 5e-324, 1.0  # their product is 0 where denormal numbers are flushed
#: Whose functions and classes are compared. A name that is added is no harm.
PATCHED = (
    *("builtins", "os", "time", "random", "math", "socket", "threading", "pickle"),
    *("torch", "torch.nn.functional", "torch.distributed", "torch.distributed.distributed_c10d"),
    *("torch.autograd", "smp_core.torch"),
)
_CLASSES = (("torch", "Tensor"), ("torch.nn", "Module"), ("torch.optim", "Optimizer"))
_HOOKS = "torch.nn.modules.module"  # has the hooks of all modules


class State(NamedTuple):
    """One thing that a process has once: how it is read, and how it is put back."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], None]


# ---- Of the process ------------------------------------------------------------------------------


def _input() -> object:
    try:
        stat = os.fstat(0)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_rdev


def _open_input(before: object) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    if null != 0:
        os.dup2(null, 0)
        os.close(null)


class _CEnvironment:
    """The environment as C sees it: ``os.environ`` does not know what ``putenv`` did."""

    def __init__(self) -> None:
        self._pointers = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")
        self._seen: list[Any] = []  # up to the null pointer that ends it
        self._value: frozenset[bytes] = frozenset()

    def __call__(self) -> frozenset[bytes]:
        # Nobody makes the table of pointers shorter, so what was there can be read again: 5 us.
        if self._seen and self._pointers and self._pointers[: len(self._seen)] == self._seen:
            return self._value
        seen: list[Any] = []
        while self._pointers and (not seen or seen[-1] is not None):
            seen.append(self._pointers[len(seen)])
        self._seen = seen
        self._value = frozenset(ctypes.string_at(each) for each in seen if each is not None)
        return self._value


_c_environment = _CEnvironment()


def _put_c_environment(before: frozenset[bytes]) -> None:
    for entry in _c_environment() - before:
        os.unsetenv(entry.partition(b"=")[0])
    for entry in before - _c_environment():
        name, _, value = entry.partition(b"=")
        os.putenv(name, value)


_LIMITS = tuple(
    sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
)


def _limits() -> tuple[tuple[int, int], ...]:
    return tuple(map(resource.getrlimit, _LIMITS))


def _put_limits(before: tuple[tuple[int, int], ...]) -> None:
    for limit, pair in zip(_LIMITS, before, strict=True):
        if resource.getrlimit(limit) != pair:
            resource.setrlimit(limit, pair)


def _put_list(name: str) -> Callable[[Any], None]:
    def put(before: tuple[Any, ...]) -> None:
        getattr(sys, name)[:] = before

    return put


def _list(name: str) -> State:
    return State(f"sys.{name}", lambda: tuple(getattr(sys, name)), _put_list(name))


def _attribute(owner: Any, name: str) -> State:
    full = f"{owner.__name__}.{name}"
    return State(full, lambda: getattr(owner, name), lambda before: setattr(owner, name, before))


#: What measures coverage sets these anew for each run.
TRACING = (
    State("the trace function", sys.gettrace, sys.settrace),
    State("the profile function", sys.getprofile, sys.setprofile),
    State("the trace function of threads", threading.gettrace, threading.settrace),
    State("the profile function of threads", threading.getprofile, threading.setprofile),
)
PROCESS = (
    State("descriptor 0", _input, _open_input),
    State("the environment of C", _c_environment, _put_c_environment),
    State(
        "the time zone",
        lambda: (time.tzname, time.timezone, time.altzone),
        lambda before: time.tzset(),
    ),
    State("a resource limit", _limits, _put_limits),
    State(
        "the locale",
        lambda: locale.setlocale(locale.LC_ALL),
        lambda before: (locale.setlocale(locale.LC_ALL, before), None)[1],
    ),
    State(
        "the niceness",
        lambda: os.getpriority(os.PRIO_PROCESS, 0),
        lambda before: os.setpriority(os.PRIO_PROCESS, 0, before),
    ),
    State(
        "the CPU affinity",
        lambda: os.sched_getaffinity(0),
        lambda before: os.sched_setaffinity(0, before),
    ),
    State(
        "the garbage collector's threshold", gc.get_threshold, lambda old: gc.set_threshold(*old)
    ),
    State("the garbage collector's debugging", gc.get_debug, gc.set_debug),
    State("the switch interval", sys.getswitchinterval, sys.setswitchinterval),
    State("the default socket timeout", socket.getdefaulttimeout, socket.setdefaulttimeout),
    _list("meta_path"),
    _list("path_hooks"),
    _attribute(sys, "excepthook"),
    _attribute(sys, "displayhook"),
    _attribute(sys, "unraisablehook"),
    _attribute(threading, "excepthook"),
)


# ---- Of torch ------------------------------------------------------------------------------------


def _torch_states() -> tuple[State, ...]:
    import torch

    def put_deterministic(before: tuple[bool, bool]) -> None:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])

    def put_anomaly(before: tuple[bool, bool]) -> None:
        torch.autograd.set_detect_anomaly(*before)

    def put_denormal(before: bool) -> None:
        torch.set_flush_denormal(before)

    return (
        State("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
        State(
            "torch's deterministic mode",
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            put_deterministic,
        ),
        State(
            "torch's anomaly mode",
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            put_anomaly,
        ),
        State(
            "torch's precision of matmul",
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
        State("torch's flushing of denormals", lambda: _TINY * _ONE == 0.0, put_denormal),
        State("torch's warning of everything", torch.is_warn_always_enabled, torch.set_warn_always),
    )


# ---- Functions of modules ------------------------------------------------------------------------


class _Patches:
    """The functions and classes of one module, or the attributes of one class."""

    def __init__(self, name: str, owner: Any) -> None:
        self._name, self._owner = name, owner
        self.note()

    def note(self) -> None:
        """These are the ones."""
        found = [(name, value) for name, value in vars(self._owner).items() if _is_code(value)]
        self._names = tuple(name for name, _ in found)
        self._values = tuple(value for _, value in found)
        self._read = operator.itemgetter(*self._names)

    def put_back(self) -> list[str]:
        """Undo what a body changed; what could not be undone."""
        now = vars(self._owner)
        missing = object()
        try:  # nearly always the same objects; a thousand names take 20 us
            if self._read(now) == self._values:
                return []
        except KeyError:
            pass
        values = [now.get(name, missing) for name in self._names]
        left = []
        accepted = False
        for name, old, new in zip(self._names, self._values, values, strict=True):
            if new is old:
                continue
            if new is not missing and _of_a_library(new):
                accepted = True
                continue
            try:
                setattr(self._owner, name, old)
            except (AttributeError, TypeError) as error:
                left.append(f"{self._name}.{name} was replaced: {error}")
        if accepted:
            self.note()
        return left


def _is_code(value: object) -> bool:
    # By type: to ask some of torch's objects for their class is deprecated, and warns.
    return callable(value) or issubclass(type(value), staticmethod | classmethod | property)


def _of_a_library(value: Any) -> bool:
    """Whether a library, or this project, has defined an object: a test's mocks are not a library's."""
    if type(value).__module__.startswith("unittest.mock"):
        return False
    inner = getattr(value, "__func__", getattr(value, "fget", value))
    code = getattr(inner, "__code__", None)
    file = getattr(code, "co_filename", None)
    if file is None:
        module = getattr(inner, "__module__", None) or type(inner).__module__
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is None:
            return isinstance(inner, types.BuiltinFunctionType)
    return file.startswith(_LIBRARIES) or is_ours(file)


class ProcessTable:
    """The values of one rank process."""

    def __init__(self) -> None:
        self._key: object = None
        self._tracing: list[Any] = []
        self._states: tuple[State, ...] = ()
        self._values: list[Any] = []
        self._patches: list[_Patches] = []
        self._hooks: list[tuple[Any, dict[Any, Any]]] = []

    def note(self, key: object) -> None:
        """A body is about to run; what it finds is what the next body is to find. ``key`` changes
        whenever something was imported, or the controller has changed something.
        """
        self._tracing = [state.get() for state in TRACING]
        if key == self._key:
            return
        self._key = key
        self._states = (*PROCESS, *_torch_states())
        self._values = [state.get() for state in self._states]
        owners = [(name, sys.modules.get(name)) for name in PATCHED]
        owners += [
            (f"{module}.{name}", getattr(sys.modules.get(module), name, None))
            for module, name in _CLASSES
        ]
        self._patches = [_Patches(name, owner) for name, owner in owners if owner is not None]
        hooks = vars(sys.modules[_HOOKS]) if _HOOKS in sys.modules else {}
        self._hooks = [
            (value, dict(value))
            for name, value in hooks.items()
            if name.startswith("_global_") and isinstance(value, dict)
        ]

    def put_back(self) -> list[str]:
        """A body is over: undo what it changed. What could not be undone, in words."""
        left = []
        for state, before in zip(TRACING, self._tracing, strict=False):
            if state.get() is not before:
                state.put(before)
        for index, (state, before) in enumerate(zip(self._states, self._values, strict=True)):
            now = state.get()
            if now == before:
                continue
            if isinstance(now, tuple) and state.name.startswith("sys."):
                added = [each for each in now if each not in before]
                if added and all(map(_of_a_library, added)):
                    self._values[index] = now
                    continue
            try:
                state.put(before)
            except (OSError, ValueError, TypeError, RuntimeError, locale.Error) as error:
                left.append(f"{state.name} was changed: {error}")
            else:
                if state.get() != before:
                    left.append(f"{state.name} was changed")
        for patches in self._patches:
            left += patches.put_back()
        for hooks, before in self._hooks:
            if hooks != before:
                hooks.clear()
                hooks.update(before)
        return left
