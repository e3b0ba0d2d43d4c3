"""Streams of bytes between processes of different machines: a TCP connection for each direction of a pair.

Note [One direction]: the process that has connected sends, and the other one only reads. So all that a process has
sent is read before its end is seen: a kernel that closes a socket with unread bytes drops bytes on the way, and on
the sender's side of a stream nothing is ever unread.

Note [Strangers]: the listener's secret went through the store. Each side proves by HMAC that it knows it, before
anything else is read. A connection without proof is closed after some seconds, and earlier if there are many.
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

_MAGIC = b"smddp\x00\x00\x01"  # the last byte is the version
_HELLO = struct.Struct("<8s16s32s")  # the magic, the process that connects, its nonce
_NONCE, _PROOF = 32, 32  # bytes
_PATIENCE = 10.0  # seconds in which a connection must be proven
_CONNECTING = 120.0  # seconds in which a stream must be there: the other process may be busy
_FLUSH = 10.0  # seconds in which the bytes of a process that ends must be on their way
_AGAIN = 0.05  # seconds until a connection that was closed before it was proven is tried again
_UNPROVEN = 64  # connections at once
_TURN = 1 << 20  # bytes that are read from one connection before the others have their turn
_PIECES = 64  # of one system call
#: A machine that vanishes is noticed within half a minute: seconds of silence, between two questions, and questions.
_ALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
_UNHEARD = 30.0  # seconds in which sent bytes must be acknowledged

Places = Generator[memoryview, None, None]  # where the next bytes of a stream belong


class Peer(NamedTuple):
    """Another process, as the store tells of it."""

    identity: str
    secret: str
    address: str
    port: int


class StreamError(Exception):
    """The bytes of a connection are not those of a member."""


def _prove(secret: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, side + hello + nonce, "sha256")


def _prepare(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    unheard = int(_UNHEARD * 1000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unheard)


class _Reader:
    """Reads the bytes of a connection to the places that a generator names."""

    def __init__(self, connection: socket.socket, places: Places) -> None:
        self._connection, self._places = connection, places
        self._place = next(places)

    def read(self) -> None:
        """Read what is there.

        Raises EOFError at the end.
        """
        left = _TURN
        while left > 0:
            try:
                count = self._connection.recv_into(self._place)
            except BlockingIOError:
                return
            if not count:
                raise EOFError("has ended")
            left -= count
            self._place = self._place[count:]
            while not self._place.nbytes:
                self._place = next(self._places)


class Outbound:
    """The stream to another process. Any thread may send; the rest is done by the thread of the streams.

    Attributes:
        reason: why it has ended, once it has.
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
        self._until = time.monotonic() + _CONNECTING

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
        self._streams.ask(self._watch)

    @property
    def idle(self) -> bool:
        """True if all bytes are on their way, or never will be."""
        return bool(self.reason) or not self._queue

    def _flush(self) -> None:
        """Send what can be sent. Call with the lock held."""
        assert self._connection is not None
        queue = self._queue
        while queue:
            try:
                # No signal: a script may have given SIGPIPE its default action, the end of the process.
                pieces = list(islice(queue, _PIECES))
                count = self._connection.sendmsg(pieces, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            while queue and count >= queue[0].nbytes:
                count -= queue.popleft().nbytes
            if count:
                queue[0] = queue[0][count:]

    # In the thread of the streams.

    def connect(self) -> None:
        """Begin."""
        if self.reason:  # it took too long meanwhile
            return
        self._streams.unsettled.add(self)
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
                self._greet()
                return
            if events & selectors.EVENT_READ:
                self._reader.read()
            if events & selectors.EVENT_WRITE:
                self._watch()
        except Exception as error:
            self.end(error)

    def _greet(self) -> None:
        """The connection is there, or was refused."""
        assert self._connection is not None
        problem = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            raise OSError(problem, os.strerror(problem))
        hello = _HELLO.pack(
            _MAGIC, bytes.fromhex(self._streams.identity), secrets.token_bytes(_NONCE)
        )
        self._connection.send(hello, socket.MSG_NOSIGNAL)
        self._reader = _Reader(self._connection, self._answered(self._connection, hello))
        self._streams.change(self._connection, selectors.EVENT_READ, self._handle)

    def _answered(self, connection: socket.socket, hello: bytes) -> Places:
        answer = bytearray(_NONCE + _PROOF)
        yield memoryview(answer)
        nonce, secret = bytes(answer[:_NONCE]), bytes.fromhex(self.peer.secret)
        if not hmac.compare_digest(
            bytes(answer[_NONCE:]), _prove(secret, b"listens", hello, nonce)
        ):
            raise StreamError("is another process's")
        connection.send(_prove(secret, b"connects", hello, nonce), socket.MSG_NOSIGNAL)
        with self._lock:
            self._ready = True
        self._settle()
        self._watch()
        yield memoryview(bytearray(1))
        raise StreamError("was answered")

    def _watch(self) -> None:
        """Send what waits, and be called again while anything does."""
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
        again = dropped and not self._ready and now < self._until
        with self._lock:
            connection, self._connection, self._reader = self._connection, None, None
            if not again:
                self.reason = self.reason or getattr(error, "strerror", None) or str(error)
                self._queue.clear()
        if connection is not None:
            self._streams.forget(connection)
        if again:
            self._streams.later(now + _AGAIN, self.connect)
        else:
            self._settle()

    def _settle(self) -> None:
        self._streams.unsettled.discard(self)
        self.settled.set()

    def expire(self, now: float) -> None:
        """End a stream that is not there in time."""
        if now >= self._until:
            self.end(TimeoutError(f"no answer within {_CONNECTING:g} s"))


class _Inbound:
    """A connection to this process's listener: a stranger's until it is proven."""

    def __init__(self, streams: Streams, connection: socket.socket) -> None:
        self._streams, self._connection = streams, connection
        self.until = time.monotonic() + _PATIENCE
        self._identity = ""
        self._proven = self._over = False
        self._reader = _Reader(connection, self._places())
        streams.register(connection, selectors.EVENT_READ, self._handle)

    def _places(self) -> Places:
        hello = bytearray(_HELLO.size)
        yield memoryview(hello)
        magic, identity, _ = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise StreamError("begins with other bytes")
        self._identity = identity.hex()
        self._streams.coming[self._identity] += 1
        nonce, secret = secrets.token_bytes(_NONCE), self._streams.secret
        answer = nonce + _prove(secret, b"listens", bytes(hello), nonce)
        self._connection.send(answer, socket.MSG_NOSIGNAL)
        proof = bytearray(_PROOF)
        yield memoryview(proof)
        if not hmac.compare_digest(bytes(proof), _prove(secret, b"connects", bytes(hello), nonce)):
            raise StreamError("proves another secret")
        self._proven = True
        self._streams.unproven.pop(self, None)
        yield from self._streams.receive(self._identity)

    def _handle(self, events: int) -> None:
        try:
            self._reader.read()
        except Exception as error:
            self.end(str(error))

    def end(self, reason: str) -> None:
        if (
            self._over
        ):  # closed for another connection, with an event of its own still to be handled
            return
        self._over = True
        self._streams.forget(self._connection)
        self._streams.unproven.pop(self, None)
        if self._proven:
            self._streams.ended.setdefault(self._identity, reason)
            self._streams.on_end(self._identity)
        if self._identity:
            coming = self._streams.coming
            coming[self._identity] -= 1
            if not coming[self._identity]:  # a stranger may give any name
                del coming[self._identity]


class Streams:
    """The streams of this process, and the thread that serves them.

    Attributes:
        coming: for each process how many connections of it there are.
        ended: for each process whose stream has ended the reason.
        unproven: connections to the listener that have proven nothing, from the oldest.
        unsettled: streams to others that are not there yet.
        closing: until when the bytes that wait may be sent, once no more follow.
    """

    def __init__(
        self, address: str, receive: Callable[[str], Places], on_end: Callable[[str], None]
    ) -> None:
        """``receive``: the places for the bytes of a process. ``on_end``: called when its stream has ended."""
        self.identity, self.secret = secrets.token_hex(16), secrets.token_bytes(32)
        self.receive, self.on_end = receive, on_end
        self.coming: Counter[str] = Counter()
        self.ended: dict[str, str] = {}
        self.unproven: dict[_Inbound, None] = {}
        self.unsettled: set[Outbound] = set()
        self._outbound: dict[str, Outbound] = {}
        self._lock, self._ringing = threading.Lock(), threading.Lock()
        self._asked: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self.closing = 0.0  # until when
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=128)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sockets: set[socket.socket] = {self._listener}
        self._listen()
        self._selector.register(self._bell, selectors.EVENT_READ, self._woken)
        self._thread = threading.Thread(target=self._run, name="smddp streams", daemon=True)
        self._thread.start()

    def peer(self) -> Peer:
        """This process, as the others connect to it."""
        address, port, *_ = self._listener.getsockname()
        return Peer(self.identity, self.secret.hex(), address, port)

    def to(self, peer: Peer) -> Outbound:
        """The stream to a process, which begins when it is asked for first."""
        with self._lock:
            stream = self._outbound.get(peer.identity)
            if stream is None:
                stream = self._outbound[peer.identity] = Outbound(self, peer)
                self.ask(stream.connect)
            return stream

    def close(self) -> None:
        """Send what waits, then close everything and end the thread.

        Until then the listener and the streams of others stay open: to a process that finds them closed no
        byte of this one is on its way.
        """
        self.closing = time.monotonic() + _FLUSH
        self.ask(lambda: None)
        self._thread.join()

    def abandon(self) -> None:
        """In a child of fork: close the descriptors, which are the parent's."""
        self._selector.close()  # first: the parent's own waits for the sockets
        os.close(self._bell)
        for each in self._sockets:
            each.close()

    def ask(self, task: Callable[[], None]) -> None:
        """Have the thread of the streams call a function."""
        self._asked.append(task)
        with self._ringing:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    # In the thread.

    def later(self, when: float, task: Callable[[], None]) -> None:
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

    def forget(self, connection: socket.socket) -> None:
        """Close a connection."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        self._sockets.discard(connection)
        connection.close()

    def _woken(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def _accept(self, events: int) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no descriptor is left, perhaps because of strangers
            for each in list(self.unproven):
                each.end("too many")
            # The listener stays ready, and this thread would spin until a descriptor is free.
            self._selector.unregister(self._listener)
            self.later(time.monotonic() + _AGAIN, self._listen)
            return
        if len(self.unproven) >= _UNPROVEN:
            next(iter(self.unproven)).end("too many")
        try:
            _prepare(connection)
            self.unproven[_Inbound(self, connection)] = None
        except OSError:
            self.forget(connection)

    def _listen(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _run(self) -> None:
        try:
            while not self._over():
                for key, events in self._selector.select(self._pause()):
                    key.data(events)
                while self._asked:
                    self._asked.popleft()()
                self._expire(time.monotonic())
        finally:
            self._selector.close()
            for each in list(self._sockets):
                each.close()
            with self._ringing:
                os.close(self._bell)
                self._bell = -1
            for stream in list(self._outbound.values()):
                stream.settled.set()  # nobody connects it any more

    def _over(self) -> bool:
        if not self.closing or self._asked:
            return False
        with self._lock:
            streams = list(self._outbound.values())
        return all(each.idle for each in streams) or time.monotonic() > self.closing

    def _pause(self) -> float | None:
        """Seconds to wait for events; none if only events matter."""
        timed = self._timers or self.unproven or self.unsettled or self.closing
        return _AGAIN if timed else None

    def _expire(self, now: float) -> None:
        due = [task for when, task in self._timers if when <= now]
        self._timers = [each for each in self._timers if each[0] > now]
        for task in due:
            task()
        for each in list(self.unproven):
            if each.until <= now:
                each.end("has proven nothing")
        for stream in list(self.unsettled):
            stream.expire(now)
