"""Views of a module in the places of SMP's wrappers, for scripts that reach the module through them."""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import nn


def _of_module(operation: Callable[..., object]) -> Callable[..., object]:
    """The special method of a view that does this with the module."""
    return lambda view, *args, **kwargs: operation(view._smp_module, *args, **kwargs)


class ModuleView:
    """A stand-in for a wrapper of a module: it has the module as ``module``, and is like the module in all else.

    Reads, writes, calls, items and ``isinstance`` go to the module; the two are equal, and copies and pickles of a view
    are those of the module. The module does not know of its views, so no cycle of references arises.
    """

    __slots__ = ("__weakref__", "_smp_module")

    _smp_module: nn.Module
    __class__ = property(operator.attrgetter("_smp_module.__class__"))

    def __init__(self, module: nn.Module) -> None:
        object.__setattr__(self, "_smp_module", module)

    @property
    def module(self) -> nn.Module:
        """The module, or the next view."""
        return self._smp_module


_METHODS: dict[str, Callable[..., object]] = {
    "__getattr__": getattr,
    "__setattr__": setattr,
    "__delattr__": delattr,
    "__dir__": lambda module: [*dir(module), "module"],
    "__call__": operator.call,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
    "__contains__": operator.contains,
    "__len__": len,
    "__iter__": iter,
    "__bool__": bool,
    "__eq__": operator.eq,
    "__hash__": hash,
    "__repr__": repr,
    "__reduce_ex__": lambda module, protocol: module.__reduce_ex__(protocol),
}
for _name, _operation in _METHODS.items():
    setattr(ModuleView, _name, _of_module(_operation))
