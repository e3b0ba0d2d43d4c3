"""The shared memory of one group: made by its first member, found by the others through the store.

Note [No name to leave behind]: the memory is an anonymous file (``memfd_create``). The first member writes its
process id, the file's descriptor and a secret into the group's store; the others open
``/proc/PID/fd/DESCRIPTOR``, which the kernel allows to processes of the same user alone. So no name exists that a
killed rank could leave, and /dev/shm may be as small as it likes. The first member closes the
descriptor when all have opened it.

Note [Sparse]: the file has room for all that a group can use, and takes the memory of the pages that were written to.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import mmap
import os
import secrets
import struct
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from torch import distributed as dist

from smp_core.errors import BackendError
from smp_core.transport.smddp import futex

SLOTS = 4  # rounds of a group whose data exist at once
LARGEST = (
    256 * 1024
)  # bytes that a member writes in one round: the slots of 8 stay in a cache of 8 MiB
HEAD = 4096  # bytes by which a member describes its call
DIGEST = 16  # bytes: half of a call, half of its sizes
CELL, CELLS = 2048, 16  # bytes of a packet; packets on their way from one member to one other
BULK, PIECES = 128 * 1024, 2  # bytes of a piece of a long message; pieces on their way
_ROAD = 4096 + CELL * CELLS + BULK * PIECES
_LINE = 64  # bytes of a cache line: words that different ranks write do not share one
_SECRET = 16
_MEMBER = struct.Struct(
    "<QQQQ"
)  # process id, its start, rounds that it came to, whether it has left
_PAGE = mmap.PAGESIZE


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


class SegmentLayout:
    """Where everything is in the segment of a group of ``size`` members: offsets in bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.members = _LINE
        self.attached = _up(self.members + size * _MEMBER.size, _LINE)
        self.idle = self.attached + _LINE
        self.arrived = self.idle + _LINE
        self.bells = self.arrived + SLOTS * _LINE
        self.digests = self.bells + size * _LINE
        self.heads = _up(self.digests + SLOTS * size * DIGEST, _PAGE)
        self.data = self.heads + SLOTS * size * HEAD
        self.roads = self.data + SLOTS * size * LARGEST
        self.end = self.roads + size * size * _ROAD

    def road(self, source: int, dest: int) -> int:
        """Where messages from one member to another are."""
        return self.roads + (source * self.size + dest) * _ROAD


class Segment:
    """One member's view of the group's shared memory.

    Attributes:
        layout: the offsets.
        memory: all of it, to read and write.
        bytes: the same as an array.
        address: of its first byte, in this process.
    """

    def __init__(self, store: Any, me: int, size: int, name: str) -> None:
        self.me, self.size, self.name = me, size, name
        self.layout = SegmentLayout(size)
        self._store, self._descriptor = store, -1
        self._memory: Any = None
        # A group of this name may have been before, in the same store.
        self._key = f"smddp {store.add(f'smddp made by {me}', 1)}"
        if me == 0:
            self._make()

    def _make(self) -> None:
        self._descriptor = os.memfd_create("smddp", os.MFD_CLOEXEC)
        os.fchmod(self._descriptor, 0o600)
        os.ftruncate(self._descriptor, self.layout.end)
        secret = secrets.token_bytes(_SECRET)
        self._map(self._descriptor)
        self.view[:_SECRET] = secret
        self._join()
        found = f"{os.getpid()} {self._descriptor} {secret.hex()} {_host()}"
        self._store.set(self._key, found)

    def open(self, timeout: datetime.timedelta) -> None:
        """Map the memory, as soon as the first member has made it.

        Raises BackendError if that member is on another host, or its memory cannot be opened.
        """
        if self.opened:
            return
        self._store.wait([self._key], timeout)
        pid, descriptor, secret, host = self._store.get(self._key).decode().split()
        if host != _host():
            raise BackendError(
                f"group {self.name}: its members 0 and {self.me} are on different hosts, or in different process "
                "namespaces; the smddp backend serves the ranks of one host. Take gloo"
            )
        try:
            opened = os.open(
                f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
            )
        except OSError as error:
            raise BackendError(
                f"group {self.name}: member {self.me} cannot open the shared memory of member 0, process {pid}: "
                f"{error.strerror}. Either that process has ended, or it is another user's"
            ) from error
        try:
            found = os.fstat(opened).st_size == self.layout.end
            if found:
                self._map(opened)
                found = self.view[:_SECRET] == bytes.fromhex(secret)
        finally:
            os.close(opened)
        if not found:
            self._memory = None
            raise BackendError(
                f"group {self.name}: member 0, process {pid}, has destroyed the group before member {self.me} used it"
            )
        self._join()

    def _map(self, descriptor: int) -> None:
        self._memory = _mapped(descriptor, self.layout.end)
        self.bytes: Any = np.frombuffer(self._memory, np.uint8)
        self.view = memoryview(self._memory).cast("B")
        self.address = ctypes.addressof(self._memory)

    def _join(self) -> None:
        pid = os.getpid()
        _MEMBER.pack_into(
            self.memory, self.layout.members + self.me * _MEMBER.size, pid, _started(pid) or 0, 0, 0
        )
        futex.add_and_wake(self.address + self.layout.attached)

    def wait_for_all(self, timeout: datetime.timedelta) -> None:
        """On the first member: return when all others have mapped the memory, so that it may end before they use it.

        Raises DistBackendError after ``timeout``.
        """
        at, end = self.layout.attached, time.monotonic() + timeout.total_seconds()
        while self.me == 0 and (seen := self.word(at).value) < self.size:
            if not futex.sleep([(self.address + at, seen)], max(end - time.monotonic(), 0.0)):
                raise dist.DistBackendError(
                    f"{seen} of {self.size} ranks came to init_process_group within "
                    f"{timeout.total_seconds():g} s"
                )
        self.release()

    @property
    def memory(self) -> Any:
        assert self._memory is not None
        return self._memory

    @property
    def opened(self) -> bool:
        """True once the memory is mapped."""
        return self._memory is not None

    def word(self, offset: int) -> Any:
        """A word as an object whose ``value`` is read from the memory each time."""
        return ctypes.c_uint32.from_buffer(self.memory, offset)

    def release(self) -> None:
        """Close the descriptor: all members have mapped the memory, or this one has left."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def leave(self) -> None:
        """Tell the others that this member makes no further call."""
        self.release()
        if self._memory is not None:
            at = self.layout.members + self.me * _MEMBER.size
            pid, start, rounds, _ = _MEMBER.unpack_from(self.memory, at)
            _MEMBER.pack_into(self.memory, at, pid, start, rounds, 1)

    def count(self, offset: int) -> Any:
        """A number of 64 bits that one member writes, as an object with a ``value``."""
        return ctypes.c_uint64.from_buffer(self.memory, offset)

    def rounds(self) -> Any:
        """The number of rounds that this member has come to, as an object with a ``value``."""
        return self.count(self.layout.members + self.me * _MEMBER.size + 16)

    def gone(self, member: int) -> str:
        """Why a member comes to nothing any more; empty if it may."""
        at = self.layout.members + member * _MEMBER.size
        pid, start, _, left = _MEMBER.unpack_from(self.memory, at)
        if pid and _started(pid) != start:
            return f"its process {pid} has ended"
        return "it has destroyed the group" if left else ""

    def absent(self, rounds: int) -> dict[int, str]:
        """The members that have come to no more than so many rounds: why they never will, or nothing."""
        found = {}
        for member in range(self.size):
            at = self.layout.members + member * _MEMBER.size
            if _MEMBER.unpack_from(self.memory, at)[2] <= rounds:
                found[member] = self.gone(member)
        return found


class _Memory(ctypes.Array[ctypes.c_ubyte]):
    """The type of a mapping; ctypes wants the length in the type."""

    _type_, _length_ = ctypes.c_ubyte, 0


_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc["mmap"]
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_munmap = _libc["munmap"]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def _mapped(descriptor: int, size: int) -> Any:
    """All of a file as memory, until its last user ends. Python's own mapping would keep a descriptor open."""
    address = _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        problem = ctypes.get_errno()
        raise BackendError(f"cannot map {size} bytes of shared memory: {os.strerror(problem)}")
    kind: Any = type("_Memory", (_Memory,), {"_length_": size})
    memory = kind.from_address(address)
    weakref.finalize(memory, _munmap, address, size).atexit = False
    return memory


def _started(pid: int) -> int | None:
    """When a process began, in the kernel's ticks: with its id it names one process. None if it has ended."""
    with contextlib.suppress(OSError):
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if state not in "ZX":
            return int(rest[18])
    return None


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
