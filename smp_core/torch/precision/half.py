"""Operators that torch has no 16-bit kernel for on the CPU: computed in float32 and rounded once to the 16-bit
type, as a kernel would.

Which they are was found by trying: some 370 calls of ``torch.nn.functional``, ``torch.linalg`` and ``torch``,
forward and backward, in float16 and bfloat16 on torch 2.13; tests/smp_core/torch/precision/test_half.py
tries those of the table again, and that torch still lacks them. Linear layers, convolutions, attention, recurrent and
normalisation layers, embeddings, pooling but the one below, and the usual losses have kernels.

How: torch's own kernel of such an operator gets one in front of it, which converts 16-bit arguments. It is
put there when the first 16-bit model is wrapped, and stays: to other dtypes nothing changes, and operators that are
not in the table cost nothing. What torch refuses in 16 bits before it asks a kernel it still refuses, as on
other devices: ``torch.fft``, ``torch.quantile``, ``ctc_loss``, complex numbers in bfloat16. Such a thing
belongs outside of the model, whose outputs are float32.
"""

from __future__ import annotations

import functools
import threading
import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_map

_HALF = (torch.float16, torch.bfloat16)

#: The operators, as ``torch.ops.aten`` has them.
OPERATORS = (
    "_cdist_forward", "_cdist_backward", "_pdist_forward", "_pdist_backward",
    "avg_pool3d", "avg_pool3d_backward",  # torch.nn.LocalResponseNorm, too
    "_upsample_bilinear2d_aa", "_upsample_bilinear2d_aa_backward",
    "rrelu_with_noise",
    "multi_margin_loss", "multi_margin_loss_backward",
    "multilabel_margin_loss_forward", "multilabel_margin_loss_backward",
    "linalg_qr", "linalg_inv_ex", "linalg_cholesky_ex", "linalg_solve_triangular", "linalg_lu",
    "linalg_lu_solve", "_linalg_det", "_linalg_slogdet", "_linalg_svd", "_linalg_eigh", "_linalg_solve_ex",
)  # fmt: skip


_installing = threading.Lock()


def install() -> None:
    """Put the kernels in place: once in a process, whose ranks may be threads."""
    with _installing:
        _library()


@functools.cache
def _library() -> Any:
    """What keeps the kernels in place."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in OPERATORS:
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
        with warnings.catch_warnings():
            # torch says once that a kernel is replaced, which is what is meant.
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered")
            library.impl(name, _in_float32(kernel), "CPU", with_keyset=True, allow_override=True)
    return library


def _in_float32(kernel: Any) -> Any:
    def call(keys: Any, /, *args: Any, **kwargs: Any) -> Any:
        dtype = next((each for each in map(_dtype, _leaves((args, kwargs))) if each in _HALF), None)
        if dtype is None:
            return kernel.call_boxed(keys, *args, **kwargs)
        args, kwargs = tree_map(_widened, (args, kwargs))
        return tree_map(
            functools.partial(_rounded, dtype=dtype), kernel.call_boxed(keys, *args, **kwargs)
        )

    return call


def _leaves(nest: Any) -> Any:
    return torch.utils._pytree.tree_leaves(nest)


def _dtype(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else None


def _widened(value: Any) -> Any:
    return value.to(torch.float32) if _dtype(value) in _HALF else value


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if _dtype(value) is torch.float32 else value
