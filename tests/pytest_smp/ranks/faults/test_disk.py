"""A full disk, for one rank below one folder."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.faults import FullDisk
from pytest_smp.ranks.protocols import ExecutorOptions, Job

RANKS = 2


@pytest.fixture(scope="module", params=["sim", "gloo"])
def executor(request):
    executor = open_backend(request.param, ExecutorOptions(ranks=RANKS))
    yield executor
    executor.close()


class _Arguments:
    def __init__(self, args):
        self.args = args

    def __call__(self, rank):
        return self.args, {}


@pytest.fixture
def run(executor, tmp_path):
    def run(body, *faults):
        job = Job(body=body, arguments=_Arguments((tmp_path,)), timeout=60.0, faults=faults)
        return executor.open(RANKS).run(job)

    return run


def _number(write):
    """The errno with which this fails, or None."""
    try:
        write()
    except OSError as error:
        return error.errno
    return None


def _ways(folder: Path):
    mine = folder / f"rank-{smp.rank()}"
    mine.mkdir()
    found = {}

    def text():
        with open(mine / "text", "w") as file:
            file.write("x" * 100)

    def appended():
        with open(mine / "text", "a") as file:
            file.write("more")

    def raw():
        with open(mine / "raw", "wb", buffering=0) as file:
            file.write(b"x" * 100)

    for name, write in (
        ("text", text),
        ("appended", appended),
        ("raw", raw),
        ("path", lambda: (mine / "path").write_bytes(b"x")),
        # The kernel can copy from file to file: nobody calls write.
        ("copied", lambda: shutil.copyfile(__file__, mine / "copied")),
        ("elsewhere", lambda: Path(folder, f"elsewhere-{smp.rank()}").write_bytes(b"x" * 1000)),
        ("dict", lambda: torch.save({1: 2}, mine / "old", _use_new_zipfile_serialization=False)),
    ):
        smp.barrier()
        found[name] = _number(write)
    return found


def test_all_that_python_writes_finds_no_room(run, tmp_path):
    full = errno.ENOSPC
    report = run(_ways, FullDisk(rank=1, below=tmp_path / "rank-1"))
    assert report.outcomes[0].value == dict.fromkeys(report.outcomes[0].value)
    assert report.outcomes[1].value == {
        "text": full,
        "appended": full,
        "raw": full,
        "path": full,
        "copied": full,
        "elsewhere": None,
        "dict": full,
    }
    (tmp_path / "again").mkdir()


def test_what_was_written_before_stays(run, tmp_path):
    def body(folder):
        with open(folder / f"{smp.rank()}", "wb") as file:
            file.write(bytes(range(100)))

    report = run(body, FullDisk(rank=1, below=tmp_path, after=30))
    assert (report.root, report.error.errno) == (1, errno.ENOSPC)
    assert report.error.filename == str(tmp_path / "1")
    assert (tmp_path / "0").read_bytes() == bytes(range(100))
    assert (tmp_path / "1").read_bytes() == bytes(range(30))


def test_the_room_is_shared_by_all_files(run, tmp_path):
    def body(folder):
        written = 0
        for number in range(10):
            try:
                (folder / f"{smp.rank()}-{number}").write_bytes(b"x" * 40)
            except OSError:
                break
            written += 1
        return written

    assert run(body, FullDisk(rank=0, below=tmp_path, after=100)).values == [2, 10]


def test_torch_save_leaves_a_torn_file(run, tmp_path):
    def body(folder):
        path = folder / f"{smp.rank()}.pt"
        try:
            torch.save(torch.arange(10_000), path)
        except RuntimeError:  # as of a full disk: torch raises no OSError
            saved = False
        else:
            saved = True
        smp.barrier()
        (folder / f"{smp.rank()}.log").write_bytes(b"x" * 20_000 if smp.rank() == 0 else b"")
        return saved, os.path.getsize(path)

    report = run(body, FullDisk(rank=1, below=tmp_path, after=5000))
    assert report.values[0][0] is True
    assert report.values[1] == (False, 5000)


@pytest.mark.parametrize("first", range(RANKS))
def test_disk_of_a_rank_stays_full_when_the_body_of_another_ends(run, tmp_path, first):
    def body(folder):
        smp.barrier()  # both bodies have begun
        if smp.rank() == first:
            smp.send("ends", 1 - first, smp.RankType.WORLD_RANK)
        else:
            smp.recv_from(
                first, smp.RankType.WORLD_RANK
            )  # on sim the sender keeps the turn, and ends
        return _number(lambda: shutil.copyfile(__file__, folder / f"{smp.rank()}"))

    faults = [FullDisk(rank=rank, below=tmp_path) for rank in range(RANKS)]
    report = run(body, *faults)
    assert report.values == [errno.ENOSPC] * RANKS, report.error
    assert repr(open) == "<built-in function open>"


def test_nothing_stays_of_it(run, tmp_path):
    def body(folder):
        path = folder / f"clean-{smp.rank()}.pt"
        path.with_suffix(".txt").write_text("x" * 10_000)
        torch.save(torch.arange(10_000), path)
        return repr(open), torch.load(path).sum().item()

    run(_ways, FullDisk(rank=0, below=tmp_path))
    report = run(body)
    builtin = "<built-in function open>"
    assert report.values == [(builtin, sum(range(10_000)))] * RANKS, report.error
    assert repr(open) == builtin
