"""The names of checkpoint files (API 1.11), and the names that are refused."""

from __future__ import annotations

import os
import types
from pathlib import Path

from smp_core.errors import ArgumentError, ArgumentTypeError
from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.checkpoint import folders, full

NEWEST = "newest"


def check_tag(call: str, tag: object) -> None:
    """Raise ArgumentError or ArgumentTypeError unless a checkpoint can have this tag."""
    if not isinstance(tag, str):
        raise ArgumentTypeError(f"{call}: tag must be a str, not {tag!r}")
    reason = ""
    if not tag or tag != tag.strip() or not tag.isprintable():
        reason = "is empty, or has spaces around it or characters that are not printable"
    elif "/" in tag or os.sep in tag:
        reason = "has a slash: give folders in path"
    elif tag.startswith(".") or tag == NEWEST:
        reason = "is a name that checkpoints use themselves"
    elif tag.endswith(folders.SUFFIX) or tag.startswith(full.USER_CONTENT):
        reason = "would be taken for a file of another checkpoint"
    if reason:
        raise ArgumentError(f"{call}: tag={tag!r} {reason}. Give a name such as 'step_100'")


def checked_path(call: str, name: str, path: object) -> Path:
    """The path. Raises ArgumentTypeError or ArgumentError, which name the call's argument, if it is no path."""
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise ArgumentTypeError(f"{call}: {name} must be a str or a path, not {path!r}")
    if not os.fspath(path) or "\0" in str(path):
        raise ArgumentError(f"{call}: {name}={path!r} is no path")
    return Path(path)


def refuse_module(call: str, module: types.ModuleType | None) -> None:
    """Raise ArgumentError for a way of pickling that cannot be read without running code."""
    if module is not None and module.__name__ not in ("pickle", "_pickle"):
        raise ArgumentError(
            f"{call}: pickle_module={module.__name__}: files are read without running code, which takes "
            "Python's own format. Leave it out"
        )


def degrees(runtime: Runtime) -> dict[str, int]:
    """The degrees that a partial checkpoint is loaded with: the same as at its save."""
    return {
        "pipeline_parallel_degree": runtime.topology.pipeline,
        "tensor_parallel_degree": runtime.topology.tensor,
        "sharded_data_parallel_degree": runtime.topology.sharding,
    }


def of_rank(runtime: Runtime, v3: bool = False) -> str:
    """The part of a file's name that identifies the rank."""
    pp, tp, rdp = (runtime.position(each) for each in (GroupKind.PP, GroupKind.TP, GroupKind.RDP))
    if v3:
        return f"{pp}_{tp}_{rdp}"
    return f"{pp}_{tp}" if runtime.topology.tensor > 1 else str(runtime.position(GroupKind.MP))


def of_part(runtime: Runtime) -> str:
    """The part of a partial file's name that identifies its content: the partition and, where
    parameters are split, the number of the shard (API 1.11: ``optimizer_{i}.pt`` per shard).
    """
    if runtime.topology.sharding == 1:
        return of_rank(runtime)
    shard = str(runtime.position(GroupKind.SHARDING))
    return f"{of_rank(runtime)}_{shard}" if runtime.topology.tensor > 1 else shard


def of_state(runtime: Runtime) -> str:
    """The part of a file's name that identifies the optimizer's state: with ``shard_optimizer_state`` each rdp rank
    has its own file, named as by ``v3``; otherwise as :func:`of_part`.
    """
    split = runtime.config.shard_optimizer_state and len(runtime.group(GroupKind.RDP).ranks) > 1
    return of_rank(runtime, v3=True) if split else of_part(runtime)


def candidates(runtime: Runtime, back_compat: bool) -> list[str]:
    """All that `smp.save` may have called a file of this rank when it was saved, the likeliest first: with
    ``shard_optimizer_state`` and sharded data parallelism ``v3``, of which each rank has its own.
    """
    pp, tp, mp = (runtime.position(each) for each in (GroupKind.PP, GroupKind.TP, GroupKind.MP))
    each = {  # a dict keeps the order, and each name once
        "v3": of_rank(runtime, v3=True),
        "plain": of_part(runtime),
        "unsharded": of_rank(runtime),
        "tensor": f"{pp}_{tp}",
        "model": str(mp),
    }
    sharded = runtime.config.shard_optimizer_state or runtime.topology.sharding > 1
    first = "model" if back_compat else "v3" if sharded else "plain"
    return list(dict.fromkeys([each[first], *each.values()]))


def suffixed(path: Path, name: str) -> Path:
    """The path with a name of :func:`of_rank` or :func:`of_part` at its end."""
    return path.with_name(f"{path.name}_{name}")
