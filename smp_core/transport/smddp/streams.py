"""Streams of bytes between processes of different machines: a TCP connection for each direction of a pair.

Note [One direction]: the process that has connected sends, and the other one only reads. So all that a process has
sent is read before its end is seen: a kernel that closes a socket with unread bytes drops bytes on the way, and on
the sender's side of a stream nothing is ever unread.

Note [Authentication]: the listener's secret went through the store. Each side proves by HMAC that it knows the secret,
before anything else is read. A connection without proof is closed after some seconds, and earlier if there are many.

Note [Silence]: a machine that has vanished is silent; the kernel of a process that is stopped answers. Keepalive asks
on a connection where no bytes wait, as on all those on which this process reads. Where bytes wait, the kernel asks by
sending them again, or asks for room when the receiver has none, at intervals that grow to two minutes.
TCP_USER_TIMEOUT takes the answer "no room" for silence, and would end the stream to a process that is stopped. So the
thread of the streams looks itself. The time begins when a look finds that an answer is owed: of questions for room two,
because one may be lost. So a machine that vanishes after it has had no room for long is noticed minutes later there.
The stream from it has ended by then, if there is one.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from itertools import islice
from typing import NamedTuple

from smp_core.transport.helper_threads import HelperThread

_MAGIC = b"smddp\x00\x00\x01"  # the last byte is the version
_HELLO = struct.Struct("<8s16s32s")  # the magic, the process that connects, its nonce
_NONCE, _PROOF = 32, 32  # bytes
_HANDSHAKE_TIMEOUT = 10.0  # seconds in which a connection must authenticate itself
_CONNECT_TIMEOUT = 120.0  # seconds in which a stream must be there: the other process may be busy
_FLUSH_TIMEOUT = 10.0  # seconds in which the bytes of a process that ends must be on their way
_RETRY_INTERVAL = (
    0.05  # seconds until a connection that was closed before it was authenticated is tried again
)
_MAX_UNAUTHENTICATED = 64  # connections at once
_READ_QUANTUM = 1 << 20  # bytes that are read from one connection before the others have their turn
_PIECES_PER_CALL = 64  # of one system call
#: A machine that vanishes is noticed within half a minute: seconds of silence, between two questions, and questions.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
_ACKNOWLEDGE_TIMEOUT = 30.0  # seconds in which bytes, or a question for room, must have an answer
_LOOK_INTERVAL = 1.0  # seconds between two looks for an answer
#: The beginning of the kernel's tcp_info: unanswered questions, segments without an acknowledgement, and the
#: milliseconds since bytes were sent and since an acknowledgement came.
_TCP_INFO = struct.Struct("=3xB20xI16xI8xI")

Buffers = Generator[memoryview, None, None]  # the memory for the next bytes of a stream


class Peer(NamedTuple):
    """Another process, as the store has it."""

    identity: str
    secret: str
    address: str
    port: int


class StreamError(Exception):
    """The bytes of a connection are not those of a member."""


def _proof_of(secret: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, side + hello + nonce, "sha256")


def _prepare(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _unanswered(connection: socket.socket) -> tuple[bool, float]:
    """Return whether the other machine's kernel owes an answer, and the seconds since its last one."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(info) < _TCP_INFO.size:  # a kernel that tells less: nothing is known of silence
        return False, 0.0
    questions, segments, sent, answered = _TCP_INFO.unpack(info)
    # Bytes may lie unacknowledged and have an answer: there was no room for them. They are sent again after a time.
    return questions > 1 or (segments > 0 and sent < answered), answered / 1000


class _Reader:
    """Reads the bytes of a connection to the buffers that a generator names."""

    def __init__(self, connection: socket.socket, buffers: Buffers) -> None:
        self._connection, self._buffers = connection, buffers
        self._buffer = next(buffers)

    def read(self) -> None:
        """Read the bytes that have come.

        Raises EOFError at the end.
        """
        left = _READ_QUANTUM
        while left > 0:
            try:
                count = self._connection.recv_into(self._buffer)
            except BlockingIOError:
                return
            if not count:
                raise EOFError("has ended")
            left -= count
            self._buffer = self._buffer[count:]
            while not self._buffer.nbytes:
                self._buffer = next(self._buffers)


class Outbound:
    """The stream to another process. Any thread may send; the rest is done by the thread of the streams.

    Attributes:
        reason: the reason of its end, once it has ended.
        settled: set once the other process has proven itself, or the stream has ended.
    """

    def __init__(self, streams: Streams, peer: Peer) -> None:
        self.peer, self.reason = peer, ""
        self.settled = threading.Event()
        self._streams = streams
        self._lock = threading.Lock()
        self._queue: deque[memoryview] = deque()
        self._ready = self._watched = False
        self._connection: socket.socket | None = None
        self._reader: _Reader | None = None
        self._until = time.monotonic() + _CONNECT_TIMEOUT
        self._silent_since: float | None = None  # the first look since which no answer has come
        self._looked = 0.0  # when the last look was

    def send(self, pieces: Iterable[memoryview]) -> None:
        """Send bytes, whose memory stays as it is until they were sent. Returns at once."""
        with self._lock:
            if self.reason:
                return
            waited = bool(self._queue)
            self._queue.extend(pieces)
            if waited or not self._ready:
                return
            with contextlib.suppress(OSError):  # the thread of the streams meets it again
                self._flush()
            if not self._queue:
                return
        self._streams.call_soon(self._watch)

    @property
    def idle(self) -> bool:
        """True if all bytes are on their way, or never will be."""
        return bool(self.reason) or not self._queue

    def _flush(self) -> None:
        """Send bytes without blocking. Call with the lock held."""
        assert self._connection is not None
        queue = self._queue
        while queue:
            try:
                # No signal: a script may have given SIGPIPE its default action, the end of the process.
                pieces = list(islice(queue, _PIECES_PER_CALL))
                count = self._connection.sendmsg(pieces, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            while queue and count >= queue[0].nbytes:
                count -= queue.popleft().nbytes
            if count:
                queue[0] = queue[0][count:]

    # In the thread of the streams.

    def connect(self) -> None:
        """Begin to connect."""
        if self.reason:  # it took too long meanwhile
            return
        self._streams.connecting.add(self)
        try:
            (found, *_) = socket.getaddrinfo(
                self.peer.address, self.peer.port, type=socket.SOCK_STREAM
            )
            self._connection = socket.socket(found[0], socket.SOCK_STREAM)
            _prepare(self._connection)
            problem = self._connection.connect_ex(found[4])
            if problem not in (0, errno.EINPROGRESS):
                raise OSError(problem, os.strerror(problem))
        except OSError as error:
            self.end(error)
            return
        self._streams.register(self._connection, selectors.EVENT_WRITE, self._handle)

    def _handle(self, events: int) -> None:
        try:
            if self._reader is None:
                self._send_hello()
                return
            if events & selectors.EVENT_READ:
                self._reader.read()
            if events & selectors.EVENT_WRITE:
                self._watch()
        except Exception as error:
            self.end(error)

    def _send_hello(self) -> None:
        """Send the first bytes of the handshake on a connection that is there, or was refused."""
        assert self._connection is not None
        problem = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            raise OSError(problem, os.strerror(problem))
        hello = _HELLO.pack(
            _MAGIC, bytes.fromhex(self._streams.identity), secrets.token_bytes(_NONCE)
        )
        self._connection.send(hello, socket.MSG_NOSIGNAL)
        self._reader = _Reader(self._connection, self._handshake(self._connection, hello))
        self._streams.change(self._connection, selectors.EVENT_READ, self._handle)

    def _handshake(self, connection: socket.socket, hello: bytes) -> Buffers:
        answer = bytearray(_NONCE + _PROOF)
        yield memoryview(answer)
        nonce, secret = bytes(answer[:_NONCE]), bytes.fromhex(self.peer.secret)
        if not hmac.compare_digest(
            bytes(answer[_NONCE:]), _proof_of(secret, b"listens", hello, nonce)
        ):
            raise StreamError("is another process's")
        connection.send(_proof_of(secret, b"connects", hello, nonce), socket.MSG_NOSIGNAL)
        with self._lock:
            self._ready = True
        self._settle()
        self._watch()
        yield memoryview(bytearray(1))
        raise StreamError("was answered")

    def _watch(self) -> None:
        """Send the bytes that wait, and ask to be called again while any do."""
        if self.reason or not self._ready or self._connection is None:
            return
        try:
            with self._lock:
                self._flush()
                watched = bool(self._queue)
        except OSError as error:
            self.end(error)
            return
        if watched != self._watched:
            self._watched = watched
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if watched else 0)
            self._streams.change(self._connection, events, self._handle)

    def end(self, error: Exception) -> None:
        """Close the stream. One that the other process has closed before its proof is tried again."""
        dropped = isinstance(error, (EOFError, ConnectionResetError, BrokenPipeError))
        now = time.monotonic()
        retry = dropped and not self._ready and now < self._until
        with self._lock:
            connection, self._connection, self._reader = self._connection, None, None
            if not retry:
                self.reason = self.reason or getattr(error, "strerror", None) or str(error)
                self._queue.clear()
        if connection is not None:
            self._streams.close_connection(connection)
        if retry:
            self._streams.call_at(now + _RETRY_INTERVAL, self.connect)
        else:
            self._settle()

    def _settle(self) -> None:
        self._streams.connecting.discard(self)
        self.settled.set()

    def expire(self, now: float) -> None:
        """End a stream that is not there in time."""
        if now >= self._until:
            self.end(TimeoutError(f"no answer within {_CONNECT_TIMEOUT:g} s"))

    def look(self, now: float) -> None:
        """End a stream whose other machine has owed an answer for too long. See Note [Silence]."""
        if self._connection is None or self._reader is None:  # not there yet
            return
        owes, answered = _unanswered(self._connection)
        # This process may have been stopped itself: it has not been listening.
        away, self._looked = now - self._looked > 10 * _LOOK_INTERVAL, now
        if not owes:
            self._silent_since = None
        elif self._silent_since is None or away or now - answered > self._silent_since:
            self._silent_since = now
        elif now - self._silent_since >= _ACKNOWLEDGE_TIMEOUT:
            self.end(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))


class _Inbound:
    """A connection to this process's listener, which authenticates itself first."""

    def __init__(self, streams: Streams, connection: socket.socket) -> None:
        self._streams, self._connection = streams, connection
        self.until = time.monotonic() + _HANDSHAKE_TIMEOUT
        self._identity = ""
        self._authenticated = self._closed = False
        self._reader = _Reader(connection, self._buffers())
        streams.register(connection, selectors.EVENT_READ, self._handle)

    def _buffers(self) -> Buffers:
        hello = bytearray(_HELLO.size)
        yield memoryview(hello)
        magic, identity, _ = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise StreamError("begins with other bytes")
        self._identity = identity.hex()
        self._streams.connections[self._identity] += 1
        nonce, secret = secrets.token_bytes(_NONCE), self._streams.secret
        answer = nonce + _proof_of(secret, b"listens", bytes(hello), nonce)
        self._connection.send(answer, socket.MSG_NOSIGNAL)
        proof = bytearray(_PROOF)
        yield memoryview(proof)
        if not hmac.compare_digest(
            bytes(proof), _proof_of(secret, b"connects", bytes(hello), nonce)
        ):
            raise StreamError("proves another secret")
        self._authenticated = True
        self._streams.unauthenticated.pop(self, None)
        yield from self._streams.receive(self._identity)

    def _handle(self, events: int) -> None:
        try:
            self._reader.read()
        except Exception as error:
            self.end(str(error))

    def end(self, reason: str) -> None:
        if (
            self._closed
        ):  # closed for another connection, with an event of its own still to be handled
            return
        self._closed = True
        self._streams.close_connection(self._connection)
        self._streams.unauthenticated.pop(self, None)
        if self._authenticated:
            self._streams.ended.setdefault(self._identity, reason)
            self._streams.on_end(self._identity)
        if self._identity:
            connections = self._streams.connections
            connections[self._identity] -= 1
            if not connections[self._identity]:  # without a proof it may be any name
                del connections[self._identity]


class Streams:
    """The streams of this process, and the thread that serves them.

    Attributes:
        connections: for each process the number of its connections to this one.
        ended: for each process whose stream has ended the reason.
        unauthenticated: connections to the listener without a proof yet, from the oldest.
        connecting: streams to others that are not there yet.
        closing: the time until which bytes that wait may be sent, once no more follow.
    """

    def __init__(
        self, address: str, receive: Callable[[str], Buffers], on_end: Callable[[str], None]
    ) -> None:
        """``receive``: the buffers for the bytes of a process. ``on_end``: called when its stream has ended."""
        self.identity, self.secret = secrets.token_hex(16), secrets.token_bytes(32)
        self.receive, self.on_end = receive, on_end
        self.connections: Counter[str] = Counter()
        self.ended: dict[str, str] = {}
        self.unauthenticated: dict[_Inbound, None] = {}
        self.connecting: set[Outbound] = set()
        self._outbound: dict[str, Outbound] = {}
        self._lock, self._wakeup_lock = threading.Lock(), threading.Lock()
        self._pending_calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self.closing = 0.0
        self._next_look = 0.0
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=128)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sockets: set[socket.socket] = {self._listener}
        self._listen()
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._on_wakeup)
        self._thread = HelperThread(target=self._run, name="smddp streams", daemon=True)
        self._thread.start()

    def peer(self) -> Peer:
        """This process, as the others connect to it."""
        address, port, *_ = self._listener.getsockname()
        return Peer(self.identity, self.secret.hex(), address, port)

    def stream_to(self, peer: Peer) -> Outbound:
        """The stream to a process. The first call connects it."""
        with self._lock:
            stream = self._outbound.get(peer.identity)
            if stream is None:
                stream = self._outbound[peer.identity] = Outbound(self, peer)
                self.call_soon(stream.connect)
            return stream

    def close(self) -> None:
        """Send the bytes that wait, then close everything and end the thread.

        Until then the listener and the streams of others stay open: to a process that finds them closed no
        byte of this one is on its way.
        """
        self.closing = time.monotonic() + _FLUSH_TIMEOUT
        self.call_soon(lambda: None)
        self._thread.join()

    def close_after_fork(self) -> None:
        """In a child of fork: close the descriptors, which are the parent's."""
        self._selector.close()  # first: the parent's own waits for the sockets
        os.close(self._wakeup)
        for each in self._sockets:
            each.close()

    def call_soon(self, task: Callable[[], None]) -> None:
        """Call a function in the thread of the streams."""
        self._pending_calls.append(task)
        with self._wakeup_lock:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    # In the thread.

    def call_at(self, when: float, task: Callable[[], None]) -> None:
        """Call a function at a time."""
        self._timers.append((when, task))

    def register(
        self, connection: socket.socket, events: int, handle: Callable[[int], None]
    ) -> None:
        """Call a function when a connection can be read or written."""
        self._sockets.add(connection)
        self._selector.register(connection, events, handle)

    def change(self, connection: socket.socket, events: int, handle: Callable[[int], None]) -> None:
        """Register a connection for other events."""
        self._selector.modify(connection, events, handle)

    def close_connection(self, connection: socket.socket) -> None:
        """Close a connection."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        self._sockets.discard(connection)
        connection.close()

    def _on_wakeup(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)

    def _accept(self, events: int) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no descriptor is left, perhaps because of unauthenticated connections
            for each in list(self.unauthenticated):
                each.end("too many")
            # The listener stays ready, and this thread would spin until a descriptor is free.
            self._selector.unregister(self._listener)
            self.call_at(time.monotonic() + _RETRY_INTERVAL, self._listen)
            return
        if len(self.unauthenticated) >= _MAX_UNAUTHENTICATED:
            next(iter(self.unauthenticated)).end("too many")
        try:
            _prepare(connection)
            self.unauthenticated[_Inbound(self, connection)] = None
        except OSError:
            self.close_connection(connection)

    def _listen(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _run(self) -> None:
        try:
            while not self._is_drained():
                for key, events in self._selector.select(self._select_timeout()):
                    key.data(events)
                while self._pending_calls:
                    self._pending_calls.popleft()()
                self._expire(time.monotonic())
        finally:
            self._selector.close()
            for each in list(self._sockets):
                each.close()
            with self._wakeup_lock:
                os.close(self._wakeup)
                self._wakeup = -1
            for stream in list(self._outbound.values()):
                stream.settled.set()  # nobody connects it any more

    def _is_drained(self) -> bool:
        if not self.closing or self._pending_calls:
            return False
        with self._lock:
            streams = list(self._outbound.values())
        return all(each.idle for each in streams) or time.monotonic() > self.closing

    def _select_timeout(self) -> float | None:
        """Seconds to wait for events; none if only events matter."""
        if self._timers or self.unauthenticated or self.connecting or self.closing:
            return _RETRY_INTERVAL
        return _LOOK_INTERVAL if self._outbound else None

    def _expire(self, now: float) -> None:
        due = [task for when, task in self._timers if when <= now]
        self._timers = [each for each in self._timers if each[0] > now]
        for task in due:
            task()
        for each in list(self.unauthenticated):
            if each.until <= now:
                each.end("has proven nothing")
        for stream in list(self.connecting):
            stream.expire(now)
        if now >= self._next_look:
            self._next_look = now + _LOOK_INTERVAL
            with self._lock:
                streams = list(self._outbound.values())
            for stream in streams:
                stream.look(now)
