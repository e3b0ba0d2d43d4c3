"""State that a process has once, beside that of process_state.py: limits, modes, tables of the
interpreter and of torch, and the functions of much used modules.

A rank process notes each value before a body and compares it afterwards. A value that the body has
changed is put back; if that fails, the rank says so and is replaced. A value that a module has changed
while the body imported it stays, as the module does: no later import would change it again.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import gc
import locale
import os
import resource
import sys
import threading
import time
import types
from collections.abc import Callable
from operator import is_, itemgetter
from typing import Any, NamedTuple

from pytest_smp.ranks import rank_state
from smp_core.import_names import (
    import_names_are_installed,
    install_import_names,
    remove_import_names,
)

_TINY, _ONE = 5e-324, 1.0  # their product is 0 where denormal numbers are flushed
#: The modules whose functions and classes are compared. A name that a body adds does no harm.
PATCHED = (
    *("sys", "os", "time", "random", "math", "socket", "threading", "pickle"),
    *("gc", "locale", "resource", "signal", "tempfile"),
    *("torch", "torch.nn.functional", "torch.distributed", "torch.distributed.distributed_c10d"),
    *("torch.autograd", "smp_core.torch"),
)
_CLASSES = (("torch", "Tensor"), ("torch.nn", "Module"), ("torch.optim", "Optimizer"))
_BUILTINS = vars(builtins)
# Bodies patch functions of modules; these names keep the original ones.
_setlocale, _get_priority, _set_priority = locale.setlocale, os.getpriority, os.setpriority
_get_affinity: Callable[[int], Any] = getattr(os, "sched_getaffinity", lambda process: None)
_set_affinity: Callable[[int, Any], None] = getattr(os, "sched_setaffinity", lambda *_: None)
_get_limit, _set_limit = resource.getrlimit, resource.setrlimit
_tzset, _fstat, _put_variable, _unset_variable = time.tzset, os.fstat, os.putenv, os.unsetenv


class ProcessTableEntry(NamedTuple):
    """One value that a process has once, with the functions that read it and put it back."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], None]


# ---- Of the process ------------------------------------------------------------------------------


def _input() -> object:
    try:
        stat = _fstat(0)
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
        _unset_variable(entry.partition(b"=")[0])
    for entry in before - _c_environment():
        name, _, value = entry.partition(b"=")
        _put_variable(name, value)


_LIMITS = tuple(
    sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
)


def _limits() -> tuple[tuple[int, int], ...]:
    return tuple(map(_get_limit, _LIMITS))


def _put_limits(before: tuple[tuple[int, int], ...]) -> None:
    for limit, pair in zip(_LIMITS, before, strict=True):
        if _get_limit(limit) != pair:
            _set_limit(limit, pair)


def _put_list(name: str) -> Callable[[Any], None]:
    def put(before: tuple[Any, ...]) -> None:
        getattr(sys, name)[:] = before

    return put


def _list(name: str) -> ProcessTableEntry:
    return ProcessTableEntry(f"sys.{name}", lambda: tuple(getattr(sys, name)), _put_list(name))


def _attribute(owner: Any, name: str) -> ProcessTableEntry:
    full = f"{owner.__name__}.{name}"
    return ProcessTableEntry(
        full, lambda: getattr(owner, name), lambda before: setattr(owner, name, before)
    )


#: States that a measurement of coverage sets anew for each run.
TRACING = (
    ProcessTableEntry("the trace function", sys.gettrace, sys.settrace),
    ProcessTableEntry("the profile function", sys.getprofile, sys.setprofile),
    ProcessTableEntry("the trace function of threads", threading.gettrace, threading.settrace),
    ProcessTableEntry(
        "the profile function of threads", threading.getprofile, threading.setprofile
    ),
)
PROCESS = (
    ProcessTableEntry("descriptor 0", _input, _open_input),
    ProcessTableEntry("the environment of C", _c_environment, _put_c_environment),
    ProcessTableEntry(
        "the time zone",
        lambda: (time.tzname, time.timezone, time.altzone),
        lambda before: _tzset(),
    ),
    ProcessTableEntry("a resource limit", _limits, _put_limits),
    ProcessTableEntry(
        "the locale",
        lambda: _setlocale(locale.LC_ALL),
        lambda before: (_setlocale(locale.LC_ALL, before), None)[1],
    ),
    ProcessTableEntry(
        "the niceness",
        lambda: _get_priority(os.PRIO_PROCESS, 0),
        lambda before: _set_priority(os.PRIO_PROCESS, 0, before),
    ),
    ProcessTableEntry(
        "the CPU affinity",
        lambda: _get_affinity(0),
        lambda before: _set_affinity(0, before),
    ),
    ProcessTableEntry(
        "the garbage collector's threshold",
        gc.get_threshold,
        functools.partial(lambda put, before: put(*before), gc.set_threshold),
    ),
    ProcessTableEntry("the garbage collector's debugging", gc.get_debug, gc.set_debug),
    ProcessTableEntry("the switch interval", sys.getswitchinterval, sys.setswitchinterval),
    ProcessTableEntry(  # before their finder, without which other finders would load modules twice
        "SMP's import names",
        import_names_are_installed,
        lambda before: (install_import_names if before else remove_import_names)(),
    ),
    _list("meta_path"),
    _list("path_hooks"),
    _attribute(sys, "displayhook"),
    _attribute(sys, "unraisablehook"),
    _attribute(threading, "excepthook"),
)


# ---- Of torch, beside the list in rank_state.py ---------------------------------------------------


def _torch_states() -> tuple[ProcessTableEntry, ...]:
    import torch

    set_denormal: Callable[[bool], object] = torch.set_flush_denormal
    return (
        ProcessTableEntry(
            "torch's number of threads", torch.get_num_threads, torch.set_num_threads
        ),
        ProcessTableEntry(
            "torch's flushing of denormals",
            lambda: _TINY * _ONE == 0.0,
            lambda before: (set_denormal(before), None)[1],
        ),
    )


class _OfEachRank:
    """The list in rank_state.py: what a rank has for itself on `sim`, it finds anew here."""

    def __init__(self) -> None:
        self._loaded = rank_state.find()
        self._values = self._loaded.read()
        self._copies = [
            (value, value.copy()) for value in self._values if isinstance(value, dict)
        ]  # hooks

    def put_back(self) -> list[str]:
        """Undo what a body changed; what could not be undone."""
        left = []
        values: tuple[Any, ...] | None = None
        with contextlib.suppress(Exception):  # an attribute that the body has deleted
            values = self._loaded.read()
        if values is None or not all(map(is_, values, self._values)):
            loaded = self._loaded
            for index, name in enumerate(loaded.names):
                write, value = loaded.writes[index], self._values[index]
                if values is not None and values[index] is value:
                    continue
                try:
                    write(value)
                except Exception as error:
                    left.append(f"{name} was changed: {_told(error)}")
        for container, copy in self._copies:
            if container != copy:
                container.clear()
                container.update(copy)
        return left


# ---- Functions of modules ------------------------------------------------------------------------


class _Patches:
    """The functions and classes of one module, or the attributes of one class."""

    def __init__(self, name: str, owner: Any) -> None:
        self._name, self._owner = name, owner
        self.note()

    def note(self) -> None:
        """Note the present functions and classes, for a comparison after the body."""
        found = [(name, value) for name, value in vars(self._owner).items() if _is_code(value)]
        self._names = tuple(name for name, _ in found)
        self._values = tuple(value for _, value in found)
        self._read = itemgetter(*self._names)

    def put_back(self, imports: _Imports) -> list[str]:
        """Undo what a body changed; what could not be undone."""
        now = vars(self._owner)
        missing = object()
        try:  # nearly always the same objects; a thousand names take 20 us
            if all(map(is_, self._read(now), self._values)):
                return []
        except KeyError:
            pass
        values = [now.get(name, missing) for name in self._names]
        left = []
        accepted = False
        for name, old, new in zip(self._names, self._values, values, strict=True):
            if new is old:
                continue
            if new is not missing and imports.have_made(new, old):
                accepted = True
                continue
            try:
                setattr(self._owner, name, old)
            except Exception as error:
                left.append(f"{self._name}.{name} was replaced: {_told(error)}")
        if accepted:
            self.note()
        return left


def _is_code(value: object) -> bool:
    # By type: to ask some of torch's objects for their class is deprecated, and warns.
    return callable(value) or issubclass(type(value), staticmethod | classmethod | property)


class _Imports:
    """The modules that a body was the first to import. Their changes do not count as the body's."""

    def __init__(self) -> None:
        self._before = sys.modules.copy()  # 5 us; a set of the names takes 35

    def have_made(self, new: Any, old: Any) -> bool:
        """Return whether one of them has put ``new`` where ``old`` was, as far as the object shows it."""
        if type(new).__module__.startswith("unittest.mock"):
            return False  # the body made it, even if it was the first to import that
        now = sys.modules.copy()
        modules = {name: each for name, each in now.items() if name not in self._before}
        if not modules:
            return False
        inner = _innermost(new)
        definer = _definer(inner)
        if definer in modules:
            return True
        if isinstance(inner, types.FunctionType):
            # torch._dynamo wraps a function of torch in one of torch, made by a module that was there.
            package = definer.partition(".")[0]
            return vars(inner).get("__wrapped__") is old and any(
                name.partition(".")[0] == package for name in modules
            )
        if isinstance(inner, type | types.BuiltinFunctionType):
            return False
        # An object without the name of its maker: a partial, an instance.
        spaces = [getattr(each, "__dict__", None) for each in modules.values()]
        return any(
            value is new
            for space in spaces
            if isinstance(space, dict)
            for value in space.copy().values()
        )


def _innermost(value: Any) -> Any:
    """The function within a method or a property; by type: what bodies make may answer anything."""
    kind = type(value)
    if issubclass(kind, staticmethod | classmethod | types.MethodType):
        return value.__func__
    return value.fget if issubclass(kind, property) else value


def _definer(value: Any) -> str:
    """The name of the module whose code defines a function, a class or an instance's class."""
    kind = type(value)
    if issubclass(kind, types.FunctionType):  # functools.wraps copies __module__ from elsewhere
        name = value.__globals__.get("__name__")
    else:
        of = value if issubclass(kind, type | types.BuiltinFunctionType) else kind
        name = getattr(of, "__module__", None)
    return name if isinstance(name, str) else ""


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class ProcessTable:
    """The values of one rank process."""

    def __init__(self) -> None:
        self._key: object = None
        self._tracing: list[Any] = []
        self._states: tuple[ProcessTableEntry, ...] = ()
        self._values: list[Any] = []
        self._patches: list[_Patches] = []
        self._imports = _Imports()
        self._of_each_rank: _OfEachRank | None = None
        self._builtins: dict[str, Any] = {}

    def note(self, key: object) -> None:
        """A body is about to run; what it finds is what the next body is to find. ``key`` changes
        whenever something was imported, or the controller has changed something.
        """
        self._tracing = [state.get() for state in TRACING]
        self._imports = _Imports()
        self._of_each_rank = _OfEachRank()  # streams and warning filters are new for each run
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
        self._builtins = _BUILTINS.copy()

    def put_back(self) -> list[str]:
        """Undo the changes of a body that is over; return those that could not be undone, in words.

        Call it before any other code of ours runs: until then, builtins and functions of modules may be the
        body's. Raises nothing, even if the body has patched a function that this method calls.
        """
        left: list[str] = []
        patched = _BUILTINS.copy()
        _BUILTINS.update(self._builtins)  # by methods alone: any name may be the body's
        try:
            self._put_back(left)
            self._accept_builtins(patched)
        except Exception as error:
            left.append(f"what the body changed could not be put back: {_told(error)}")
        return left

    def _accept_builtins(self, patched: dict[str, Any]) -> None:
        """Let builtins be what a module has made of them that the body was the first to import."""
        for name, old in self._builtins.items():
            new = patched.get(name, old)
            if new is not old and self._imports.have_made(new, old):
                _BUILTINS[name] = self._builtins[name] = new

    def _put_back(self, left: list[str]) -> None:
        for state, before in zip(TRACING, self._tracing, strict=False):
            if state.get() is not before:
                state.put(before)
        for patches in self._patches:  # first: the code below calls these functions
            left += patches.put_back(self._imports)
        for index, state in enumerate(self._states):
            try:
                self._put_state_back(index, state, left)
            except Exception as error:
                left.append(f"{state.name} was changed: {_told(error)}")
        if self._of_each_rank is not None:
            left += self._of_each_rank.put_back()

    def _put_state_back(self, index: int, state: ProcessTableEntry, left: list[str]) -> None:
        before, now = self._values[index], state.get()
        if now == before:
            return
        if isinstance(now, tuple) and state.name.startswith("sys."):
            added = [each for each in now if each not in before]
            if added and all(self._imports.have_made(each, None) for each in added):
                self._values[index] = now
                return
        state.put(before)
        if state.get() != before:
            left.append(f"{state.name} was changed")
