"""Faults on a rank that is a process: it really dies, and really stands still.

Calls of torch.distributed are seen where the board sees them (``BoardRecorder``), whether it is on or
not; ``board/coverage`` lists which those are.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pytest_smp.ranks.board.recorder import BoardRecorder, Description
from pytest_smp.ranks.faults import Claim
from pytest_smp.ranks.faults.striking import FaultyObjects, Later, Strikes
from pytest_smp.ranks.protocols import Job
from smp_core.errors import UnsupportedError
from smp_core.transport.protocols import RankFabric


class _Effects:
    """The effects of faults on the rank's own process (see striking.Effects)."""

    def end(self, code: int, text: str) -> NoReturn:
        with contextlib.suppress(OSError):
            os.write(2, f"smp_faults: {text}\n".encode())
        if code >= 0:
            os._exit(code)
        die(signal.Signals(-code))

    def stand_still(self, seconds: float | None, text: str) -> None:
        if seconds is not None:
            time.sleep(seconds)
            return
        with contextlib.suppress(OSError):
            os.write(2, f"smp_faults: {text}\n".encode())
        while True:
            time.sleep(3600.0)


def die(number: signal.Signals) -> NoReturn:
    """End this process by a signal that nobody handles; no core file is written."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.disable()
    if number is not signal.SIGKILL:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    while True:  # it is delivered in a moment
        time.sleep(1.0)


class ProcessStrikes(Strikes):
    """The faults of this rank process in one run; in force from its making until ``close``."""

    def __init__(self, job: Job, rank: int, fabric: RankFabric, recorder: BoardRecorder) -> None:
        super().__init__(job.faults, rank, _Effects())
        self._stack = contextlib.ExitStack()
        objects = fabric.objects
        try:
            fabric.objects = FaultyObjects(objects, self)
        except AttributeError:
            raise UnsupportedError(
                f"smp_faults: {type(fabric).__qualname__}.objects cannot be set, so its calls "
                "cannot be struck: make it an attribute"
            ) from None
        self._stack.callback(setattr, fabric, "objects", objects)
        self._recorder = recorder
        self._later: dict[int, Later] = {}
        for name in ("collective", "post", "done"):
            setattr(recorder, name, getattr(self, f"_{name}"))
            self._stack.callback(delattr, recorder, name)

    def body(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """See Strikes.

        Messages of tensors are hit from the body's start: by then the board covers the classes of
        process groups, and what is lost has not been sent for it either. Before, it would cover ours
        instead, and nothing once we are gone.
        """
        struck_body = super().body(body)
        if not any(Claim.TENSORS in due.fault.needs for due in self._messages):
            return struck_body
        from pytest_smp.ranks.faults import messages

        def hit_body(*args: Any, **kwargs: Any) -> Any:
            with messages.struck(lambda group: self):
                return struck_body(*args, **kwargs)

        return hit_body

    def silence(self) -> None:
        """Let the recorder write nothing: the board is off, and nobody reads it."""
        recorder = self._recorder
        self._stack.callback(setattr, recorder, "_write", recorder._write)
        recorder._write = _nothing

    def close(self) -> None:
        """Undo all changes to the process."""
        self._stack.close()

    # Instead of the recorder's own methods.

    def _collective(
        self, group: int, key: object, describe: Callable[[], Description], place: int | None = None
    ) -> int:
        later = self.before(f"dist.{describe().operation}")
        number = BoardRecorder.collective(self._recorder, group, key, describe, place)
        self._later[number] = later
        return number

    def _post(
        self,
        sends: bool,
        group: int,
        peer: int,
        tag: int,
        key: object,
        describe: Callable[[], Description],
    ) -> int:
        later = self.before(f"dist.{'send' if sends else 'recv'}")
        number = BoardRecorder.post(self._recorder, sends, group, peer, tag, key, describe)
        self._later[number] = later
        return number

    def _done(self, numbers: Sequence[int]) -> None:
        BoardRecorder.done(self._recorder, numbers)
        for number in numbers:
            self.after(self._later.pop(number, []))


def _nothing(data: Any) -> None:
    return None
