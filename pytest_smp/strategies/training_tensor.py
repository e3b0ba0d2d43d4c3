"""Training cases with tensor parallelism (API 1.9, 1.10): degrees, both forms of batches, and the layers that a script
wishes to be distributed.

A case is a :class:`~pytest_smp.strategies.training_sharding.ShardedTraining` with more fields, so its model, data and
certificate are the same. ``dp`` counts replicas that have data of their own: with ``prescaled`` those are TP groups.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import nn

from pytest_smp.strategies.arguments import check_bool, check_int
from pytest_smp.strategies.training import drawn_models, features, kinds_of
from pytest_smp.strategies.training_draws import drawn_partitions
from pytest_smp.strategies.training_lattice import certified
from pytest_smp.strategies.training_models import KINDS, Block, Model, Router, build
from pytest_smp.strategies.training_sharding import (
    DTYPES,
    HUGE,
    ONLY_HERE,
    ShardedTraining,
    divisors,
    drawn_fields,
    sharded_features,
)


class Layer(NamedTuple):
    """A class of layers that the published library distributes.

    Attributes:
        size: the attribute of the plain layer that the degree has to divide.
        axes: the axis along which each split parameter is split, by name; the others are whole on each rank.
    """

    size: str
    axes: Mapping[str, int]


#: The layers that are distributed, by class (API 1.10). A further one is an entry here, and a kind of block.
LAYERS: dict[type[nn.Module], Layer] = {
    nn.Linear: Layer("in_features", {"weight": 1}),
    nn.Embedding: Layer("embedding_dim", {"weight": 1}),
}


@dataclasses.dataclass(frozen=True, repr=False)
class TensorTraining(ShardedTraining):
    """One training run with distributed layers.

    Attributes:
        tensor: ``tensor_parallel_degree``. Without ``prescaled`` it divides ``dp``.
        prescaled: ``prescaled_batch``: the ranks of a TP group train on the same data.
        distributed: the paths of the layers that a script wishes to be distributed. Those of an indivisible size,
            and those that share a parameter or are used in several places, are not (:func:`splits`).
    """

    tensor: int = 1
    prescaled: bool = False
    distributed: tuple[str, ...] = ()

    @property
    def copies(self) -> int:
        """Ranks of a partition with the same data: those of a TP group, if the batch is prescaled."""
        return self.tensor if self.prescaled else 1

    @property
    def ranks(self) -> int:
        """Ranks of its world."""
        return self.pp * self.dp * self.copies

    @property
    def rdp(self) -> int:
        """The number of TP groups of each partition."""
        return self.dp * self.copies // self.tensor

    @property
    def config(self) -> dict[str, Any]:
        """The parameters of ``smp.init``."""
        return super().config | {
            "tensor_parallel_degree": self.tensor,
            "prescaled_batch": self.prescaled,
            "ddp": self.ranks > self.pp,
        }


def splits(case: TensorTraining) -> dict[str, int]:
    """The axis of each parameter that is split over the TP group, by name."""
    return dict(_splits(case.model, case.tensor, case.distributed))


@functools.lru_cache(maxsize=64)  # every rank of a world asks
def _splits(of: Model, tensor: int, distributed: tuple[str, ...]) -> dict[str, int]:
    if tensor == 1:
        return {}
    model = build(of)
    holders = Counter(
        id(each)
        for child in model.modules()
        for each in child._parameters.values()
        if each is not None
    )
    places = Counter(id(each) for _, each in model.named_modules(remove_duplicate=False))
    found: dict[str, int] = {}
    for path in distributed:
        module = model.get_submodule(path)
        layer = LAYERS[type(module)]
        shared = any(holders[id(each)] > 1 for each in module.parameters())
        if not shared and places[id(module)] == 1 and not getattr(module, layer.size) % tensor:
            found |= {f"{path}.{name}": axis for name, axis in layer.axes.items()}
    return found


def candidates(model: Model, prescaled: bool) -> tuple[str, ...]:
    """The paths of the layers that a script may wish to be distributed.

    A layer whose weight another module reads is none, because that module would read a slice. Where the ranks of a
    TP group have data of their own, layers that the data choose are none: all ranks call distributed layers alike.
    """
    root = build(model)
    routers = [
        path for path, each in root.named_modules() if isinstance(each, Router) and not prescaled
    ]
    return tuple(
        path
        for path, each in root.named_modules()
        if type(each) in LAYERS
        and not path.endswith("lender")
        and not any(path.startswith(f"{above}.") for above in routers)
    )


def tensor_features(case: TensorTraining) -> set[str]:
    """The rows of the coverage table that a case is an example of."""
    split = splits(case)
    root = build(case.model)
    layers = {type(root.get_submodule(name.rpartition(".")[0])) for name in split}
    kept = [path for path in case.distributed if f"{path}.weight" not in split]
    rows = {
        f"tensor degree {case.tensor}": True,
        "own batches": case.tensor > 1 and not case.prescaled,
        "prescaled batches": case.tensor > 1 and case.prescaled,
        "distributed linear layers": nn.Linear in layers,
        "distributed embeddings": nn.Embedding in layers,
        "distributed and whole": bool(split) and len(split) < len(list(root.parameters())),
        "layers that stay": case.tensor > 1 and bool(kept),
        "several TP groups": case.tensor > 1 and case.rdp > 1,
        "tensor and pipeline": case.tensor > 1 and case.pp > 1,
        "tensor and sharding": case.tensor > 1 and case.sharding > 1,
        "pipeline, tensor and replicas": min(case.pp, case.tensor, case.rdp) > 1,
        "spread": case.placement == "spread",
    }
    kept_rows = {"shared parameters", "reused modules", "accumulation", "unused modules", "dropout"}
    kept_rows |= {"frozen parameters", "nested cross-partition calls", "automatic partition"}
    kept_rows |= {"clipping", "checkpointing", "several windows", "persistent and split", *DTYPES}
    kept_rows |= {"sgd", "momentum", "adam", "adamw", "simple", "interleaved", "norms"}
    both = (features(case) | sharded_features(case)) & kept_rows
    return both | {name for name, holds in rows.items() if holds}


# ---- Strategies ----------------------------------------------------------------------------------


class TensorWorld(NamedTuple):
    """The degrees of a world, and the form of its batches."""

    pp: int
    tensor: int
    rdp: int
    sharding: int
    prescaled: bool

    @property
    def dp(self) -> int:
        """Replicas that have data of their own."""
        return self.rdp if self.prescaled else self.rdp * self.tensor


def worlds(ranks: int, real: bool) -> Iterator[TensorWorld]:
    """All worlds of at most so many ranks that the configuration accepts, ascending by size."""
    for size in range(1, ranks + 1):
        for pp in divisors(size):
            for tensor in divisors(size // pp):
                rdp = size // (pp * tensor)
                for prescaled in (False, True) if tensor > 1 else (False,):
                    for sharding in divisors(rdp):
                        made = TensorWorld(pp, tensor, rdp, sharding, prescaled)
                        fits = sharding == 1 or (pp == 1 and (prescaled or tensor == 1))
                        # Exact values are divided by powers of two only.
                        if fits and (real or made.dp & (made.dp - 1) == 0):
                            yield made


def _divisible(block: Block, tensor: int) -> Block:
    """The block with hidden widths that the degree divides."""
    children = tuple(_divisible(child, tensor) for child in block.children)
    size = _multiple(block.size, tensor) if block.kind == "mlp" else block.size
    return dataclasses.replace(block, children=children, size=size)


def _divisible_model(model: Model, tensor: int) -> Model:
    """The model with sizes that the degree divides, and a head of its own."""
    return dataclasses.replace(
        model,
        body=_divisible(model.body, tensor),
        width=_multiple(model.width, tensor),
        inputs=model.inputs and _multiple(model.inputs, tensor),
        tied=False,
    )


def _multiple(size: int, tensor: int) -> int:
    return max(1, size // tensor) * tensor


@st.composite
def _models(
    draw: DrawFn, world: TensorWorld, kinds: tuple[str, ...], depth: int, narrow: bool
) -> Model:
    model = draw(drawn_models(kinds, depth))
    if narrow:  # 16 bits hold few whole numbers
        model = dataclasses.replace(model, width=min(model.width, 2))
    if draw(st.integers(0, 3)) == 3:
        return model
    divisible = _divisible_model(model, world.tensor)
    return dataclasses.replace(divisible, tied=model.tied and draw(st.booleans()))


@st.composite
def _cases(
    draw: DrawFn,
    found: tuple[TensorWorld, ...],
    real: bool,
    split: bool,
    kinds: tuple[str, ...],
    dtypes: tuple[str, ...],
    fixed: tuple[tuple[str, Any], ...],
) -> TensorTraining:
    said = dict(fixed)
    # By degree first: otherwise most worlds would be those with many ways to be divided.
    tensor = draw(
        st.sampled_from(sorted({each.tensor for each in found}, key=lambda n: (n < 2, n)))
    )
    world = draw(st.sampled_from([each for each in found if each.tensor == tensor]))
    # bf16 comes with sharding only (API 3.5).
    dtype = draw(st.sampled_from([d for d in dtypes if world.sharding > 1 or d != "bfloat16"]))
    narrow = dtype != "float32" and not real
    if world.pp > 1:
        kinds = tuple(each for each in kinds if each not in ONLY_HERE)
    if world.pp > 1 and world.tensor > 1 and not world.prescaled:
        # Ranks that go different ways through a pipeline run microbatches in different orders, and the ranks of a TP
        # group have to run them in one.
        kinds = tuple(each for each in kinds if each != "route")
    model = said.pop("model", None) or draw(_models(world, kinds, 1 if narrow else 2, narrow))
    if "route" in model.kinds() and not world.prescaled and "model" not in dict(fixed):
        # With a stem that needs no gradient, a way without parameters leads to an input that needs none: a distributed
        # layer behind it would exchange the input's gradient on some ranks of its TP group alone.
        model = dataclasses.replace(model, frozen=False)
    eligible = candidates(model, world.prescaled)
    chosen = said.get("distributed", eligible)
    if draw(st.integers(0, 2)) == 2:
        chosen = said.get("distributed", tuple(path for path in eligible if draw(st.booleans())))
    wished = TensorTraining(model, tensor=world.tensor, distributed=chosen)
    if split and world.tensor > 1 and not splits(wished):
        if "model" in dict(fixed) or "distributed" in said:
            reject()
        model, chosen = (
            _divisible_model(model, world.tensor),
            tuple(dict.fromkeys((*chosen, "head"))),
        )
    drawn = draw(drawn_fields(model, world.rdp, real))
    drawn["registered"] |= "hold" in model.kinds()
    if "route" in model.kinds() and world.sharding > 1:
        # Ranks of a shard group have to gather alike, so modules that they choose between are not split.
        drawn["threshold"] = HUGE
    if world.pp > 1:
        drawn["checkpointing"] = False
    manual = world.pp == 1 or draw(st.integers(0, 3)) > 0
    drawn |= {
        "partition": (draw(drawn_partitions(model, world.pp)) if world.pp > 1 else ())
        if manual
        else None,
        "default": draw(st.integers(0, world.pp - 1)) if manual else 0,
        "schedule": draw(st.sampled_from(["interleaved", "simple"])),
        "active": draw(st.none() | st.integers(1, 4)) if world.pp > 1 else None,
        "length": draw(st.integers(1, 2)),
        "axes": (draw(st.integers(0, 1)) if world.pp == 1 else 0, 0),
        "placement": draw(st.sampled_from(["cluster", "spread"])),
        "distributed": chosen,
    }
    case = TensorTraining(
        model,
        pp=world.pp,
        dp=world.dp,
        sharding=world.sharding,
        tensor=world.tensor,
        prescaled=world.prescaled,
        dtype=dtype,
        real=real,
        **drawn | said,
    )
    if real:
        return case
    # A case whose values grow too large is tried with smaller ones before it is given up.
    for loss, span, rows in ((case.loss, 2, case.rows), (case.loss, 1, 1), ("product", 1, 1)):
        smaller = dataclasses.replace(case, loss=loss, span=span, rows=rows)
        if certified(smaller):
            return smaller
    reject()


def tensor_trainings(
    ranks: int,
    *,
    tensor: tuple[int, ...] = (2, 4, 3, 8, 1),
    pipeline: tuple[int, ...] = (1,),
    sharding: tuple[int, ...] = (1,),
    prescaled: tuple[bool, ...] = (False, True),
    size: int | None = None,
    real: bool = False,
    split: bool = False,
    without: Collection[str] = (),
    dtypes: tuple[str, ...] = ("float32",),
    **fixed: Any,
) -> SearchStrategy[TensorTraining]:
    """Draw training cases with distributed layers, for at most ``ranks`` ranks.

    Args:
        ranks: the most ranks that a world may have.
        tensor: the tensor-parallel degrees to draw from.
        pipeline: the pipeline degrees to draw from.
        sharding: the degrees of sharded data parallelism to draw from; those above 1 come with prescaled batches.
        prescaled: the forms of batches to draw from.
        size: the number of ranks, if not drawn.
        real: whether values are real numbers; else each case has the certificate of exactness.
        split: whether at least one layer is split, where the degree is above 1; else layers may all stay as they are.
        without: kinds of blocks that models have not.
        dtypes: to draw from.
        fixed: fields of TensorTraining that are not drawn.

    Raises:
        InvalidArgument: ``ranks`` is no int of at least 1, ``real`` or ``split`` is no bool, no world has such
            degrees, or ``without``, ``dtypes`` or ``fixed`` name what there is not.
    """
    check_int("ranks", ranks, at_least=1)
    check_bool("real", real)
    check_bool("split", split)
    found = tuple(
        each
        for each in worlds(ranks, real)
        if each.tensor in tensor
        and each.pp in pipeline
        and each.sharding in sharding
        and (each.prescaled in prescaled or each.tensor == 1)
        and (size is None or each.pp * each.tensor * each.rdp == size)
    )
    if not found:
        raise InvalidArgument(
            f"tensor={tensor!r}, pipeline={pipeline!r}, sharding={sharding!r}, prescaled={prescaled!r}, size={size!r}: "
            f"no world of at most {ranks} ranks has such degrees"
        )
    fields = {field.name for field in dataclasses.fields(TensorTraining)}
    for what, names, known in (
        ("TensorTraining has no such field", fixed, fields),
        ("there is no such kind of block", without, KINDS),
        ("there is no such dtype", dtypes, DTYPES),
    ):
        if unknown := sorted(set(names) - set(known)):
            raise InvalidArgument(f"{', '.join(unknown)}: {what}")
    # Some more often, so that all are well covered.
    often = ("linear", "mlp", "linear", "mlp", "shared", "repeat")
    kinds = tuple(k for k in (*kinds_of(real), *ONLY_HERE, *often) if k not in without)
    return _cases(found, real, split, kinds, dtypes, tuple(fixed.items()))
