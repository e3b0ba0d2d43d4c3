"""A plugin for one session of the suite on `sim`: what each requirement's properties do there.

Every property gets the fewest examples that any does, on any backend, and sees a backend that claims
just what its requirement needs; where that leaves it nothing to draw it runs once more for each
further capability, which is claimed beside the needs. For each run the session writes which
capabilities were used, and how many examples were drawn beside the simplest.

An example of a requirement of LONG makes hundreds of calls. Its first run that passes has all of its
examples, and those with another capability have the simplest and one more.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.control import current_build_context

from conformance.engines.names import find_engine
from conformance.engines.protocol import Engine, used
from conformance.requirements.catalogue import REQUIREMENTS
from conformance.session.amounts import LEAST_DRAWS
from conformance.session.verdicts import NotSupported
from pytest_smp.proxies import SmpWorld
from pytest_smp.ranks.capabilities import Capabilities, Capability
from pytest_smp.ranks.sim.objects import SimObjects
from pytest_smp.ranks.sim.process_group import SimProcessGroup

# Before the suite is imported, which takes its settings from the profile.
settings.register_profile(
    "recorded",
    max_examples=1 + LEAST_DRAWS,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("recorded")

#: By the name of an operation of a process group, what a backend claims that has it, where it has
#: another name.
_OPERATIONS = {
    "all_reduce_coalesced": Capability.ALL_REDUCE,
    "all_gather_coalesced": Capability.ALL_GATHER,
    "all_gather_single_coalesced": Capability.ALL_GATHER_SINGLE,
    "reduce_scatter_single_coalesced": Capability.REDUCE_SCATTER_SINGLE,
}


#: Requirements whose examples take a hundred times as long as those of others.
LONG = ("COLL-MANY", "COLL-LARGE")


class Run:
    """One run of a property.

    Attributes:
        claims: what the backend claims meanwhile.
        least: how many examples it must draw beside the simplest.
        used: what was used of it, or beside it.
        examples: how many examples reached the ranks, beside the simplest.
        simplest: the first one's choices.
    """

    def __init__(self, claims: frozenset[Capability], least: int) -> None:
        self.claims = claims
        self.least = least
        self.used: set[Capability] = set()
        self.examples: set[Any] = set()
        self.simplest: Any = None
        self.outcome = "passed"

    def drawn(self) -> None:
        """An example has reached the ranks."""
        with contextlib.suppress(Exception):  # no property of Hypothesis
            choices = tuple(map(repr, current_build_context().data.choices))
            if self.simplest is None:
                self.simplest = choices
            elif choices != self.simplest:
                self.examples.add(choices)


_now: Run = Run(frozenset(), LEAST_DRAWS)


def _before(owner: type, name: str, note: Callable[..., None]) -> None:
    """``note`` sees the arguments of each call of a method first."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def noted(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return method(*args, **kwargs)

    setattr(owner, name, noted)


def _collective(self: Any, call: Any, opts: Any) -> None:
    _now.used.add(_OPERATIONS.get(call.operation) or Capability(call.operation))
    if call.operation in _OPERATIONS:
        _now.used.add(Capability.COALESCED)


def _message(self: Any, verb: str, tensors: Any, peer: int, tag: int) -> None:
    _now.used.add(Capability.POINT_TO_POINT)
    if tag:
        _now.used.add(Capability.TAGS)
    if peer == self.rank():
        _now.used.add(Capability.MESSAGES_TO_ONESELF)


def _any_source(self: Any, *args: Any) -> None:
    _now.used.add(Capability.ANY_SOURCE)


def _new_group(self: Any, ranks: list[int], *args: Any, **kwargs: Any) -> None:
    _now.used.add(Capability.GROUPS)
    if list(ranks) != sorted(ranks):
        _now.used.add(Capability.GROUP_ORDER)


def _coalescing(self: Any, *args: Any) -> None:
    _now.used.add(Capability.COALESCING)


def _object(self: Any, *args: Any) -> None:
    if any(getattr(argument, "name", None) == "smp init" for argument in args):
        return  # smp.init compares configurations by the object transport that every fabric has
    _now.used.add(Capability.OBJECTS)


def pytest_configure(config: pytest.Config) -> None:
    _before(SimProcessGroup, "_collective", _collective)
    _before(SimProcessGroup, "_post", _message)
    _before(SimProcessGroup, "recv_anysource", _any_source)
    _before(SimProcessGroup, "new_group", _new_group)
    _before(SimProcessGroup, "_start_coalescing", _coalescing)
    for name in ("send", "broadcast", "recv_from", "allgather", "barrier"):
        _before(SimObjects, name, _object)
    for name in ("run", "report"):
        _before(SmpWorld, name, lambda *args, **kwargs: _now.drawn())
    SmpWorld.capabilities = property(lambda self: Capabilities(_now.claims))  # type: ignore[misc]


def _claims(requirement: str, engine: Engine) -> Iterator[frozenset[Capability]]:
    named = REQUIREMENTS[requirement].needs
    needs = frozenset(each for each in named if isinstance(each, Capability)) | used(engine, named)
    yield needs
    for each in Capability:
        if each not in needs:
            yield needs | {each}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Run the property as often as it takes; what comes of it is written, and judged by who reads it."""
    global _now
    marker = pyfuncitem.get_closest_marker("requirement")
    assert marker is not None
    engine = find_engine(pyfuncitem.config.getoption("smp_engine") or "smp")
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    least = LEAST_DRAWS
    for number, claims in enumerate(_claims(marker.args[0], engine)):
        _now = Run(claims, least)
        try:
            with _examples(pyfuncitem.obj, 1 + least):
                pyfuncitem.obj(**arguments)
        except NotSupported:
            _now.outcome = "not supported"
        except Exception as error:  # of any type: a finding
            _now.outcome = f"{type(error).__name__}: {error}"
        _write(pyfuncitem, marker.args[0], _now)
        if number == 0 and _now.outcome != "not supported":
            break
        if _now.outcome == "passed" and marker.args[0] in LONG:
            least = 1
    return True


@contextlib.contextmanager
def _examples(test: Any, most: int) -> Iterator[None]:
    """Give a property at most so many examples; a plain test has one."""
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(test, "hypothesis"):
            own = test._hypothesis_internal_use_settings  # what @settings sets
            chosen = settings(own, max_examples=min(most, own.max_examples))
            patch.setattr(test, "_hypothesis_internal_use_settings", chosen)
        yield


def _write(item: pytest.Function, requirement: str, run: Run) -> None:
    line = {
        "requirement": requirement,
        "property": item.name,
        "claims": sorted(run.claims),
        "used": sorted(run.used),
        "draws": hasattr(item.obj, "hypothesis"),
        "drawn": len(run.examples),
        "least": run.least,
        "outcome": run.outcome,
    }
    with Path(os.environ["RECORDED"]).open("a") as file:
        print(json.dumps(line), file=file)
