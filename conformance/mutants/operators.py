"""The operators of generated mutants: functions from a node of a syntax tree to its replacements.

Each operator is one kind of mistake. The yielded nodes are new; they may share parts with the old one.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping

Changes = Iterator[ast.AST]


def _swapped_arguments(node: ast.AST, parent: ast.AST) -> Changes:
    """Swap two neighbours: arguments of a call, or the parts of a pair."""
    match node:
        case ast.Call(func=func, args=args, keywords=keywords):
            for i in range(len(args) - 1):
                if ast.dump(args[i]) != ast.dump(args[i + 1]):
                    swapped = [*args[:i], args[i + 1], args[i], *args[i + 2 :]]
                    yield ast.Call(func, swapped, keywords)
        case ast.Tuple(elts=[one, other], ctx=ast.Load()) if ast.dump(one) != ast.dump(other):
            yield ast.Tuple([other, one], ast.Load())


def _off_by_one(node: ast.AST, parent: ast.AST) -> Changes:
    """Add or subtract one: in a whole number, an index, or the end of a range."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
        case ast.Subscript(
            value=value, slice=ast.Name() | ast.Attribute() as index, ctx=ast.Load()
        ):
            yield ast.Subscript(value, ast.BinOp(index, ast.Add(), ast.Constant(1)), ast.Load())
        case ast.Call(func=ast.Name(id="range"), args=[end]) if not isinstance(end, ast.Constant):
            for operator in (ast.Add(), ast.Sub()):
                yield ast.Call(node.func, [ast.BinOp(end, operator, ast.Constant(1))], [])


def _dropped_call(node: ast.AST, parent: ast.AST) -> Changes:
    """Drop a call whose result is unused, or a raise."""
    match node:
        case ast.Expr(value=ast.Call()) | ast.Raise():
            yield ast.Pass()


_KINDS = {
    "GroupKind": ["WORLD", "MP", "DP", "PP", "TP", "RDP"],
    "CommGroup": ["WORLD", "MP_GROUP", "DP_GROUP", "PP_GROUP", "TP_GROUP", "RDP_GROUP"],
}


def _wrong_group(node: ast.AST, parent: ast.AST) -> Changes:
    """Take another kind of group, or the ranks of a group in reverse order."""
    match node:
        case ast.Attribute(value=ast.Name(id=enum) as name, attr=kind) if kind in _KINDS.get(
            enum, ()
        ):
            kinds = _KINDS[enum]
            yield ast.Attribute(name, kinds[(kinds.index(kind) + 1) % len(kinds)], ast.Load())
        case ast.Attribute(attr="ranks", ctx=ast.Load()) if not _unordered(parent):
            yield ast.Subscript(
                node, ast.Slice(step=ast.UnaryOp(ast.USub(), ast.Constant(1))), ast.Load()
            )


def _unordered(parent: ast.AST) -> bool:
    """Return whether the parent is a call whose result does not depend on the order of its argument."""
    return isinstance(parent, ast.Call) and ast.unparse(parent.func) in ("len", "set", "sorted")


def _wrong_rank(node: ast.AST, parent: ast.AST) -> Changes:
    """Take rank 0 in place of the right rank."""
    match node:
        case (
            ast.Name(id="rank" | "src" | "dest" | "position", ctx=ast.Load())
            | ast.Attribute(attr="rank" | "src", ctx=ast.Load())
        ):
            yield ast.Constant(0)


_TURNED: Mapping[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.GtE, ast.LtE),
    ast.LtE: (ast.Gt, ast.Lt),
    ast.Gt: (ast.LtE, ast.GtE),
    ast.GtE: (ast.Lt, ast.Gt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}


def _comparison(node: ast.AST, parent: ast.AST) -> Changes:
    """Negate a comparison, or include or exclude its bound."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            for other in _TURNED[type(op)]:
                ops = [*node.ops[:i], other(), *node.ops[i + 1 :]]
                yield ast.Compare(node.left, ops, node.comparators)


def _condition(node: ast.AST, parent: ast.AST) -> Changes:
    """Swap "and" and "or", drop a "not", or add one to a plain condition."""
    match node:
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
    plain = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.BinOp)
    if plain and getattr(parent, "test", None) is node:
        yield ast.UnaryOp(ast.Not(), node)


_OTHER: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
}


def _arithmetic(node: ast.AST, parent: ast.AST) -> Changes:
    """Take another operation of arithmetic."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OTHER:
        yield ast.BinOp(node.left, _OTHER[type(node.op)](), node.right)


def _no_result(node: ast.AST, parent: ast.AST) -> Changes:
    """Return None in place of a value."""
    match node:
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield ast.Return(ast.Constant(None))


#: The operators, by the name of the mutants' class in the score.
OPERATORS: Mapping[str, Callable[[ast.AST, ast.AST], Changes]] = {
    "swapped arguments": _swapped_arguments,
    "off by one": _off_by_one,
    "dropped call": _dropped_call,
    "wrong group": _wrong_group,
    "wrong rank": _wrong_rank,
    "comparison": _comparison,
    "condition": _condition,
    "arithmetic": _arithmetic,
    "no result": _no_result,
}
