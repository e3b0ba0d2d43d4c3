"""CheckpointManager: checkpoints of TensorFlow, in one folder for each rank (API 2, 8.10).

A rank writes the variables that it owns, and the slots of optimizers by the variable that they are for. Each
checkpoint holds a description: the save that wrote it, which is the same on all ranks, and the partition. Old
checkpoints go when all ranks have the new one, so that there always is one that all have.

A restore of the model before the first step waits for the partition, and the state of an optimizer waits until the
optimizer is built: plain Keras 3 would forget both without a word. Other variables, such as a count of steps, are
restored at once.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from smp_core.errors import ArgumentTypeError, CheckpointError
from smp_core.tensorflow import session as sessions
from smp_core.tensorflow import slots
from smp_core.tensorflow import tensorflow_parts as parts
from smp_core.tensorflow.collective_try import collective_try
from smp_core.tensorflow.tensorflow_parts import tf
from smp_core.topology import GroupKind

T = TypeVar("T")

#: The tensor of a checkpoint that describes it: the attribute ``smp_description`` of what is written.
_DESCRIPTION = "smp_description/.ATTRIBUTES/VARIABLE_VALUE"


@dataclasses.dataclass(frozen=True)
class _Description:
    """The part of a checkpoint that says what it is.

    Attributes:
        save: the call of ``save`` that wrote it, by a name that no other has.
        partitions: the number of partitions.
        owned: the variables of the rank.
        built: for each optimizer, the variables that it was built for, in its order.
    """

    save: str
    partitions: int
    owned: Sequence[str]
    built: Mapping[str, Sequence[int]]


class CheckpointManager(parts.LateSweepManager):
    """A ``tf.train.CheckpointManager`` whose checkpoints are in ``directory/mp_rank_N``.

    Args:
        checkpoint: a ``tf.train.Checkpoint`` of the model, the optimizer and other variables.
        directory: the folder of all ranks.
        max_to_keep: the number of checkpoints to keep; None keeps all.
        checkpoint_name: the beginning of the names of files.
    """

    def __init__(
        self,
        checkpoint: Any,
        directory: str = "/opt/ml/checkpoints",
        max_to_keep: int | None = None,
        checkpoint_name: str = "ckpt",
    ) -> None:
        session = sessions.current("smp.CheckpointManager")
        if not isinstance(checkpoint, tf.train.Checkpoint):
            raise ArgumentTypeError(
                f"smp.CheckpointManager: checkpoint is a {type(checkpoint).__name__}, not a tf.train.Checkpoint"
            )
        self._session, self._given = session, checkpoint
        self._shadow = tf.train.Checkpoint()
        self._root = Path(directory)
        rank = session.runtime.position(GroupKind.MP)
        super().__init__(
            checkpoint,
            str(self._root / f"mp_rank_{rank}"),
            max_to_keep,
            checkpoint_name=checkpoint_name,
        )

    @property
    def checkpoint(self) -> Any:
        """The checkpoint that the manager was given."""
        return self._given

    def save(self, *args: Any, **kwargs: Any) -> Any:
        """Save a checkpoint of this rank's variables, and return its path; None on a replica, which does not write.

        Every rank calls it, and it returns when all have written.

        Raises CheckpointError, on every rank, if one could not write; and before the first step, when no rank owns a
        variable yet.
        """
        session = self._session
        if not session.partitioned:
            raise CheckpointError(
                "smp.CheckpointManager.save: the model is not partitioned yet; save after the first step"
            )
        writes = not session.runtime.position(GroupKind.RDP)
        (name, *_) = self._try_on_all("save", lambda: uuid.uuid4().hex)

        def write() -> str | None:
            if not writes:
                return None
            self.use(self._local(name))
            path: str | None = super(CheckpointManager, self).save(*args, **kwargs)
            return path

        path = self._try_on_all("save", write)[session.runtime.rank]
        if writes:
            self.sweep()  # all ranks have the new one
        return path

    def restore(self, restore_prefix: str | None = None) -> str | None:
        """Restore a checkpoint: the one of this name, such as ``"ckpt-2"``, or the latest that all ranks have.

        Every rank calls it. Returns its path in the rank's folder; None if no rank has any checkpoint, as at the start
        of a training that names the one to go on from. Before the first step it restores what is neither the model nor
        an optimizer, and those when the model is partitioned.

        Raises CheckpointError, on every rank, for a name that a rank does not have beside others, or of another
        partition.
        """
        session = self._session
        path = self._path(restore_prefix)
        if path is not None and session.partitioned:
            self._try_on_all("restore", lambda: self._load(path))
        elif path is not None:
            others = self._others()

            def early() -> None:
                if others:
                    given = tf.train.Checkpoint(**others)
                    given.restore(path).assert_existing_objects_matched()

            self._try_on_all("restore", early)
            session.deferred_restores.append(lambda: self._load(path, others))
        return path

    def _try_on_all(self, name: str, action: Callable[[], T]) -> list[T]:
        """The values of all ranks, by world rank; CheckpointError on all if the action failed on one."""
        call = f"smp.CheckpointManager.{name}"
        return collective_try(self._session.runtime, call, action, CheckpointError)

    def restore_or_initialize(self) -> str | None:
        """Restore the latest checkpoint, as ``restore`` does; there is no ``init_fn``."""
        return self.restore()

    def _path(self, prefix: str | None) -> str | None:
        """The checkpoint of this name, or the latest that all ranks have; the same one on all ranks."""
        runtime, count = self._session.runtime, self._session.partitions
        found: list[dict[str, _Description]] = self._try_on_all("restore", self._described)
        writers = [
            each
            for rank, each in enumerate(found)
            if not runtime.topology.position(GroupKind.RDP, rank)
        ]
        common = [
            name
            for name, each in found[0].items()
            if all(name in rank and rank[name].save == each.save for rank in writers)
        ]
        wanted = common if prefix is None else [prefix]
        for each in found:
            for name in wanted[-1:] or each:
                wrote = each[name].partitions if name in each else count
                if wrote != count:
                    raise CheckpointError(
                        f"smp.CheckpointManager.restore: {self._root} was written by {wrote} partitions, and there "
                        f"are {count}. Restore it with pipeline_parallel_degree={wrote}"
                    )
        if not common and (prefix is None or not any(found)):
            return None
        name = wanted[-1]
        lacking = [rank for rank, each in enumerate(found) if name not in each]
        if lacking or name not in common:
            reason = f"not on rank {lacking[0]}" if lacking else "ranks wrote it in different saves"
            raise CheckpointError(
                f"smp.CheckpointManager.restore: there is no checkpoint {name!r} in {self._root} that all ranks have "
                f"({reason}); there is {', '.join(common) or 'none'}"
            )
        return str(Path(self.directory) / name)

    def _described(self) -> dict[str, _Description]:
        """The descriptions of the checkpoints in this rank's folder, the oldest first."""
        state = tf.train.get_checkpoint_state(self.directory)
        listed = [] if state is None else list(map(_name, state.all_model_checkpoint_paths))
        names = {each.stem for each in Path(self.directory).glob("*.index")}
        order = [*sorted(names - set(listed)), *(each for each in listed if each in names)]
        return {each: found for each in order if (found := self._description(each)) is not None}

    def _description(self, name: str) -> _Description | None:
        """The description of a checkpoint; None if it is not one of this class."""
        found = tf.train.load_checkpoint(str(Path(self.directory) / name))
        if not found.has_tensor(_DESCRIPTION):
            return None
        return _Description(**json.loads(found.get_tensor(_DESCRIPTION)))

    def _others(self) -> dict[str, Any]:
        """The parts that need no partition: all but the model and the optimizers."""
        return {
            name: each
            for name, each in _children(self._given).items()
            if each is not self._session.model and not hasattr(each, "apply_gradients")
        }

    def _load(self, path: str, restored: Collection[str] = ()) -> None:
        """Restore the parts of the checkpoint, but those that are restored already."""
        owned, found = self._owned(), self._description(_name(path))
        assert found is not None
        if found.owned != owned:
            differ = sorted(set(found.owned) ^ set(owned))
            raise CheckpointError(
                f"smp.CheckpointManager.restore: {path} has the variables of another partition of the model: "
                f"{', '.join(differ) or 'another order'}. Use the partition that wrote it"
            )
        # Keras forgets a restore of slots that are not there yet.
        for name, each in _children(self._given).items():
            if slots.is_numbered(each):
                slots.build(name, each, self._variables(), found.built.get(name, ()))
        local = self._local()
        self.use(local)
        late = {name: each for name, each in _children(local).items() if name not in restored}
        given = tf.train.Checkpoint(**late) if restored else local
        given.restore(path).assert_existing_objects_matched()
        if restored:
            local.save_counter.assign(given.save_counter)

    def _variables(self) -> list[Any]:
        """The variables of the model, of all ranks."""
        model = self._session.model
        return [] if model is None else model.all_variables()

    def _own(self) -> dict[int, Any]:
        """The variables of this rank, by their numbers in the model, which do not depend on names."""
        model = self._session.model
        own = set() if model is None else {id(each) for each in model.variables}
        return {at: each for at, each in enumerate(self._variables()) if id(each) in own}

    def _owned(self) -> list[str]:
        return [
            f"variable {at} of shape {tuple(each.shape)}"
            for at, each in sorted(self._own().items())
        ]

    def _local(self, save: str = "") -> Any:
        """The checkpoint of this rank: its variables instead of the model, and slots by variable."""
        variables, built = self._variables(), {}
        for name, each in _children(self._given).items():
            found = each
            if each is self._session.model:
                found = tf.train.Checkpoint()
                for at, variable in self._own().items():
                    setattr(found, f"variable_{at}", variable)
            elif slots.is_numbered(each):
                found, built[name] = (
                    slots.by_variable(each, variables),
                    slots.built_for(each, variables),
                )
            setattr(self._shadow, name, found)
        description = _Description(save, self._session.partitions, self._owned(), built)
        self._shadow.smp_description = tf.Variable(json.dumps(dataclasses.asdict(description)))
        return self._shadow


def _name(path: str) -> str:
    return Path(path).name


def _children(checkpoint: Any) -> dict[str, Any]:
    """The named parts of a ``tf.train.Checkpoint``."""
    found = {
        name: each
        for name, each in vars(checkpoint).items()
        if not name.startswith("_") and name != "root"
    }
    if not found:
        raise CheckpointError(
            "smp.CheckpointManager: the checkpoint has no named parts; make it as "
            "tf.train.Checkpoint(model=model, optimizer=optimizer)"
        )
    return found
