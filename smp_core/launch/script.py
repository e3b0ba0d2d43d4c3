"""A script in a process: SMP's names, the stand-in for ``torch.cuda``, its arguments, and its code as ``__main__``."""

from __future__ import annotations

import builtins
import contextlib
import os
import sys
from types import CodeType, TracebackType
from typing import Any

from smp_core.launch import children
from smp_core.launch.job import ScriptJob


def prepare(job: ScriptJob, devices: int) -> contextlib.ExitStack:
    """Make this process, and children that it starts, as the script expects them.

    With the stand-in for ``torch.cuda`` they seem to have so many GPUs.

    The result undoes it when it is closed. Nothing happens if it is forgotten: what is registered for the end of a
    process may need SMP's names.
    """
    from smp_core.import_names import install_import_names, remove_import_names

    with contextlib.ExitStack() as stack:
        # Before the names, which are refused where the script's folders have another smdistributed.
        stack.callback(_set_path, sys.argv, list(sys.path))
        if job.folder:
            stack.callback(os.chdir, os.getcwd())
            os.chdir(job.folder)
        _set_path([job.script, *job.arguments], [*job.folders(), *sys.path])
        install_import_names()
        stack.callback(remove_import_names)
        shown = devices if job.cpu or (job.cpu is None and not _has_gpus()) else None
        stack.callback(children.prepare_children(shown))
        if shown is not None:
            from smp_core.torch import cuda_stand_in

            cuda_stand_in.install(shown)
            stack.callback(cuda_stand_in.remove)
        return stack.pop_all()


def _has_gpus() -> bool:
    import torch

    return torch.cuda.is_available()


def _set_path(arguments: list[str], path: list[str]) -> None:
    sys.argv, sys.path[:] = arguments, path


def exit_code(said: object) -> int:
    """The exit code of a process for the argument of ``sys.exit``: never 0 for anything but 0 and None."""
    if said is None:
        return 0
    if isinstance(said, int):
        return said & 0xFF or int(said != 0)
    return 1


def namespace_of(script: str) -> dict[str, Any]:
    """The names that a script begins with."""
    return {
        "__name__": "__main__",
        "__file__": os.path.abspath(script),
        "__doc__": None,
        "__package__": None,
        "__spec__": None,
        "__loader__": None,
        "__builtins__": builtins,
    }


def below(trace: TracebackType | None, code: CodeType | None) -> TracebackType | None:
    """The part of a traceback from the script's own frame on; the whole one if it has no such frame."""
    part = trace
    while part is not None and part.tb_frame.f_code is not code:
        part = part.tb_next
    return part or trace
