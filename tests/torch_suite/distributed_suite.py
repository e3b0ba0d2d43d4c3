"""torch's own tests of torch.distributed, on the ranks of `sim` and `mpi`.

torch starts four processes for each test of ``_DistTestBase``; here each is a test on four ranks. The
file ``expected_BACKEND.toml`` lists those that fail, with the reason; one that is listed and passes is
a failure, and so is an entry that matches none. It is not collected by itself::

    BACKEND=sim pytest tests/torch_suite/distributed_suite.py
    BACKEND=smp_mpi pytest tests/torch_suite/distributed_suite.py --smp-backend=mpi
"""

from __future__ import annotations

import os
import unittest
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.common_distributed import TEST_SKIPS, DistTestCases
from torch.testing._internal.common_utils import TestCase

from conformance import expectations
from smp_core.backends import open_backend

RANKS = 4
BACKEND = os.environ.setdefault("BACKEND", "sim")  # torch's suite reads it, and the next, at import
os.environ.setdefault("WORLD_SIZE", str(RANKS))

# torch's lists of what a backend can do know backends by name.
for feature in ("ddp", "subgroup"):
    DistTestCases.backend_feature[feature].add(BACKEND)
if BACKEND.upper() not in dist.Backend._plugins:  # the suite asks at import whether it is known
    from smp_core.backends.fabrics.mpi.fabric import register_backend

    register_backend() if BACKEND == "smp_mpi" else open_backend("sim").close()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch compiles its own optimizers in a way that it deprecates
    from torch.testing._internal.distributed import distributed_test

SKIPPED = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}


class Case(distributed_test.DistributedTest._DistTestBase, TestCase):
    """One rank's side of a test."""

    __test__ = False  # pytest would run it by itself, without ranks
    world_size = str(RANKS)
    destroy_pg_upon_exit = False

    def _barrier(self, *args, **kwargs):
        dist.barrier()  # torch's is made of files, one for each process


NAMES = sorted(name for name in dir(Case) if name.startswith("test_"))
_FILE = Path(__file__).with_name(f"expected_{BACKEND.removeprefix('smp_')}.toml")
EXPECTED = expectations.check(expectations.read(_FILE), NAMES)


def _parameter(name: str) -> object:
    known = EXPECTED.get(name)
    marks = [] if known is None else [pytest.mark.xfail(reason=str(known), strict=True)]
    return pytest.param(name, marks=marks)


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
