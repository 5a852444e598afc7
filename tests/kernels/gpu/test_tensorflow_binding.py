"""Checks the binding to TensorFlow: memory that is shared, in which order, and what is said where
something is missing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy
from collective.ops import kernel_device, native_library
from collective.ops.binding_checks import growing, training
from collective.ops.exchange import embedding_bag
from collective.ops.gpu.tensorflow_binding import DeviceOperations
from tests.kernels.conftest import bind
from tests.kernels.gpu.emulator.bridge import EmulatedBridge

ROWS, DIM = 7, 3


@pytest.fixture
def graph() -> Any:
    with tf.Graph().as_default() as made:
        yield made


def table(name: str = "table", value: float = 1.0) -> Any:
    return tf.get_variable(
        name, initializer=np.full((ROWS, DIM), value, np.float32), use_resource=True
    )


def updated(
    bound: DeviceOperations, of: Any, rows: list[int], gradient: float = 2.0
) -> tf.Operation:
    at = tf.constant(rows, tf.int64)
    gradients = [tf.fill([len(rows), DIM], gradient)]
    op: tf.Operation = bound.collective_sparse_update(
        [of.handle], [], [tf.constant(0.5)], [], gradients, [at], rule="SGD"
    )
    return op


# ---- memory


def test_an_update_is_in_place(graph: Any):
    """Twice; but another variable that shares the memory stays what it was."""
    bound, one = DeviceOperations(EmulatedBridge()), table()
    other = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[ROWS, DIM], shared_name="other")
    share = tf.raw_ops.AssignVariableOp(resource=other, value=one.read_value())
    update = updated(bound, one, [1, 4])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(share)
        session.run(update)
        session.run(update)
        got = session.run(one.read_value())
        held = session.run(tf.raw_ops.ReadVariableOp(resource=other, dtype=tf.float32))
    want = np.ones((ROWS, DIM))
    want[[1, 4]] = -1
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(held, np.ones((ROWS, DIM)))


def test_an_update_survives_others_that_move_the_variable(graph: Any):
    """TensorFlow's own sparse operations give a variable memory of its own when they first see it,
    at any time of a run.
    """
    bound, one = DeviceOperations(EmulatedBridge()), table()
    start = tf.placeholder(tf.float32, [])
    with tf.control_dependencies([start]):
        gradient = tf.fill([1, DIM], tf.identity(start))
    rows = tf.constant([2], tf.int64)
    read = tf.raw_ops.ResourceGather(resource=one.handle, indices=rows, dtype=tf.float32)
    with tf.control_dependencies([read]):
        update = bound.collective_sparse_update(
            [one.handle], [], [tf.constant(0.5)], [], [gradient + 0 * read], [rows], rule="SGD"
        )
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(update, {start: 2.0})
        assert session.run(one.read_value())[2].tolist() == [0] * DIM


def test_a_table_elsewhere_is_refused(graph: Any):
    """TensorFlow runs an operation where its variable is, also if it was to run on a GPU: then it
    is given sizes, which the kernel of a CPU never is.
    """
    zero = tf.zeros([0], tf.int64)
    layout = dict(ranks=1, section_tables=[0], kinds=[0], dims=[DIM], pooled=[False])
    gathered = native_library.library().collective_gather_rows(
        [table().handle],
        [zero],
        zero,
        [0],
        [tf.zeros([2], tf.int64)],
        **layout,
        weighted=[False],
        max_norms=[0.0],
        shapes=[[ROWS, DIM]],
    )
    words = (
        "table is on a CPU, but is looked up and updated on a GPU: "
        "make its table outside of tf.device"
    )
    with tf.Session() as session, pytest.raises(tf.errors.FailedPreconditionError, match=words):
        session.run(tf.global_variables_initializer())
        session.run(gathered)


# ---- results and order


@pytest.mark.slow
def test_kernels_train_through_tensorflow(monkeypatch: pytest.MonkeyPatch):
    """Runs the check that a user with a GPU runs, with emulated kernels; it sees a wrong one."""
    cases = [(rule, by_owner) for rule in ("Adagrad", "SGD") for by_owner in (False, True)]
    bind(EmulatedBridge(seed=2), monkeypatch)
    training.collectives.init()
    monkeypatch.setattr(growing, "BATCH", 20)
    assert [line for case in cases for line in training.check(3, *case)] == []
    assert growing.check(3, training.config()) == []
    update = DeviceOperations.collective_sparse_update

    def by_twice_the_rate(
        self: Any, tables: Any, slots: Any, numbers: Any, *rest: Any, **rule: Any
    ) -> Any:
        return update(self, tables, slots, [2 * numbers[0], *numbers[1:]], *rest, **rule)

    monkeypatch.setattr(DeviceOperations, "collective_sparse_update", by_twice_the_rate)
    wrong = [line for case in cases for line in training.check(3, *case)]
    assert len(wrong) == 12 and all("(rate=0.1" in text for text in wrong), wrong
    assert (
        growing.check(3, training.config())[0]
        == "rank 0: 20 of 20 rows of a table that grows, in step 0"
    )


# ---- what is said


def test_the_order_in_which_memory_is_taken_is_said_where_it_is_short(
    monkeypatch: pytest.MonkeyPatch,
):
    """An allocator that eager operations made before scope() leaves nothing for kernels."""
    bridge = EmulatedBridge()
    grown: list[Any] = []
    monkeypatch.setattr(kernel_device, "chosen", lambda: "gpu")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])
    monkeypatch.setattr(
        tf.config.experimental, "set_memory_growth", lambda *given: grown.append(given)
    )
    kernel_device.let_memory_grow.cache_clear()
    with CollectiveStrategy().scope():
        assert grown == [("GPU", True)]
    bridge._begin(bridge.device, kernel_device.let_memory_grow())
    assert "TensorFlow has taken" not in bridge.memory()

    def initialized(*_: Any) -> None:
        raise RuntimeError("Physical devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", initialized)
    kernel_device.let_memory_grow.cache_clear()
    bridge._begin(bridge.device, kernel_device.let_memory_grow())
    for words in ("something ran eagerly on the GPU before scope()", "tf.device('/cpu:0')"):
        assert words in bridge.memory() and words in bridge.advice()
    kernel_device.let_memory_grow.cache_clear()


def test_a_malformed_message_is_an_error_of_the_run(graph: Any, monkeypatch: pytest.MonkeyPatch):
    bind(EmulatedBridge(), monkeypatch)
    message = tf.placeholder(tf.int64, [None])
    heard = embedding_bag.respond(
        message, tf.size(message)[None], [embedding_bag.Section(0, DIM)], [embedding_bag.STATIC], 1
    )
    with tf.Session() as session:
        assert session.run(heard.keys[0], {message: [2, 2, 5, 6]}).tolist() == [5, 6]
        for wrong in ([], [1], [2, 2, 5], [-1, -1], [1, 2, 5, 6], [2, 2, 5, 6, 7]):
            with pytest.raises(tf.errors.InvalidArgumentError, match="message"):
                session.run(heard.keys[0], {message: wrong})


@pytest.mark.parametrize(
    "value, words",
    [
        ("tpu", "no such choice. Known: auto, cpu, gpu."),
        ("double", "no such choice"),
        ("gpu", "TensorFlow sees no GPU"),
    ],
)
def test_choices_that_cannot_be(monkeypatch: pytest.MonkeyPatch, value: str, words: str):
    monkeypatch.setenv(kernel_device.CHOICE, value)
    with pytest.raises((ValueError, RuntimeError), match=words):
        kernel_device.chosen_by_environment.__wrapped__()


def test_the_choice_by_itself(monkeypatch: pytest.MonkeyPatch, caplog: Any):
    monkeypatch.delenv(kernel_device.CHOICE, raising=False)
    assert kernel_device.chosen_by_environment.__wrapped__() == "cpu"
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["a GPU"])
    monkeypatch.setattr(kernel_device.importlib.util, "find_spec", lambda name: None)
    caplog.set_level("WARNING", logger="tensorflow")
    tf.get_logger().addHandler(caplog.handler)
    try:
        assert (
            kernel_device.chosen_by_environment.__wrapped__() == "cpu"
            and "there is no CuPy" in caplog.text
        )
    finally:
        tf.get_logger().removeHandler(caplog.handler)
    monkeypatch.setattr(kernel_device.importlib.util, "find_spec", lambda name: object())
    assert kernel_device.chosen_by_environment.__wrapped__() == "gpu"
