"""Every private or version-dependent part of TensorFlow that this front end uses, and the versions that were tried.

Keras is imported as ``tf.keras`` only: Keras 3, or with TF_USE_LEGACY_KERAS=1 Keras 2 (tf-keras).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import linecache
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from smp_core.errors import BackendError, MissingTensorFlowError, UnknownTensorFlowWarning

try:
    import tensorflow as tf  # every module takes it from here
except ModuleNotFoundError as error:
    raise MissingTensorFlowError(
        "smp_core.tensorflow needs TensorFlow, which is not installed: python -m pip install 'pytest-smp[tensorflow]'"
    ) from error

__all__ = [
    "LateSweepManager",
    "added",
    "array_of",
    "autograph_of_caller",
    "call",
    "check_version",
    "convert",
    "count_in",
    "flat_inputs",
    "free",
    "handle_key",
    "handle_of",
    "inner",
    "inter_op_threads",
    "is_scratch",
    "materialize",
    "origin_of",
    "places_in",
    "slot_lists",
    "tag_of",
    "tagged",
    "tensor_of",
    "tf",
]

#: The releases of TensorFlow with which everything was run.
TRIED = ("2.21",)
_TAG = "_smp_partition"
#: The bytes at whose multiples TensorFlow wants a tensor to begin.
_ALIGNMENT = 64
#: The dtypes of arrays that TensorFlow takes from torch as they are.
_SHARED = {
    np.dtype(each)
    for each in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8")
}


def check_version(version: str) -> None:
    """Warn once of a release of TensorFlow that was not tried, and refuse one that lacks a part."""
    missing = [
        name
        for name, found in (
            ("Graph._attr_scope", hasattr(tf.Graph, "_attr_scope")),
            ("Operation._original_op", hasattr(tf.Graph, "_original_op")),
            ("FuncGraph", hasattr(tf.__internal__, "FuncGraph")),
            *(
                (f"CheckpointManager.{each}", hasattr(tf.train.CheckpointManager, each))
                for each in ("_sweep", "_record_state")
            ),
            ("autograph.tf_convert", hasattr(tf.__internal__.autograph, "tf_convert")),
            *(
                (f"autograph.{module}.{each}", _has(f"tensorflow.python.autograph.{module}", each))
                for module, each in (
                    ("core.config", "CONVERSION_RULES"),
                    ("core.config", "DoNotConvert"),
                    ("pyct.loader", "load_source"),
                )
            ),
        )
        if not found
    ]
    if missing:
        raise BackendError(
            f"smp_core.tensorflow: TensorFlow {version} has no {', '.join(missing)}. Install one of "
            f"{', '.join(TRIED)}: python -m pip install 'tensorflow-cpu~={TRIED[-1]}.0'"
        )
    if ".".join(version.split(".")[:2]) not in TRIED:
        warnings.warn(
            f"smp_core.tensorflow: TensorFlow {version} was not tried; {', '.join(TRIED)} was",
            UnknownTensorFlowWarning,
            stacklevel=2,
        )


def _has(module: str, name: str) -> bool:
    """Return whether there is such a module, with such a name in it."""
    try:
        return hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return False


def _leave_unconverted() -> None:
    """Have AutoGraph, which an outer ``tf.function`` applies to all that it calls, leave this package as it is."""
    from tensorflow.python.autograph.core import config

    config.CONVERSION_RULES = (config.DoNotConvert("smp_core"), *config.CONVERSION_RULES)


_generated = itertools.count()


def _load_generated(source: str, delete_on_exit: bool) -> tuple[ModuleType, str]:
    """A module of source that AutoGraph has generated, and the name by which tracebacks find its lines.

    TensorFlow's own function writes a file, and removes it as Python ends. A rank process ends without that.
    """
    # With the process: another one that shows a traceback of this one must not find lines of its own.
    name = f"__autograph_generated_{os.getpid()}_{next(_generated)}"
    # In <>, so that linecache never asks a loader. AutoGraph gives its functions the globals of the user's module,
    # and that module's loader would give the user's lines for those of this source.
    file = f"<{name}>"
    # Without a time of change, so that linecache does not look for a file of this name.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = ModuleType(name)
    module.__file__ = file
    exec(compile(source, file, "exec", dont_inherit=True), vars(module))
    sys.modules[name] = module
    return module, file


def _keep_generated_source() -> None:
    """Have AutoGraph keep what it generates in memory, so that it leaves no file in the folder for temporary ones."""
    from tensorflow.python.autograph.pyct import loader

    expected, found = (inspect.signature(each) for each in (_load_generated, loader.load_source))
    if list(found.parameters) == list(expected.parameters):
        loader.load_source = _load_generated


def inter_op_threads() -> int:
    """The number of threads on which TensorFlow starts operations."""
    chosen: int = tf.config.threading.get_inter_op_parallelism_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return chosen or int(os.environ.get("TF_NUM_INTEROP_THREADS") or 0) or cores or 1


#: A step in a ``tf.function`` waits on one thread, its operations need a second, and a function that such an operation
#: calls, as one of ``tf.py_function`` may, needs a third. One is to spare.
_THREADS = 4


def _enough_threads() -> None:
    """Have so many threads on few cores, such as the one that a launcher may bind a rank to."""
    chosen = tf.config.threading.get_inter_op_parallelism_threads()
    if inter_op_threads() < _THREADS and not (chosen or os.environ.get("TF_NUM_INTEROP_THREADS")):
        with contextlib.suppress(
            RuntimeError
        ):  # TensorFlow runs already; a step says what it lacks
            tf.config.threading.set_inter_op_parallelism_threads(_THREADS)


check_version(tf.__version__)
_leave_unconverted()
_keep_generated_source()
_enough_threads()


@contextlib.contextmanager
def tagged(place: int) -> Iterator[None]:
    """Operations made inside, in the graph of the moment, carry a place."""
    graph = tf.compat.v1.get_default_graph()
    value = tf.compat.v1.AttrValue(i=place)
    with graph._attr_scope({_TAG: value}):
        yield


def tag_of(operation: Any) -> int | None:
    """The place that an operation carries."""
    try:
        return int(operation.get_attr(_TAG))
    except ValueError:
        return None


def origin_of(operation: Any) -> Any:
    """The forward operation whose gradient ``tf.gradients`` made an operation for; None if there is none."""
    return operation._original_op


def autograph_of_caller() -> Any:
    """The caller's choice of AutoGraph, for ``convert``."""
    return tf.__internal__.autograph.control_status_ctx()


def convert(function: Any, context: Any) -> Any:
    """A function as AutoGraph converts it for a caller of whom ``autograph_of_caller`` gave the context."""
    return tf.__internal__.autograph.tf_convert(function, context, user_requested=True)


class LateSweepManager(tf.train.CheckpointManager):  # type: ignore[misc]
    """A manager whose old checkpoints stay until ``sweep`` is called, and whose checkpoint may be another each time."""

    def use(self, checkpoint: Any) -> None:
        """Save and restore this ``tf.train.Checkpoint`` from now on."""
        self._checkpoint = checkpoint

    def sweep(self) -> None:
        """Delete the checkpoints that are not to be kept."""
        super()._sweep()
        self._record_state()

    def _sweep(self) -> None:
        """Keep them."""


def is_scratch(graph: Any) -> bool:
    """Return whether a graph is the one in which Keras 3 only asks a layer for its shapes."""
    return str(getattr(graph, "name", "")).startswith("scratch_graph")


def flat_inputs(
    function: Any, concrete: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """The tensors that a call of a ``tf.function`` passes to one of its concrete functions, in its order."""
    bound = concrete.function_type.bind_with_defaults(
        tuple(args), dict(kwargs), function._default_values
    )
    return list(concrete.function_type.unpack_inputs(bound))


def call(function: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """The outputs of a concrete function that returns a list of tensors.

    A call of the function itself checks its arguments and packs its results, which takes as long as a small function.
    """
    atomic = getattr(function, "_inference_function", None)
    if atomic is None:  # stands for one, in a test
        return function(*inputs) or ()
    found: Sequence[Any] = atomic.call_flat(*inputs, *function.captured_inputs)
    return found


#: The tensors that TensorFlow adds in one pass from the left. Of more it adds eight at a time, and these to the rest.
_ONE_PASS = 8


def added(terms: Sequence[Any]) -> Any:
    """The sum of tensors of the eager mode, added from the left, in fewer passes over memory than single additions.

    In a graph the order is TensorFlow's choice, because the result may take the memory of any term. Here the caller
    holds them all.
    """
    total, rest = terms[0], list(terms[1:])
    while rest:
        total = tf.add_n([total, *rest[: _ONE_PASS - 1]])
        del rest[: _ONE_PASS - 1]
    return total


def array_of(tensor: Any) -> Any:
    """A tensor of the eager mode as an array, without a copy where it can be."""
    try:
        return np.asarray(memoryview(tensor))
    except (TypeError, ValueError, RuntimeError):  # a dtype that numpy does not know
        return tensor.numpy()


def tensor_of(array: Any) -> Any:
    """An array that nobody else uses as a tensor, without a copy where it can be."""
    known = isinstance(array, np.ndarray) and array.dtype in _SHARED
    if not known or not array.size or array.ctypes.data % _ALIGNMENT:
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(torch.from_numpy(array).__dlpack__())


def free(variable: Any) -> None:
    """Free the memory of a variable; its handle stays, and a later assignment brings it back."""
    handle, dtype = handle_of(variable)
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros((0,), dtype), validate_shape=False)


def materialize(variable: Any, value: Any) -> None:
    """Assign a value of the full shape to a variable that may have been freed."""
    handle, dtype = handle_of(variable)
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.cast(value, dtype), validate_shape=False)


def inner(variable: Any) -> Any:
    """The variable of TensorFlow in a variable of Keras 3; any other variable itself."""
    found = getattr(variable, "value", variable)
    return variable if callable(found) else found


def handle_of(variable: Any) -> tuple[Any, Any]:
    """The handle and the dtype of a variable of Keras or of TensorFlow."""
    found = inner(variable)
    return found.handle, found.dtype


def handle_key(handle: Any) -> int:
    """A number that tells the handle of one variable from all others for as long as the variable lives."""
    return id(handle)


def _places(optimizer: Any) -> Mapping[Any, int]:
    """The places of the variables that an optimizer was built for, by its key of each; empty if it is not built."""
    for name in ("_trainable_variables_indices", "_index_dict"):  # Keras 3, Keras 2
        found: Mapping[Any, int] = getattr(optimizer, name, {})
        if found:
            return found
    return {}


def count_in(optimizer: Any) -> int:
    """The number of variables that an optimizer was built for."""
    return len(_places(optimizer))


def places_in(optimizer: Any, variables: Sequence[Any]) -> list[int | None]:
    """The place of each variable among those that the optimizer was built for; None for one that is not among them."""
    found = _places(optimizer)
    return [found.get(optimizer._var_key(each)) if found else None for each in variables]


def slot_lists(optimizer: Any, count: int) -> dict[str, list[Any]]:
    """The lists in which an optimizer keeps its slots, one for each of its ``count`` variables, by attribute."""
    return {
        name: list(value)
        for name, value in vars(optimizer).items()
        if name not in ("_variables", "_trainable_variables")
        and isinstance(value, list)
        and len(value) == count > 0
        and all(each is None or hasattr(each, "assign") for each in value)
    }
