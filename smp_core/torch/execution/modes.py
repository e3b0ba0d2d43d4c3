"""Torch's modes of a thread, which travel to the thread that continues its work: recording of gradients, inference
mode, autocast, default device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class Modes(NamedTuple):
    """The modes of one thread, picklable."""

    grad: bool
    inference: bool
    autocast: tuple[bool, torch.dtype, bool]  # enabled, dtype, whether casts are cached
    device: torch.device | None  # of torch.set_default_device


def current() -> Modes:
    """The modes of the calling thread."""
    context: Any = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return Modes(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        None if context is None else context.device,
    )


@contextlib.contextmanager
def entered(modes: Modes) -> Iterator[None]:
    """Set the calling thread to these modes while entered. Only modes that differ cost anything."""
    now = current()
    with contextlib.ExitStack() as stack:
        if modes.inference != now.inference:
            stack.enter_context(torch.inference_mode(modes.inference))
        if modes.grad != torch.is_grad_enabled():
            stack.enter_context(torch.set_grad_enabled(modes.grad))
        if modes.autocast != now.autocast:
            enabled, dtype, cache = modes.autocast
            stack.enter_context(
                torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache)
            )
        if modes.device != now.device and modes.device is not None:
            stack.enter_context(modes.device)
        yield
