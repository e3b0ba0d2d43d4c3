"""The shared memory of one group on one machine: made by one member there, found by the others through the store.

Note [No name to leave behind]: the memory is an anonymous file (``memfd_create``). The first member writes its
process id, the file's descriptor and a secret into the group's store; the others open
``/proc/PID/fd/DESCRIPTOR``, which the kernel allows to processes of the same user alone. So no name exists that a
killed rank could leave, and /dev/shm may be as small as it likes. The first member closes the
descriptor when all have opened it. On the first member's machine it is the first member; on another one the member
that comes first, and the rows of members elsewhere are copied there (courier.py).

Note [Sparse]: the file has room for all that a group can use, and takes the memory of the pages that were written to.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import mmap
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import distributed as dist

from smp_core.errors import BackendError
from smp_core.transport.smddp import futex

SLOTS = 4  # rounds of a group whose data exist at once
# Bytes that a member writes in one round: the slots of 8 stay in a cache of 8 MiB.
LARGEST = 256 * 1024
# Bytes by which a member describes its call: the least, and those added for each member, whose sizes are told, too.
HEAD, HEAD_OF_EACH = 4096, 64
DIGEST = 16  # bytes: half of a call, half of its sizes
CELL, CELLS = 2048, 16  # bytes of a packet; packets on their way from one member to one other
BULK, PIECES = 128 * 1024, 2  # bytes of a piece of a long message; pieces on their way
_ROAD = 4096 + CELL * CELLS + BULK * PIECES
_LINE = 64  # bytes of a cache line: words that different ranks write do not share one
_SECRET = 16
_REFUSED = "there is no shared memory:"
_TICK = 0.1  # seconds between two looks whether another member has failed
# Process id, its start, rounds that it came to, why it comes to no more.
_MEMBER = struct.Struct("<QQQQ")
_START, _ROUNDS, _LEFT = 8, 16, 24  # bytes from the row's begin
_WHY = ("", "it has destroyed the group", "an operation of it on the group has failed")
LEFT, FAILED, ENDED = 1, 2, 3  # the last: the connection from its machine
_WRAP = 2**32
_EXCHANGES = ("machine", "group", "stream", "ready")
_PAGE = mmap.PAGESIZE


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


class SegmentLayout:
    """Where everything is in the segment of a group of ``size`` members: offsets in bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.head = max(HEAD, _up(HEAD_OF_EACH * size, _PAGE))
        self.members = _LINE
        self.attached = _up(self.members + size * _MEMBER.size, _LINE)
        self.idle = self.attached + _LINE
        self.arrived = self.idle + _LINE
        self.bells = self.arrived + SLOTS * _LINE
        self.digests = self.bells + size * _LINE
        self.heads = _up(self.digests + SLOTS * size * DIGEST, _PAGE)
        self.data = self.heads + SLOTS * size * self.head
        self.roads = self.data + SLOTS * size * LARGEST
        self.end = self.roads + size * size * _ROAD

    def road(self, source: int, dest: int) -> int:
        """Where messages from one member to another are."""
        return self.roads + (source * self.size + dest) * _ROAD


class SharedSegment:
    """One member's view of the group's shared memory.

    Attributes:
        layout: the offsets.
        memory: all of it, to read and write.
        bytes: the same as an array.
        address: of its first byte, in this process.
        far: the members on other machines, each with its machine's name.
        carriers: for each of these the member of this machine that gets its rows for all.
        arrived: for each slot its word, which counts the members that have come, and the address of that.
        rounds: for each member the number of rounds that it has come to, as an object with a ``value``.
        broken: why this member makes no further call on the group, once an operation has failed here.
    """

    def __init__(self, store: Any, me: int, size: int, name: str) -> None:
        self.me, self.size, self.name = me, size, name
        self.layout = SegmentLayout(size)
        self.store, self._descriptor = store, -1
        self._memory: Any = None
        self.far: dict[int, str] = {}
        self.carriers: dict[int, int] = {}
        self.broken = ""
        # A group of this name may have been before, in the same store.
        self._key = f"smddp {store.add(f'smddp made by {me}', 1)}"
        self._place = self._key  # where the store tells of this machine's memory
        self._processes: dict[int, tuple[int, int]] = {}  # of members that have not mapped it yet
        if me:  # it maps the memory later, and may end before
            pid = os.getpid()
            store.set(f"{self._key} process {me}", f"{pid} {_own_start()}")
        else:
            try:
                self._make()
            except Exception as error:
                self.release()
                self.refuse(error)
                raise

    def _make(self) -> None:
        try:
            self._descriptor = os.memfd_create("smddp", os.MFD_CLOEXEC)
            os.fchmod(self._descriptor, 0o600)
            os.ftruncate(self._descriptor, self.layout.end)
        except OSError as error:
            raise BackendError(
                f"group {self.name}: member {self.me} cannot make {self.layout.end} bytes of shared memory: "
                f"{error.strerror}. The limits of the process (ulimit -a) must allow a file of this size and one "
                "more descriptor"
            ) from error
        secret = secrets.token_bytes(_SECRET)
        self._map(self._descriptor)
        self.view[:_SECRET] = secret
        self._join()
        self.store.set(self._place, f"{os.getpid()} {self._descriptor} {secret.hex()} {self.me}")

    def refuse(self, error: BaseException) -> None:
        """Tell the members that wait for this one."""
        keys = [self._key if self.me == 0 else f"{self._key} failed"]
        keys += [self._told_at(what, self.me) for what in _EXCHANGES]
        for key in keys:
            self.store.set(key, f"{_REFUSED} member {self.me}: {error}")

    def _told_at(self, what: str, member: int) -> str:
        return f"{self._key} {what} {member}"

    def exchange(self, what: str, value: str, timeout: datetime.timedelta) -> list[str]:
        """The values of all members, once they have told them.

        Raises BackendError if one has failed, or has told none after ``timeout``.
        """
        assert what in _EXCHANGES
        self.store.set(self._told_at(what, self.me), value)
        keys = [self._told_at(what, member) for member in range(self.size)]
        try:
            self.store.wait(keys, timeout)
        except RuntimeError as error:
            absent = [member for member, key in enumerate(keys) if not self.store.check([key])]
            raise BackendError(
                f"group {self.name}: {self.size - len(absent)} of {self.size} ranks came to init_process_group or "
                f"new_group within {timeout.total_seconds():g} s; member {self.me} waited for members {absent}: "
                f"{str(error).partition(chr(10))[0]}"
            ) from None
        return self.told(what)

    def told(self, what: str) -> list[str]:
        """The values that all members have told.

        Raises BackendError if one has failed.
        """
        keys = [self._told_at(what, member) for member in range(self.size)]
        values = [each.decode() for each in self.store.multi_get(keys)]
        for each in values:
            if each.startswith(_REFUSED):
                raise BackendError(each)
        return values

    def machines(self, timeout: datetime.timedelta) -> list[str]:
        """The machines of all members, each with its name behind a space."""
        return self.exchange("machine", f"{_machine()} {socket.gethostname()}", timeout)

    def open_beside(self, machines: Sequence[str], timeout: datetime.timedelta) -> None:
        """Open the memory of this machine, one of several that the group is on."""
        mine = machines[self.me]
        self.far = {
            member: each.partition(" ")[2] for member, each in enumerate(machines) if each != mine
        }
        try:
            if mine != machines[0]:
                self._place = f"{self._key} on {mine}"
                if self.store.add(f"{self._place} made", 1) == 1:
                    self._make()
            self.open(timeout)
        except Exception as error:
            self.release()
            self.refuse(error)
            raise

    def open(self, timeout: datetime.timedelta) -> None:
        """Map the memory, as soon as the first member has made it.

        Raises BackendError if its memory cannot be opened.
        """
        if self.opened:
            return
        try:
            self._open(timeout)
        except Exception as error:
            self.refuse(error)
            raise

    def _open(self, timeout: datetime.timedelta) -> None:
        try:
            self.store.wait([self._place], timeout)
        except RuntimeError as error:
            raise BackendError(
                f"group {self.name}: member {self.me} waited for the shared memory of member 0, which did not come to "
                f"init_process_group or new_group: {str(error).partition(chr(10))[0]}"
            ) from None
        found = self.store.get(self._place).decode()
        if found.startswith(_REFUSED):
            raise BackendError(found)
        pid, descriptor, secret, maker = found.split()
        try:
            opened = os.open(
                f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
            )
        except OSError as error:
            raise BackendError(
                f"group {self.name}: member {self.me} cannot open the shared memory of member {maker}, process {pid}: "
                f"{error.strerror}. Either that process has ended, or it is another user's"
            ) from error
        try:
            same = os.fstat(opened).st_size == self.layout.end
            if same:
                self._map(opened)
                same = self.view[:_SECRET] == bytes.fromhex(secret)
        finally:
            os.close(opened)
        if not same:
            self._memory = None
            raise BackendError(
                f"group {self.name}: member {maker}, process {pid}, has destroyed the group before member {self.me} "
                "used it"
            )
        self._join()

    def _map(self, descriptor: int) -> None:
        self._memory = _mapped(descriptor, self.layout.end)
        self.bytes: Any = np.frombuffer(self._memory, np.uint8)
        self.view = memoryview(self._memory).cast("B")
        self.address = ctypes.addressof(self._memory)
        slots = [self.layout.arrived + slot * _LINE for slot in range(SLOTS)]
        self.arrived = [(self.address + at, self.word(at)) for at in slots]
        self.rounds = [self.count(self._row(member) + _ROUNDS) for member in range(self.size)]

    def _join(self) -> None:
        pid, row = os.getpid(), self._row(self.me)
        # Each in one write; others may look in between.
        self.count(row).value = pid
        self.count(row + _START).value = _own_start()
        futex.add_and_wake(self.address + self.layout.attached)

    def wait_for_all(self, timeout: datetime.timedelta) -> None:
        """On the first member: return when all others have mapped the memory, so that it may end before they use it.

        Raises DistBackendError after ``timeout``.
        """
        try:
            if self.me == 0:
                self._wait_for_all(timeout)
        finally:
            self.release()

    def _wait_for_all(self, timeout: datetime.timedelta) -> None:
        at, end = self.layout.attached, time.monotonic() + timeout.total_seconds()
        failed = f"{self._key} failed"
        while (seen := self.word(at).value) < self.size:
            left = max(end - time.monotonic(), 0.0)
            if futex.sleep([(self.address + at, seen)], min(_TICK, left)):
                continue
            if self.store.check([failed]):
                raise BackendError(self.store.get(failed).decode())
            if left <= 0:
                raise dist.DistBackendError(
                    f"{seen} of {self.size} ranks came to init_process_group within "
                    f"{timeout.total_seconds():g} s"
                )

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
        """Close the descriptor: all members have mapped the memory, or this one has left or could not begin."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def leave(self) -> None:
        """Tell the others that this member makes no further call."""
        self.release()
        if self._memory is not None:
            self.mark(self.me, LEFT)

    def fail(self, error: BaseException, group: str) -> Exception:
        """Tell the others that this member comes to no further round, as an operation of it has failed.

        Returns the error of the operations that are in flight.
        """
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self.broken = f"an operation on group {group} has failed on this rank: {text}"
        self.mark(self.me, FAILED)
        if isinstance(error, Exception):
            return error
        return dist.DistBackendError(self.broken)  # Ctrl-C is the main thread's

    def mark(self, member: int, why: int) -> None:
        """Tell the others on this machine that a member comes to no further round."""
        left = self.count(self._row(member) + _LEFT)
        left.value = left.value or why

    def come(self, member: int, number: int) -> None:
        """Count a member in, whose row of a round is written, and wake the others if all have come."""
        address, arrived = self.arrived[number % SLOTS]
        futex.add_one(address, self.address + self.layout.idle)
        # After the word: who is counted here has come.
        self.rounds[member].value = number + 1
        if arrived.value == self.target(number):
            futex.wake(address)

    def target(self, number: int) -> int:
        """The count of a round's word when all members have come."""
        return self.size * (number // SLOTS + 1) % _WRAP

    def _row(self, member: int) -> int:
        """Where the table has a member."""
        return self.layout.members + member * _MEMBER.size

    def count(self, offset: int) -> Any:
        """A number of 64 bits that one member writes, as an object with a ``value``."""
        return ctypes.c_uint64.from_buffer(self.memory, offset)

    def gone(self, member: int) -> str:
        """Why a member comes to nothing any more; empty if it may."""
        if member not in self.far:
            pid, start = self._process(member)
            with contextlib.suppress(OSError):  # the next look may see it
                if pid and start and _started(pid) != start:
                    return f"its process {pid} has ended"
        return self.why(member, self.count(self._row(member) + _LEFT).value)

    def why(self, member: int, mark: int) -> str:
        """A member's mark in words."""
        if mark == ENDED:
            return f"its connection from machine {self.far[member]} has ended"
        return _WHY[mark]

    def _process(self, member: int) -> tuple[int, int]:
        """A member's process and its start; a zero among them if the member is not known yet."""
        row = self._row(member)
        known = self.count(row).value, self.count(row + _START).value
        if all(known):
            return known
        if member not in self._processes:
            key = f"{self._key} process {member}"
            with contextlib.suppress(RuntimeError):  # the store may have ended
                if self.store.check([key]):
                    pid, start = self.store.get(key).split()
                    self._processes[member] = int(pid), int(start)
        return self._processes.get(member, (0, 0))

    def lost(self, rounds: int) -> dict[int, str]:
        """Why some of those that have come to no more than so many rounds never will, by the member to blame."""
        absent = self.absent(rounds)
        lost = {member: why for member, why in absent.items() if why}
        for carrier in {self.carriers[member] for member in absent if member in self.carriers}:
            if why := self.gone(carrier):
                lost[carrier] = why
        return dict(sorted(lost.items()))

    def absent(self, rounds: int) -> dict[int, str]:
        """The members that have come to no more than so many rounds: why they never will, or nothing."""
        return {
            member: self.gone(member)
            for member, count in enumerate(self.rounds)
            if count.value <= rounds
        }


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
    """When a process began, in the kernel's ticks: with its id it names one process. None if it ends or has ended."""
    # Any other error, such as that of too many open files, says nothing of the process.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # As bytes: the name of a program may end inside of a character.
        state, *rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        began, memory = rest[18:20]
        if state not in b"ZX" and memory != b"0":  # an ending process first gives up its memory
            return int(began)
    return None


def _own_start() -> int:
    """When this process began; 0, where it cannot look: the others do not notice its end then."""
    with contextlib.suppress(OSError):
        return _started(os.getpid()) or 0
    return 0


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
