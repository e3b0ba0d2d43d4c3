"""Training cases: a model, its partition, the degrees, the schedule and the data, as one value that
prints as code.

Sizes are odd, tiny and uneven; degree 1 comes often. Cases of the tier "exact" carry the certificate
of :func:`~pytest_smp.strategies.training_lattice.certified`: no sum in them can round, in any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import nn

from pytest_smp.strategies.arguments import check_bool, check_int
from pytest_smp.strategies.training_models import Block, Model, _code, build

_SMALLEST = Model()


@dataclasses.dataclass(frozen=True, repr=False)
class Training:
    """One training run.

    Attributes:
        model: what is trained.
        pp: pipeline degree.
        dp: number of replicas; the world has ``pp * dp`` ranks.
        partition: from which module (by path) downwards which partition holds the modules, the
            outermost first; :func:`owners` spells it out. None: the library decides.
        default: the partition of what ``partition`` leaves, the root first of all.
        schedule: ``simple`` or ``interleaved``.
        active: ``active_microbatches``; None is the library's default.
        microbatches: of each step.
        rows: of each microbatch.
        length: of the dimension beside the batch's; activations are ``(rows, length, width)``.
        axes: the batch axis of the inputs and of the targets, 0 or 1 each.
        passes: ``backward_passes_per_step``: steps whose gradients are summed.
        windows: how often so many steps are made, gradients set to zero before each.
        average: ``average_grads_across_microbatches``.
        overlapping: ``overlapping_allreduce``.
        bucket: ``bucket_cap_mb``.
        set_to_none: how gradients are set to zero.
        dummies: whether ranks with a pp_rank above 0 get inputs without content.
        tracing: whether the first step is traced (not ``skip_tracing``).
        placement: ``placement_strategy``.
        loss: ``square``, the squared distance to the targets, or ``product``, the scalar product.
        optimizer: ``sgd``, ``momentum``, ``decayed`` (momentum and weight decay), ``adam`` or ``adamw``,
            all elementwise.
        dtype: of the module; where it has 16 bits, float32 masters are trained.
        checkpointing: whether the parts of the body are run again in backward.
        span: whole numbers are drawn from ``-span`` to ``span``.
        real: whether values are real numbers; else they are whole numbers, with a certificate.
        every: whether the optimizer steps after each window also where values are whole numbers, and not
            after the last one only.
        seed: of values.
    """

    model: Model = _SMALLEST
    pp: int = 1
    dp: int = 1
    partition: tuple[tuple[str, int], ...] | None = ()
    default: int = 0
    schedule: str = "interleaved"
    active: int | None = None
    microbatches: int = 1
    rows: int = 1
    length: int = 1
    axes: tuple[int, int] = (0, 0)
    passes: int = 1
    windows: int = 1
    average: bool = True
    overlapping: bool = True
    bucket: float = 25
    set_to_none: bool = True
    dummies: bool = False
    tracing: bool = True
    placement: str = "cluster"
    loss: str = "square"
    optimizer: str = "sgd"
    dtype: str = "float32"
    checkpointing: bool = False
    span: int = 2
    real: bool = False
    every: bool = False
    seed: int = 0

    def __repr__(self) -> str:
        return _code(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # as Hypothesis prints it, too

    @property
    def ranks(self) -> int:
        """Ranks of its world."""
        return self.pp * self.dp

    @property
    def copies(self) -> int:
        """Ranks of a partition that train on the same data, and whose gradients are summed all the same."""
        return 1

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.passes * self.windows

    def steps_after(self, window: int) -> bool:
        """Return whether the optimizer makes a step after this window."""
        return self.real or self.every or window == self.windows - 1

    @property
    def tier(self) -> str:
        """The tier in which results are compared (design, "Exactness")."""
        return "replayed" if self.real else "exact"

    @property
    def divisor(self) -> int:
        """The divisor of a sum over replicas and microbatches (API 1.7)."""
        return self.dp * (self.microbatches if self.average else 1)

    @property
    def config(self) -> dict[str, Any]:
        """The parameters of ``smp.init``."""
        given: dict[str, Any] = {
            "pipeline_parallel_degree": self.pp,
            "microbatches": self.microbatches,
            "pipeline": self.schedule,
            "placement_strategy": self.placement,
            "auto_partition": self.partition is None,
            "ddp": self.dp > 1,
        }
        if self.partition is not None:
            given["default_partition"] = self.default
        if self.active is not None:
            given["active_microbatches"] = self.active
        if not self.tracing:
            given["skip_tracing"] = True
        if self.dtype != "float32":
            given[{"float16": "fp16", "bfloat16": "bf16"}[self.dtype]] = True
        return given

    @property
    def most(self) -> float | None:
        """The largest norm of all gradients together that a step leaves as it is; None: any."""
        return None


# ---- Partitions ----------------------------------------------------------------------------------


def called(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are called, by path; parents first. A list is none."""
    for path, each in module.named_modules():
        if not isinstance(each, nn.ModuleList):
            yield path, each


def _parent(path: str) -> str:
    above = path.rpartition(".")[0]
    return above.removesuffix("parts").rstrip(".") if above.endswith("parts") else above


def _above(path: str) -> set[str]:
    names = path.split(".")
    return {".".join(names[:depth]) for depth in range(1, len(names))}


def owners(case: Training) -> dict[str, int]:
    """The partition of every module that is called, by path, parents first; ``""`` is the root.

    A module is where its parent is, or where ``case.partition`` says. Modules that hold one
    parameter together are all where the first of them is (API 1.7).
    """
    said = dict(case.partition or ())
    found: dict[str, int] = {}
    homes: dict[int, int] = {}
    for path, module in called(build(case.model)):
        at = said.get(path, found[_parent(path)] if path else case.default) % case.pp
        for parameter in module.parameters(recurse=False):
            at = homes.get(id(parameter), at)
        for parameter in module.parameters(recurse=False):
            homes.setdefault(id(parameter), at)
        found[path] = at
    return found


def features(case: Training) -> set[str]:
    """The rows of the coverage table that a case is an example of."""
    blocks = list(case.model.body.walk())
    keys = [(each.kind, each.size) for each in blocks if each.kind in ("shared", "tied")]
    at = owners(case) if case.partition is not None else {}
    crossing = {path for path in at if path and at[path] != at[_parent(path)]}
    found = {
        "cross-partition calls": bool(crossing),
        "nested cross-partition calls": any(_above(path) & crossing for path in crossing),
        "shared parameters": case.model.tied
        or any(kind == "tied" and keys.count((kind, key)) > 1 for kind, key in keys),
        "reused modules": any(each.kind == "repeat" and each.size > 1 for each in blocks)
        or any(kind == "shared" and keys.count((kind, key)) > 1 for kind, key in keys),
        "branches and skips": bool(
            case.model.kinds() & {"residual", "branches", "skip", "tuple", "dict", "nested"}
        ),
        "degree 1": case.pp == 1,
        "several axes": len({0, *case.axes}) > 1,
        "accumulation": case.passes > 1,
        "replicas": case.dp > 1,
        "simple": case.schedule == "simple",
        "interleaved": case.schedule == "interleaved",
        "automatic partition": case.partition is None and case.pp > 1,
        "unused modules": bool(case.model.kinds() & {"unused", "route"}),
        "frozen parameters": case.model.frozen or any(each.frozen for each in blocks),
        "tuples, dicts, None": bool(case.model.kinds() & {"tuple", "dict"}),
        "dropout": "dropout" in case.model.kinds(),
        "norms": "norm" in case.model.kinds(),
    }
    return {name for name, holds in found.items() if holds}


# ---- Strategies ----------------------------------------------------------------------------------

#: Kinds without children.
LEAVES = ("linear", "mlp", "relu", "scale", "shared", "tied")
#: Kinds whose values do not stay whole numbers.
REAL_LEAVES = ("dropout", "norm")
#: How many children a kind takes: the fewest and the most.
_ARITY = {
    "chain": (0, 3),
    "residual": (1, 1),
    "nested": (1, 1),
    "repeat": (1, 1),
    "branches": (1, 3),
    "skip": (2, 3),
    "tuple": (1, 1),
    "dict": (1, 1),
    "route": (2, 2),
    "unused": (2, 2),
    "direct": (1, 1),
}


def kinds_of(real: bool) -> tuple[str, ...]:
    """The kinds of blocks that are drawn."""
    return LEAVES + (REAL_LEAVES if real else ()) + tuple(_ARITY)


@st.composite
def _blocks(draw: DrawFn, depth: int, kinds: tuple[str, ...]) -> Block:
    kind = draw(st.sampled_from([each for each in kinds if depth > 0 or each not in _ARITY]))
    frozen = draw(st.integers(0, 7)) == 7
    bias = draw(st.booleans())
    size = draw(st.integers(2 if kind == "repeat" else 1, 3 if kind in ("mlp", "repeat") else 2))
    least, most = _ARITY.get(kind, (0, 0))
    number = draw(st.integers(least, most))
    children = tuple(draw(_blocks(depth - 1, kinds)) for _ in range(number))
    if kind in ("linear", "tied"):
        size = size if kind == "tied" else 1
    return Block(kind, children, size, bias, frozen)


def blocks(depth: int = 3, *, real: bool = False) -> SearchStrategy[Block]:
    """Draw parts of models; they shrink to one linear map.

    Args:
        depth: how many levels of blocks may be below one.
        real: whether there may be kinds whose values do not stay whole numbers: dropout, norms.

    Raises:
        InvalidArgument: ``depth`` is no int of at least 0, or ``real`` is no bool.
    """
    return _blocks(check_int("depth", depth, at_least=0), kinds_of(check_bool("real", real)))


def models(*, real: bool = False) -> SearchStrategy[Model]:
    """Draw models: small trees with ties, branches, reuse.

    Args:
        real: whether there may be kinds whose values do not stay whole numbers: dropout, norms.

    Raises:
        InvalidArgument: ``real`` is no bool.
    """
    return drawn_models(kinds_of(check_bool("real", real)))


@st.composite
def drawn_models(draw: DrawFn, kinds: tuple[str, ...], depth: int = 3) -> Model:
    """Models of these kinds of blocks."""
    tokens = draw(st.integers(0, 3)) == 3
    return Model(
        body=draw(_blocks(depth, kinds)),
        inputs=0 if tokens else draw(st.integers(1, 3)),
        width=draw(st.integers(1, 4)),
        outputs=draw(st.integers(2 if tokens else 1, 3)),
        tied=tokens and draw(st.booleans()),
        frozen=draw(st.integers(0, 4)) == 4,
    )
