"""The record of the slices in a part of a state, or in a file of a partial checkpoint, and the check that they are this
rank's.

Slices of different tp ranks have the same names and shapes, so only the record tells them apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from smp_core.torch.exceptions import CheckpointError
from smp_core.torch.parameters.split import Split

#: The key of the record in a part of a state, and in a file.
KEY = "_smp_tensor"

Record = Mapping[str, object]


def record(splits: Mapping[str, Split] | Mapping[int, Split]) -> dict[str, object] | None:
    """Plain values that identify the slices of one rank; None if no parameter is split.

    ``rank`` is the tp rank and ``degree`` the number of slices. ``split`` has an entry for each split parameter, by its
    name or index, those of other pp ranks among them. Parameters without an entry are whole.
    """
    if not splits:
        return None
    first = next(iter(splits.values()))
    return {
        "rank": first.rank,
        "degree": first.degree,
        "split": {name: _plain(each) for name, each in splits.items()},
    }


def _plain(split: Split) -> dict[str, object]:
    """The split without the rank's place, as values that a file may hold."""
    fields = dataclasses.asdict(split)
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in fields.items()
        if name not in ("rank", "degree")
    }


def check(where: Path | str, found: object, mine: Record | None) -> None:
    """Raise CheckpointError unless a file or a part of a state, which ``where`` names, holds this rank's slices.

    ``found`` is its record, or None if it has none, as one without distributed modules; ``mine`` is this rank's.
    """
    if found == mine:
        return
    known = found if isinstance(found, Mapping) and _split(found) else None
    if known is None or mine is None:
        there, here = (
            "whole parameters only" if each is None else f"{_place(each)}, as of {_first(each)}"
            for each in (known, mine)
        )
        raise CheckpointError(f"{where}: holds {there}, and this run has {here}. {_advice(where)}")
    if known["degree"] != mine["degree"]:
        raise CheckpointError(
            f"{where}: holds slices of tensor_parallel_degree={known['degree']}, as of {_first(known)}, and this run "
            f"has tensor_parallel_degree={mine['degree']}. {_advice(where)}"
        )
    if known["rank"] != mine["rank"]:
        wrong = (
            "the file has another one's name. Give the files their names again, or resume from another checkpoint"
            if isinstance(where, Path)
            else "another rank's. Load what local_state_dict() gave on this rank, or a whole state"
        )
        raise CheckpointError(
            f"{where}: expected {_place(mine)}, found {_place(known)}, as of {_first(known)}: {wrong}"
        )
    raise CheckpointError(f"{where}: {_difference(_split(known), _split(mine))}")


def _advice(where: Path | str) -> str:
    if isinstance(where, Path):
        return (
            "A partial checkpoint does not change degrees, nor which modules are distributed: run as it was saved, or "
            "save and resume with partial=False"
        )
    return "Load what local_state_dict() gave on this rank, or a whole state, as model.state_dict() gives"


def _split(record: Record) -> Mapping[object, object]:
    """The entries of a record; empty for anything that is none."""
    split = record.get("split")
    return split if isinstance(split, Mapping) and {"rank", "degree"} <= set(record) else {}


def _place(record: Record) -> str:
    return f"the slices of tp rank {record['rank']} of {record['degree']}"


def _first(record: Record) -> str:
    return f"parameter {next(iter(_split(record)))!r}"


def _difference(there: Mapping[object, object], here: Mapping[object, object]) -> str:
    """The first parameter that is split in another way, in words."""
    for name in dict.fromkeys([*here, *there]):
        one, other = there.get(name), here.get(name)
        if one == other:
            continue
        shown = " and ".join(
            f"{'whole, or not at all,' if each is None else f'split as {each}'} {place}"
            for each, place in ((one, "there"), (other, "here"))
        )
        return (
            f"is of another model, or of one with other distributed modules: parameter {name!r} is {shown}. Build the "
            "model that was saved, or take a full checkpoint (partial=False)"
        )
    return "tells other things of its slices than this run. Take a full checkpoint (partial=False)"
