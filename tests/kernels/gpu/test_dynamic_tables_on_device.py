"""Checks dynamic tables where kernels compute: keys, rows and slots of `device_store.py`, compared
with those in the host's memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import CollectiveStrategy
from collective.ops import kernel_device, native_library
from collective.ops.gpu import device_key_map as on_device
from collective.ops.gpu import update
from collective.ops.gpu.memory_bridge import MemoryBridge
from collective.ops.gpu.workspace import Workspace
from collective.ops.rows.keymap import KeyMap
from collective.tables.rows import device_row_store, row_store
from collective.tables.updates import optimizer_slots
from tests.gpu_double.reserved import Reserved
from tests.kernels.conftest import bind
from tests.kernels.gpu.emulator.bridge import EmulatedBridge
from tests.kernels.gpu.emulator.device import EmulatedDevice

EXTREME = [-(2**63), 2**63 - 1, 0, -1, 2**32]


@pytest.fixture
def bridge() -> MemoryBridge:
    return EmulatedBridge(seed=3)


def batches(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        np.zeros(0, np.int64),
        np.array(EXTREME * 2),
        *(rng.integers(-300, 300, size) for size in (1, 50, 700, 1)),
    ]


def drawn(keys: np.ndarray, dim: int) -> np.ndarray:
    return np.outer(keys.view(np.int64) % 1000, np.arange(1, dim + 1)).astype(np.float32)


# ---- keys


def test_keys_have_the_rows_that_they_have_in_the_hosts_memory(bridge: MemoryBridge):
    ours, theirs = on_device.DeviceKeyMap("t", 5000, bridge), KeyMap(5000)
    for keys in batches(1):
        np.testing.assert_array_equal(ours.find(keys), theirs.find(keys))
        np.testing.assert_array_equal(ours.find_or_insert(keys), theirs.find_or_insert(keys))
        assert len(ours) == len(theirs)
        np.testing.assert_array_equal(ours.keys(1, len(ours) + 1), theirs.keys(1, len(ours) + 1))
    square = np.array([[5, 2**40], [0, 5]])
    np.testing.assert_array_equal(ours.find(square), theirs.find(square))
    with pytest.raises(IndexError):
        ours.keys(1, len(ours) + 2)


def test_several_maps_at_once(bridge: MemoryBridge):
    maps, alone = (
        [on_device.DeviceKeyMap(f"t{t}", 5000, bridge) for t in range(3)] for _ in range(2)
    )
    for step, insert in enumerate((True, False, True, True, False)):
        keys = [np.random.default_rng([step, t]).integers(-50, 50, 40 * t) for t in range(3)]
        with bridge.call():
            kernels = bridge.kernels
            got = kernels.download(
                on_device.rows(
                    kernels,
                    maps,
                    kernels.upload(np.concatenate(keys)),
                    [len(some) for some in keys],
                    [0] * 3 if insert else None,
                )
            )
        wanted = [
            one.find_or_insert(some) if insert else one.find(some) for one, some in zip(alone, keys)
        ]
        np.testing.assert_array_equal(got, np.concatenate(wanted))
    for one, other in zip(maps, alone):
        np.testing.assert_array_equal(one.keys(1, len(one) + 1), other.keys(1, len(other) + 1))


def test_a_map_that_is_full_keeps_what_came_first(bridge: MemoryBridge):
    ours = on_device.DeviceKeyMap("t", 7, bridge)
    ours.find_or_insert(np.arange(5))
    with pytest.raises(MemoryError, match="'?t'?.* full"):
        ours.find_or_insert(np.arange(3, 20))
    assert ours.keys(1, 8).tolist() == list(range(7)) and len(ours) == 7
    assert ours.find(np.arange(9)).tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 0]
    with pytest.raises(MemoryError, match="full"):
        ours.find_or_insert(np.array([100]))


# ---- rows


def test_rows_are_those_of_the_hosts_memory(bridge: MemoryBridge, monkeypatch: pytest.MonkeyPatch):
    # so that initial values come in several blocks
    monkeypatch.setattr(row_store.initializers, "BLOCK", 30)
    monkeypatch.setattr(row_store, "SORTED_AT_ONCE", 50)
    shape = (5000, 3, np.float32, "t", drawn)
    ours, theirs = device_row_store.new_store(*shape, bridge), row_store.host_store(*shape)
    theirs.values._view()[:] = 0  # nobody else does it for memory that TensorFlow hasn't taken
    for step, keys in enumerate(batches(2)):
        for insert in (False, True):
            np.testing.assert_array_equal(ours.rows(keys, insert), theirs.rows(keys, insert))
        put = np.unique(keys)[::2] + step
        values = np.random.default_rng(step).normal(size=(len(put), 3))
        np.testing.assert_array_equal(ours.put(put, values), theirs.put(put, values))
    assert ours.values.filled == theirs.values.filled == len(ours)
    got, wanted = (
        [(keys, one.values.read(rows)) for keys, rows in one.ascending(13)]
        for one in (ours, theirs)
    )
    for one, other in zip(got, wanted):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])
    assert len(got) == len(wanted) and ours.values.read(np.array([0])).tolist() == [[0, 0, 0]]


def test_of_a_key_that_is_put_twice_the_last_row_stays(bridge: MemoryBridge):
    """Each row is written once: on a GPU it is anybody's guess which thread comes last."""
    held = device_row_store.new_store(100, 2, np.float32, "t", drawn, bridge)

    class Once(np.ndarray):
        def __setitem__(self, rows: Any, values: Any) -> None:
            assert isinstance(rows, slice) or len(np.unique(rows)) == len(rows)
            super().__setitem__(rows, values)

    held.values._rows = held.values._rows.view(Once)
    keys = np.array([7, 8, 7, 9, 8, 7])
    held.put(keys, np.arange(12).reshape(6, 2))
    found = held.values.read(held.rows(np.array([7, 8, 9]), False))
    assert found.tolist() == [[10, 11], [8, 9], [6, 7]]


def test_a_slot_has_memory_and_first_values_as_far_as_it_was_asked_for(bridge: MemoryBridge):
    first = np.array([1.5, -2], np.float32)
    column = device_row_store.DeviceColumn("slot", 10**6, 2, np.float32, bridge, first)
    column.initialize_rows(3)
    column.write(np.array([2]), np.array([[7, 8]]))
    column.initialize_rows(5000)
    column.initialize_rows(4)
    got = column.read(np.array([0, 1, 2, 3, 4, 5000]))
    assert got.tolist() == [[0, 0], [1.5, -2], [7, 8], [1.5, -2], [1.5, -2], [1.5, -2]]
    assert column._memory.taken < 10**5
    fresh = device_row_store.DeviceColumn("zeros", 10**6, 2, np.float32, bridge)
    fresh.initialize_rows(900)
    assert not fresh.read(np.arange(901)).any()


class Small(Reserved):
    """Memory of which there is only so much.

    Attributes:
        room: how many bytes in all.
    """

    room = 1 << 16

    def grow(self, size: int) -> None:
        if size > self.room:
            raise MemoryError("cuMemCreate: out of memory (2)")
        super().grow(size)


def test_without_memory_for_rows_nothing_is_found_until_there_is_some(
    bridge: MemoryBridge, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bridge, "reserve", Small)
    held = device_row_store.new_store(10**6, 2, np.float32, "mine", drawn, bridge)
    held.rows(np.arange(10), True)
    words = (
        r"'mine' has memory for 512 rows, and needs .* bytes more for 20,000: "
        r".*out of memory.*TABLES=host"
    )
    for insert in (True, False):  # a row without memory must not be read
        with pytest.raises(MemoryError, match=words):
            held.rows(np.arange(20_000), insert)
    assert len(held) == 10 == sum(len(keys) for keys, _ in held.ascending(3)), (
        "no others can be saved"
    )
    with pytest.raises(MemoryError, match=words):
        held.put(np.array([3]), np.zeros((1, 2)))
    monkeypatch.setattr(Small, "room", 1 << 20)
    held.put(np.array([30_000]), np.zeros((1, 2)))
    rows = held.rows(np.arange(20_000), False)
    np.testing.assert_array_equal(held.values.read(rows), drawn(np.arange(20_000), 2))


def test_an_error_of_several_tables_names_the_one_that_is_full(bridge: MemoryBridge):
    stores = [
        device_row_store.new_store(capacity, 2, np.float32, name, drawn, bridge)
        for name, capacity in (("a", 50), ("b", 4))
    ]
    kept = [row_store.register(number + 10**6, one) for number, one in enumerate(stores)]
    keys = np.concatenate([np.arange(9), np.arange(9)])
    with bridge.call(), pytest.raises(MemoryError, match=r"b.*full.*Train on more ranks"):
        kernels = bridge.kernels
        device_row_store.find(
            kernels, np.concatenate(kept).reshape(-1), kernels.upload(keys), [9, 9], [0, 0]
        )
    np.testing.assert_array_equal(stores[0].values.read(np.arange(1, 10)), drawn(np.arange(9), 2))
    np.testing.assert_array_equal(stores[1].values.read(np.arange(1, 5)), drawn(np.arange(4), 2))


def test_where_one_table_has_no_memory_the_others_have_their_rows(
    bridge: MemoryBridge, monkeypatch: pytest.MonkeyPatch
):
    stores = [
        device_row_store.new_store(10**6, 2, np.float32, name, drawn, bridge) for name in "ab"
    ]
    monkeypatch.setattr(
        stores[0].values, "ensure_capacity", lambda count: exec('raise MemoryError("none for a")')
    )
    kept = [row_store.register(number + 10**6, one) for number, one in enumerate(stores)]
    with bridge.call(), pytest.raises(MemoryError, match="none for a"):
        kernels = bridge.kernels
        device_row_store.find(
            kernels, np.concatenate(kept).reshape(-1), kernels.upload(np.arange(8)), [4, 4], [0, 0]
        )
    assert [len(one) for one in stores] == [0, 4]


# ---- in TensorFlow


def test_a_variable_in_given_memory_stays_there(bridge: MemoryBridge):
    """TensorFlow's own sparse operations leave it where it is."""
    with tf.Graph().as_default(), tf.Session() as session:
        column = device_row_store.DeviceColumn("v", 2**24, 3, np.float32, bridge)
        column.ensure_capacity(9)
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[None, 3], shared_name="v")
        given = native_library.library().collective_memory(
            tf.placeholder_with_default(tf.constant(column.address, tf.int64), []),
            0,
            dtype=tf.float32,
            shape=[2**24, 3],
        )
        assert given.shape.as_list() == [2**24, 3]
        assign = tf.raw_ops.AssignVariableOp(resource=handle, value=given)
        rows = tf.constant([2, 5], tf.int64)
        scatter = tf.raw_ops.ResourceScatterAdd(
            resource=handle, indices=rows, updates=tf.ones([2, 3])
        )
        adagrad = tf.raw_ops.ResourceSparseApplyProximalGradientDescent(
            var=handle, alpha=1.0, l1=0.0, l2=0.0, grad=tf.fill([2, 3], -3.0), indices=rows
        )
        gather = tf.raw_ops.ResourceGather(
            resource=handle, indices=tf.constant([1, 2, 5], tf.int64), dtype=tf.float32
        )
        for op in (assign, scatter, adagrad, scatter):
            session.run(op)
        assert (
            column.read(np.array([1, 2, 5])).tolist()
            == [[0] * 3, [5] * 3, [5] * 3]
            == session.run(gather).tolist()
        )


def test_memory_is_kept_as_long_as_a_variable_has_it(bridge: MemoryBridge):
    column = device_row_store.DeviceColumn("v", 100, 3, np.float32, bridge)
    number = column.number
    with tf.Graph().as_default(), tf.Session() as session:
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[None, 3], shared_name="v")
        keeper = tf.numpy_function(
            lambda: row_store.register(number, column), [], tf.int64, stateful=True
        )
        given = native_library.library().collective_memory(
            column.address, keeper, dtype=tf.float32, shape=[100, 3]
        )
        # TensorFlow forgets arrays after such
        nothing = tf.numpy_function(lambda: np.int64(0), [], tf.int64, stateful=True)
        session.run(tf.raw_ops.AssignVariableOp(resource=handle, value=given))
        session.run(nothing)
        assert row_store.registered(number) is column
        session.run(tf.raw_ops.DestroyResourceOp(resource=handle))
        session.run(nothing)
        with pytest.raises(RuntimeError, match="is gone"):
            row_store.registered(number)


def test_memory_of_another_device_is_refused(bridge: MemoryBridge):
    """TensorFlow runs an operation where its variable is, also if it was to run on a GPU."""
    with tf.Graph().as_default(), tf.Session() as session:
        given = native_library.library().collective_memory(
            4096, 0, dtype=tf.float32, shape=[1, 1], device="GPU"
        )
        words = (
            "memory is on a GPU, but TensorFlow has its variable on a CPU."
            "*set COLLECTIVE_DYNAMIC_TABLES=host"
        )
        with pytest.raises(tf.errors.FailedPreconditionError, match=words):
            session.run(given.op)


def test_an_address_that_is_none(bridge: MemoryBridge):
    with tf.Graph().as_default(), tf.Session() as session:
        address = tf.placeholder(tf.int64, [])
        given = native_library.library().collective_memory(
            address, 0, dtype=tf.float32, shape=[1, 1]
        )
        for wrong in (0, 4097):
            with pytest.raises(
                tf.errors.InvalidArgumentError,
                match=f"the address {wrong} is none of reserved memory",
            ):
                session.run(given.op, {address: wrong})


OPTIMIZERS = [
    tf.train.GradientDescentOptimizer(0.1),
    tf.train.MomentumOptimizer(0.1, 0.9),
    tf.train.AdagradOptimizer(0.1),
    tf.train.AdamOptimizer(0.1),
    tf.train.FtrlOptimizer(0.1),
    tf.train.RMSPropOptimizer(0.1, momentum=0.5),
    tf.train.AdadeltaOptimizer(1.0),
    tf.train.ProximalGradientDescentOptimizer(0.1),
    collective.train.RowWiseAdagradOptimizer(0.1),
    collective.train.AdamWOptimizer(0.01, 0.1),
]


FOUND_BY_PYTHON = "CollectiveFindRows with steps"


def kinds_of(graph: tf.Graph) -> set[str]:
    """Returns the types of operations; on a device, finding rows takes steps."""
    ops = graph.get_operations()
    by_python = {
        FOUND_BY_PYTHON for op in ops if op.type == "CollectiveFindRows" and op.get_attr("S")
    }
    return {op.type for op in ops} | by_python


def trained(optimizer: Any) -> tuple[list[np.ndarray], set[str]]:
    """Keys, rows and slots of two dynamic tables after some steps, as well as a static one; the
    kinds of operations.
    """
    strategy = CollectiveStrategy()
    with strategy.scope(plan="quiet"), tf.Graph().as_default() as graph:
        tables = [
            collective.get_embedding_variable("t", 3),
            collective.get_embedding_variable("u", 5),
        ]
        with strategy.embedding_scope():
            static = tf.get_variable("w", [10, 3], initializer=tf.ones_initializer())
        ids, known = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.int64, [None])
        at = tf.stack(
            [
                tf.range(tf.size(ids, out_type=tf.int64)) // 3,
                tf.range(tf.size(ids, out_type=tf.int64)),
            ],
            1,
        )
        pooled = tf.nn.embedding_lookup_sparse(
            tables[1], tf.SparseTensor(at, ids * 7, [100, 300]), None, combiner="mean"
        )
        loss = tf.reduce_sum(tf.nn.embedding_lookup(tables[0], ids) ** 2) + tf.reduce_sum(pooled**2)
        train = optimizer.minimize(loss + tf.reduce_sum(tf.nn.embedding_lookup(static, ids % 10)))
        unknown = tf.nn.embedding_lookup(tables[0], known)
        found = []
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            rng = np.random.default_rng(5)
            for step in range(4):
                session.run(train, {ids: rng.integers(-20, 20, 60) * (1 + step // 2)})
            found.append(session.run(unknown, {known: [2**50, 2]}))
            for table in tables:
                count = table.local_count(session)
                found += [np.concatenate(part) for part in zip(*table.export(session, 7))]
                table.initialize_slot_rows(session, table.slots)
                found += [slot.column(session).read(np.arange(count + 1)) for slot in table.slots]
            found.append(session.run(static))
            session.run(tf.global_variables_initializer())
            found.append(np.array([table.local_count(session) for table in tables]))
        return found, kinds_of(graph)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=[type(one).__name__ for one in OPTIMIZERS])
def test_trained_as_in_the_hosts_memory(optimizer: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(kernel_device.CHOICE, "cpu")
    kernel_device.chosen_by_environment.cache_clear()
    wanted, _ = trained(optimizer)
    bind(EmulatedBridge(seed=5), monkeypatch)
    got, kinds = trained(optimizer)
    assert {FOUND_BY_PYTHON, "CollectiveMemory"} <= kinds
    assert ("CollectiveSparseUpdate" in kinds) == (
        not isinstance(
            optimizer,
            (tf.train.AdadeltaOptimizer, tf.train.ProximalGradientDescentOptimizer),
        )
    )
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_keys_that_come_between_settling_and_the_update(monkeypatch: pytest.MonkeyPatch):
    """Adam goes over all rows: of those that slots have memory for."""
    initialize_rows = optimizer_slots._initialize_slot_rows

    def initialized_before_others(
        size: np.ndarray, number: np.ndarray, *slots: np.ndarray
    ) -> np.int64:
        count = initialize_rows(size, number, *slots)
        row_store.registered(int(number)).rows(np.arange(10**6, 10**6 + 20_000), True)
        return count

    bind(EmulatedBridge(), monkeypatch)
    monkeypatch.setattr(optimizer_slots, "_initialize_slot_rows", initialized_before_others)
    strategy = CollectiveStrategy()
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        table = collective.get_embedding_variable("t", 3)
        train = tf.train.AdamOptimizer(0.1).minimize(
            tf.reduce_sum(tf.nn.embedding_lookup(table, [5, 6]))
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            session.run(train)
            assert table.local_count(session) == 20_002


def test_adam_takes_memory_for_a_table_that_grows_seldom():
    workspace = Workspace(EmulatedDevice())
    arrays = {id(update._touched(0, rows, workspace)) for rows in range(1, 5000, 7)}
    assert len(arrays) < 14


def test_dynamic_tables_may_stay_in_the_hosts_memory(monkeypatch: pytest.MonkeyPatch):
    wanted, _ = trained(OPTIMIZERS[3])
    monkeypatch.setenv(kernel_device.DYNAMIC, "host")
    bind(EmulatedBridge(), monkeypatch)
    got, kinds = trained(OPTIMIZERS[3])
    assert FOUND_BY_PYTHON not in kinds
    assert {"CollectiveFindRows", "CollectiveSparseReduceUpdate"} <= kinds
    for one, other in zip(got, wanted):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    monkeypatch.setenv(kernel_device.DYNAMIC, "nvme")
    with pytest.raises(ValueError, match="COLLECTIVE_DYNAMIC_TABLES=nvme: there is no such choice"):
        kernel_device.on_device(True)


def test_a_table_without_room_names_itself_in_the_run(monkeypatch: pytest.MonkeyPatch):
    bridge = EmulatedBridge()
    monkeypatch.setattr(bridge, "reserve", Small)
    bind(bridge, monkeypatch)
    strategy = CollectiveStrategy()
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        table = collective.get_embedding_variable("mine", 4)
        ids = tf.placeholder(tf.int64, [None])
        train = tf.train.AdagradOptimizer(0.1).minimize(
            tf.reduce_sum(tf.nn.embedding_lookup(table, ids))
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {ids: np.arange(100)})
            with pytest.raises(
                tf.errors.ResourceExhaustedError,
                match=r"'mine' has memory for .* bytes more for 30,000",
            ) as caught:
                session.run(train, {ids: np.arange(30_000)})
    message = caught.value.message
    assert message.count("arrays were made") == message.count("ore ranks") == 1, "one advice"
