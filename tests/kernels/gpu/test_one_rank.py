"""Checks how one rank that has all rows trains: it pools straight from the tables, and updates them
by sums of gradients that nobody writes. NumPy in float64 is the truth; and both ways, with rows and
sums that are written and without, give the same to the last bit.
"""

from __future__ import annotations

import collections
from typing import Any, Callable

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import kernels

from collective import CollectiveStrategy
from collective.ops.gpu.tensorflow_binding import DeviceOperations
from collective.ops.rows import row_changes
from collective.strategies import grouped_exchange
from tests import numpy_optimizers
from tests.gpu_double import driver

DIMS = (16, 3, 4)
ROWS, SAMPLES = 40, 60
# Lookups: table, combiner (None: a row for each id), ids. Of the first, row 7 is asked for so often
# that its gradients are summed in several pieces by a block; of the last, that a warp does it.
LOOKUPS = [(0, "sum", 6000), (0, None, 50), (1, "mean", 200), (1, "sqrtn", 90), (2, None, 700)]
OPTIMIZERS: dict[str, tuple[Callable[[], Any], Any]] = {
    "adagrad": (
        lambda: tf.train.AdagradOptimizer(0.3),
        numpy_optimizers.adagrad_decay(0.3, 0.1, 9, 1),
    ),
    "adam": (
        lambda: tf.train.AdamOptimizer(0.05),
        numpy_optimizers.adam(0.05, 0.9, 0.999, 1e-8, lazy=False),
    ),
}


def batch(seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns ids and their samples for each of the lookups; the last samples have none."""
    rng = np.random.default_rng(seed)
    ids, samples = [], []
    for _, combiner, count in LOOKUPS:
        ids.append(np.where(rng.random(count) < 0.8, 7, rng.integers(0, ROWS - 3, count)))
        of = np.sort(rng.integers(0, SAMPLES - 2, count)) if combiner else np.arange(count)
        samples.append(np.append(of[:-1], SAMPLES - 3) if combiner else of)
    return ids, samples


def start(table: int) -> np.ndarray:
    return np.random.default_rng(table).normal(size=(ROWS, DIMS[table])).astype(np.float32)


def factors() -> list[np.ndarray]:
    """Returns for each lookup the gradient of its result."""
    rng = np.random.default_rng(10)
    return [
        rng.normal(size=(SAMPLES - 2 if combiner else count, DIMS[table])).astype(np.float32)
        for table, combiner, count in LOOKUPS
    ]


def gradients_of(table: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids, the gradient of the row of each) of a table in float64."""
    ids, values = [], []
    for (of, combiner, _), factor, of_lookup, samples in zip(LOOKUPS, factors(), *batch(seed)):
        if of != table:
            continue
        counts = np.bincount(samples).astype(np.float64)
        by = {"mean": counts, "sqrtn": np.sqrt(counts)}.get(combiner or "", np.ones_like(counts))
        ids.append(of_lookup)
        values.append((factor / by[:, None])[samples])
    return np.concatenate(ids), np.concatenate(values)


class Model:
    """Trains tables by a loss whose gradient is a factor of each result, so that it is known.

    Args:
        optimizer: of `OPTIMIZERS`.
        shown: somebody needs the gradients of the tables' rows.
    """

    def __init__(self, strategy: Any, optimizer: str, shown: bool = False):
        with strategy.embedding_scope():
            self.tables = [
                tf.get_variable(f"table{t}", initializer=start(t)) for t in range(len(DIMS))
            ]
        # Of one source, so that one exchange serves all.
        self.batch = tf.placeholder(tf.int64, [2, sum(count for *_, count in LOOKUPS)])
        parts = tf.split(self.batch, [count for *_, count in LOOKUPS], axis=1)
        self.ids, self.samples = [part[0] for part in parts], [part[1] for part in parts]
        self.results = [self._looked_up(i, *one) for i, one in enumerate(LOOKUPS)]
        loss = tf.add_n(
            [tf.reduce_sum(x * f) for x, f in zip(self.results, factors(), strict=True)]
        )
        made = OPTIMIZERS[optimizer][0]()
        gradients = made.compute_gradients(loss, self.tables)
        self.sums = [tf.reduce_sum(g.values) for g, _ in gradients] if shown else []
        self.train = made.apply_gradients(gradients)
        self.state = [tf.identity(x) for t in self.tables for x in (t, *_slots(made, t))]

    def _looked_up(self, i: int, table: int, combiner: str | None, count: int) -> tf.Tensor:
        if combiner is None:
            return tf.nn.embedding_lookup(self.tables[table], self.ids[i])
        at = tf.stack([self.samples[i], tf.zeros_like(self.samples[i])], 1)
        sparse = tf.SparseTensor(at, self.ids[i], [SAMPLES, 1])
        return tf.nn.embedding_lookup_sparse(self.tables[table], sparse, None, combiner=combiner)

    def feeds(self, seed: int) -> dict[tf.Tensor, np.ndarray]:
        return {self.batch: np.stack([np.concatenate(of_all) for of_all in batch(seed)])}


def _slots(optimizer: Any, table: Any) -> list[Any]:
    return [optimizer.get_slot(table, name) for name in optimizer.get_slot_names()]


def trained(optimizer: str, shown: bool = False, steps: int = 3) -> tuple[list[Any], list[Any]]:
    """Returns (the results of the last step's lookups, tables and slots after it)."""
    strategy = CollectiveStrategy()
    with strategy.scope(plan="quiet"), tf.Graph().as_default(), tf.Session() as session:
        model = Model(strategy, optimizer, shown)
        session.run(tf.global_variables_initializer())
        for step in range(steps):
            results, _, _ = session.run([model.results, model.sums, model.train], model.feeds(step))
        return results, session.run(model.state)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.usefixtures("bound")
def test_neither_rows_nor_sums_are_written(
    optimizer: str, stand_in: driver.StandIn, monkeypatch: pytest.MonkeyPatch
):
    results, state = trained(optimizer)
    launches = collections.Counter(stand_in.launches)
    kernels = ["gather_rows", "pool_rows", "sum_pieces"]
    kernels += [f"update_{optimizer}", f"update_{optimizer}_long"]
    assert {kernel: launches[kernel] for kernel in kernels} == dict.fromkeys(kernels, 3)
    assert not launches.keys() & {"sum_rows", "sum_rows_long"}

    # The truth, of steps and of the last step's results.
    rule, slots = OPTIMIZERS[optimizer][1], len(state) // len(DIMS)
    for table in range(len(DIMS)):
        batches = [gradients_of(table, step) for step in range(3)]
        wanted, _ = numpy_optimizers.trained(rule, start(table), batches)
        np.testing.assert_allclose(state[table * slots], wanted, rtol=2e-5, atol=2e-6)
    before, _ = numpy_optimizers.trained(rule, start(2), batches[:2])
    np.testing.assert_allclose(results[-1], before[batch(2)[0][-1]], rtol=2e-5, atol=2e-6)

    # The same bits with sums that are written, and with rows that are, too.
    for writes_rows in (False, True):
        if writes_rows:
            monkeypatch.setattr(grouped_exchange, "_pools_from_tables", lambda *_: False)
        stand_in.reset()
        other_results, other_state = trained(optimizer, shown=True)
        assert {"sum_rows", "sum_rows_long"} <= set(stand_in.launches)
        for one, other in zip(results + state, other_results + other_state, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("bound")
def test_rows_are_those_before_their_update(stand_in: driver.StandIn):
    """Though no gradient depends on them."""
    strategy = CollectiveStrategy()
    with strategy.scope(plan="quiet"), tf.Graph().as_default() as graph, tf.Session() as session:
        with strategy.embedding_scope():
            table = tf.get_variable("table", initializer=start(2))
        rows = tf.nn.embedding_lookup(table, tf.constant([3, 3, 5], tf.int64))
        train = tf.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_sum(rows))
        session.run(tf.global_variables_initializer())
        for step in range(2):
            got, _ = session.run([rows, train])
            steps = np.array([2, 2, 1], np.float32)[:, None] * step
            np.testing.assert_array_equal(got, start(2)[[3, 3, 5]] - steps)
    # It isn't by chance.
    by_type = {op.type: op for op in graph.get_operations()}
    pool, update = by_type["CollectivePool"], by_type["CollectiveSparsePoolUpdate"]
    assert pool in update.control_inputs and "sum_rows" not in stand_in.launches


WAYS = {
    "plain": {"CollectiveSparsePoolUpdate"},
    # The rows are needed for gradients.
    "weights": {"CollectiveSparsePoolUpdate", "rows"},
    "norm": {"CollectivePoolGradient", "CollectiveSparseReduceUpdate", "rows"},
    # A row that only a lookup without a gradient asked for has a gradient of 0.
    "constant": {"CollectivePoolGradient", "CollectiveSparseReduceUpdate"},
    "half of the tables": {"CollectivePoolGradient", "CollectiveSparseReduceUpdate"},
    # Their updates are other operations.
    "dynamic": {"CollectivePoolGradient", "rows"},
}


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.usefixtures("bound")
def test_which_lookups_it_is_for(kind: str):
    strategy, metadata = CollectiveStrategy(), tf.RunMetadata()
    with strategy.scope(plan="quiet"), tf.Graph().as_default(), tf.Session() as session:
        with strategy.embedding_scope():
            shape = [None if kind == "dynamic" else ROWS, 4]
            tables = [
                tf.get_variable(name, shape, initializer=tf.ones_initializer()) for name in "ab"
            ]
        ids = tf.SparseTensor([[0, 0], [0, 1], [1, 0]], tf.constant([1, 2, 1], tf.int64), [2, 2])
        weights = tf.SparseTensor(ids.indices, tf.ones([3]), [2, 2]) if kind == "weights" else None
        rows = [
            tf.nn.embedding_lookup_sparse(
                table, ids, weights, combiner="sum", max_norm=1.0 if kind == "norm" else None
            )
            for table in tables
        ]
        more = tf.nn.embedding_lookup(tables[0], tf.constant([5], tf.int64))
        if kind == "constant":
            more = tf.stop_gradient(more)
        loss = tf.reduce_sum(rows[0]) + tf.reduce_sum(rows[1]) + tf.reduce_sum(more)
        optimizer = tf.train.AdagradOptimizer(1.0)
        gradients = optimizer.compute_gradients(loss, tables)
        if kind == "half of the tables":
            gradients = gradients[:1]
        train = optimizer.apply_gradients(gradients)
        session.run(tf.global_variables_initializer())
        session.run(
            train, options=tf.RunOptions(output_partition_graphs=True), run_metadata=metadata
        )
    ran = {node.op: node for graph in metadata.partition_graphs for node in graph.node}
    rows_came = {"rows"} if not ran["CollectiveGatherRows"].attr["unread"].b else set()
    assert ran.keys() & set().union(*WAYS.values()) | rows_came == WAYS[kind]


def test_an_update_is_whole_or_says_so(bound: DeviceOperations, stand_in: driver.StandIn):
    """Who follows changes learns which rows; wrong rows are refused; after any call of the driver
    that fails, tables are as they were, or the error says that they are not.
    """
    strategy = CollectiveStrategy()
    with strategy.scope(plan="quiet"), tf.Graph().as_default() as graph, tf.Session() as session:
        with strategy.embedding_scope():
            table = tf.get_variable("table", initializer=start(2))
        # 3 so often that a kernel of its own updates it.
        ids = tf.constant([3] * 100 + [5], tf.int64)
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids))
        train = tf.train.GradientDescentOptimizer(1.0).minimize(loss)
        session.run(table.initializer)
        session.run(train)
        (update,) = [x for x in graph.get_operations() if x.type == "CollectiveSparsePoolUpdate"]
        local_rows = update.inputs[2]
        assert local_rows.op.type == "CollectiveHear"
        followed = row_changes.ChangeSet(ROWS)
        followed.listen([int(session.run(row_changes.watch(table.handle)))])
        session.run(train)
        followed.begin()
        np.testing.assert_array_equal(followed.changes().rows, [3, 5])

        stand_in.reset()
        with pytest.raises(tf.errors.InvalidArgumentError, match="2 rows came back, but 1 row"):
            session.run(train, {local_rows: [3]})
        assert not any(one.startswith("update_") for one in stand_in.launches)

        stand_in.reset()
        session.run(train)
        calls, halves = list(stand_in.calls), 0
        for number, call in enumerate(calls, 1):
            if call in ("destroy_event", "wait_for_stream"):
                continue
            stand_in.reset()
            session.run(table.initializer)
            stand_in.reset()
            stand_in.fails_at = number
            with pytest.raises(tf.errors.InternalError, match="error 719 from cu") as caught:
                session.run(train)
            is_half = any(one.startswith("update_") for one in stand_in.launches)
            assert is_half == ("go on from a checkpoint" in str(caught.value)), (call, number)
            halves += is_half
            stand_in.reset()
            if not is_half:
                np.testing.assert_array_equal(session.run(table.read_value()), start(2))
        assert halves == 1


@pytest.mark.skipif(
    not tf.test.is_built_with_cuda(),
    reason="this TensorFlow is built without GPUs: no kernels for them",
)
def test_a_gpu_has_the_kernel():
    """The counts are on the host, and what isn't of tables on the device."""
    found = kernels.get_registered_kernels_for_op("CollectiveSparsePoolUpdate").kernel
    (one,) = [kernel for kernel in found if kernel.device_type == "GPU"]
    on_host = {"tables", "slots", "numbers", "used", "counts"}
    assert set(one.host_memory_arg) == on_host and not one.label
