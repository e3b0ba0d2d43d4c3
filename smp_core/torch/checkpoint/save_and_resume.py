"""Saving and loading: one file per rank, or a checkpoint of the whole training (API 1.11).

`smp.save` and `smp.load` are each rank's own affair: nothing is sent, and a script may call them on
some ranks only. `smp.save_checkpoint` and `smp.resume_from_checkpoint` are calls of all ranks of the
world. A checkpoint is complete when they return on any rank. An error of one rank is raised on
all, in the same words, as soon as all know, so that none waits for one that has failed.

Decided here, because the sources are silent (API 9.5):

- ``*`` in ``model_*.pt`` and ``optimizer_*.pt`` is the suffix of `smp.save`: ``mp_rank`` without
  tensor parallelism, ``pp_rank`` and ``tp_rank`` with it.
- With sharded data parallelism the ``*``, also of `smp.save`, is the number of the shard in the sharding
  group, after ``pp_rank`` and ``tp_rank`` with tensor parallelism; parameters that are not split, and
  buffers, are in every file. Each says which shard it is, and which save it is of.
- With distributed modules each file of a partial checkpoint says whose slices it has (parameters/slices.py).
- With sharded data parallelism the optimizer's files also have ``partition_count`` and ``fp32_flat_groups``,
  and the model's have their state under ``module``, too, as public readers of such files look for them.
- With ``shard_optimizer_state`` every rdp rank writes an optimizer file, called as by ``v3``. In 16 bits each
  optimizer file has a ``fp16_states_*.pt`` beside it, with the masters and the loss scaler.
- A partial file is written by the first of the replicas that hold the same, everything else by world rank 0. The
  path is one folder for all ranks; where it is not, the save is refused.
- A partial folder also holds ``manifest.json`` (folders.py), and each model file the partition.
- A full file ``{tag}`` without an optimizer is the model's plain state dict, as `torch.save(module.state_dict(), ...)`
  makes it; with one it is a dict: ``model`` and ``optimizer`` as of their ``state_dict()``. The user content is
  ``user_content_{tag}``. Both files come into place together (full.py).
- ``newest`` names the folder, or the file: ``{tag}_partial`` or ``{tag}``. The file ``newest`` is written last.
- A model that is not partitioned yet is refused by a partial save, because its parameters have no owners
  yet. A full save is allowed as far as ``model.state_dict()`` is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from smp_core.errors import ArgumentError, ArgumentTypeError, SmpError
from smp_core.runtime import current as runtime_of
from smp_core.topology import GroupKind
from smp_core.torch import weights
from smp_core.torch.checkpoint import files, folders, full, naming, plain
from smp_core.torch.checkpoint.trust import trusted
from smp_core.torch.checkpoint.trying import checkpoint_try, on_first, same
from smp_core.torch.exceptions import CheckpointError
from smp_core.torch.optimizer import state as optimizer_state
from smp_core.torch.parameters import slices
from smp_core.torch.pipeline import placement
from smp_core.torch.session import TrainingSession
from smp_core.torch.session import current as session_of
from smp_core.torch.sharding import records
from smp_core.torch.sharding.sharding import Sharding
from smp_core.torch.sharding.whole_model import WHOLE_MODEL
from smp_core.torch.state_keys import PARTIAL
from smp_core.torch.tensor_tree import StateDict

if TYPE_CHECKING:
    import types

T = TypeVar("T")

_SAVE, _RESUME = "smp.save_checkpoint", "smp.resume_from_checkpoint"
_SAVED = "save"  #: in a partial file, and its manifest: which save it is of
_FP16 = optimizer_state.FP16  # and a kind of file
_PART = "part"  #: in an optimizer's file: which part of a split state it is, or None
_SHARD = "shard"  #: in a partial file: which shard it is (sharding/records.py), or None
_SLICES = "slices"  #: in a partial file: whose slices it has (parameters/slices.py), or None


def save(
    obj: object,
    f: str | os.PathLike[str],
    partial: bool = True,
    pickle_module: types.ModuleType | None = None,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Save ``obj`` to a file of this rank, or, if not ``partial``, to ``f`` itself.

    The partial file is called ``{f}_{mp_rank}``; with tensor parallelism ``{f}_{pp_rank}_{tp_rank}``;
    with sharded data parallelism ``{f}_{shard}``, as the files of partial checkpoints, or
    ``{f}_{pp_rank}_{tp_rank}_{shard}``; with ``v3`` ``{f}_{pp_rank}_{tp_rank}_{rdp_rank}``. Every rank that
    calls writes; of several that write one name, each leaves a whole file, and the last one's stays.

    Raises CheckpointError if ``obj`` holds an object that cannot be loaded without running code, naming the object's
    path, or if the file cannot be written; a file that was there before is then unchanged. ArgumentError
    for a ``pickle_module`` or ``pickle_protocol`` that `smp.load` cannot read. (API 1.11)
    """
    call = "smp.save"
    runtime = runtime_of(call)
    naming.refuse_module(call, pickle_module)
    if pickle_protocol != 2:
        raise ArgumentError(
            f"{call}: pickle_protocol={pickle_protocol!r}: only protocol 2 can be loaded without running "
            "code. Leave it out"
        )
    obj = plain.plain(obj, call, "obj")
    path = naming.checked_path(call, "f", f)
    if partial:
        name = naming.of_rank(runtime, v3=True) if v3 else naming.of_part(runtime)
        path = naming.suffixed(path, name)
    files.save(path, obj)


def load(
    f: str | os.PathLike[str],
    map_location: Any = None,
    pickle_module: types.ModuleType | None = None,
    partial: bool = True,
    back_compat: bool = False,
    **pickle_load_args: Any,
) -> Any:
    """Load the object that `smp.save` saved to ``f`` on this rank; no code of the file is run.

    Of a partial file the name is found as `smp.save` makes it with this configuration, else as it
    makes it with another, ``v3`` or not. ``back_compat``, for files from before version 1.10, looks
    for ``{f}_{mp_rank}`` first.
    ``map_location`` and ``pickle_load_args`` are those of `torch.load`.

    Raises CheckpointError, naming the path, if the file is missing, torn, foreign or would run code.
    ArgumentError for ``weights_only=False``, outside of ``smp.trust_checkpoints``, and a ``pickle_module``
    of your own. (API 1.11)
    """
    call = "smp.load"
    runtime = runtime_of(call)
    naming.refuse_module(call, pickle_module)
    weights_only = pickle_load_args.get("weights_only")
    if weights_only is not None and not weights_only and not trusted():
        raise ArgumentError(
            f"{call}: weights_only=False would run what the file says. Leave it out; for a file that you "
            "trust: with smp.trust_checkpoints()"
        )
    path = naming.checked_path(call, "f", f)
    if not partial:
        return files.load(
            path, "what smp.save(partial=False) wrote", map_location, **pickle_load_args
        )
    paths = [naming.suffixed(path, name) for name in naming.candidates(runtime, back_compat)]
    found = next((each for each in paths if each.exists()), paths[0])
    what = f"what smp.save wrote on pp_rank {runtime.position(GroupKind.PP)}"
    return files.load(found, what, map_location, **pickle_load_args)


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str,
    partial: bool = True,
    model: Any = None,
    optimizer: Any = None,
    user_content: object = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Save model, optimizer and ``user_content`` under ``path``; every rank of the world calls it.

    Partial: the folder ``{tag}_partial`` with one ``model_*.pt`` and ``optimizer_*.pt`` per partition
    and ``user_content.pt``. Full: the file ``{tag}``, and ``user_content_{tag}``. Then the text file
    ``newest`` names the folder, or the file. Folder and file are replaced whole: whenever the call is cut off, there
    is the checkpoint from before or the new one. ``path`` is made if need be.

    Args:
        tag: the same on all ranks; no slash.
        model: the DistributedModel, or None to leave it out.
        optimizer: the DistributedOptimizer, or None.
        user_content: tensors, numbers, strings, numpy's scalars and arrays, which come back as numbers
            and tensors, and containers of them. World rank 0's is saved. See ``smp.trust_checkpoints``.
        translate_if_full: of a full checkpoint, save distributed modules of Hugging Face with the names of the original
            (API 1.10).
        num_kept_partial_checkpoints: how many partial checkpoints stay; the oldest go.

    Raises CheckpointError on every rank: the arguments differ between ranks, user content cannot be
    loaded without running code (its path is named), the model is not partitioned (``partial``), a
    disk is full, the path is not one folder for all. ArgumentError, ArgumentTypeError for bad values.
    (API 1.11)
    """
    session = session_of(_SAVE)
    runtime = session.runtime
    content: list[object] = []

    def check() -> tuple[object, ...]:
        naming.check_tag(_SAVE, tag)
        _outside_step(session, _SAVE)
        _check_own(session, "model", model)
        _check_own(session, "optimizer", optimizer)
        keep = num_kept_partial_checkpoints
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int)):
            raise ArgumentTypeError(
                f"{_SAVE}: num_kept_partial_checkpoints must be an int or None, not {keep!r}"
            )
        if keep is not None and keep < 1:
            raise ArgumentError(
                f"{_SAVE}: num_kept_partial_checkpoints={keep}: must be at least 1, or None to keep all"
            )
        if partial and model is not None and not model.partitioned:
            raise CheckpointError(
                f"{_SAVE}: the model is not partitioned yet, so that no rank knows its part. Save after the "
                "first step, or with partial=False"
            )
        content.append(plain.plain(user_content, _SAVE, "user_content"))
        naming.checked_path(_SAVE, "path", path)
        return tag, bool(partial), model is not None, optimizer is not None, keep

    said = checkpoint_try(runtime, _SAVE, check)
    same(_SAVE, "tag, partial, model, optimizer, number kept", said)
    folder = naming.checked_path(_SAVE, "path", path)
    if partial:
        _save_partial(session, folder, tag, model, optimizer, content[0])
    else:
        _save_full(session, folder, tag, model, optimizer, content[0], translate_if_full)

    def conclude() -> None:
        name = tag + folders.SUFFIX if partial else tag
        files.save_text(folder / naming.NEWEST, name)  # without a newline, since scripts join it
        if partial and num_kept_partial_checkpoints is not None:
            folders.prune(folder, num_kept_partial_checkpoints)

    checkpoint_try(runtime, _SAVE, on_first(runtime, conclude))


def _save_partial(
    session: TrainingSession, path: Path, tag: str, model: Any, optimizer: Any, user_content: object
) -> None:
    runtime = session.runtime
    begun = checkpoint_try(runtime, _SAVE, on_first(runtime, lambda: folders.begin(path, tag)))
    nonce = str(begun[0])

    def fill() -> None:
        folder = folders.to_fill(path, tag, nonce)
        name = naming.of_part(runtime)
        said = {
            PARTIAL: True,
            _SAVED: nonce,
            _SHARD: _sharding_of(session).record(),
            _SLICES: _slices_of(session),
        }
        if runtime.position(GroupKind.REPLICATION) == 0 and model is not None:
            state = {
                "model": weights.local_state_dict(model),
                "partition": _partition_of(session),
                **said,
            }
            if model.sharding.place is not None:
                state["module"] = state[
                    "model"
                ]  # its name in public readers of shards; stored once
            state = plain.plain(state, _SAVE, "model.local_state_dict()")
            files.save(folder / f"model_{name}.pt", state)
        split = _part_of(session) is not None
        if optimizer is not None and (split or runtime.position(GroupKind.REPLICATION) == 0):
            _save_optimizer(session, folder, optimizer, said)
        if runtime.rank == 0:
            files.save(folder / folders.USER_CONTENT, user_content)

    try:
        checkpoint_try(runtime, _SAVE, fill)
    except SmpError:
        if runtime.rank == 0:
            folders.discard(path, tag)
        raise
    checkpoint_try(
        runtime,
        _SAVE,
        on_first(runtime, lambda: folders.finish(path, tag, naming.degrees(runtime), nonce)),
    )


def _save_optimizer(
    session: TrainingSession, folder: Path, optimizer: Any, said: StateDict
) -> None:
    """Save the files of this rank's state; the parts that only a 16-bit run has are in a file of their own."""
    state, name = optimizer_state.own_part(optimizer._parameters), naming.of_state(session.runtime)
    state = plain.plain(state, _SAVE, "optimizer.local_state_dict()")
    precise, said = state.pop(_FP16, None), {**said, _PART: _part_of(session)}
    flat = _flat_groups(session, optimizer)
    files.save(folder / f"optimizer_{name}.pt", {"optimizer": state, **flat, **said})
    if precise is not None:
        files.save(folder / f"{_FP16}_{name}.pt", {_FP16: precise, **said})


def _flat_groups(session: TrainingSession, optimizer: Any) -> StateDict:
    """This rank's part of each parameter, by the optimizer's groups, from which public readers of shards
    put parameters together (API 1.11). Empty where parameters are whole.
    """
    place = _sharding_of(session).place
    if place is None:
        return {}
    return {
        "partition_count": place[1],
        "fp32_flat_groups": optimizer.fp32_partitioned_groups_flat,
    }


def _save_full(
    session: TrainingSession,
    path: Path,
    tag: str,
    model: Any,
    optimizer: Any,
    user_content: object,
    translate: bool,
) -> None:
    runtime = session.runtime

    def gather() -> StateDict:
        # Calls of all ranks: each raises on all ranks if it raises on one.
        state: StateDict = {PARTIAL: False}
        if model is not None:
            state["model"] = weights.state_dict(model, gather_to_rank0=True)
            if translate:
                state["model"] = weights.original(model, state["model"])
        if optimizer is not None:
            if runtime.topology.tensor > 1 or runtime.config.shard_optimizer_state:
                raise CheckpointError(
                    f"{_SAVE}: a full checkpoint of the optimizer's state is not supported with tensor parallelism or "
                    "shard_optimizer_state (docs/spec/api.md#6). Save with partial=True, or without optimizer"
                )
            state["optimizer"] = optimizer_state.state_dict(
                optimizer._parameters, keep=runtime.rank == 0
            )
        return state

    mine: list[StateDict] = []
    checkpoint_try(runtime, _SAVE, lambda: mine.append(gather()))

    def write() -> None:
        state = mine[0] if optimizer is not None or model is None else mine[0]["model"]
        state = plain.plain(state, _SAVE, "the full state")
        full.write(path, tag, state, user_content)

    checkpoint_try(runtime, _SAVE, on_first(runtime, write))


def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[Any], object] | None = None,
) -> Any:
    """Load a checkpoint of `smp.save_checkpoint`; every rank of the world calls it. Returns the user
    content.

    Call it once model and optimizer are wrapped. Weights and optimizer state are loaded when the
    model is partitioned: at once, if it is. A partial checkpoint brings its partition along, which then holds
    whatever ``auto_partition`` and `smp.partition` say; a full one loads into any partition, and into any
    sharding degree and number of ranks. The optimizer's state of a full one is loaded, too, if it holds one
    and there is an optimizer: SMP loaded none then (API 1.11), so that training did not go on where it stopped.

    Args:
        tag: None for the one that the file ``newest`` names. Of a partial checkpoint it may be the name of the folder,
            which is the content of ``newest``.
        strict: as of `torch.nn.Module.load_state_dict`.
        load_optimizer: False leaves the optimizer as it is.
        load_sharded_optimizer_state: False, with sharded data parallelism, loads no more of the optimizer's
            state than masters and the loss scaler of a 16-bit run (INF).
        translate_function: applied to the model's state of a full checkpoint before it is loaded.

    Raises CheckpointError on every rank, before anything is changed: the checkpoint is missing,
    torn, foreign, was saved with other degrees (both numbers are named), has the shards or slices of another rank,
    or does not fit the model.
    (API 1.11)
    """
    session = session_of(_RESUME)
    runtime = session.runtime

    def find() -> tuple[object, ...]:
        _outside_step(session, _RESUME)
        folder = naming.checked_path(_RESUME, "path", path)
        if tag is not None:
            given = tag.removesuffix(folders.SUFFIX) if partial and isinstance(tag, str) else tag
            naming.check_tag(_RESUME, given)
            return given, bool(partial)
        said = files.load_text(folder / naming.NEWEST, "the tag of the newest checkpoint").strip()
        said = said.removesuffix(folders.SUFFIX)
        try:
            naming.check_tag(_RESUME, said)
        except SmpError as error:
            raise CheckpointError(f"{folder / naming.NEWEST}: holds no tag: {error}") from error
        return said, bool(partial)

    found = checkpoint_try(runtime, _RESUME, find)
    same(_RESUME, "tag and partial", found)
    tag, folder = str(found[0][0]), naming.checked_path(_RESUME, "path", path)
    loaded: list[_Loaded] = []
    read = _read_partial if partial else _read_full
    checkpoint_try(
        runtime, _RESUME, lambda: loaded.append(read(session, folder, str(tag), load_optimizer))
    )
    state = loaded[0]
    sharded = _sharding_of(session).place is not None
    state.precise_only = sharded and not load_sharded_optimizer_state
    if state.model is not None and translate_function is not None and not partial:
        checkpoint_try(runtime, _RESUME, lambda: _translate(state, translate_function))
    checkpoint_try(runtime, _RESUME, lambda: _check(session, state, strict))
    checkpoint_try(runtime, _RESUME, lambda: _apply_model(session, state, strict))
    checkpoint_try(runtime, _RESUME, lambda: _apply_optimizer(session, state))
    return state.user_content


class _Loaded:
    """The content of a checkpoint for this rank; None for a part that it does not have."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.model: Any = None
        self.partition: StateDict | None = None
        self.placement: placement.Placement | None = None  # to be that of this run
        self.optimizer: Any = None
        self.precise_only = False  # of the optimizer's state no more than fp16_states
        self.user_content: object = None


def _read_partial(session: TrainingSession, path: Path, tag: str, load_optimizer: bool) -> _Loaded:
    runtime = session.runtime
    folder, manifest = folders.find(path, tag)
    for key, now in naming.degrees(runtime).items():
        then = manifest.degrees.get(key, 1)
        if then != now:
            raise CheckpointError(
                f"{folder}: saved with {key}={then}, and this run has {key}={now}. A partial checkpoint does not "
                "change degrees: run with those that it was saved with; or there save a full one (partial=False), "
                "which resumes at any degrees"
            )
    state = _Loaded(folder)
    if manifest.holds("model"):
        content = _part(session, folder, manifest, "model", "partition")
        state.model, state.partition = content["model"], content["partition"]
    if load_optimizer and manifest.holds("optimizer"):
        state.optimizer = _part(session, folder, manifest, "optimizer")["optimizer"]
        if manifest.holds(_FP16):
            state.optimizer[_FP16] = _part(session, folder, manifest, _FP16)[_FP16]
    elif load_optimizer and session.optimizer is not None:
        raise CheckpointError(
            f"{folder}: holds no state of an optimizer, and this run has one. Pass load_optimizer=False to "
            "start with a new state"
        )
    state.user_content = files.load(folder / folders.USER_CONTENT, "the user content")
    return state


def _part(
    session: TrainingSession, folder: Path, manifest: folders.Manifest, kind: str, *keys: str
) -> Any:
    """This rank's content of one kind in the folder: a dict with the kind and ``keys`` among its keys."""
    _expect_own(session, folder, "model" if kind == "model" else "optimizer")
    of_rank = naming.of_part if kind == "model" else naming.of_state
    name = f"{kind}_{of_rank(session.runtime)}.pt"
    _listed(folder, manifest, name)
    content = _dict(folder / name, f"the {kind}'s part of this rank", kind, *keys)
    if content.get(_SAVED) != manifest.save:
        raise CheckpointError(
            f"{folder / name}: is not of the save that this checkpoint is of: it was put there afterwards. "
            "Remove this checkpoint and resume from an older one"
        )
    mine, found = _part_of(session), content.get(_PART)
    if kind != "model" and found != mine:
        raise CheckpointError(
            f"{folder / name}: expected {_say_part(mine)} of the optimizer's state, found {_say_part(found)}. Resume "
            "with the ranks and the shard_optimizer_state that it was saved with, or pass load_optimizer=False"
        )
    records.check(folder / name, content.get(_SHARD), _sharding_of(session).record())
    slices.check(folder / name, content.get(_SLICES), _slices_of(session))
    return content


def _read_full(session: TrainingSession, path: Path, tag: str, load_optimizer: bool) -> _Loaded:
    file, beside = full.find(path, tag)
    if file.is_dir() or ((path / f"{tag}{folders.SUFFIX}").is_dir() and not file.exists()):
        raise CheckpointError(
            f"{path / tag}: expected the file of a full checkpoint; this tag is of a partial one. Resume with "
            "partial=True"
        )
    state = _Loaded(path / tag)
    content = files.load(file, "a full checkpoint")
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{path / tag}: expected a full checkpoint, a dict, found a {type(content).__name__}"
        )
    if content.get(PARTIAL, False):
        raise CheckpointError(
            f"{path / tag}: expected a full checkpoint, found a partial one. Resume with partial=True"
        )
    state.model = content.get("model") if PARTIAL in content else content
    if beside is not None:
        state.user_content = files.load(beside, "the user content")
    elif PARTIAL in content:  # files of before had it in them, too
        state.user_content = content.get("user_content")
    if state.model is not None:
        _expect_own(session, path / tag, "model")
    if load_optimizer and PARTIAL in content and session.optimizer is not None:
        state.optimizer = content.get("optimizer")
    return state


def _translate(state: _Loaded, function: Callable[[Any], object]) -> None:
    state.model = function(state.model)


def _check(session: TrainingSession, state: _Loaded, strict: bool) -> None:
    """Raise all errors that can be found before anything is changed; a model that is not partitioned raises later."""
    model, optimizer = session.model, session.optimizer
    if state.partition is not None:
        state.placement = _restored(session, state.partition, state.where)
    if state.model is not None and model is not None and model.partitioned:
        with _of_file(state.where, "model"):
            weights.check(model, state.model, strict, same_partition=state.partition is not None)
    if state.optimizer is not None and optimizer is not None:
        with _of_file(state.where, "optimizer"):
            optimizer_state.check(state.optimizer)
            optimizer._smp_check_fits({**state.optimizer, PARTIAL: False})


@contextlib.contextmanager
def _of_file(where: Path, kind: str) -> Iterator[None]:
    """Say of torch's errors which checkpoint does not fit."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        remedy = ", or pass load_optimizer=False" if kind == "optimizer" else ""
        raise CheckpointError(
            f"{where}: does not fit the {kind} of this run, which is unchanged: {str(error).rstrip('.')}. Build "
            f"what was saved, or resume from another checkpoint{remedy}"
        ) from error


def _apply_model(session: TrainingSession, state: _Loaded, strict: bool) -> None:
    if state.placement is not None:
        session.restored = state.placement
    if state.model is not None and session.model is not None:
        # Without communication: a rank whose file does not fit tells the others afterwards.
        weights.load_state_dict(
            session.model, state.model, strict, same_partition_load=state.partition is not None
        )


def _apply_optimizer(session: TrainingSession, state: _Loaded) -> None:
    if state.optimizer is None or session.optimizer is None:
        return
    if state.precise_only:
        session.optimizer._smp_load_precise(state.optimizer.get(_FP16))
    else:
        # No part to be merged with those of other ranks: it is all that this rank needs.
        session.optimizer.load_state_dict({**state.optimizer, PARTIAL: False})


# Checks and helpers of one rank, without communication.


def _partition_of(session: TrainingSession) -> StateDict:
    assert session.model is not None
    placed = session.model.placement
    assert placed is not None  # a model that is not partitioned was refused
    return {
        "degree": placed.degree,
        "modules": dict(placed.modules),
        "parameters": dict(placed.parameters),
        "buffers": dict(placed.buffers),
    }


def _part_of(session: TrainingSession) -> list[int] | None:
    """The index of this rank's part of an optimizer's state, and the number of parts, if shard_optimizer_state
    splits it.
    """
    runtime = session.runtime
    if naming.of_state(runtime) == naming.of_part(runtime):
        return None
    return [runtime.position(GroupKind.RDP), len(runtime.group(GroupKind.RDP).ranks)]


def _say_part(part: list[int] | None) -> str:
    return "all" if part is None else f"part {part[0]} of {part[1]}"


def _sharding_of(session: TrainingSession) -> Sharding:
    sharding: Sharding = WHOLE_MODEL if session.model is None else session.model.sharding
    return sharding


def _slices_of(session: TrainingSession) -> dict[str, object] | None:
    """The record of this rank's slices; None without distributed modules."""
    return None if session.model is None else weights.slices_record(session.model)


def _restored(session: TrainingSession, partition: Any, where: Path) -> placement.Placement | None:
    """The partition that a checkpoint brought, None if it is that of the run. Raises CheckpointError if
    it cannot hold.
    """
    try:
        made = placement.Placement(**partition)
        tables = {"modules": made.modules, "parameters": made.parameters, "buffers": made.buffers}
        ranks = [rank for table in tables.values() for rank in table.values()]
        if any(type(rank) is not int or not 0 <= rank < made.degree for rank in ranks):
            raise ValueError("it names partitions that do not exist")
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{where}: holds a partition that cannot be read ({error})"
        ) from error
    model: Any = session.model
    mine = {path for path, _ in model.get_module().named_modules(remove_duplicate=False)}
    for path in sorted(mine ^ made.modules.keys()):
        here, there = ("has", "has not") if path in mine else ("has not", "has")
        raise CheckpointError(
            f"{where}: is of another model: this one {here} a module {path!r}, and that one {there}. "
            "Build the model that was saved, or resume from another checkpoint"
        )
    now = model.placement
    if now is not None:
        for kind, table in tables.items():
            for name, rank in table.items():
                other = getattr(now, kind).get(name)
                if other != rank:
                    raise CheckpointError(
                        f"{where}: has {name or '(the whole model)'!r} on partition {rank}, and this run, which "
                        f"is partitioned already, on {'none' if other is None else other}. Resume before "
                        "the first step, or from a full checkpoint (partial=False)"
                    )
        return None
    return made


def _check_own(session: TrainingSession, kind: str, given: object) -> None:
    """A session has one model and one optimizer; others could not be resumed."""
    own = getattr(session, kind)
    if given is not None and given is not own:
        made = "Distributed" + kind.capitalize()
        have = "none was made" if own is None else f"the one of this run is another {made}"
        raise ArgumentTypeError(
            f"{_SAVE}: {kind} must be the smp.{made}, not a {type(given).__name__} ({have})"
        )


def _expect_own(session: TrainingSession, where: Path, kind: str) -> None:
    if getattr(session, kind) is None:
        made = "Distributed" + kind.capitalize()
        remedy = ", or pass load_optimizer=False" if kind == "optimizer" else ""
        raise CheckpointError(
            f"{where}: holds the state of the {kind}, and this run has no smp.{made} yet. Make it before "
            f"smp.resume_from_checkpoint{remedy}"
        )


def _outside_step(session: TrainingSession, call: str) -> None:
    if session.step is not None:
        raise CheckpointError(
            f"{call}: called inside of a step, whose gradients are not complete. Call it between steps"
        )


def _listed(folder: Path, manifest: folders.Manifest, name: str) -> None:
    if name not in manifest.files:
        raise CheckpointError(
            f"{folder}: has no {name}, which this rank needs. Remove this checkpoint and resume from an older one"
        )


def _dict(path: Path, what: str, *keys: str) -> Any:
    content = files.load(path, what)
    if not isinstance(content, dict) or any(key not in content for key in keys):
        raise CheckpointError(
            f"{path}: expected {what}, a dict with {', '.join(map(repr, keys))}; found something else. "
            "Remove this checkpoint and resume from an older one"
        )
    return content
