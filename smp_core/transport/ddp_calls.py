"""The tensors of DDP's own calls, in words: a rank that waits for a bucket reads only a shape otherwise."""

from __future__ import annotations

import functools
import os
import types

import torch

from smp_core.transport.stack_frames import FRONT_DOOR, is_own_code, is_plumbing

_BUCKET = "DDP's bucket"
#: By the function of torch's that calls, or below which C++ code does; read in torch 2.13.
_TENSORS = {
    "_engine_run_backward": _BUCKET,  # the reducer, in hooks of gradients
    "_match_all_reduce_for_bwd_pass": _BUCKET,  # of a rank that has no more inputs, in Join
    "_pre_forward": "the order of DDP's buckets",
    "_distributed_broadcast_coalesced": "DDP's buffers",
}
_HOOKS = os.path.join("algorithms", "ddp_comm_hooks", "")


def ddp_tensor(frame: types.FrameType | None, operation: str, dtype: torch.dtype) -> str:
    """Return the tensor of a collective that DDP makes on its own account, or "" for another collective.

    ``frame``: the caller's of the process group.
    """
    while frame is not None and (
        is_own_code(frame.f_code) or frame.f_code.co_filename.endswith(FRONT_DOOR)
    ):
        frame = frame.f_back
    if frame is None or not is_plumbing(frame.f_code):
        return ""
    tensor = _tensor_of(frame.f_code.co_filename, frame.f_code.co_name)
    # Below autograd there is more: C++ functions that do not reduce, and DDP's map of used parameters.
    if tensor == _BUCKET and (operation != "all_reduce" or dtype is torch.int32):
        return ""
    return tensor


@functools.lru_cache(maxsize=1024)
def _tensor_of(filename: str, function: str) -> str:
    return _BUCKET if _HOOKS in filename else _TENSORS.get(function, "")
