"""The `pool` executor: warm local rank processes, forked from a fork server that has torch imported."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from multiprocessing.connection import Connection
from typing import Any

from pytest_smp.ranks import serialization
from pytest_smp.ranks.processes import wire
from pytest_smp.ranks.processes.process_status import ProcessStatus
from pytest_smp.ranks.processes.worker_pool import Ended, RankProcess, WorkerPool, describe_exit
from pytest_smp.ranks.protocols import ExecutorOptions
from smp_core.errors import BackendError
from smp_core.transport.private_folder import private_folder

log = logging.getLogger("pytest_smp.ranks")

_START = (
    "import sys; from pytest_smp.ranks.processes.fork_server import start; start(int(sys.argv[1]))"
)
#: The modules that a fork server imports before it forks.
PRELOAD = (
    "torch",
    "numpy.random",
    "smp_core.torch",
    "pytest_smp.ranks.board.instrument",
    "pytest_smp.ranks.processes.torch_fabric",
    "pytest_smp.ranks.isolation",
    "pytest_smp.ranks.serialization",
)
_PATIENCE = 300.0  # seconds for a fork server to import and prepare
_ANSWER = 5.0  # seconds for one that has nothing else to do


class ForkServerConnection:
    """The controller's end of one fork server. ``slots`` are the ranks that it can fork."""

    def __init__(self, connection: Connection, slots: Collection[int] | None, host: str) -> None:
        self.connection, self.slots, self.host = connection, slots, host
        self.ranks: dict[int, int] = {}  # pid: slot, of those that run
        self.asked: list[int] = []  # slots whose ranks have not been forked yet
        self.served = False  # whether any was
        self.looked: dict[str, Any] = {}
        self.silent = False  # its machine does not answer
        self._ended: list[Ended] = []
        self._preparing = False

    def ask(self, **request: Any) -> None:
        """Send a request. Raises BackendError if the fork server is gone."""
        try:
            self.connection.send_bytes(json.dumps(request).encode())
        except OSError as error:
            raise self.lost(error) from None

    def lost(self, error: BaseException | None = None) -> BackendError:
        """The error that says that the fork server is gone."""
        self.silent = self.silent or (error is not None and wire.is_silence(error))
        return BackendError(f"the fork server of rank processes is gone: {self.last_words()}")

    def last_words(self) -> str:
        """The end of the fork server in words, as far as it is known."""
        return f"its connection from {self.host} closed"

    def prepare(self, prelude: bytes) -> None:
        """Have it run the prelude; ``prepared`` waits for that."""
        self.ask(prepare=prelude.hex())
        self._preparing = True

    def prepared(self) -> None:
        """Wait until the prelude has run. Raises BackendError if it failed."""
        while self._preparing:
            if not self.connection.poll(_PATIENCE):
                raise BackendError(f"the rank processes were not prepared within {_PATIENCE:g} s")
            self._hear()

    def look(self, pid: int) -> dict[str, Any]:
        """A rank's stacks and output, from a fork server on another machine."""
        self.looked = {}
        self.ask(look=pid)
        while self.looked.get("looked") != pid and self.connection.poll(_ANSWER):
            self._hear()
        return self.looked

    def running(self) -> dict[int, int]:
        """The slots of the fork server's running ranks by process, as far as it has told."""
        while self.connection.poll(0):
            self._hear()
        return self.ranks

    def ended(self) -> list[Ended]:
        """The fork server's ranks that ended since the last call."""
        self.running()
        ended, self._ended = self._ended, []
        return ended

    def _hear(self) -> None:
        try:
            told = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self.lost(error) from None
        if "prepared" in told:
            self._preparing = False
            if told["prepared"] is not None:
                raise BackendError(f"the rank processes cannot be prepared: {told['prepared']}")
        elif "forked" in told:
            self.ranks[told["pid"]] = told["forked"]
            self.served = True
            if told["forked"] in self.asked:
                self.asked.remove(told["forked"])
        elif "looked" in told:
            self.looked = told
        else:
            pid = told["ended"]
            self._ended.append(Ended(self.ranks.pop(pid, None), pid, told["status"]))


class ForkServerPool(WorkerPool):
    """Rank processes that fork servers fork. See processes.WorkerPool."""

    restarts_together = False
    prepares = True

    def __init__(self, options: ExecutorOptions) -> None:
        self.limit: int | None = None
        self._prelude = None if options.prelude is None else serialization.dumps(options.prelude)
        self._servers: list[ForkServerConnection] = []
        self._news = select.epoll()

    def add(self, server: ForkServerConnection) -> None:
        """Take one more fork server, and send it the prelude."""
        self._servers.append(server)
        self._news.register(server.connection.fileno(), select.EPOLLIN)
        if self._prelude is not None:
            server.prepare(self._prelude)

    def fileno(self) -> int:
        """Readable when a rank process has ended."""
        return self._news.fileno()

    def start(self, slots: Collection[int]) -> Collection[int]:
        """See WorkerPool."""
        for server in self._servers:
            wanted = [slot for slot in slots if server.slots is None or slot in server.slots]
            if wanted:
                server.prepared()
                server.ask(fork=wanted)
                server.asked += wanted
        return slots

    def ended(self) -> list[Ended]:
        """See WorkerPool."""
        return [ended for server in self._servers for ended in server.ended()]

    def kill(self, ranks: Collection[RankProcess]) -> None:
        """See WorkerPool."""
        for server in self._servers:
            # The others have ended, and their numbers are free.
            running = server.running()
            wanted = [rank.pid for rank in ranks if running.get(rank.pid) == rank.slot]
            if wanted:
                server.ask(kill=wanted)

    def close(self) -> None:
        """See WorkerPool."""
        self._news.close()
        for server in self._servers:
            server.connection.close()


class _LocalForkServer(ForkServerConnection):
    """The fork server that the pool started."""

    def __init__(self, connection: Connection, process: subprocess.Popen[bytes]) -> None:
        super().__init__(connection, None, "this machine")
        self.process = process

    def ask(self, **request: Any) -> None:
        """See ForkServerConnection. A body may have stopped its rank's parent, which would never answer."""
        self._rouse()
        super().ask(**request)

    def running(self) -> dict[int, int]:
        """See ForkServerConnection. One that is stopped would not tell how a rank has ended, either."""
        self._rouse()
        return super().running()

    def _rouse(self) -> None:
        state = ProcessStatus.of(self.process.pid)
        if state is not None and state.stopped:
            log.warning("the fork server of rank processes was stopped, and goes on")
            self.process.send_signal(signal.SIGCONT)

    def last_words(self) -> str:
        """See ForkServerConnection."""
        try:
            code = self.process.wait(timeout=_ANSWER)
        except subprocess.TimeoutExpired:
            return "it closed its connection and still runs"
        return describe_exit(code)


class LocalPool(ForkServerPool):
    """One fork server on this machine, which forks as many ranks as are asked for."""

    def __init__(self, options: ExecutorOptions) -> None:
        super().__init__(options)
        self.folder = private_folder()
        self.secret = wire.new_secret()
        self.address = os.path.join(self.folder, "ranks")
        self._capture = options.capture
        # The environment of every fork server. Ranks get later changes as differences to this one.
        self._environment = dict(os.environ)
        self._open()

    def _open(self) -> None:
        """Start a fork server."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={
                    **self._environment,
                    "OMP_NUM_THREADS": self._environment.get("OMP_NUM_THREADS", "1"),
                    "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
                },
                start_new_session=True,  # Ctrl-C in the terminal is the controller's to handle
            )
            connection = Connection(os.dup(ours.fileno()))
        setting = {
            "folder": self.folder,
            "address": self.address,
            "secret": self.secret.hex(),
            "capture": self._capture,
            "preload": PRELOAD,
            "environment": {"PYTHONPATH": self._environment.get("PYTHONPATH")},
        }
        server = _LocalForkServer(connection, self._process)
        server.ask(**setting)
        self.add(server)

    def ended(self) -> list[Ended]:
        """See WorkerPool. A fork server that was killed took its ranks with it; another takes its place."""
        (server,) = self._servers
        try:
            return server.ended()
        except BackendError as error:
            if not server.served or self._process.poll() is None:
                raise
            log.warning("%s; another one takes its place", error)
            words = f"its fork server has ended: {server.last_words()}"
            lost = [Ended(slot, pid, None, words) for pid, slot in server.ranks.items()]
            lost += [Ended(slot, None, None, words) for slot in server.asked]
            self._servers.clear()
            self._news.unregister(server.connection.fileno())
            server.connection.close()
            self._open()
            return lost

    def close(self) -> None:
        """See WorkerPool."""
        super().close()
        try:
            self._process.wait(timeout=_ANSWER)
        except subprocess.TimeoutExpired:  # stopped, or stuck in an import
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            shutil.rmtree(self.folder)
