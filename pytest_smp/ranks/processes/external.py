"""The executor of `external`: ranks that somebody's launcher started (mpiexec, torchrun, srun), on one
machine or several.

Every process of the job runs the same command. The one of rank 0 forks the controller, which goes on
as if it had been started alone; apart from that, each becomes the supervisor of its own rank: a fork server
of one. The launcher sees the supervisors only. When a rank is lost, its supervisor stays until the controller
has said so, and the launcher does not tear the job down before the verdict is out.

How the ranks learn where the controller listens is the launcher's business: by torch's rendezvous
(``env://``) where there is one, else by MPI.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection
from typing import Any

from pytest_smp.ranks.processes import wire
from pytest_smp.ranks.processes.fork_pool import PRELOAD, ForkServerConnection, ForkServerPool
from pytest_smp.ranks.processes.fork_server import ForkServer, die_with_parent
from pytest_smp.ranks.processes.process_status import ProcessStatus
from pytest_smp.ranks.processes.rank import Membership
from pytest_smp.ranks.processes.rank import main as rank_main
from pytest_smp.ranks.processes.worker_pool import Ended, RankProcess, describe_exit
from pytest_smp.ranks.protocols import ExecutorOptions
from smp_core.errors import BackendError
from smp_core.transport.launchers import LAUNCHERS, Launch
from smp_core.transport.private_folder import private_folder

_GATHER = 120.0  # seconds for all supervisors to connect
_LAST_WORDS = 20.0  # seconds that a controller gets to report when its launcher has killed the job
_AFTER_YOU = 2.0  # seconds that rank 0 gets to end first, so that its exit code is the job's
_QUIT = 5.0  # seconds for MPI to be finalised
_KEY = "smp-controller"


class ExternalJob:
    """The data of the job that the process of rank 0 has before it splits, and that its controller inherits."""

    current: ExternalJob | None = None

    def __init__(self, launch: Launch, fabric: str, capture: bool) -> None:
        self.launch, self.fabric, self.capture = launch, fabric, capture
        self.socket = _listen(launch)
        self.folder = private_folder()  # the controller's
        self.folders = [
            self.folder
        ]  # on its machine: the controller removes those that a killed supervisor left
        self.secret = wire.new_secret()

    def contact(self) -> dict[str, Any]:
        """The address and the secret that every rank needs to connect, and whether output is captured."""
        address = self.socket.getsockname()
        return {"address": address, "secret": self.secret.hex(), "capture": self.capture}

    def remove_folders(self) -> None:
        """Remove the run's folders on the controller's machine."""
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


def _listen(launch: Launch) -> socket.socket:
    """The socket that the ranks connect to: on the loopback device, unless the job spans machines.

    Raises BackendError if no address is known under which the other machines reach this one.
    """
    if launch.one_machine:
        return wire.listen(("127.0.0.1", 0))
    names = os.environ.get("MASTER_ADDR"), socket.gethostname(), socket.getfqdn()
    for name in filter(None, names):
        with contextlib.suppress(OSError):  # unknown, or not this machine's
            address = socket.gethostbyname(name)
            if not address.startswith("127."):  # Debian lists the host's own name there
                return wire.listen((address, 0))
    raise BackendError(
        f"the ranks are on several machines, and none of {', '.join(filter(None, names))} is an "
        "address under which they reach rank 0's: set MASTER_ADDR to one, for all ranks"
    )


# The processes of the job.


def split(launch: Launch, fabric: str = "", *, capture: bool = True) -> int | None:
    """Become a supervisor, for as long as the job lasts, and return the exit code; or, in the one process
    that the controller is forked into, return None at once.
    """
    fabric = fabric or launch.fabric
    parent = os.getppid()  # the launcher
    job = ExternalJob(launch, fabric, capture) if launch.rank == 0 else None
    controller = 0
    if job is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        alive, kept = os.pipe()
        controller = os.fork()
        if controller == 0:
            os.close(kept)
            threading.Thread(target=_end_with, args=(alive, job), daemon=True).start()
            ExternalJob.current = job
            for launcher in LAUNCHERS:  # also of an srun above torchrun
                for name in (launcher.rank, launcher.size):
                    os.environ.pop(name, None)  # its children are no ranks of the job
            return None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: _pass_on(controller, number))
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller's to handle
        signal.signal(signal.SIGTERM, _leave)  # of a launcher that has seen another rank end
    served = False
    try:
        code, served = _Supervisor(launch, fabric, job, parent).serve(), True
    except BackendError as error:
        print(f"smp: rank {launch.rank}: {error}", file=sys.stderr)
        code = 1
    except ConnectionError:  # the controller has ended already, and said why: its code is the job's
        code, served = (1 if fabric == "mpi" else 0), True
    except OSError as error:
        if wire.is_silence(error) or isinstance(error, TimeoutError):
            print(f"smp: rank {launch.rank}: rank 0's machine does not answer", file=sys.stderr)
        else:
            traceback.print_exc()
        code = 1
    except Exception:
        traceback.print_exc()
        code = 1
    if controller:
        if not served:  # it would wait for this rank
            _pass_on(controller, signal.SIGTERM)
        elif os.getppid() != parent:  # it has ended, and its whole job with it
            os.close(kept)
        _, status = os.waitpid(controller, 0)
        assert job is not None
        job.remove_folders()  # it may have ended before it took over, or have been killed
        ended = os.waitstatus_to_exitcode(status)
        if ended < 0:  # without a word
            print(f"smp: the controller was {describe_exit(ended)}", file=sys.stderr)
        code = ended if ended >= 0 else 1
    elif code:
        time.sleep(_AFTER_YOU)
    return code


def _leave(number: int, _: object) -> None:
    """Leave by the front door, past everything that tidies up."""
    raise SystemExit(128 + number)


def _end_with(alive: int, job: ExternalJob) -> None:
    """End the controller when its supervisor or its launcher is gone, but not before it could say why."""
    os.read(alive, 1)  # nobody writes: it returns when the supervisor has closed the other end
    time.sleep(_LAST_WORDS)
    job.remove_folders()
    os._exit(1)


def _pass_on(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class _Supervisor:
    """The supervisor that each process of the job becomes, apart from the controller."""

    def __init__(self, launch: Launch, fabric: str, job: ExternalJob | None, launcher: int) -> None:
        self._launch, self._fabric, self._job = launch, fabric, job
        self._launcher = launcher  # the process that started this one
        self._folder = private_folder()

    def serve(self) -> int:
        try:
            return self._with_mpi() if self._fabric == "mpi" else self._with_torch()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _setting(self, contact: dict[str, Any]) -> dict[str, Any]:
        address = contact["address"]
        return {
            "folder": self._folder,
            "address": tuple(address) if isinstance(address, list) else address,
            "secret": contact["secret"],
            "capture": contact["capture"],
        }

    def _fork_server(self, contact: dict[str, Any]) -> ForkServer:
        setting = self._setting(contact)
        hello = {
            "wire": "fork_server",
            "slot": self._launch.rank,
            "size": self._launch.size,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "folder": self._folder,
        }
        secret = bytes.fromhex(contact["secret"])
        connection = wire.connect(setting["address"], secret, hello, patience=int(_GATHER))
        return ForkServer(connection, setting, launcher=self._launcher)

    def _with_torch(self) -> int:
        """Meet at torch's own rendezvous; ranks are forked as often as need be."""
        for module in PRELOAD:
            __import__(module)
        import torch
        from torch import distributed as dist

        torch.set_num_threads(1)
        launch = self._launch
        rendezvous = dist.rendezvous(  # type: ignore[attr-defined]
            "env://", launch.rank, launch.size, timeout=datetime.timedelta(seconds=_GATHER)
        )
        try:
            store, _, _ = next(rendezvous)
        except RuntimeError as error:  # torch's own lists every frame of C++
            raise BackendError(
                f"it has not met the others at {os.environ['MASTER_ADDR']}:"
                f"{os.environ['MASTER_PORT']}: {str(error).splitlines()[0]}"
            ) from None
        if self._job is not None:
            store.set(_KEY, json.dumps(self._job.contact()))
            self._job.socket.close()
        contact = json.loads(store.get(_KEY))
        self._fork_server(contact).serve()
        return 0

    def _with_mpi(self) -> int:
        """Fork the rank before MPI starts: it meets the others by MPI, and says where."""
        reading, writing = os.pipe()
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent(supervisor)
                os.close(reading)
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                self._mpi_rank(writing)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(1)
        os.close(writing)
        if self._job is not None:
            self._job.socket.close()
        with os.fdopen(reading) as told:
            came, _, _ = select.select([told], [], [], _GATHER)
            line = told.readline() if came else ""
        try:
            if not came:
                raise BackendError(f"it has not met the others by MPI within {_GATHER:g} s")
            if not line:
                raise BackendError("its process has ended before it had met the others by MPI")
            fork_server = self._fork_server(json.loads(line))
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        fork_server.adopt(pid, self._launch.rank)
        fork_server.serve()
        # MPICH's mpiexec returns 0, whatever comes later, if the first process to end without
        # MPI_Finalize says 0.
        return 0 if fork_server.codes == [0] else 1

    def _mpi_rank(self, writing: int) -> None:
        for module in PRELOAD:
            __import__(module)
        import torch

        from smp_core.transport.mpi.job import Pulse, join
        from smp_core.transport.mpi.library import finalize

        torch.set_num_threads(1)
        contact = self._job.contact() if self._job is not None else None
        if self._job is not None:
            self._job.socket.close()
        launch = self._launch
        try:
            world = join(launch)
        except BackendError as error:
            print(f"smp: rank {launch.rank}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        contact = world.bcast(contact, root=0)
        world.alltoall([launch.rank] * launch.size)  # connections now: descriptors are counted
        pulse = Pulse.of(launch, world)
        with os.fdopen(writing, "w") as told:
            told.write(json.dumps(contact) + "\n")

        def at_end() -> None:
            if pulse is not None:
                pulse.stop()
            finalize()

        rank_main(Membership(slot=launch.rank, **self._setting(contact)), at_end=at_end)


# The controller.


class _RemoteForkServer(ForkServerConnection):
    """The supervisor of one rank."""

    def last_words(self) -> str:
        """See ForkServerConnection."""
        if self.silent:
            return wire.silence(self.host)
        return f"the process that its launcher started on {self.host} has ended"


class ExternalPool(ForkServerPool):
    """The ranks of a launcher's job. See processes.WorkerPool."""

    def __init__(self, options: ExecutorOptions) -> None:
        job = ExternalJob.current
        if job is None:
            raise BackendError(
                "the external backend runs on ranks that a launcher started, and this process was "
                "started alone: mpiexec -n 8 pytest ..., torchrun --nproc-per-node 8 -m pytest ..., "
                "or srun ...; --smp-backend=gloo starts ranks itself"
            )
        super().__init__(options)
        self._job = job
        self.limit = job.launch.size
        self.folder = job.folder
        self.address = job.socket
        self.secret = job.secret
        self.prepares = job.fabric != "mpi"
        self.final = job.fabric == "mpi"
        self.store = "file" if job.fabric == "mpi" else "env"
        self.restarts_together = job.fabric == "mpi"
        self._arrived = threading.Condition()
        self._there: dict[int, _RemoteForkServer] = {}
        self._lost: list[Ended] = []  # with their supervisors; not told yet
        self._host = socket.gethostname()
        self._deadline = time.monotonic() + _GATHER

    def welcome(self, connection: Connection, hello: dict[str, Any]) -> None:
        """See WorkerPool."""
        with self._arrived:
            server = _RemoteForkServer(connection, {hello["slot"]}, hello["host"])
            if server.host == self._host:
                self._job.folders.append(hello["folder"])
            self._there[hello["slot"]] = server
            self._arrived.notify_all()

    def gather(self) -> None:
        """Wait until every supervisor is there. Raises BackendError, naming those that are not."""
        if self._servers:
            return
        size = self._job.launch.size
        with self._arrived:
            left = self._deadline - time.monotonic()
            self._arrived.wait_for(lambda: len(self._there) == size, max(0.0, left))
            missing = [slot for slot in range(size) if slot not in self._there]
            if missing:
                raise BackendError(
                    f"ranks {missing} of {size} have not come within {_GATHER:g} s; the launcher "
                    "must start the same command on all ranks"
                )
            prelude, self._prelude = self._prelude, None
            for slot in range(size):
                self.add(self._there[slot])
                if prelude is not None and self.prepares:
                    self._there[slot].prepare(prelude)

    def start(self, slots: Collection[int]) -> Collection[int]:
        """See WorkerPool. Ranks of an MPI job are there once, and for all."""
        self.gather()
        if self._job.fabric != "mpi":
            return super().start(slots)
        return range(self._job.launch.size)

    def kill(self, ranks: Collection[RankProcess]) -> None:
        """See WorkerPool."""
        for server in self._servers:
            with contextlib.suppress(BackendError):  # `ended` tells it
                running = server.running()
                wanted = [rank.pid for rank in ranks if running.get(rank.pid) == rank.slot]
                if wanted:
                    server.ask(kill=wanted)

    def ended(self) -> list[Ended]:
        """See WorkerPool."""
        ended = []
        for server in list(self._servers):
            if server not in self._servers:  # it was on a machine that does not answer
                continue
            try:
                ended += server.ended()
            except BackendError:  # the supervisor is gone: with its machine, or killed
                if server.silent:
                    self.silent(server.host)
                else:
                    self._lose(server)
        ended, self._lost = [*ended, *self._lost], []
        return ended

    def silent(self, host: str) -> None:
        """See WorkerPool."""
        for server in [each for each in self._servers if each.host == host]:
            server.silent = True
            self._lose(server)

    def _lose(self, server: ForkServerConnection) -> None:
        """Count a fork server as lost, with all its ranks; no lost rank is started again."""
        self.final = True
        self._servers.remove(server)
        self._news.unregister(server.connection.fileno())
        for pid, slot in server.ranks.items():
            self._lost.append(Ended(slot, pid, None, server.last_words()))
        server.ranks = {}
        server.connection.close()

    def place(self, slot: int, size: int) -> tuple[int, int]:
        """See WorkerPool."""
        hosts = [self._there[each].host for each in range(size)]
        return hosts[:slot].count(hosts[slot]), hosts.count(hosts[slot])

    def stacks(self, ranks: Sequence[RankProcess]) -> dict[int, list[str]]:
        """See WorkerPool."""
        near = [rank for rank in ranks if rank.host == self._host]
        found = super().stacks(near)
        for rank in ranks:
            if rank.host != self._host:
                found[rank.slot] = self._look(rank).get("stacks", [])
        return found

    def state(self, rank: RankProcess) -> ProcessStatus | None:
        """See WorkerPool."""
        return super().state(rank) if rank.host == self._host else None

    def written(self, rank: RankProcess) -> tuple[str, str]:
        """See WorkerPool."""
        if rank.host == self._host:
            return super().written(rank)
        out, err = self._look(rank).get("written", ("", ""))
        return out, err

    def _look(self, rank: RankProcess) -> dict[str, Any]:
        server = self._there[rank.slot]
        if server not in self._servers:
            return {}
        try:
            return server.look(rank.pid)
        except BackendError:
            return {}

    def _let_finalize(self) -> None:
        """Ranks of an MPI job end together, if all are there; else they are killed."""
        deadline = time.monotonic() + _QUIT
        while any(server.running() for server in self._servers) and time.monotonic() < deadline:
            select.select([self.fileno()], [], [], 0.1)

    def close(self) -> None:
        """See WorkerPool: the supervisors end when their connections do."""
        with contextlib.suppress(BackendError):
            if self.final:
                self._let_finalize()
        super().close()
        self._job.remove_folders()
