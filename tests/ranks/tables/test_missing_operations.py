"""Without its compiled operations the library trains, more slowly, and says so."""

import json
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective.interception import scope_activation
from collective.ops import native_library
from collective.ops.graph import graph_analysis
from tests.ranks.dynamic_tables import MORE_OPTIMIZERS, OPTIMIZERS, D, drawn, normal, touch

WHY = "they were taken away by a test"


@pytest.fixture
def without_operations(monkeypatch):
    monkeypatch.setattr(native_library, "missing", lambda: WHY)
    scope_activation.warn_of_missing_operations.cache_clear()
    yield
    scope_activation.warn_of_missing_operations.cache_clear()


def test_one_rank_of_a_host_warns_at_the_first_strategy_only(without_operations, rank):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        collective.CollectiveStrategy()
        collective.CollectiveStrategy()
    raised = [warning for warning in caught if warning.category is RuntimeWarning]
    expected = (
        "the compiled operations of collective are missing, so every lookup has an exchange of "
        f"its own and steps are slower; {WHY}"
    )
    assert [str(warning.message) for warning in raised] == ([expected] if rank == 0 else [])
    assert all(warning.filename == __file__ for warning in raised)


@pytest.mark.ranks(2)
def test_the_plan_says_it_once(strategy, without_operations):
    """It trains all the same: each element of two rows, 1, loses the rate times its gradient."""
    with strategy.scope(plan="quiet", grouping=True), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable("user", [11, 4], initializer=tf.ones_initializer())
        both = [tf.nn.embedding_lookup(table, [row]) for row in (3, 4)]
        train = tf.train.GradientDescentOptimizer(0.5).minimize(tf.reduce_sum(sum(both)))
        with tf.train.MonitoredSession() as session:
            session.run(train)
            rows = session.run(both)
        plan = strategy.plan()
    assert [row.tolist() for row in rows] == [[[0.5] * 4]] * 2
    note = f"missing, so every lookup is alone; {WHY}"
    assert json.loads(plan.to_json())["notes"]["compiled operations"] == note
    assert {lookup.why for lookup in plan.alone} == {"the compiled operations are missing"}
    assert str(plan).count(WHY) == 1 and f"\ncompiled operations: {note}" in str(plan)


@pytest.mark.ranks(2)
def test_dynamic_tables_train(strategy, without_operations):
    """NumPy finds and draws their rows, which are the same."""
    keys = np.arange(-5, 40)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        tf.set_random_seed(7)
        table = collective.get_embedding_variable("t", D, initializer=normal())
        train, rows = touch(table, keys)
        # Its slot starts from ones.
        also = tf.train.RMSPropOptimizer(0.0).minimize(tf.reduce_sum(rows))
        total = table.total_count()
        kinds = {op.type for op in tf.get_default_graph().get_operations()}
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run([train, also])
            assert session.run(total) == len(keys)
            np.testing.assert_array_equal(session.run(rows), drawn(keys))
    assert not [kind for kind in kinds if kind.endswith(("Rows", "SettleSlots"))]


COMPILED = {
    "momentum": "Momentum",
    "nesterov": "NesterovMomentum",
    "adagrad": "Adagrad",
    "adam": "Adam",
    "ftrl": "Ftrl",
    "row_wise_adagrad": "RowWiseAdagrad",
    "adam_async": "LazyAdam",
    "lazy_adam": "LazyAdam",
}


def kind_of(op):
    """Returns the type of an operation, and its rule if it has one."""
    is_compiled = op.type.startswith("Collective")
    return f"{op.type} {op.get_attr('rule').decode()}" if is_compiled else op.type


def kinds_of_updates(names, dtype):
    """Returns, by optimizer, the kinds of operations that write a static and a dynamic table."""
    optimizers = {**OPTIMIZERS, **MORE_OPTIMIZERS}
    kinds = {}
    with tf.Graph().as_default():
        tables = [
            tf.get_variable(name, [rows, D], dtype, initializer=tf.ones_initializer())
            for name, rows in (("static", 9), ("dynamic", None))
        ]
        handles = {table.handle.op for table in tables}
        found = [tf.nn.embedding_lookup(table, tf.constant([1, 3, 1])) for table in tables]
        loss = tf.add_n([tf.reduce_sum(rows) for rows in found])
        for name in names:
            # Nothing else uses them.
            gradients = tf.train.GradientDescentOptimizer(1.0).compute_gradients(loss)
            train = optimizers[name]().apply_gradients(gradients)
            kinds[name] = [
                kind_of(op)
                for op in graph_analysis.upstream([train])
                if graph_analysis.WRITES.match(op.type)
                and graph_analysis.holder(op.inputs[0]) in handles
            ]
    return kinds


@pytest.mark.slow
@pytest.mark.either_backend
def test_compiled_operations_update_tables_of_float32(strategy):
    """One operation for both, if they are updated by the same numbers.

    TensorFlow's do it for other types, and with other optimizers.
    """
    others = (OPTIMIZERS.keys() | MORE_OPTIMIZERS.keys()) - COMPILED.keys()
    with strategy.scope(plan="quiet"), strategy.embedding_scope():
        kinds = kinds_of_updates({*COMPILED, *others}, tf.float32)
        of_float64 = kinds_of_updates(COMPILED, tf.float64)
    for name, rule in COMPILED.items():
        own_numbers = [f"CollectiveSparseUpdate {rule}"] * 2
        together = [f"CollectiveSparseReduceUpdate {rule}"]
        assert kinds.pop(name) == (own_numbers if name == "adam_async" else together)
        assert of_float64[name] and "Collective" not in str(of_float64[name])
    adam = ["CollectiveSparseUpdate Adam"] * 2
    assert sorted(kinds.pop("adam_w")) == [*adam, *["ResourceScatterSub"] * 2]
    for other in kinds.values():
        assert len(other) >= 2 and "Collective" not in str(other)


@pytest.mark.slow
@pytest.mark.either_backend
def test_tensorflows_operations_update_tables_where_these_are_missing(strategy, without_operations):
    with strategy.scope(plan="quiet"), strategy.embedding_scope():
        for kinds in kinds_of_updates(COMPILED, tf.float32).values():
            assert kinds and "Collective" not in str(kinds)
