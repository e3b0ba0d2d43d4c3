"""Drawn Keras models and partitions, as data. Nothing here imports TensorFlow, so that the suite is collected without.

:mod:`conformance.cases.keras_script` builds and trains them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import hypothesis.strategies as st
import pytest

from conformance.cases.draws import needs
from pytest_smp.proxies import SmpWorld

KINDS = ("dense", "batch norm", "layer norm", "dropout", "skip", "nested", "cond", "while")

#: The partitions that a part of a model is in, the outermost first.
Path = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class KerasCase:
    """A model and its partition: an embedding, blocks, and a head that is tied to the embedding or is its own."""

    blocks: tuple[tuple[str, int], ...]
    embedding: int
    head: int
    tied: bool
    default: int
    partitions: int
    microbatches: int = 2
    pipeline: str = "interleaved"
    optimizer: str = "Adam"
    tape: bool = False

    def on(self, partitions: int) -> KerasCase:
        """The same model on fewer partitions: each place is counted from the first again."""
        return dataclasses.replace(
            self,
            blocks=tuple((kind, place % partitions) for kind, place in self.blocks),
            embedding=self.embedding % partitions,
            head=self.head % partitions,
            default=self.default % partitions,
            partitions=partitions,
        )

    def config(self, **more: Any) -> dict[str, Any]:
        """The configuration of its ranks."""
        return {
            "pipeline_parallel_degree": self.partitions,
            "microbatches": self.microbatches,
            "auto_partition": False,
            "default_partition": self.default,
            "pipeline": self.pipeline,
            **more,
        }


@st.composite
def keras_cases(draw: st.DrawFn, partitions: int | None = None) -> KerasCase:
    """A case for as many partitions; some may stay empty, others are visited again."""
    count = draw(st.integers(1, 4)) if partitions is None else partitions
    place = st.integers(0, count - 1)
    kind = st.sampled_from((*KINDS, "skip", "skip"))  # few skips have another partition below them
    blocks = draw(st.lists(st.tuples(kind, place), min_size=1, max_size=5))
    return KerasCase(
        tuple(blocks),
        draw(place),
        draw(place),
        draw(st.booleans()),
        draw(place),
        count,
        draw(st.integers(1, 3)),
        draw(st.sampled_from(["interleaved", "simple"])),
        draw(st.sampled_from(["Adam", "SGD"])),
        draw(st.booleans()),
    )


def route(case: KerasCase) -> list[int]:
    """The partitions that the model's call reaches, in order, each once for a stay."""
    found = [case.embedding]
    for kind, place in case.blocks:
        found.append(place)
        if kind == "nested":
            found += [(place + 1) % case.partitions, place]
    found += [case.default, case.head]
    return [each for at, each in enumerate(found) if not at or each != found[at - 1]]


def features(case: KerasCase) -> set[str]:
    """The kinds of blocks and of partitions that a case has, for tables of coverage."""
    found = {kind for kind, _ in case.blocks} | {f"{case.partitions} partitions", case.optimizer}
    way, between, skips = route(case), set[int](), False
    for kind, place in case.blocks:
        skips |= kind == "skip" and place != case.embedding and bool(between - {place})
        between |= {place} - {case.embedding}
    rows = {
        "an embedding tied to the head": case.tied,
        "an edge that skips a partition": skips,
        "revisits as 0-1-0-1": any(
            way[at] == way[at + 2] and way[at + 1] == way[at + 3] for at in range(len(way) - 3)
        ),
        "empty partitions": len(set(way)) < case.partitions,
        "a tape": case.tape,
    }
    return found | {name for name, holds in rows.items() if holds}


def paths(count: int) -> st.SearchStrategy[Path]:
    """Draw the partitions that a part of a model is in, the outermost first."""
    return st.lists(st.integers(0, count - 1), max_size=3).map(tuple)


def manual(partitions: int = 2, microbatches: int = 2, **more: Any) -> dict[str, Any]:
    """The configuration of a manual partition."""
    return {
        "pipeline_parallel_degree": partitions,
        "microbatches": microbatches,
        "auto_partition": False,
        "default_partition": 0,
        **more,
    }


def two(smp_world: SmpWorld) -> int:
    """Two partitions, or one where there is one rank."""
    return min(2, smp_world.ranks)


def script(smp_world: SmpWorld, ranks: int = 1) -> Any:
    """The module that builds and trains cases, where TensorFlow is installed and there are so many ranks.

    Without either the property is skipped: what cannot be tested is not certified.
    """
    return _imported(smp_world, ranks, "keras_script")


def bodies(smp_world: SmpWorld, ranks: int = 1) -> Any:
    """The module of small models, as ``script`` gives that of drawn ones."""
    return _imported(smp_world, ranks, "keras_bodies")


def _imported(smp_world: SmpWorld, ranks: int, name: str) -> Any:
    needs(smp_world, ranks)
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed: python -m pip install 'pytest-smp[tensorflow]'")
    return importlib.import_module(f"conformance.cases.{name}")
