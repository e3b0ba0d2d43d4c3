"""The clusters of AWS's page on sharded data parallelism, rank by rank: groups, batches, training, bytes.

The page has two worked examples, of 32 and of 1,536 GPUs, which are programs in examples/clusters, and four reference
configurations. Expected groups are typed from the page's text and figures, and bytes follow from the formulas below.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import resource
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import Job
from pytest_smp.ranks.sim.process_group import SimProcessGroup
from smp_core import runtime
from smp_core.errors import ConfigError
from smp_core.topology import GroupKind, Topology
from smp_core.torch.reduction.collectives import Collectives
from tests.fork_server import ForkServer
from tests.test_examples import ROOT, torchrun

#: One collective as a rank takes part in it: operation, participants, bytes that leave the rank.
Exchange = tuple[str, tuple[int, ...], int]
WORD = 8  # bytes of a float64


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of the example. Scripts are no part of what is installed."""
    monkeypatch.syspath_prepend(ROOT)
    before = torch.get_default_dtype()
    yield importlib.import_module("examples.clusters.train")
    torch.set_default_dtype(before)  # its `plain` sets another, as a script may


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Exchange]]:
    """Every collective of tensors by rank, as it reaches the process groups of `sim`."""
    issue = SimProcessGroup._collective
    seen: dict[int, list[Exchange]] = {}

    def recorded(self: SimProcessGroup, call: Any, opts: Any) -> Any:
        brought = sum(each.numel() * each.element_size() for each in call.brings)
        others = len(self.members) - 1
        # An all-gather sends what it brings to each other member, an all-to-all sends each of them its row.
        sent = {
            "all_gather_single": brought * others,
            "all_to_all_single": brought // len(self.members) * others,
        }
        seen.setdefault(self._context.rank, []).append(
            (call.operation, self.members, sent[call.operation])
        )
        return issue(self, call, opts)

    monkeypatch.setattr(SimProcessGroup, "_collective", recorded)
    return seen


def on_ranks(body: Callable[..., Any], ranks: int, config: dict[str, Any], *args: Any) -> list[Any]:
    """The values of a body on this many simulated ranks, more than a session has."""
    executor = open_backend("sim")
    job = Job(body=body, arguments=lambda rank: (args, {}), parameters=config, timeout=900)
    try:
        report = executor.open(ranks).run(job)
    finally:
        executor.close()
    if report.error is not None:
        raise report.error
    return report.values


# ---- The groups of 32 GPUs: "Example 2", Figures 1 and 2 -----------------------------------------

TP_GROUPS = [
    (0, 1, 2, 3),
    (4, 5, 6, 7),
    (8, 9, 10, 11),
    (12, 13, 14, 15),
    (16, 17, 18, 19),
    (20, 21, 22, 23),
    (24, 25, 26, 27),
    (28, 29, 30, 31),
]
#: The page lists the first; "other tensor parallel ranks also have similar sharding and replication groups".
RDP_GROUPS = [
    (0, 4, 8, 12, 16, 20, 24, 28),
    (1, 5, 9, 13, 17, 21, 25, 29),
    (2, 6, 10, 14, 18, 22, 26, 30),
    (3, 7, 11, 15, 19, 23, 27, 31),
]
#: Figure 2: SDPG0 to SDPG7.
SHARDING_GROUPS = [
    (0, 4, 8, 12),
    (1, 5, 9, 13),
    (2, 6, 10, 14),
    (3, 7, 11, 15),
    (16, 20, 24, 28),
    (17, 21, 25, 29),
    (18, 22, 26, 30),
    (19, 23, 27, 31),
]
#: The figures: {TPG0, TPG4}, {TPG1, TPG5}, {TPG2, TPG6}, {TPG3, TPG7}, rank by rank.
REPLICATION_GROUPS = [
    *[(0, 16), (1, 17), (2, 18), (3, 19)],
    *[(4, 20), (5, 21), (6, 22), (7, 23)],
    *[(8, 24), (9, 25), (10, 26), (11, 27)],
    *[(12, 28), (13, 29), (14, 30), (15, 31)],
]


def groups_of_rank() -> dict[str, tuple[int, ...]]:
    """This rank's groups. The API has no call for those of sharded data parallelism, so the library's own are taken."""
    here = runtime.current("test")
    kinds = (GroupKind.SHARDING, GroupKind.REPLICATION)
    found = {kind.value: here.group(kind).ranks for kind in kinds}
    return {"tp": tuple(smp.get_tp_group()), "rdp": tuple(smp.get_rdp_group()), **found}


def listed(values: list[dict[str, tuple[int, ...]]], kind: str) -> list[tuple[int, ...]]:
    """The groups of one kind that ranks are in, each once; every rank is a member of its own."""
    assert all(rank in value[kind] for rank, value in enumerate(values))
    return sorted({value[kind] for value in values})


def test_the_groups_of_32_gpus_are_those_of_text_and_figures(clusters: ModuleType) -> None:
    found = on_ranks(groups_of_rank, 32, clusters.GPUS_32.parameters())
    assert listed(found, "tp") == TP_GROUPS
    assert listed(found, "rdp") == RDP_GROUPS
    assert listed(found, "sharding") == sorted(SHARDING_GROUPS)
    assert listed(found, "replication") == sorted(REPLICATION_GROUPS)
    # "Replication groups are ({SDPG0, SDPG4}, {SDPG1, SDPG5}, {SDPG2, SDPG6} and {SDPG3, SDPG7})"
    for one, other in zip(SHARDING_GROUPS[:4], SHARDING_GROUPS[4:], strict=True):
        assert [found[rank]["replication"] for rank in one] == list(zip(one, other, strict=True))


# ---- The formulas --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A world of ``ranks`` of which ``tensor`` consecutive ones are a TP group, with the formulas of its traffic.

    With t the tensor parallel degree, s the sharding degree, R the number of replicas of a shard:

    ==========================  ================================================================
    AllGather, shard group      each of s ranks sends its shard to the s - 1 others: (s - 1) / s of the tensor
    ReduceScatter, shard group  each sends s - 1 rows: (s - 1) / s of the gradients
    AllReduce, replicate group  of a shard, around a ring: 2 (R - 1) / R of the shard
    ==========================  ================================================================

    (API 4.3, ENGINES 1.1 and 3.2), where tensors that do not divide are padded to a multiple of the ranks. TP exchanges
    with ``prescaled_batch`` (API 1.10, 4.4), of activations (B, S, channels): a layer of split input channels needs no
    exchange of its input, which all ranks of a TP group have. Its output is an AllReduce in forward, and the gradient
    of its input, of which each rank has t-ths of the channels, an AllGather in backward. An embedding split by its
    dimension is an AllGather in forward and nothing in backward.
    """

    ranks: int
    tensor: int
    sharding: int

    @property
    def replicas(self) -> int:
        return self.ranks // self.tensor // self.sharding

    def tp_group(self, rank: int) -> tuple[int, ...]:
        first = rank - rank % self.tensor
        return tuple(range(first, first + self.tensor))

    def shard_group(self, rank: int) -> tuple[int, ...]:
        """The ranks of one tp rank in consecutive TP groups, as many as the sharding degree."""
        block = self.tensor * self.sharding
        first = rank - rank % block + rank % self.tensor
        return tuple(range(first, first + block, self.tensor))

    def replicate_group(self, rank: int) -> tuple[int, ...]:
        """The ranks at the same place of each block."""
        block = self.tensor * self.sharding
        return tuple(range(rank % block, self.ranks, block))

    def gather(self, members: tuple[int, ...], shard: int) -> Iterator[Exchange]:
        yield "all_gather_single", members, (len(members) - 1) * shard * WORD

    def scatter(self, members: tuple[int, ...], row: int) -> Iterator[Exchange]:
        yield "all_to_all_single", members, (len(members) - 1) * row * WORD

    def all_reduce(self, members: tuple[int, ...], numel: int) -> Iterator[Exchange]:
        """A ring's bytes: the sums of one part on each rank, and then that part to all others."""
        part = math.ceil(numel / len(members))
        yield from self.scatter(members, part)
        yield from self.gather(members, part)

    def step(self, rank: int, options: Any) -> Counter[Exchange]:
        """All exchanges of one rank in one step and its update."""
        t, s = self.tensor, self.sharding
        tokens, width = options.batch * options.length, options.width

        def shard(numel: int) -> int:
            return math.ceil(numel / s)

        # A tp rank's slices, and what each tp rank has whole: the weight of its own layer, and biases.
        slices = [
            options.vocabulary * width // t,
            width * width // t,
            options.vocabulary * width // t,
        ]
        own, biases = width * width, [width, options.vocabulary, width]
        assert min(slices) >= options.whole > max(biases)  # slices are sharded, and biases are not
        of_slices, of_biases = sum(map(shard, slices)), sum(map(shard, biases))
        sharded = self.shard_group(rank)
        replicas, tensor = self.replicate_group(rank), self.tp_group(rank)
        return Counter(
            [
                # Parameters for forward and for backward, then the gradients of biases, which stay whole.
                *self.gather(sharded, of_slices + shard(own)),
                *self.gather(sharded, of_slices + shard(own)),
                *self.gather(sharded, of_biases),
                # Gradients in two buckets: those of slices, and those of what each tp rank has whole.
                *self.scatter(sharded, of_slices),
                *self.scatter(sharded, shard(own) + of_biases),
                *self.all_reduce(replicas, of_slices),
                *self.all_reduce(replicas, shard(own) + of_biases),
                # The norm of all gradients: two sums of squares and a checksum in two numbers, then that of slices.
                *self.gather(sharded, 4),
                *self.gather(tensor, 1),
                # Activations of the embedding, then those of the first layer and of the head, and their gradients.
                *self.gather(tensor, tokens * width // t),
                *self.all_reduce(tensor, tokens * width),
                *self.gather(tensor, tokens * width // t),
                *self.all_reduce(tensor, tokens * options.vocabulary),
                *self.gather(tensor, tokens * width // t),
            ]
        )


@dataclasses.dataclass
class Watched:
    """Of each rank: the exchanges of its last step and that step's update, and its groups."""

    exchanges: dict[int, Counter[Exchange]]
    groups: dict[int, dict[str, tuple[int, ...]]]


@pytest.fixture
def watched(
    clusters: ModuleType, exchanges: dict[int, list[Exchange]], monkeypatch: pytest.MonkeyPatch
) -> Watched:
    """The exchanges between the two places of the example's loop where a step begins and where its update has ended."""
    samples, mean = clusters.samples_of_group, clusters.mean
    found = Watched({}, {})

    def begin(options: Any, step: int) -> torch.Tensor:
        batch: torch.Tensor = samples(options, step)
        exchanges[smp.rank()] = []
        return batch

    def end(values: list[float]) -> float:
        found.exchanges[smp.rank()] = Counter(exchanges[smp.rank()])
        found.groups[smp.rank()] = groups_of_rank()
        return float(mean(values))

    monkeypatch.setattr(clusters, "samples_of_group", begin)
    monkeypatch.setattr(clusters, "mean", end)
    return found


def check_training(clusters: ModuleType, cluster: Cluster, options: Any, watched: Watched) -> int:
    """Train, and compare each rank with one process, with its replicas, and with the formulas. Gives the samples of a
    step.
    """
    results = on_ranks(clusters.train, cluster.ranks, options.parameters(), options)
    wanted = clusters.plain(dataclasses.replace(options, replicas=cluster.ranks // cluster.tensor))
    for rank, result in enumerate(results):
        assert result.losses == wanted.losses
        # The first shard group of each tp rank gives the whole model, and the others have what it has.
        first = cluster.replicate_group(rank)[0]
        assert len(result.updated) == (options.steps if rank == first else 0)
        for state, expected in zip(result.updated, wanted.updated, strict=False):
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[name], expected[name]) for name in expected)
        for kept, theirs in zip(result.kept, results[first].kept, strict=True):
            assert all(map(torch.equal, kept, theirs))
        due = cluster.step(rank, options)
        assert watched.exchanges[rank] == due, rank
        assert watched.groups[rank] == {
            "tp": cluster.tp_group(rank),
            "rdp": tuple(range(rank % cluster.tensor, cluster.ranks, cluster.tensor)),
            "sharding": cluster.shard_group(rank),
            "replication": cluster.replicate_group(rank),
        }
        check_counters(result.traffic, due, cluster, rank)
    (samples,) = {result.samples for result in results}
    return samples


def check_counters(traffic: Any, due: Counter[Exchange], cluster: Cluster, rank: int) -> None:
    """The library's own counters say the same as the process groups, by kind of group."""
    groups = {
        GroupKind.SHARDING: cluster.shard_group(rank),
        GroupKind.REPLICATION: cluster.replicate_group(rank),
        GroupKind.TP: cluster.tp_group(rank),
    }
    for kind, members in groups.items():
        told = [sent for key, sent in traffic.items() if key.group is kind]
        sent = [each[2] for each in due.elements() if each[1] == members]
        assert sum(each.calls for each in told) == len(sent), (rank, kind)
        assert sum(each.bytes for each in told) == sum(sent), (rank, kind)
    assert {key.group for key in traffic} == groups.keys()


def test_32_gpus_train_as_one_process(clusters: ModuleType, watched: Watched) -> None:
    """Five steps with prescaled_batch, bit for bit, and the exchanges of the fifth, by participants and bytes."""
    options = clusters.GPUS_32
    assert (options.tensor, options.sharding, options.steps) == (4, 4, 5)
    samples = check_training(clusters, Cluster(32, tensor=4, sharding=4), options, watched)
    assert samples == 8 * options.batch  # eight TP groups, each with a batch
    # The participants, as the page lists them.
    members = {(each[0], each[1]) for rank in watched.exchanges.values() for each in rank}
    for operation in ("all_gather_single", "all_to_all_single"):
        shown = {group for name, group in members if name == operation}
        assert shown == {*TP_GROUPS, *SHARDING_GROUPS, *REPLICATION_GROUPS}


def test_1536_gpus_make_one_training_step(clusters: ModuleType, watched: Watched) -> None:
    """Example 1 of the page: groups, batch arithmetic, one step as one process makes it, and each collective."""
    options = clusters.GPUS_1536
    assert (options.tensor, options.sharding, options.batch) == (8, 32, 4)
    samples = check_training(clusters, Cluster(1536, tensor=8, sharding=32), options, watched)
    # "192 tensor parallel groups or 192 model replicas", "the global batch size becomes 768"
    assert len({groups["tp"] for groups in watched.groups.values()}) == 192
    assert {len(groups["rdp"]) for groups in watched.groups.values()} == {192}
    assert samples == 768
    assert samples * 4096 == 3_145_728  # "about 3 million tokens"
    # All threads, copies of the model and process groups of 1,536 ranks.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 4 * 2**30


def test_1536_gpus_without_tensor_parallelism_are_1536_replicas() -> None:
    """The case that Example 1 begins with: "1536 model replicas", "6,291,456 tokens"."""
    topology = Topology(1536, sharding=32)
    assert topology.reduced_data == 1536
    assert topology.global_batch(1, prescaled=False) * 4096 == 6_291_456


# ---- Reference configurations --------------------------------------------------------------------

#: "ml.p4d.24xlarge" has 8 GPUs. (instances, global batch, mini batch, sharding degree, tensor degree)
REFERENCE = {
    "GPT-NEOX-20B on 2 instances": (2, 64, 4, 16, 1),
    "GPT-NEOX-20B on 8 instances": (8, 768, 12, 32, 1),
    "GPT-NEOX-65B, 2048 tokens": (64, 512, 8, 16, 8),
    "GPT-NEOX-65B, 4096 tokens": (64, 512, 2, 64, 2),
}


def exchange(shard: int) -> tuple[dict[str, tuple[int, ...]], int, int, Any]:
    """On one rank: the exchanges of a tensor whose shard has so many elements, in float64. Gives groups and traffic."""
    collectives = Collectives(runtime.current("test"))
    size = len(runtime.current("test").group(GroupKind.SHARDING).ranks)
    whole = collectives.all_gather(torch.full((shard,), 1.0 + smp.rank(), dtype=torch.float64))
    members = groups_of_rank()["sharding"]
    expected = torch.tensor([1.0 + rank for rank in members], dtype=torch.float64)
    assert torch.equal(whole.result(), expected.repeat_interleave(shard))
    rows = torch.ones(size, shard, dtype=torch.float64)
    own = collectives.reduce_scatter([rows]).result()
    total = collectives.all_reduce(own).result()
    assert torch.equal(total, torch.full_like(total, smp.rdp_size()))
    return groups_of_rank(), smp.rdp_size(), smp.dp_size(), collectives.traffic.since()


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_configurations(name: str, exchanges: dict[int, list[Exchange]]) -> None:
    """Groups, batches, and the bytes of a tensor's way through gather and reduction, within and between instances."""
    instances, global_batch, mini_batch, sharding, tensor = REFERENCE[name]
    cluster, shard = Cluster(8 * instances, tensor, sharding), 12
    config = {
        "ddp": True,
        "prescaled_batch": True,
        "tensor_parallel_degree": tensor,
        "sharded_data_parallel_degree": sharding,
        "ranks_per_node": 8,
    }
    values = on_ranks(exchange, cluster.ranks, config, shard)
    for rank, (groups, rdp_size, dp_size, traffic) in enumerate(values):
        assert groups["tp"] == cluster.tp_group(rank)
        assert groups["sharding"] == cluster.shard_group(rank)
        assert groups["replication"] == cluster.replicate_group(rank)
        assert (rdp_size * mini_batch, dp_size) == (global_batch, 8 * instances)
        # The members of a shard group on one instance, of which the gather's second hop has all.
        on_node = tuple(each for each in groups["sharding"] if each // 8 == rank // 8)
        place = on_node.index(rank)
        nodes = sharding // len(on_node)
        two_hops = 1 < len(on_node) < sharding
        peers = groups["sharding"][place :: len(on_node)]
        between, within = (nodes - 1) * shard, (len(on_node) - 1) * nodes * shard
        due = [
            *cluster.scatter(groups["sharding"], shard),
            *cluster.all_reduce(groups["replication"], shard),
        ]
        if two_hops:
            due += [
                ("all_gather_single", peers, between * WORD),
                ("all_gather_single", on_node, within * WORD),
            ]
            assert between + within == (sharding - 1) * shard  # as many bytes as one hop
        else:
            due += cluster.gather(groups["sharding"], shard)
        alone = [each for each in due if len(each[1]) == 1]
        assert Counter(exchanges[rank]) == Counter(due) - Counter(alone)  # alone, nothing is sent
        gathered = [sent for key, sent in traffic.items() if key.operation.startswith("all_gather")]
        assert sum(each.bytes for each in gathered) == (sharding - 1) * shard * WORD
        assert sum(each.between_nodes for each in gathered) == between * WORD


# ---- Programs, and clusters that do not fit ------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (31, {}, r"world of 31: .* a multiple of 1 \* 4 = 4. Use 28 or 32 ranks"),
        (32, {"tensor": 5}, "tensor_parallel_degree=5 in a world of 32"),
        (32, {"sharding": 3}, "sharded_data_parallel_degree=3 in a world of 32: it must divide"),
        # "with TP it must divide the reduced data parallel size": 32 / 4 = 8 (API 8.3)
        (32, {"sharding": 16}, "sharded_data_parallel_degree=16 in a world of 32: it must divide"),
    ],
    ids=["31 ranks", "tensor degree 5", "sharding degree 3", "sharding degree 16"],
)
def test_a_cluster_that_does_not_fit_is_refused_before_there_is_a_rank(
    smp_world: Any,
    clusters: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    changes: dict[str, int],
    message: str,
) -> None:
    monkeypatch.setattr(type(smp_world), "ranks", 32)  # as of a session with --smp-ranks=32
    options = dataclasses.replace(clusters.GPUS_32, **changes)
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match=message):
        clusters.check(smp_world, options, ranks)
    assert set(threading.enumerate()) == before


def test_sharding_with_tensor_parallelism_needs_a_prescaled_batch(
    smp_world: Any, clusters: ModuleType
) -> None:
    config = {**clusters.GPUS_32.parameters(), "prescaled_batch": False}
    with pytest.raises(ConfigError, match="needs prescaled_batch"):
        smp_world.run(clusters.train, clusters.GPUS_32, ranks=8, config=config)


def test_the_program_runs_on_simulated_ranks(fork_server: ForkServer) -> None:
    """The command of its page, for the smaller cluster."""
    done = fork_server.python(
        *["-m", "pytest", "-s", "examples/clusters/train.py", "--smp-ranks=32", "-k", "32"],
        folder=ROOT,
    )
    assert done.code == 0, done.stdout + done.stderr
    assert "on rank 0 of 32:\n32 samples in a step\nstep 0" in done.stdout


def test_the_script_runs_on_processes(clusters: ModuleType, tmp_path: Path) -> None:
    """The losses that torchrun's ranks print are plain PyTorch's."""
    options = clusters.Options(tensor=2, sharding=1, steps=2)
    command = [*torchrun(4), str(clusters.__file__), "--tensor", "2", "--steps", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    wanted = clusters.plain(dataclasses.replace(options, replicas=2))
    losses = [f"step {step}  loss {loss:.6f}" for step, loss in enumerate(wanted.losses)]
    assert done.stdout.splitlines()[:3] == ["8 samples in a step", *losses]
