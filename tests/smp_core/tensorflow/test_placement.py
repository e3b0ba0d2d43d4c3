"""Operations that cannot be placed: the error names them, the partitions and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import smp_core.tensorflow as smp
from smp_core.errors import PartitionError, SmpError
from tests.smp_core.tensorflow.small_models import check_alike, check_refused, run


def variable_of_two_loops() -> None:
    def loop(model: Any, x: Any) -> Any:
        # Assigned to: a loop is given the value of what it only reads.
        def body(i: Any) -> Any:
            model.count.assign_add(1.0)
            return [i + 1]

        return tf.while_loop(lambda i: i < 2, body, [tf.constant(0)])[0]

    def body(model: Any, x: Any) -> Any:
        if not hasattr(model, "count"):
            with tf.init_scope():
                model.count = tf.Variable(0.0)
        with smp.partition(0):
            a = loop(model, x)
        with smp.partition(1):
            b = loop(model, x)
        return x + tf.cast(a + b, tf.float32)

    run(body)


def strings() -> None:
    def body(model: Any, x: Any) -> Any:
        with smp.partition(0):
            words = tf.strings.as_string(x)
        with smp.partition(1):
            return tf.strings.to_number(words)

    run(body)


def tensor_list() -> None:
    def body(model: Any, x: Any) -> Any:
        with smp.partition(0):
            kept = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=tf.constant([3]))
        with smp.partition(1):
            return tf.raw_ops.TensorListStack(
                input_handle=kept, element_shape=tf.constant([3]), element_dtype=tf.float32
            )

    run(body)


def table() -> None:
    def body(model: Any, x: Any) -> Any:
        with smp.partition(0):
            handle = tf.raw_ops.HashTableV2(key_dtype=tf.int64, value_dtype=tf.int64)
        with smp.partition(1):
            size = tf.raw_ops.LookupTableSizeV2(table_handle=handle)
        return x + tf.cast(size, tf.float32)

    run(body)


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (variable_of_two_loops, PartitionError, "which partition 0 owns"),
        (strings, PartitionError, "dtype string .* cannot leave its rank"),
        (tensor_list, PartitionError, "dtype variant .* cannot leave its rank"),
        (table, PartitionError, "dtype resource .* cannot leave its rank"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_a_mistake_is_told(
    smp_world: Any, body: Callable[[], None], kind: type[SmpError], words: str
) -> None:
    check_refused(smp_world, body, kind, words)


@pytest.mark.parametrize("body", [strings], ids=lambda each: each.__name__)
def test_every_rank_has_the_error(smp_world: Any, body: Callable[[], None]) -> None:
    check_alike(smp_world, body)
