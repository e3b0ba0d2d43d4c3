"""A file of 100 tests with 8 ranks each, one allgather in every test, by pytest: ours, and its peers.

The peers are installed by the tox environment ``bench`` alone. A peer that takes seconds for each test is
measured with fewer tests; the figure is for one test, the start of the session included.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.figures import Figure

RANKS = 8
TESTS = 100
FEW = 5

OURS = """
    import pytest
    @pytest.mark.smp(ranks={ranks})
    @pytest.mark.parametrize("i", range({tests}))
    def test_gather(smp, i):
        assert smp.allgather(smp.rank(), smp.WORLD) == list(range({ranks}))
"""
PROPERTY = """
    import pytest
    from hypothesis import given, settings, strategies as st
    @pytest.mark.smp(ranks={ranks})
    @settings(max_examples={tests}, database=None)
    @given(objects=st.lists(st.integers(), min_size={ranks}, max_size={ranks}))
    def test_gather(smp, objects):
        assert smp.allgather(objects[smp.rank()], smp.WORLD) == objects
"""
TORCH = """
    import torch, torch.distributed as dist
    from torch.testing._internal.common_distributed import MultiProcessTestCase
    class TestGather(MultiProcessTestCase):
        world_size = {ranks}
        def setUp(self):
            super().setUp()
            self._spawn_processes()
    def gather(self):
        torch.set_num_threads(1)
        store = dist.FileStore(self.file_name, {ranks})
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size={ranks})
        gathered = [None] * {ranks}
        dist.all_gather_object(gathered, self.rank)
        assert gathered == list(range({ranks}))
        dist.destroy_process_group()
    for i in range({tests}):
        setattr(TestGather, f"test_gather_{{i}}", gather)
"""
ISOLATE = """
    import pytest
    @pytest.mark.mpi(ranks={ranks})
    @pytest.mark.parametrize("i", range({tests}))
    def test_gather(i, comm):
        assert comm.allgather(comm.rank) == list(range({ranks}))
"""
MPI_PYTEST = """
    import pytest
    from mpi4py import MPI
    @pytest.mark.parallel(nprocs={ranks})
    @pytest.mark.parametrize("i", range({tests}))
    def test_gather(i):
        comm = MPI.COMM_WORLD
        assert comm.allgather(comm.rank) == list(range({ranks}))
"""

_SMP = (f"--smp-ranks={RANKS}",)
_MPIEXEC = (str(Path(sys.executable).parent / "mpiexec"), "-n", str(RANKS))
#: Name, module that must be there, its plugin, file, tests, what is before the command, arguments of
#: pytest. The plugin is named in PYTEST_PLUGINS, which the pytest that a plugin starts hears of, too.
ROWS = (
    (
        "pytest_smp, sim",
        "pytest_smp",
        "pytest_smp.plugin",
        OURS,
        TESTS,
        (),
        (*_SMP, "--smp-backend=sim"),
    ),
    (
        "pytest_smp, gloo",
        "pytest_smp",
        "pytest_smp.plugin",
        OURS,
        TESTS,
        (),
        (*_SMP, "--smp-backend=gloo"),
    ),
    (
        "pytest_smp, mpi",
        "mpi4py",
        "pytest_smp.plugin",
        OURS,
        TESTS,
        (),
        (*_SMP, "--smp-backend=mpi"),
    ),
    (
        "pytest_smp, gloo, a property's example",
        "pytest_smp",
        "pytest_smp.plugin",
        PROPERTY,
        TESTS,
        (),
        (*_SMP, "--smp-backend=gloo"),
    ),
    (
        "pytest_smp, mpi, a property's example",
        "mpi4py",
        "pytest_smp.plugin",
        PROPERTY,
        TESTS,
        (),
        (*_SMP, "--smp-backend=mpi"),
    ),
    ("torch MultiProcessTestCase, gloo", "expecttest", "", TORCH, FEW, (), ()),
    (
        "pytest-isolate-mpi",
        "pytest_isolate_mpi",
        "pytest_isolate_mpi._plugin",
        ISOLATE,
        FEW,
        (),
        (),
    ),
    (
        "mpi-pytest under mpiexec",
        "pytest_mpi",
        "xdist.plugin,pytest_mpi.plugin",  # it asks xdist whether it is there
        MPI_PYTEST,
        TESTS,
        _MPIEXEC,
        ("-m", f"parallel[{RANKS}]"),
    ),
)


def measure() -> list[Figure]:
    """Milliseconds for one test; a peer that is not installed, or does not pass, has no figure."""
    figures = []
    for name, module, plugin, text, tests, before, arguments in ROWS:
        if importlib.util.find_spec(module) is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            source = "\n".join(
                line[4:] for line in text.format(ranks=RANKS, tests=tests).splitlines()
            )
            Path(folder, "test_file.py").write_text(source)
            Path(folder, "pytest.ini").write_text("[pytest]\n")
            command = [*before, sys.executable, "-m", "pytest", *arguments, "test_file.py"]
            environment = {
                **os.environ,
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                "PYTEST_PLUGINS": plugin,
                "OMP_NUM_THREADS": "1",
            }
            start = time.perf_counter()
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            took = time.perf_counter() - start
        passed = re.search(r"(\d+) passed", done.stdout)
        wanted = {PROPERTY: 1, ISOLATE: tests * RANKS}.get(text, tests)  # one for each rank there
        if passed is None or int(passed.group(1)) != wanted:
            print(f"{name}: did not pass\n{done.stdout[-1500:]}{done.stderr[-500:]}")
            continue
        label = f"{name}: one of {tests}, start included"
        figures.append(Figure(label, took / tests * 1000, "ms", None, f"{took:.1f} s in all"))
    return figures
