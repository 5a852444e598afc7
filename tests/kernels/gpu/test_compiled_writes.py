"""Checks CollectiveWriteRows, by the emulator's kernel, compared with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import kernels

from collective.ops import native_library
from collective.ops.gpu.tensorflow_binding import DeviceOperations
from collective.tables.updates import write_announcements
from tests.gpu_double import driver

ROWS = 300
TYPES = (np.int8, np.float16, np.float32, np.int64, np.complex128)


def numbers(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Draws bytes, whatever numbers they are, NaNs too."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


def written(before: np.ndarray, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    after = before.copy()
    for row, row_values in zip(rows, values):
        if 0 <= row < len(after):
            after[row] = row_values
    return after


class Write:
    """Builds an operation that writes rows of a variable."""

    def __init__(self, bound: DeviceOperations, shape: tuple[int, ...], dtype: Any):
        self.before = numbers(shape, dtype, 1)
        self.variable = tf.get_variable("variable", initializer=self.before, use_resource=True)
        self.rows = tf.placeholder(tf.int64)
        self.values = tf.placeholder(dtype)
        self.write = bound.collective_write_rows(self.variable.handle, self.rows, self.values)

    def run(self, session: tf.Session, rows: Any, values: np.ndarray) -> None:
        session.run(self.write, {self.rows: rows, self.values: values})


@pytest.mark.parametrize("inner", [(1,), (2,), (3,), (16,), (130,), (2, 3), ()])
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_are_numpys(
    bound: DeviceOperations, stand_in: driver.StandIn, dtype: Any, inner: tuple[int, ...]
):
    """Of rows outside of the variable none is written; of the others the very bits are."""
    rows = np.random.default_rng(2).permutation(ROWS)[:250]
    rows[[3, 50, 249]] = -1, ROWS, 2**40
    values = numbers((len(rows), *inner), dtype, 3)
    with tf.Graph().as_default(), tf.Session() as session:
        made = Write(bound, (ROWS, *inner), dtype)
        session.run(made.variable.initializer)
        stand_in.reset()
        stand_in.delays = True
        made.run(session, rows, values)
        got = session.run(made.variable.read_value())
    want = written(made.before, rows, values)
    assert got.tobytes() == want.tobytes() != made.before.tobytes()
    assert stand_in.launches == ["write_rows"] and not stand_in.queued
    # Nothing but the end of an emulated operation, which a GPU's doesn't wait for.
    assert set(stand_in.calls) <= {"launch", "wait_for_stream"}


@pytest.mark.parametrize("count, dim", [(0, 4), (3, 0)])
def test_nothing_is_launched_for_nothing(
    bound: DeviceOperations, stand_in: driver.StandIn, count: int, dim: int
):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Write(bound, (5, dim), np.float32)
        session.run(made.variable.initializer)
        stand_in.reset()
        made.run(session, np.arange(count), np.zeros([count, dim], np.float32))
        got = session.run(made.variable.read_value())
    assert got.tobytes() == made.before.tobytes()
    assert stand_in.launches == []


def test_its_rows_are_known_to_who_announces_writes(bound: DeviceOperations):
    """Else all rows would count as changed."""
    with tf.Graph().as_default():
        made = Write(bound, (5, 3), np.float32)
        assert write_announcements._rows(made.write).name == made.write.inputs[1].name


def test_others_that_hold_the_value_keep_it(bound: DeviceOperations):
    """The variable's memory becomes its own, as with TensorFlow's scatters."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Write(bound, (5, 3), np.int64)
        other = tf.get_variable("other", initializer=made.before, use_resource=True)
        session.run(made.variable.initializer)
        # The two variables share the memory of what was read.
        session.run(
            tf.raw_ops.AssignVariableOp(
                resource=other.handle,
                value=tf.raw_ops.ReadVariableOp(resource=made.variable.handle, dtype=tf.int64),
            )
        )
        made.run(session, [1], np.full([1, 3], 7))
        np.testing.assert_array_equal(session.run(other.read_value()), made.before)
        assert (session.run(made.variable.read_value())[1] == 7).all()


@pytest.mark.parametrize(
    "rows, values",
    [
        ([0, 1], np.zeros([3, 3], np.float32)),
        ([0, 1], np.zeros([2, 4], np.float32)),
        ([0, 1], np.zeros([6], np.float32)),
        ([[0, 1]], np.zeros([2, 3], np.float32)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    bound: DeviceOperations, stand_in: driver.StandIn, rows: Any, values: np.ndarray
):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Write(bound, (5, 3), np.float32)
        session.run(made.variable.initializer)
        stand_in.reset()
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"variable is float\[5,3\]; its rows .* can't be"
        ):
            made.run(session, rows, values)
    assert stand_in.launches == []


def test_another_type_is_refused(bound: DeviceOperations):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Write(bound, (5, 3), np.float32)
        wrong = bound.collective_write_rows(
            made.variable.handle, tf.constant([0], tf.int64), tf.zeros([1, 3], tf.int32)
        )
        session.run(made.variable.initializer)
        with pytest.raises(tf.errors.InvalidArgumentError, match="is float.* can't be int32"):
            session.run(wrong)


def test_strings_are_refused(bound: DeviceOperations):
    """Their bytes are addresses."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Write(bound, (5, 3), np.float32)
        wrong = bound.collective_write_rows(
            made.variable.handle, tf.constant([0], tf.int64), tf.constant([["a", "b", "c"]])
        )
        with pytest.raises(tf.errors.InvalidArgumentError, match="string can't be copied as bytes"):
            session.run(wrong)


def test_a_variable_without_value_is_refused(bound: DeviceOperations):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Write(bound, (5, 3), np.float32)
        with pytest.raises(tf.errors.FailedPreconditionError, match="was it initialized"):
            made.run(session, [0], np.zeros([1, 3], np.float32))


@pytest.mark.parametrize(
    "number, function", [(1, "cuLaunchKernel of write_rows"), (2, "cuStreamSynchronize")]
)
def test_each_call_of_the_driver_may_fail(
    bound: DeviceOperations, stand_in: driver.StandIn, number: int, function: str
):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Write(bound, (5, 3), np.float32)
        session.run(made.variable.initializer)
        stand_in.reset()
        stand_in.fails_at = number
        with pytest.raises(tf.errors.InternalError, match=f"error 719 from {function}"):
            made.run(session, [0], np.zeros([1, 3], np.float32))


def test_a_variable_on_a_cpu_is_refused():
    with tf.Graph().as_default(), tf.Session() as session:
        table = tf.get_variable("table", [5, 3], use_resource=True)
        write_rows = native_library.library().collective_write_rows(
            table.handle, tf.constant([0], tf.int64), tf.zeros([1, 3])
        )
        session.run(table.initializer)
        with pytest.raises(tf.errors.FailedPreconditionError, match="is on a CPU, but is updated"):
            session.run(write_rows)


@pytest.mark.skipif(
    not tf.test.is_built_with_cuda(),
    reason="this TensorFlow is built without GPUs: no kernels for them",
)
def test_a_gpu_has_the_kernel():
    found = kernels.get_registered_kernels_for_op("CollectiveWriteRows").kernel
    (one,) = [kernel for kernel in found if kernel.device_type == "GPU"]
    assert list(one.host_memory_arg) == ["resource"] and not one.label
