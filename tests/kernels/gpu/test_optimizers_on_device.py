"""Checks optimizers whose updates TensorFlow has for CPUs only, or by a copy of the whole variable,
on tables that are on a GPU.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import CollectiveStrategy, train
from tests import numpy_optimizers
from tests.kernels.conftest import bind
from tests.kernels.gpu.emulator.bridge import EmulatedBridge
from tests.ranks import reference

V, D = 10, 3
MADE = tuple[dict[str, Any], dict[str, tf.Tensor]]


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    bind(EmulatedBridge(seed=7), monkeypatch)


@pytest.fixture
def strategy() -> Any:
    return CollectiveStrategy()


def proximal_gradient_descent(l1: float, l2: float) -> tf.train.Optimizer:
    return tf.train.ProximalGradientDescentOptimizer(
        0.1, l1_regularization_strength=l1, l2_regularization_strength=l2
    )


def adagrad_da(l1: float, l2: float) -> tf.train.Optimizer:
    return tf.train.AdagradDAOptimizer(
        0.5,
        tf.train.get_or_create_global_step(),
        l1_regularization_strength=l1,
        l2_regularization_strength=l2,
    )


def sparse(table: Any, ids: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    # TensorFlow's dense proximal gradient descent is of float32 only.
    "is_dense, dtype",
    [(False, tf.float32), (False, tf.float64), (True, tf.float32)],
)
@pytest.mark.parametrize("l1, l2", [(0.0, 0.0), (0.2, 0.3)])
@pytest.mark.parametrize("make", [proximal_gradient_descent, adagrad_da])
def test_rules_that_are_composed(
    strategy: Any, make: Callable[..., Any], l1: float, l2: float, is_dense: bool, dtype: Any
):
    """Rows and slots are plain TensorFlow's: of ids that come several times, or never."""

    def build(embedding_scope: Callable[[], Any]) -> MADE:
        with embedding_scope():
            table = reference.table("table", V, D, dtype=dtype)
        ids = tf.placeholder(tf.int64, [None])
        optimizer = make(l1, l2)
        step = tf.train.get_or_create_global_step()
        [(gradient, _)] = optimizer.compute_gradients(sparse(table, ids))
        if is_dense:
            gradient = tf.convert_to_tensor(gradient)
        train = optimizer.apply_gradients([(gradient, table)], global_step=step)
        slots = [optimizer.get_slot(table, name) for name in optimizer.get_slot_names()]
        state = [tf.identity(each) for each in (table, *slots)]
        return {"train": train, "state": state}, {"ids": ids}

    runs: list[Any] = [(["train"], {"ids": ids}) for ids in ([1, 2, 2], [7], [2, 9, 1], [])]
    runs.append((["state"], {}))
    wanted, got = reference.plain(build, runs), reference.sharded(strategy, build, runs)
    if l1:
        assert (wanted[-1]["state"][0] == 0).any()
    tolerance = 1e-5 if dtype == tf.float32 else 1e-12
    for one, other in zip(got[-1]["state"], wanted[-1]["state"], strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def step() -> Any:
    return tf.train.get_or_create_global_step()


# Optimizers of which a rule writes rows, and those that add to rows by TensorFlow's scatters.
WRITERS: dict[str, tuple[Callable[[], Any], Any]] = {
    "adagrad_decay": (
        lambda: train.AdagradDecayOptimizer(
            0.3, step(), accumulator_decay_step=2, accumulator_decay_rate=0.5
        ),
        numpy_optimizers.adagrad_decay(0.3, 0.1, 2, 0.5),
    ),
    "adam_w": (
        lambda: train.AdamWOptimizer(0.05, 0.1, 0.8, 0.9, 1e-3),
        numpy_optimizers.adam(0.1, 0.8, 0.9, 1e-3, lazy=False, decay=0.05),
    ),
    "group_lasso_ftrl": (
        lambda: train.GroupLassoFtrlOptimizer(0.3, l1_regularization_strength=2.0),
        numpy_optimizers.ftrl(0.3, -0.5, 2.0, 0.0, 0.0, 0.0, group=True),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", WRITERS)
def test_rows_are_written_in_place(strategy: Any, name: str, deterministic: bool):
    """Of a dynamic and a static table; no scatter of TensorFlow's copies all of either."""
    make, rule = WRITERS[name]
    rng = np.random.default_rng(5)
    batches = [(rng.integers(0, V - 1, 12), rng.normal(size=(12, D))) for _ in range(5)]
    keys = rng.integers(-(2**63), 2**63 - 1, V)
    start = reference.table_values(V, D)
    with (
        strategy.scope(plan="quiet", deterministic=deterministic),
        tf.Graph().as_default() as graph,
        tf.Session() as session,
    ):
        with strategy.embedding_scope():
            static = reference.table("static", V, D)
            dynamic = tf.get_variable("dynamic", [None, D], initializer=tf.ones_initializer())
        ids, factors = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None, D])
        used = ids, tf.gather(tf.constant(keys), ids)
        losses = [
            tf.reduce_sum(tf.nn.embedding_lookup(table, of_table) * factors)
            for table, of_table in zip((static, dynamic), used)
        ]
        # Without a step to count, what trains is known by the writes of tables alone.
        counted = step() if name == "adagrad_decay" else None
        update = make().minimize(tf.add_n(losses), global_step=counted)
        rows = [tf.nn.embedding_lookup(*one) for one in ((static, np.arange(V)), (dynamic, keys))]
        session.run(tf.global_variables_initializer())
        for batch_ids, gradients in batches:
            session.run(update, {ids: batch_ids, factors: gradients})
        got = session.run(rows)
        assert scatters(graph) == []
    came = np.unique(np.concatenate([batch_ids for batch_ids, _ in batches]))
    for first, found in zip((start, np.ones([V, D])), got, strict=True):
        wanted, _ = numpy_optimizers.trained(rule, first, batches)
        if found is got[1]:
            wanted[np.setdiff1d(np.arange(V), came)] = 0.0
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-6)


def test_rows_that_an_optimizer_writes_are_kept_within_their_bound(strategy: Any):
    with (
        strategy.scope(plan="quiet"),
        tf.Graph().as_default() as graph,
        tf.Session() as session,
    ):
        with strategy.embedding_scope(policy=collective.TablePolicy(weight_bound=0.5)):
            tables = [
                tf.get_variable(name, [rows, D], initializer=tf.ones_initializer())
                for name, rows in (("static", V), ("dynamic", None))
            ]
        ids, gradient = tf.constant([1, 2], tf.int64), [[np.nan, 9, -9], [0.75, 0.25, 1.25]]
        loss = tf.add_n([tf.reduce_sum(tf.nn.embedding_lookup(t, ids) * gradient) for t in tables])
        update = tf.train.ProximalGradientDescentOptimizer(1.0).minimize(loss)
        session.run(tf.global_variables_initializer())
        session.run(update)
        for table, others in zip(tables, (1, 0)):
            rows = session.run(tf.nn.embedding_lookup(table, [1, 2, 3]))
            wanted = [[np.nan, -0.5, 0.5], [0.25, 0.5, -0.25], [others] * D]
            np.testing.assert_array_equal(rows, wanted)
        assert scatters(graph) == []


def scatters(graph: tf.Graph) -> list[str]:
    """Returns TensorFlow's scatters of a graph in which all variables of tables are on a device."""
    return [
        f"{op.type} {op.name}"
        for op in graph.get_operations()
        if op.type.startswith("ResourceScatter")
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.train.GradientDescentOptimizer(0.3),
        lambda: tf.train.AdamOptimizer(0.1),
        lambda: tf.train.AdagradOptimizer(0.1),
    ],
)
def test_other_types_are_updated_as_by_tensorflow(strategy: Any, make: Callable[[], Any]):
    """Also where a row comes several times, and without a scatter of TensorFlow's."""

    def build(embedding_scope: Callable[[], Any]) -> MADE:
        with embedding_scope():
            table = reference.table("table", V, D, dtype=tf.float64)
        ids = tf.placeholder(tf.int64, [None])
        optimizer = make()
        values = tf.cast(ids[:, None], tf.float64) * tf.constant([[0.1, -0.2, 0.3]], tf.float64)
        gradient = tf.IndexedSlices(values, ids, tf.constant([V, D]))
        update = optimizer.apply_gradients([(gradient, table)])
        if embedding_scope == strategy.embedding_scope:
            assert scatters(tf.get_default_graph()) == []
        slots = [optimizer.get_slot(table, name) for name in optimizer.get_slot_names()]
        return {"train": update, "state": [tf.identity(each) for each in (table, *slots)]}, {
            "ids": ids
        }

    runs: list[Any] = [(["train"], {"ids": ids}) for ids in ([1, 2, 2], [7], [2, 9, 1], [])]
    runs.append((["state"], {}))
    wanted, got = reference.plain(build, runs), reference.sharded(strategy, build, runs)
    for one, other in zip(got[-1]["state"], wanted[-1]["state"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_restored_rows_are_written_in_place(strategy: Any, tmp_path: Any):
    """Those of a slot of integers, too."""
    values, path = [], str(tmp_path / "model")
    for restored in (False, True):
        with (
            strategy.scope(plan="quiet"),
            tf.Graph().as_default() as graph,
            tf.Session() as session,
        ):
            with strategy.embedding_scope():
                table = reference.table("table", V, D)
            optimizer = train.AdagradDecayOptimizer(0.3, step(), accumulator_decay_step=1)
            loss = sparse(table, tf.constant([1, 2], tf.int64))
            update = optimizer.minimize(loss, global_step=step())
            state = [tf.identity(table)]
            state += [tf.identity(optimizer.get_slot(table, n)) for n in optimizer.get_slot_names()]
            saver = tf.train.Saver()
            session.run(tf.global_variables_initializer())
            if restored:
                saver.restore(session, path)
                assert "CollectiveWriteRows" in {op.type for op in graph.get_operations()}
                assert scatters(graph) == []
            else:
                session.run([update])
                saver.save(session, path)
            values.append(session.run(state))
    assert {one.dtype.name for one in values[0]} == {"float32", "int64"} and values[0][2].any()
    for one, other in zip(*values, strict=True):
        np.testing.assert_array_equal(one, other)


class OwnScatter(tf.train.Optimizer):
    """Adds to rows as TensorFlow's optimizers do."""

    def __init__(self) -> None:
        super().__init__(False, "OwnScatter")

    def _resource_apply_sparse(self, grad: Any, var: Any, indices: Any) -> tf.Operation:
        return tf.raw_ops.ResourceScatterAdd(resource=var.handle, indices=indices, updates=-grad)


@pytest.mark.parametrize(
    "rows, deterministic, is_refused", [(None, True, True), (None, False, False), (V, True, False)]
)
def test_a_copy_of_address_space_is_refused(
    strategy: Any, rows: int | None, deterministic: bool, is_refused: bool
):
    """TensorFlow's copy of a static table is slow, but right."""
    with (
        strategy.scope(plan="quiet", deterministic=deterministic),
        tf.Graph().as_default(),
    ):
        with strategy.embedding_scope():
            table = tf.get_variable("users", [rows, D], initializer=tf.ones_initializer())
        refusal = pytest.raises(
            collective.TableError,
            match="'users' is in a GPU's memory, where OwnScatter can't update it: TensorFlow does "
            "ResourceScatterAdd on a copy in the host's memory.*COLLECTIVE_DYNAMIC_TABLES=host",
        )
        with refusal if is_refused else contextlib.nullcontext():
            OwnScatter().minimize(sparse(table, tf.constant([1, 2], tf.int64)))


class OwnMomentum(tf.train.MomentumOptimizer):
    """Updates rows by an operation that TensorFlow has for CPUs only."""

    def _resource_apply_sparse(self, grad: Any, var: Any, indices: Any) -> tf.Operation:
        return tf.raw_ops.ResourceSparseApplyMomentum(
            var=var.handle,
            accum=self.get_slot(var, "momentum").handle,
            lr=0.1,
            grad=grad,
            indices=indices,
            momentum=0.9,
        )


@pytest.mark.parametrize(
    "rows, setting", [(V, "COLLECTIVE_KERNELS=cpu"), (None, "COLLECTIVE_DYNAMIC_TABLES=host")]
)
@pytest.mark.parametrize("local_steps, version", [(1, 2), (2, 2), (2, 1)])
def test_an_update_that_a_gpu_has_no_kernel_of_is_refused(
    strategy: Any,
    rows: int | None,
    setting: str,
    local_steps: int,
    version: int,
    request: pytest.FixtureRequest,
):
    """With local_steps, the update is in a branch, of either version."""
    if version == 1:
        tf.disable_control_flow_v2()
        request.addfinalizer(tf.enable_control_flow_v2)
    with strategy.scope(plan="quiet", local_steps=local_steps), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable("users", [rows, D])
        loss = sparse(table, tf.constant([1, 2], tf.int64))
        with pytest.raises(
            collective.TableError,
            match="table 'users' is in a GPU's memory, where OwnMomentum can't update it: "
            "TensorFlow has ResourceSparseApplyMomentum of float32 for CPUs only. Use another "
            f"optimizer, or keep the table in the host's memory: {setting} in the environment",
        ):
            OwnMomentum(0.1, 0.9).minimize(loss)


def test_an_update_in_a_function_is_refused(strategy: Any):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable("users", [V, D])
        optimizer = OwnMomentum(0.1, 0.9)
        pairs = optimizer.compute_gradients(sparse(table, tf.constant([1, 2], tf.int64)))
        optimizer._create_slots([table])
        update = tf.function(lambda: optimizer.apply_gradients(pairs), autograph=False)
        with pytest.raises(collective.TableError, match="'users' .* OwnMomentum can't update it"):
            update()


@pytest.mark.parametrize("dtype, is_refused", [(tf.float16, False), (tf.bfloat16, True)])
def test_an_update_that_has_kernels_of_some_types_is_refused_of_others(
    strategy: Any, dtype: tf.DType, is_refused: bool
):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable("users", [V, D], dtype)
        loss = sparse(table, tf.constant([1, 2], tf.int64))
        refusal = pytest.raises(collective.TableError, match="Adagrad.* of bfloat16 for CPUs only")
        with refusal if is_refused else contextlib.nullcontext():
            tf.train.AdagradOptimizer(0.1).minimize(loss)


def test_an_optimizer_of_keras_is_refused(strategy: Any):
    optimizer = tf.keras.optimizers.legacy.RMSprop(0.1, momentum=0.5)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable("users", [V, D])
        loss = sparse(table, tf.constant([1, 2], tf.int64))
        with pytest.raises(collective.TableError, match="'users' .* RMSprop can't update it"):
            optimizer.apply_gradients(zip(tf.gradients(loss, [table]), [table]))


def test_other_variables_are_none_of_ours(strategy: Any):
    """TensorFlow has what it can't update on a GPU on the CPU."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default(), tf.Session() as session:
        weights = tf.get_variable("weights", [V, D], initializer=tf.ones_initializer())
        with strategy.embedding_scope():
            table = tf.get_variable("users", [V, D])
        ids = tf.constant([1, 2], tf.int64)
        loss = sparse(weights, ids) + 0 * sparse(table, ids)
        update = OwnMomentum(0.1, 0.9).minimize(loss, var_list=[weights])
        session.run(tf.global_variables_initializer())
        session.run(update)
        np.testing.assert_allclose(session.run(weights)[:3, 0], [1, 0.8, 0.8], rtol=1e-6)
