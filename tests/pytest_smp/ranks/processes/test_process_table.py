"""A body does not find the changes that the last body has made to its rank process: each kind by itself, made
and read as a body does.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import locale
import math
import os
import pickle
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim import optimizer as optimizers

import smp_core
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import ExecutorOptions, Job, VerdictKind

RANKS = 2


@pytest.fixture(scope="module")
def executor():
    executor = open_backend("gloo", ExecutorOptions(ranks=RANKS))
    yield executor
    executor.close()


def _run(executor, body):
    report = executor.open(RANKS).run(Job(body=body, arguments=lambda rank: ((), {}), timeout=60.0))
    assert report.verdict is VerdictKind.PASSED, report.error
    assert report.warnings == []  # no rank has died since the last run
    return report.values


def _limit(name, soft):
    limit = getattr(resource, name)
    resource.setrlimit(limit, (soft, resource.getrlimit(limit)[1]))


def _time_zone():
    os.environ["TZ"] = "Asia/Kathmandu"
    time.tzset()


def _other_cores():
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _import_names():
    smp_core.install_import_names()
    importlib.import_module("smdistributed.modelparallel.torch")


def _a_finder():
    class Finder:
        def find_spec(self, *args):
            return None

    sys.meta_path.insert(0, Finder())


def _patch(owner, name):
    setattr(owner, name, lambda *args, **kwargs: None)


def _hook():
    torch.nn.modules.module.register_module_forward_hook(lambda *args: None)


def _hook_optimizers():
    optimizers.register_optimizer_step_pre_hook(lambda *args: None)


libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p


def _all_reduce():
    return getattr(dist.all_reduce, "__name__", "nameless")


#: How it is changed, and how it is read.
CHANGES = {
    "descriptor 0": (lambda: os.close(0), lambda: os.readlink("/proc/self/fd/0")),
    "time zone": (_time_zone, lambda: (time.tzname, time.localtime(0).tm_hour)),
    "environment of C": (
        lambda: libc.putenv(ctypes.c_char_p(b"SMP_TEST_C=1")) and None,
        lambda: libc.getenv(b"SMP_TEST_C"),
    ),
    "threads of torch": (lambda: torch.set_num_threads(2), torch.get_num_threads),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.is_deterministic_algorithms_warn_only_enabled,
    ),
    "anomaly": (
        lambda: torch.autograd.set_detect_anomaly(True) and None,
        torch.is_anomaly_enabled,
    ),
    "matmul": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "denormals": (
        lambda: torch.set_flush_denormal(True),
        lambda: float(torch.tensor(5e-324, dtype=torch.float64) * 1.0),
    ),
    "locale": (
        lambda: locale.setlocale(locale.LC_ALL, "C"),
        lambda: locale.setlocale(locale.LC_ALL),
    ),
    "niceness": (lambda: os.nice(3), lambda: os.nice(0)),
    "affinity": (_other_cores, lambda: os.sched_getaffinity(0)),
    "trace": (lambda: sys.settrace(lambda *args: None), sys.gettrace),
    "trace of threads": (lambda: threading.settrace(lambda *args: None), threading.gettrace),
    "gc": (lambda: gc.set_threshold(1, 1, 1), gc.get_threshold),
    "switch interval": (lambda: sys.setswitchinterval(0.5), sys.getswitchinterval),
    "import names": (_import_names, lambda: "smdistributed" in sys.modules),
    "meta path": (_a_finder, lambda: len(sys.meta_path)),
    "socket timeout": (lambda: socket.setdefaulttimeout(7.0), socket.getdefaulttimeout),
    "memory limit": (
        lambda: _limit("RLIMIT_AS", 1 << 40),
        lambda: resource.getrlimit(resource.RLIMIT_AS),
    ),
    "files limit": (
        lambda: _limit("RLIMIT_NOFILE", 100),
        lambda: resource.getrlimit(resource.RLIMIT_NOFILE),
    ),
    "hooks of all modules": (
        _hook,
        lambda: len(torch.nn.modules.module._global_forward_hooks),
    ),
    "torch.distributed": (
        lambda: _patch(dist, "all_reduce"),
        lambda: dist.all_reduce.__module__,
    ),
    "c10d": (
        lambda: _patch(dist.distributed_c10d, "_get_default_group"),
        lambda: dist.distributed_c10d._get_default_group.__module__,
    ),
    "random": (lambda: _patch(random, "random"), lambda: 0 <= random.random() < 1),
    "Module": (
        lambda: _patch(torch.nn.Module, "forward"),
        lambda: torch.nn.Module.forward.__module__,
    ),
    "builtins": (lambda: _patch(__builtins_module(), "sorted"), lambda: sorted([2, 1])),
    "one for another": (lambda: setattr(dist, "all_reduce", dist.broadcast), _all_reduce),
    "a partial": (
        lambda: setattr(dist, "all_reduce", functools.partial(dist.all_reduce, async_op=True)),
        _all_reduce,
    ),
    "a builtin for another": (
        lambda: setattr(time, "sleep", time.monotonic),
        lambda: time.sleep.__name__,
    ),
    "functional": (lambda: setattr(F, "relu", F.gelu), lambda: F.relu.__name__),
    "hooks of all optimizers": (
        _hook_optimizers,
        lambda: len(optimizers._global_optimizer_pre_hooks),
    ),
    "print options": (
        lambda: torch.set_printoptions(precision=1),
        lambda: str(torch.tensor(0.12345)),
    ),
    "mkldnn": (
        lambda: torch.backends.mkldnn.set_flags(False) and None,
        lambda: torch.backends.mkldnn.enabled,
    ),
    "attention": (
        lambda: torch.backends.cuda.enable_math_sdp(False),
        torch.backends.cuda.math_sdp_enabled,
    ),
    "cudnn": (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: torch.backends.cudnn.benchmark,
    ),
    "tempdir": (lambda: setattr(tempfile, "tempdir", "/nonexistent"), lambda: tempfile.tempdir),
    "a deleted setting": (lambda: delattr(tempfile, "tempdir"), lambda: tempfile.tempdir),
    "a deleted function": (lambda: delattr(time, "time"), lambda: time.time() > 0),
}


def __builtins_module():
    return sys.modules["builtins"]


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_the_next_body_finds_what_the_first_found(executor, change):
    changes, read = CHANGES[change]

    def spoils():
        before = read()
        changes()
        return before

    before = _run(executor, spoils)
    assert _run(executor, read) == before


def test_what_can_be_put_back_costs_no_rank(executor, caplog):
    caplog.set_level("INFO", "pytest_smp.ranks")  # the log says why a rank is replaced
    pids = _run(executor, os.getpid)
    for change in sorted(set(CHANGES) - {"affinity"}):
        _run(executor, lambda change=change: CHANGES[change][0]() and None)
        assert caplog.messages == [], change
    assert _run(executor, os.getpid) == pids


def test_what_cannot_be_put_back_costs_the_rank(executor):
    def spoils():
        sys.path_hooks = ()  # no list, which could be changed in place
        return os.getpid()

    pids = _run(executor, spoils)
    after = _run(executor, os.getpid)
    assert not set(pids) & set(after)


def _boom(*args, **kwargs):
    raise RuntimeError("patched")


def _break_functions():
    """Replace all functions and classes of much used modules, and of builtins at last."""
    modules = [sys, os, time, random, math, socket, threading, pickle, gc, locale, resource, signal]
    for module in (*modules, tempfile, torch, F, dist, sys.modules["builtins"]):
        namespace = vars(module)
        namespace.update(
            dict.fromkeys([name for name in namespace if callable(namespace[name])], _boom)
        )


def _delete_builtins():
    vars(sys.modules["builtins"]).clear()


@pytest.mark.parametrize("breaks", [_break_functions, _delete_builtins])
def test_the_code_after_a_body_calls_no_function_of_the_bodys(executor, breaks):
    """A rank goes on after bodies that return and that raise, without functions of theirs."""

    def raises():
        error = KeyError("the body's")
        breaks()
        raise error

    pids = _run(executor, os.getpid)
    _run(executor, breaks)
    report = executor.open(RANKS).run(
        Job(body=raises, arguments=lambda rank: ((), {}), timeout=60.0)
    )
    assert repr(report.error) == repr(KeyError("the body's"))
    assert _run(executor, os.getpid) == pids


#: The ways in which a module changes torch.nn.functional.relu when it is imported.
MODULES = {
    "a function": "def relu(*args, **kwargs): return old(*args, **kwargs)",
    "a function that wraps": (
        "@functools.wraps(old)\ndef relu(*args, **kwargs): return old(*args, **kwargs)"
    ),
    "a partial": "relu = functools.partial(old)",
    "an instance": "class Relu:\n    __call__ = staticmethod(old)\nrelu = Relu()",
    "a class": "class relu: pass",
}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_what_a_module_changes_when_a_body_imports_it_stays(executor, tmp_path, module):
    """The module stays imported: no later import would change the function again."""
    code = "import functools\nimport torch.nn.functional as F\nold = F.relu\n"
    (tmp_path / "smp_test_module.py").write_text(f"{code}{MODULES[module]}\nF.relu = relu\n")

    def imports():
        sys.path.insert(0, str(tmp_path))
        import smp_test_module

        return F.relu is smp_test_module.relu

    try:
        for _ in range(3):
            assert _run(executor, imports) == [True] * RANKS
    finally:
        executor.replace([executor._ranks[0], executor._ranks[1]])  # for the tests after this one


def test_a_patch_by_a_body_is_undone_beside_one_by_what_it_imports(executor, tmp_path):
    (tmp_path / "smp_test_module.py").write_text("import time\ndef f(): pass\ntime.sleep = f\n")

    def body():
        sys.path.insert(0, str(tmp_path))
        import smp_test_module

        found = F.relu.__name__, time.sleep is smp_test_module.f
        F.relu = F.gelu
        return found

    try:
        for _ in range(2):
            assert _run(executor, body) == [("relu", True)] * RANKS
    finally:
        executor.replace([executor._ranks[0], executor._ranks[1]])


def test_what_torch_changes_of_itself_when_it_is_imported_stays(executor):
    """torch._dynamo wraps torch.manual_seed."""

    def imports():
        import torch._dynamo

        return torch.manual_seed.__code__.co_filename, hasattr(torch.manual_seed, "__wrapped__")

    try:
        first = _run(executor, imports)
        assert _run(executor, imports) == first
        assert all(wrapped for _, wrapped in first)
    finally:
        executor.replace([executor._ranks[0], executor._ranks[1]])
