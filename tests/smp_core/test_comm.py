"""Object communication and the getters, as far as the conformance requirements do not cover them."""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass, field

import pytest
import torch

import smp_core.torch as smp
from pytest_smp.ranks.protocols import OutcomeKind, VerdictKind
from smp_core.errors import ConfigError, PayloadError, RankError

KINDS = ("mp", "dp", "pp", "tp", "rdp")


def test_the_namespace_has_every_name_of_the_bottom_layer():
    """API 1.5 and 1.6, name by name."""
    names = {"rank", "size", "local_rank", "local_size", "init", "is_initialized"}
    names |= {f"{kind}_{what}" for kind in KINDS for what in ("rank", "size")}
    names |= {f"get_{kind}_process_group" for kind in (*KINDS, "world")}
    names |= {"get_mp_group", "get_dp_group", "get_tp_group"}
    names |= {"broadcast", "send", "recv_from", "allgather", "barrier", "mp_barrier", "dp_barrier"}
    names |= {"CommGroup", "RankType", "WORLD"} | {f"{kind.upper()}_GROUP" for kind in KINDS}
    assert names <= set(smp.__all__)
    assert all(hasattr(smp, name) for name in smp.__all__)
    assert [member.name for member in smp.CommGroup] == [
        "WORLD", "MP_GROUP", "DP_GROUP", "PP_GROUP", "TP_GROUP", "RDP_GROUP",
    ]  # fmt: skip
    assert [member.name for member in smp.RankType] == [
        "WORLD_RANK", "MP_RANK", "DP_RANK", "PP_RANK", "TP_RANK", "RDP_RANK",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "parameters"),
    [
        ("broadcast", ["obj", "group"]),
        ("send", ["obj", "dest_rank", "rank_type"]),
        ("recv_from", ["src_rank", "rank_type"]),
        ("allgather", ["obj", "group"]),
        ("barrier", ["group"]),
        ("mp_barrier", []),
        ("dp_barrier", []),
    ],
)
def test_signatures_allow_positions_and_keywords(call, parameters):
    assert list(inspect.signature(getattr(smp, call)).parameters) == parameters


@pytest.mark.smp(ranks=4, pipeline_parallel_degree=2, ddp=True)
def test_process_groups_hold_the_ranks_of_their_kind(smp):
    for kind in KINDS:
        group = getattr(smp, f"get_{kind}_process_group")()
        ranks = getattr(smp, f"get_{kind}_group")()
        assert torch.distributed.get_process_group_ranks(group) == ranks
        assert group.rank() == getattr(smp, f"{kind}_rank")()
        assert group is getattr(smp, f"get_{kind}_process_group")()  # made once
        total = torch.tensor([smp.rank()])
        torch.distributed.all_reduce(total, group=group)
        assert int(total) == sum(ranks)
    assert smp.get_world_process_group() is torch.distributed.group.WORLD


@pytest.mark.smp(ranks=2)
def test_process_groups_need_ddp(smp):
    for kind in (*KINDS, "world"):
        with pytest.raises(ConfigError, match=rf"get_{kind}_process_group: ddp=False"):
            getattr(smp, f"get_{kind}_process_group")()


@pytest.mark.smp(ranks=4, pipeline_parallel_degree=2)
@pytest.mark.parametrize("call", ["send", "recv_from"])
def test_a_partner_must_be_another_rank_of_the_group(smp, call):
    name = "dest_rank" if call == "send" else "src_rank"

    def partner(rank, rank_type):
        function = getattr(smp, call)
        return function("x", rank, rank_type) if call == "send" else function(rank, rank_type)

    message = rf"smp\.{call}: {name}=2 is out of range on world rank \d: PP_RANK runs from 0 to 1"
    with pytest.raises(RankError, match=message):
        partner(2, smp.RankType.PP_RANK)
    with pytest.raises(RankError, match=rf"{name}=-1 is out of range .* from 0 to 3"):
        partner(-1, smp.RankType.WORLD_RANK)
    with pytest.raises(RankError, match=r"is the caller itself on world rank \d"):
        partner(smp.pp_rank(), smp.RankType.PP_RANK)
    with pytest.raises(TypeError, match=r"rank_type must be one of smp\.RankType\.WORLD_RANK"):
        partner(0, smp.PP_GROUP)
    for bad in (True, 1.0, "1", None):
        with pytest.raises(TypeError, match=f"{name} must be an int"):
            partner(bad, smp.RankType.WORLD_RANK)


@pytest.mark.smp(ranks=2)
def test_a_group_must_be_a_comm_group(smp):
    for call in (lambda: smp.broadcast(1, [0, 1]), lambda: smp.allgather(1, 0)):
        with pytest.raises(TypeError, match=r"group must be one of smp\.CommGroup\.WORLD"):
            call()
    with pytest.raises(TypeError, match="group must be one of"):
        smp.barrier(smp.RankType.WORLD_RANK)


@pytest.mark.smp(ranks=2)
def test_integers_of_other_types_are_ranks_too(smp):
    import numpy

    if smp.rank() == 0:
        smp.send("a", numpy.int64(1), smp.RankType.WORLD_RANK)
        smp.send("b", torch.tensor(1), smp.RankType.WORLD_RANK)
    else:
        assert [smp.recv_from(0, smp.RankType.WORLD_RANK) for _ in range(2)] == ["a", "b"]


@dataclass
class Holder:
    """Something picklable that may hold something that is not."""

    inside: dict = field(default_factory=dict)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (threading.Lock, r"the object \(<unlocked _thread\.lock.*a lock\)"),
        (lambda: {"a": [1, lambda: 0]}, r"\['a'\]\[1\] \(<function .*a function\)"),
        (lambda: (Holder({3: threading.Lock()}),), r"\[0\]\.inside\[3\] \(<unlocked"),
        (lambda: {frozenset({1}): {lambda: 0}}, r"\[frozenset\(\{1\}\)\]\{<function"),
    ],
)
def test_what_cannot_be_pickled_is_named_on_the_sender_and_nobody_hangs(smp_world, make, part):
    def body():
        if smp.rank() == 1:
            smp.send(make(), 0, smp.RankType.WORLD_RANK)
        else:
            smp.recv_from(1, smp.RankType.WORLD_RANK)

    report = smp_world.report(body, ranks=2)
    assert (report.verdict, report.root) == (VerdictKind.FAILED, 1)
    assert report.outcomes[0].kind is OutcomeKind.CANCELLED
    with pytest.raises(PayloadError, match=r"smp\.send\(world rank 0\): cannot pickle " + part):
        raise report.error


def test_a_recursive_object_that_cannot_be_pickled_ends_the_search(smp_world):
    def body():
        loop = [threading.Lock()]
        loop.append(loop)
        smp.allgather(loop, smp.WORLD)

    with pytest.raises(PayloadError, match=r"\[0\] \(<unlocked"):
        smp_world.run(body, ranks=2)


@pytest.mark.smp(ranks=3)
def test_objects_arrive_by_value(smp):
    mine = {"rank": smp.rank(), "tensor": torch.tensor([smp.rank()])}
    gathered = smp.allgather(mine, smp.WORLD)
    assert gathered[smp.rank()] is not mine
    mine["tensor"].add_(100)
    gathered[0]["rank"] = "changed"
    gathered[1]["tensor"].zero_()
    smp.barrier()
    again = smp.allgather(gathered[2], smp.WORLD)
    assert [each["rank"] for each in again] == [2, 2, 2]
    assert [int(each["tensor"]) for each in again] == [2, 2, 2]


@pytest.mark.smp(ranks=2)
def test_an_object_of_64_mib(smp):
    block = torch.arange(16 * 2**20, dtype=torch.float32)
    if smp.rank() == 0:
        smp.send(block, 1, smp.RankType.WORLD_RANK)
    else:
        got = smp.recv_from(0, smp.RankType.WORLD_RANK)
        assert torch.equal(got, block)
        assert got.data_ptr() != block.data_ptr()


MOVED = [
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int64, torch.bool, torch.float16,
    torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.smp(ranks=2)
def test_tensors_of_every_dtype_are_objects(smp, dtype):
    """torch 2.13 pickles some that it cannot unpickle."""
    width = torch.empty(0, dtype=dtype).element_size()
    if dtype is torch.bool:
        columns = torch.tensor([[True, False], [False, True]])
    else:
        columns = torch.arange(4 * width, dtype=torch.uint8).view(dtype).reshape(2, 2)
    mine = columns.t()  # a layout that is not the plain one
    for got in smp.allgather([mine, torch.empty(0, dtype=dtype)], smp.WORLD):
        assert got[0].dtype is dtype
        assert got[1].shape == (0,)
        raw = got[0].contiguous().view(torch.uint8)
        assert torch.equal(raw, mine.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.smp(ranks=2)
def test_tensors_that_want_a_gradient_still_do(smp, dtype):
    leaf = torch.ones(2).to(dtype).requires_grad_()
    parameter = torch.nn.Parameter(torch.ones(2).to(dtype))
    for got in smp.allgather([leaf, parameter, leaf.detach()], smp.WORLD):
        assert [each.requires_grad for each in got] == [True, True, False]
        assert [type(each) for each in got] == [torch.Tensor, torch.nn.Parameter, torch.Tensor]
        assert all(each.dtype is dtype for each in got)


class TwoArguments(Exception):
    """Pickles, and cannot be unpickled: exceptions remember what they gave to Exception."""

    def __init__(self, first, second):
        super().__init__(first)


def test_what_cannot_be_unpickled_names_the_call(smp_world):
    def body():
        smp.allgather(TwoArguments(1, 2), smp.WORLD)

    with pytest.raises(PayloadError, match=r"smp\.allgather: .* cannot be unpickled: TypeError"):
        smp_world.run(body, ranks=2)
