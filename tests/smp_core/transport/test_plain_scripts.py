"""Training scripts without pytest, started by a launcher: ``smp.init`` finds its rank, and the job ends
as its ranks do. Every test starts a job, which takes seconds, so each looks at many things.
"""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest

from smp_core.errors import BackendError
from smp_core.launch.mpiexec import find_mpiexec
from tests.conftest import free_port

pytestmark = pytest.mark.timeout(900)


def torchrun(ranks: int) -> list[str]:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*words, f"--nproc-per-node={ranks}"]


def mpiexec(ranks: int) -> list[str]:
    pytest.importorskip("mpi4py", reason="the mpi backend needs mpi4py")
    try:
        return [*find_mpiexec("")[0], "-n", str(ranks), sys.executable]
    except BackendError as error:
        pytest.skip(str(error))


LAUNCHERS = {"torchrun": torchrun, "mpiexec": mpiexec}


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> SimpleNamespace:
    """A launcher, and what torch calls its ranks' process group."""
    name = request.param
    return SimpleNamespace(
        name=name,
        words=LAUNCHERS[name],
        group="gloo" if name == "torchrun" else "smp_mpi",
        code=lambda code: 1 if name == "torchrun" else code,
    )


@pytest.fixture
def script(command, tmp_path):
    """Runs a script on ranks: its exit code, and what it wrote. Nothing of it is left."""

    def run(words, text, **environment):
        path = tmp_path / "train.py"
        path.write_text(text)
        return command([*words, str(path)], **environment).end(timeout=600)

    return run


HEAD = """
import os, sys
import torch
import torch.distributed as dist
import smp_core.torch as smp

def check():
    n = smp.size()
    assert smp.allgather({"rank": smp.rank()}, smp.WORLD) == [{"rank": r} for r in range(n)]
    if smp.rank() == 0:
        smp.broadcast("x" * 100_000, smp.WORLD)
    else:
        assert smp.recv_from(0, smp.RankType.WORLD_RANK) == "x" * 100_000
    smp.barrier()
    total = torch.tensor([2.0 ** smp.rank()])
    dist.all_reduce(total)
    assert total.item() == 2**n - 1
"""


def test_a_script_finds_its_rank(script, launcher):
    """And an exit that it catches is none."""
    code, text = script(
        launcher.words(2),
        HEAD
        + """
smp.init({"pipeline_parallel_degree": 2, "ddp": True})
assert smp.is_initialized() and dist.is_initialized()
check()
assert (smp.rank(), smp.local_rank(), smp.pp_rank()) == (dist.get_rank(),) * 3
assert (smp.size(), smp.local_size(), smp.pp_size(), smp.dp_size()) == (2, 2, 2, 1)
total = torch.ones(3)
dist.all_reduce(total, group=smp.get_pp_process_group())
assert total.tolist() == [2.0] * 3
assert smp.get_world_process_group() is dist.group.WORLD

smp.shutdown()  # the world stays
smp.init({"ddp": True})
check()
assert smp.dp_size() == 2

smp.shutdown()
dist.destroy_process_group()
smp.init()  # met anew
check()
try:
    if smp.rank():
        sys.exit(5)
except SystemExit:
    pass
check()
os.write(1, f"rank {smp.rank()} by {dist.get_backend()}\\n".encode())
sys.exit(0 if smp.size() == 2 else "wrong")
""",
    )
    assert code == 0, text
    assert sorted(re.findall(r"rank (\d) by (\w+)", text)) == [
        ("0", launcher.group),
        ("1", launcher.group),
    ], text
    assert "Warning" not in text, text


def test_a_process_group_of_the_script_is_used(script):
    port = str(free_port())
    code, text = script(
        mpiexec(2),
        """
import atexit

@atexit.register  # before ours is, so that it runs behind it
def left():
    assert not dist.is_initialized()
    os.write(1, b"left\\n")
"""
        + HEAD
        + """
@atexit.register
def save():
    dist.barrier()
    os.write(1, b"saved\\n")

rank = (int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]) + 1) % 2
dist.init_process_group("gloo", rank=rank, world_size=2)
made = dist.group.WORLD
smp.init({"ddp": True})
assert smp.get_world_process_group() is made
assert smp.rank() == rank  # its, not the launcher's
check()
assert "mpi4py" not in sys.modules
os.write(1, b"done\\n")
""",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        GLOO_SOCKET_IFNAME="lo",
    )
    assert code == 0, text
    assert [text.count(each) for each in ("done", "saved", "left")] == [2, 2, 2], text


ENDS = (
    HEAD
    + """
import atexit
smp.init()
atexit.register(lambda: print("handlers run"))
if smp.rank() == 1:
    work = dist.all_reduce(torch.ones(100), async_op=True)
    END
smp.recv_from(1, smp.RankType.WORLD_RANK)
"""
)


@pytest.mark.parametrize(
    ("launcher", "end", "code", "words"),
    [
        # Both launchers' ranks learn of an end by one function; torchrun makes 1 of every code.
        ("mpiexec", "raise ValueError('the last one')", 1, "ValueError: the last one"),
        ("mpiexec", "sys.exit(3)", 3, ""),
        ("torchrun", "sys.exit('enough')", 1, "enough"),
    ],
    indirect=["launcher"],
    ids=["error", "exit", "message"],
)
def test_a_rank_that_ends_by_an_error_ends_the_job(script, launcher, end, code, words):
    """The others wait for it, also with an operation in flight that needs them."""
    ended, text = script(launcher.words(2), ENDS.replace("END", end))
    assert ended == launcher.code(code), text
    assert words in text, text
    assert "handlers run" in text, text


# ---- What cannot be ------------------------------------------------------------------------------


def test_mpi_is_missing(script):
    code, text = script(
        mpiexec(2),
        """
import sys
sys.modules["mpi4py"] = None
import smp_core.torch as smp
smp.init()
""",
    )
    assert code == 1, text
    assert re.search(r"BackendError: smp.init: rank \d of 2: the mpi backend needs mpi4py", text)
    assert "pip install 'pytest-smp[mpi]'" in text


def test_a_configuration_that_does_not_fit_is_told(script):
    code, text = script(mpiexec(2), HEAD + "smp.init({'tensor_parallel_degree': 3, 'ddp': True})")
    assert code == 1, text
    assert re.search(r"ConfigError: .*tensor_parallel_degree.*2", text), text


def test_torch_was_initialised_for_fewer(script):
    code, text = script(
        torchrun(2),
        HEAD
        + """
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
smp.init()
""",
    )
    assert code == 1, text
    assert "torchrun has started 2 ranks, and the script has initialised torch.distributed" in text


def test_no_thread_is_left_when_python_ends(script):
    code, text = script(
        torchrun(2),
        """
import atexit, os

def count():
    if len(os.listdir("/proc/self/task")) > 1:
        os._exit(7)

atexit.register(count)  # called after what smp.init registers
"""
        + HEAD
        + """
smp.init({"ddp": True})
smp.get_dp_process_group()
check()
""",
    )
    assert code == 0, text
