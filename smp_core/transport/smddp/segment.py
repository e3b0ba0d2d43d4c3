"""The shared memory of one group on one machine: made by one member there, found by the others through the store.

Note [No name to leave behind]: the memory is an anonymous file (``memfd_create``). The first member writes its
process id, the file's descriptor and a secret into the group's store; the others open
``/proc/PID/fd/DESCRIPTOR``, which the kernel allows to processes of the same user alone. So no name exists that a
killed rank could leave, and /dev/shm may be as small as it likes. The first member closes the
descriptor when all have opened it. The maker is the first member on the first member's machine, and on another machine
the member that begins first. The rows of members elsewhere are copied there (inter_machine.py).

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
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import distributed as dist

from smp_core.errors import BackendError
from smp_core.transport.smddp import futex

ROUND_SLOTS = 4  # rounds of a group whose data exist at once
# Bytes of a round: the slots of a group of up to 8 members stay in a cache of 8 MiB. With more members each row has the
# least, and a round is longer.
ROUND_BYTES, LEAST_ROW_BYTES = 2 * 1024 * 1024, 256 * 1024
# Bytes by which a member describes its call: the least, and those added for each member, whose sizes it gives, too.
DESCRIPTION_BYTES, DESCRIPTION_BYTES_PER_MEMBER = 4096, 64
DIGEST_BYTES = 16  # half of a call, half of its sizes
# The packets of a link, and the pieces of its long messages: their sizes, and how many are on their way at once.
PACKET_BYTES, PACKET_SLOTS = 2048, 16
PIECE_BYTES, PIECE_SLOTS = 128 * 1024, 2
LINK_BYTES = 4096 + PACKET_BYTES * PACKET_SLOTS + PIECE_BYTES * PIECE_SLOTS
_MEMBER_BYTES = 32  # of a member's row in the table: four numbers of 64 bits
_LINE = 64  # bytes of a cache line: words that different ranks write do not share one
_SECRET = 16
_REFUSED = "there is no shared memory:"
_UNLIKE = "the ranks have called new_group with different ranks"
_POLL_INTERVAL = 0.1  # seconds between two checks whether another member has failed
LEFT, FAILED, DISCONNECTED = 1, 2, 3  # the last: the connection from its machine has ended
_DEPARTURES = ("", "it has destroyed the group", "an operation of it on the group has failed")
_WRAP = 2**32
_EXCHANGES = ("machine", "group", "stream", "ready")
_PAGE = mmap.PAGESIZE


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


def row_bytes(size: int) -> int:
    """The bytes of a row, which a member of a group of ``size`` writes in one round: whole pages."""
    return max(LEAST_ROW_BYTES, ROUND_BYTES // size // _PAGE * _PAGE)


class MemberLayout(NamedTuple):
    """The offsets of a member's numbers, of 64 bits each, in the table of members."""

    process: int
    process_start: int
    rounds: int
    """The number of rounds that the member has arrived at."""
    departure: int
    """The reason why the member arrives at no further round; 0 if it may."""


class LinkLayout(NamedTuple):
    """The offsets in a link. Each counter has a cache line; two are the sender's, and two the receiver's."""

    written: int
    consumed: int
    bulk_written: int
    bulk_consumed: int
    packets: int
    pieces: int


class SegmentLayout:
    """The offsets in the segment of a group of ``size`` members, in bytes."""

    def __init__(self, size: int) -> None:
        self.size, self.row_bytes = size, row_bytes(size)
        self.description_bytes = max(
            DESCRIPTION_BYTES, _up(DESCRIPTION_BYTES_PER_MEMBER * size, _PAGE)
        )
        self.members = _LINE
        self.attached = _up(self.members + size * _MEMBER_BYTES, _LINE)
        self.idle = self.attached + _LINE
        self.arrived = self.idle + _LINE
        self.doorbells = self.arrived + ROUND_SLOTS * _LINE
        self.digests = self.doorbells + size * _LINE
        self.descriptions = _up(self.digests + ROUND_SLOTS * size * DIGEST_BYTES, _PAGE)
        self.data = self.descriptions + ROUND_SLOTS * size * self.description_bytes
        self.links = self.data + ROUND_SLOTS * size * self.row_bytes
        self.end = self.links + size * size * LINK_BYTES

    def member(self, member: int) -> MemberLayout:
        """A member's row in the table of members."""
        begin = self.members + member * _MEMBER_BYTES
        return MemberLayout(*range(begin, begin + _MEMBER_BYTES, 8))

    def arrival(self, slot: int) -> int:
        """The word of a slot that counts the members which have arrived."""
        return self.arrived + slot * _LINE

    def doorbell(self, member: int) -> int:
        """The word that a member sleeps on while it waits for messages."""
        return self.doorbells + member * _LINE

    def digest(self, slot: int, member: int) -> int:
        """A member's digest of its call in a slot; those of the next members follow."""
        return self.digests + (slot * self.size + member) * DIGEST_BYTES

    def description(self, slot: int, member: int) -> int:
        """A member's description of its call in a slot."""
        return self.descriptions + (slot * self.size + member) * self.description_bytes

    def slot(self, slot: int) -> int:
        """A slot's first row; those of the next members follow."""
        return self.data + slot * self.size * self.row_bytes

    def link_begin(self, source: int, dest: int) -> int:
        """The first byte of the link from one member to another; the link to the next member follows."""
        return self.links + (source * self.size + dest) * LINK_BYTES

    def link(self, source: int, dest: int) -> LinkLayout:
        """The link from one member to another."""
        begin = self.link_begin(source, dest)
        lines = (begin + number * _LINE for number in range(5))
        written, consumed, bulk_written, bulk_consumed, packets = lines
        pieces = packets + PACKET_SLOTS * PACKET_BYTES
        return LinkLayout(written, consumed, bulk_written, bulk_consumed, packets, pieces)


class SharedSegment:
    """One member's view of the group's shared memory.

    Attributes:
        layout: the offsets.
        memory: all of it, to read and write.
        bytes: the same as an array.
        address: of its first byte, in this process.
        remote: the members on other machines, each with its machine's name.
        relays: for each of these the member of this machine that receives its rows for all.
        arrived: for each slot the address of its word, which counts the members that have arrived, and the word.
        rounds: for each member the number of rounds that it has arrived at, as an object with a ``value``.
        broken: the reason why this member makes no further call on the group, once an operation has failed here.
    """

    def __init__(self, store: Any, me: int, size: int, name: str) -> None:
        self.me, self.size, self.name = me, size, name
        self.layout = SegmentLayout(size)
        self.store, self._descriptor = store, -1
        self._memory: Any = None
        self.remote: dict[int, str] = {}
        self.relays: dict[int, int] = {}
        self.broken = ""
        # A group of this name may have been before, in the same store.
        self._key = f"smddp {store.add(f'smddp made by {me}', 1)}"
        self._memory_key = self._key  # where the store has this machine's memory
        self._processes: dict[int, tuple[int, int]] = {}  # of members that have not mapped it yet
        if me:  # it maps the memory later, and may end before
            pid = os.getpid()
            store.set(f"{self._key} process {me}", f"{pid} {_own_start_time()}")
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
        self.store.set(
            self._memory_key, f"{os.getpid()} {self._descriptor} {secret.hex()} {self.me}"
        )

    def refuse(self, error: BaseException) -> None:
        """Announce the failure of this member to those that wait for it."""
        keys = [self._failed_key]
        if self.me == 0:
            keys.append(self._key)  # for those that have not mapped the memory
        keys += [self._exchange_key(topic, self.me) for topic in _EXCHANGES]
        text = str(error)  # of another member perhaps
        text = text if text.startswith(_REFUSED) else f"{_REFUSED} member {self.me}: {text}"
        with contextlib.suppress(RuntimeError):  # the store may have ended
            for key in keys:
                self.store.set(key, text)

    @property
    def _failed_key(self) -> str:
        return f"{self._key} failed"

    def _exchange_key(self, topic: str, member: int) -> str:
        return f"{self._key} {topic} {member}"

    def exchange(self, topic: str, value: str, timeout: datetime.timedelta) -> list[str]:
        """The values of all members, once they have set them.

        Raises BackendError if one has failed, or has set none after ``timeout``.
        """
        assert topic in _EXCHANGES
        self.store.set(self._exchange_key(topic, self.me), value)
        keys = [self._exchange_key(topic, member) for member in range(self.size)]
        try:
            self.store.wait(keys, timeout)
        except RuntimeError as error:
            absent = [member for member, key in enumerate(keys) if not self.store.check([key])]
            raise BackendError(
                f"group {self.name}: {self.size - len(absent)} of {self.size} ranks came to init_process_group or "
                f"new_group within {timeout.total_seconds():g} s; member {self.me} waited for members {absent}: "
                f"{str(error).partition(chr(10))[0]}"
            ) from None
        return self.exchanged(topic)

    def exchanged(self, topic: str) -> list[str]:
        """The values that all members have set.

        Raises BackendError if one has failed.
        """
        keys = [self._exchange_key(topic, member) for member in range(self.size)]
        values = [each.decode() for each in self.store.multi_get(keys)]
        for each in values:
            if each.startswith(_REFUSED):
                raise BackendError(each)
        return values

    def machines(self, timeout: datetime.timedelta) -> list[str]:
        """The machines of all members, each with its name behind a space."""
        return self.exchange("machine", f"{_machine()} {socket.gethostname()}", timeout)

    def open_on_machines(self, machines: Sequence[str], timeout: datetime.timedelta) -> None:
        """Open the memory of this machine, one of several that the group is on."""
        own = machines[self.me]
        self.remote = {
            member: each.partition(" ")[2] for member, each in enumerate(machines) if each != own
        }
        try:
            if own != machines[0]:
                self._memory_key = f"{self._key} on {own}"
                if self.store.add(f"{self._memory_key} made", 1) == 1:
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
        except BaseException as error:  # Ctrl-C as well: the others would wait
            self.refuse(error)
            raise

    def _open(self, timeout: datetime.timedelta) -> None:
        try:
            self.store.wait([self._memory_key], timeout)
        except RuntimeError as error:
            raise BackendError(
                f"group {self.name}: member {self.me} waited for the shared memory of member 0, which did not come to "
                f"init_process_group or new_group: {str(error).partition(chr(10))[0]}"
            ) from None
        found = self.store.get(self._memory_key).decode()
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
                f"{error.strerror}. Either that process has ended, or it is another user's, or {_UNLIKE}"
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
                f"used it, or {_UNLIKE}"
            )
        self._join()

    def _map(self, descriptor: int) -> None:
        self._memory = _map_file(descriptor, self.layout.end)
        self.bytes: Any = np.frombuffer(self._memory, np.uint8)
        self.view = memoryview(self._memory).cast("B")
        self.address = ctypes.addressof(self._memory)
        slots = [self.layout.arrival(slot) for slot in range(ROUND_SLOTS)]
        self.arrived = [(self.address + at, self.word(at)) for at in slots]
        rows = [self.layout.member(member) for member in range(self.size)]
        self.rounds = [self.count(row.rounds) for row in rows]

    def _join(self) -> None:
        # First: should the process end now, all are known to have come, and the store tells which process it was.
        futex.add_and_wake(self.address + self.layout.attached)
        row = self.layout.member(self.me)
        # Each in one write; others may read in between.
        self.count(row.process).value = os.getpid()
        self.count(row.process_start).value = _own_start_time()

    def wait_for_all(self, timeout: datetime.timedelta) -> None:
        """Return when all members have mapped the memory, so that each may leave or end before the others use it.

        Raises DistBackendError after ``timeout``, and if a member has ended before it mapped the memory; BackendError
        if another member has failed to begin.
        """
        try:
            self._wait_for_all(timeout)
        except BaseException as error:
            self.refuse(error)
            raise
        finally:
            self.release()

    def _wait_for_all(self, timeout: datetime.timedelta) -> None:
        at, end = self.layout.attached, time.monotonic() + timeout.total_seconds()
        while (seen := self.word(at).value) < self.size:
            left = max(end - time.monotonic(), 0.0)
            if futex.sleep([(self.address + at, seen)], min(_POLL_INTERVAL, left)):
                continue
            if self.store.check([self._failed_key]):
                raise BackendError(self.store.get(self._failed_key).decode())
            if ended := self._ended_before_mapping():
                raise dist.DistBackendError(f"group {self.name} cannot begin: {ended}")
            if left <= 0:
                raise dist.DistBackendError(
                    f"{seen} of {self.size} ranks came to init_process_group or new_group within "
                    f"{timeout.total_seconds():g} s"
                )

    def _ended_before_mapping(self) -> str:
        """The members whose processes have ended before they mapped the memory, in words; empty if there is none."""
        absent = [member for member in range(self.size) if not self._has_mapped(member)]
        ended = [(member, why) for member in absent if (why := self._process_end(member))]
        # Asked again: one may have mapped the memory and ended since.
        return "; ".join(
            f"member {each}: {why}" for each, why in ended if not self._has_mapped(each)
        )

    def _has_mapped(self, member: int) -> bool:
        """Return whether a member has written its row, which it does once it has mapped the memory."""
        return bool(self.count(self.layout.member(member).process).value)

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
        """Announce that this member makes no further call."""
        self.release()
        if self._memory is not None:
            self.mark_departed(self.me, LEFT)

    def fail(self, error: BaseException, group: str) -> Exception:
        """Announce that this member arrives at no further round, because an operation of it has failed.

        Returns the error of the operations that are in flight.
        """
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self.broken = f"an operation on group {group} has failed on this rank: {text}"
        self.mark_departed(self.me, FAILED)
        if isinstance(error, Exception):
            return error
        return dist.DistBackendError(self.broken)  # Ctrl-C is the main thread's

    def mark_departed(self, member: int, reason: int) -> None:
        """Announce on this machine that a member arrives at no further round. The first reason stays."""
        departure = self.count(self.layout.member(member).departure)
        departure.value = departure.value or reason

    def arrive(self, member: int, number: int) -> None:
        """Count a member in, whose row of a round is written, and wake the others if all have arrived."""
        address, arrived = self.arrived[number % ROUND_SLOTS]
        futex.add_one(address, self.address + self.layout.idle)
        # After the word: a member that is counted here has arrived.
        self.rounds[member].value = number + 1
        if arrived.value == self.full_count(number):
            futex.wake(address)

    def full_count(self, number: int) -> int:
        """The count of a round's word when all members have arrived."""
        return self.size * (number // ROUND_SLOTS + 1) % _WRAP

    def count(self, offset: int) -> Any:
        """A number of 64 bits that one member writes, as an object with a ``value``."""
        return ctypes.c_uint64.from_buffer(self.memory, offset)

    def departure(self, member: int) -> str:
        """The reason why a member arrives at nothing any more; empty if it may."""
        if member not in self.remote and (ended := self._process_end(member)):
            return ended
        reason = self.count(self.layout.member(member).departure).value
        return self.departure_text(member, reason)

    def _process_end(self, member: int) -> str:
        """The end of the process of a member of this machine, in words; empty if it lives or is not known yet."""
        pid, start = self._process(member)
        with contextlib.suppress(OSError):  # the next poll may find it
            if pid and start and _start_time(pid) != start:
                return f"its process {pid} has ended"
        return ""

    def departure_text(self, member: int, reason: int) -> str:
        """The reason of a member's departure in words."""
        if reason == DISCONNECTED:
            return f"its connection from machine {self.remote[member]} has ended"
        return _DEPARTURES[reason]

    def _process(self, member: int) -> tuple[int, int]:
        """A member's process and its start; a zero among them if the member is not known yet."""
        row = self.layout.member(member)
        known = self.count(row.process).value, self.count(row.process_start).value
        if all(known):
            return known
        if member not in self._processes:
            key = f"{self._key} process {member}"
            with contextlib.suppress(RuntimeError):  # the store may have ended
                if self.store.check([key]):
                    pid, start = self.store.get(key).split()
                    self._processes[member] = int(pid), int(start)
        return self._processes.get(member, (0, 0))

    def blocking_departures(self, rounds: int) -> dict[int, str]:
        """The departures that keep members from more than so many rounds, by the departed member."""
        absent = self.absent(rounds)
        blocking = {member: why for member, why in absent.items() if why}
        for relay in {self.relays[member] for member in absent if member in self.relays}:
            if why := self.departure(relay):
                blocking[relay] = why
        return dict(sorted(blocking.items()))

    def absent(self, rounds: int) -> dict[int, str]:
        """The members that have arrived at no more than so many rounds, with their departures: texts, or nothing."""
        return {
            member: self.departure(member)
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


def _map_file(descriptor: int, size: int) -> Any:
    """All of a file as memory, until its last user ends. Python's own mapping would keep a descriptor open."""
    address = _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        problem = ctypes.get_errno()
        raise BackendError(f"cannot map {size} bytes of shared memory: {os.strerror(problem)}")
    kind: Any = type("_Memory", (_Memory,), {"_length_": size})
    memory = kind.from_address(address)
    weakref.finalize(memory, _munmap, address, size).atexit = False
    return memory


def _start_time(pid: int) -> int | None:
    """The start of a process, in the kernel's ticks: with its id it names one process. None if it ends or has ended."""
    # Any other error, such as that of too many open files, says nothing of the process.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # As bytes: the name of a program may end inside of a character.
        state, *rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        began, memory = rest[18:20]
        if state not in b"ZX" and memory != b"0":  # an ending process first gives up its memory
            return int(began)
    return None


def _own_start_time() -> int:
    """The start of this process; 0 where it cannot be read: the others do not notice its end then."""
    with contextlib.suppress(OSError):
        return _start_time(os.getpid()) or 0
    return 0


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
