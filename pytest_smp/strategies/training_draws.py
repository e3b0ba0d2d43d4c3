"""The strategy of training cases: what it draws as exact carries the certificate of training_lattice.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_smp.strategies.arguments import check_bool, check_int
from pytest_smp.strategies.training import Training, called, drawn_models, kinds_of
from pytest_smp.strategies.training_lattice import certified
from pytest_smp.strategies.training_models import Model, build


@st.composite
def drawn_partitions(draw: DrawFn, model: Model, pp: int) -> tuple[tuple[str, int], ...]:
    paths = [path for path, _ in called(build(model)) if path]
    places = st.none() | st.integers(0, pp - 1)
    if draw(st.integers(0, 2)) < 2:
        chosen = [(path, draw(places)) for path in paths]
        return tuple((path, at) for path, at in chosen if at is not None)
    # Every module calls its children elsewhere, down the tree.
    depth = {path: sum(name != "parts" for name in path.split(".")) for path in paths}
    return tuple((path, depth[path] % pp) for path in paths)


@st.composite
def _cases(
    draw: DrawFn,
    ranks: int,
    pipeline: tuple[int, ...],
    real: bool,
    automatic: bool,
    kinds: tuple[str, ...],
    fixed: tuple[tuple[str, Any], ...],
) -> Training:
    said = dict(fixed)
    most = ranks // said.get("dp", 1)
    pp = draw(st.sampled_from([degree for degree in pipeline if degree <= most]))
    replicas = (said["dp"],) if "dp" in said else (1, 2, 3, 4) if real else (1, 2, 4)
    dp = draw(st.sampled_from([number for number in replicas if number * pp <= ranks]))
    model = said.get("model") or draw(drawn_models(kinds))
    manual = pp == 1 or not automatic or draw(st.integers(0, 3)) > 0
    average = draw(st.booleans())
    counts = (1, 2, 3, 4, 5) if real or not average else (1, 2, 4)
    case = Training(
        model=model,
        pp=pp,
        dp=dp,
        partition=(draw(drawn_partitions(model, pp)) if pp > 1 else ()) if manual else None,
        default=draw(st.integers(0, pp - 1)) if manual else 0,
        schedule=draw(st.sampled_from(["interleaved", "simple"])),
        active=draw(st.none() | st.integers(1, 6)),
        microbatches=draw(st.sampled_from(counts)),
        rows=draw(st.integers(1, 3)),
        length=draw(st.integers(1, 2)),
        axes=(draw(st.integers(0, 1)), draw(st.integers(0, 1))),
        passes=draw(st.sampled_from([1, 1, 2, 3])),
        windows=draw(st.sampled_from([1, 1, 2])),
        average=average,
        overlapping=draw(st.booleans()),
        bucket=draw(st.sampled_from([25, 1, 0.00001])),
        set_to_none=draw(st.booleans()),
        dummies=draw(st.booleans()),
        tracing=draw(st.booleans()) if manual else True,
        placement=draw(st.sampled_from(["cluster", "spread"])),
        loss=draw(st.sampled_from(["square", "product"])),
        real=real,
        seed=draw(st.integers(0, 999)),
    )
    case = dataclasses.replace(case, **said)
    if real:
        return case
    # A case whose values grow too large is tried with smaller ones before it is given up.
    for loss, span in ((case.loss, 2), (case.loss, 1), ("product", 1)):
        smaller = dataclasses.replace(case, loss=loss, span=span)
        if certified(smaller):
            return smaller
    reject()


def trainings(
    ranks: int,
    *,
    pipeline: tuple[int, ...] = (2, 1, 3, 4),
    real: bool = False,
    automatic: bool = True,
    without: Collection[str] = (),
    **fixed: Any,
) -> SearchStrategy[Training]:
    """Draw training cases for at most ``ranks`` ranks.

    Args:
        ranks: the most ranks that a world may have.
        pipeline: the pipeline degrees to draw from.
        real: whether values are real numbers; else each case has the certificate of exactness.
        automatic: whether the library may be left to partition the model.
        without: kinds of blocks that models have not.
        fixed: fields of Training that are not drawn.

    Raises:
        InvalidArgument: ``ranks`` is no int of at least 1, ``real`` or ``automatic`` is no bool,
            ``pipeline`` has no degree for so many ranks, or ``fixed`` names no field.
    """
    check_int("ranks", ranks, at_least=1)
    check_bool("real", real)
    check_bool("automatic", automatic)
    least = ranks // check_int("dp", fixed.get("dp", 1), at_least=1, at_most=ranks)
    for degree in pipeline:
        check_int("pipeline", degree, at_least=1)
    if not any(degree <= least for degree in pipeline):
        raise InvalidArgument(f"pipeline={pipeline!r}: no degree is at most {least}")
    fields = {field.name for field in dataclasses.fields(Training)}
    if unknown := sorted(set(fixed) - fields):
        raise InvalidArgument(f"{', '.join(unknown)}: Training has no such field")
    kinds = tuple(kind for kind in kinds_of(real) if kind not in without)
    return _cases(ranks, pipeline, real, automatic, kinds, tuple(fixed.items()))
