"""What a thread of torch's is set to, taken over by the worker that goes on with its work: recording of
gradients, inference mode, autocast, default device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class Modes(NamedTuple):
    """As :func:`current` found them. Picklable."""

    grad: bool
    inference: bool
    autocast: tuple[bool, torch.dtype, bool]  # enabled, dtype, whether casts are cached
    device: torch.device | None  # of torch.set_default_device


def current() -> Modes:
    """Those of the calling thread."""
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
    """While entered, the calling thread is set to these. Enters only what differs: most often nothing."""
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
