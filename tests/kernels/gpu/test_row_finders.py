"""Checks the operation that finds rows of dynamic tables' keys: by a function of Python, on its own
stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import kernels

from collective.ops import kernel_device
from collective.ops.gpu import device_key_map, memory_bridge, row_finders
from collective.ops.gpu.device_key_map import DeviceKeyMap
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.tensorflow_binding import DeviceOperations
from tests.kernels.gpu.emulator.bridge import EmulatedBridge

KEYS = [[3, -1, 3], [], [7, 2**62, 7, 8, 3]]
NUMBERS, STEPS = [11, 12, 13], [4, 0, 5]


def variable(name: str = "table") -> Any:
    return tf.get_variable(name, initializer=np.zeros((2, 3), np.float32), use_resource=True)


def found(
    operations: DeviceOperations,
    find: Any,
    keys: Sequence[Sequence[int]] = KEYS,
    insert: Any = True,
) -> list[tf.Tensor]:
    """Finds rows of `keys` by `find`."""
    rows: list[tf.Tensor] = operations.collective_find_rows(
        find,
        [tf.constant(number, tf.int64) for number in NUMBERS[: len(keys)]],
        [variable(f"t{t}").handle for t in range(len(keys))],
        [tf.constant(of_table, tf.int64) for of_table in keys],
        tf.convert_to_tensor(insert),
        [tf.constant(step, tf.int64) for step in STEPS[: len(keys)]],
    )
    return rows


def ran(rows: Any) -> Any:
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        return session.run(rows)


@pytest.fixture(autouse=True)
def graph() -> Any:
    with tf.Graph().as_default() as made:
        yield made


@pytest.mark.parametrize("insert", [True, False])
@pytest.mark.parametrize("tables", [1, 3])
@pytest.mark.usefixtures("bound")
def test_python_gets_keys_and_gives_rows(bound: DeviceOperations, insert: bool, tables: int):
    """Of each table its own, also of one without keys; steps only where keys are inserted."""
    asked: list[Any] = []

    def find(kernels: Any, numbers: Any, keys: Any, sizes: Any, steps: Any) -> Any:
        asked.append((numbers.tolist(), np.array(keys).tolist(), list(sizes), steps))
        return keys + 10

    got = ran(found(bound, find, KEYS[:tables], insert))
    assert [one.tolist() for one in got] == [
        [key + 10 for key in of_table] for of_table in KEYS[:tables]
    ]
    joined, sizes = sum(KEYS[:tables], []), [len(of_table) for of_table in KEYS[:tables]]
    assert asked == [(NUMBERS[:tables], joined, sizes, STEPS[:tables] if insert else None)]


def test_rows_are_those_of_a_map(bound: DeviceOperations):
    one = DeviceKeyMap("t", 100, bound.bridge)

    def find(kernels: Any, _: Any, keys: Any, sizes: Any, steps: Any) -> Any:
        return device_key_map.rows(kernels, [one], keys, sizes, steps)

    keys = [[5, 9, 5, 2**40]]
    assert ran(found(bound, find, keys, False))[0].tolist() == [0, 0, 0, 0]
    with tf.Graph().as_default():
        assert ran(found(bound, find, keys))[0].tolist() == [1, 2, 1, 3]
    assert one.steps().tolist() == [4] * 3


def test_each_operation_has_its_own_function(bound: DeviceOperations):
    with tf.variable_scope("a"):
        first = found(bound, lambda _, __, keys, *___: keys + 1)
    with tf.variable_scope("b"):
        second = found(bound, lambda _, __, keys, *___: keys + 2)
    got = ran([first[0], second[0]])
    assert [one.tolist() for one in got] == [[4, 0, 4], [5, 1, 5]]


def test_a_function_has_one_number():
    def find() -> None: ...

    bridge, other = EmulatedBridge(), EmulatedBridge()
    number = row_finders.number_of(bridge, find)
    assert row_finders.number_of(bridge, find) == number
    assert row_finders.number_of(other, find) != number


def test_no_memory_names_the_bytes_and_the_option():
    bridge = EmulatedBridge()
    bridge.device.memory = lambda: "hash tables and kernels use 5 bytes and hold 6"

    def full(*_: Any) -> Any:
        raise MemoryError("dynamic table 'users': no room for 1,234 bytes")

    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        ran(found(DeviceOperations(bridge), full))
    for words in ("'users': no room for 1,234 bytes", "and hold 6", kernel_device.SHARE_OPTION):
        assert words in caught.value.message


@pytest.mark.parametrize("raised", [ValueError("wrong é"), KeyboardInterrupt(), SystemExit(3)])
def test_another_error_is_one_of_the_run(bound: DeviceOperations, raised: BaseException):
    """It says where it was raised, and the next run works."""
    fails = [True]

    def find(kernels: Any, _: Any, keys: Any, *__: Any) -> Any:
        if fails[0]:
            raise raised
        return keys

    rows = found(bound, find)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        with pytest.raises(tf.errors.UnknownError, match=f"{type(raised).__name__}.*") as caught:
            session.run(rows)
        assert "test_row_finders.py" in caught.value.message
        fails[0] = False
        assert session.run(rows)[0].tolist() == KEYS[0]


def test_a_long_error_is_cut():
    def find(*_: Any) -> Any:
        raise ValueError("long " * 10_000)

    with pytest.raises(tf.errors.UnknownError, match="ValueError: long long"):
        ran(found(DeviceOperations(EmulatedBridge()), find))


def test_a_table_that_was_not_initialized(bound: DeviceOperations):
    rows = found(bound, lambda _, __, keys, *___: keys)
    with tf.Session() as session, pytest.raises(tf.errors.NotFoundError, match="t0"):
        session.run(rows)


class Streams(EmulatedBridge):
    """Has TensorFlow's stream be 7, and notes on which one Python computes."""

    _stream = 7

    def __init__(self) -> None:
        super().__init__()
        self.used: list[int] = []
        download = self.device.download
        self.device.download = lambda array: (
            self.used.append(self.device.stream()) or download(array)
        )


def test_python_is_ordered_by_the_stream_of_tensorflow():
    """In a run by that of the operation, else by the one that TensorFlow has."""
    bridge = Streams()
    array = np.zeros(1)
    with bridge.call():
        bridge.kernels.download(array)
        with bridge.call():
            bridge.kernels.download(array)
    with bridge.call(5):
        bridge.kernels.download(array)
    bridge.kernels.download(array)
    assert bridge.used == [7, 7, 5, 0]

    def find(kernels: Any, _: Any, keys: Any, *__: Any) -> Any:
        kernels.download(keys)
        return keys

    ran(found(DeviceOperations(bridge), find))
    assert bridge.used[4:] == [0], "a CPU has no stream: that of the operation is 0"


def test_a_table_on_two_streams_is_refused():
    """Were the streams different ones after all, nothing would read what isn't written yet."""
    bridge = Streams()
    one = DeviceKeyMap("t", 100, bridge)

    def find(kernels: Any, _: Any, keys: Any, sizes: Any, steps: Any) -> Any:
        return kernels.find([one._table], keys, Segments.of(sizes, [0]))

    with pytest.raises(tf.errors.UnknownError, match="first used on stream 0x7 and now is on"):
        ran(found(DeviceOperations(bridge), find, KEYS[:1]))


def test_the_stream_is_found_once(monkeypatch: pytest.MonkeyPatch):
    """Also within a run, in whose graph it leaves nothing."""
    bridge, asked, functions = EmulatedBridge(), [], memory_bridge.native_library.functions()
    monkeypatch.setattr(
        memory_bridge.native_library, "functions", lambda: asked.append(1) or functions
    )

    def computes() -> np.int64:
        for _ in range(2):
            with bridge.call():
                pass
        return np.int64(bridge.device.stream())

    stream = tf.numpy_function(computes, [], tf.int64)
    with tf.Session() as session:
        assert session.run(stream) == 0
    assert len(asked) == 1
    assert [op.type for op in tf.get_default_graph().get_operations()] == ["PyFunc"]


@pytest.mark.skipif(
    not tf.test.is_built_with_cuda(),
    reason="this TensorFlow is built without GPUs: no kernels for them",
)
def test_a_gpu_has_the_kernels():
    def on_gpu(name: str) -> Any:
        found = kernels.get_registered_kernels_for_op(name).kernel
        return next(kernel for kernel in found if kernel.device_type == "GPU")

    on_host = ["handles", "insert", "numbers", "steps"]
    assert sorted(on_gpu("CollectiveFindRows").host_memory_arg) == on_host
    assert not on_gpu("CollectiveStream").host_memory_arg


def test_an_error_that_says_what_to_do_is_not_advised_again():
    advised = "table 'users' is full: 3 rows of 3. Train on more ranks"

    def full(*_: Any) -> Any:
        raise memory_bridge.AdvisedMemoryError(advised)

    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        ran(found(DeviceOperations(EmulatedBridge()), full))
    assert advised in caught.value.message
    for words in ("arrays were made", "smaller batches"):
        assert words not in caught.value.message
