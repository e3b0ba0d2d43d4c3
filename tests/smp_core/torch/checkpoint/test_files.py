"""Files that are whole or not there, read without running anything."""

from __future__ import annotations

import argparse
import collections
import fcntl
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.faults import FullDisk
from pytest_smp.ranks.protocols import ExecutorOptions, Job
from smp_core.torch.checkpoint import files, folders, plain
from smp_core.torch.exceptions import CheckpointError

STATE = {
    "weight": torch.arange(6.0).reshape(2, 3).t(),
    "empty": torch.empty(0, 3),
    "half": torch.tensor([1.5, -0.0, float("inf")], dtype=torch.bfloat16),
    "nest": [1, {"k": (None, True, "text", b"\x00")}, {2, 3}],
}
OLD = {"old": torch.tensor([1])}


def _equal(one, two):
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_equal(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(_equal, one, two))
    return bool(one == two)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "model_0.pt"
    files.save(path, STATE)
    return path


def test_what_is_saved_is_loaded_and_torch_reads_it_too(saved):
    assert _equal(files.load(saved, "the model"), STATE)
    assert _equal(torch.load(saved, weights_only=True), STATE)
    assert os.listdir(saved.parent) == ["model_0.pt"]


def test_a_file_cut_off_anywhere_is_refused(saved):
    whole = saved.read_bytes()
    ends = {*range(0, len(whole), 7), *range(80), *range(len(whole) - 150, len(whole))}
    for length in sorted(ends):
        saved.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model_0\.pt: expected the model, but .* torn"):
            files.load(saved, "the model")


def test_a_damaged_byte_is_refused_or_changes_nothing(saved):
    whole = saved.read_bytes()
    refused = 0
    for place in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[place] ^= 0x41
        saved.write_bytes(damaged)
        try:
            found = files.load(saved, "the model")
        except CheckpointError:
            refused += 1
        else:
            assert _equal(found, STATE), place
    assert refused > len(whole) / 12


def test_a_changed_number_that_torch_takes_is_refused(saved):
    whole = saved.read_bytes()
    place = whole.index(torch.arange(6.0).numpy().tobytes())
    saved.write_bytes(whole[:place] + b"\x01" + whole[place + 1 :])
    assert not _equal(torch.load(saved, weights_only=True), STATE)  # torch does not look
    with pytest.raises(CheckpointError, match=r"the checksum of its entry '.*data/0' is wrong"):
        files.load(saved, "the model")


class _Runs:
    def __init__(self, what):
        self._what = what

    def __reduce__(self):
        return os.mkdir, (self._what,)


def _archived(path, obj, protocol):
    torch.save(obj, path, pickle_protocol=protocol)


def _legacy(path, obj, protocol):
    torch.save(obj, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)


def _pickled(path, obj, protocol):
    path.write_bytes(pickle.dumps(obj, protocol))


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("write", [_archived, _legacy, _pickled])
@pytest.mark.parametrize("nest", [lambda evil: evil, lambda evil: {"a": [evil]}], ids=["", "deep"])
def test_a_pickle_that_runs_code_runs_nothing(tmp_path, write, protocol, nest):
    path, trap = tmp_path / "evil.pt", tmp_path / "trap"
    write(path, nest(_Runs(str(trap))), protocol)
    with pytest.raises(CheckpointError, match=r"evil\.pt: expected the model, but it .*Nothing of"):
        files.load(path, "the model")
    assert not trap.exists()
    pickle.loads(pickle.dumps(_Runs(str(trap))))
    assert trap.exists()  # so the trap works


@pytest.mark.parametrize(
    "content",
    [b"hello", b"\x80\x02}q\x00.", b"\x89PNG\r\n\x1a\n", b"\0" * 1000, b"PKXX", b"{}"],
    ids=["text", "pickle", "image", "zeros", "almost", "json"],
)
def test_a_foreign_file_is_refused(tmp_path, content):
    path = tmp_path / "model_0.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"but it is no file that torch\.save wrote"):
        files.load(path, "the model")


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    path = tmp_path / "model_0.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model_0/data.pkl", bytes(10_000_000))
    monkeypatch.setattr(zipfile.ZipFile, "open", None)  # unpacks
    with pytest.raises(CheckpointError, match="the archive is compressed"):
        files.load(path, "old")


def test_a_foreign_archive_is_refused(tmp_path):
    path = tmp_path / "model_0.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "x")
    with pytest.raises(CheckpointError, match=r"torch\.load refuses it"):
        files.load(path, "the model")


def test_a_missing_file_says_what_there_is(saved):
    with pytest.raises(CheckpointError, match=r"model_1\.pt: .*no such file .*holds model_0\.pt"):
        files.load(saved.with_name("model_1.pt"), "the model")
    with pytest.raises(CheckpointError, match="there is no folder"):
        files.load(saved.parent / "no" / "model_1.pt", "the model")
    with pytest.raises(CheckpointError, match="cannot be read"):
        files.load(saved.parent, "the model")


def test_text(tmp_path):
    files.save_text(tmp_path / "newest", "tag é\n")
    assert files.load_text(tmp_path / "newest", "the tag") == "tag é\n"
    (tmp_path / "newest").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="bytes that are no text"):
        files.load_text(tmp_path / "newest", "the tag")


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.parent.rmdir()], ids=["dir", "no"])
def test_what_cannot_be_written_is_named_and_leaves_nothing(tmp_path, make):
    path = tmp_path / "folder" / "model_0.pt"
    path.parent.mkdir()
    make(path)
    with pytest.raises(CheckpointError, match=r"model_0\.pt: cannot be written"):
        files.save(path, STATE)
    assert [name for _, _, names in os.walk(tmp_path) for name in names] == []


# The remains of a crash.


def _left_over(path):
    file, part = files._new_part(path)
    file.write(b"half")
    return file, part


def test_what_a_crash_left_is_ignored_and_removed_by_the_next_save(saved):
    file, part = _left_over(saved)
    file.close()
    other = saved.with_name(".model_1.pt.0123.smp-part")
    other.write_bytes(b"of another name")
    assert _equal(files.load(saved, "the model"), STATE)
    files.save(saved, OLD)
    assert not part.exists()
    assert other.exists()
    assert _equal(files.load(saved, "the model"), OLD)


def test_a_save_beside_another_leaves_it_alone(saved):
    file, part = _left_over(saved)
    files.save(saved, OLD)
    assert part.exists()
    with pytest.raises(BlockingIOError), open(part, "rb") as again:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.close()
    files.clean(saved)
    assert not part.exists()


_CRASHES = """
import builtins, io, os, sys, shutil
from pathlib import Path
import torch
from smp_core.torch.checkpoint import files, folders

def dying(at):
    # The process ends, as by a power failure, at the at-th thing that it does to the disk.
    count = 0
    def counted(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == at:
                os._exit(9)
            result = function(*args, **kwargs)
            count += 1
            if count == at:
                os._exit(9)
            return result
        return call
    for name in ("replace", "rename", "unlink", "fsync", "mkdir", "rmdir", "open"):
        setattr(os, name, counted(getattr(os, name)))
    builtins.open = io.open = counted(io.open)

def one(path):
    files.save(path / "model_0.pt", {"new": torch.arange(1000)})

def folder(path):
    nonce = folders.begin(path, "a")
    new = folders.to_fill(path, "a", nonce)
    files.save(new / "model_0.pt", {"new": torch.arange(1000)})
    files.save(new / "user_content.pt", None)
    folders.finish(path, "a", {"pipeline_parallel_degree": 1})

def prune(path):
    folders.prune(path, 1)

def crash(what, path):
    for at in range(1, 200):
        copy = path / str(at)
        shutil.copytree(path / "before", copy)
        child = os.fork()
        if not child:
            dying(at)
            what(copy)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != 9:
            return code
    return 1

sys.exit(max(crash(what, Path(sys.argv[1], what.__name__)) for what in (one, folder, prune)))
"""


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
    """Copies of a folder in which a save was cut off at each thing it does; the last one was not."""
    path = tmp_path_factory.mktemp("crashed")
    for what in ("one", "folder", "prune"):
        (path / what / "before").mkdir(parents=True)
    files.save(path / "one" / "before" / "model_0.pt", OLD)
    _save_folder(path / "folder" / "before", "a", OLD)
    for tag in ("x", "y", "z"):
        _save_folder(path / "prune" / "before", tag, OLD)
    command = [sys.executable, "-c", _CRASHES, str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr

    def copies(what):
        found = [each for each in (path / what).iterdir() if each.name != "before"]
        return sorted(found, key=lambda each: int(each.name))

    return copies


def test_a_crash_at_any_moment_leaves_the_old_file_or_the_new(crashed):
    copies = crashed("one")
    found = [next(iter(files.load(copy / "model_0.pt", "x"))) for copy in copies]
    assert set(found) == {"old", "new"}
    assert found == sorted(found, reverse=True)
    for copy in copies:
        files.save(copy / "model_0.pt", OLD)
        assert os.listdir(copy) == ["model_0.pt"]


def _save_folder(path, tag, state):
    new = folders.to_fill(path, tag, folders.begin(path, tag))
    files.save(new / "model_0.pt", state)
    files.save(new / "user_content.pt", None)
    folders.finish(path, tag, {"pipeline_parallel_degree": 1})


def _load_folder(path, tag):
    folder, manifest = folders.find(path, tag)
    assert sorted(os.listdir(folder)) == ["manifest.json", "model_0.pt", "user_content.pt"]
    assert manifest.holds("model")
    assert not manifest.holds("optimizer")
    return next(iter(files.load(folder / "model_0.pt", "x")))


def test_a_crash_at_any_moment_leaves_the_old_folder_or_the_new(crashed):
    copies = crashed("folder")
    found = [_load_folder(copy, "a") for copy in copies]
    assert set(found) == {"old", "new"}
    assert found == sorted(found, reverse=True)
    assert len(copies) > 15
    for copy in copies:
        _save_folder(copy, "a", {"third": 1})
        assert _load_folder(copy, "a") == "third"
        assert os.listdir(copy) == ["a_partial"]


def test_a_crash_while_old_checkpoints_go_leaves_the_kept_ones(crashed):
    for copy in crashed("prune"):
        for name in os.listdir(copy):
            if not name.startswith("."):
                assert _load_folder(copy, name.removesuffix("_partial")) == "old"
        assert _load_folder(copy, "z") == "old"


# Folders.


def test_a_manifest_that_is_not_ours_is_refused(tmp_path):
    _save_folder(tmp_path, "a", OLD)
    manifest = tmp_path / "a_partial" / "manifest.json"
    good = json.loads(manifest.read_text())
    assert good["files"].keys() == {"model_0.pt", "user_content.pt"}
    for text in (
        "",
        "[]",
        "{}",
        "nonsense",
        json.dumps({**good, "format": "other"}),
        json.dumps({**good, "order": "1"}),
        json.dumps({**good, "files": {"../../model_0.pt": 1}}),
        json.dumps({**good, "degrees": [2]}),
    ):
        manifest.write_text(text)
        with pytest.raises(CheckpointError, match=r"manifest\.json: expected"):
            folders.find(tmp_path, "a")


def test_missing_and_torn_files_of_a_folder_are_named(tmp_path):
    _save_folder(tmp_path, "a", OLD)
    model = tmp_path / "a_partial" / "model_0.pt"
    model.write_bytes(model.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model_0\.pt: torn: expected \d+ bytes, found"):
        folders.find(tmp_path, "a")
    model.unlink()
    with pytest.raises(CheckpointError, match=r"model_0\.pt: missing"):
        folders.find(tmp_path, "a")
    with pytest.raises(CheckpointError, match=r"b_partial: .* has the tags 'a'"):
        folders.find(tmp_path, "b")


def test_only_folders_of_ours_are_counted_and_removed(tmp_path):
    for tag in ("c", "z", "b"):
        _save_folder(tmp_path, tag, OLD)
    _save_folder(tmp_path, "c", OLD)  # saved again: the newest
    (tmp_path / "mine_partial").mkdir()
    (tmp_path / "mine_partial" / "model_0.pt").write_text("precious")
    _save_folder(tmp_path, "d", OLD)
    (tmp_path / "b_partial" / "notes.txt").write_text("precious")
    assert folders.prune(tmp_path, 2) == ["z_partial"]
    assert sorted(os.listdir(tmp_path)) == ["b_partial", "c_partial", "d_partial", "mine_partial"]


def test_a_folder_that_this_rank_does_not_see_is_refused(tmp_path):
    folders.begin(tmp_path, "a")
    with pytest.raises(CheckpointError, match="not one folder for all ranks"):
        folders.to_fill(tmp_path, "a", "another")
    with pytest.raises(CheckpointError, match="not one folder for all ranks"):
        folders.to_fill(tmp_path / "elsewhere", "a", "another")


# A full disk.


class _Arguments:
    def __init__(self, args):
        self.args = args

    def __call__(self, rank):
        return self.args, {}


@given(st.integers(0, 362_000))
@settings(deadline=None)
def test_a_write_that_fails_anywhere_is_named_with_its_cause(room):
    """The kernel refuses it: so a full disk shows below Python's files, and in torch's own writer."""
    obj = {"a": torch.arange(50_000.0), "b": [torch.ones(3), torch.zeros(40_000)]}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model_0.pt")
        files.save(path, OLD)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limit[1]))
        try:
            with pytest.raises(CheckpointError) as caught:
                files.save(path, obj)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert f"{path}: cannot be written: File too large. What was there" in str(caught.value)
        assert os.listdir(folder) == [path.name]
        assert files.load(path, "old").keys() == OLD.keys()


@pytest.mark.parametrize("room", [0, 1, 100, 1000, 2999])
def test_a_full_disk_leaves_what_was_there(tmp_path, room):
    path = tmp_path / "model_0.pt"
    files.save(path, OLD)

    def body():
        try:
            files.save(path, {"new": torch.arange(400)})
        except CheckpointError as error:
            return str(error)
        return None

    executor = open_backend("sim", ExecutorOptions(ranks=1))
    try:
        faults = (FullDisk(rank=0, below=tmp_path, after=room),)
        job = Job(body=body, arguments=_Arguments(()), timeout=60.0, faults=faults)
        (said,) = executor.open(1).run(job).values
    finally:
        executor.close()
    assert "model_0.pt: cannot be written: No space left on device. What was there" in said
    assert _equal(files.load(path, "the model"), OLD)
    assert os.listdir(tmp_path) == ["model_0.pt"]


# The objects that may be saved.


class _Own:
    pass


_Pair = collections.namedtuple("_Pair", "x y")


class _Configuration:
    def to_dict(self):
        return {}


@pytest.mark.parametrize(
    ("obj", "where", "instead"),
    [
        ({"a": [1, {"b": collections.deque([1])}]}, "obj['a'][1]['b']", "list(it)"),
        ([[_Own()]], "obj[0][0]", "tensors"),
        ((collections.defaultdict(list),), "obj[0]", "dict(it)"),
        ({"f": print}, "obj['f']", "tensors"),
        ({"p": _Pair(1, 2)}, "obj['p']", "tensors"),
        ({_Own: 1}, "key <class", "tensors"),
        ({"n": argparse.Namespace(f=print)}, "obj['n'] is a argparse.Namespace", "tensors"),
        (torch.nn.Linear(1, 1), "obj is a torch.nn", "tensors"),
        (
            {"n": np.array([None, print])},
            "obj['n'] is a numpy.ndarray of object",
            "an array of numb",
        ),
        ({"n": np.array(["a"])}, "obj['n'] is a numpy.ndarray of <U1", "a list"),
        ({"config": _Configuration()}, "obj['config']", "Save it.to_dict() instead"),
    ],
)
def test_what_could_not_be_loaded_is_refused_with_its_place(tmp_path, obj, where, instead):
    with pytest.raises(CheckpointError) as caught:
        plain.plain(obj, "smp.save", "obj")
    assert "with smp.trust_checkpoints()" in str(caught.value)
    assert where in str(caught.value)
    assert instead in str(caught.value)
    torch.save(obj, tmp_path / "x.pt", pickle_protocol=2)
    with pytest.raises(CheckpointError):
        files.load(tmp_path / "x.pt", "x")


def test_what_is_accepted_can_be_loaded(tmp_path):
    itself: list[object] = []
    itself.append(itself)
    assert plain.plain(itself, "smp.save", "obj") is itself
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    states = [
        STATE,
        torch.nn.BatchNorm1d(2).state_dict(),
        optimizer.state_dict(),
        collections.Counter("aab"),
        [torch.float16, torch.device("cpu"), torch.Size([1, 2]), 1j, -(10**30), float("-inf")],
        torch.eye(2).to_sparse(),
        torch.get_rng_state(),
    ]
    for state in states:
        assert plain.plain(state, "smp.save", "obj") is state
        files.save(tmp_path / "x.pt", state)
        assert type(files.load(tmp_path / "x.pt", "x")) is type(state)
