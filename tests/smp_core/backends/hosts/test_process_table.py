"""What a body changes of its rank process, the next body does not find: each thing by itself, as a
body does it, and read as a body reads it.
"""

from __future__ import annotations

import ctypes
import gc
import locale
import os
import random
import resource
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from smp_core.backends import open_backend
from smp_core.backends.base import HostOptions, Job, VerdictKind

RANKS = 2


@pytest.fixture(scope="module")
def host():
    host = open_backend("gloo", HostOptions(ranks=RANKS))
    yield host
    host.close()


def _run(host, body):
    report = host.open(RANKS).run(Job(body=body, arguments=lambda rank: ((), {}), timeout=60.0))
    assert report.verdict is VerdictKind.PASSED, report.error
    return report.values


def _limit(name, soft):
    limit = getattr(resource, name)
    resource.setrlimit(limit, (soft, resource.getrlimit(limit)[1]))


def _time_zone():
    os.environ["TZ"] = "Asia/Kathmandu"
    time.tzset()


def _other_cores():
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _a_finder():
    class Finder:
        def find_spec(self, *args):
            return None

    sys.meta_path.insert(0, Finder())


def _patch(owner, name):
    setattr(owner, name, lambda *args, **kwargs: None)


def _hook():
    torch.nn.modules.module.register_module_forward_hook(lambda *args: None)


libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p

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
    "a deleted function": (lambda: delattr(time, "time"), lambda: time.time() > 0),
}


def __builtins_module():
    return sys.modules["builtins"]


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_the_next_body_finds_what_the_first_found(host, change):
    changes, read = CHANGES[change]

    def spoils():
        before = read()
        changes()
        return before

    before = _run(host, spoils)
    assert _run(host, read) == before


def test_what_can_be_put_back_costs_no_rank(host):
    pids = _run(host, os.getpid)
    for change in set(CHANGES) - {"affinity"}:
        _run(host, lambda change=change: CHANGES[change][0]() and None)
    assert _run(host, os.getpid) == pids


def test_what_cannot_be_put_back_costs_the_rank(host, monkeypatch):
    def spoils():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit = _refuse
        return os.getpid()

    pids = _run(host, spoils)
    after = _run(host, os.getpid)
    if resource.getrlimit(resource.RLIMIT_CORE) != (0, 0):
        assert not set(pids) & set(after)


def _refuse(*args):
    raise ValueError("not allowed")


def test_what_a_library_changes_when_it_is_imported_stays(host, tmp_path):
    """A body may be the first to import it."""
    code = "import sys, importlib.abc\nclass Finder(importlib.abc.MetaPathFinder): pass\n"
    site = Path(torch.__file__).parent.parent

    def imports():
        namespace = {"__name__": "smp_test_library"}
        file = str(site / "smp_test_library.py")
        exec(compile(code + "def function(): pass\n", file, "exec"), namespace)
        time.sleep = namespace["function"]
        return time.sleep.__module__

    assert _run(host, imports) == ["smp_test_library"] * RANKS
    assert _run(host, lambda: time.sleep.__module__) == ["smp_test_library"] * RANKS
    host.replace([host._ranks[0], host._ranks[1]])  # for the tests after this one
