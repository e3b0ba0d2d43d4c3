"""The store of `sim`: it behaves as torch's HashStore, also behind a C++ PrefixStore, and its waits
pass the turn.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed as dist

from smp_core.errors import ThreadError


def default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


Steps = list[Callable[[Any], Any]]

# Operations that do not wait: the results on a HashStore are the oracle.
STEPS: dict[str, Steps] = {
    "set and get": [
        lambda s: s.set("a", "text"),
        lambda s: s.get("a"),
        lambda s: s.set("a", b"\x00\xff bytes"),
        lambda s: s.get("a"),
        lambda s: s.set("empty", ""),
        lambda s: s.get("empty"),
    ],
    "add": [
        lambda s: s.add("n", 5),
        lambda s: s.add("n", -7),
        lambda s: s.get("n"),
        lambda s: s.set("m", "40"),
        lambda s: s.add("m", 2),
        lambda s: s.add("m", 0),
    ],
    "compare_set": [
        lambda s: s.compare_set("k", "", "first"),
        lambda s: s.compare_set("k", "wrong", "second"),
        lambda s: s.compare_set("k", "first", "second"),
        lambda s: s.get("k"),
        lambda s: s.compare_set("missing", "something", "value"),
        lambda s: s.check(["missing"]),
    ],
    "check, delete and count": [
        lambda s: s.check(["a"]),
        lambda s: s.set("a", "1"),
        lambda s: s.set("b", "2"),
        lambda s: s.check(["a", "b"]),
        lambda s: s.check(["a", "c"]),
        lambda s: s.num_keys(),
        lambda s: s.delete_key("a"),
        lambda s: s.delete_key("a"),
        lambda s: s.num_keys(),
        lambda s: s.check(["a"]),
    ],
    "append": [
        lambda s: s.append("log", "one "),
        lambda s: s.append("log", b"two"),
        lambda s: s.get("log"),
    ],
    "many": [
        lambda s: s.multi_set(["x", "y"], ["1", "2"]),
        lambda s: s.multi_get(["y", "x"]),
        lambda s: s.has_extended_api(),
    ],
    "wait for what is there": [
        lambda s: s.set("a", "1"),
        lambda s: s.wait(["a"]),
        lambda s: s.wait(["a"], timedelta(seconds=1)),
    ],
}


def results(store: Any, steps: Steps) -> list[Any]:
    return [step(store) for step in steps]


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "behind a prefix"])
@pytest.mark.parametrize("name", STEPS)
def test_it_does_what_a_hash_store_does(smp_world: Any, name: str, wrapped: bool) -> None:
    def wrap(store: Any) -> Any:
        return dist.PrefixStore("p", store) if wrapped else store

    def body() -> list[Any] | None:
        return results(wrap(default_store()), STEPS[name]) if dist.get_rank() == 0 else None

    expected = results(wrap(dist.HashStore()), STEPS[name])
    assert smp_world.run(body, ranks=2)[0] == expected


def test_a_clone_has_the_same_values(smp_world: Any) -> None:
    """(A PrefixStore's clone of a store in Python is beyond torch.)"""

    def body() -> bytes:
        store = default_store()
        if dist.get_rank() == 1:
            store.clone().set("k", "by a clone")
        value: bytes = store.clone().get("k")
        return value

    assert smp_world.run(body, ranks=2) == [b"by a clone"] * 2


def test_ranks_share_it_and_wait_for_each_other(smp_world: Any) -> None:
    def body() -> bytes:
        store, rank = default_store(), dist.get_rank()
        if rank == 0:
            value: bytes = store.get("last")  # nobody has set it yet: the others get their turn
            store.set("answer", value + b"!")
            return value
        store.wait([f"from {rank + 1}"] if rank < 3 else [])
        store.set(f"from {rank}", "here")
        if rank == 1:
            store.set("last", "round")
        answer: bytes = store.get("answer")
        return answer

    assert smp_world.run(body, ranks=4) == [b"round", b"round!", b"round!", b"round!"]


def test_waiting_for_several_keys(smp_world: Any) -> None:
    def body() -> list[bytes]:
        store, rank = default_store(), dist.get_rank()
        if rank:
            store.set(str(rank), f"value {rank}")
            return []
        found: list[bytes] = store.multi_get(["3", "1", "2"])
        return found

    assert smp_world.run(body, ranks=4)[0] == [b"value 3", b"value 1", b"value 2"]


@pytest.mark.parametrize("setter", ["set", "add", "append", "compare_set", "multi_set"])
def test_every_way_of_setting_wakes_who_waits(smp_world: Any, setter: str) -> None:
    arguments = {
        "set": ("k", "1"),
        "add": ("k", 1),
        "append": ("k", "1"),
        "compare_set": ("k", "", "1"),
        "multi_set": (["k"], ["1"]),
    }[setter]

    def body() -> bytes:
        store = default_store()
        if dist.get_rank() == 1:
            getattr(store, setter)(*arguments)
        value: bytes = store.get("k")
        return value

    assert smp_world.run(body, ranks=2) == [b"1", b"1"]


def test_a_counter_over_all_ranks(smp_world: Any) -> None:
    def body() -> int:
        count: int = default_store().add("arrived", dist.get_rank() + 1)
        return count

    assert max(smp_world.run(body, ranks=4)) == 1 + 2 + 3 + 4


def test_polling_lets_the_others_run(smp_world: Any) -> None:
    """TORCH 1.3: `check` in a loop must not spin for ever."""

    def body() -> None:
        store = default_store()
        if dist.get_rank() == 0:
            while not store.check(["ready"]):
                pass
        else:
            store.set("ready", "yes")

    smp_world.run(body, ranks=2)


def test_the_store_of_a_group(smp_world: Any) -> None:
    """torch gives each group a prefix of its own around the default store."""

    def body() -> bytes:
        group: Any = dist.new_group([0, 1])
        store = dist.distributed_c10d._get_process_group_store(group)
        if dist.get_rank() == 1:
            store.set("k", "of the group")
            default_store().set("k", "of the world")
        value: bytes = store.get("k")
        dist.destroy_process_group(group)
        return value

    assert smp_world.run(body, ranks=2) == [b"of the group"] * 2


def test_a_barrier_by_the_store(smp_world: Any) -> None:
    """The barrier through the store that torch runs at start-up."""

    def body() -> None:
        dist.distributed_c10d._store_based_barrier(
            dist.get_rank(), default_store(), "test", 3, timedelta(seconds=60)
        )

    smp_world.run(body, ranks=3)


def test_a_store_belongs_to_its_rank(smp_world: Any) -> None:
    """Used by another rank, it would put the wrong rank to sleep."""
    stores: dict[int, Any] = {}

    def body() -> None:
        rank = dist.get_rank()
        stores[rank] = default_store()
        dist.barrier()
        if rank == 1:
            stores[0].get("nothing")

    report = smp_world.report(body, ranks=2, timeout=60)
    assert isinstance(report.error, ThreadError)
    assert report.root == 1


@pytest.mark.parametrize(
    "call",
    [lambda s: s.queue_pop("q"), lambda s: s.queue_push("q", "v"), lambda s: s.list_keys()],
    ids=["queue_pop", "queue_push", "list_keys"],
)
def test_what_torch_cannot_pass_on_to_a_store_in_python_is_refused(
    smp_world: Any, call: Any
) -> None:
    def body() -> None:
        with pytest.raises(NotImplementedError, match="is not implemented"):
            call(default_store())

    smp_world.run(body, ranks=2)


def test_nothing_is_left_for_the_next_run(smp_world: Any) -> None:
    def body() -> int:
        store = default_store()
        store.set(f"by {dist.get_rank()}", "x")
        dist.barrier()
        count: int = store.num_keys()
        return count

    for _ in range(2):
        assert smp_world.run(body, ranks=3) == [3, 3, 3]
