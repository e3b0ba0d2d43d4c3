"""The bytes that one rank holds for training, by kind, counted at each event of a step.

::

    with memory.Recorder() as recorder:  # on any rank, at any degree; no communication
        train_step(model, batch)
        optimizer.step()
    recorder.samples[-1].bytes["gradients"]
    recorder.peak()

The recorder counts storages: each once, whole, with its padding, until a weak reference shows that it is freed.
Nothing is estimated, so memory that the engine fails to free is counted. A storage of several kinds counts as the first
of them:

=============== ==============================================================================
parameters      ``p.data``, for a sharded parameter the shard with its padding; buffers
masters         the float32 values of 16-bit parameters, or the owned ranges of shard_optimizer_state
optimizer       the tensors of the optimizer's state
gradients       ``p.grad``, that of masters, sums of microbatches and of steps of accumulation
gathered        unsharded parameters
activations     tensors that autograd, or an activation checkpoint, has saved for backward
exchanged       the buffers that collectives send from and receive into
=============== ==============================================================================

Temporaries inside an operator or a module, inputs and outputs that autograd does not need, copies of a backend's own
and Python's objects are not counted.

The events are ``begin`` (of the recorder), ``call`` (a module call has ended), ``gathered`` and ``released`` (a unit,
by its first parameter), ``gradient`` (one contribution of a call), ``sent`` (a bucket of gradients), ``reduced`` or,
within a window of accumulation, ``accumulated`` (the end of a step), ``update`` (by the optimizer) and ``end``. A
sample is taken right after its event.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from smp_core.torch import session as sessions
from smp_core.torch.execution import activity as activities
from smp_core.torch.execution import counted, saving
from smp_core.torch.execution.counted import (
    ACTIVATIONS,
    GRADIENTS,
    KINDS,
    MASTERS,
    OPTIMIZER,
    PARAMETERS,
)
from smp_core.torch.parameters import foreign

#: The kinds of memory that sharded data parallelism splits (AWS Sharded Data Parallelism (Introduction)).
STATE = (PARAMETERS, MASTERS, OPTIMIZER, GRADIENTS)


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """The bytes that the rank holds after an event.

    Attributes:
        event: its name, from the list above.
        what: the subject of the event, such as a module path.
        phase: ``F`` or ``B`` in a step, else empty.
        step: the number of steps that have begun on the rank.
        bytes: by kind, for all of ``counted.KINDS``.
    """

    event: str
    what: str
    phase: str
    step: int
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """The bytes of all kinds."""
        return sum(self.bytes.values())

    @property
    def state(self) -> int:
        """The bytes of parameters, masters, gradients and optimizer state."""
        return sum(self.bytes[kind] for kind in STATE)


class Recorder:
    """While entered, counts the memory of the rank that enters it. Of several recorders the innermost one counts.

    ``samples`` are in the order of events. Raises NotInitializedError before ``smp.init``.
    """

    def __init__(self) -> None:
        self._session = sessions.current("memory.Recorder")
        self.samples: list[Sample] = []
        self._held: dict[int, tuple[Any, int, str]] = {}  # weak reference, bytes, kind
        self._saved: weakref.WeakSet[counted.Saved] = weakref.WeakSet()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        token = counted.current.set(self)
        self._stack.callback(counted.current.reset, token)
        # For eager calls. Bodies of steps enter the hooks in their own threads (execution/server.py).
        self._stack.enter_context(saving.counting())
        optimizer = self._session.optimizer
        if optimizer is not None:
            hook = optimizer.optimizer.register_step_post_hook(self._updated)
            self._stack.callback(hook.remove)
        self.sample("begin")
        return self

    def __exit__(self, *_: object) -> None:
        self.sample("end")
        self._stack.close()

    def _updated(self, *_: object) -> None:
        self.sample("update")

    def peak(self, *kinds: str) -> int:
        """The highest sum of the bytes of these kinds, by default of all, in any sample."""
        chosen = kinds or KINDS
        return max(sum(each.bytes[kind] for kind in chosen) for each in self.samples)

    def sample(self, event: str, what: str = "") -> Sample:
        """Count now, and append the sample."""
        activity = activities.current()
        phase = "" if activity is None else activity.phase.value
        taken = Sample(event, what, phase, self._session.steps, self._count())
        self.samples.append(taken)
        return taken

    def holds(self, kind: str, tensor: torch.Tensor) -> None:
        """Count a tensor's memory as of this kind, until the memory is freed."""
        for storage in _storages(tensor):
            known = self._held.get(storage._cdata)
            if known is None or known[0].expired() or KINDS.index(kind) < KINDS.index(known[2]):
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._held[storage._cdata] = reference, storage.nbytes(), kind

    def saved(self, value: counted.Saved) -> None:
        """Count ``value.tensor`` as an activation while autograd keeps ``value``."""
        self._saved.add(value)

    def _count(self) -> dict[str, int]:
        found = dict.fromkeys(KINDS, 0)
        seen: set[int] = set()
        self._held = {key: each for key, each in self._held.items() if not each[0].expired()}
        owned = dict(_state(self._session))
        owned[ACTIVATIONS] = [value.tensor for value in list(self._saved)]
        for kind in KINDS:
            for tensor in owned.get(kind, ()):
                for storage in _storages(tensor):
                    if storage._cdata not in seen:
                        seen.add(storage._cdata)
                        found[kind] += storage.nbytes()
            for key, (_, size, of) in self._held.items():
                if of == kind and key not in seen:
                    seen.add(key)
                    found[kind] += size
        return found


def _state(session: sessions.TrainingSession) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """The tensors that the rank keeps between steps, by kind."""
    model, optimizer = session.model, session.optimizer
    grads: list[torch.Tensor | None] = []
    if model is not None:
        own: list[torch.Tensor] = []
        for module in model.get_module().modules():
            # The dicts themselves: a read of a parameter in a call would unshard it.
            for registry in (module._parameters, module._buffers):
                tensors: Iterable[Any] = dict.values(registry)
                for tensor in tensors:
                    if tensor is not None and not foreign.is_foreign(tensor):
                        own.append(tensor)
                        grads.append(tensor.grad if isinstance(tensor, nn.Parameter) else None)
        yield PARAMETERS, own
        masters = [] if model.masters is None else [each for _, _, each in model.masters.known()]
        yield MASTERS, list(masters)
        grads += [each.grad for each in masters]
        if model.gradients is not None:
            grads += model.gradients.pending()
    yield GRADIENTS, [each for each in grads if each is not None]
    if optimizer is not None:
        yield OPTIMIZER, list(_tensors(optimizer.optimizer.state.values()))


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """All tensors of a state, at any depth."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple | set):
            yield from _tensors(value)


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages of a tensor."""
    if tensor.device.type == "meta":
        return
    if tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout is torch.sparse_coo:
        for part in (tensor._indices(), tensor._values()):
            yield part.untyped_storage()
