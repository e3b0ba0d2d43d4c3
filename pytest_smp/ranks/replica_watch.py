"""Digests that each rank records of parameters and gradients after each optimizer's step.

Ranks do not communicate for it: the controller compares the records when the run has ended (pytest_smp/replicas.py),
so ranks with different numbers of steps neither hang nor disturb what the test communicates.
"""

from __future__ import annotations

import functools
import hashlib
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from pytest_smp.ranks.protocols import RecordingRank
from smp_core.topology import GroupKind

#: The record of a rank's digests, and that of the steps that it has made (protocols.RecordingRank).
REPLICAS, STEPS = "replicas", "steps"

_MOST_BYTES = 1 << 20  # of values that a rank keeps beside their digests


class Digest(NamedTuple):
    """One tensor, or generator, of one rank at one step.

    Attributes:
        members: the ranks that must have an equal one, in the world.
        optimizer: the optimizer's name.
        step: its steps so far.
        what: the kind and the name, such as ``gradient of 1.weight``.
        digest: of its bytes.
        dtype: its name in torch; empty for generators.
        shape: its shape.
        data: its bytes; empty if they are not kept.
    """

    members: tuple[int, ...]
    optimizer: str
    step: int
    what: str
    digest: bytes
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data: bytes = b""


class Watched(NamedTuple):
    """A module whose ranks must be equal. ``ignored``: names of parameters that need not be."""

    module: weakref.ref[nn.Module]
    members: tuple[int, ...]
    ignored: frozenset[str] = frozenset()
    buffers: bool = False
    generators: bool = False


#: The name and the number of a step, for members.
StepOf = Callable[[tuple[int, ...]], tuple[str, int]]


class ReplicaWatch:
    """One rank's watch, from the start of its body to the end."""

    def __init__(self, rank: RecordingRank) -> None:
        self._rank = rank
        self._digests: list[Digest] = []
        self._steps: dict[tuple[str, tuple[int, ...]], int] = {}  # by optimizer's name and members
        rank.records[REPLICAS], rank.records[STEPS] = self._digests, self._steps
        self._left = _MOST_BYTES
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._watched: list[Watched] = []
        # An optimizer's name and steps, by the members that it has parameters of.
        self._optimizers: weakref.WeakKeyDictionary[
            Optimizer, dict[tuple[int, ...], tuple[str, int]]
        ] = weakref.WeakKeyDictionary()
        self._counts: dict[tuple[str, tuple[int, ...]], int] = {}
        self._due: list[tuple[str, int, Watched]] = []  # parameters that the next look takes

    def __enter__(self) -> ReplicaWatch:
        self._handles = [
            register_module_forward_pre_hook(self._before_forward),
            register_optimizer_step_post_hook(self._after_step),
        ]
        _watches[id(self._rank)] = self
        return self

    def __exit__(self, *_: object) -> None:
        del _watches[id(self._rank)]
        for handle in self._handles:
            handle.remove()
        self._take_due()

    def watch(self, watched: Watched) -> None:
        """Compare a module at each step of an optimizer from now on."""
        self._watched.append(watched)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if module not in self._seen:  # called first, so nobody's part
            self._take_due()
            self._seen.update(module.modules())
            self._roots.add(module)
            for part in module.modules():
                if isinstance(part, DistributedDataParallel) and not part._comm_hooks:
                    members = tuple(dist.get_process_group_ranks(part.process_group))
                    ignored = frozenset(part.parameters_to_ignore)
                    self._watched.append(Watched(weakref.ref(part.module), members, ignored))
        elif module in self._roots:
            self._take_due()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._take_due()
        parameters = {
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        step = functools.cache(functools.partial(self._count_step, optimizer))
        for watched in self._watched:
            module = watched.module()
            if module is not None and any(id(each) in parameters for each in module.parameters()):
                name, number = step(watched.members)
                if _joins(module, self._roots):
                    self._steps.pop((name, watched.members), None)
                else:
                    self._steps[name, watched.members] = number
                self._take(name, number, watched, parameters)
        for root in self._roots:
            self._take_distributed(step, root, parameters)
        self._take_engine(step, optimizer)

    def _count_step(self, optimizer: Optimizer, members: tuple[int, ...]) -> tuple[str, int]:
        """Count a step of an optimizer that has parameters of these members; its name, and the step's number.

        Optimizers of a class are numbered among those of the same members: a rank may have others of its own.
        """
        steps = self._optimizers.setdefault(optimizer, {})
        if members not in steps:
            kind = type(optimizer).__name__
            nth = self._counts[kind, members] = self._counts.get((kind, members), 0) + 1
            steps[members] = kind if nth == 1 else f"{kind} number {nth}", 0
        name, number = steps[members]
        steps[members] = name, number + 1
        return steps[members]

    def _take(self, optimizer: str, step: int, watched: Watched, parameters: set[int]) -> None:
        """Record a module's parameters that the optimizer has, and their gradients."""
        module = watched.module()
        assert module is not None
        named = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if id(parameter) in parameters
            and name not in watched.ignored
            and not isinstance(parameter, DTensor)
        ]
        key = watched.members, optimizer, step
        for name, parameter in named:
            if parameter.grad is not None:
                self._add(*key, f"gradient of {name}", parameter.grad)
        for name, parameter in named:
            self._add(*key, f"parameter {name}", parameter)
        for name, buffer in module.named_buffers() if watched.buffers else ():
            self._add(*key, f"buffer {name}", buffer)
        if watched.generators:
            for what, state in _generators():
                self._digests.append(
                    Digest(*key, f"the generator of {what}", _digest(repr(state).encode()))
                )

    def _take_distributed(self, step: StepOf, root: nn.Module, parameters: set[int]) -> None:
        """Record what DTensors say is replicated: their local parts, among the ranks that hold the same part."""
        named = [
            (name, parameter)
            for name, parameter in root.named_parameters()
            if isinstance(parameter, DTensor) and id(parameter) in parameters
        ]
        pairs = [(f"gradient of {name}", parameter.grad) for name, parameter in named]
        pairs += [(f"parameter {name}", parameter.data) for name, parameter in named]
        for what, tensor in pairs:
            members = _holders(tensor) if isinstance(tensor, DTensor) else ()
            if len(members) > 1:
                self._add(members, *step(members), what, tensor.to_local())  # type: ignore[union-attr]

    def _take_engine(self, step: StepOf, optimizer: Optimizer) -> None:
        """Note that the reference engine's replicas are due: its own step goes on after the optimizer's."""
        runtime = self._rank.runtime
        session = getattr(runtime, "training", None)
        if session is None or session.model is None or session.optimizer is None:
            return
        mine = getattr(session.optimizer, "optimizer", None) is optimizer
        topology, rank = runtime.topology, self._rank.rank
        if mine and runtime.config.ddp and topology.sharding == 1:
            members = topology.group(GroupKind.RDP, rank)
            self._due.append((*step(members), Watched(weakref.ref(session.model), members)))

    def _take_due(self) -> None:
        due, self._due = self._due, []
        for name, step, watched in due:
            module = watched.module()
            for parameter_name, parameter in () if module is None else module.named_parameters():
                if parameter.device.type != "meta":
                    what = f"parameter {parameter_name}"
                    self._add(watched.members, name, step, what, parameter)

    def _add(
        self, members: Sequence[int], optimizer: str, step: int, what: str, tensor: torch.Tensor
    ) -> None:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return
        values = tensor.detach().cpu().contiguous().reshape(-1)
        data = values.view(torch.uint8).numpy().tobytes()
        digest = _digest(data)
        dtype = str(tensor.dtype).removeprefix("torch.")
        kept = data if len(data) <= self._left else b""
        self._left -= len(kept)
        shape = tuple(tensor.shape)
        self._digests.append(
            Digest(tuple(members), optimizer, step, what, digest, dtype, shape, kept)
        )


_watches: dict[int, ReplicaWatch] = {}


def watch_of(rank: object) -> ReplicaWatch | None:
    """The watch of a rank, in a run that compares replicas."""
    return _watches.get(id(rank))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _generators() -> Iterable[tuple[str, Any]]:
    return (
        ("torch", torch.get_rng_state().tolist()),
        ("random", random.getstate()),
        ("numpy", [numpy.asarray(part).tolist() for part in numpy.random.get_state()]),
    )


def _joins(module: nn.Module, roots: Iterable[nn.Module]) -> bool:
    """Return whether a DDP module is in a ``join()``, in which ranks may make fewer steps."""
    return any(
        isinstance(part, DistributedDataParallel)
        and part.module is module
        and part._join_config.enable
        for root in roots
        for part in root.modules()
    )


def _holders(tensor: DTensor) -> tuple[int, ...]:
    """The ranks that hold the same part of a DTensor as this one; none if it is a part of a sum."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in tensor.placements):
        return ()
    index = tuple(
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(tensor.placements, coordinate, strict=True)
    )
    return tuple(mesh.mesh[index].reshape(-1).tolist())


def digests(records: Sequence[Any]) -> Iterator[Digest]:
    """The digests that a rank has recorded."""
    return (Digest(*record) for record in records)
