"""``--smp-selftest``: a pytest plugin that plants bugs and checks that the properties catch them.

The session runs the collected properties on the reference and then on mutants, in place of one normal
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conformance.mutants.protocol import Mutant

_MUTANTS: pytest.StashKey[Sequence[Mutant]] = pytest.StashKey()

#: Seconds that one run on ranks may take: many mutants loop for ever, and a good run is quick.
_TIMEOUT = "5"


@pytest.hookimpl(tryfirst=True)  # before the options of the ranks are read
def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    if not option.smp_selftest:
        if option.smp_mutants or option.smp_mutant:
            raise pytest.UsageError("--smp-mutants and --smp-mutant belong to --smp-selftest")
        return
    if getattr(option, "dist", "no") != "no":
        raise pytest.UsageError("--smp-selftest uses all cores by itself: leave out -n and --dist")
    from conformance.mutants.protocol import MutantError

    where = "conformance"
    try:
        from conformance.mutants.catalogue import MUTANTS, checked, load

        found: Sequence[Mutant] = MUTANTS
        for where in option.smp_mutants:
            found = checked(found, load(where))
    except MutantError as error:
        raise pytest.UsageError(f"mutants of {where}: {error}") from error
    config.stash[_MUTANTS] = found
    if option.smp_timeout is None and not config.getini("smp_timeout"):
        option.smp_timeout = _TIMEOUT


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    if not config.option.smp_selftest or config.option.collectonly:
        return None
    if session.testsfailed and not config.option.continue_on_collection_errors:
        raise session.Interrupted("errors during collection: nothing is scored")
    from conformance.mutants.selftest import selftest

    if not selftest(session, config.stash[_MUTANTS]):
        session.testsfailed += 1
    return True
