"""torch's own tests of torch.distributed, on the ranks of `sim` and `mpi`.

torch starts four processes for each test of ``_DistTestBase``; here each is a test on four ranks. The
file ``expected_BACKEND.toml`` lists those that fail, with the reason; one that is listed and passes is
a failure, and so is an entry that matches none. Tests that want GPUs skip themselves. The marks by
which torch leaves a test out for a backend whose name it does not know are passed over: all are tried.

pytest does not collect this file by itself; ``tox run -e torchsuite`` runs these commands::

    BACKEND=sim pytest tests/torch_suite/distributed_suite.py
    BACKEND=smp_mpi pytest tests/torch_suite/distributed_suite.py --smp-backend=mpi
"""

from __future__ import annotations

import os
import types
import unittest
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.testing._internal import common_distributed
from torch.testing._internal.common_utils import TestCase

from conformance.session import expectations
from pytest_smp.ranks.backends import open_backend

RANKS = 4
BACKEND = os.environ.setdefault("BACKEND", "sim")  # torch's suite reads it, and the next, at import
os.environ.setdefault("WORLD_SIZE", str(RANKS))

# torch's lists of what a backend can do know backends by name.
for feature in ("ddp", "subgroup"):
    common_distributed.DistTestCases.backend_feature[feature].add(BACKEND)
if BACKEND.upper() not in dist.Backend._plugins:  # the suite asks at import whether it is known
    from smp_core.transport.mpi.fabric import register_backend

    register_backend() if BACKEND == "smp_mpi" else open_backend("sim").close()

with (
    warnings.catch_warnings(),
    # Fewer than eight ranks are few to torch, because its CI has four GPUs; these tests need three.
    mock.patch.object(common_distributed, "skip_if_small_worldsize", lambda test: test),
):
    warnings.simplefilter("ignore")  # torch compiles its own optimizers in a way that it deprecates
    from torch.testing._internal.distributed import distributed_test

TESTS = distributed_test.DistributedTest._DistTestBase
SKIPPED = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}


def _as_on_gloo(method: Callable[..., None]) -> Callable[..., None]:
    """A method of torch's suite that takes the backend to be Gloo: it branches on the names it knows."""
    seen = {**vars(distributed_test), "BACKEND": "gloo"}
    return types.FunctionType(method.__code__, seen, method.__name__, method.__defaults__)


class Case(TESTS, TestCase):
    """One rank's side of a test."""

    __test__ = False  # pytest would run it by itself, without ranks
    world_size = str(RANKS)
    destroy_pg_upon_exit = False
    _test_accumulate_gradients_no_sync = _as_on_gloo(TESTS._test_accumulate_gradients_no_sync)

    def _barrier(self, *args, **kwargs):
        dist.barrier()  # torch's is made of files, one for each process


NAMES = sorted(name for name in dir(Case) if name.startswith("test_"))
_FILE = Path(__file__).with_name(f"expected_{BACKEND.removeprefix('smp_')}.toml")
EXPECTED = expectations.check(expectations.read(_FILE), NAMES)


def _parameter(name: str) -> object:
    known = EXPECTED.get(name)
    marks = [] if known is None else [pytest.mark.xfail(reason=str(known), strict=True)]
    return pytest.param(name, marks=marks)


@pytest.fixture(scope="module", autouse=True)
def _temporary_folder(tmp_path_factory):
    """Prepare the folder that torch's launcher makes: some tests leave files there for the other ranks."""
    folder = tmp_path_factory.mktemp("torch")
    (folder / "test_dir").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEMP_DIR", str(folder))
        yield


@pytest.mark.smp(ranks=RANKS)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [_parameter(name) for name in NAMES])
def test_of_torch(name):
    case = Case(name)
    case.rank = dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            getattr(case, name)()
        except SystemExit as error:
            raise unittest.SkipTest(SKIPPED.get(error.code, f"exit {error.code}")) from None
