"""The batches of a TP group: compared before a step, because its ranks compute together with the samples of all
(API 4.4).

With ``prescaled_batch`` the ranks also agree on one seed for the step: they hold the same activations, and so draw the
same random numbers for them, however a script seeded them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

from smp_core.microbatch import CallArguments
from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.exceptions import TensorParallelError
from smp_core.torch.execution import streams
from smp_core.torch.execution.batch_description import BatchEntry, described


def compared(
    runtime: Runtime, split: Callable[[], list[CallArguments]], seed: int
) -> tuple[list[CallArguments], int]:
    """The arguments of each microbatch on this rank, once the ranks of its TP group have compared theirs, and the seed
    of the step: with ``prescaled_batch`` that of tp rank 0, else ``seed``.

    Tensors have the same shapes and dtypes on all of them; with ``prescaled_batch`` the same values, and so have
    arrays, and lists of numbers and strings. Collective over the TP group, also where ``split`` raises. Raises what
    ``split`` raises, TensorParallelError on every rank of the group for batches that do not go together or a rank that
    has none.
    """
    group = runtime.group(GroupKind.TP)
    if len(group.ranks) == 1:
        return split(), seed
    calls: list[CallArguments] = []
    prescaled = runtime.config.prescaled_batch

    def describe() -> list[BatchEntry]:
        calls.extend(split())
        return described(enumerate(calls), prescaled)

    first = _alike(runtime, f"step {runtime.training.steps}", seed, describe)
    return calls, first if prescaled else seed


@contextlib.contextmanager
def alike_outside_of_steps(
    runtime: Runtime, args: tuple[object, ...], kwargs: dict[str, object], training: bool
) -> Iterator[None]:
    """Entered around a call of the model outside of steps, whose arguments the ranks of its TP group compare.

    In ``training`` with ``prescaled_batch`` the call draws from the stream of tp rank 0's seed. Collective over the TP
    group. Raises TensorParallelError, on every rank of the group, for arguments that do not go together.
    """
    prescaled = runtime.config.prescaled_batch
    seed = streams.draw_seed() if prescaled and training else 0

    def describe() -> list[BatchEntry]:
        return described([(None, CallArguments(args, kwargs))], prescaled)

    first = _alike(runtime, "outside of steps", seed, describe)
    with streams.entered(streams.root(first, 0)) if seed else contextlib.nullcontext():
        yield


def _alike(runtime: Runtime, when: str, seed: int, describe: Callable[[], list[BatchEntry]]) -> int:
    """Compare the entries that the ranks of this rank's TP group describe, and return the seed of tp rank 0.

    Collective over the TP group, also where ``describe`` raises: the other ranks wait for a description. Raises what
    ``describe`` raises on its rank; TensorParallelError on the others, and on every rank of the group for entries that
    differ.
    """
    group = runtime.group(GroupKind.TP)
    failure: Exception | None = None
    own: str | list[BatchEntry]
    try:
        own = describe()
    except Exception as error:
        failure, own = error, f"{type(error).__name__}: {error}"
    seeds, gathered = zip(*runtime.fabric.objects.allgather((seed, own), group), strict=True)
    if failure is not None:
        raise failure
    _check(when, group.ranks, gathered)
    first: int = seeds[0]
    return first


def _check(when: str, ranks: Sequence[int], gathered: Sequence[str | list[BatchEntry]]) -> None:
    """Raise TensorParallelError if the batches of a TP group, in its order, do not go together."""
    for rank, theirs in zip(ranks, gathered, strict=True):
        if isinstance(theirs, str):
            raise TensorParallelError(
                f"{when}: rank {rank}, of the same TP group, has no batch: {theirs}"
            )
    first = gathered[0]
    for rank, theirs in zip(ranks, gathered, strict=True):
        if theirs != first and not isinstance(theirs, str) and not isinstance(first, str):
            raise TensorParallelError(f"{when}: {_difference(ranks[0], first, rank, theirs)}")


def _difference(
    first: int, ours: Sequence[BatchEntry], other: int, theirs: Sequence[BatchEntry]
) -> str:
    """The difference between the batches of two ranks, and the remedy."""
    ranks = f"rank {other}'s batch is not that of rank {first}, of the same TP group: "
    tensors = [sum(entry.is_tensor for entry in each) for each in (ours, theirs)]
    if tensors[0] != tensors[1]:
        return f"{ranks}it has {tensors[1]} tensors, and not {tensors[0]}. {_SHAPES}"
    # Entries of which one rank has more are of arrays and arguments, by name.
    mine, yours = next(pair for pair in itertools.zip_longest(ours, theirs) if pair[0] != pair[1])
    if mine is None or yours is None or mine.name != yours.name:
        names = ["nothing" if each is None else each.name for each in (mine, yours)]
        return f"{ranks}it has {names[1]} in the place of {names[0]}. {_VALUES}"
    if mine.form == yours.form:
        return f"{ranks}the values of {mine.name} differ. {_VALUES}"
    remedy = _SHAPES if mine.is_tensor else _VALUES
    return f"{ranks}{mine.name} is {yours.form}, and not {mine.form}. {remedy}"


_SHAPES = "Give all ranks of a TP group batches of one shape"

_VALUES = (
    "With prescaled_batch all ranks of a TP group train on one batch: divide the data by smp.rdp_rank() and "
    "smp.rdp_size()"
)
