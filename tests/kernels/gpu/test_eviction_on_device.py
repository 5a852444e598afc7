"""Compares removing rows of dynamic tables on a device with tables in the host's memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import CollectiveStrategy, TablePolicy, checkpoint
from collective.ops import kernel_device
from collective.ops.gpu.device_key_map import DeviceKeyMap
from collective.ops.gpu.memory_bridge import MemoryBridge
from collective.ops.rows.keymap import KeyMap
from collective.tables.rows import device_row_store, row_store
from tests.kernels.conftest import bind
from tests.kernels.gpu.emulator.bridge import EmulatedBridge

FIRST = np.array([0.5, -2], np.float32)  # the row that a slot starts from


@pytest.fixture
def bridge() -> MemoryBridge:
    return EmulatedBridge(seed=3)


def drawn(keys: np.ndarray, dim: int) -> np.ndarray:
    return np.outer(keys.view(np.int64) % 1000, np.arange(1, dim + 1)).astype(np.float32)


def test_keys_that_are_left_have_the_rows_that_they_have_in_the_hosts_memory(
    bridge: MemoryBridge,
):
    ours, theirs = DeviceKeyMap("t", 5000, bridge), KeyMap(5000)
    rng, last_uses = np.random.default_rng(4), dict[int, int]()
    for step in range(1, 25):
        keys = rng.integers(-200, 200, rng.integers(1, 90))
        np.testing.assert_array_equal(ours.find_or_insert(keys, step), theirs.find_or_insert(keys))
        last_uses.update(dict.fromkeys(keys.tolist(), step))
        size = len(ours) if step % 8 == 0 else rng.integers(0, min(40, len(ours)))
        rows = np.sort(rng.choice(len(ours), size, replace=False) + 1)
        for key in ours._keys[rows].tolist():
            del last_uses[key]
        for one, other in zip(ours.remove(rows), theirs.remove(rows)):
            np.testing.assert_array_equal(one, other)
        left = theirs.keys(1, len(theirs) + 1)
        np.testing.assert_array_equal(ours.keys(1, len(ours) + 1), left)
        np.testing.assert_array_equal(ours.find(keys), theirs.find(keys))
        assert ours.steps().tolist() == [last_uses[key] for key in left.tolist()]
    for rows in ([0], [2, 1], [2, 2], [len(ours) + 1]):
        with pytest.raises(IndexError, match="rows to be removed are ascending"):
            ours.remove(np.array(rows))


def test_rows_that_are_left_are_those_of_the_hosts_memory(
    bridge: MemoryBridge, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(device_row_store, "BLOCK_BYTES", 100)
    shape = (5000, 3, np.float32, "t", drawn)
    stores = [device_row_store.new_store(*shape, bridge), row_store.host_store(*shape)]
    stores[1].values._view()[:] = 0  # Nobody else does it: TensorFlow hasn't taken the memory.
    slots: list[list[Any]] = [
        [
            device_row_store.DeviceColumn("zeros", 5001, 1, np.int64, bridge),
            device_row_store.DeviceColumn("s", 5001, 2, np.float32, bridge, FIRST),
        ],
        [
            row_store.host_column(5001, 1, np.int64, None, True),
            row_store.host_column(5001, 2, np.float32, FIRST, True),
        ],
    ]
    rng = np.random.default_rng(2)
    for step in range(40):
        keys = np.unique(rng.integers(-300, 300, rng.integers(0, 200)))
        rows = [store.rows(keys, True) for store in stores]
        np.testing.assert_array_equal(*rows)
        if step % 3:  # Else new rows are beyond those that slots have values for.
            for store, (zeros, other) in zip(stores, slots):
                zeros.initialize_rows(len(store))
                other.initialize_rows(len(store))
                store.values.write(rows[0], np.full((len(keys), 3), step))
                zeros.write(rows[0], np.full((len(keys), 1), step))
                other.write(rows[0], np.full((len(keys), 2), -step))
        size = len(stores[0])
        count = size if step % 13 == 12 else rng.integers(0, size)
        gone = np.sort(rng.choice(size, count, replace=False) + 1)
        for store, columns in zip(stores, slots):
            store.remove(gone, columns)
            for column in columns:
                column.initialize_rows(len(store))
        left = np.arange(len(stores[0]) + 1)
        assert len(stores[0]) == len(stores[1]) == size - count
        for ours, theirs in zip([stores[0].values, *slots[0]], [stores[1].values, *slots[1]]):
            np.testing.assert_array_equal(ours.read(left), theirs.read(left))
            assert ours.filled == len(stores[0])
        for one, other in zip(stores[0].ascending(13), stores[1].ascending(13)):
            np.testing.assert_array_equal(one[0], other[0])
            np.testing.assert_array_equal(one[1], other[1])


def test_memory_of_removed_rows_is_given_back_and_used_again(bridge: MemoryBridge):
    store = device_row_store.new_store(10**6, 8, np.float32, "t", drawn, bridge)
    slot = device_row_store.DeviceColumn("slot", 10**6, 8, np.float32, bridge)

    def taken() -> int:
        return int(store.values._memory.taken + slot._memory.taken)

    store.rows(np.arange(20_000), True)
    slot.initialize_rows(len(store))
    full = taken()
    store.remove(np.arange(1, 20_001, 2), [slot])
    assert taken() < 0.6 * full
    store.rows(np.arange(50_000, 60_000), True)
    slot.initialize_rows(len(store))
    assert taken() <= full
    rows = store.rows(np.array([1, 3, 50_000, 59_999]), False)
    np.testing.assert_array_equal(
        store.values.read(rows), drawn(np.array([1, 3, 50_000, 59_999]), 8)
    )
    assert not slot.read(np.arange(20_001)).any(), "memory that was taken again is made zero"


def test_norms_are_those_of_the_hosts_memory(bridge: MemoryBridge, monkeypatch: Any):
    """Bit for bit, also for thresholds that are a row's own."""
    monkeypatch.setattr(device_row_store, "BLOCK_BYTES", 200)
    rows = np.random.default_rng(3).normal(0, 1e-3, (90, 7)).astype(np.float32)
    ours = device_row_store.DeviceColumn("t", 91, 7, np.float32, bridge)
    ours.ensure_capacity(90)
    ours.write(slice(1, 91), rows)
    theirs = row_store.HostColumn(91, 7, np.float32)
    theirs.write(slice(1, 91), rows)
    norms = (rows.astype(np.float64) ** 2).cumsum(1)[:, -1] / 2
    for threshold in (*norms[:5], *np.nextafter(norms[:5], 1), 1e-30, 1.0):
        found = ours.is_small(90, threshold)
        np.testing.assert_array_equal(found, norms < threshold)
        np.testing.assert_array_equal(found, theirs.is_small(90, threshold))


# ---- in TensorFlow

KEYS = np.arange(30, dtype=np.int64) * 2**35 - 7
POLICIES = {
    "age": TablePolicy(steps_to_live=3),
    "capacity": TablePolicy(
        capacity=12, steps_to_live=2, keep_at_least=9, evict=collective.every_steps(2)
    ),
    "both": TablePolicy(steps_to_live=4, l2_weight_threshold=0.02, evict=collective.every_steps(2)),
}
OPTIMIZERS = {
    "adagrad": lambda: tf.train.AdagradOptimizer(0.3),
    "adam": lambda: tf.train.AdamOptimizer(0.05),
}


@dataclasses.dataclass
class Model:
    """Trains table 't' with a policy, and 'u' without one, towards 0."""

    policy: TablePolicy | None
    optimizer: str = "adagrad"
    has_global_step: bool = True

    def __post_init__(self) -> None:
        tf.set_random_seed(7)
        step = tf.train.get_or_create_global_step() if self.has_global_step else None
        initializer = tf.truncated_normal_initializer(stddev=0.3)
        self.table = collective.get_embedding_variable(
            "t", 3, initializer=initializer, ev_option=self.policy
        )
        self.other = collective.get_embedding_variable("u", 5, initializer=initializer)
        self.ids = tf.placeholder(tf.int64, [None])
        self.rows = tf.nn.embedding_lookup(self.table, self.ids)
        others = tf.nn.embedding_lookup(self.other, self.ids)
        loss = tf.reduce_sum(self.rows**2) + tf.reduce_sum(others**2)
        self.train = OPTIMIZERS[self.optimizer]().minimize(loss, global_step=step)
        self.saver = tf.train.Saver()

    def steps(self, session: tf.Session, *batches: np.ndarray) -> None:
        for keys in batches:
            session.run(self.train, {self.ids: keys})

    def found(self, session: tf.Session) -> list[np.ndarray]:
        """Returns keys, rows and slots of both tables, and rows of all keys in evaluation."""
        out = [session.run(self.rows, {self.ids: KEYS})]
        for table in (self.table, self.other):
            store = table.store(session)
            keys = np.sort(store.keys.keys(1, len(store) + 1))
            rows = store.rows(keys, False)
            table.initialize_slot_rows(session, table.slots)
            out += [keys, *table.lookup_keys(session, keys)]
            out += [slot.column(session).read(rows) for slot in table.slots]
            counts = table.statistics(session).counts()
            out += [np.array([counts[name] for name in sorted(counts) if name != "bytes"])]
        if self.table.last_used is not None:
            for block in self.table.export(session, 7, last_used=True):
                out += block
        return out


def checkpoint_of(path: str) -> list[np.ndarray]:
    """Returns keys, rows and last uses of table 't' in a checkpoint."""
    parts = [np.concatenate(part) for part in zip(*checkpoint.read_table(path, "t"))]
    reader = tf.train.load_checkpoint(path)
    name = "t/last_used/part_0"
    return [*parts, *([reader.get_tensor(name)] if reader.has_tensor(name) else [])]


def program(policy: TablePolicy, optimizer: str, grouping: bool, folder: Path) -> list[Any]:
    """Trains, evicts, removes, saves and restores; returns what was found in between."""
    seen: list[Any] = []
    strategy = CollectiveStrategy()
    batches = [KEYS[:20], KEYS[10:20], KEYS[:10], KEYS[10:30:3], KEYS[20:], KEYS[5:9], KEYS[:2]]
    with strategy.scope(plan="quiet", grouping=grouping), tf.Graph().as_default() as graph:
        model = Model(policy, optimizer)
        path = str(folder / "m")
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for step, batch in enumerate(batches):
                model.steps(session, batch)
                seen += model.found(session)
                if step in (3, 5):
                    model.saver.save(session, f"{path}-{step}")
                    seen += checkpoint_of(f"{path}-{step}") + model.found(session)
            model.saver.restore(session, f"{path}-3")
            seen += model.found(session)
            model.steps(session, KEYS[:4], KEYS[25:])
            model.saver.save(session, f"{path}-restored")
            seen += checkpoint_of(f"{path}-restored")
            seen.append(model.table.remove(session, KEYS[[0, 1, 27, 3, 3]]))
            seen += [*model.found(session), model.other.clear(session)]
            model.table.import_(session, KEYS[20:24], np.full((4, 3), 0.75))
            seen += model.found(session)
            model.steps(session, KEYS, KEYS[::7])
            seen += model.found(session)
            seen.append(list(collective.clear_embeddings(session).values()))
            seen += model.found(session)
        found = [op for op in graph.get_operations() if op.type == "CollectiveFindRows"]
        on_device = any(op.get_attr("S") for op in found)
        assert not grouping or on_device == (model.table.bridge is not None)
    return seen


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "policy, optimizer, grouping",
    [
        ("both", "adagrad", True),
        ("age", "adam", False),
        ("both", "adam", True),
        ("age", "adagrad", True),
        ("age", "adagrad", False),
        ("both", "adam", False),
        ("capacity", "adagrad", True),
        ("capacity", "adam", False),
    ],
)
def test_rows_go_as_in_the_hosts_memory(
    policy: str,
    optimizer: str,
    grouping: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv(kernel_device.CHOICE, "cpu")
    kernel_device.chosen_by_environment.cache_clear()
    arguments = POLICIES[policy], optimizer, grouping, tmp_path
    wanted = program(*arguments)
    bind(EmulatedBridge(seed=3), monkeypatch)
    got = program(*arguments)
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("saved_on", ["host", "device"])
def test_last_uses_go_from_the_host_to_a_gpu_and_back(
    saved_on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(kernel_device.CHOICE, "cpu")
    kernel_device.chosen_by_environment.cache_clear()

    def on(where: str, restores: bool, *batches: np.ndarray) -> list[np.ndarray]:
        with monkeypatch.context() as patch:
            if where == "device":
                bind(EmulatedBridge(), patch)
            with CollectiveStrategy().scope(plan="quiet"), tf.Graph().as_default():
                model = Model(POLICIES["age"])
                with tf.Session() as session:
                    if restores:
                        model.saver.restore(session, str(tmp_path / "m"))
                    else:
                        session.run(tf.global_variables_initializer())
                    model.steps(session, *batches)
                    model.saver.save(session, str(tmp_path / "m"))
        return checkpoint_of(str(tmp_path / "m"))

    restored_on = "device" if saved_on == "host" else "host"
    keys, _, used = on(saved_on, False, KEYS[:6], KEYS[6:9], KEYS[9:12])
    assert keys.tolist() == KEYS[:12].tolist()
    assert used[:, 0].tolist() == [1] * 6 + [2] * 3 + [3] * 3
    keys, _, used = on(restored_on, True, KEYS[6:8])
    assert keys.tolist() == KEYS[6:12].tolist()
    assert used[:, 0].tolist() == [4] * 2 + [2] + [3] * 3


def test_training_without_a_global_step_is_refused(monkeypatch: pytest.MonkeyPatch):
    bind(EmulatedBridge(), monkeypatch)
    with CollectiveStrategy().scope(plan="quiet"), tf.Graph().as_default():
        model = Model(POLICIES["age"], has_global_step=False)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            assert not session.run(model.rows, {model.ids: KEYS}).any()
            words = "table 't' evicts rows .* its graph has no global step"
            with pytest.raises(collective.TableError, match=words):
                model.steps(session, KEYS)


def test_the_plan_names_tables_that_stay_in_the_hosts_memory(monkeypatch: pytest.MonkeyPatch):
    bind(EmulatedBridge(), monkeypatch)
    strategy = CollectiveStrategy()

    def note(*dtypes: tf.DType) -> str | None:
        with strategy.scope(plan="quiet"), tf.Graph().as_default(), strategy.embedding_scope():
            for number, dtype in enumerate(dtypes):
                tf.get_variable(f"t{number}", [None, 2], dtype)
            tf.get_variable("static", [10, 2])
            return strategy.plan().notes.get("dynamic tables")

    assert note(tf.float32) is None
    said = "in the host's memory, and their policies act there "
    assert note(tf.float32, tf.float64) == f"{said}(their type isn't float32): 't1'"
    monkeypatch.setenv(kernel_device.DYNAMIC, "host")
    names = "'t0', 't1', 't2', 't3', 't4' and 1 other"
    assert note(*[tf.float32] * 6) == f"{said}(COLLECTIVE_DYNAMIC_TABLES=host): {names}"
