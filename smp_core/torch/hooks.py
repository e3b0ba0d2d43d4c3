"""Hooks that run once: when the model has been partitioned, and after its first step
(API 1.7).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from smp_core.errors import ArgumentTypeError

Hook = Callable[[object, object], object]


class Handle:
    """A registered hook, as ``register`` returns it: ``remove()`` takes the hook away, and may be called again."""

    def __init__(self, hooks: Hooks, key: int) -> None:
        self._hooks, self._key = hooks, key

    def remove(self) -> None:
        """The hook will not run (again)."""
        self._hooks._registered.pop(self._key, None)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Hooks:
    """The hooks of one kind, in the order of their registration.

    ``when`` names the kind in messages. They run the first time that ``run`` is called and never
    again: post-step hooks, too, run after the first step alone (INF, API 9.9: scripts build
    masters and load states in them). A hook that is registered after the run runs at once if
    ``late`` is true, since the event that it waits for is over; otherwise it never runs.
    """

    def __init__(self, when: str, late: bool = False) -> None:
        self.when, self._late = when, late
        self._registered: dict[int, Hook] = {}
        self._keys = itertools.count()
        self._ran: tuple[object, object] | None = None

    @property
    def ran(self) -> bool:
        """True if ``run`` has been called."""
        return self._ran is not None

    def register(self, hook: Hook) -> Handle:
        """Add ``hook(model, optimizer)``. Raises ArgumentTypeError if it cannot be called."""
        if not callable(hook):
            raise ArgumentTypeError(f"a {self.when} hook must be callable, not {hook!r}")
        key = next(self._keys)
        handle = Handle(self, key)
        if self._ran is None:
            self._registered[key] = hook
        elif self._late:
            self._call(hook, *self._ran)
        return handle

    def run(self, model: object, optimizer: object) -> None:
        """Call each hook with (model, optimizer), the first time. ``optimizer`` is None where there
        is none. An exception of a hook is raised with a note that names the hook, and later hooks do not
        run.
        """
        if self._ran is not None:
            return
        self._ran = (model, optimizer)
        for key in list(self._registered):
            hook = self._registered.pop(key, None)  # gone, if an earlier hook removed it
            if hook is not None:
                self._call(hook, model, optimizer)

    def _call(self, hook: Hook, model: object, optimizer: object) -> None:
        try:
            hook(model, optimizer)
        except Exception as error:
            error.add_note(
                f"raised by the {self.when} hook {getattr(hook, '__qualname__', repr(hook))}"
            )
            raise
