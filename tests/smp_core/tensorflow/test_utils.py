"""The files of a checkpoint on their way to another rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import smp_core.tensorflow as smp
from smp_core.errors import CheckpointError
from tests.smp_core.tensorflow.small_models import MANUAL


def checkpoint_files(folder: str) -> list[str]:
    own = Path(folder, str(smp.rank()))
    (own / "mp_rank_1").mkdir(parents=True)
    if smp.rank():
        (own / "mp_rank_1" / "ckpt-1.index").write_bytes(b"of rank 1")
        smp.utils.send_checkpoint_files(own, 0)
    else:
        smp.utils.receive_checkpoint_files(own, 1)
    return [
        f"{path.relative_to(own)}: {path.read_text()}" for path in own.rglob("*") if path.is_file()
    ]


def test_files_of_a_checkpoint_go_to_another_rank(smp_world: Any, tmp_path: Path) -> None:
    found = smp_world.run(checkpoint_files, str(tmp_path), ranks=2, config=MANUAL)
    assert found == [["mp_rank_1/ckpt-1.index: of rank 1"]] * 2


def outside_of_the_folder(folder: str) -> None:
    if smp.rank():
        smp.send({"../other": b"", "one": b""}, 0, smp.RankType.WORLD_RANK)
    else:
        smp.utils.receive_checkpoint_files(folder, 1)


def test_a_file_outside_of_the_folder_is_refused(smp_world: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 1 sent a file '\.\./other'"):
        smp_world.run(outside_of_the_folder, str(tmp_path / "own"), ranks=2, config=MANUAL)
    assert not list(tmp_path.iterdir())


def no_folder(folder: str) -> None:
    if smp.rank():
        smp.utils.send_checkpoint_files(folder, 0)


def test_a_folder_that_is_not_there_is_told(smp_world: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no folder"):
        smp_world.run(no_folder, str(tmp_path / "none"), ranks=2, config=MANUAL)
