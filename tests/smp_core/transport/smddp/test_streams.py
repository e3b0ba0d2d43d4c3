"""Streams between processes, which are one process here, and strangers on their port."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from smp_core.transport.smddp import streams
from smp_core.transport.smddp.streams import Buffers, Outbound, Peer, Streams

LIMIT = 60  # seconds: a stream that hangs fails


class Process:
    """The streams of a process, and what came by them."""

    def __init__(self) -> None:
        self.came: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.over: list[str] = []
        self.streams = Streams("127.0.0.1", self._receive, self._on_end)

    def _receive(self, identity: str) -> Buffers:
        while True:
            byte = bytearray(1)
            yield memoryview(byte)
            with self.changed:
                self.came[identity] = self.came.get(identity, b"") + byte
                self.changed.notify_all()

    def _on_end(self, identity: str) -> None:
        with self.changed:
            self.over.append(identity)
            self.changed.notify_all()

    def has(self, other: Process, expected: bytes) -> bool:
        """Return whether these bytes come from another process, and no others."""
        with self.changed:
            identity = other.streams.identity
            self.changed.wait_for(lambda: len(self.came.get(identity, b"")) >= len(expected), LIMIT)
            return self.came.get(identity, b"") == expected

    def ends(self, other: Process) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: other.streams.identity in self.over, LIMIT)


@contextlib.contextmanager
def two_processes() -> Iterator[list[Process]]:
    made = [Process(), Process()]
    yield made
    for each in made:
        each.streams.close()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    with two_processes() as made:
        yield made


def send(stream: Outbound, text: bytes) -> None:
    stream.send([memoryview(text)])


def test_bytes_come_in_order_and_before_the_end(processes: list[Process]) -> None:
    one, other = processes
    held = threading.Event()
    one.streams.call_soon(
        lambda: held.wait(LIMIT)
    )  # it connects when all was sent, so that the bytes wait
    stream = one.streams.stream_to(other.streams.peer())
    assert one.streams.stream_to(other.streams.peer()) is stream
    text = secrets.token_bytes(1000)
    for at in range(0, len(text), 100):
        send(stream, text[at : at + 100])
    held.set()
    one.streams.close()
    assert other.has(one, text)
    assert other.ends(one)
    assert other.streams.ended[one.streams.identity] == "has ended"


def test_what_waits_is_sent_before_the_streams_close() -> None:
    """The receiver reads late. The kernel does not take all at once, and one system call not all pieces."""
    read, sent = threading.Event(), secrets.token_bytes(1 << 16)
    came, all_came = bytearray(), threading.Event()

    def receive(identity: str) -> Buffers:
        assert read.wait(LIMIT)
        while True:
            piece = bytearray(len(sent))
            yield memoryview(piece)
            came.extend(piece)
            if len(came) == 400 * len(sent):
                all_came.set()

    other = Streams("127.0.0.1", receive, lambda identity: None)
    one = Process()
    stream = one.streams.stream_to(other.peer())
    assert stream.settled.wait(LIMIT)
    stream.send(memoryview(sent) for _ in range(400))
    assert not stream.idle
    closer = threading.Thread(target=one.streams.close)
    closer.start()
    while not one.streams.closing:
        os.sched_yield()
    read.set()
    assert all_came.wait(LIMIT)
    assert came == sent * 400
    closer.join()
    other.close()


def since_last_answer(stream: Outbound) -> float:
    """The seconds since the other machine's kernel has acknowledged anything: ``tcpi_last_ack_recv``."""
    assert stream._connection is not None, stream.reason
    info = stream._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
    return float(struct.unpack_from("I", info, 56)[0]) / 1000


def _receive_late(count: int, told: int) -> None:
    """The other process: writes its address, and tells when all bytes have come."""
    came, all_came = 0, threading.Event()

    def receive(identity: str) -> Buffers:
        nonlocal came
        while True:
            piece = bytearray(min(count - came, 1 << 16) or 1)
            yield memoryview(piece)
            came += len(piece)
            if came == count:
                all_came.set()

    others = Streams("127.0.0.1", receive, lambda identity: None)
    os.write(told, json.dumps(others.peer()).encode())
    assert all_came.wait(LIMIT)
    os.write(told, b"all")
    signal.pause()


#: The size of pieces, their number, and the room for them.
STOPPED = {"all at once": (1 << 20, 32, 1 << 18), "one by one": (1, 1 << 14, 1 << 12)}


@pytest.mark.parametrize("name", STOPPED)
def test_a_process_that_is_stopped_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its kernel has no room, and says so when asked. Between two questions it is silent for longer than the limit.

    Bytes that are sent one by one use the room up while more of them are on their way: these stay unacknowledged.
    """
    size, number, room = STOPPED[name]
    # Linux answers one question for room in half a second (tcp_invalid_ratelimit), so that a second may pass without.
    limit = 1.6
    prepare = streams._prepare

    def little(connection: socket.socket) -> None:
        prepare(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)

    monkeypatch.setattr(streams, "_prepare", little)
    monkeypatch.setattr(streams, "_ACKNOWLEDGE_TIMEOUT", limit)
    monkeypatch.setattr(streams, "_LOOK_INTERVAL", 0.1)
    hears, tells = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            _receive_late(number * size, tells)
        os._exit(1)
    one = Process()
    try:
        os.close(tells)
        stream = one.streams.stream_to(Peer(*json.loads(os.read(hears, 4096))))
        assert stream.settled.wait(LIMIT)
        os.kill(child, signal.SIGSTOP)
        _, status = os.waitpid(child, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        for _ in range(number):
            send(stream, bytes(size))
        end = time.monotonic() + LIMIT
        while since_last_answer(stream) < limit + 0.2:
            assert time.monotonic() < end
            time.sleep(0.01)
        while since_last_answer(stream) > limit:  # the next question
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(child, signal.SIGCONT)
        assert os.read(hears, 3) == b"all"
        assert not stream.reason
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(hears)
        one.streams.close()


class Told:
    """A connection of which the kernel tells these numbers of tcp_info."""

    def __init__(self, *numbers: int, length: int = 60) -> None:
        self.told = streams._TCP_INFO.pack(*numbers)[:length]

    def getsockopt(self, *_: int) -> bytes:
        return self.told


@pytest.mark.parametrize(
    ("told", "owes"),
    [
        (Told(0, 0, 50, 10), False),
        (Told(1, 0, 10, 50), False),  # one question for room, or its answer, may be lost
        (Told(2, 0, 10, 50), True),
        (Told(0, 3, 10, 50), True),
        (Told(0, 3, 50, 10), False),  # the last answer is newer than the bytes: there was no room
        (Told(2, 3, 10, 50, length=40), False),  # a kernel that tells less
    ],
)
def test_an_answer_is_owed(told: Any, owes: bool) -> None:
    assert streams._unanswered(told)[0] is owes


def test_a_process_that_was_stopped_gives_the_others_time_to_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[float] = []
    stream: Any = Outbound(Any, Peer("", "", "", 0))
    stream._connection = stream._reader = stream
    monkeypatch.setattr(streams, "_unanswered", lambda _: (True, 1000.0))
    monkeypatch.setattr(Outbound, "end", lambda self, error: ended.append(now))
    for now in (*range(1000, 1011), 1100, *range(1101, 1132)):  # stopped for 90 seconds
        stream.look(float(now))
    assert ended == [1130, 1131]


def test_another_listener_is_refused(processes: list[Process]) -> None:
    """A listener that does not know the secret in the store."""
    one, other = processes
    wrong = other.streams.peer()._replace(secret=secrets.token_hex(32))
    stream = one.streams.stream_to(wrong)
    send(stream, b"secret")
    assert stream.settled.wait(LIMIT)
    assert stream.reason == "is another process's"
    assert stream.idle
    assert not other.came


def connected(process: Process) -> socket.socket:
    peer = process.streams.peer()
    return socket.create_connection((peer.address, peer.port), timeout=LIMIT)


def dropped(stranger: socket.socket) -> bool:
    """Return whether the other side closes the connection; what it sends before is read."""
    try:
        while stranger.recv(4096):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    finally:
        stranger.close()
    return True


HELLO = struct.pack("<8s16s32s", b"smddp\x00\x00\x01", bytes(16), bytes(32))


STRANGERS: dict[str, list[bytes]] = {
    "garbage": [secrets.token_bytes(5000)],
    "another protocol": [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(64)],
    "another version": [HELLO.replace(b"\x01", b"\x02", 1)],
    "no proof": [HELLO, bytes(32), b"and more"],
    "an echo": [HELLO, b""],
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_dropped_with_no_effect(processes: list[Process], name: str) -> None:
    one, other = processes
    with connected(other) as stranger:
        for text in STRANGERS[name]:
            try:
                # An echo returns the proof that it has got.
                stranger.sendall(text or stranger.recv(64)[32:])
            except OSError:
                break
        assert dropped(stranger)
    send(one.streams.stream_to(other.streams.peer()), b"x")
    assert other.has(one, b"x")
    assert set(other.came) == {one.streams.identity}
    assert other.over == []


def test_silence_is_dropped(monkeypatch: pytest.MonkeyPatch, processes: list[Process]) -> None:
    monkeypatch.setattr(streams, "_HANDSHAKE_TIMEOUT", 0.1)
    _, other = processes
    with connected(other) as stranger:
        assert dropped(stranger)


def test_many_strangers_do_not_keep_a_member_out(processes: list[Process]) -> None:
    one, other = processes
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(connected(other)) for _ in range(300)]
        assert dropped(strangers[0])  # the oldest goes when there are more than 64
        send(one.streams.stream_to(other.streams.peer()), b"x")
        assert other.has(one, b"x")
        assert len(other.streams.unauthenticated) <= 64
    other.streams.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_no_descriptor_for_a_connection_is_no_end(
    monkeypatch: pytest.MonkeyPatch, processes: list[Process]
) -> None:
    """The thread of the streams goes on when the process has no descriptor left."""
    one, other = processes
    accept, failed = other.streams._listener.accept, threading.Event()

    class Listener:
        def accept(self) -> Any:
            if not failed.is_set():
                failed.set()
                raise OSError("Too many open files")
            return accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

    listener = other.streams._listener
    monkeypatch.setattr(other.streams, "_listener", Listener())
    send(one.streams.stream_to(other.streams.peer()), b"x")
    assert failed.wait(LIMIT)
    assert other.has(one, b"x")


def test_without_a_descriptor_the_thread_waits(
    monkeypatch: pytest.MonkeyPatch, processes: list[Process]
) -> None:
    """The listener stays ready, and is not asked at each turn of the thread."""
    monkeypatch.setattr(streams, "_RETRY_INTERVAL", 3600.0)
    _, other = processes
    calls, failed = [], threading.Event()

    class Listener:
        def accept(self) -> Any:
            calls.append(1)
            failed.set()
            raise OSError("Too many open files")

        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

    listener = other.streams._listener
    monkeypatch.setattr(other.streams, "_listener", Listener())
    with connected(other):
        assert failed.wait(LIMIT)
        for _ in range(10):
            turned = threading.Event()
            other.streams.call_soon(turned.set)
            assert turned.wait(LIMIT)
        assert calls == [1]


def test_a_stranger_s_name_is_forgotten(processes: list[Process]) -> None:
    _, other = processes
    with connected(other) as stranger:
        stranger.sendall(HELLO)
        assert len(stranger.recv(64)) == 64
        assert other.streams.connections == {"00" * 16: 1}
        (connection,) = other.streams.unauthenticated
        ended = threading.Event()

        def end() -> None:
            connection.end("too many")
            connection.end("it had an event, too")
            ended.set()

        other.streams.call_soon(end)
        assert ended.wait(LIMIT)
    assert other.streams.connections == {}


def test_a_stream_that_has_ended_is_no_signal() -> None:
    """A script may have given SIGPIPE its default action."""

    class Nobody:
        def call_soon(self, task: Any) -> None:
            pass

    child = os.fork()
    if not child:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        mine, theirs = socket.socketpair()
        theirs.close()
        stream = Outbound(Nobody(), Peer("", "", "", 0))  # type: ignore[arg-type]
        stream._connection, stream._ready = mine, True
        send(stream, b"x")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_that_has_ended_is_an_end(processes: list[Process]) -> None:
    one, other = processes
    peer = other.streams.peer()
    other.streams.close()
    stream = one.streams.stream_to(peer)
    assert stream.settled.wait(LIMIT)
    assert stream.reason == "Connection refused"
    assert stream.idle
