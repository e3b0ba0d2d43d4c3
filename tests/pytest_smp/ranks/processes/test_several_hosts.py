"""Sessions and scripts on two machines."""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from smp_core.errors import BackendError
from smp_core.launch.mpiexec import find_mpiexec
from tests.namespaces import Machines, two_machines

pytestmark = pytest.mark.timeout(900)

EACH = 2  # ranks on each machine
PYTEST = ["pytest", "-p", "no:cacheprovider", "--color=no"]
EXAMPLE = Path(__file__).parents[4] / "examples" / "scripts" / "digits.py"


@pytest.fixture
def machines() -> Iterator[Machines]:
    with two_machines() as made:
        yield made


def torchrun(machines: Machines, command: Callable[..., Any], *module: str) -> tuple[Any, Any]:
    """The job that runs a module, as its two launchers: that of rank 0's machine first."""
    static = ["--nnodes=2", f"--nproc-per-node={EACH}", f"--master-addr={machines.address}"]
    started = []
    for node, host in enumerate("ab"):
        words = [sys.executable, "-m", "torch.distributed.run", *static, "--master-port=29511"]
        words += [f"--node-rank={node}", "-m", *module]
        started.append(command(machines.on(host, *words)))
    return started[0], started[1]


def mpiexec(machines: Machines, command: Callable[..., Any], *module: str) -> tuple[Any, Any]:
    pytest.importorskip("mpi4py", reason="the mpi backend needs mpi4py")
    try:
        words, _ = find_mpiexec("")
    except BackendError as error:
        pytest.skip(str(error))
    rsh, (a, b), ranks = str(machines.folder / "rsh"), machines.hosts, str(2 * EACH)
    if "--oversubscribe" in words:  # Open MPI
        words = [*words, "-H", f"{a}:{EACH},{b}:{EACH}", "--map-by", f"ppr:{EACH}:node"]
        words += ["--mca", "plm_rsh_agent", rsh]
    else:
        words = [*words, "-hosts", f"{a},{b}", "-ppn", str(EACH), "-launcher", "ssh"]
        words += ["-launcher-exec", rsh]
    words += ["-n", ranks, sys.executable, "-m", *module]
    return command(machines.on("a", *words)), None


#: Of the levels L0, L1 and L2: these take seconds, and all of them many minutes on two cores.
REQUIREMENTS = ["lifecycle", "allgather", "barriers", "process_groups", "errors"]

#: Where ranks are makes no difference to an example: the link is proved by few.
FEW = """
from hypothesis import settings
settings.register_profile("few", max_examples=8)
settings.load_profile("few")
"""

#: Tests of a session after those of the requirements. Far ranks fail as near ones do; the last test stops the session.
WHERE = """
    import os, pathlib, socket, tempfile, time
    import pytest
    import torch
    import torch.distributed as dist

    @pytest.mark.smp
    def test_where(smp, smp_tmp_path):
        hosts = smp.allgather(socket.gethostname(), smp.WORLD)
        assert len(set(hosts)) == 2, hosts
        assert hosts == sorted(hosts)
        assert (smp.local_size(), smp.local_rank()) == ({each}, smp.rank() % {each})
        total = torch.full((5,), 2.0 ** smp.rank())
        dist.all_reduce(total)
        assert total.tolist() == [2.0 ** {ranks} - 1] * 5

    @pytest.mark.smp
    def test_far_rank_fails(smp):
        print("printed by", smp.rank())
        assert smp.rank() < {last}, "the last one"

    @pytest.mark.smp
    def test_far_rank_is_stuck(smp):
        while smp.rank() == {last}:
            time.sleep(0.01)
        smp.barrier()

    @pytest.mark.smp
    def test_until_the_link_is_cut(smp):
        smp.barrier()
        if smp.rank() == 0:
            pathlib.Path({ready!r}).touch()
        while True:
            smp.barrier()

    @pytest.mark.smp
    def test_next(smp):
        smp.barrier()
"""


@pytest.mark.parametrize("launch", [torchrun, mpiexec])
def test_a_session_of_two_machines(machines, command, pytester, tmp_path, launch):
    """Requirements hold, ranks know where they are, far ranks fail as near ones do, and a machine that vanishes is a
    verdict. One session, because starting a job costs more than all of its tests.
    """
    last, ready = 2 * EACH - 1, tmp_path / "cut it now"
    text = WHERE.format(each=EACH, ranks=2 * EACH, last=last, ready=str(ready))
    where = pytester.makepyfile(test_where=text)
    (tmp_path / "few.py").write_text(FEW)
    few = functools.partial(command, PYTHONPATH=str(tmp_path))
    modules = [f"conformance.suite.test_{name}" for name in REQUIREMENTS]
    options = [
        "-p",
        "few",
        "--smp-timeout=20",
        f"--basetemp={tmp_path / 'shared'}",
    ]  # for smp_tmp_path
    stuck = launch is torchrun  # which starts another rank; a job of MPI would end here
    if not stuck:
        options += ["-k", "not test_far_rank_is_stuck"]
    started, other = launch(machines, few, *PYTEST, *options, "--pyargs", *modules, str(where))
    started.makes(ready, 600)
    machines.cut()
    started.shows("JobLost: the job has lost its ranks", 40)  # and not --smp-timeout
    started.shows(f"{2 + stuck} failed, ")  # the session has stopped
    if other is not None:
        assert other.end(300)[0] != 0
    else:
        started.without(sys.executable)
        started.process.kill()  # mpiexec waits for its own process there: no MPI's watches its links
    code, text = started.end(300)
    assert code != 0
    assert re.search(rf"= {2 + stuck} failed, \d\d+ passed", text), text
    far = machines.hosts[1]
    crashed = [f"rank {rank} crashed too: its machine, {far}" for rank in range(EACH + 1, last + 1)]
    for expected in (
        rf"raised by rank {last} of {last + 1} ranks \(external\)",
        rf"Captured stdout \(rank {last}\) .*\nprinted by {last}\n",
        *([rf"rank {last} never came back\n +File .*\n +(while|time.sleep)"] if stuck else []),
        f"rank {EACH} crashed: its machine, {far}, does not answer",
        *(f"{each}, does not answer" for each in crashed),
    ):
        assert re.search(expected, text), (expected, text)


@pytest.mark.parametrize("launch", [torchrun, mpiexec])
def test_a_script_of_two_machines(machines, command, tmp_path, monkeypatch, launch):
    """As its author wrote it for GPUs and SMP; each process of the launcher is a rank."""
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    twin = importlib.import_module("plain")
    wanted = twin.losses_of(twin.Digits(torch.float32), steps=3, replicas=2, microbatches=4)
    file = tmp_path / "losses.json"
    words = ["--epochs=1", "--steps=3", "--microbatches=4", f"--losses={file}"]
    started, other = launch(machines, command, "smp_core.launch", "--cpu", str(EXAMPLE), *words)
    for each in (started, other):
        if each is not None:
            code, text = each.end()
            assert code == 0, text
    assert json.loads(file.read_text()) == wanted
