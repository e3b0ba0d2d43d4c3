"""Objects that pass between ranks by value, and those of all ranks, of which most are alike."""

from __future__ import annotations

from typing import Any

import pytest

from smp_core import runtime
from smp_core.errors import PayloadError
from smp_core.topology import GroupKind
from smp_core.transport.payload import allgather_alike


@pytest.mark.smp(ranks=4)
def test_objects_that_are_alike_are_one_object(smp: Any) -> None:
    here = runtime.current("test")
    own = [smp.rank() % 2]
    found = allgather_alike(here.fabric.objects, own, here.group(GroupKind.WORLD))
    assert found == [[0], [1], [0], [1]]
    assert found[0] is found[2]
    assert found[1] is found[3]
    assert all(each is not own for each in found)


@pytest.mark.smp(ranks=2)
def test_an_object_that_cannot_be_pickled_is_named(smp: Any) -> None:
    here = runtime.current("test")
    with pytest.raises(PayloadError, match=r"smp.allgather: cannot pickle \['a'\]"):
        allgather_alike(here.fabric.objects, {"a": lambda: 0}, here.group(GroupKind.WORLD))


@pytest.mark.smp(ranks=3)
def test_gathered_objects_are_each_ranks_own(smp: Any) -> None:
    found = smp.allgather([smp.rank()], smp.WORLD)
    found[0].append(smp.rank())
    numbers = smp.allgather(smp.rank(), smp.WORLD)
    numbers.append(smp.rank())
    smp.barrier()
    assert found == [[0, smp.rank()], [1], [2]]
    assert numbers == [0, 1, 2, smp.rank()]
