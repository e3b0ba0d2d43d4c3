"""The marker ``@pytest.mark.smp(ranks=..., **config)``: what it may say, checked when tests are
collected.
"""

from __future__ import annotations

import dataclasses
import inspect
import unittest
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import pytest

from pytest_smp import launch
from pytest_smp.settings import Settings

# Fixtures that act on the controller's process or test item: a copy on each rank would do nothing,
# or harm.
_NOT_ON_RANKS = {
    "monkeypatch": "patch inside the body, or in a fixture of your own",
    "request": "read what you need from it in a fixture of your own",
    "capsys": "the ranks' output is shown per rank",
    "capsysbinary": "the ranks' output is shown per rank",
    "capfd": "the ranks' output is shown per rank",
    "capfdbinary": "the ranks' output is shown per rank",
    "caplog": "return the records, or assert on them in a plain test with smp_world",
    "recwarn": "warning filters are shared by the ranks; use smp_world in a plain test",
    "record_property": "use smp_world in a plain test",
    "record_xml_attribute": "use smp_world in a plain test",
    "record_testsuite_property": "use smp_world in a plain test",
    "subtests": "its reports are of the controller; parametrize the test, or use smp_world in a plain test",
    "pytester": "use smp_world in a plain test",
    "testdir": "use smp_world in a plain test",
    "smp_faults": "declare what is to go wrong before the run: by the marker smp_faults, or in a "
    "fixture of your own",
    "smp_world": "it starts runs, and this test is one; ask for it in a test without the marker",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """The numbers of ranks and the configuration that a marked test asks for."""

    ranks: tuple[int, ...]  # one run of the test for each
    many: bool  # written as a list: the ids name the number
    config: Mapping[str, Any]
    fresh: bool = False  # on rank processes that have run nothing before


def request_of(definition: pytest.Item | Any, settings: Settings) -> Request | None:
    """The request that the test's markers make, or None for a test without a marker.

    Of two markers with the same keyword the nearer one to the test wins. Raises
    ``Collector.CollectError`` with the test's name for a request that cannot be met.
    """
    markers = list(definition.iter_markers("smp"))
    if not markers:
        return None
    keywords: dict[str, Any] = {}
    for marker in reversed(markers):
        if marker.args:
            _refuse(
                definition,
                f"takes keyword arguments only, not {', '.join(map(repr, marker.args))}: smp(ranks=4)",
            )
        keywords.update(marker.kwargs)
    fresh = keywords.pop("fresh", False)
    if not isinstance(fresh, bool):
        _refuse(definition, f"fresh={fresh!r}: must be True or False")
    ranks = keywords.pop("ranks", settings.ranks)
    many = isinstance(ranks, list | tuple)
    counts = tuple(ranks) if many else (ranks,)
    if not counts:
        _refuse(definition, "ranks=[] asks for no run at all")
    for count in counts:
        _check_count(definition, count, settings)
    _check_function(definition)
    _check_config(definition, keywords, counts)
    return Request(counts, many, keywords, fresh)


def request_of_item(item: pytest.Item, settings: Settings, ranks_parameter: str) -> Request:
    """The request of one item, with exactly one number of ranks.

    Raises ``Collector.CollectError`` as ``request_of``.
    """
    if not isinstance(item, pytest.Function):
        _refuse(item, "only test functions and methods can run on ranks")
    request = request_of(item, settings)
    assert request is not None
    parameters: Mapping[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    if not request.many:
        return request
    if ranks_parameter not in parameters:
        _refuse(item, "a list of ranks belongs on the test, not on one set of its parameters")
    return dataclasses.replace(request, ranks=(parameters[ranks_parameter],))


def why_skipped(request: Request, settings: Settings) -> str | None:
    """The reason why this session cannot run what an item's request asks for, or None if it can."""
    (count,) = request.ranks
    if count > settings.ranks:
        return launch.shortage(count, settings.ranks)
    if request.fresh and settings.backend.partition(":")[0] in ("sim", "external"):
        return (
            f"fresh=True: {settings.backend} cannot start rank processes for a test; gloo, smddp and mpi "
            "can (--smp-backend)"
        )
    return None


def _check_count(definition: Any, count: Any, settings: Settings) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        _refuse(
            definition, f"ranks={count!r}: must be a whole number of at least 1, or a list of them"
        )
    if count > settings.ranks and settings.require_ranks:
        _refuse(
            definition,
            f"ranks={count}: {launch.shortage(count, settings.ranks)} (--smp-require-ranks)",
        )


def _check_function(definition: Any) -> None:
    function = definition.obj
    inner = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    for each in (function, inner):
        why = why_not_plain(each)
        if why is not None:
            _refuse(definition, f"the test {why}: a rank runs a plain function")
    cls = getattr(definition, "cls", None)
    if cls is not None and issubclass(cls, unittest.TestCase):
        _refuse(
            definition,
            "unittest.TestCase methods cannot run on ranks; use a plain class or function",
        )
    for name in definition._fixtureinfo.argnames:
        if name in _NOT_ON_RANKS:
            _refuse(
                definition, f"fixture {name!r} cannot be shared by ranks: {_NOT_ON_RANKS[name]}"
            )


def why_not_plain(function: object) -> str | None:
    """The reason why calling ``function`` would not run its body, in words, or None if it would."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "is async (have a plain one call asyncio.run(main()))"
    if inspect.isgeneratorfunction(function):
        return "is a generator"
    return None


def _check_config(definition: Any, keywords: dict[str, Any], counts: tuple[int, ...]) -> None:
    from smp_core import runtime
    from smp_core.errors import ConfigError

    for count in counts:
        try:
            runtime.validate(keywords, count)
        except ConfigError as error:
            _refuse(definition, f"with {count} ranks: {error}")


@dataclasses.dataclass(frozen=True, slots=True)
class Problems:
    """Items whose markers cannot work, and why: by file, a line for each test and reason."""

    items: set[pytest.Item]
    by_file: Mapping[str, list[str]]


def problems(items: Iterable[pytest.Item], settings: Settings, ranks_parameter: str) -> Problems:
    """The mistakes in the markers of these items."""
    wrong: set[pytest.Item] = set()
    found: dict[tuple[str, str], list[str]] = {}
    for item in items:
        try:
            request_of_item(item, settings, ranks_parameter)
        except pytest.Collector.CollectError as error:
            wrong.add(item)
            why = str(error).removeprefix(item.nodeid)
            found.setdefault((item.nodeid.partition("[")[0], why), []).append(item.nodeid)
    by_file: dict[str, list[str]] = {}
    for (test, why), ids in found.items():
        # A mistake that all parametrizations share is one of the test's.
        text = (ids[0] if len(ids) == 1 else test) + why
        by_file.setdefault(test.partition("::")[0], []).append(text)
    return Problems(wrong, by_file)


def _refuse(definition: Any, why: str) -> NoReturn:
    raise pytest.Collector.CollectError(f"{definition.nodeid}: marker smp: {why}")
