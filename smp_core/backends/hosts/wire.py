"""The wire between the controller and rank processes: who may connect, and in which frames they talk.

A rank connects to a Unix socket in a folder that only its owner can enter (or, for several
machines, to a TCP port), and both sides prove by HMAC that they know the run's secret before
anything else is read. Only then are objects unpickled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

Address = str | tuple[str, int]  # a path, or host and port

log = logging.getLogger("smp_core.hosts")

_PATIENCE = 10  # seconds that a connection gets to prove itself
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


def connect(
    address: Address, secret: bytes, hello: Mapping[str, Any], patience: int = _PATIENCE
) -> Connection:
    """Connect to a controller, prove the secret, and say who this is, all within ``patience``
    seconds for each message.

    Raises OSError if nobody listens, AuthenticationError if the secret is another's.
    """
    with socket.socket(_family(address), socket.SOCK_STREAM) as sock:
        sock.connect(address)
        if not isinstance(address, str):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
    """Where ranks connect: an address, or a socket that listens already.

    ``welcome`` gets each connection that proved itself, and its hello.

    It is called in a thread of the listener's. A stranger is refused and logged, and holds nobody
    up: each connection proves itself in a thread of its own, within ten seconds.
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
                continue
            threading.Thread(
                target=self._prove, args=(sock,), name="smp newcomer", daemon=True
            ).start()

    def _prove(self, sock: socket.socket) -> None:
        with sock:
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _limited(sock, _PATIENCE)
            connection = Connection(os.dup(sock.fileno()))
            try:
                deliver_challenge(connection, self._secret)
                answer_challenge(connection, self._secret)
                hello = json.loads(connection.recv_bytes(_LONGEST_HELLO))
                _limited(sock, 0)
            except (AuthenticationError, OSError, EOFError, ValueError) as error:
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
