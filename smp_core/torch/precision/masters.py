"""Masters: the tensors that the optimizer works on in place of parameters.

In a 16-bit run the master of a 16-bit parameter is a float32 copy of it, and gradients go there without
ever being rounded to 16 bits; after an update the parameter is its master, rounded to nearest even. With
``shard_optimizer_state`` a master is this rank's own part of the parameter, flat, and after an update
the parts of all ranks make the parameter again. A parameter that needs neither is its own master.

A master takes on whatever ``p.data`` is when it is made, so with sharded parameters it is a shard::

    masters = model.masters                # None where every parameter is its own master
    master = masters.of(parameter)         # made when first asked for
    masters.deposit(parameter, gradient)   # adds to master.grad
    masters.publish()                      # after an update: parameters from masters

A parameter that is changed in place, as by ``load_state_dict`` or under ``torch.no_grad()``, takes
precedence: its master takes the new value over before the next update (``sync``). A value written past
torch's version counter (``p.data.mul_(...)``) is not seen, and is overwritten.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from smp_core.torch.precision.scaler import LossScaler

Deposit = Callable[[nn.Parameter, torch.Tensor], None]


class Parts(Protocol):
    """The split of masters over ranks (optimizer/parts.py)."""

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a tensor, flat; memory of the tensor where possible."""

    def gather(self, parameters: Iterable[nn.Parameter], own: Iterable[torch.Tensor]) -> None:
        """Collective: give parameters the values of the ranks' own parts of them."""


@dataclasses.dataclass(slots=True, eq=False)
class _Entry:
    master: nn.Parameter
    version: int  # of the parameter, when the two agreed


class Masters:
    """The masters of one rank's parameters.

    Args:
        dtype: the 16-bit dtype of the run, or None.
        parts: the split of masters over ranks, or None: each master has all elements of ``p.data``.

    ``scaler`` is the loss scaler of an fp16 run once there is an optimizer, and ``optimized`` gives the tensors in
    the optimizer's groups. Those masters change, have state, and are published. A master outside of the groups,
    which was only asked for, on some of the ranks perhaps, is a copy, and no rank waits for it.
    """

    def __init__(self, dtype: torch.dtype | None, parts: Parts | None = None) -> None:
        self.dtype, self.parts = dtype, parts
        self.scaler: LossScaler | None = None
        self.optimized: Callable[[], Iterable[torch.Tensor]] = tuple
        self._names: dict[nn.Parameter, str] = {}
        self._entries: dict[nn.Parameter, _Entry] = {}
        # No longer in the model, but in the optimizer still, with their state.
        self._replaced: list[nn.Parameter] = []
        self._unscaled: set[nn.Parameter] = (
            set()
        )  # masters whose gradients are divided by the scale

    @property
    def loss_scale(self) -> float:
        """The factor on losses: 1 without fp16."""
        return 1.0 if self.scaler is None else self.scaler.loss_scale

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take these as the rank's own parameters: by name, each once, in the model's order.

        A parameter that has left the model, as one that was replaced, keeps its master for as long as the
        optimizer holds that: as in plain torch it is not trained any more, and keeps its index and state.
        """
        before = [*self._names, *self._replaced]
        self._names = {parameter: name for name, parameter in parameters.items()}
        held, self._replaced = self._held(), []
        for parameter in before:
            if parameter in self._names or parameter not in self._entries:
                continue
            if self._entries[parameter].master in held:
                self._replaced.append(parameter)
            else:
                self._unscaled.discard(self._entries.pop(parameter).master)

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter's master; itself, if it needs none: float32, frozen, or none of the model's."""
        entry = self._entries.get(parameter)
        if entry is None:
            if not self._needed(parameter):
                return parameter
            entry = self._entries[parameter] = _Entry(self._made(parameter), parameter._version)
        return entry.master

    def made(self, parameter: nn.Parameter) -> nn.Parameter:
        """The master of a parameter; the parameter itself if none was made yet. See :meth:`of`, which makes one."""
        entry = self._entries.get(parameter)
        return parameter if entry is None else entry.master

    def _needed(self, parameter: nn.Parameter) -> bool:
        return (
            parameter in self._names
            and parameter.requires_grad
            and not is_lazy(parameter)
            and (self.parts is not None or parameter.dtype == self.dtype)
        )

    def _made(self, parameter: nn.Parameter) -> nn.Parameter:
        master = nn.Parameter(self._wide(self._own(parameter.detach()), parameter).clone())
        # Marks of the user's, by which optimizers group or treat parameters.
        vars(master).update(
            (name, value)
            for name, value in vars(parameter).items()
            if not name.startswith("_smp") and name != "ds_tensor"
        )
        return master

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.parts is None else self.parts.own(tensor)

    def _wide(self, tensor: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        return tensor.to(torch.float32) if parameter.dtype == self.dtype else tensor

    def known(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """(name, parameter, master) of the masters that there are, in the order of the parameters."""
        for parameter, name in self._names.items():
            if parameter in self._entries:
                yield name, parameter, self._entries[parameter].master

    def pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """(parameter, master) of those that the optimizer holds, in the order of the parameters; those that
        have left the model come last. The same ones on all ranks, as far as their optimizers are.
        """
        held = self._held()
        for parameter in (*self._names, *self._replaced):
            if parameter in self._entries and self._entries[parameter].master in held:
                yield parameter, self._entries[parameter].master

    def named(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """The triples (name, parameter, master) of :meth:`pairs` in the model, which a state consists of."""
        for parameter, master in self.pairs():
            if parameter in self._names:
                yield self._names[parameter], parameter, master

    def _held(self) -> set[torch.Tensor]:
        return set(self.optimized())

    # Gradients.

    def deposit(self, parameter: nn.Parameter, gradient: torch.Tensor, add: Deposit) -> None:
        """Add a gradient of the whole ``p.data``, scaled as the loss was, to the master's, by ``add``.

        The gradient is in the dtype of the master. Of split masters in a run without 16 bits the
        parameter has the whole gradient, as a script expects, and the master a view of its part.
        """
        master = self.of(parameter)
        if self.parts is not None and parameter.dtype != self.dtype:
            # Row-major, so that a part is a view: scaling or clipping either gradient changes both.
            add(parameter, gradient if gradient.is_sparse else gradient.contiguous())
            self._view(parameter, master)
            return
        if master is not parameter:
            gradient = self._own(gradient)
        if master.grad is None:
            self._unscaled.discard(master)
        elif (
            master in self._unscaled
        ):  # the gradient that is there was divided by the scale already
            gradient = gradient * (1 / self.loss_scale)
        add(master, gradient)
        if master is not parameter:
            for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
                hook(master)

    def _view(self, parameter: nn.Parameter, master: nn.Parameter) -> None:
        """Let a split master's gradient be its part of the parameter's."""
        whole = parameter.grad
        master.grad = None if whole is None else self._own(whole.detach())

    def take_scale(self, targets: Sequence[nn.Parameter], scale: float) -> float:
        """The factor that these gradients are too large by: ``scale``, or 1. The caller divides them by the factor,
        in one multiplication with any other factor of its own; the gradients count as unscaled from now on.

        Where some are unscaled already, as after an update without ``zero_grad``, the others are unscaled here.
        """
        scaled = [each for each in targets if each not in self._unscaled]
        self._unscaled.update(targets)
        if len(scaled) == len(targets):
            return scale
        multiply(scaled, 1 / scale)
        return 1.0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all masters, and of their parameters."""
        self._unscaled.clear()
        for parameter, entry in self._entries.items():
            for each in (parameter, entry.master):
                if each.grad is not None and set_to_none:
                    each.grad = None
                elif each.grad is not None:
                    if each.grad.grad_fn is not None:  # as torch's own; a view cannot be detached
                        each.grad.detach_()
                    each.grad.zero_()

    # Values.

    def sync(self) -> None:
        """Before an update: take over the values that parameters were given since the last one."""
        for parameter, entry in self._entries.items():
            if parameter._version != entry.version:
                self._adopt(parameter, entry)
            if self.parts is not None and parameter.dtype != self.dtype:
                self._view(parameter, entry.master)

    def adopt(self) -> None:
        """Take over the values that a load of the model's state gave to parameters. The other parameters' masters
        keep the bits that 16 bits do not hold. Values written past torch's version counter are found by comparison.
        """
        for parameter, entry in self._entries.items():
            if parameter._version != entry.version or not self._agree(parameter, entry.master):
                self._adopt(parameter, entry)

    def _agree(self, parameter: nn.Parameter, master: nn.Parameter) -> bool:
        """Return whether the parameter is its master, rounded."""
        rounded, own = master.detach().to(parameter.dtype), self._own(parameter.detach())
        return rounded.shape == own.shape and torch.equal(rounded, own)

    def agreed(self) -> None:
        """Parameters and masters were both given their values: neither is to be taken over."""
        for parameter, entry in self._entries.items():
            entry.version = parameter._version

    def _adopt(self, parameter: nn.Parameter, entry: _Entry) -> None:
        value = self._wide(self._own(parameter.detach()), parameter)
        with torch.no_grad():
            if entry.master.shape == value.shape:
                entry.master.copy_(value)
            else:
                entry.master.data = value.clone()
        entry.version = parameter._version

    @torch.no_grad()
    def publish(self) -> None:
        """After an update: give parameters the values of the masters that the optimizer holds, rounded to
        nearest even. Collective over the ranks that masters are split over.
        """
        pairs = list(self.pairs())
        if self.parts is None:
            for parameter, master in pairs:
                parameter.copy_(master)
        else:
            # Rounded first: half the bytes are sent, and the bits are the same.
            rounded = [master.detach().to(each.dtype) for each, master in pairs]
            self.parts.gather([each for each, _ in pairs], rounded)
        self.agreed()

    # State.

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The masters that the optimizer holds, by name of the parameter; the returned tensors share memory with
        them.
        """
        self.sync()
        return {name: master.detach() for name, _, master in self.named()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the values of masters from a :meth:`state_dict`, in the shapes that they have here, and publish
        them. A master that the state does not name keeps its value.

        Masters that are split are not published: ranks may load at different times. Parameters are then
        expected to have been loaded, too; the next update makes them equal to their masters in any case.
        """
        self.sync()
        with torch.no_grad():
            for name, _, master in self.named():
                if name in state:
                    master.copy_(state[name])
        if self.parts is None:
            self.publish()

    def moved(self, parameter: nn.Parameter, state: object) -> object:
        """An optimizer's state of a parameter, moved to its master: tensors of the parameter's shape are cut
        to this rank's part, and are float32 where they were 16-bit. Other state, as a step counter, is unchanged.
        """
        if not isinstance(state, Mapping):
            return state
        moved = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dtype == self.dtype:
                value = value.to(torch.float32)
            if self.parts is not None and is_elementwise(key, value, parameter.shape):
                value = self._own(value).clone()
            moved[key] = value
        return moved


#: Keys that torch's optimizers keep once for each parameter: the value is like a tensor without dimensions.
_SCALARS = frozenset({"step", "mu_product", "eta", "mu"})


def is_elementwise(key: object, value: object, shape: torch.Size | tuple[int, ...]) -> bool:
    """Return whether an optimizer's state has a value for each element of a parameter of this shape."""
    return isinstance(value, torch.Tensor) and value.shape == shape and key not in _SCALARS


def multiply(targets: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply gradients in place: one rounding each."""
    if factor != 1:
        for target in targets:
            if target.grad is not None:
                target.grad.mul_(factor)
