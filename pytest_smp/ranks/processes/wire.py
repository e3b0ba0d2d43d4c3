"""The wire between the controller and rank processes: who may connect, and in which frames they talk.

A rank connects to a Unix socket in a folder that only its owner can enter (or, for several
machines, to a TCP port), and both sides prove by HMAC that they know the run's secret before
anything else is read. Only then are objects unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

Address = str | tuple[str, int]  # a path, or host and port

log = logging.getLogger("pytest_smp.ranks")

_PATIENCE = 10  # seconds that a connection gets to prove itself
_SILENCE = 10  # seconds after which a machine that does not answer is lost
_PAUSE = 0.05  # seconds
_LONGEST_HELLO = 4096  # bytes


def new_secret() -> bytes:
    """A secret for one run."""
    return secrets.token_bytes(32)


def _family(address: Address) -> int:
    return socket.AF_UNIX if isinstance(address, str) else socket.AF_INET


def _limited(sock: socket.socket, seconds: int) -> None:
    """Let the blocking reads and writes of this socket's descriptor fail after so long; 0: never."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


def _watched(sock: socket.socket) -> None:
    """Notice when the other machine is gone: one that loses its power or its link sends no word.

    Its kernel answers, however busy its processes are.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 4),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        (
            "TCP_USER_TIMEOUT",
            _SILENCE * 1000,
        ),  # of what was sent: retransmitted for 15 min otherwise
    ):
        option = getattr(socket, name, None)  # Linux has them all
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def is_silence(error: BaseException) -> bool:
    """Return whether an error shows the other machine's silence, rather than a process's end."""
    return isinstance(error, OSError) and error.errno in (
        errno.ETIMEDOUT,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
    )


def silence(host: str) -> str:
    """The reason, in words, why the ranks of a silent machine are lost."""
    return f"its machine, {host}, does not answer"


def connect(
    address: Address, secret: bytes, hello: Mapping[str, Any], patience: int = _PATIENCE
) -> Connection:
    """Connect to a controller, prove the secret, and say who this is, all within ``patience``
    seconds for each message.

    Raises OSError if nobody listens, AuthenticationError if the secret is another's.
    """
    with socket.socket(_family(address), socket.SOCK_STREAM) as sock:
        sock.settimeout(patience)
        sock.connect(address)
        sock.settimeout(None)
        if not isinstance(address, str):
            _watched(sock)
        _limited(sock, patience)
        connection = Connection(os.dup(sock.fileno()))
        try:
            answer_challenge(connection, secret)
            deliver_challenge(connection, secret)
            connection.send_bytes(json.dumps(hello).encode())
        except BaseException:
            connection.close()
            raise
        _limited(sock, 0)
    return connection


def listen(address: Address) -> socket.socket:
    """A socket that listens at this address."""
    listening = socket.socket(_family(address), socket.SOCK_STREAM)
    try:
        listening.bind(address)
        listening.listen(1024)
    except BaseException:
        listening.close()
        raise
    return listening


class Listener:
    """Accepts the connections of ranks, at an address or on a socket that listens already.

    ``welcome`` gets each connection that proved itself, and its hello, in a thread of the listener's. A
    stranger is refused and logged, and delays no other: each connection proves itself in a thread of its
    own, within ten seconds.
    """

    def __init__(
        self,
        place: Address | socket.socket,
        secret: bytes,
        welcome: Callable[[Connection, dict[str, Any]], None],
    ) -> None:
        self._secret, self._welcome = secret, welcome
        self._socket = place if isinstance(place, socket.socket) else listen(place)
        self.address: Address = self._socket.getsockname()
        self.refused = 0
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="smp listener", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:  # closed, or a connection that broke at once
                if self._closed:
                    return
                time.sleep(
                    _PAUSE
                )  # no descriptor is free: whoever waits to connect goes on waiting
                continue
            threading.Thread(
                target=self._prove, args=(sock,), name="smp newcomer", daemon=True
            ).start()

    def _prove(self, sock: socket.socket) -> None:
        with sock:
            if sock.family != socket.AF_UNIX:
                _watched(sock)
            _limited(sock, _PATIENCE)
            connection = Connection(os.dup(sock.fileno()))
            try:
                deliver_challenge(connection, self._secret)
                answer_challenge(connection, self._secret)
                # The limit stays: a peer that stops in the midst of a frame, or takes none, is lost.
                hello = json.loads(connection.recv_bytes(_LONGEST_HELLO))
            except EOFError as error:
                # The peer went away before it could prove anything: often a rank that was just killed.
                connection.close()
                log.debug("a connection to %s ended at once: %s", self.address, error)
                return
            except (AuthenticationError, OSError, ValueError) as error:
                connection.close()
                self.refused += 1
                log.warning(
                    "a connection to %s was refused: it does not know the secret of this run (%s)",
                    self.address,
                    type(error).__name__,
                )
                return
        self._welcome(connection, hello)

    def close(self) -> None:
        """Stop listening; connections that were made stay open."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._socket.close()
        self._thread.join(timeout=_PATIENCE)
        if isinstance(self.address, str):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address)
