"""Default arguments of torch's that name the default group, in modules that a rank imports.

``group=dist.group.WORLD`` is evaluated when torch's module is imported. A launched script imports before it has a
group, so its default is None: the default group of the call. On a rank the group is there from the start. The default
would be the group of the run, and on `sim` of the rank, that imported the module first.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from torch.distributed import distributed_c10d as c10d

from smp_core.transport.stack_frames import is_plumbing

_class: Any = c10d._WorldMeta
_world: Any = vars(_class)["WORLD"]
_get: Any = _world.fget
_OPTIMIZED = inspect.CO_OPTIMIZED  # a flag that the code of a module's or class's body lacks


def _default_group(owner: Any) -> Any:
    code = sys._getframe(1).f_code
    if not code.co_flags & _OPTIMIZED and is_plumbing(code):
        return None
    return _get(owner)


@functools.cache
def install_import_defaults() -> None:
    """Have modules of torch see no default group while they are imported.

    The change is for good, and has no effect where there is no group.
    """
    _class.WORLD = property(_default_group, _world.fset)
