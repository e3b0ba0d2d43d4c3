"""The `pool` host: warm local rank processes, forked from a nursery that has torch imported."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable
from multiprocessing.connection import Connection
from typing import Any

from smp_core.backends import parcels
from smp_core.backends.base import HostOptions
from smp_core.backends.hosts import wire
from smp_core.backends.hosts.processes import Crew, Ended, describe_exit
from smp_core.errors import BackendError

_START = "import sys; from smp_core.backends.hosts.nursery import start; start(int(sys.argv[1]))"
_PRELOAD = (
    "torch",
    "torch.distributed.nn.functional",  # its default arguments capture the default group: now none
    "numpy.random",
    "smp_core.torch",
    "smp_core.backends.board.instrument",
    "smp_core.backends.fabrics.torch_backend",
    "smp_core.backends.hosts.isolation",
    "smp_core.backends.parcels",
)
_PATIENCE = 60.0  # seconds for the nursery to import and prepare


def private_folder() -> str:
    """A new folder that only this user can enter. Short: a Unix socket's path has 107 bytes."""
    return tempfile.mkdtemp(prefix="smp-", dir=None if len(tempfile.gettempdir()) < 60 else "/tmp")


class PoolCrew(Crew):
    """See processes.Crew."""

    local = True
    restarts_together = False
    prepares = True

    def __init__(self, options: HostOptions) -> None:
        self.folder = private_folder()
        self.secret = wire.new_secret()
        self.address: wire.Address = os.path.join(self.folder, "ranks")
        self.limit: int | None = None
        self._ended: list[Ended] = []
        self._slots: dict[int, int] = {}
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                    "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
                },
                start_new_session=True,  # Ctrl-C in the terminal is the controller's to handle
            )
            self._nursery = Connection(os.dup(ours.fileno()))
        setting = {
            "folder": self.folder,
            "address": self.address,
            "secret": self.secret.hex(),
            "capture": options.capture,
            "preload": _PRELOAD,
        }
        self._send(setting)
        if options.prelude is not None:
            self._send({"prepare": parcels.dumps(options.prelude).hex()})
        self._preparing = options.prelude is not None

    def _send(self, request: dict[str, Any]) -> None:
        try:
            self._nursery.send_bytes(json.dumps(request).encode())
        except OSError:
            raise BackendError(
                f"the nursery of rank processes is gone: {self._last_words()}"
            ) from None

    def _last_words(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it closed its connection and still runs"
        return describe_exit(code)

    def fileno(self) -> int:
        """Readable when a rank process has ended."""
        return self._nursery.fileno()

    def start(self, slots: Collection[int]) -> Collection[int]:
        """See Crew."""
        while self._preparing:
            if not self._nursery.poll(_PATIENCE):
                raise BackendError(f"the rank processes were not prepared within {_PATIENCE:g} s")
            self._hear()
        self._send({"fork": list(slots)})
        return slots

    def _hear(self) -> None:
        try:
            told = json.loads(self._nursery.recv_bytes())
        except (EOFError, OSError):
            words = self._last_words()
            raise BackendError(f"the nursery of rank processes is gone: {words}") from None
        if "prepared" in told:
            self._preparing = False
            if told["prepared"] is not None:
                raise BackendError(f"the rank processes cannot be prepared: {told['prepared']}")
        elif "forked" in told:
            self._slots[told["pid"]] = told["forked"]
        else:
            pid = told["ended"]
            self._ended.append(Ended(self._slots.pop(pid, None), pid, told["status"]))

    def ended(self) -> list[Ended]:
        """See Crew."""
        while self._nursery.poll(0):
            self._hear()
        ended, self._ended = self._ended, []
        return ended

    def kill(self, pids: Iterable[int]) -> None:
        """See Crew."""
        for pid in self._slots.keys() & set(
            pids
        ):  # the others have ended, and their numbers are free
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def close(self) -> None:
        """See Crew."""
        self._nursery.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # stopped, or stuck in an import
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
