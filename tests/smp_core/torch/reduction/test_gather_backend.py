"""The backend of a gather of shards: sizes of buffers by hand, and the choices of a script on rank processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from smp_core import runtime
from smp_core.errors import ConfigError
from smp_core.gather_buffers import GatherBuffers
from smp_core.torch.reduction.collectives import Collectives
from tests.fork_server import ForkServer

SCRATCH, SORT = "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES", "SMDDP_AG_SORT_BUFFER_SIZE_BYTES"


def test_buffers_have_the_published_sizes() -> None:
    assert GatherBuffers.of({}) == (16777216, 134217728)
    assert GatherBuffers.of({SCRATCH: "8192", SORT: "24576"}) == (8192, 24576)


@pytest.mark.parametrize("size", ["8191", "12288", "0", "-8192", "8 KiB", "8192.0"])
@pytest.mark.parametrize("name", [SCRATCH, SORT])
def test_a_size_that_is_no_multiple_is_refused(name: str, size: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='{size}' is no positive multiple of 8192"):
        GatherBuffers.of({name: size})


def test_what_does_not_fit_falls_back() -> None:
    buffers = GatherBuffers(scratch=16384, sort=8192)
    assert buffers.refusal(16384, 4) == ""
    assert buffers.refusal(16385, 4) == "16385 bytes are more than the scratch buffer's 16384"
    # An eighth of 8 ranks' 8192 bytes is all of the sort buffer; of 16 ranks, twice as much.
    assert buffers.refusal(8192, 8) == ""
    assert "an eighth of 8 x 8193 bytes is more" in buffers.refusal(8193, 8)
    assert "an eighth of 16 x 8192 bytes is more than" in buffers.refusal(8192, 16)


@pytest.mark.smp(ranks=2, ddp=True, sharded_data_parallel_degree=2)
def test_simulated_ranks_have_one_backend(smp: Any) -> None:
    gathers = Collectives(runtime.current("test"))
    with gathers.traffic.recorded() as log:
        gathers.all_gather(torch.ones(3)).result()
    assert [each.reason for each in log] == ["the backend of the ranks has no other beside it"]


#: Two layers of 40 x 40 and 400 x 400 numbers, in two steps: the weights, and the backends of the gathers.
SCRIPT = """
import json, os, sys
import torch
import smp_core.torch as smp
from smp_core.torch import observe
from torch import nn

smp.init({**json.loads(sys.argv[1]), "ddp": True, "sdp_param_persistence_threshold": 0})
if len(sys.argv) > 3 and smp.rank():
    os.environ[sys.argv[3]] = "16384"
torch.manual_seed(0)
model = smp.DistributedModel(nn.Sequential(nn.Linear(40, 40, bias=False), nn.Linear(40, 4000, bias=False)))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

@smp.step
def step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

torch.manual_seed(smp.rank())
with observe.traffic(model).recorded() as log:
    for _ in range(2):
        optimizer.zero_grad()
        step(model, torch.randn(4, 40))
        optimizer.step()
    gathers = [[each.bytes, each.backend, each.reason] for each in log
               if each.operation == "all_gather" and each.reason != "these are no parameters"]
weights = [each.tolist() for each in model.state_dict().values()]
if smp.rank() == 0:
    with open(sys.argv[2], "w") as file:
        json.dump({"gathers": gathers, "weights": weights}, file)
"""


#: Starts two ranks as torchrun does, with a store of its own, but forks them: they need not import torch.
RANKS = """
import ctypes, os, runpy, signal, sys
from torch import distributed as dist

SIZE, PR_SET_PDEATHSIG = 2, 1

def rank(number, port):
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives its starter
    os.environ |= {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(SIZE), "LOCAL_WORLD_SIZE": str(SIZE),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.read(port, 8).decode(), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")

def main():
    pipes = [os.pipe() for _ in range(SIZE)]
    for number, (port, _) in enumerate(pipes):
        if os.fork() == 0:
            return rank(number, port)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _, writer in pipes:
        os.write(writer, str(store.port).encode())
    sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in pipes))

main()
"""


@pytest.fixture
def train(fork_server: ForkServer, tmp_path: Path) -> Callable[..., tuple[int, str, Any]]:
    """Runs the script on two ranks: its exit code, its output, and what it found."""

    def run(config: dict[str, Any], *words: str, **environment: str) -> tuple[int, str, Any]:
        ranks, script, found = (tmp_path / name for name in ("ranks.py", "script.py", "found.json"))
        ranks.write_text(RANKS)
        script.write_text(SCRIPT)
        found.unlink(missing_ok=True)
        done = fork_server.python(
            *map(str, (ranks, script, json.dumps(config), found, *words)),
            folder=tmp_path,
            environment={**os.environ, **environment},
            timeout=120,
        )
        text = done.stdout + done.stderr
        return done.code, text, json.loads(found.read_text()) if found.exists() else None

    return run


SHARDED = {"sharded_data_parallel_degree": 2}


def test_a_script_gathers_by_smddp_where_it_can(train: Callable[..., Any]) -> None:
    """The values are those of Gloo. Of 8192 bytes, a part of the small layer (3200 bytes) fits alone."""
    code, text, auto = train(SHARDED)
    assert code == 0, text
    assert {(backend, reason) for _, backend, reason in auto["gathers"]} == {("smddp", "")}
    code, text, nccl = train({**SHARDED, "ddp_dist_backend": "nccl"})
    assert code == 0, text
    because = ("gloo", "ddp_dist_backend is 'nccl'")
    assert {(backend, reason) for _, backend, reason in nccl["gathers"]} == {because}
    code, text, small = train(SHARDED, **{SCRATCH: "8192"})
    assert code == 0, text
    assert {(sent, backend, bool(reason)) for sent, backend, reason in small["gathers"]} == {
        (40 * 40 * 4 // 2, "smddp", False),
        (40 * 4000 * 4 // 2, "gloo", True),
    }
    assert auto["weights"] == nccl["weights"] == small["weights"]
    assert [each[0] for each in auto["gathers"]] == [each[0] for each in nccl["gathers"]]


def test_buffers_that_differ_between_ranks_are_an_error_of_all(train: Callable[..., Any]) -> None:
    code, text, found = train(SHARDED, SORT)
    assert code != 0
    assert found is None
    assert text.count("(16777216, 16384) on rank 1: set them alike on all") >= 2, text
