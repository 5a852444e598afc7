"""Checks the binding to TensorFlow: memory that is shared, in which order, and what is said where
something is missing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import kernels

from collective.ops import dispatch, embedding_bag, native_library, op_attributes, placement
from collective.ops.gpu import memory_bridge
from collective.ops.gpu.checks import growing, training
from collective.ops.gpu.rules import SGD, Adagrad
from collective.ops.gpu.tensorflow_binding import DeviceOperations
from tests.gpu_double.bridge import HostBridge
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
    op: tf.Operation = bound.about(["t"]).collective_update(
        SGD, [tf.constant(0.5)], [of.handle], [[]], [tf.fill([len(rows), DIM], gradient)], [at]
    )
    return op


# ---- memory


def test_a_tensor_and_its_array_are_one_memory():
    with tf.Graph().as_default(), tf.Session() as session:

        def run(x: Any) -> Any:
            bridge = HostBridge()
            made = bridge.copied(np.arange(4, dtype=np.int32))
            bridge.shared(made)[2] = 9
            assert bridge.shared(x).dtype == np.float32
            return made

        assert session.run(tf.py_function(run, [tf.zeros([3])], tf.uint32)).tolist() == [0, 1, 9, 3]


def test_results_without_elements_are_made_as_others_are(
    graph: Any, monkeypatch: pytest.MonkeyPatch
):
    """TensorFlow has no zeros of uint32 on a GPU, which stands for int32 there."""
    bind(HostBridge(), monkeypatch)
    asked = embedding_bag.request(
        [tf.zeros([0], tf.int64)],
        [],
        [],
        [embedding_bag.BagMember(0, DIM)],
        [embedding_bag.Section(0, DIM)],
        [embedding_bag.STATIC],
        1,
    )
    monkeypatch.setattr(memory_bridge.tf, "zeros", None)
    with tf.Session() as session:
        assert session.run(asked.positions[0]).shape == (0,)


def test_tensors_elsewhere_are_refused(graph: Any, monkeypatch: pytest.MonkeyPatch):
    bridge = HostBridge()
    monkeypatch.setattr(bridge, "kind", "GPU")
    bind(bridge, monkeypatch)
    asked = embedding_bag.request(
        [tf.constant([1], tf.int64)],
        [],
        [],
        [embedding_bag.BagMember(0, DIM)],
        [embedding_bag.Section(0, DIM)],
        [embedding_bag.STATIC],
        1,
    )
    with (
        tf.Session() as session,
        pytest.raises(tf.errors.UnknownError, match="are on a GPU, but are given tensors on .*CPU"),
    ):
        session.run(asked.message)


def test_an_update_is_in_place(graph: Any):
    """Twice; but another variable that shares the memory stays what it was."""
    bound, one = DeviceOperations(HostBridge()), table()
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
    bound, one = DeviceOperations(HostBridge()), table()
    start = tf.placeholder(tf.float32, [])
    with tf.control_dependencies([start]):
        gradient = tf.fill([1, DIM], tf.identity(start))
    rows = tf.constant([2], tf.int64)
    read = tf.raw_ops.ResourceGather(resource=one.handle, indices=rows, dtype=tf.float32)
    with tf.control_dependencies([read]):
        update = bound.about(["t"]).collective_update(
            SGD, [tf.constant(0.5)], [one.handle], [[]], [gradient + 0 * read], [rows]
        )
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(update, {start: 2.0})
        assert session.run(one.read_value())[2].tolist() == [0] * DIM


@pytest.mark.parametrize("name", ["collective_shard", "collective_sparse_shard"])
def test_a_shard_that_is_not_there(graph: Any, name: str):
    one = table()
    with (
        tf.Session() as session,
        pytest.raises(tf.errors.FailedPreconditionError, match="table does not exist: was it init"),
    ):
        session.run(getattr(native_library.library(), name)(one.handle, dtype=tf.float32))


def test_a_shard_elsewhere_is_refused(graph: Any):
    """TensorFlow runs an operation where its variable is, also if it was to run on a GPU."""
    one = table()
    shard = native_library.library().collective_sparse_shard(
        one.handle, dtype=tf.float32, device="GPU"
    )
    words = (
        "table is on a CPU, but is looked up and updated on a GPU: "
        "make its table outside of tf.device"
    )
    with tf.Session() as session, pytest.raises(tf.errors.FailedPreconditionError, match=words):
        session.run(one.initializer)
        session.run(shard)


def test_a_shard_of_another_type(graph: Any):
    one = table()
    shard = native_library.library().collective_shard(one.handle, dtype=tf.int64)
    with (
        tf.Session() as session,
        pytest.raises(tf.errors.InvalidArgumentError, match="is float, not int64"),
    ):
        session.run(one.initializer)
        session.run(shard)


@pytest.mark.parametrize("dtype", [tf.float32, tf.int64, tf.uint32])
def test_parts_of_a_tensor(graph: Any, dtype: tf.DType):
    """Parts begin where TensorFlow wants tensors to begin, and share memory, or not."""
    sizes, dims = [16, 3, 0, 0, 12, 33], [0, 0, 0, 4, 4, 0]
    whole = np.arange(sum(sizes)).astype(dtype.as_numpy_dtype)
    parts = native_library.library().collective_parts(
        tf.constant(whole), tf.constant(sizes, tf.int64), N=6, dims=dims
    )
    with tf.Session() as session:
        got = session.run(parts)
        # which wants them to be aligned
        added = session.run([tf.cast(part, tf.float32) + 1 for part in parts])
    for one, more, wanted, dim in zip(got, added, np.split(whole, np.cumsum(sizes)[:-1]), dims):
        np.testing.assert_array_equal(one, wanted.reshape(-1, dim) if dim else wanted, strict=True)
        np.testing.assert_array_equal(more, one.astype(np.float32) + 1)


@pytest.mark.parametrize(
    "sizes, dims, words",
    [
        ([3, 3], [0, 0], "the parts have 6 of 7 elements"),
        ([3, 5], [0, 0], "part 1 can not have 5 elements of dimension 0, from 3 of 7"),
        ([-1, 8], [0, 0], "part 0 can not have -1"),
        ([3, 4], [2, 0], "part 0 can not have 3 elements of dimension 2"),
        ([7], [0, 0], "there are 2 parts, but 1 sizes"),
    ],
)
def test_parts_that_cannot_be(graph: Any, sizes: list[int], dims: list[int], words: str):
    parts = native_library.library().collective_parts(
        tf.zeros([7]), tf.constant(sizes, tf.int64), N=len(dims), dims=dims
    )
    with tf.Session() as session, pytest.raises(tf.errors.InvalidArgumentError, match=words):
        session.run(parts)


@pytest.mark.skipif(
    not tf.test.is_built_with_cuda(),
    reason="this TensorFlow is built without GPUs: no kernels for them",
)
def test_calls_have_types_that_a_gpu_takes(graph: Any, monkeypatch: pytest.MonkeyPatch):
    """TensorFlow's kernel of tf.py_function for GPUs is for some types only: no int32."""
    monkeypatch.setattr(training, "BATCH", 3)
    bind(HostBridge(), monkeypatch)
    training.collectives.init()
    training.Model(1, Adagrad, True)
    scalar, keys = tf.constant(1, tf.int64), tf.constant([1], tf.int64)
    dispatch.operations().collective_find(
        lambda *_: [], [scalar], [keys], tf.constant(True), [scalar]
    )
    dispatch.operations().collective_update(
        SGD, [tf.constant(0.5)], [table().handle], [[]], [tf.ones([1, DIM])], [keys], [scalar]
    )
    allowed = {"Tin": set(), "Tout": set()}
    for kernel in kernels.get_registered_kernels_for_op("EagerPyFunc").kernel:
        if kernel.device_type != "CPU":
            for constraint in kernel.constraint:
                allowed[constraint.name] |= set(constraint.allowed_values.list.type)
    calls = [op for op in graph.get_operations() if op_attributes.stands_in(op)]
    assert len({op_attributes.kind(op) for op in calls}) == 8 and allowed["Tin"] and allowed["Tout"]
    for op in calls:
        for name, types in allowed.items():
            assert {dtype.as_datatype_enum for dtype in op.get_attr(name)} <= types, (
                op_attributes.kind(op),
                name,
            )


# ---- results and order


class Watched(EmulatedBridge):
    """Notes in which order TensorFlow and kernels are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        device, launch = self.device, self.device.kernel

        def kernel(source: Any, name: str) -> Any:
            made = launch(source, name)
            return lambda *args, **kwargs: (self.events.append("kernel"), made(*args, **kwargs))[1]

        device.kernel = kernel
        device.synchronize = lambda: self.events.append("waited for kernels")

    def given(self, tensors: Any, dtypes: Any) -> Any:
        self.events.append("waited for TensorFlow")
        return super().given(tensors, dtypes)

    def _part(self, array: Any) -> Any:
        self.events.append("TensorFlow's copy of a part")
        return super()._part(array)


def test_neither_runs_beside_the_other(graph: Any, monkeypatch: pytest.MonkeyPatch):
    bridge = Watched()
    bind(bridge, monkeypatch)
    one, ids = table(), tf.constant([3, 1, 3], tf.int64)
    layout = ([embedding_bag.Section(0, DIM, pooled=True)], [embedding_bag.STATIC], 1)
    member = embedding_bag.BagMember(0, DIM, embedding_bag.SUM)
    asked = embedding_bag.request([ids], [tf.constant([0, 0, 1], tf.int64)], [], [member], *layout)
    heard = embedding_bag.respond(asked.message, asked.splits, *layout)
    rows = embedding_bag.gather(
        [one.handle], heard.keys, asked.message, asked.splits, *layout, [one.shape]
    )
    with tf.Session() as session:
        session.run(one.initializer)
        given = session.run([asked.message, asked.splits, *heard.keys])
        bridge.events.clear()
        assert (
            session.run(rows, dict(zip([asked.message, asked.splits, *heard.keys], given))).tolist()
            == [2.0] * DIM + [1.0] * DIM
        )
    first, last = (
        bridge.events.index("kernel"),
        len(bridge.events) - bridge.events[::-1].index("kernel"),
    )
    assert "waited for TensorFlow" in bridge.events[:first], "inputs are complete"
    assert bridge.events[last] == "waited for kernels", "before TensorFlow goes on, or copies"
    assert "TensorFlow's copy of a part" in bridge.events[last:], (
        "the kernel wrote where TensorFlow has it"
    )
    assert bridge.events[-1] == "waited for kernels"


def test_kernels_train_through_tensorflow(monkeypatch: pytest.MonkeyPatch):
    """Runs the check that a user with a GPU runs, with emulated kernels; it sees a wrong one."""
    monkeypatch.setattr(training, "RULES", [Adagrad, SGD])
    bind(EmulatedBridge(seed=2), monkeypatch)
    training.collectives.init()
    monkeypatch.setattr(growing, "BATCH", 20)
    assert training.check(3) == growing.check(3, training.config()) == []
    monkeypatch.setattr(Adagrad, "options", lambda rule: [rule.rate, 0.5])
    wrong = training.check(3)
    assert len(wrong) == 6 and all("Adagrad(rate=0.1" in text for text in wrong), wrong
    monkeypatch.setattr(SGD, "options", lambda rule: [rule.rate * 2])
    assert (
        growing.check(3, training.config())[0]
        == "rank 0: 20 of 20 rows of a table that grows, in step 0"
    )


# ---- what is said


def test_the_order_in_which_memory_is_taken_is_said_where_it_is_short(
    monkeypatch: pytest.MonkeyPatch,
):
    """An allocator that eager operations made has no limit, and kernels may find nothing left."""
    bridge = EmulatedBridge()
    assert "TensorFlow may take" not in bridge.memory()
    monkeypatch.setattr(memory_bridge.tf.config.experimental, "set_memory_growth", lambda *_: None)
    bridge._begin(bridge.device, memory_bridge._grows([object()]))
    assert "TensorFlow may take" not in bridge.memory(), "nothing has run on a GPU"

    def initialized(*_: Any) -> None:
        raise RuntimeError("Physical devices cannot be modified after being initialized")

    monkeypatch.setattr(memory_bridge.tf.config.experimental, "set_memory_growth", initialized)
    bridge._begin(bridge.device, memory_bridge._grows([object()]))
    for words in ("since something ran eagerly on the GPU", "75 %", "tf.device('/cpu:0')"):
        assert words in bridge.memory() and words in bridge.advice()


def test_no_memory_names_tables_bytes_and_the_option(graph: Any, monkeypatch: pytest.MonkeyPatch):
    bridge = EmulatedBridge()
    bridge.device.memory = lambda: "kernels use 5 bytes and hold 6 of the 7 they may"

    def full(*_: Any) -> Any:
        raise MemoryError("emulator has no room for 1,234 bytes: out of memory")

    bind(bridge, monkeypatch)
    with dispatch.for_tables(["users", *"abcdef"], False):
        asked = embedding_bag.request(
            [tf.constant([1], tf.int64)],
            [],
            [],
            [embedding_bag.BagMember(0, DIM)],
            [embedding_bag.Section(0, DIM)],
            [embedding_bag.STATIC],
            1,
        )
    monkeypatch.setattr(bridge.device, "empty", full)
    with tf.Session() as session, pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        session.run(asked.message)
    for words in (
        "CollectiveAsk of tables 'users', 'a', 'b', 'c', 'd' and 2 others: ",
        "no room for 1,234 bytes",
        "hold 6 of the 7 they may",
        placement.WORKSPACE,
    ):
        assert words in caught.value.message


def test_a_malformed_message_is_an_error_of_the_run(graph: Any, monkeypatch: pytest.MonkeyPatch):
    bind(HostBridge(), monkeypatch)
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
    monkeypatch.setenv(placement.CHOICE, value)
    with pytest.raises((ValueError, RuntimeError), match=words):
        placement.chosen_by_environment.__wrapped__()


def test_the_choice_by_itself(monkeypatch: pytest.MonkeyPatch, caplog: Any):
    monkeypatch.delenv(placement.CHOICE, raising=False)
    assert placement.chosen_by_environment.__wrapped__() == "cpu"
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["a GPU"])
    monkeypatch.setattr(placement.importlib.util, "find_spec", lambda name: None)
    caplog.set_level("WARNING", logger="tensorflow")
    tf.get_logger().addHandler(caplog.handler)
    try:
        assert (
            placement.chosen_by_environment.__wrapped__() == "cpu"
            and "there is no CuPy" in caplog.text
        )
    finally:
        tf.get_logger().removeHandler(caplog.handler)
    monkeypatch.setattr(placement.importlib.util, "find_spec", lambda name: object())
    assert placement.chosen_by_environment.__wrapped__() == "gpu"


def test_shares_of_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(placement.WORKSPACE, raising=False)
    assert placement.memory_shares() == (0.2, 0.75)
    monkeypatch.setenv(placement.WORKSPACE, "0.5")
    assert placement.memory_shares() == pytest.approx((0.5, 0.45))
    for wrong in ("0", "0.95", "much", "nan"):
        monkeypatch.setenv(placement.WORKSPACE, wrong)
        with pytest.raises(
            ValueError, match=f"{placement.WORKSPACE}={wrong}: it must be the fraction"
        ):
            placement.memory_shares()
