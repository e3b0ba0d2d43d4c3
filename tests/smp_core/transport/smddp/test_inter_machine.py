"""Groups whose members are on several machines. In most tests these are one, and ranks pretend to be on several."""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from smp_core.errors import BackendError
from smp_core.transport.smddp import inter_machine, streams
from smp_core.transport.smddp.inter_machine import own_address
from smp_core.transport.smddp.segment import ROUND_SLOTS, row_bytes
from smp_core.transport.smddp.streams import Peer
from tests.namespaces import Machines, two_machines
from tests.smp_core.transport.smddp import (
    test_collectives,
    test_flat,
    test_point_to_point,
    test_process_group,
    test_rounds,
    test_segment,
    test_streams,
    test_work,
)
from tests.smp_core.transport.smddp.rank_processes import (
    KILLED,
    RANKS,
    ROW_BYTES,
    check_values,
    on_machines,
    on_ranks,
    text_of,
    value,
    wait_for_departure,
)

CHECKS = [
    *test_collectives.CHECKS,
    *test_flat.CHECKS,
    *test_point_to_point.CHECKS,
    *test_process_group.CHECKS,
    *test_rounds.CHECKS,
]


@pytest.mark.parametrize("machines", ["aba", "abc"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_values(tmp_path: Path, check: Callable[[int], None], machines: str) -> None:
    check_values(tmp_path, check, machines)


#: Tests of a group on one machine, which hold on several. A rank that has given an operation up and ends takes the rows
#: along that come by it: with the monitored barrier each rank is on a machine of its own.
SAME: list[Callable[[Path], None]] = [
    test_process_group.test_a_step_of_fsdp_is_that_of_the_whole_model,
    test_rounds.test_every_rank_learns_of_calls_that_differ,
    test_rounds.test_calls_of_different_lengths_differ_and_the_group_serves_on,
    test_process_group.test_lists_of_different_lengths_differ,
    test_rounds.test_different_sizes_without_room_are_an_error_of_every_rank,
    test_point_to_point.test_a_message_that_differs_is_an_error_on_both_sides,
    test_rounds.test_what_fails_inside_of_an_operation_on_one_rank_ends_it_on_all,
    test_process_group.test_a_rank_that_leaves_the_group_ends_the_waits_for_it,
    test_work.test_a_wait_has_a_limit_and_names_late_ranks,
    test_process_group.test_a_monitored_barrier_has_a_limit_of_its_own,
    test_process_group.test_a_tag_of_more_than_64_bits_is_refused,
    test_process_group.test_a_fork_of_a_rank_is_refused,
]


@pytest.mark.parametrize("test", SAME, ids=lambda test: test.__name__.removeprefix("test_"))
def test_between_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: Callable[[Path], None]
) -> None:
    apart = test is test_process_group.test_a_monitored_barrier_has_a_limit_of_its_own
    between = functools.partial(on_ranks, before=on_machines("abc" if apart else "abab"))
    monkeypatch.setattr(sys.modules[test.__module__], "on_ranks", between)
    test(tmp_path)


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def results(rank: int) -> list[str]:
    """A digest of the results of each collective, on each dtype, in one round and in several."""
    size, digests = dist.get_world_size(), []

    def tensor(count: int, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank * 1000 + count)
        return torch.randn(count, generator=generator).mul(3).to(dtype)

    def note(*tensors: torch.Tensor) -> None:
        memory = b"".join(bytes(each.view(torch.uint8).numpy()) for each in tensors)
        digests.append(hashlib.sha256(memory).hexdigest())

    for dtype, count in itertools.product(DTYPES, (size, size * 30_000)):
        part = count // size
        mine, whole = tensor(count, dtype), torch.empty(count * size, dtype=dtype)
        ops = [dist.ReduceOp.SUM]
        if not dtype.is_complex and dtype is not torch.bool:
            ops.append(dist.ReduceOp.MAX)
        for op in ops:
            total = mine.clone()
            dist.all_reduce(total, op)
            scattered = torch.empty(part, dtype=dtype)
            dist.reduce_scatter_single(scattered, mine, op)
            one = mine.clone()
            dist.reduce(one, 4, op)
            note(total, scattered, one)
        dist.all_gather_single(whole, mine)
        root = mine.clone()
        dist.broadcast(root, 2)
        parts = [torch.empty(count, dtype=dtype) for _ in range(size)]
        dist.gather(mine, parts if rank == 3 else None, 3)
        dealt = torch.empty(count, dtype=dtype)
        dist.all_to_all_single(dealt, mine)
        own = torch.empty(part, dtype=dtype)
        dist.scatter(own, list(mine.chunk(size)) if rank == 5 else None, 5)
        note(whole, root, dealt, own, *(parts if rank == 3 else ()))
        uneven = [torch.empty(part * (each + 1), dtype=dtype) for each in range(size)]
        dist.all_gather(uneven, tensor(part * (rank + 1), dtype))
        note(*uneven)
    return digests


def test_results_have_the_bits_of_one_machine(tmp_path: Path) -> None:
    """Machines of one, two and three ranks, which do not lie together."""
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir()
    several.mkdir()
    assert on_ranks(several, 6, results, on_machines("cabcbc")) == on_ranks(one, 6, results)


def held() -> tuple[int, list[str]]:
    """The descriptors of this process, and the threads of its streams."""
    named = [each.name for each in threading.enumerate() if each.name == "smddp streams"]
    return len(os.listdir("/proc/self/fd")), named


def test_twenty_groups_leave_nothing_behind(tmp_path: Path) -> None:
    """Of members in any order; all share the streams, which end with the last group."""
    before: list[Any] = []

    def pretend(rank: int) -> None:
        on_machines("abbccc")(rank)
        gc.collect()  # of the parent's: it may hold descriptors
        before.append(held())

    def body(rank: int) -> None:
        order, groups = random.Random(1), []
        for _ in range(20):
            ranks = order.sample(range(6), order.randrange(1, 7))
            groups.append((ranks, dist.new_group(ranks, sort_ranks=False)))
        for ranks, group in groups:
            if rank not in ranks:
                continue
            tensor = torch.full((5,), 2.0**rank)
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [float(sum(2**each for each in ranks))] * 5
            root = torch.tensor([float(rank)])
            dist.broadcast(root, ranks[-1], group=group)
            assert root.item() == ranks[-1]
            if rank == ranks[0]:
                work = dist.isend(tensor, ranks[-1], group=group) if len(ranks) > 1 else None
            if rank == ranks[-1] != ranks[0]:
                dist.recv(tensor, ranks[0], group=group)
            if rank == ranks[0] and work is not None:
                work.wait()
            dist.destroy_process_group(group)
        assert held()[1] == ["smddp streams"]
        dist.destroy_process_group()
        assert held() == before[0]

    on_ranks(tmp_path, 6, body, pretend)


def test_a_group_on_one_machine_has_no_stream(tmp_path: Path) -> None:
    def sockets() -> int:
        folder = Path("/proc/self/fd")
        links = [os.readlink(each) for each in folder.iterdir() if each.is_symlink()]
        return sum(link.startswith("socket:") for link in links)

    before: list[int] = []

    def body(rank: int) -> bool:
        group = dist.new_group([0, 2])
        for each in (None, group) if rank != 1 else (None,):
            dist.all_reduce(torch.ones(ROW_BYTES), group=each)
        return sockets() == before[0] and not held()[1]

    def alone(rank: int) -> None:
        gc.collect()
        before.append(sockets())

    assert on_ranks(tmp_path, RANKS, body, alone) == [True] * RANKS


def test_a_group_below_two_machines_uses_no_stream(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        group: Any = dist.new_group([0, 2])
        return None if rank == 1 else group._inter_machine

    assert on_ranks(tmp_path, RANKS, body, on_machines("aba")) == [None] * RANKS


N = 4 * row_bytes(4)  # bytes
_X = torch.uint8


#: Four ranks, two of each machine: an operation, and the bytes that each rank sends to the other machine.
SENT: dict[str, tuple[Callable[[int], Any], tuple[float, ...]]] = {
    "all_gather": (
        lambda rank: dist.all_gather_single(torch.empty(4 * N, dtype=_X), torch.ones(N, dtype=_X)),
        (1, 1, 1, 1),
    ),
    "broadcast": (lambda rank: dist.broadcast(torch.ones(N, dtype=_X), 1), (0, 1, 0, 0)),
    "reduce": (lambda rank: dist.reduce(torch.ones(N, dtype=_X), 1), (0, 0, 1, 1)),
    "gather": (
        lambda rank: dist.gather(
            torch.ones(N, dtype=_X),
            [torch.empty(N, dtype=_X) for _ in range(4)] if rank == 2 else None,
            2,
        ),
        (1, 1, 0, 0),
    ),
    "scatter": (
        lambda rank: dist.scatter(
            torch.empty(N, dtype=_X),
            [torch.ones(N, dtype=_X) for _ in range(4)] if rank == 3 else None,
            3,
        ),
        (0, 0, 0, 2),
    ),
    "all_to_all": (
        lambda rank: dist.all_to_all_single(torch.empty(N, dtype=_X), torch.ones(N, dtype=_X)),
        (0.5, 0.5, 0.5, 0.5),
    ),
    "reduce_scatter": (
        lambda rank: dist.reduce_scatter_single(
            torch.empty(N // 4, dtype=_X), torch.ones(N, dtype=_X)
        ),
        (0.5, 0.5, 0.5, 0.5),
    ),
    # Half of the values to the other machine's members, which reduce them, and a quarter of the sums.
    "all_reduce": (
        lambda rank: dist.all_reduce(torch.ones(N, dtype=_X)),
        (0.75, 0.75, 0.75, 0.75),
    ),
}


@pytest.mark.parametrize("name", SENT)
def test_bytes_go_once_to_each_machine_whose_members_read_them(tmp_path: Path, name: str) -> None:
    operation, expected = SENT[name]

    def body(rank: int) -> int:
        sent = []
        send = streams.Outbound.send

        def count(self: Any, pieces: Any) -> None:
            pieces = list(pieces)
            sent.append(sum(each.nbytes for each in pieces))
            send(self, pieces)

        streams.Outbound.send = count  # type: ignore[method-assign]
        operation(rank)
        return sum(sent)

    found = on_ranks(tmp_path, 4, body, on_machines("aabb"))
    for count, times in zip(found, expected, strict=True):
        assert times * N < count < times * N + 16 * 1024, found  # and the descriptions


def test_a_rank_sends_at_most_the_rounds_of_all_slots_before_they_are_received(
    tmp_path: Path,
) -> None:
    """Rank 1 receives nothing until rank 0 can do no more."""
    stuck, issued = (multiprocessing.get_context("fork").Event() for _ in range(2))
    calls, go = 4 * ROUND_SLOTS, threading.Event()

    def hold_back(rank: int) -> None:
        on_machines("ab")(rank)
        receive = inter_machine.InterMachineTransport.receive

        def held_back(self: Any, identity: str, frame: Any) -> Any:
            assert go.wait(60)
            yield from receive(self, identity, frame)

        if rank:
            inter_machine.InterMachineTransport.receive = held_back  # type: ignore[method-assign]

    def body(rank: int) -> int:
        send, sent = inter_machine.InterMachineTransport.send_round, []

        def count_sent(self: Any, number: int, *rest: Any) -> None:
            sent.append(number)
            send(self, number, *rest)

        inter_machine.InterMachineTransport.send_round = count_sent  # type: ignore[method-assign]
        count = row_bytes(2) // 4  # a row: one round
        wholes = [torch.empty(2 * count) for _ in range(calls)]
        works: list[Any] = [
            dist.all_gather_single(whole, value(rank, count, number), async_op=True)
            for number, whole in enumerate(wholes)
        ]
        if rank:
            issued.set()
            assert stuck.wait(60)
            most = len(sent)
            go.set()
        else:
            assert issued.wait(60)
            works[ROUND_SLOTS // 2 - 1].wait()
            works[-1].is_completed()
            most = len(sent)
            stuck.set()
        for number, (work, whole) in enumerate(zip(works, wholes, strict=True)):
            work.wait()
            parts = [value(each, count, number) for each in range(2)]
            assert torch.equal(whole, torch.cat(parts))
        return most

    assert on_ranks(tmp_path, 2, body, hold_back) == [ROUND_SLOTS, ROUND_SLOTS // 2]


def test_a_sender_that_leaves_is_known_though_its_relay_has_left(tmp_path: Path) -> None:
    """Rank 0, the relay of rank 2's rows on its machine, has left before."""

    def body(rank: int) -> None:
        group = dist.new_group([0, 1, 2])
        dist.barrier(group)
        if rank == 0:
            dist.destroy_process_group(group)
        dist.barrier()
        if rank == 2:
            dist.send(torch.ones(1), 1, group=group)
            dist.destroy_process_group(group)
        if rank == 1:
            dist.recv(torch.zeros(1), 2, group=group)
            reported = text_of(
                dist.DistBackendError, lambda: dist.recv(torch.zeros(1), 2, group=group)
            )
            assert "rank 2: it has destroyed the group" in reported
        dist.barrier()

    on_ranks(tmp_path, RANKS, body, on_machines("aab"))


@pytest.mark.parametrize("name", test_collectives.LONG_OPERATIONS)
def test_the_end_of_a_rank_inside_of_an_operation_is_an_error_on_all_machines(
    tmp_path: Path, name: str
) -> None:
    """The rank has come to the first round, and holds back the second. On its own machine the rank is the relay
    of the other machine's rows.
    """

    def body(rank: int) -> str:
        if rank != 1:
            wait_for_departure(1)
        work = test_collectives.LONG_OPERATIONS[name](rank)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        reported = text_of(dist.DistBackendError, work.wait)
        assert "rank 1" in text_of(dist.DistBackendError, dist.barrier)
        return reported

    far, killed, near = on_ranks(tmp_path, RANKS, body, on_machines("abb"))
    assert killed == KILLED
    assert f"rank 1: its connection from machine {os.uname().nodename} has ended" in far
    assert "rank 1: its process" in near
    assert "has ended" in near


@pytest.mark.parametrize("machines", ["aba", "abc"])
@pytest.mark.parametrize("name", test_segment.WAITS)
def test_the_end_of_a_rank_ends_the_waits_for_it(tmp_path: Path, name: str, machines: str) -> None:
    def body(rank: int) -> str:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return text_of(dist.DistBackendError, lambda: test_segment.WAITS[name](rank))

    one, killed, other = on_ranks(tmp_path, RANKS, body, on_machines(machines))
    assert killed == KILLED
    for text in (one, other):
        assert f"rank 1: its connection from machine {os.uname().nodename} has ended" in text


def test_the_end_of_a_rank_that_has_forked_is_noticed(tmp_path: Path) -> None:
    """The child has the parent's descriptors, and would hold the connections open."""
    over = multiprocessing.get_context("fork").Event()

    def body(rank: int) -> str:
        if rank:
            dist.send(torch.ones(1), 0)
            if not os.fork():
                over.wait(60)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.recv(torch.ones(1), 1)
        try:
            return text_of(dist.DistBackendError, dist.barrier)
        finally:
            over.set()

    one, killed = on_ranks(tmp_path, 2, body, on_machines("ab"))
    assert killed == KILLED
    assert "rank 1: its connection from machine" in one


def test_a_rank_that_ends_has_sent_all(tmp_path: Path) -> None:
    """Its last row, its last message, and its answer to one are on their way when its script ends."""
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()

        def body(rank: int) -> None:
            tensor = torch.full((3 * ROW_BYTES,), 1.0)
            if rank == 1:
                dist.recv(tensor, 0)
                work = dist.isend(tensor, 2)
                work.wait()
            else:
                if rank == 0:
                    dist.send(tensor, 1)
                else:
                    dist.recv(tensor, 1)
            dist.all_reduce(tensor)
            assert (tensor == RANKS).all()

        assert on_ranks(folder, RANKS, body, on_machines("aba")) == [None] * RANKS


def test_a_member_that_cannot_be_reached_is_named_on_all(tmp_path: Path) -> None:
    def elsewhere(rank: int) -> None:
        on_machines("ab")(rank)
        if rank:
            peer = streams.Streams.peer
            streams.Streams.peer = lambda self: peer(self)._replace(port=1)  # type: ignore[method-assign]

    with pytest.raises(AssertionError) as caught:
        on_ranks(tmp_path, 2, lambda rank: None, elsewhere)
    found = str(caught.value)
    assert found.count("member 0 cannot reach machine") >= 2
    assert "at 127.0.0.1, port 1: Connection refused" in found


def test_a_member_without_an_address_is_named_on_all(tmp_path: Path) -> None:
    def nowhere(rank: int) -> None:
        on_machines("ab")(rank)

        def own_address(store: Any) -> str:
            raise BackendError("there is no way to rank 0's machine")

        if rank:
            inter_machine.own_address = own_address

    with pytest.raises(AssertionError) as caught:
        on_ranks(tmp_path, 2, lambda rank: None, nowhere)
    assert "there is no shared memory: member 1: there is no way" in str(caught.value)


def test_a_process_of_multiprocessing_ends_when_all_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parent has had a group between machines. The other machine receives nothing until the process ends."""
    monkeypatch.setattr(inter_machine._SharedStreams, "_ends_with_process", True)
    ending, ends = os.pipe()

    def hold_back(rank: int) -> None:
        on_machines("ab")(rank)
        prepare, receive, close = (
            streams._prepare,
            inter_machine.InterMachineTransport.receive,
            streams.Streams.close,
        )

        def little(connection: Any) -> None:
            prepare(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)

        def held_back(self: Any, identity: str, frame: Any) -> Any:
            os.read(ending, 1)  # returns when rank 1 ends, whatever it does before
            yield from receive(self, identity, frame)

        def close_and_tell(self: Any) -> None:
            os.write(ends, bytes(100))
            close(self)

        streams._prepare = little
        if rank == 0:
            os.close(ends)
            inter_machine.InterMachineTransport.receive = held_back  # type: ignore[method-assign]
        else:
            streams.Streams.close = close_and_tell  # type: ignore[method-assign]

    def body(rank: int) -> None:
        tensor = torch.full((2 * row_bytes(2),), rank, dtype=torch.uint8)
        dist.broadcast(tensor, 1)
        assert (tensor == 1).all()

    try:
        on_ranks(tmp_path, 2, body, hold_back)
    finally:
        os.close(ending)
        os.close(ends)


def link_of_others(layout: Any) -> list[tuple[int, int]]:
    at = layout.link(2, 0).written
    return [(at, at + 64)]


#: Frames that rank 1 sends to rank 0: the kind, the member that it claims to be, and the places of the bytes.
FORGED: dict[str, tuple[int, int, Callable[[Any], list[tuple[int, int]]]]] = {
    "the end of another": (inter_machine._DEPARTURE, 2, lambda layout: []),
    "the table of members": (inter_machine._ROUND, 1, lambda layout: [(64, 128)]),
    "behind the slots": (
        inter_machine._ROUND,
        1,
        lambda layout: [(layout.links - 64, layout.links + 8)],
    ),
    "messages of others": (inter_machine._LINK, 1, link_of_others),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_member_that_writes_where_it_may_not_is_cut_off(tmp_path: Path, name: str) -> None:
    kind, member, ranges = FORGED[name]
    over = multiprocessing.get_context("fork").Event()

    def body(rank: int) -> str:
        group: Any = dist.group.WORLD
        if rank == 1:
            places = ranges(group._inter_machine.segment.layout)
            head = inter_machine._FRAME.pack(
                group._inter_machine.key, kind, member, len(places), 1, 0, 0, 0
            )
            text = (
                head + b"".join(inter_machine._RANGE.pack(*each) for each in places) + bytes(4096)
            )
            group._inter_machine._routes[0][0].send([memoryview(text)])
        if rank:  # no other rank's end is the reason
            assert over.wait(60)
            return ""
        try:
            return text_of(dist.DistBackendError, dist.barrier)
        finally:
            over.set()

    reported = on_ranks(tmp_path, RANKS, body, on_machines("abb"))[0]
    assert "rank 1: its connection from machine" in reported
    assert "destroyed" not in reported


#: The ranks of a machine, forked after the imports. Each writes the address at which it listens, and its error at
#: the end of another rank or of the network link.
SCRIPT = """
import json, os, pathlib, signal, sys
import torch
from torch import distributed as dist
from tests.smp_core.transport.smddp import test_streams
from smp_core.transport.smddp import inter_machine, streams

ranks = sys.argv[4:]
for rank in ranks:
    if not os.fork():
        os.environ["RANK"] = rank
        sys.stdout = open(f"{sys.argv[3]}/reported{rank}", "w")
        break
else:
    for _ in ranks:
        os.wait()
    sys.exit()

streams._KEEPALIVE = dict.fromkeys(streams._KEEPALIVE, 1)
streams._ACKNOWLEDGE_TIMEOUT = 3.0
dist.init_process_group("smddp")
rank, size = dist.get_rank(), dist.get_world_size()
listens = inter_machine._SharedStreams._instance.streams.peer().address
for count in (1, 100_000):
    tensor = torch.full((count,), 2.0**rank)
    dist.all_reduce(tensor)
    assert (tensor == 2**size - 1).all()
    whole = torch.empty(size * count)
    dist.all_gather_single(whole, torch.full((count,), float(rank)))
    assert torch.equal(whole, torch.arange(size).repeat_interleave(count).float())
    dealt = torch.empty(size * count)
    dist.all_to_all_single(dealt, (torch.arange(size) + 10.0 * rank).repeat_interleave(count))
    assert torch.equal(dealt, (10.0 * torch.arange(size) + rank).repeat_interleave(count))
    work = dist.isend(torch.full((count,), float(rank)), (rank + 1) % size)
    dist.recv(tensor, (rank - 1) % size)
    assert (tensor == (rank - 1) % size).all()
    work.wait()
if sys.argv[1] == "kill":
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    operation = lambda: dist.all_reduce(torch.ones(1_000_000))
else:
    pathlib.Path(sys.argv[2] + str(rank)).touch()
    def operation():
        while True:
            dist.barrier()
try:
    operation()
except dist.DistBackendError as error:
    print(json.dumps([listens, str(error)]))
"""


@pytest.fixture
def machines() -> Iterator[Machines]:
    with two_machines() as made:
        yield made


@pytest.mark.parametrize("end", ["kill", "cut"])
def test_two_machines(tmp_path: Path, machines: Machines, end: str) -> None:
    """Two ranks on each. The last one is killed inside of an operation, or the link is cut."""
    script, ready = tmp_path / "rank.py", tmp_path / "ready"
    script.write_text(SCRIPT)
    environment = os.environ | {
        "WORLD_SIZE": "4",
        "MASTER_ADDR": machines.address,
        "MASTER_PORT": "29512",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    started = []
    for ranks, host in (((0, 1), "a"), ((2, 3), "b")):
        words = map(str, (sys.executable, script, end, ready, tmp_path, *ranks))
        command = machines.on(host, *words)
        started.append(subprocess.Popen(command, env=environment))
    try:
        if end == "cut":
            limit = time.monotonic() + 120
            while not all(Path(f"{ready}{rank}").exists() for rank in range(4)):
                assert time.monotonic() < limit
                assert all(each.poll() is None for each in started)
                time.sleep(0.01)
            machines.cut()
        for each in started:
            each.wait(120)
    finally:
        for each in started:
            each.kill()
            each.wait()
    reported = [(tmp_path / f"reported{rank}").read_text() for rank in range(4)]
    a, b = machines.hosts
    found = [json.loads(text) for text in reported[: 4 if end == "cut" else 3]]
    addresses = ["10.213.77.1"] * 2 + ["10.213.77.2"] * 2
    assert [listens for listens, _ in found] == addresses[: len(found)]
    for rank, (_, text) in enumerate(found):
        if end == "cut":
            there = b if rank < 2 else a
            assert f"its connection from machine {there} has ended" in text
        elif rank < 2:
            assert f"rank 3: its connection from machine {b} has ended" in text
        else:
            assert "rank 3: its process" in text


#: One of two processes: that on "a" sends to the other one, and writes the reason why the stream has ended.
STREAM = """
import json, pathlib, socket, sys, threading, time
from smp_core.transport.smddp import streams

def receive(identity):
    if full:
        threading.Event().wait()  # the thread reads nothing more
    while True:
        yield memoryview(bytearray(1))

def wait_for(condition):
    while not condition():
        time.sleep(0.01)

host, full, folder = sys.argv[1], sys.argv[2] == "full", pathlib.Path(sys.argv[3])
streams._ACKNOWLEDGE_TIMEOUT = 3.0
mine = streams.Streams(f"10.213.77.{'ab'.index(host) + 1}", receive, lambda identity: None)
peer = folder / "peer"
if host == "b":
    (folder / "written").write_text(json.dumps(mine.peer()))
    (folder / "written").rename(peer)
    threading.Event().wait()
wait_for(peer.exists)
stream = mine.stream_to(streams.Peer(*json.loads(peer.read_text())))
assert stream.settled.wait(60) and not stream.reason, stream.reason
if full:
    stream.send([memoryview(bytes(1 << 26))])
    def no_room():
        info = stream._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
        segments, room = (int.from_bytes(info[at : at + 4], "little") for at in (24, 228))
        return not segments and not room
    wait_for(no_room)
    assert not stream.idle
(folder / "ready").touch()
wait_for((folder / "cut").exists)
stream.send([memoryview(b"x")])
wait_for(lambda: stream.reason)
(folder / "reason").write_text(stream.reason)
"""


@pytest.mark.parametrize("room", ["full", "open"])
def test_a_cut_link_ends_a_stream_with_bytes_on_their_way(
    tmp_path: Path, machines: Machines, room: str
) -> None:
    """Nothing comes from the other process. Its machine has no more room for bytes, or has room."""
    script, ready = tmp_path / "stream.py", tmp_path / "ready"
    script.write_text(STREAM)
    machines.know_each_other()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    started = []
    try:
        for host in "ab":
            command = machines.on(host, *map(str, (sys.executable, script, host, room, tmp_path)))
            started.append(subprocess.Popen(command, env=environment))
        limit = time.monotonic() + 120
        while not ready.exists():
            assert time.monotonic() < limit
            assert all(each.poll() is None for each in started)
            time.sleep(0.01)
        machines.cut()
        (tmp_path / "cut").touch()
        try:
            assert started[0].wait(60) == 0
        except subprocess.TimeoutExpired:
            pytest.fail("the stream goes on")
    finally:
        for each in started:
            each.kill()
            each.wait()
    assert (tmp_path / "reason").read_text() == "Connection timed out"


def test_the_listener_is_bound_to_the_address_of_the_way_to_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch import distributed as dist

    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # TEST-NET-1: not this machine's
    store: Any = dist.TCPStore("127.0.0.1", 0, 1, True)
    below = dist.PrefixStore("below", store)  # type: ignore[attr-defined]
    assert own_address(below) == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address(dist.HashStore()) == "127.0.0.1"  # type: ignore[attr-defined]
    with test_streams.two_processes() as processes:
        assert isinstance(processes[0].streams.peer(), Peer)
        assert processes[0].streams.peer().address == "127.0.0.1"
