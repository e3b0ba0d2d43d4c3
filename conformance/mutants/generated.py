"""Generated mutants: small changes to the syntax trees of a few small modules of this project.

A site is one change at one place. Planting compiles the mutated function and gives its code to the live
function, so every holder of the function has the change. (mutmut and cosmic-ray rewrite the file and
start a test session for each mutant, which would take hours in place of minutes.)

Bodies and defaults of functions and methods are changed, and tables of modules (assignments to capital
names). Class bodies are left out, because they have been executed and their results are in use. Texts are
left out: f-strings, and the arguments of raised exceptions. :mod:`conformance.mutants.exclusions` lists
all other omissions with their reasons.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import importlib
import linecache
import sys
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from conformance.mutants.operators import OPERATORS
from conformance.mutants.protocol import Mutant
from smp_core.errors import CollectiveMismatchError, LeakError, RaceError, RunTimeout

#: The modules that are mutated.
MODULES = (
    "smp_core.comm",
    "smp_core.topology",
    "smp_core.reduction",
    "pytest_smp.ranks.sim.objects",
    "pytest_smp.ranks.sim.matching",
    "smp_core.transport.payload",
)

Lines = frozenset[tuple[str, int]]  #: module and line

# A mutated module may raise any exception. A mutant that is broken itself fails when it is planted.
_ANYTHING: tuple[type[BaseException], ...] = (Exception, pytest.fail.Exception, RunTimeout)

# Verdicts that no backend need give. A deadlock is not among them, because it hangs on every backend.
_OUR_VERDICTS: tuple[type[BaseException], ...] = (LeakError, CollectiveMismatchError, RaceError)


@dataclasses.dataclass(frozen=True, slots=True)
class MutationSite:
    """One change at one place.

    Attributes:
        module: the name of the module.
        function: the qualified name of the function, such as ``Topology.group``, or the name of a table.
        line: the line on which the changed expression or statement begins, from 1.
        column: the column at which the expression or statement begins, from 0.
        statement: the line of a statement that is executed whenever the change is: the changed statement,
            the first one of the function for a default, or 0 for a table, which means any that reads the table.
        operator: the kind of change, a key of OPERATORS.
        before: the source text before the change.
        after: the source text after the change.
        number: the number of the change among those at one place, from 1.
        nth: the number of the change among equal ones in one function, from 1.
        node: the index of the changed node in the order of ``ast.walk``.
        change: the index of the change among those that the operator makes of the node.
    """

    module: str
    function: str
    line: int
    column: int
    statement: int
    operator: str
    before: str
    after: str
    number: int
    nth: int
    node: int
    change: int

    @property
    def text(self) -> str:
        """The function and the change: ``_peer: 0 <= position -> 0 < position``.

        The second equal change in a function ends in ``(2)``.
        """
        more = f" ({self.nth})" if self.nth > 1 else ""
        return f"{self.function}: {self.before} -> {self.after}{more}"

    @property
    def source_line(self) -> str:
        """The line on which the changed expression or statement begins."""
        return linecache.getline(importlib.import_module(self.module).__file__ or "", self.line)

    @property
    def where(self) -> str:
        """The line and the change: ``smp_core/comm.py:140: 0 <= position -> 0 < position``."""
        path = self.module.replace(".", "/")
        return f"{path}.py:{self.line}: {self.before} -> {self.after}"

    @property
    def name(self) -> str:
        """The name of the mutant: module, line, column and number."""
        module = self.module.rpartition(".")[2]
        return f"generated-{module}-{self.line}-{self.column}-{self.number}"

    def is_reached_by(self, lines: Lines) -> bool:
        """Return whether a run that executes these statements also executes the change."""
        if self.statement:
            return (self.module, self.statement) in lines
        readers = _readers(self.module, self.function)
        return any(module == self.module and line in readers for module, line in lines)

    def mutant(self, requirement: str, *more: type[BaseException]) -> Mutant:
        """Make the mutant, which this requirement must kill.

        Any exception kills it but the verdicts that only this project's harness gives.
        """
        return Mutant(
            name=self.name,
            kind=f"generated: {self.operator}",
            sentence=self.where,
            requirement=requirement,
            plant=functools.partial(planted, self),
            by=(*_ANYTHING, *more),
            but=_OUR_VERDICTS,
        )


# Finding sites.


@functools.cache
def _tree(module: str) -> ast.Module:
    path = importlib.import_module(module).__file__
    assert path is not None
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def sites(module: str) -> list[MutationSite]:
    """All sites of a module, in the order of its lines."""
    tree, found = _tree(module), []
    numbers = {id(node): number for number, node in enumerate(ast.walk(tree))}
    at_place: Counter[tuple[int, int]] = Counter()
    alike: Counter[tuple[str, str, str]] = Counter()
    for function, node, parent, statement in _mutable(tree):
        for operator, changes in OPERATORS.items():
            for change, new in enumerate(changes(node, parent)):
                place = node.lineno, node.col_offset
                what = function, ast.unparse(node), ast.unparse(new)
                at_place[place] += 1
                alike[what] += 1
                found.append(
                    MutationSite(
                        module=module,
                        function=function,
                        line=node.lineno,
                        column=node.col_offset,
                        statement=statement,
                        operator=operator,
                        before=what[1],
                        after=what[2],
                        number=at_place[place],
                        nth=alike[what],
                        node=numbers[id(node)],
                        change=change,
                    )
                )
    found = [site for site in found if not site.function.isupper() or _can_be_made(site)]
    return sorted(found, key=lambda site: (site.line, site.column, site.number))


@functools.cache
def _readers(module: str, table: str) -> Container[int]:
    """The statements of a module's functions that read a table; any of the module if none does by its name."""
    lines = {
        line
        for _, node, _, line in _mutable(_tree(module))
        if line and isinstance(node, ast.Name) and node.id == table
    }
    return lines or range(sys.maxsize)


def _can_be_made(site: MutationSite) -> bool:
    """Return whether the changed table can be made.

    Otherwise the module could not be imported, and no property would be needed to notice.
    """
    try:
        with planted(site):
            return True
    except Exception:
        return False


#: The function or table, a statement or expression in it, its parent, and a line (MutationSite.statement).
Place = tuple[str, ast.expr | ast.stmt, ast.AST, int]


def _mutable(tree: ast.Module) -> Iterator[Place]:
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name=name):
                yield from _inside(name, statement)
            case ast.ClassDef(name=name):
                for each in statement.body:
                    if isinstance(each, ast.FunctionDef):
                        yield from _inside(f"{name}.{each.name}", each)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                if name.isupper() and statement.value is not None:
                    yield from _below(name, statement.value, statement, 0)


def _inside(name: str, function: ast.FunctionDef) -> Iterator[Place]:
    for default in (*function.args.defaults, *filter(None, function.args.kw_defaults)):
        yield from _below(name, default, function, function.body[0].lineno)
    for statement in function.body:
        yield from _below(name, statement, function, statement.lineno)


def _below(name: str, node: ast.AST, parent: ast.AST, statement: int) -> Iterator[Place]:
    if isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.stmt):
        statement = node.lineno
    if isinstance(node, ast.expr | ast.stmt):
        yield name, node, parent, statement
    for field, value in ast.iter_fields(node):
        text = isinstance(parent, ast.Raise) and field in ("args", "keywords")
        if text or field == "annotation":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _below(name, child, node, statement)


# Planting.


@contextlib.contextmanager
def planted(site: MutationSite) -> Iterator[None]:
    """Plant the change while entered."""
    tree = mutated(site)
    module = importlib.import_module(site.module)
    path = str(module.__file__)
    with contextlib.ExitStack() as undo:
        if site.function.isupper():
            (table,) = (each for each in tree.body if site.function in _names(each))
            code = compile(ast.Module([table], []), path, "exec", dont_inherit=True)
            undo.callback(setattr, module, site.function, getattr(module, site.function))
            exec(code, vars(module))
        else:
            live, new = _live(module, site.function), _definition(tree, site.function)
            code = _code_of(compile(tree, path, "exec", dont_inherit=True), site.function)
            for name, value in (
                ("__code__", code),
                ("__defaults__", _values(new.args.defaults, module, path)),
            ):
                undo.callback(setattr, live, name, getattr(live, name))
                setattr(live, name, value)
        yield


def mutated(site: MutationSite) -> ast.Module:
    """The syntax tree of the site's module, with the change."""
    tree = copy.deepcopy(_tree(site.module))
    nodes = list(ast.walk(tree))
    node = nodes[site.node]
    for parent in nodes:
        for field, value in ast.iter_fields(parent):
            for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if child is node:
                    new = list(OPERATORS[site.operator](node, parent))[site.change]
                    ast.copy_location(new, node)
                    if index is None:
                        setattr(parent, field, new)
                    else:
                        value[index] = new
                    return ast.fix_missing_locations(tree)
    raise AssertionError(f"{site.where}: the node is gone")


def _names(statement: ast.stmt) -> list[str]:
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    return [each.id for each in targets if isinstance(each, ast.Name)]


def _definition(tree: ast.Module, function: str) -> ast.FunctionDef:
    body: list[ast.stmt] = tree.body
    for part in function.split("."):
        (found,) = (each for each in body if getattr(each, "name", None) == part)
        assert isinstance(found, ast.ClassDef | ast.FunctionDef)
        body = found.body
    assert isinstance(found, ast.FunctionDef)
    return found


def _code_of(code: CodeType, function: str) -> CodeType:
    for part in function.split("."):
        (code,) = (
            each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == part
        )
    return code


def _live(module: Any, function: str) -> FunctionType:
    """The function of this name in the module, unwrapped from its property, cache or descriptor."""
    owner, _, name = function.rpartition(".")
    found = vars(vars(module)[owner] if owner else module)[name]
    for wrapper in ("fget", "func", "__func__", "__wrapped__"):
        found = getattr(found, wrapper, found)
    assert isinstance(found, FunctionType), f"{function} is no function"
    return found


def _values(defaults: list[ast.expr], module: Any, path: str) -> tuple[Any, ...] | None:
    codes = [compile(ast.Expression(each), path, "eval", dont_inherit=True) for each in defaults]
    return tuple(eval(code, vars(module)) for code in codes) or None


# Coverage.


@contextlib.contextmanager
def watching(modules: Sequence[str] = MODULES) -> Iterator[set[tuple[str, int]]]:
    """Collect the executed statements of ``modules``, by module and line, on any thread.

    Each function gets code that reports every statement, because sys.settrace would slow all code down.
    """
    reached: set[tuple[str, int]] = set()
    with contextlib.ExitStack() as undo:
        for name in modules:
            module = importlib.import_module(name)
            setattr(module, _TELL, functools.partial(_reached, reached, name))
            undo.callback(delattr, module, _TELL)
            for function, code in telling(name).items():
                live = _live(module, function)
                undo.callback(setattr, live, "__code__", live.__code__)
                live.__code__ = code
        yield reached


@functools.cache
def telling(name: str) -> Mapping[str, CodeType]:
    """The code that reports every statement, by the functions of a module."""
    module, tree = importlib.import_module(name), copy.deepcopy(_tree(name))
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody") if isinstance(node, _NESTING) else ():
            told = [(_tell(each), each) for each in getattr(node, field, [])]
            setattr(node, field, [each for pair in told for each in pair])
    code = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec")
    return {function: _code_of(code, function) for function in _functions(tree)}


_TELL = "_smp_reached"
_NESTING = (ast.FunctionDef, ast.If, ast.For, ast.While, ast.With, ast.Try, ast.ExceptHandler)


def _tell(statement: ast.stmt) -> ast.stmt:
    call = ast.Call(ast.Name(_TELL, ast.Load()), [ast.Constant(statement.lineno)], [])
    return ast.copy_location(ast.Expr(call), statement)


def _reached(lines: set[tuple[str, int]], module: str, line: int) -> None:
    lines.add((module, line))


def _functions(tree: ast.Module) -> Iterator[str]:
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            yield statement.name
        for each in statement.body if isinstance(statement, ast.ClassDef) else ():
            if isinstance(each, ast.FunctionDef):
                yield f"{statement.name}.{each.name}"  # type: ignore[attr-defined]
