"""Hypothesis strategies for tests on ranks: worlds, groups, configurations, objects, tensors, and
whole communication programs.

Drawn values follow the input rules of the design ("Exactness"): sizes are odd, tiny, zero and not
divisible; groups are unsorted and leave out rank 0; degree 1 comes often; values are unique per
rank and per element; views have strides, offsets and guard elements. Every drawn value prints, in a
failing example, as code that can be pasted below::

    import signal
    import torch
    from collections import OrderedDict
    from math import inf
    from numpy import array, float32, int64
    from pytest_smp.strategies import Batch, Block, MicrobatchSplit, Model, Overflows, Pair, Record
    from pytest_smp.strategies import ShardedTraining, Sliceable, StepCall, TensorSpec, Training
    from pytest_smp.strategies import TensorTraining
    from pytest_smp.strategies import Exit, Kill, Raise, Schedule, Stall, Topology

A communication program prints as a test file that runs alone.

All strategies refuse bad arguments at once, with ``hypothesis.errors.InvalidArgument``. The strategies
of tensors, objects, programs and training import torch when they are first asked for; the others never do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pytest_smp.ranks.faults import Exit, Kill, Raise, Stall
from pytest_smp.ranks.schedule import Schedule
from pytest_smp.strategies.configuration import configs
from pytest_smp.strategies.divisions import routings, sequence_shards, split_matrices
from pytest_smp.strategies.faults import faults
from pytest_smp.strategies.mistakes import invalid_configs
from pytest_smp.strategies.overflows import Overflows, overflows
from pytest_smp.strategies.schedules import schedules
from pytest_smp.strategies.worlds import degrees, groups, placements, topologies, world_sizes
from smp_core.topology import Topology

if TYPE_CHECKING:
    from pytest_smp.strategies.communication import (
        InvalidProgram,
        Program,
        invalid_programs,
        programs,
    )
    from pytest_smp.strategies.equality import same
    from pytest_smp.strategies.microbatches import (
        Batch,
        MicrobatchSplit,
        StepCall,
        batches,
        microbatch_splits,
        step_calls,
    )
    from pytest_smp.strategies.numbers import dtypes
    from pytest_smp.strategies.payloads import Pair, Record, objects
    from pytest_smp.strategies.recipes import TensorSpec, lengths, shapes, tensors
    from pytest_smp.strategies.slicing import Sliceable, WrongSlice, sliceables
    from pytest_smp.strategies.training import Training, blocks, models
    from pytest_smp.strategies.training_draws import trainings
    from pytest_smp.strategies.training_models import Block, Model
    from pytest_smp.strategies.training_sharding import (
        ShardedTraining,
        sharded_trainings,
        sharding_configurations,
    )
    from pytest_smp.strategies.training_tensor import TensorTraining, tensor_trainings

__all__ = [
    "Batch",
    "Block",
    "Exit",
    "InvalidProgram",
    "Kill",
    "MicrobatchSplit",
    "Model",
    "Overflows",
    "Pair",
    "Program",
    "Raise",
    "Record",
    "Schedule",
    "ShardedTraining",
    "Sliceable",
    "Stall",
    "StepCall",
    "TensorSpec",
    "TensorTraining",
    "Topology",
    "Training",
    "WrongSlice",
    "batches",
    "blocks",
    "configs",
    "degrees",
    "dtypes",
    "faults",
    "groups",
    "invalid_configs",
    "invalid_programs",
    "lengths",
    "microbatch_splits",
    "models",
    "objects",
    "overflows",
    "placements",
    "programs",
    "routings",
    "same",
    "schedules",
    "sequence_shards",
    "shapes",
    "sharded_trainings",
    "sharding_configurations",
    "sliceables",
    "split_matrices",
    "step_calls",
    "tensor_trainings",
    "tensors",
    "topologies",
    "trainings",
    "world_sizes",
]

_NEEDS_TORCH = {
    "Batch": "microbatches",
    "Block": "training_models",
    "InvalidProgram": "communication",
    "MicrobatchSplit": "microbatches",
    "Model": "training_models",
    "Pair": "payloads",
    "Program": "communication",
    "Record": "payloads",
    "ShardedTraining": "training_sharding",
    "Sliceable": "slicing",
    "StepCall": "microbatches",
    "TensorSpec": "recipes",
    "TensorTraining": "training_tensor",
    "Training": "training",
    "WrongSlice": "slicing",
    "batches": "microbatches",
    "blocks": "training",
    "dtypes": "numbers",
    "invalid_programs": "communication",
    "lengths": "recipes",
    "microbatch_splits": "microbatches",
    "models": "training",
    "objects": "payloads",
    "programs": "communication",
    "same": "equality",
    "shapes": "recipes",
    "sharded_trainings": "training_sharding",
    "sharding_configurations": "training_sharding",
    "sliceables": "slicing",
    "step_calls": "microbatches",
    "tensor_trainings": "training_tensor",
    "tensors": "recipes",
    "trainings": "training_draws",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
