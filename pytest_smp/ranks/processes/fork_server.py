"""The fork server: a process that has all modules imported and forks the ranks of the worker pool and of
a launcher's job.

Importing torch takes about a second, and forking a process that has imported it takes a few
milliseconds. The fork server runs no thread and no body. The controller sends it requests, and is told
how each child ended. When the controller's end of the connection closes for any reason, the fork server
kills the ranks, removes the run's folder and ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import pickle
import select
import shutil
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from pytest_smp.ranks.processes.output import read_output
from pytest_smp.ranks.processes.process_state import adopt_orphans, children
from pytest_smp.ranks.processes.rank import Membership, main
from pytest_smp.ranks.processes.stacks import STACKS, read_stacks
from pytest_smp.ranks.processes.wire import is_silence

_PR_SET_PDEATHSIG = 1
_GENERATIONS = 20  # of processes that start processes, before we give up on a body
_LOOK = 2.0  # seconds between two looks at whether the launcher is still there


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the fork server dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died in between
            os._exit(1)


class ForkServer:
    """Serves one controller.

    ``launcher`` is the process whose end ends everything, if there is one: torchrun's workers would
    outlive a torchrun that was killed.
    """

    def __init__(
        self, controller: Connection, setting: dict[str, Any], launcher: int | None = None
    ) -> None:
        self._launcher = launcher
        # A process that is a child already is no orphan of a body: a launcher's rank 0 forked the
        # controller.
        self._spared = set(children())
        self._servants: set[int] = set()  # what the prelude started: for all ranks, to the end
        self.codes: list[int] = []  # with which ranks have ended by themselves
        self._controller = controller
        self._setting = setting
        self._children: set[int] = set()
        self._signals, wakeup = os.pipe()
        for end in (self._signals, wakeup):
            os.set_blocking(end, False)
        self._wakeup = wakeup
        adopt_orphans()
        self._requests: dict[str, Callable[[Any], None]] = {
            "prepare": self._prepare,
            "fork": self._fork_all,
            "kill": self._kill_all,
            "look": self._look,
        }
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Answer requests until the controller closes the connection, or is gone.

        Raises OSError if the controller's machine does not answer.
        """
        try:
            while True:
                sources: list[Any] = [self._controller, self._signals]
                ready, _, _ = select.select(sources, [], [], _LOOK)
                if self._launcher not in (None, os.getppid()):
                    return
                if self._signals in ready:
                    os.read(self._signals, 4096)
                    self._reap()
                if self._controller in ready:
                    for what, about in json.loads(self._controller.recv_bytes()).items():
                        self._requests[what](about)
        except (EOFError, OSError) as error:
            if is_silence(error):
                raise
        finally:
            self._end()

    def _tell(self, **what: Any) -> None:
        self._controller.send_bytes(json.dumps(what).encode())

    def adopt(self, pid: int, slot: int) -> None:
        """A rank that was forked elsewhere in this process."""
        self._children.add(pid)
        self._tell(forked=slot, pid=pid)
        self._reap()  # it may have ended before

    def _prepare(self, prelude: str) -> None:
        try:
            pickle.loads(bytes.fromhex(prelude))()
        except BaseException as error:
            self._tell(prepared=f"{type(error).__name__}: {error}")
        else:
            self._tell(prepared=None)
        self._servants = set(children()) - self._children - self._spared

    def _fork_all(self, slots: list[int]) -> None:
        for slot in slots:
            self._fork(slot)

    def _kill_all(self, pids: list[int]) -> None:
        for pid in self._children.intersection(pids):
            _kill_group(pid)

    def _look(self, pid: int) -> None:
        """Send a rank's stacks and its output so far to a controller on another machine."""
        stacks = []
        if pid in self._children:
            os.kill(pid, STACKS)
            stacks = read_stacks(self._setting["folder"], pid)
        self._tell(looked=pid, stacks=stacks, written=read_output(self._setting["folder"], pid))

    def _fork(self, slot: int) -> None:
        fork_server = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent(fork_server)
                os.setsid()  # a group of its own, with what the body starts
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (self._signals, self._wakeup, self._controller.fileno()):
                    os.close(descriptor)
                main(Membership(slot=slot, **self._setting))
            except BaseException:
                sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
            finally:
                os._exit(1)  # main does not return
        self._children.add(pid)
        self._tell(forked=slot, pid=pid)

    def _reap(self) -> None:
        for pid in list(self._children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._children.discard(pid)
                _kill_group(pid)
                self.codes.append(os.waitstatus_to_exitcode(status))
                self._tell(ended=pid, status=self.codes[-1])
                self._kill_orphans()
        for pid in self._orphans():  # a body's daemon that has ended
            os.waitpid(pid, os.WNOHANG)

    def _orphans(self) -> list[int]:
        """The processes that bodies started in groups of their own and whose parents have ended."""
        ours = self._children | self._spared | self._servants
        return [pid for pid in children() if pid not in ours]

    def _kill_orphans(self) -> None:
        """A rank has ended: nothing that it started goes on. Again for what that leaves behind."""
        for _ in range(_GENERATIONS):
            orphans = self._orphans()
            if not orphans:
                return
            for pid in orphans:
                _kill_group(pid)
                try:
                    os.kill(pid, signal.SIGKILL)
                except PermissionError:  # another user's by now: not ours to end, nor to wait for
                    self._spared.add(pid)
                    continue
                os.waitpid(pid, 0)

    def _end(self) -> None:
        for pid in self._children:
            _kill_group(pid)
        for pid in self._children:
            os.waitpid(pid, 0)
        self._children.clear()
        self._servants.clear()
        self._kill_orphans()
        shutil.rmtree(self._setting["folder"], ignore_errors=True)


def _kill_group(pid: int) -> None:
    """Send SIGKILL to a rank and to the processes that its bodies started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def start(descriptor: int) -> None:
    """The fork server's main: ``python -c "...start(fd)"``; what it is to do comes by the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to handle
    controller = Connection(descriptor)
    setting = json.loads(controller.recv_bytes())
    environment = setting.pop("environment")  # what bodies shall see
    gc.disable()  # looking for garbage among what torch's import makes takes 0.2 s
    for module in setting.pop("preload"):
        __import__(module)
    gc.enable()
    gc.freeze()  # and again whenever a rank looks, which would copy these pages into each
    _use_one_compute_thread()
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    ForkServer(controller, setting).serve()
    os._exit(0)


def _use_one_compute_thread() -> None:
    """Give torch one compute thread, as launchers of real ranks do by OMP_NUM_THREADS=1, since there are
    more ranks than cores.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
