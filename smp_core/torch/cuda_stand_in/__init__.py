"""A stand-in for ``torch.cuda`` on a machine without GPUs: scripts written for GPUs train on the CPU as they are.

The stand-in is off until it is installed, and only the script and the libraries that it uses see it: torch and our own
packages decide by the truth. docs/cuda_stand_in.md says what each name answers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from smp_core.torch.cuda_stand_in import answers, names, requests
from smp_core.torch.cuda_stand_in.views import shown
from smp_core.torch.exceptions import StandInError
from smp_core.transport import torch_parts

_lock = threading.Lock()
_users = 0
_undo = contextlib.ExitStack()


def _patch(stack: contextlib.ExitStack) -> None:
    for owner, name, wrap in requests.METHODS:
        stack.enter_context(requests.replaced(owner, name, wrap))
    stack.enter_context(requests.moving_lazy_parameters())
    stack.enter_context(requests.loading())
    stack.enter_context(requests.late_parts())
    factories = {(module, name) for module, name in names.factories()}
    for module, shown_names in list(names.views()):
        passed_on = {name: names.PASSING_ON for name in shown_names if (module, name) in factories}
        stack.enter_context(shown(module, shown_names, passed_on))


def install(devices: int) -> None:
    """Show a script ``devices`` CUDA devices, all of which are the CPU.

    Every call needs a ``remove``: ranks that are threads of one process install for themselves, and the last one
    removes. Raises StandInError where there are GPUs, or where another number of devices is installed.
    """
    global _users
    if type(devices) is not int or devices < 1:
        raise StandInError(
            f"cuda_stand_in.install: devices={devices!r}, and must be an int of at least 1"
        )
    torch_parts.require("the CUDA stand-in")
    with _lock:
        if torch.cuda.is_available():
            raise StandInError(
                f"cuda_stand_in.install: this machine has {torch.cuda.device_count()} GPUs, so nothing stands in for "
                "torch.cuda. Models train on the CPU, so hide the GPUs: CUDA_VISIBLE_DEVICES= smp-run --cpu"
            )
        if _users and answers.count != devices:
            raise StandInError(
                f"cuda_stand_in.install: devices={devices}, and {answers.count} are installed in this process. Give "
                "every rank of a host the same number"
            )
        if not _users:
            with contextlib.ExitStack() as stack:
                answers.count, answers.current_index = devices, 0
                _patch(stack)
                _undo.push(stack.pop_all())
        _users += 1


def remove() -> None:
    """Undo one ``install``; the last one gives torch everything back. Raises StandInError if nothing is installed."""
    global _users
    with _lock:
        if not _users:
            raise StandInError("cuda_stand_in.remove: nothing is installed in this process")
        _users -= 1
        if not _users:
            _undo.close()
            answers.current_index = 0


@contextlib.contextmanager
def installed(devices: int) -> Iterator[None]:
    """While entered, the stand-in is installed."""
    install(devices)
    try:
        yield
    finally:
        remove()
