"""A policy reaches its table by ev_option, a column, embedding_scope(), and the plan shows it."""

import json

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import (
    DynamicTable,
    EmbeddingConfig,
    EmbeddingVariableOption,
    InitializerOption,
    TablePolicy,
)
from tests.ranks.tables.test_dynamic_columns import (
    dense_features,
    embedding,
    linear,
    shared,
    weighted,
)

pytestmark = [pytest.mark.either_backend, pytest.mark.double]

D = 3
BOUND = TablePolicy(weight_bound=2.0)


def column(key, **options):
    return collective.feature_column.categorical_column_with_embedding(key, **options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", [embedding, shared, weighted, dense_features, linear])
def test_a_columns_option_is_its_tables(strategy, way):
    """It goes before the initializer that TensorFlow's columns have in any case."""
    option = EmbeddingConfig((0.25, 0.25), weight_bound=2)
    with strategy.scope(), tf.Graph().as_default():
        features = {
            "a": tf.constant([3, 5]),
            "b": tf.sparse.from_dense(tf.constant([[7], [9]])),
            "w": tf.sparse.from_dense(tf.constant([[1.0], [1.0]])),
        }
        with strategy.embedding_scope(policy=TablePolicy(weight_bound=77)):
            layer = way(features, lambda key: column(key, ev_option=option), lambda _: None)
        found = [v for v in tf.global_variables() if isinstance(v, DynamicTable)]
        assert found and {table.policy for table in found} == {BOUND}
        train = tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_sum(layer))
        with tf.train.MonitoredTrainingSession("") as session:
            session.run(train)
            for table in found:
                for _, rows in table.export(session):
                    np.testing.assert_array_equal(rows, np.full_like(rows, 0.25))


def test_columns_that_share_a_table_have_one_policy(strategy):
    for second in (None, TablePolicy(weight_bound=3)):
        columns = [column("a", ev_option=BOUND), column("b", ev_option=second)]
        with strategy.scope(), tf.Graph().as_default():
            with pytest.raises(ValueError, match="same number of buckets.*weight_bound=2.0"):
                tf.feature_column.shared_embedding_columns(columns, D)


def test_a_tables_own_policy_goes_before_the_scopes(strategy):
    ones, twos = tf.ones_initializer(), tf.constant_initializer(2.0)
    with strategy.scope(), tf.Graph().as_default():
        get = collective.get_embedding_variable
        outside = get("outside", D)
        with strategy.embedding_scope(policy=TablePolicy(ones, 5)):
            static, dynamic = tf.get_variable("s", [4, D]), tf.get_variable("d", [None, D])
            given = tf.get_variable("g", [4, D], initializer=twos)
            own = get("own", D, initializer=twos, ev_option=BOUND)
            deeprec = EmbeddingVariableOption(init_option=InitializerOption(twos))
            filled = get("filled", D, initializer=ones, ev_option=deeprec)
            with strategy.embedding_scope(min_rows=3):
                inner = tf.get_variable("inner", [4, D])
                replicated = tf.get_variable("replicated", [2, D])
            with strategy.embedding_scope(policy=None):
                free = tf.get_variable("free", [4, D])
        bounds = {
            table.op.name: table.policy.weight_bound
            for table in (outside, static, dynamic, given, own, filled, inner, free)
        }
        assert bounds == {
            "outside": None,
            "s": 5,
            "d": 5,
            "g": 5,
            "own": 2,
            "filled": None,
            "inner": 5,
            "free": None,
        }
        assert not hasattr(replicated, "policy")
        rows = {
            t.op.name: tf.nn.embedding_lookup(t, [1]) for t in (static, dynamic, given, own, filled)
        }
        total = tf.add_n([tf.reduce_sum(r) for r in rows.values()])
        train = tf.train.GradientDescentOptimizer(0.0).minimize(total)
        with tf.train.MonitoredTrainingSession("") as session:
            session.run(train)
            firsts = {name: row[0, 0] for name, row in session.run(rows).items()}
        assert firsts == {"s": 1, "d": 1, "g": 2, "own": 2, "filled": 2}


def test_a_table_that_is_there_has_the_policy_that_is_asked_for(strategy):
    with strategy.scope(), tf.Graph().as_default():
        get = collective.get_embedding_variable
        with tf.variable_scope("x", reuse=tf.AUTO_REUSE):
            made = get("t", D, ev_option=BOUND)
            assert get("t", D, ev_option=TablePolicy(tf.ones_initializer(), 2)) is made
            assert get("t", D) is made and tf.get_variable("t", [None, D]) is made
            with pytest.raises(ValueError, match="'x/t' is there already with .*weight_bound=2.0"):
                get("t", D, ev_option=TablePolicy(weight_bound=3))
            plain = get("plain", D)
            with pytest.raises(ValueError, match="'x/plain' is there already"):
                get("plain", D, ev_option=BOUND)
            assert plain.policy == TablePolicy()


def test_a_bound_that_leaves_0_only_is_refused(strategy):
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope(policy=TablePolicy(weight_bound=1e-9)):
            with pytest.raises(ValueError, match="'half': weight_bound=1e-09 is too small"):
                tf.get_variable("half", [4, D], tf.float16)


def test_the_plan_shows_policies(strategy):
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope(policy=BOUND):
            tf.get_variable("a", [4, D])
        with strategy.embedding_scope():
            tf.get_variable("b", [4, D])
        plan = strategy.plan()
        policies = [table["policy"] for table in json.loads(plan.to_json())["tables"]]
        assert policies == [{"weight_bound": 2.0}, {}]
        head, of_a, of_b, *_ = str(plan).split("\n\n")[1].splitlines()
        assert head.endswith("policy") and "weight_bound=2" in of_a and "bound" not in of_b
