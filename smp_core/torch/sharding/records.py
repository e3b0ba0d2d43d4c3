"""The record of the shards in a file of a partial checkpoint, or in a part of a state, and the check that they are
this rank's.

Shards of different ranks have the same sizes and names, so only the record tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smp_core.torch.exceptions import CheckpointError

_OTHER = "Resume from another checkpoint, or from a full one (partial=False)"


def record(rank: int, degree: int, split: Mapping[str, list[int]]) -> dict[str, object]:
    """Plain values: the shard's number ``rank`` of ``degree``, and ``split``, the shapes of the parameters
    that are split, by name. Those that are not named are whole in every file.
    """
    return {"rank": rank, "degree": degree, "split": dict(split)}


def check(where: Path | str, found: Any, mine: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError unless a file or a part of a state, which ``where`` names, holds this rank's shards.

    ``found`` is its record, or None if it has none, as of an unsharded run; ``mine`` is this rank's.
    """
    if found == mine:
        return
    if mine is None or not _is_record(found):
        a_file = "a file of " if isinstance(where, Path) else ""
        here, there = ("whole", "split") if mine is None else ("split", "whole")
        raise CheckpointError(
            f"{where}: expected parameters that are {here}, as in this run, found {a_file}{there} ones. {_OTHER}"
        )
    if found["degree"] != mine["degree"]:
        raise CheckpointError(
            f"{where}: holds a shard of sharded_data_parallel_degree={found['degree']}, and this run has "
            f"{mine['degree']}. {_OTHER}"
        )
    if found["rank"] != mine["rank"]:
        raise CheckpointError(
            f"{where}: expected shard {mine['rank']} of {mine['degree']}, found shard {found['rank']}: {_wrong(where)}"
        )
    raise CheckpointError(f"{where}: {_difference(found['split'], mine['split'])}")


def _wrong(where: Path | str) -> str:
    """Why it may be another rank's, and the remedy."""
    if isinstance(where, Path):
        return "the file has another one's name. Give the files their names again, or resume from another checkpoint"
    return (
        "it is another rank's. Load what model.local_state_dict() gave on this rank, or a whole state "
        "(model.state_dict())"
    )


def _is_record(found: object) -> bool:
    return (
        isinstance(found, Mapping)
        and {"rank", "degree", "split"} <= set(found)
        and isinstance(found["split"], Mapping)
    )


def _difference(there: Mapping[str, object], here: Mapping[str, object]) -> str:
    """The first parameter that is split in another way, in words."""
    for name in sorted(there.keys() | here.keys()):
        one, other = there.get(name), here.get(name)
        if one == other:
            continue
        if one is None or other is None:
            split, whole = ("split", "whole") if other is None else ("whole", "split")
            return (
                f"has parameter {name!r} {split}, and this run has it {whole}, or not at all: the checkpoint is of "
                f"another model, or of another sdp_param_persistence_threshold. Set what it was saved with. {_OTHER}"
            )
        return (
            f"is of another model: parameter {name!r} is of shape {one} there, and {other} here. Build "
            "the model that was saved, or resume from another checkpoint"
        )
    return f"says other things of its shards than this run. {_OTHER}"
