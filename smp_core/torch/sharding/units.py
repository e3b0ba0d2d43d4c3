"""The choice of units: the parameters that are gathered together.

A unit is to be large enough that an AllGather is worth its latency, and small enough that little is live
at a time. The tree of modules shows which parameters are used together:

* the children of a container are the layers of the model: each one is a unit, with all that is below it. Containers
  are ModuleList, ModuleDict, and Sequential, unless it is a chain of modules without children, which is a layer;
* other children of the root are units too, except those without children of their own (an embedding, a head),
  which go with the root's own parameters.

A unit of more elements than half of ``sdp_max_live_parameters`` is taken apart, first into the children of
its module, then into single parameters: so that one can be prefetched while another is used. The choice changes
no value: a parameter is sharded by itself (layout.py), and gathered when it is read (unsharding.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from smp_core.torch.reduction.layout import bins

#: Containers that are not called themselves.
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

#: (module whose call uses them, its parameters by full name)
Group = tuple[nn.Module, list[tuple[str, nn.Parameter]]]


def groups(root: nn.Module, sharded: Sequence[tuple[str, nn.Parameter]], most: int) -> list[Group]:
    """The units of ``root``, in the order of registration, each of one dtype.

    ``sharded`` are the parameters to be split, by first name; each is in one unit, that of its first
    name. ``most`` is ``sdp_max_live_parameters``.
    """
    limit = max(1, most // 2)
    found: list[Group] = []
    for module, path in _roots(root, "", dict(sharded), limit):
        own = [(name, each) for name, each in sharded if _nearest(name, path)]
        found.append((module, own))
    taken: set[str] = set()
    made: list[Group] = []
    for module, named in sorted(found, key=lambda group: -_depth(root, group[0])):
        left = [(name, each) for name, each in named if name not in taken]
        taken.update(name for name, _ in left)
        for dtype in dict.fromkeys(each.dtype for _, each in left):
            of_one = [(name, each) for name, each in left if each.dtype is dtype]
            for bin_ in bins([each.numel() for _, each in of_one], limit):
                made.append((module, [of_one[index] for index in bin_]))
    order = {name: index for index, (name, _) in enumerate(sharded)}
    return sorted(made, key=lambda group: order[group[1][0][0]])


def _roots(
    module: nn.Module, path: str, sharded: dict[str, nn.Parameter], limit: int
) -> Iterator[tuple[nn.Module, str]]:
    """The modules that units belong to, from the top: ``module`` itself, and those below it."""
    yield module, path
    container = isinstance(module, (*_LISTS, nn.Sequential))
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        size = sum(each.numel() for key, each in sharded.items() if _nearest(key, below))
        if not size:
            continue
        if size > limit or _holds_layers(child) or _lone(module):
            yield from _roots(child, below, sharded, limit)
        elif container or any(True for _ in child.children()):
            yield child, below


def _holds_layers(module: nn.Module) -> bool:
    if isinstance(module, nn.Sequential):
        return any(True for child in module.children() for _ in child.children())
    return isinstance(module, _LISTS)


def _lone(module: nn.Module) -> bool:
    """A wrapper: one child, and nothing of its own."""
    return len(list(module.children())) == 1 and not module._parameters


def _nearest(name: str, path: str) -> bool:
    return not path or name.startswith(f"{path}.")


def _depth(root: nn.Module, module: nn.Module) -> int:
    return next(
        (path.count(".") + bool(path) for path, each in root.named_modules() if each is module), 0
    )
