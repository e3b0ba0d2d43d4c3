"""Needs are whole: a backend that refuses what it does not claim fails nowhere, and one that claims
it all the same fails in each requirement that needs it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.requirements.catalogue import REQUIREMENTS
from pytest_smp.ranks.capabilities import Capability

#: Ways to use the operations. Without an operation there is nothing to draw.
WAYS = frozenset(
    {
        Capability.GROUP_ORDER,
        Capability.LOCAL_GROUPS,
        Capability.TAGS,
        Capability.MESSAGES_TO_ONESELF,
        Capability.MESSAGE_LAYOUTS,
        Capability.LAYOUTS,
        Capability.UNEVEN,
    }
)

BACKENDS = f"""
import torch
import torch.distributed as dist
from pytest_smp.ranks.backends import BACKENDS
from pytest_smp.ranks.protocols import Backend
from pytest_smp.ranks.capabilities import COMPLEX, DTYPES, EVERYTHING, Capabilities, Capability
from smp_core.errors import UnsupportedError

def refuse(what):
    raise UnsupportedError(f"{{what}}: not here")

def tensors_of(arguments):
    for each in arguments:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list):
            yield from tensors_of(each)

def lists_of(arguments):
    lists = [each for each in arguments if isinstance(each, list)]
    return [inner for each in lists for inner in ([each] if not lists_of(each) else lists_of(each))]

def collective(name, function):
    def called(self, *arguments, **options):
        if name == "gather" and any(each.is_complex() for each in tensors_of(arguments)):
            refuse("complex numbers")
        if not all(each.is_contiguous() for each in tensors_of(arguments)):
            refuse("layouts")
        for each in lists_of(arguments):
            if len({{tensor.shape for tensor in tensors_of(each)}}) > 1:
                refuse("uneven")
        return function(self, *arguments, **options)
    return called

def message(function):
    def called(self, tensors, *peer_and_tag):
        *peer, tag = peer_and_tag
        if tag:
            refuse("tags")
        if peer == [self.rank()]:
            refuse("messages to oneself")
        if not all(each.is_contiguous() for each in tensors):
            refuse("message layouts")
        return function(self, tensors, *peer_and_tag)
    return called

def open_executor():
    from pytest_smp.ranks.sim.process_group import SimProcessGroup as group
    for name in ("broadcast", "allreduce", "reduce", "allgather", "all_gather_single", "gather",
                 "scatter", "reduce_scatter", "reduce_scatter_single", "alltoall",
                 "all_to_all_single"):
        setattr(group, name, collective(name, getattr(group, name)))
    for name in ("send", "recv", "recv_anysource"):
        setattr(group, name, message(getattr(group, name)))
    new_group = dist.new_group
    def make(ranks=None, *arguments, **options):
        if options.get("use_local_synchronization"):
            refuse("local groups")
        if not options.get("sort_ranks", True) and list(ranks) != sorted(ranks):
            refuse("group order")
        return new_group(ranks, *arguments, **options)
    dist.new_group = make
    return BACKENDS["sim"].open_executor()

ways = {sorted(map(str, WAYS))!r}
less = Capabilities(
    claims=frozenset(Capability) - frozenset(map(Capability, ways)),
    narrower={{Capability.GATHER: DTYPES - COMPLEX}},
)
boasting = Backend("boasting", "claims what it refuses", open_executor, EVERYTHING)
honest = Backend("honest", "claims what it has", open_executor, less)
"""

FILES = (
    "test_point_to_point",
    "test_process_groups",
    "test_asynchronous",
    "test_tensor_groups",
    "test_tensor_layouts",
    "test_tensor_movement",
    "test_tensor_buffers",
    "test_programs",
)

#: Few examples, the same in every session: what a requirement needs, nearly each of them asks for.
PROFILE = """
from hypothesis import Phase, settings
settings.register_profile(
    "few", max_examples=10, derandomize=True, database=None, phases=[Phase.generate]
)
settings.load_profile("few")
"""


@pytest.mark.parametrize("name", ["honest", "boasting"])
def test_what_refuses_what_it_does_not_claim_fails_nowhere(
    sessions: Any, tmp_path: Path, name: str
) -> None:
    (tmp_path / "mine.py").write_text(BACKENDS)
    files = [f"conformance.suite.{each}" for each in FILES]
    sessions(
        [
            "--pyargs",
            *files,
            f"--smp-backend=mine:{name}",
            "--smp-ranks=3",
            "--tb=no",
            "--smp-report=r.json",
        ],
        plugin=PROFILE,
    )
    found = {
        each["id"]: each for each in json.loads((tmp_path / "r.json").read_text())["requirements"]
    }
    ran = {id for id, each in found.items() if each["properties"]}
    need = {id for id in ran if REQUIREMENTS[id].needs & WAYS}
    assert frozenset().union(*(REQUIREMENTS[id].needs for id in need)) >= WAYS
    failed = {id for id, each in found.items() if each["verdict"] == "FAIL"}
    if name == "boasting":
        assert need | {"COLL-GATHER-VALUE"} <= failed
    else:
        assert failed == set()
        assert {id for id in ran if found[id]["verdict"] == "NOT SUPPORTED"} == need
        for id in need:
            assert set(found[id]["lacks"]) == REQUIREMENTS[id].needs & WAYS
