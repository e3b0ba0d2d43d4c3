"""Properties of sharding options, which change no bit, and of accepted and refused models."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import nn

from conformance.cases.draws import needs
from conformance.cases.training import raised, results, sharded_cases, smp, trials, with_engine
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies.training_models import Block, Model
from pytest_smp.strategies.training_script import compare, merged
from pytest_smp.strategies.training_sharding import HUGE, divisors, sizes

Data = st.DataObject


def agrees(
    smp_world: SmpWorld,
    smp_engine: str,
    data: Data,
    more: Mapping[str, Any] | None = None,
    **other: Any,
) -> None:
    """Check that two runs on real values, the second with other options, give the same bits.

    ``more`` has fields of the case that are not drawn. ``other`` has, by field, functions from the case to
    the strategy of the second run's value.
    """
    __tracebackhide__ = True
    # The second step knows the order of units from the first, and may unshard ahead.
    fixed: dict[str, Any] = {"sharding": (2, 4), "real": True, "windows": 2, **(more or {})}
    case = data.draw(sharded_cases(smp_world, smp_engine, least=2, **fixed), "case")
    fields = {name: data.draw(each(case), name) for name, each in other.items()}
    first = results(smp_world, smp_engine, case)
    again = results(smp_world, smp_engine, dataclasses.replace(case, **fields))
    compare(merged(first, case.dp), again, what="another choice")


def limits(case: Any) -> st.SearchStrategy[int]:
    """Draw a number of elements, from 1 to more than the model has."""
    total = sum(sizes(case.model))
    return st.sampled_from([1, 2, *sizes(case.model), max(1, total // 2), total, HUGE]).map(
        lambda limit: max(1, limit)
    )


@requirement("SHARD-BUCKET")
@given(data=st.data())
@trials(4)
def test_buckets_change_no_bit(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    agrees(
        smp_world, smp_engine, data, reduce_bucket=limits, overlapping=lambda case: st.booleans()
    )


@requirement("SHARD-LIVE")
@given(data=st.data())
@trials(4)
def test_what_may_be_whole_changes_no_bit(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    layers = (Block("linear"), Block("relu"), Block("linear"), Block("linear"))
    model = Model(Block("chain", layers), inputs=2, width=3)
    agrees(smp_world, smp_engine, data, {"model": model, "threshold": 0}, live=limits)


@requirement("SHARD-CHECKPOINTING")
@given(data=st.data())
@trials(4)
def test_computing_again_changes_no_bit(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    agrees(smp_world, smp_engine, data, checkpointing=lambda case: st.just(not case.checkpointing))


# ---- The backend of gathers ----------------------------------------------------------------------

UNIT, SCRATCH, SORT = (
    8192,
    16 * 2**20,
    128 * 2**20,
)  # bytes: of both sizes; the sizes of the documentation
FEWEST = 1024  # elements of a gather of parameters here; gathers of other values have fewer
NO_SMDDP = "these ranks have none"
GatherChoice = tuple[int, str, str]  # bytes of each rank's part, the backend, the reason


class CountedGroup:
    """A process group under another backend's name, which counts its calls by name."""

    def __init__(self, group: Any, ranks: tuple[int, ...]) -> None:
        self._group, self.ranks = group, ranks
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._group, name)

    def _get_backend(self, device: object) -> CountedGroup:
        return self

    def name(self) -> str:
        return "stand-in"


def degrees(smp_world: SmpWorld, most: int) -> st.SearchStrategy[int]:
    """Draw a power of two up to ``most`` and the session's ranks, or skip a session of one rank."""
    needs(smp_world, 2)
    return st.sampled_from([each for each in (2, 4, 8) if each <= min(most, smp_world.ranks)])


@contextlib.contextmanager
def stand_ins(offered: bool) -> Iterator[list[CountedGroup]]:
    """Put a stand-in in the place of SMDDP's process groups, and list the groups that were asked for.

    So backends that have no SMDDP are asked, too. Without an offer the list stays empty.
    """
    from smp_core import runtime
    from smp_core.transport.protocols import Group

    smp.rank()
    fabric, made = runtime.current("the requirement").fabric, list[CountedGroup]()

    def smddp_group(group: Group) -> Any:
        if not offered:
            return NO_SMDDP
        made.append(CountedGroup(fabric.process_group(group), group.ranks))
        return made[-1]

    fabric.smddp_group = smddp_group  # type: ignore[method-assign]
    try:
        yield made
    finally:
        del fabric.smddp_group


def layered(widths: Sequence[int], dtype: torch.dtype = torch.float32) -> Any:
    """Wrap a chain of layers, two of each width, that have a weight and no bias."""
    layers = [
        (nn.Linear(1, width, dtype=dtype), nn.Linear(width, 1, dtype=dtype)) for width in widths
    ]
    for layer in itertools.chain(*layers):
        layer.register_parameter("bias", None)
    return smp.DistributedModel(nn.Sequential(*itertools.chain(*layers)))


def train(model: Any, x: torch.Tensor) -> None:
    """Run a step on the sum of the outputs."""

    @smp.step  # type: ignore[untyped-decorator]  # anybody's
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).sum()
        model.backward(loss)  # type: ignore[operator]
        return loss

    step(model, x)


def is_gather(sent: Any) -> bool:
    """Return whether an exchange of the list is a gather, or a hop of one."""
    return bool(sent.operation.startswith("all_gather"))


def choices(
    offered: bool,
    environment: Mapping[str, str],
    widths: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> tuple[list[GatherChoice], int]:
    """Train a step. Return the choice for each gather of parameters, and the gathers of the stand-in for SMDDP."""
    from smp_core.torch import observe

    os.environ.update(environment)
    with stand_ins(offered) as made:
        model = layered(widths, dtype)
        with observe.traffic(model).recorded() as log:
            train(model, torch.ones(1, 1, dtype=dtype))
    size = smp.rdp_size()
    gathers = [
        (each.elements * each.dtype.itemsize // size, each.backend, each.reason)
        for each in log
        if is_gather(each) and each.dtype is dtype and each.elements >= FEWEST
    ]
    return gathers, sum(each.calls["_allgather_base"] for each in made)


@requirement("SHARD-GATHER-BACKEND")
@given(data=st.data())
@trials(12)
def test_the_backend_of_a_gather(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    degree = data.draw(degrees(smp_world, 4), "sharding degree")
    chosen = data.draw(st.sampled_from(["auto", "auto", "auto", "nccl"]), "ddp_dist_backend")
    offered = data.draw(st.sampled_from([True, True, False]), "offered")
    buffers = st.none() | st.integers(1, 5).map(lambda count: count * UNIT)
    told = {
        "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": data.draw(buffers, "scratch"),
        "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": data.draw(st.none() | st.just(UNIT), "sort"),
    }
    scratch, sort = (
        size or usual for size, usual in zip(told.values(), (SCRATCH, SORT), strict=True)
    )
    # Parts of a byte's multiple, an element less and more: at the limits of both buffers.
    parts = st.builds(
        lambda count, more: count * UNIT // 4 + more, st.integers(1, 5), st.integers(-1, 1)
    )
    widths = data.draw(st.lists(parts, min_size=1, max_size=3, unique=True), "elements of parts")
    config = {
        "sharded_data_parallel_degree": degree,
        "sdp_param_persistence_threshold": 0,
        "ddp": True,
        "ddp_dist_backend": chosen,
    }
    environment = {name: str(size) for name, size in told.items() if size is not None}
    arguments = offered, environment, [width * degree for width in widths]
    found = smp_world.run(with_engine, smp_engine, choices, *arguments, ranks=degree, config=config)
    for gathers, carried in found:
        assert {part for part, _, _ in gathers} == {4 * width for width in widths}
        assert carried == sum(not reason for _, _, reason in gathers)
        for part, backend, reason in gathers:
            because: list[str] = []  # what the reason tells
            if chosen != "auto":
                because = ["ddp_dist_backend", chosen]
            elif not offered:
                because = [NO_SMDDP]
            elif part > scratch:
                because = ["scratch", str(part), str(scratch)]
            elif degree * part > 8 * sort:
                because = ["sort", str(part), str(sort)]
            assert (backend == "stand-in") is not bool(because), (
                f"{part} bytes went by {backend}: {reason}"
            )
            assert bool(reason) is bool(because), f"{part} bytes by {backend}: reason {reason!r}"
            assert all(word in reason for word in because), f"{reason!r} lacks one of {because}"


def exchanges(
    whole: bool, widths: Sequence[int]
) -> tuple[list[tuple[str, ...]], list[tuple[int, ...]], dict[str, int]]:
    """Train two steps with clipping, and ask for the whole state if ``whole``.

    Return each exchange of the list (operation, group, dtype, backend, reason), the ranks of the stand-in's groups,
    and how often each of their functions was called.
    """
    from smp_core.torch import observe

    with stand_ins(offered=True) as made:
        model = layered(widths)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        with observe.traffic(model).recorded() as log:
            for _ in range(2):
                optimizer.zero_grad()
                train(model, torch.ones(1, 1))
                optimizer.step()
            if whole:
                model.state_dict()
    listed: list[tuple[str, ...]] = [
        (each.operation, str(each.group), str(each.dtype), each.backend, each.reason)
        for each in log
    ]
    calls = sum((each.calls for each in made), Counter[str]())
    return listed, [each.ranks for each in made], dict(calls)


@requirement("SHARD-GATHER-OTHERS")
@given(data=st.data())
@trials(8)
def test_what_smddp_does_not_carry(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    ranks = data.draw(degrees(smp_world, 8), "ranks")
    # At degree 1 the state of the optimizer is split, and its parameters are gathered by the ranks that split it.
    degree = data.draw(st.sampled_from([each for each in (2, 4, 8, 1) if each <= ranks]), "degree")
    widths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3), "widths")
    config = {
        "ddp": True,
        "sharded_data_parallel_degree": degree,
        "shard_optimizer_state": degree == 1,
        "sdp_param_persistence_threshold": data.draw(st.integers(0, max(widths)), "threshold"),
        "sdp_hierarchical_allgather": data.draw(st.booleans(), "hierarchical"),
    }
    found = smp_world.run(
        with_engine, smp_engine, exchanges, degree > 1, widths, ranks=ranks, config=config
    )
    for rank, (listed, groups, calls) in enumerate(found):
        first = rank - rank % degree
        assert set(groups) == ({tuple(range(first, first + degree))} if degree > 1 else set())
        carried = [each for each in listed if each[3] == "stand-in"]
        # The parameters are float32. Norms, which are gathered in float64, are no parameters.
        parameters = "all_gather", "sharding", "torch.float32", "stand-in", ""
        assert set(carried) <= {parameters}, carried
        gathers = {"_allgather_base": len(carried)} if degree > 1 else {}
        assert calls == gathers, f"calls of the stand-in for SMDDP: {calls}, {len(carried)} listed"
        for operation, group, dtype, backend, reason in listed:
            other = operation.startswith("all_gather") and backend != "stand-in"
            assert bool(reason) is other, (
                f"{operation} of {dtype} by {backend} on {group}: {reason!r}"
            )
        if degree > 1:
            assert {"all_gather", "reduce_scatter"} <= {operation for operation, *_ in listed}


@requirement("SHARD-GATHER-SIZES")
@given(data=st.data())
@trials(6)
def test_bytes_decide(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    degree = data.draw(degrees(smp_world, 4), "sharding degree")
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]), "dtype")
    scratch = data.draw(st.integers(1, 3), "scratch") * UNIT
    parts = st.builds(
        lambda count, more: count * UNIT // dtype.itemsize + more,
        st.integers(1, 4),
        st.integers(-1, 1),
    )
    widths = data.draw(st.lists(parts, min_size=1, max_size=3, unique=True), "elements of parts")
    config = {
        "sharded_data_parallel_degree": degree,
        "sdp_param_persistence_threshold": 0,
        "ddp": True,
    }
    environment = {"SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": str(scratch)}
    arguments = True, environment, [width * degree for width in widths], dtype
    found = smp_world.run(with_engine, smp_engine, choices, *arguments, ranks=degree, config=config)
    for gathers, _ in found:
        assert {part for part, _, _ in gathers} == {dtype.itemsize * width for width in widths}
        for part, backend, reason in gathers:
            carried = backend == "stand-in"
            assert carried is (part <= scratch), f"{part} bytes of {dtype} by {backend}: {reason}"
            assert carried or (str(part) in reason and str(scratch) in reason), reason


def wrap(
    environments: Sequence[Mapping[str, str]], mended: Mapping[str, str]
) -> tuple[str | None, str | None]:
    """Wrap a model in this rank's environment, and again in the mended one, which is that of all ranks.

    Return the name of the type of each exception, or None.
    """
    found = []
    for environment in (environments[smp.rank()], mended):
        os.environ.update(environment)
        with stand_ins(offered=True):
            found.append(raised(lambda: layered([2])))
    return found[0], found[1]


@requirement("SHARD-GATHER-SIZES")
@given(data=st.data())
@trials(6)
def test_sizes_of_buffers_that_are_refused(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    degree = data.draw(degrees(smp_world, 4), "sharding degree")
    name = data.draw(st.sampled_from(["SCRATCH", "SORT"]), "buffer")
    good = st.integers(1, 2**20).map(lambda count: count * UNIT)
    bad = st.one_of(
        st.sampled_from(["0", "8191", "8 KiB", "8192.0"]),
        good.map(lambda size: str(-size)),
        st.builds(lambda size, more: str(size + more), good, st.integers(1, UNIT - 1)),
    )
    odd = data.draw(st.integers(0, degree - 1), "rank of the other size")
    one, other = data.draw(st.lists(good.map(str), min_size=2, max_size=2, unique=True), "sizes")
    wrong = data.draw(bad, "bad size")
    kind = data.draw(st.sampled_from(["bad on all ranks", "bad on one", "different"]), "kind")
    if kind == "bad on all ranks":
        given = [wrong] * degree
    else:
        differing = wrong if kind == "bad on one" else other
        given = [differing if rank == odd else one for rank in range(degree)]
    variable = f"SMDDP_AG_{name}_BUFFER_SIZE_BYTES"
    environments = [{variable: size} for size in given]
    config = {
        "sharded_data_parallel_degree": degree,
        "sdp_param_persistence_threshold": 0,
        "ddp": True,
    }
    arguments = environments, {variable: one}
    found = smp_world.run(with_engine, smp_engine, wrap, *arguments, ranks=degree, config=config)
    assert all(refused for refused, _ in found), f"{given} on the ranks: {found}"
    assert not any(second for _, second in found), f"{one} on all ranks, then: {found}"


@requirement("SHARD-HIERARCHICAL")
@given(data=st.data())
@trials(6)
def test_nodes_change_no_bit(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    fixed = {"windows": 1, "hierarchical": False, "threshold": 0}
    most = min(8, smp_world.ranks)
    drawn = sharded_cases(
        smp_world,
        smp_engine,
        least=4,
        most=most,
        sharding=(4, 8),
        real=True,
        without=("route",),
        **fixed,
    )
    case = data.draw(drawn, "case")
    first = results(smp_world, smp_engine, case)
    per_node = data.draw(st.sampled_from([2, *divisors(case.dp)]), "ranks per node")
    other = dataclasses.replace(case, hierarchical=True, per_node=per_node)
    compare(merged(first, case.dp), results(smp_world, smp_engine, other), what="one hop")


# ---- Models --------------------------------------------------------------------------------------


def different_on_rank(at: int, what: str) -> str | None:
    """Wrap a model that differs on rank ``at``; return the type of the exception, or None."""
    odd = smp.rank() == at

    def wrap() -> None:
        layers: list[nn.Module] = [
            nn.Linear(2, 3),
            nn.Linear(3, 4 if odd and what == "shape" else 5),
        ]
        if odd and what == "more":
            layers.append(nn.Linear(2, 2))
        if odd and what == "frozen":
            layers[0].requires_grad_(False)
        smp.DistributedModel(nn.Sequential(*layers))

    return raised(wrap)


@requirement("SHARD-SAME-MODEL")
@given(at=st.integers(0, 1), what=st.sampled_from(["shape", "more"]))
@trials(4)
def test_another_model_is_refused_everywhere(
    smp_world: SmpWorld, smp_engine: str, at: int, what: str
) -> None:
    needs(smp_world, 2)
    config = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0, "ddp": True}
    told = smp_world.run(
        with_engine, smp_engine, different_on_rank, at, what, ranks=2, config=config
    )
    assert None not in told, told


def delayed_on_rank(widths: list[int]) -> dict[str, torch.Tensor]:
    """Make a model under delayed initialization, and return its parameters by name."""
    torch.manual_seed(3)
    with smp.delay_param_initialization():
        made = layers_of(widths)
    model = smp.DistributedModel(made)
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def layers_of(widths: list[int]) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


@requirement("SHARD-DELAYED")
@given(widths=st.lists(st.integers(1, 7), min_size=2, max_size=4), threshold=st.integers(0, 30))
@trials(5)
def test_delayed_values_are_those_of_one_process(
    smp_world: SmpWorld, smp_engine: str, widths: list[int], threshold: int
) -> None:
    needs(smp_world, 2)
    config = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": threshold}
    found = smp_world.run(
        with_engine, smp_engine, delayed_on_rank, widths, ranks=2, config={**config, "ddp": True}
    )
    torch.manual_seed(3)
    for name, value in layers_of(widths).state_dict().items():
        for rank, each in enumerate(found):
            assert torch.equal(each[name], value), f"rank {rank}: {name} is {each[name]}"
