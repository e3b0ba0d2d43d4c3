"""Operators without a 16-bit kernel: one rounding of what float32 gives, forward and backward."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smp_core.torch.precision import half

SQUARE = torch.eye(4) * 2 + torch.arange(16.0).view(4, 4) / 32
IMAGE = torch.arange(64.0).view(1, 1, 8, 8) / 8
VOLUME = torch.arange(64.0).view(1, 1, 4, 4, 4) / 8
ROWS = torch.arange(24.0).view(4, 6).cos()
CLASSES = torch.arange(4)

#: By the names of the table's operators, a call that runs them, and its input.
CALLS = {
    "_cdist_forward _cdist_backward": (lambda x: torch.cdist(x, x.detach() + 1), ROWS),
    "_pdist_forward _pdist_backward": (F.pdist, ROWS),
    "avg_pool3d avg_pool3d_backward": (lambda x: F.avg_pool3d(x, 2), VOLUME),
    "_upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward": (
        lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True),
        IMAGE,
    ),
    "multi_margin_loss multi_margin_loss_backward": (
        lambda x: F.multi_margin_loss(x, CLASSES),
        ROWS,
    ),
    "multilabel_margin_loss_forward multilabel_margin_loss_backward": (
        lambda x: F.multilabel_margin_loss(x, torch.zeros(4, 6, dtype=torch.int64)),
        ROWS,
    ),
    "linalg_qr linalg_solve_triangular": (lambda x: torch.linalg.qr(x).R, SQUARE),
    "linalg_inv_ex": (torch.linalg.inv, SQUARE),
    "linalg_cholesky_ex": (lambda x: torch.linalg.cholesky(x @ x.T), SQUARE),
    "linalg_lu": (lambda x: torch.linalg.lu(x).U, SQUARE),
    "_linalg_det": (lambda x: torch.linalg.det(x.detach()), SQUARE),
    "_linalg_slogdet": (lambda x: torch.linalg.slogdet(x)[1], SQUARE),
    "_linalg_svd": (torch.linalg.svdvals, SQUARE),
    "_linalg_eigh": (lambda x: torch.linalg.eigvalsh(x @ x.T), SQUARE),
    "_linalg_solve_ex linalg_lu_solve": (
        lambda x: torch.linalg.solve(x, x.detach()[:, :2] + 1),
        SQUARE,
    ),
}  # fmt: skip
#: Where the call is this one operator, so that nothing else rounds.
ONE = {"avg_pool3d", "multi_margin_loss", "linalg_inv_ex", "_linalg_svd", "linalg_qr"}


def test_every_operator_of_the_table_is_tried():
    tried = {name for names in CALLS for name in names.split()}
    assert set(half.OPERATORS) == tried | {"rrelu_with_noise"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("names", list(CALLS))
def test_it_is_computed_in_float32_and_rounded(names, dtype):
    call, given = CALLS[names]
    x = given.to(dtype).requires_grad_()
    with half.in_float32():
        out = call(x)
    assert out.dtype is dtype
    if out.requires_grad:
        out.backward(torch.ones_like(out))
        assert x.grad.dtype is dtype
        assert x.grad.isfinite().all()
    if names.split()[0] in ONE:
        assert torch.equal(out, call(given.to(dtype).float()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_rounding_and_not_two(dtype):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0001, 1e-3, 7.0, 9.0, 3.3]).to(dtype).view(1, 1, 2, 2, 2)
    with half.in_float32():
        out = F.avg_pool3d(x, 2)
    assert torch.equal(out, F.avg_pool3d(x.float(), 2).to(dtype))


def test_rrelu_draws_as_in_float32():
    x = torch.linspace(-2, 2, 9).requires_grad_()
    torch.manual_seed(5)
    expected = F.rrelu(x, training=True)
    expected.sum().backward()
    given = x.detach().half().requires_grad_()
    torch.manual_seed(5)
    with half.in_float32():
        out = F.rrelu(given, training=True)
    out.sum().backward()
    assert torch.equal(out, expected.half())
    assert torch.equal(given.grad, x.grad.half())  # by the slopes that were drawn


def lacks(call, given, dtype):
    """Return whether torch refuses the call, for want of a kernel."""
    try:
        call(given.to(dtype))
    except RuntimeError as error:
        return "not implemented for" in str(error) or "Low precision dtypes" in str(error)
    return False


@pytest.mark.parametrize("names", list(CALLS))
def test_torch_by_itself_still_lacks_them(names):
    call, given = CALLS[names]
    assert [lacks(call, given, dtype) for dtype in (torch.float16, torch.bfloat16)] == [True] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_as_before(dtype):
    x = torch.tensor([[2.0, 0.0], [0.0, 4.0]], dtype=dtype, requires_grad=True)
    with half.in_float32():
        out = torch.linalg.inv(x)
        out.sum().backward()
    assert out.dtype is dtype
    assert out.tolist() == [[0.5, 0.0], [0.0, 0.25]]
    assert x.grad.tolist() == [[-0.25, -0.125], [-0.125, -0.0625]]


def test_neither_other_threads_nor_torchs_kernels_see_anything():
    def kernels():
        """The functions at each dispatch key but ours."""
        dumps = {name: torch._C._dispatch_dump(f"aten::{name}") for name in half.OPERATORS}
        return {
            name: [line for line in dump.splitlines() if not line.startswith("AutocastIPU")]
            for name, dump in dumps.items()
        }

    seen = []
    before = kernels()
    with half.in_float32():
        thread = threading.Thread(
            target=lambda: seen.append(lacks(torch.linalg.inv, SQUARE, torch.float16))
        )
        thread.start()
        thread.join()
        assert kernels() == before
    assert seen == [True]


class Pooled(nn.Module):
    """A layer that needs an operator of the table in forward and in backward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return F.avg_pool3d(self.layer(x).view(-1, 1, 2, 2, 2), 2).flatten()


@pytest.mark.parametrize(
    "pipe",
    [
        pytest.param({}, marks=pytest.mark.smp(ranks=1, fp16=True, microbatches=2)),
        pytest.param(
            {"stage": 1},
            marks=pytest.mark.smp(
                ranks=2,
                fp16=True,
                microbatches=2,
                pipeline_parallel_degree=2,
                auto_partition=False,
                default_partition=1,
            ),
        ),
    ],
    ids=["alone", "on another rank"],
)
def test_the_process_is_as_before_after_training(smp, pipe):
    module = nn.Sequential(nn.Linear(8, 8), Pooled())
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(model, x):
        loss = model(x).square().sum()
        model.backward(loss)
        return loss

    assert train(model, torch.ones(4, 8)).reduce_mean().isfinite()
    optimizer.step()
    if not pipe:  # outside of steps
        model.backward(model(torch.ones(4, 8)).sum())
    refused = [lacks(call, given, torch.float16) for call, given in CALLS.values()]
    assert refused == [True] * len(CALLS)
