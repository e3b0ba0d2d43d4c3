"""Operators that torch has no 16-bit kernel for on the CPU: computed in float32 and rounded once to the 16-bit
type, as a kernel would.

The list was found by trying: some 370 calls of ``torch.nn.functional``, ``torch.linalg`` and ``torch``,
forward and backward, in float16 and bfloat16 on torch 2.13; tests/smp_core/torch/precision/test_half.py
tries those of the table again, and that torch still lacks them. Linear layers, convolutions, attention, recurrent and
normalisation layers, embeddings, pooling but the one below, and the usual losses have kernels.

The means is that of ``torch.autocast``: a dispatch key that a thread switches on and off, above autograd. Torch's
own kernels stay as they are, and other threads and code outside of ``in_float32`` see nothing; operators that are not
in the table cost nothing inside either. Operators that torch refuses in 16 bits before it asks a kernel are still
refused, as on other devices: ``torch.fft``, ``torch.quantile``, ``ctc_loss``, complex numbers in bfloat16. They
belong outside of the model, whose outputs are float32.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

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

# Autocast on a kind of device that torch names and has nothing for: no kernel stands at this key but ours. The key
# of the CPU's own autocast has torch's list of operators, which a 16-bit run does not want.
_KEY: torch._C.DispatchKey = torch._C.DispatchKey.AutocastIPU  # type: ignore[attr-defined]
_installing = threading.Lock()


@contextlib.contextmanager
def in_float32() -> Iterator[None]:
    """Compute the operators of the table in float32 in this thread, where their arguments are 16-bit."""
    with _installing:  # ranks may be threads
        _libraries()
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY)
    # Off by default, as every key of autocast is: to be included is not enough.
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, False)
    try:
        with torch._C._IncludeDispatchKeyGuard(_KEY):
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, excluded)


@functools.cache
def _libraries() -> object:
    """The libraries that keep the functions registered, at a key that only ``in_float32`` switches on."""
    others: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    others.fallback(torch.library.fallthrough_kernel, _KEY.name)
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in OPERATORS:
        library.impl(name, _widening(getattr(torch.ops.aten, name).default), _KEY.name)
    return others, library


def _widening(operator: Callable[..., object]) -> Callable[..., object]:
    """The operator with its 16-bit arguments in float32, and its float32 results in their dtype."""
    below = torch._C.DispatchKeySet(_KEY)

    def call(*args: object, **kwargs: object) -> object:
        leaves = tree_leaves((args, kwargs))
        kinds = (each.dtype for each in leaves if isinstance(each, torch.Tensor))
        dtype = next((each for each in kinds if each in _HALF), None)
        with torch._C._ExcludeDispatchKeyGuard(below):
            if dtype is None:
                return operator(*args, **kwargs)
            args, kwargs = tree_map(_widened, (args, kwargs))
            return tree_map(functools.partial(_rounded, dtype=dtype), operator(*args, **kwargs))

    return call


def _widened(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.dtype in _HALF:
        return value.to(torch.float32)
    return value


def _rounded(value: object, dtype: torch.dtype) -> object:
    if isinstance(value, torch.Tensor) and value.dtype is torch.float32:
        return value.to(dtype)
    return value
