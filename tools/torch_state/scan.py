"""The state of the process that functions of a package write, read from its source by ``ast``.

A name stands for a module global, a class attribute, or an attribute of an object that a module holds,
which a function assigns, deletes or changes in place. State that is reached through an argument, a local
variable, ``self`` or a cache decorator has no such name.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

#: Methods by which dictionaries, lists and sets change.
_CHANGING = frozenset(
    [
        "add",
        "append",
        "clear",
        "discard",
        "extend",
        "insert",
        "pop",
        "popitem",
        "remove",
        "setdefault",
        "update",
    ]
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def written_state(package: str, leave_out: tuple[str, ...] = ()) -> frozenset[str]:
    """Return the dotted names of the state that functions of the package's modules write.

    ``leave_out`` names modules that are not read, with all below them. Raises ValueError if there is no
    such package.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{package} is no installed package")
    root = Path(spec.submodule_search_locations[0])
    names: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join((package, *(part for part in parts if part != "__init__")))
        if not any(f"{module}.".startswith(f"{left}.") for left in leave_out):
            parent = module if path.name == "__init__.py" else module.rpartition(".")[0]
            names |= _Module(module, parent, ast.parse(path.read_bytes())).written
    return frozenset(names)


class _Module:
    """One module's names, and the state that its functions write."""

    def __init__(self, module: str, package: str, tree: ast.Module) -> None:
        self._package = package
        self._modules: set[str] = set()  # names that `import` binds
        self.written: set[str] = set()
        self._walk(tree, _Scope(module, self._bindings(tree, module), None, None))

    def _bindings(self, scope: ast.AST, prefix: str) -> dict[str, str | None]:
        """Each name that a scope binds, with the dotted name behind it, or None for a variable of a function."""
        names: dict[str, str | None] = {}
        outer: set[str] = set()
        function = isinstance(scope, _FUNCTIONS)
        for node in _inside(scope):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    names[alias.asname or first] = alias.name if alias.asname else first
                    self._modules.add(alias.name if alias.asname else first)
            elif isinstance(node, ast.ImportFrom):
                base = self._package.split(".")[: len(self._package.split(".")) + 1 - node.level]
                source = ".".join([*(base if node.level else []), *filter(None, [node.module])])
                names.update({a.asname or a.name: f"{source}.{a.name}" for a in node.names})
            elif isinstance(node, ast.ClassDef):
                names[node.name] = f"{prefix}.{node.name}"
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names[node.name] = None if function else f"{prefix}.{node.name}"
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.setdefault(node.id, None if function else f"{prefix}.{node.id}")
            elif isinstance(node, ast.arg | ast.ExceptHandler):
                names[(node.arg if isinstance(node, ast.arg) else node.name) or ""] = None
            elif isinstance(node, ast.Global | ast.Nonlocal):
                outer.update(node.names)
        return {name: to for name, to in names.items() if name not in outer}

    def _walk(self, scope_node: ast.AST, scope: _Scope) -> None:
        for node in _inside(scope_node):
            if scope.function is not None:
                self.written.update(filter(None, self._writes(node, scope)))
            if isinstance(node, ast.ClassDef):
                name = f"{scope.name}.{node.name}"
                self._walk(node, _Scope(name, {}, scope, scope.function, name))
            elif isinstance(node, _FUNCTIONS):
                name = f"{scope.name}.{getattr(node, 'name', 'lambda')}"
                self._walk(node, _Scope(name, self._bindings(node, name), scope, node, scope.owner))

    def _writes(self, node: ast.AST, scope: _Scope) -> Iterator[str | None]:
        """The state that this statement or call writes."""
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield scope.module_global(node.id)
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield scope.dotted(node)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield scope.dotted(node.value)
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute) and function.attr in _CHANGING:
                name = scope.dotted(function.value)
                yield None if name in self._modules else name  # torch.add
            elif isinstance(function, ast.Name) and function.id in ("setattr", "delattr"):
                owner = scope.dotted(node.args[0])
                if owner is not None:
                    attribute = node.args[1]
                    fixed = isinstance(attribute, ast.Constant)
                    yield f"{owner}.{ast.literal_eval(attribute) if fixed else '*'}"


class _Scope:
    """The names that a function, class or module sees."""

    def __init__(
        self,
        name: str,
        bindings: dict[str, str | None],
        outer: _Scope | None,
        function: ast.AST | None,
        owner: str | None = None,
    ) -> None:
        self.name, self.function, self.owner = name, function, owner
        self._bindings, self._outer = bindings, outer

    def module_global(self, name: str) -> str | None:
        """The global that an assignment to this name writes; None where it binds a local variable."""
        scope = self
        while scope._outer is not None:
            if name in scope._bindings:
                return None
            scope = scope._outer
        return scope._bindings.get(name) or f"{scope.name}.{name}"

    def dotted(self, node: ast.expr) -> str | None:
        """The dotted name of what the expression reaches from a name of the module; None for any other."""
        if isinstance(node, ast.Attribute):
            if node.attr == "__class__":
                return self._own_class(node.value)
            owner = self.dotted(node.value)
            return f"{owner}.{node.attr}" if owner is not None else None
        if isinstance(node, ast.Subscript):
            return self.dotted(node.value)
        if isinstance(node, ast.Call):
            kind = isinstance(node.func, ast.Name) and node.func.id == "type"
            return self._own_class(node.args[0]) if kind and len(node.args) == 1 else None
        if not isinstance(node, ast.Name):
            return None
        if node.id == "cls" and self.owner is not None:
            return self.owner
        scope: _Scope | None = self
        while scope is not None:
            if node.id in scope._bindings:
                return scope._bindings[node.id]
            scope = scope._outer
        return None

    def _own_class(self, instance: ast.expr) -> str | None:
        return self.owner if isinstance(instance, ast.Name) and instance.id == "self" else None


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, with the functions and classes in it, but without what those hold."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield from _inside(node)
