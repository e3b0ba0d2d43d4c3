"""Warnings, unraisable exceptions and exceptions of threads on a rank process, which happen once more in
the controller: there pytest counts them, as it does those of a test without ranks.

A rank uses the controller's warning filters, so a filter of the command line, of the ini file or of a
marker decides on the rank whether a warning is shown or raised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from pytest_smp.ranks import serialization
from pytest_smp.ranks.remote_errors import RemoteError
from smp_core.errors import Cancelled

#: Where the controller keeps which warnings of a file were shown, for the filter action "default"; like
#: a module's ``__warningregistry__``, which a module that only ranks import does not have here.
_registries: dict[str, dict[Any, Any]] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class ShownWarning:
    """A warning that the rank's filters let through."""

    message: BaseException  # an instance of a Warning; as it could travel
    filename: str
    line: int
    module: str | None
    by_body: bool  # filters of the body's own decided, which the controller does not have

    def repeat(self, rank: int) -> None:
        """Issue it here."""
        message = self.message
        if not isinstance(message, Warning):  # it could not be pickled
            message = UserWarning(f"{message} (rank {rank})")
        registry = _registries.setdefault(self.filename, {})
        with contextlib.ExitStack() as stack:
            if self.by_body:
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("always")
            warnings.warn_explicit(
                message, type(message), self.filename, self.line, self.module, registry
            )


@dataclasses.dataclass(frozen=True, slots=True)
class ThreadException:
    """An exception that ended a thread."""

    error: BaseException
    thread: str

    def repeat(self, rank: int) -> None:
        """Give it to this process's ``threading.excepthook``."""
        error, thread = self.error, threading.Thread(name=f"{self.thread} (rank {rank})")
        threading.excepthook(
            threading.ExceptHookArgs((type(error), error, error.__traceback__, thread))
        )


@dataclasses.dataclass(frozen=True, slots=True)
class UnraisableException:
    """An exception that nobody could catch, such as one in ``__del__``."""

    error: BaseException
    message: str | None  # as in sys.UnraisableHookArgs
    source: str  # the representation of the object that it came from

    def repeat(self, rank: int) -> None:
        """Give it to this process's ``sys.unraisablehook``."""
        error = self.error
        if sys.unraisablehook is sys.__unraisablehook__:  # it takes Python's own objects only
            print(
                f"{self.message or 'Exception ignored in'}: {self.source} (rank {rank})",
                file=sys.stderr,
            )
            traceback.print_exception(error)
            return
        source = _Described(f"{self.source} (rank {rank})")
        arguments: Any = types.SimpleNamespace(
            exc_type=type(error),
            exc_value=error,
            exc_traceback=error.__traceback__,
            err_msg=self.message,
            object=source,
        )
        sys.unraisablehook(arguments)


Incident = ShownWarning | ThreadException | UnraisableException


#: A recorded warning, and the further fields of its ShownWarning.
Shown = tuple[Warning, tuple[Any, ...]]


class _Described:
    """Stands for an object of another process in messages."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


class IncidentRecorder:
    """Records the incidents of a rank process, from its start to its end."""

    def __init__(self) -> None:
        self.filters: list[Any] = []  # of the run, with which its body begins
        self._incidents: list[tuple[type[Any], BaseException, tuple[Any, ...]]] = []
        threading.excepthook = self._on_thread
        sys.unraisablehook = self._on_unraisable

    def _on_thread(self, args: Any) -> None:
        # A call of a thread is cancelled when another rank has ended the run: a consequence.
        if not issubclass(args.exc_type, Cancelled):
            name = "<unknown>" if args.thread is None else args.thread.name
            self._incidents.append((ThreadException, _value(args), (name,)))

    def _on_unraisable(self, args: Any) -> None:
        try:
            source = repr(args.object)
        except BaseException as broken:
            source = f"<its representation cannot be made: {type(broken).__name__}>"
        self._incidents.append((UnraisableException, _value(args), (args.err_msg, source)))

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Shown]]:
        """While entered, warnings are recorded, and filters may be changed. The log is yielded."""
        log: list[Shown] = []

        def note(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
            error = message if isinstance(message, Warning) else category(message)
            by_body = [*warnings.filters] != self.filters
            log.append((error, (filename, lineno, _module_of(filename), by_body)))

        with warnings.catch_warnings():
            warnings.showwarning = note  # type: ignore[assignment]
            yield log
        self._incidents += [(ShownWarning, error, rest) for error, rest in log]

    def take(self) -> bytes | None:
        """The incidents since the last call, pickled; None if there are none. Does not raise."""
        if not self._incidents:
            return None
        incidents, self._incidents = self._incidents, []
        return pickle.dumps(
            [(kind, serialization.dump_error(error), rest) for kind, error, rest in incidents]
        )


def _value(args: Any) -> BaseException:
    error: BaseException = args.exc_type() if args.exc_value is None else args.exc_value
    return error


def _module_of(filename: str) -> str | None:
    """The name of the module that was imported from this file, which filters may name."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__dict__", {}).get("__file__") == filename:
            return name
    return None


def of(packed: bytes | None) -> Sequence[Incident]:
    """Unpack the incidents that ``IncidentRecorder.take`` has packed."""
    if packed is None:
        return ()
    return [kind(_error(error), *rest) for kind, error, rest in pickle.loads(packed)]


def _error(packed: bytes) -> BaseException:
    try:
        error: BaseException = pickle.loads(packed)
    except (Exception, SystemExit) as reason:  # the rank could read it
        return RemoteError(f"it cannot be unpickled here: {type(reason).__name__}: {reason}")
    return error
