"""``smp.register_parameter``: a module uses a parameter that it does not own (AWS Sharded Data Parallelism).

Reads of a parameter as an attribute of any module of the model, such as ``self.layer1.weight``, need no registration.
A parameter in a list, a closure or another object of a module's own is read past the model, where only its shard is
visible. For a registered parameter, functions of torch get the unsharded one while the module is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from smp_core.errors import ArgumentTypeError
from smp_core.torch import session as sessions

REGISTERED = "_smp_registered"  #: attribute of a module: the parameters that it uses beside its own
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class Undivided(nn.Module):
    """The base of modules whose forward reads the parameters of modules below them: a partition does not divide one."""


def register_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that ``module`` uses ``parameter``, which another module of the model owns.

    Call it before or after the model is wrapped. Only sharded data parallelism needs it. Raises ArgumentTypeError if an
    argument is no module, or no parameter.
    """
    sessions.current("smp.register_parameter")
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            f"smp.register_parameter: module is a {type(module).__name__}, not a torch.nn.Module"
        )
    if not isinstance(parameter, nn.Parameter):
        raise ArgumentTypeError(
            f"smp.register_parameter: parameter is a {type(parameter).__name__}, not a "
            "torch.nn.Parameter"
        )
    known: list[nn.Parameter] = vars(module).setdefault(REGISTERED, [])
    if not any(each is parameter for each in known):
        known.append(parameter)


def entered(
    module: nn.Module, read: Callable[[nn.Parameter], nn.Parameter]
) -> AbstractContextManager[object]:
    """While entered, a call of ``module`` gets its registered parameters unsharded, by ``read``."""
    # At sharding degree 1, too: a registered parameter counts as read in the call at every degree, so sums have one
    # order.
    registered = vars(module).get(REGISTERED)
    return _Replacing(registered, read) if registered else _NOTHING


class _Replacing(TorchFunctionMode):
    def __init__(
        self, registered: list[nn.Parameter], read: Callable[[nn.Parameter], nn.Parameter]
    ) -> None:
        super().__init__()
        self._registered, self._read = {id(each) for each in registered}, read

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        args, kwargs = tree_map(self._whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _whole(self, value: object) -> object:
        if id(value) in self._registered and isinstance(value, nn.Parameter):
            return self._read(value)
        return value
