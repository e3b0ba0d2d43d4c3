"""Bugs of init, and of what holds before and after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import smp_core.torch as smp
from conformance.mutants.blocks import parse_without, wrap
from conformance.mutants.protocol import ASSERTION, Bugs, Patch
from smp_core.errors import AlreadyInitializedError, ConfigError

BUGS = Bugs("lifecycle")


@BUGS.enter("LIFE-INITIALIZED")
def always_initialized(patch: Patch) -> None:
    """is_initialized is True before init"""
    patch.setattr(smp, "is_initialized", lambda: True)


@BUGS.enter("LIFE-INITIALIZED")
def never_initialized(patch: Patch) -> None:
    """is_initialized is False after init"""
    patch.setattr(smp, "is_initialized", lambda: False)


@BUGS.enter("LIFE-INIT-BARE", TypeError)
def init_demands_parameters(patch: Patch) -> None:
    """init has no default for its argument"""
    init = smp.init
    patch.setattr(smp, "init", lambda config: init(config))


@BUGS.enter("LIFE-INIT-BARE", *ASSERTION, ConfigError)
def default_pipeline(patch: Patch) -> None:
    """two partitions by default (API 8.4)"""
    wrap(patch, "init", lambda init, given=None: init({"partitions": 2, **(given or {})}))


@BUGS.enter("LIFE-INIT-PARAMETERS")
def init_forgets_parameters(patch: Patch) -> None:
    """init ignores the dict"""
    wrap(patch, "init", lambda init, given=None: init())


@BUGS.enter("LIFE-INIT-PARAMETERS")
def init_forgets_placement(patch: Patch) -> None:
    """init ignores placement_strategy"""
    parse_without(patch, lambda given: {**given, "placement_strategy": "cluster"})


@BUGS.enter("LIFE-FIRST-CALL")
def calls_initialize(patch: Patch) -> None:
    """a call before init initialises with defaults"""

    def rank(original: Callable[[], int]) -> int:
        smp.init()
        return original()

    wrap(patch, "rank", rank)


@BUGS.enter("LIFE-INIT-AGAIN", AlreadyInitializedError)
def init_only_once(patch: Patch) -> None:
    """any second init is refused"""

    def init(original: Callable[[Any], None], given: Any = None) -> None:
        if smp.is_initialized():
            raise AlreadyInitializedError("smp.init: only once")
        original(given)

    wrap(patch, "init", init)


@BUGS.enter("LIFE-INIT-AGAIN")
def init_resets(patch: Patch) -> None:
    """a second init without parameters goes back to the defaults"""

    def init(original: Callable[[Any], None], given: Any = None) -> None:
        if given is None:
            smp.shutdown()
        original(given)

    wrap(patch, "init", init)


@BUGS.enter("LIFE-INIT-OTHER")
def last_init_wins(patch: Patch) -> None:
    """a second init replaces the first"""

    def init(original: Callable[[Any], None], given: Any = None) -> None:
        smp.shutdown()
        original(given)

    wrap(patch, "init", init)


@BUGS.enter("LIFE-INIT-OTHER")
def first_init_wins(patch: Patch) -> None:
    """a second init is ignored, whatever it says"""
    wrap(patch, "init", lambda init, given=None: None if smp.is_initialized() else init(given))
