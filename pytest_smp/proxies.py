"""The values of the fixtures: stateless proxies that find their rank, world or test when they are used.

Hypothesis refuses function-scoped fixtures, so the proxies live as long as the session. ``smp`` is
pickled as a reference, ``smp_tmp_path`` as a plain path; ``smp_world`` refuses to be pickled.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from smp_core.errors import ArgumentError, SmpError, ThreadError

if TYPE_CHECKING:
    import pytest

    from pytest_smp.rank_raises import RankRaises
    from pytest_smp.ranks.capabilities import Capabilities
    from pytest_smp.ranks.protocols import Outcome, Report
    from pytest_smp.ranks.schedule import Schedule
    from pytest_smp.script_runs import ScriptRun
    from pytest_smp.settings import Settings

# pytest leaves these frames out below an error that we raise on purpose; a bug of ours shows them.
__tracebackhide__ = operator.methodcaller("errisinstance", SmpError)


@functools.cache
def _parts() -> tuple[Any, Any]:
    """The API and the module that knows the current rank, imported at the first use since they import torch."""
    import smp_core.torch as api
    from smp_core.transport import current_rank

    return api, current_rank


class Smp:
    """The API, ``import smp_core.torch as smp``, on the rank that uses it."""

    def __getattr__(self, name: str) -> Any:
        api, current_rank = _parts()
        value = getattr(api, name)
        if callable(value) and not isinstance(value, type) and current_rank.current() is None:
            self._refuse(name)
        return value

    @staticmethod
    def _refuse(name: str) -> NoReturn:
        _parts()[1].refuse_child_thread()
        raise ThreadError(
            f"smp.{name} was used outside a rank: fixtures and plain tests run once, in the controller. "
            "Use it in the body of a test marked smp, or in a function that smp_world runs"
        )

    def raises(
        self,
        expected: type[BaseException] | tuple[type[BaseException], ...],
        *,
        match: str | re.Pattern[str] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> RankRaises:
        """A context manager whose block ``ranks`` (all, if not given) must leave by an exception of this class.

        On those ranks the block is one of ``pytest.raises``. A rank that is not named goes on if it comes to the end of
        the block or gets the failure as StepAbortedError; one that waits in the block for ranks that have raised ends
        there, at the end of the run. Raises RankError for a rank that there is not. See docs/testing.md.
        """
        from pytest_smp.rank_raises import RankRaises

        _, current_rank = _parts()
        rank = current_rank.current()
        if rank is None:
            self._refuse("raises")
        return RankRaises(rank, expected, match, ranks, sys._getframe(1))

    def __dir__(self) -> list[str]:
        import smp_core.torch as api

        return [*api.__all__, "raises"]

    def __reduce__(self) -> tuple[Any, ...]:
        return the_smp, ()

    def __repr__(self) -> str:
        return "smp"


@functools.cache
def the_smp() -> Smp:
    """The one instance."""
    return Smp()


class Runner(Protocol):
    """The object that runs functions on ranks: the controller (running.py)."""

    settings: Settings

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of the last run, in rank order."""

    def around_threads(self, body: ScriptRun) -> AbstractContextManager[None]:
        """Entered around a script's run: prepares this process, if the ranks are threads of it."""

    def run(
        self,
        body: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        **how: Any,
    ) -> list[Any]:
        """Run ``body``, and return its values in rank order."""

    def report(
        self,
        body: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        ranks: int,
        config: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        automatic_init: bool = True,
        schedule: Schedule | None = None,
    ) -> Report:
        """Run ``body``, and say how it ended."""


class SmpWorld:
    """Runs functions on ranks, from a test that is not marked itself."""

    def __init__(self, controller: Runner) -> None:
        self._controller = controller

    @property
    def ranks(self) -> int:
        """The largest number of ranks (--smp-ranks)."""
        return self._controller.settings.ranks

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities that the session's backend (--smp-backend) claims."""
        from pytest_smp.ranks.backends import find_backend

        return find_backend(self._controller.settings.backend).capabilities

    def run(
        self,
        body: Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        config: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        init: bool = True,
        schedule: Schedule | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run ``body(*args, **kwargs)`` on every rank of a world; return its values in rank order.

        Each rank gets its own copy of the arguments. ``kwargs`` is one mapping, so that a body may
        have parameters of the names below. ``ranks`` is all that there are if not given;
        ``config`` is that of ``smp.init``, which the first API call of a rank runs by itself unless
        ``init`` is false; ``timeout`` is in seconds; ``schedule`` is the order of turns on `sim`
        (round-robin if not given). Raises the root cause of a failed run (with
        the other ranks as notes); before any rank starts ConfigError, and ArgumentError for an
        argument of this call that cannot be.
        """
        __tracebackhide__ = True
        how = self._how(body, ranks, config, timeout, init, schedule)
        return self._controller.run(body, args, _keywords(kwargs), **how)

    def report(
        self,
        body: Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        config: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        init: bool = True,
        schedule: Schedule | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Report:
        """Run ``body`` like ``run``; return the verdict and every rank's outcome, and raise for none of them."""
        how = self._how(body, ranks, config, timeout, init, schedule)
        return self._controller.report(body, args, _keywords(kwargs), **how)

    def run_script(
        self,
        script: str | os.PathLike[str],
        arguments: Sequence[str] = (),
        *,
        ranks: int | None = None,
        config: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        schedule: Schedule | None = None,
    ) -> list[Outcome]:
        """Run a script as ``__main__`` on every rank; return the ranks' outcomes, with their output.

        ``script`` is found from the working folder, and ``arguments`` become ``sys.argv[1:]``. The other arguments are
        those of ``run``. The script ends well by its last line, or by ``sys.exit()`` with 0 or nothing. Raises the
        root cause of a failed run; ScriptExit for another ``sys.exit``; before any rank starts ArgumentError for a
        script that there is not or that is not valid Python, and ArgumentTypeError for arguments that are no strings.
        """
        __tracebackhide__ = True
        from pytest_smp.script_runs import ScriptRun, script_job

        body = ScriptRun(script_job(script, arguments, ranks or self.ranks))
        how = self._how(body, ranks, config, timeout, True, schedule)
        with self._controller.around_threads(body):
            self._controller.run(body, (), {}, **how)
        return self._controller.outcomes

    def _how(
        self,
        body: Callable[..., Any],
        ranks: int | None,
        config: Mapping[str, Any] | None,
        timeout: float | None,
        init: bool,
        schedule: Schedule | None,
    ) -> dict[str, Any]:
        from pytest_smp.marker import why_not_plain

        why = why_not_plain(body)
        if why is not None:
            raise ArgumentError(f"smp_world: {body!r} {why}: a rank runs a plain function")
        most = self.ranks
        count = most if ranks is None else ranks
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
            text = f"smp_world: ranks={count!r}: must be from 1 to {most}"
            if isinstance(count, int) and count > most:
                from pytest_smp import launch

                text += f"; the test {launch.shortage(count, most)}"
            raise ArgumentError(text)
        if timeout is not None:
            number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
            if not number or not 0 < timeout < math.inf:
                raise ArgumentError(f"smp_world: timeout={timeout!r}: must be seconds above 0")
        if schedule is not None:
            from pytest_smp.ranks.schedule import Schedule

            if not isinstance(schedule, Schedule):
                raise ArgumentError(
                    f"smp_world: schedule={schedule!r}: must be a Schedule; Schedule.parse takes a token"
                )
        return {
            "ranks": count,
            "config": config,
            "timeout": timeout,
            "automatic_init": init,
            "schedule": schedule,
            "show_output": True,
        }

    def __repr__(self) -> str:
        return "smp_world"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("smp_world starts runs, and cannot be used inside one")


def _keywords(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ArgumentError(
            f"smp_world: kwargs={kwargs!r}: must map names of the body's parameters to values"
        )
    return dict(kwargs)


class TmpPath(os.PathLike[str]):
    """One folder for all ranks: a new one for each test, and for each example of a marked property.

    On a rank it is a ``pathlib.Path``; in the controller it behaves like one.
    """

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._base: Path | None = None  # of them all: the factory looks at every name it ever gave
        self._count = 0
        self._current: Path | None = None

    def renew(self) -> None:
        """The next use makes a new folder."""
        self._current = None

    def fresh(self) -> Path:
        """A new folder, for each example of a property that starts its runs by ``smp_world``."""
        self.renew()
        return self.path

    def kept(self) -> Path:
        """A copy of the folder as it is now: fixtures may have filled it."""
        folder = self.path
        return Path(shutil.copytree(folder, folder.with_name(f"{folder.name}-kept")))

    def again(self, kept: Path) -> None:
        """A new folder with the contents of ``kept``."""
        shutil.copytree(kept, self.fresh(), dirs_exist_ok=True)

    @property
    def path(self) -> Path:
        """The folder of the run that is next, or has just ended."""
        if self._current is None:
            if self._base is None:
                self._base = self._factory.mktemp("smp")
            self._current = self._base / str(self._count)
            self._current.mkdir()
            self._count += 1
        return self._current

    def __eq__(self, other: object) -> bool:
        return self.path == other

    def __hash__(self) -> int:
        return hash(self.path)

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __truediv__(self, name: str | os.PathLike[str]) -> Path:
        return self.path / name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.path, name)

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return "smp_tmp_path"

    def __reduce__(self) -> tuple[Any, ...]:
        return Path, (str(self.path),)
