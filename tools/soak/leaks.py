"""The resources of the machine that a session holds: processes, descriptors, memory, folders, shared memory."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_FEW = 100
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(frozen=True)
class Held:
    """The resources that this process holds at one moment.

    Attributes:
        descriptors: the number of open descriptors.
        objects: the number of objects that Python's collector knows.
        resident: the resident memory in bytes.
    """

    descriptors: int
    objects: int
    resident: int

    @classmethod
    def now(cls) -> Held:
        """Collect garbage, and count."""
        gc.collect()
        statm = Path("/proc/self/statm").read_text().split()
        return cls(len(os.listdir("/proc/self/fd")), len(gc.get_objects()), int(statm[1]) * _PAGE)


def growth(name: str, before: Held, after: Held, runs: int) -> list[str]:
    """The growth between two moments with ``runs`` runs in between, in words.

    A leak grows by at least a descriptor at some time, by an object a run, or by a page a run. Few runs
    say nothing of objects (caches fill) and of memory (allocators take it in large steps).
    """
    texts = []
    if after.descriptors > before.descriptors:
        texts.append(f"{name}: descriptors {before.descriptors} -> {after.descriptors}")
    if runs >= _FEW and after.objects - before.objects >= runs:
        texts.append(f"{name}: objects {before.objects} -> {after.objects} in {runs} runs")
    if runs >= 10 * _FEW and after.resident - before.resident >= runs * _PAGE:
        texts.append(f"{name}: bytes {before.resident} -> {after.resident} in {runs} runs")
    return texts


def descendants(pid: int | None = None) -> list[int]:
    """The processes that this one, and they, have started and not yet waited for."""
    found = []
    for child in _children(os.getpid() if pid is None else pid):
        found += [child, *descendants(child)]
    return found


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{task}/children").read_text()
            yield from map(int, text.split())


def shared_memory(pids: Iterable[int]) -> set[str]:
    """The files in shared memory that these processes have mapped, and that still have a name."""
    names = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, slash, name = line.partition("/dev/shm/")
                if slash and not name.endswith(" (deleted)"):
                    names.add(slash + name)
    return names
