"""The mutation tool: what each operator changes, and that a change is planted and undone."""

from __future__ import annotations

import ast
import importlib
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.mutants import exclusions, generated
from conformance.mutants.generated import MODULES, MutationSite, sites, watching
from conformance.mutants.operators import OPERATORS
from smp_core import comm, reduction, topology
from smp_core.topology import GroupKind, Topology


def changed(operator: str, source: str) -> list[str]:
    """The changes that the operator makes of a statement: each change of each of its nodes, in the order of
    ``ast.walk``.
    """
    (statement,) = ast.parse(source).body
    found = []
    for parent in ast.walk(statement):
        for child in ast.iter_child_nodes(parent):
            found += [ast.unparse(new) for new in OPERATORS[operator](child, parent)]
    return [ast.unparse(new) for new in OPERATORS[operator](statement, ast.Module([], []))] + found


@pytest.mark.parametrize(
    ("operator", "source", "changes"),
    [
        ("swapped arguments", "f(a, b, c)", ["f(b, a, c)", "f(a, c, b)"]),
        ("swapped arguments", "f(a, a, k=b)", []),
        ("swapped arguments", "x[src, dest]", ["(dest, src)"]),
        ("swapped arguments", "a, b = c", []),
        ("off by one", "x = 1", ["2", "0"]),
        ("off by one", "x = True", []),
        ("off by one", "x = ranks[at]", ["ranks[at + 1]"]),
        ("off by one", "x[at] = y", []),
        ("off by one", "x = range(len(y))", ["range(len(y) + 1)", "range(len(y) - 1)"]),
        ("dropped call", "f(x)", ["pass"]),
        ("dropped call", "raise E()", ["pass"]),
        ("dropped call", "y = f(x)", []),
        ("wrong group", "f(GroupKind.RDP)", ["GroupKind.WORLD"]),
        ("wrong group", "f(CommGroup.MP_GROUP)", ["CommGroup.DP_GROUP"]),
        ("wrong group", "f(CommGroup.__name__)", []),
        ("wrong group", "f(group.ranks)", ["group.ranks[::-1]"]),
        ("wrong group", "len(group.ranks)", []),
        ("wrong rank", "f(self.rank, dest)", ["0", "0"]),
        ("wrong rank", "rank = self.size", []),
        ("comparison", "x < y", ["x >= y", "x <= y"]),
        ("comparison", "0 <= x < y", ["0 > x < y", "0 < x < y", "0 <= x >= y", "0 <= x <= y"]),
        ("comparison", "x in y", ["x not in y"]),
        ("comparison", "x is not None", ["x is None"]),
        ("condition", "x and y", ["x or y"]),
        ("condition", "not x", ["x"]),
        ("condition", "y if x else z", ["not x"]),
        ("arithmetic", "x + y * z", ["x - y * z", "y + z"]),
        ("arithmetic", "x // y % z", ["x // y // z", "x % y"]),
    ],
)
def test_what_an_operator_changes(operator: str, source: str, changes: list[str]) -> None:
    assert changed(operator, source) == changes


def test_no_result() -> None:
    (function,) = ast.parse("def f():\n    return x\n    return None\n    return").body
    assert isinstance(function, ast.FunctionDef)
    made = [[ast.unparse(n) for n in OPERATORS["no result"](s, function)] for s in function.body]
    assert made == [["return None"], [], []]


def test_every_operator_finds_work() -> None:
    found = {site.operator for module in MODULES for site in sites(module)}
    assert found == set(OPERATORS)


SOURCE = '''
"""Words."""
SIZE = 1
other: int = 2
def text(x: dict[int, 3] = 4) -> 5:
    """More words."""
    f"{x} of {6}"
    if x == 7:
        raise ValueError(f"{x}", 8) from None
class Body:
    field = 9
    def method(self):
        return [10 for _ in x if 11]
'''


def test_what_is_mutated_and_what_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "planted_source.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    found = [site for site in sites("planted_source") if site.operator == "off by one"]
    assert {(site.function, site.before) for site in found} == {
        ("SIZE", "1"),
        ("text", "4"),
        ("text", "7"),
        ("Body.method", "10"),
        ("Body.method", "11"),
    }
    assert {(site.before, site.line, site.statement) for site in found} == {
        ("1", 3, 0),
        ("4", 5, 6),
        ("7", 8, 8),
        ("10", 13, 13),
        ("11", 13, 13),
    }


def one(module: str, function: str, before: str, after: str) -> MutationSite:
    """The first site of this change."""
    found = [site for site in sites(module) if (site.function, site.before) == (function, before)]
    return next(site for site in found if site.after == after)


def planted(module: str, function: str, before: str, after: str) -> Any:
    return one(module, function, before, after).mutant("COMM-SEND-VALUE").plant()


def test_a_function_is_mutated_and_restored() -> None:
    code = reduction.fold.__code__
    with planted(
        "smp_core.reduction",
        "fold",
        "combine(level[i], level[i + 1])",
        "combine(level[i + 1], level[i])",
    ):
        assert reduction.fold(["a", "b"], lambda x, y: x + y) == "ba"
    assert reduction.fold(["a", "b"], lambda x, y: x + y) == "ab"
    assert reduction.fold.__code__ is code


def test_a_property_is_mutated() -> None:
    with planted(
        "smp_core.topology",
        "Topology.reduced_data",
        "self.pipeline * self.tensor",
        "self.pipeline + self.tensor",
    ):
        assert Topology.reduced_data.fget(Topology(12, 3, 2)) == 12 // 5  # type: ignore[attr-defined]
    assert Topology(12, 3, 2).reduced_data == 2


def test_a_cached_function_is_mutated() -> None:
    topology._lay_out.cache_clear()
    with planted(
        "smp_core.topology",
        "_lay_out",
        "Coordinates(step[d], step[p], step[t])",
        "Coordinates(step[p], step[d], step[t])",
    ):
        assert Topology(6, 3).coordinates(1) == (1, 0, 0)
    topology._lay_out.cache_clear()
    assert Topology(6, 3).coordinates(1) == (0, 1, 0)


def test_a_default_is_mutated() -> None:
    before = comm.barrier.__defaults__
    with planted("smp_core.comm", "barrier", "CommGroup.WORLD", "CommGroup.MP_GROUP"):
        assert comm.barrier.__defaults__ == (comm.CommGroup.MP_GROUP,)
    assert comm.barrier.__defaults__ is before


def test_a_table_is_mutated() -> None:
    before = topology._SHARED
    topology._lay_out.cache_clear()
    with planted("smp_core.topology", "_SHARED", "GroupKind.DP", "GroupKind.PP"):
        assert GroupKind.DP not in topology._SHARED
    assert topology._SHARED is before


@pytest.mark.parametrize("module", MODULES)
def test_every_site_can_be_planted_and_has_a_name_of_its_own(module: str) -> None:
    found = sites(module)
    assert len({site.name for site in found}) == len(found) > 50
    for site in found:
        with site.mutant("COMM-SEND-VALUE").plant():
            pass


def test_statements_are_watched_on_any_thread() -> None:
    def work() -> None:
        reduction.why_not("SUM", torch.float32)

    with watching() as reached:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    work()
    (site,) = (
        each
        for each in sites("smp_core.reduction")
        if each.function == "why_not" and each.before == "op not in REDUCE_OPS"
    )
    assert site.is_reached_by(frozenset(reached))
    (beyond,) = (
        each
        for each in sites("smp_core.reduction")
        if each.function == "why_not"
        and each.after == "return None"
        and "is not supp" in each.before
    )
    assert not beyond.is_reached_by(frozenset(reached))
    assert not hasattr(reduction, generated._TELL)


def test_a_table_is_reached_by_what_reads_it() -> None:
    module = "smp_core.transport.payload"
    site = next(each for each in sites(module) if each.function == "_CARRIERS")
    source = Path(importlib.import_module(module).__file__ or "").read_text(encoding="utf-8")
    (reader,) = (
        number for number, line in enumerate(source.splitlines(), start=1) if "_CARRIERS[" in line
    )
    assert site.is_reached_by(frozenset({(module, reader)}))
    assert not site.is_reached_by(frozenset({(module, reader - 1), ("smp_core.comm", reader)}))


def test_every_exclusion_fits_a_site() -> None:
    found = [site for module in MODULES for site in sites(module)]
    counted = Counter(site.function for site in found)
    counts = {function: count for function, (_, count) in exclusions.FUNCTIONS.items()}
    # A count that changed: look at the new code, then mend the count.
    assert {function: counted[function] for function in counts} == counts
    parts = {part: count for part, (_, count) in exclusions.LINES.items()}
    others = [site.source_line for site in found if site.function not in counts]
    assert {part: sum(part in line for line in others) for part in parts} == parts
    texts = {site.text for site in found}
    assert not set(exclusions.EQUIVALENT) - texts
    assert len(texts) == len(found)  # a text means one site
