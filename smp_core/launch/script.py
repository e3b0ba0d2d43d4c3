"""A script in a process: SMP's names, the stand-in for ``torch.cuda``, its arguments, and its code as ``__main__``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from smp_core.launch.job import ScriptJob


@contextlib.contextmanager
def prepared(job: ScriptJob, devices: int) -> Iterator[None]:
    """While entered, this process is as the script expects it. With ``job.cpu`` it has so many GPUs, as it seems."""
    from smp_core.import_names import install_import_names, remove_import_names

    arguments, path = sys.argv, list(sys.path)
    with contextlib.ExitStack() as stack:
        install_import_names()
        stack.callback(remove_import_names)
        if job.cpu:
            from smp_core.torch import cuda_stand_in

            stack.enter_context(cuda_stand_in.installed(devices))
        sys.argv = [job.script, *job.arguments]
        sys.path.insert(0, str(Path(job.script).resolve().parent))
        try:
            yield
        finally:
            sys.argv, sys.path[:] = arguments, path


def namespace_of(script: str) -> dict[str, Any]:
    """The names that a script begins with."""
    return {
        "__name__": "__main__",
        "__file__": os.path.abspath(script),
        "__doc__": None,
        "__package__": None,
        "__spec__": None,
        "__loader__": None,
        "__builtins__": __builtins__,
    }


def below(trace: TracebackType | None, code: CodeType | None) -> TracebackType | None:
    """The part of a traceback from the script's own frame on; the whole one if it has no such frame."""
    part = trace
    while part is not None and part.tb_frame.f_code is not code:
        part = part.tb_next
    return part or trace
