"""The store of `sim` under drawn schedules: concurrent operations are linearizable, each takes effect
at one moment between its call and its return.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch import distributed as dist

from pytest_smp import strategies
from pytest_smp.ranks.protocols import VerdictKind
from pytest_smp.ranks.schedule import Schedule

Step = tuple[str, tuple[Any, ...]]  # a method of the store, and its arguments
Values = Mapping[str, bytes]


@dataclasses.dataclass
class Operation:
    """One operation of one rank in a run; moments are positions in the order of all events."""

    step: Step
    called: int
    returned: int | None = None  # None: it waits for ever
    result: Any = None


class Blocked(Exception):
    """The sequential store has no value for a key that the operation waits for."""


def apply_step(values: Values, step: Step) -> tuple[Any, Values]:
    """The result of one operation on a store that nobody else uses, and the values afterwards."""
    name, arguments = step
    if name in ("wait", "multi_get", "get"):
        keys = [arguments[0]] if name == "get" else arguments[0]
        if not all(key in values for key in keys):
            raise Blocked
        found = [values[key] for key in keys]
        return {"wait": None, "multi_get": found, "get": found[0]}[name], values
    if name == "check":
        return all(key in values for key in arguments[0]), values
    if name == "num_keys":
        return len(values), values
    if name == "multi_set":
        return None, {**values, **dict(zip(*arguments, strict=True))}
    key = arguments[0]
    current = values.get(key)
    if name == "delete_key":
        return current is not None, {name: each for name, each in values.items() if name != key}
    if name == "set":
        return None, {**values, key: arguments[1]}
    if name == "append":
        return None, {**values, key: (current or b"") + arguments[1]}
    if name == "add":
        total = int(current or b"0") + arguments[1]
        return total, {**values, key: str(total).encode()}
    assert name == "compare_set"
    _, expected, desired = arguments
    if current == expected or (current is None and not expected):
        return desired, {**values, key: desired}
    return (expected if current is None else current), values


def is_linearizable(history: Sequence[Sequence[Operation]], values: Values) -> bool:
    """Return whether some order of the operations, in which none comes before one that returned
    before it was called, gives the sequential store's results, and leaves waiting what waits.
    """
    heads = [operations[0] for operations in history if operations]
    done = [each for each in heads if each.returned is not None]
    if not done:
        return all(_is_blocked(values, operation.step) for operation in heads)
    first_return = min(each.returned for each in done if each.returned is not None)
    for rank, operations in enumerate(history):
        if not operations or operations[0].returned is None or operations[0].called > first_return:
            continue
        try:
            result, following = apply_step(values, operations[0].step)
        except Blocked:
            continue
        remaining = [*history]
        remaining[rank] = operations[1:]
        if result == operations[0].result and is_linearizable(remaining, following):
            return True
    return False


def _is_blocked(values: Values, step: Step) -> bool:
    try:
        apply_step(values, step)
    except Blocked:
        return True
    return False


_key = st.sampled_from("ab")
_value = st.sampled_from([b"", b"1", b"2"])
_steps: st.SearchStrategy[Step] = st.one_of(
    st.tuples(st.just("add"), st.tuples(st.just("n"), st.sampled_from([1, 2, -3]))),
    st.tuples(st.just("append"), st.tuples(_key, _value)),
    st.tuples(st.just("compare_set"), st.tuples(_key, _value, _value)),
    st.tuples(st.just("set"), st.tuples(_key, _value)),
    st.tuples(st.just("get"), st.tuples(st.sampled_from("abn"))),
    st.tuples(st.just("wait"), st.tuples(st.just(["a", "b"]))),
    st.tuples(st.just("multi_get"), st.tuples(st.just(["n", "a"]))),
    st.tuples(
        st.just("multi_set"),
        st.tuples(st.just(["a", "b"]), st.lists(_value, min_size=2, max_size=2)),
    ),
    st.tuples(st.just("check"), st.tuples(st.just(["a", "b"]))),
    st.tuples(st.just("delete_key"), st.tuples(_key)),
    st.tuples(st.just("num_keys"), st.just(())),
)
_programs = st.lists(st.lists(_steps, max_size=4), min_size=2, max_size=3)


@example(programs=[[("add", ("n", 1))]] * 2, schedule=Schedule.parse("0.1"))
@given(programs=_programs, schedule=strategies.schedules(horizon=24))
def test_concurrent_operations_are_linearizable(
    smp_world: Any, programs: list[list[Step]], schedule: Schedule
) -> None:
    history: list[list[Operation]] = [[] for _ in programs]
    moments = iter(range(1000))

    def body() -> None:
        rank = dist.get_rank()
        store: Any = dist.distributed_c10d._get_default_store()
        for step in programs[rank]:
            operation = Operation(step, next(moments))
            history[rank].append(operation)
            operation.result = getattr(store, step[0])(*step[1])
            operation.returned = next(moments)

    report = smp_world.report(body, ranks=len(programs), schedule=schedule)
    assert report.verdict in (VerdictKind.PASSED, VerdictKind.DEADLOCK)
    waits = any(each.returned is None for operations in history for each in operations)
    assert waits is (report.verdict is VerdictKind.DEADLOCK)
    assert is_linearizable(history, {})


@pytest.mark.parametrize("first", [2, 1])
def test_lost_update_is_not_linearizable(first: int) -> None:
    """The oracle can fail: two counts of one counter that overlap, and both saw it unchanged."""
    step: Step = ("add", ("n", 1))
    history = [[Operation(step, 0, 2, first)], [Operation(step, 1, 3, 1)]]
    assert is_linearizable(history, {}) is (first == 2)
