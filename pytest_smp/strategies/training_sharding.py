"""Training cases of sharded data parallelism (API 3.3): degrees, the keys of the configuration, and models with every
kind of parameter.

A case is a :class:`~pytest_smp.strategies.training.Training` at pipeline degree 1, with more fields; so its
model, data and certificate are the same, and whatever trains the one trains the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_smp.strategies.arguments import check_bool, check_int
from pytest_smp.strategies.training import Training, drawn_models, features, kinds_of
from pytest_smp.strategies.training_lattice import certified
from pytest_smp.strategies.training_models import KINDS, Model, build

#: So many elements, or as large a norm, that nothing reaches it.
HUGE = 10**9
NO_CLIPPING = 1e300  # gradients of models that diverge reach 1e38

#: Kinds of blocks that only these cases have: no dimension, no element, not contiguous, used elsewhere.
ONLY_HERE = ("gain", "empty", "transposed", "borrow", "hold")

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, repr=False)
class ShardedTraining(Training):
    """One training run with sharded state.

    Attributes:
        sharding: ``sharded_data_parallel_degree``, which divides ``dp``.
        threshold: ``sdp_param_persistence_threshold``, in elements.
        reduce_bucket: ``sdp_reduce_bucket_size``, in elements.
        live: ``sdp_max_live_parameters``, in elements.
        hierarchical: ``sdp_hierarchical_allgather``.
        per_node: ``ranks_per_node``; None: as the launcher says.
        clip: ``sdp_gradient_clipping``; :data:`NO_CLIPPING` lets any norm be.
        registered: whether ``smp.register_parameter`` tells of parameters that are used outside of
            their modules; they are found without where they are attributes of a module.
    """

    sharding: int = 1
    threshold: int = 0
    reduce_bucket: int = HUGE
    live: int = HUGE
    hierarchical: bool = True
    per_node: int | None = None
    clip: float = NO_CLIPPING
    registered: bool = True

    @property
    def most(self) -> float | None:
        """Clipping comes with sharding only (API 3.3)."""
        return self.clip if self.sharding > 1 and self.clip < NO_CLIPPING else None

    @property
    def config(self) -> dict[str, Any]:
        """The parameters of ``smp.init``."""
        given = super().config
        given |= {
            "sharded_data_parallel_degree": self.sharding,
            "sdp_param_persistence_threshold": self.threshold,
            "sdp_reduce_bucket_size": self.reduce_bucket,
            "sdp_max_live_parameters": self.live,
            "sdp_hierarchical_allgather": self.hierarchical,
            "sdp_gradient_clipping": self.clip,
        }
        if self.per_node is not None:
            given["ranks_per_node"] = self.per_node
        return given

    def splits(self, elements: int) -> bool:
        """Return whether a parameter of so many elements is split (API 3.3)."""
        return self.sharding > 1 and elements >= self.threshold


def sizes(model: Model) -> list[int]:
    """The elements of each parameter, in the order of registration."""
    return [each.numel() for each in build(model).parameters()]


def sharded_features(case: ShardedTraining) -> set[str]:
    """The rows of the coverage table that a case is an example of."""
    found_sizes = sizes(case.model)
    near = {case.threshold - size for size in found_sizes}
    rows = {
        f"degree {case.sharding}": True,
        "several blocks": 1 < case.sharding < case.dp,
        "threshold size - 1": -1 in near,
        "threshold size": 0 in near,
        "threshold size + 1": 1 in near,
        "persistent and split": any(map(case.splits, found_sizes))
        and not all(map(case.splits, found_sizes)),
        "tiny parameters": any(size < case.sharding for size in found_sizes),
        "not divisible": any(size % case.sharding for size in found_sizes),
        "zero-size parameters": "empty" in case.model.kinds(),
        "0-dim parameters": "gain" in case.model.kinds(),
        "non-contiguous parameters": "transposed" in case.model.kinds(),
        "used outside, registered": bool(case.model.kinds() & {"borrow", "hold"})
        and case.registered,
        "used outside, not registered": "borrow" in case.model.kinds() and not case.registered,
        "buffers": bool(case.model.kinds() & {"scale", "norm"}),
        "clipping": case.most is not None,
        "small buckets": case.reduce_bucket < sum(found_sizes),
        "few live parameters": case.live < sum(found_sizes),
        "several nodes": case.hierarchical
        and case.per_node is not None
        and 1 < case.sharding > case.per_node,
        "checkpointing": case.checkpointing,
        "several windows": case.windows > 1,
        case.dtype: True,
        case.optimizer: True,
    }
    kept = {"shared parameters", "reused modules", "accumulation", "unused modules"}
    kept |= {"frozen parameters", "dropout"}
    return features(case) & kept | {name for name, holds in rows.items() if holds}


# ---- Strategies ----------------------------------------------------------------------------------


def divisors(number: int) -> Iterator[int]:
    """The divisors of a number, ascending."""
    return (each for each in range(1, number + 1) if number % each == 0)


@st.composite
def _worlds(
    draw: DrawFn, ranks: int, real: bool, degrees: tuple[int, ...] | None, whole: bool
) -> tuple[int, int]:
    """Replicas and degree; ``whole``: the degree is the number of replicas."""
    fits = [
        (dp, degree)
        for dp in range(1, ranks + 1)
        if real or dp & (dp - 1) == 0
        for degree in ([dp] if whole else divisors(dp))
        if degrees is None or degree in degrees
    ]
    degree = draw(st.sampled_from(sorted({degree for _, degree in fits})))
    return draw(st.sampled_from([dp for dp, each in fits if each == degree])), degree


@st.composite
def _around(draw: DrawFn, model: Model) -> int:
    """A number of elements around the size of a parameter."""
    size = draw(st.sampled_from(sizes(model)))
    return max(0, draw(st.sampled_from([0, size, size + 1, size - 1, size, size + 1, HUGE])))


@st.composite
def drawn_fields(draw: DrawFn, model: Model, dp: int, real: bool) -> dict[str, Any]:
    """The fields that are drawn for every case."""
    average = draw(st.booleans())
    counts = (1, 2, 3) if real or not average else (1, 2, 4)
    elements = sum(sizes(model))
    tiny = [1, max(1, elements // 3), elements + 1, HUGE]
    return {
        "threshold": draw(_around(model)),
        "reduce_bucket": draw(st.sampled_from(tiny)),
        "live": draw(st.sampled_from(tiny)),
        "hierarchical": draw(st.booleans()),
        "per_node": draw(st.sampled_from([None, 2, *divisors(dp)])),
        "clip": draw(st.sampled_from([NO_CLIPPING, 0.5, 8.0])),
        "registered": draw(st.booleans()),
        "microbatches": draw(st.sampled_from(counts)),
        "rows": draw(st.integers(1, 2)),
        "passes": draw(st.sampled_from([1, 1, 2, 3])),
        "windows": draw(st.sampled_from([1, 1, 2])),
        "average": average,
        "overlapping": draw(st.booleans()),
        "set_to_none": draw(st.booleans()),
        "loss": draw(st.sampled_from(["square", "product"])),
        "optimizer": draw(st.sampled_from(["sgd", "momentum", "adam", "adamw"])),
        "checkpointing": draw(st.sampled_from([False, False, True])),
        "seed": draw(st.integers(0, 999)),
    }


@st.composite
def _cases(
    draw: DrawFn,
    ranks: int,
    real: bool,
    degrees: tuple[int, ...] | None,
    whole: bool,
    kinds: tuple[str, ...],
    dtypes: tuple[str, ...],
    fixed: tuple[tuple[str, Any], ...],
) -> ShardedTraining:
    said = dict(fixed)
    dp, degree = draw(_worlds(ranks, real, degrees, whole))
    # bf16 comes with sharding only (API 3.5).
    dtype = draw(st.sampled_from([d for d in dtypes if degree > 1 or d != "bfloat16"]))
    narrow = dtype != "float32" and not real
    model = said.pop("model", None) or draw(drawn_models(kinds, 1 if narrow else 3))
    if narrow:  # 16 bits hold few whole numbers
        model = dataclasses.replace(model, width=min(model.width, 2))
    if "model" not in dict(fixed) and draw(st.integers(0, 7)) == 7:
        model = dataclasses.replace(model, inputs=0, outputs=max(2, model.outputs), tied=True)
    drawn = draw(drawn_fields(model, dp, real))
    drawn["registered"] |= "hold" in model.kinds()
    if "route" in model.kinds() and degree > 1:
        # Ranks of a shard group have to gather alike, so modules that they choose between are not split.
        drawn["threshold"] = HUGE
    case = ShardedTraining(model, dp=dp, sharding=degree, dtype=dtype, real=real, **drawn | said)
    if real:
        return case
    # A case whose values grow too large is tried with smaller ones before it is given up.
    for loss, span, rows in ((case.loss, 2, case.rows), (case.loss, 1, 1), ("product", 1, 1)):
        smaller = dataclasses.replace(case, loss=loss, span=span, rows=rows)
        if certified(smaller):
            return smaller
    reject()


def sharded_trainings(
    ranks: int,
    *,
    sharding: tuple[int, ...] | None = None,
    whole: bool = False,
    real: bool = False,
    without: Collection[str] = (),
    dtypes: tuple[str, ...] = ("float32",),
    **fixed: Any,
) -> SearchStrategy[ShardedTraining]:
    """Draw training cases with sharded state, for at most ``ranks`` ranks; degree 1 is among them.

    Args:
        ranks: the most ranks that a world may have.
        sharding: the degrees to draw from; any if not given.
        whole: whether the degree is always the number of replicas.
        real: whether values are real numbers; else each case has the certificate of exactness.
        without: kinds of blocks that models have not.
        dtypes: to draw from.
        fixed: fields of ShardedTraining that are not drawn.

    Raises:
        InvalidArgument: ``ranks`` is no int of at least 1, ``real`` or ``whole`` is no bool, no degree of
            ``sharding`` fits, ``without``, ``dtypes`` or ``fixed`` name what there is not.
    """
    check_int("ranks", ranks, at_least=1)
    check_bool("real", real)
    check_bool("whole", whole)
    for degree in sharding or ():
        check_int("sharding", degree, at_least=1)
    powers = [dp for dp in range(1, ranks + 1) if real or dp & (dp - 1) == 0]
    if sharding is not None and not any(dp % degree == 0 for dp in powers for degree in sharding):
        raise InvalidArgument(f"sharding={sharding!r}: no degree fits at most {ranks} ranks")
    fields = {field.name for field in dataclasses.fields(ShardedTraining)}
    for what, names, known in (
        ("ShardedTraining has no such field", fixed, fields),
        ("there is no such kind of block", without, KINDS),
        ("there is no such dtype", dtypes, DTYPES),
    ):
        if unknown := sorted(set(names) - set(known)):
            raise InvalidArgument(f"{', '.join(unknown)}: {what}")
    # Some more often, so that all are well covered.
    often = ("borrow", "borrow", "repeat", "shared", "empty", "gain", "transposed", "unused")
    kinds = tuple(k for k in (*kinds_of(real), *ONLY_HERE, *often) if k not in without)
    return _cases(ranks, real, sharding, whole, kinds, dtypes, tuple(fixed.items()))


def sharding_configurations(ranks: int, **fixed: Any) -> SearchStrategy[dict[str, Any]]:
    """Draw parameters of ``smp.init`` for at most ``ranks`` ranks, with a sharding degree above 1 where it
    can be, and limits around the sizes of small models. ``fixed`` as in :func:`sharded_trainings`.
    """
    return sharded_trainings(ranks, dtypes=DTYPES, **fixed).map(lambda case: case.config)
