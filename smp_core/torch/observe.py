"""Observations of training on this rank, for tests and measurements: counters, timeline, traffic and memory.

::

    from smp_core.torch import observe

    observe.timeline()             # the events of this rank's last step
    observe.counters()             # Counters(steps=3, reductions=3)
    observe.traffic(model)         # the bytes that sharded data parallelism has sent
    observe.tensor_traffic(model)  # the bytes that distributed modules have sent
    observe.unsharded_peak(model)  # the most elements that were unsharded at a time
    with observe.Recorder() as recorder: ...  # bytes by kind

No function here communicates.
"""

from __future__ import annotations

from typing import NamedTuple

from smp_core.torch import session
from smp_core.torch.execution.timeline import Event
from smp_core.torch.memory.recorder import Recorder as Recorder
from smp_core.torch.model import DistributedModel
from smp_core.torch.reduction.traffic import Traffic


class Counters(NamedTuple):
    """Counters of this rank's steps and reductions since ``smp.init``: the same on every rank."""

    steps: int  #: steps that have begun
    reductions: int  #: gradients that were reduced: once for each window of accumulated steps


def counters() -> Counters:
    """The counters of this rank. Raises NotInitializedError before ``smp.init``."""
    current = session.current("observe.counters")
    reducer = None if current.model is None else current.model.gradients
    return Counters(current.steps, 0 if reducer is None else reducer.reductions)


def timeline() -> tuple[Event, ...]:
    """The events of this rank's last step, in order; empty before the first.

    ``execution.timeline.violations`` checks the events of all ranks, and ``execution.timeline.write``
    writes them for Perfetto. Raises NotInitializedError before ``smp.init``.
    """
    return tuple(session.current("observe.timeline").timeline)


def traffic(model: DistributedModel) -> Traffic:
    """The traffic of the collectives of sharded data parallelism for ``model`` on this rank.

    The counters are empty for a model that is not sharded: plain data parallelism and pipelines are not
    counted.
    """
    return model.sharding.traffic


def tensor_traffic(model: DistributedModel) -> Traffic:
    """The traffic of the distributed modules of ``model`` on this rank.

    The counters are empty at ``tensor_parallel_degree`` 1.
    """
    group = model._session.tensor_group
    return Traffic() if group is None else group.traffic


def unsharded_peak(model: DistributedModel) -> int:
    """The most elements of ``model`` that were unsharded, or on their way, at a time on this rank.

    0 for a model that is not sharded.
    """
    return model.sharding.unsharded_peak
