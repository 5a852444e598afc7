"""A scope makes tables of the right variables, with the right initial values, or refuses to."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective import Table, TableError
from collective.tables.rows import initializers
from tests.ranks import reference

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3), pytest.mark.double]


def all_rows(strategy, make, rows, seed=7):
    """Returns every row of the table that make() makes, read by lookups on this rank."""
    with strategy.scope(), tf.Graph().as_default():
        tf.set_random_seed(seed)
        with strategy.embedding_scope():
            t = make()
        assert isinstance(t, Table)
        everything = tf.nn.embedding_lookup(t, tf.range(rows))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            return session.run(everything)


INITIALIZERS = {
    "uniform": (lambda: tf.random_uniform_initializer(-2.0, 3.0), 0.5, 5 / 12**0.5, (-2, 3)),
    "normal": (lambda: tf.random_normal_initializer(1.0, 0.5), 1.0, 0.5, None),
    "truncated": (lambda: tf.truncated_normal_initializer(0.0, 1.0), 0.0, 0.87962566, (-2, 2)),
    "glorot": (lambda: None, 0.0, (2 / 3008) ** 0.5, None),
    "variance_scaling": (
        lambda: tf.variance_scaling_initializer(2.0, "fan_out", "truncated_normal"),
        0.0,
        0.5,
        None,
    ),
    "uniform_v2": (lambda: tf2.initializers.RandomUniform(-1.0, 1.0), 0.0, 2 / 12**0.5, (-1, 1)),
    "keras_he": (lambda: tf.keras.initializers.he_normal(), 0.0, (2 / 3000) ** 0.5, None),
    "class": (lambda: tf.random_normal_initializer, 0.0, 1.0, None),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", INITIALIZERS)
def test_random_values_have_the_distribution_and_depend_on_no_n(strategy, name):
    make, mean, deviation, limits = INITIALIZERS[name]
    rows = all_rows(strategy, lambda: tf.get_variable("t", [3000, 8], initializer=make()), 3000)
    assert abs(rows.mean() - mean) < 5 * deviation / rows.size**0.5
    assert abs(rows.std() / deviation - 1) < 0.02
    if limits:
        assert limits[0] <= rows.min() and rows.max() <= limits[1]
    assert len(np.unique(rows)) > rows.size * 0.99
    lag = np.corrcoef(rows[:-1].ravel(), rows[1:].ravel())[0, 1]
    assert abs(lag) < 0.03
    # the same as one rank alone would draw
    init = make() or tf.glorot_uniform_initializer()
    init = init() if isinstance(init, type) else init
    with tf.Graph().as_default():
        tf.set_random_seed(7)
        alone = initializers.by_row(init, (3000, 8), "t")(
            np.arange(3000, dtype=np.uint64), 8
        ).astype(np.float32)
    np.testing.assert_array_equal(rows, alone)


def test_seeds_are_respected(strategy):
    def draw(name="t", op_seed=None, graph_seed=7):
        return all_rows(
            strategy,
            lambda: tf.get_variable(
                name, [20, 4], initializer=tf.random_normal_initializer(seed=op_seed)
            ),
            20,
            graph_seed,
        )

    first = draw()
    np.testing.assert_array_equal(first, draw())
    for other in (draw(graph_seed=8), draw(op_seed=1), draw(name="u")):
        assert not np.array_equal(first, other)


def test_a_known_stream(strategy):
    """SplitMix64's published first outputs for seed 1234567: the generator is the one it claims to
    be.
    """
    got = [int(initializers.hashed(1234567, np.array([i], np.uint64))[0]) for i in (1, 2, 3)]
    assert got == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_tables_take_no_random_numbers_from_what_comes_next(strategy):
    """tf.set_random_seed numbers operations: a dense layer and a dropout keep the values they have
    in plain TensorFlow.
    """

    def build(embedding_scope):
        with embedding_scope():
            for i, init in enumerate(
                [
                    tf.random_uniform_initializer(),
                    tf.truncated_normal_initializer(),
                    None,
                    tf.zeros_initializer(),
                    tf.random_normal_initializer(seed=3),
                ]
            ):
                t = tf.get_variable(f"t{i}", [5, 2], initializer=init)
                tf.nn.embedding_lookup(t, [1])
        return {"w": tf.get_variable("w", [4, 4]), "random": tf.random.uniform([3])}, {}

    got, want = (
        reference.sharded(strategy, build, [(["w", "random"], {})])[0],
        reference.plain(build, [(["w", "random"], {})])[0],
    )
    np.testing.assert_array_equal(got["w"], want["w"])
    np.testing.assert_array_equal(got["random"], want["random"])


def test_a_table_of_an_initializer_that_fills_it_whole(strategy):
    """Every rank draws the same whole table, without a seed, too, of which it keeps its rows."""
    initializers_without_seed = [tf.orthogonal_initializer(), tf2.initializers.Orthogonal()]
    for seed in (None, 3):
        with strategy.scope(), tf.Graph().as_default():
            tf.set_random_seed(seed)
            with strategy.embedding_scope():
                tables = [
                    tf.get_variable(f"t{i}", [6, 3], initializer=init)
                    for i, init in enumerate(initializers_without_seed)
                ]
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for values in session.run(tables):
                    np.testing.assert_allclose(values.T @ values, np.eye(3), atol=1e-5)


@pytest.mark.ranks(2)
def test_an_initializer_that_takes_the_part_of_a_variable(strategy):
    """TensorFlow gives a third argument to initializers that have it, of each part its place."""
    parts = []

    def ramp(shape, dtype=None, partition_info=None):
        parts.append((list(partition_info.full_shape), list(partition_info.var_offset)))
        return tf.reshape(tf.range(np.prod(shape), dtype=dtype), shape)

    class Ramp:
        def __call__(self, shape, dtype, partition_info):
            return ramp(shape, dtype, partition_info)

    for initializer in (ramp, Ramp()):
        for partitioner in (None, tf.fixed_size_partitioner(2)):
            rows = all_rows(
                strategy,
                lambda initializer=initializer, partitioner=partitioner: tf.get_variable(
                    "t", [5, 2], initializer=initializer, partitioner=partitioner
                ),
                5,
            )
            np.testing.assert_array_equal(rows, np.arange(10).reshape(5, 2))
    assert set(map(str, parts)) == {"([5, 2], [0, 0])"}


@pytest.mark.parametrize(("strategy_of_parts", "is_said"), [("mod", True), ("div", False)])
def test_rows_that_tensorflow_would_have_in_another_order_are_warned_of(
    strategy, rank, strategy_of_parts, is_said, monkeypatch
):
    """TensorFlow finds id k in part k mod P, and writes the parts one after another."""
    said = []
    monkeypatch.setattr(tf.logging, "warning", lambda text, *_: said.append(text))
    values = np.arange(10, dtype=np.float32).reshape(5, 2)

    class InOrder:
        def __call__(self, shape, dtype, partition_info):
            first = partition_info.var_offset[0]
            return tf.constant(values[first : first + shape[0]])

    with tf.Graph().as_default(), tf.Session() as session:
        plain = tf.get_variable(
            "t", [5, 2], partitioner=tf.fixed_size_partitioner(2), initializer=InOrder()
        )
        rows = tf.nn.embedding_lookup(plain, [1], strategy_of_parts)
        session.run(tf.global_variables_initializer())
        assert (session.run(rows).tolist() != values[[1]].tolist()) is is_said
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable(
                "t", initializer=values, partitioner=tf.fixed_size_partitioner(2)
            )
            whole = tf.get_variable("whole", [5, 2])
        ids = tf.sparse.from_dense(tf.constant([[4, 2]], tf.int64))
        for _ in range(2):
            tf.nn.embedding_lookup(whole, [1], strategy_of_parts)
            tf.nn.embedding_lookup(table, [1], strategy_of_parts)
            tf.nn.embedding_lookup_sparse(table, ids, None, strategy_of_parts)
    said = [text for text in said if "another order" in text]
    assert len(said) == (is_said and rank == 0)
    assert not said or "'t'" in said[0] and "2 parts" in said[0] and "k mod 2" in said[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("partition_strategy", ["mod", "div"])
def test_a_table_is_its_only_part(strategy, partition_strategy):
    """Scripts make a list of a partitioned variable, and look that up."""
    values = np.arange(10, dtype=np.float32).reshape(5, 2)
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable(
                "t", initializer=values, partitioner=tf.fixed_size_partitioner(2)
            )
        parts = list(table)
        assert len(parts) == 1 and parts[0] is table
        ids = tf.sparse.from_dense(tf.constant([[4, 2], [1, 0]], tf.int64))
        rows = tf.nn.embedding_lookup(parts, [4, 1], partition_strategy=partition_strategy)
        sums = tf.nn.embedding_lookup_sparse(
            parts, ids, None, partition_strategy=partition_strategy, combiner="sum"
        )
        train = tf.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_sum(rows), var_list=parts)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            np.testing.assert_array_equal(session.run(rows), values[[4, 1]])
            np.testing.assert_array_equal(session.run(sums), [values[4] + values[2], values[1]])
            session.run(train)
            np.testing.assert_array_equal(session.run(rows), values[[4, 1]] - 1)


def test_given_values(strategy):
    values = reference.table_values(7, 3)
    for make in (
        lambda: tf.get_variable("t", [7, 3], initializer=tf.constant_initializer(values)),
        lambda: tf.get_variable("t", [7, 3], initializer=tf.constant_initializer(values.tolist())),
        lambda: tf.get_variable("t", initializer=values),
        lambda: tf.get_variable("t", initializer=tf.constant(values)),
        lambda: tf.get_variable("t", [7, 3], initializer=lambda shape, dtype: tf.constant(values)),
        lambda: tf.get_variable("t", [7, 3], initializer=tf2.initializers.Constant(values)),
        lambda: tf.get_variable("t", [7, 3], initializer=lambda shape, dtype: values.astype("f8")),
        lambda: tf.get_variable("t", [7, 3], initializer=lambda shape, dtype: values.tolist()),
    ):
        np.testing.assert_array_equal(all_rows(strategy, make, 7), values)
    for init, value in (
        (tf.zeros_initializer(), 0),
        (tf.ones_initializer, 1),
        (tf.constant_initializer(2.5), 2.5),
    ):
        assert (
            all_rows(strategy, lambda init=init: tf.get_variable("t", [7, 3], initializer=init), 7)
            == value
        ).all()
    for seed in (1, None):  # all ranks draw the same, each its rows of it
        init = tf.orthogonal_initializer(seed=seed)
        orthogonal = all_rows(
            strategy, lambda init=init: tf.get_variable("t", [6, 3], initializer=init), 6
        )
        np.testing.assert_allclose(orthogonal.T @ orthogonal, np.eye(3), atol=1e-5)


def test_values_of_another_shape_are_refused(strategy):
    """Also where they are as many: rows would be others."""
    values = reference.table_values(3, 7)
    with strategy.scope(plan="quiet"), tf.Graph().as_default(), strategy.embedding_scope():
        with pytest.raises(ValueError, match=r"table 't'.*\(3, 7\).*\(7, 3\)"):
            tf.get_variable("t", [7, 3], initializer=lambda shape, dtype: values)


@pytest.mark.parametrize(
    "value",
    [
        np.array([[1, 2], [3, 2**24 + 1]]),
        np.array([[1.0, 2.0]]),
        [[1.0, 2.0]],
        [[1, 2]],
        np.ones([2, 2], np.float16),
    ],
    ids=lambda value: str(np.asarray(value).dtype),
)
def test_a_given_value_has_its_own_type(strategy, value):
    """Whatever the scope's is, and integers are no table."""
    with tf.Graph().as_default():
        want = tf.get_variable("v", initializer=value)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            made = tf.get_variable("v", initializer=value)
        assert (
            made.dtype == want.dtype
            and isinstance(made, Table) == made.dtype.base_dtype.is_floating
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            np.testing.assert_array_equal(session.run(made), value)


def test_a_local_variable_is_each_ranks_own(strategy, rank):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            confusion = tf.get_local_variable(
                "confusion", [3, 3], initializer=tf.zeros_initializer()
            )
        added = confusion.assign_add(tf.fill([3, 3], rank + 1.0), read_value=True)
        with tf.Session() as session:
            session.run(tf.local_variables_initializer())
            np.testing.assert_array_equal(session.run(added), np.full([3, 3], rank + 1.0))


def test_fewer_rows_than_ranks(strategy):
    assert all_rows(
        strategy, lambda: tf.get_variable("t", [1, 2], initializer=tf.ones_initializer()), 1
    ).shape == (1, 2)


def test_which_variables_are_tables(strategy, size):
    with strategy.scope(), tf.Graph().as_default():
        with tf.variable_scope("captured") as captured:
            pass
        with strategy.embedding_scope():
            with (
                tf.variable_scope("a"),
                tf.variable_scope("b", partitioner=tf.fixed_size_partitioner(strategy.world_size)),
            ):
                table = tf.get_variable("t", (10, 3))
                bias = tf.get_variable("bias", [4])
            with tf.variable_scope(captured):
                inside = tf.get_variable("t", [10, 3])
            with tf.variable_scope("", reuse=tf.AUTO_REUSE):
                again = tf.get_variable("a/b/t", [10, 3])
            with tf.variable_scope(
                "c", custom_getter=lambda getter, name, *a, **k: getter(name + "_renamed", *a, **k)
            ):
                renamed = tf.get_variable("t", [10, 3])
            integers = tf.get_variable(
                "integers", [4, 4], tf.int32, initializer=tf.zeros_initializer()
            )
            with strategy.embedding_scope():
                nested = tf.get_variable("nested", [3, 3])
            still = tf.get_variable("still", [3, 3])
        outside = tf.get_variable("outside", [3, 3])
        for variable in (table, inside, renamed, nested, still):
            assert isinstance(variable, Table), variable.name
        for variable in (bias, integers, outside):
            assert not isinstance(variable, Table), variable.name
        assert again is table
        assert (
            table.name == "a/b/t:0"
            and table.shape.as_list() == [10, 3]
            and table.get_shape().as_list() == [10, 3]
        )
        assert renamed.op.name == "c/t_renamed"
        assert {v.name for v in (table, outside)} <= {v.name for v in tf.trainable_variables()}
        shard = tf.raw_ops.VariableShape(input=table.handle)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            assert session.run(tf.report_uninitialized_variables()).size == 0
            assert session.run(shard).tolist() == [len(range(strategy.rank(), 10, size)), 3]
        slots = tf.train.AdagradOptimizer(0.1)
        slots.minimize(tf.reduce_sum(tf.nn.embedding_lookup(table, [1])))
        slot = slots.get_slot(table, "accumulator")
        assert slot.shape.as_list() == [10, 3] and slot.shard_shape.as_list() == [
            len(range(strategy.rank(), 10, size)),
            3,
        ]


@pytest.mark.parametrize(
    "way",
    [
        lambda t: t.initialized_value(),
        lambda t: t.batch_scatter_update(tf.IndexedSlices(tf.ones([1, 3]), [0])),
        lambda t: t.scatter_nd_max([[0]], tf.ones([1, 3])),
        lambda t: t.count_up_to(3),
    ],
)
def test_what_would_see_one_shard_is_refused(strategy, size, way):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = tf.get_variable("t", [10, 3])
        with tf.Session(), pytest.raises(TableError, match="table 't' .*embedding_lookup"):
            way(t)


def test_one_rank_has_it_whole(strategy, size):
    if size > 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = tf.get_variable("t", [10, 3], initializer=tf.ones_initializer())
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            assert session.run(tf.reduce_sum(t)) == 30 and session.run(t).shape == (10, 3)


def test_one_rank_keeps_tensorflows_checkpoints(strategy, size, tmp_path):
    """Written with a table by one rank, read by plain TensorFlow, and the other way round."""
    if size > 1:
        return

    def build(embedding_scope):
        with embedding_scope():
            t = tf.get_variable("t", [10, 3])
        train = tf.train.AdagradOptimizer(0.1).minimize(
            tf.reduce_sum(tf.nn.embedding_lookup(t, [1, 2])),
            global_step=tf.train.get_or_create_global_step(),
        )
        return t, train

    with strategy.scope(), tf.Graph().as_default():
        t, train = build(strategy.embedding_scope)
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=str(tmp_path), save_checkpoint_steps=1
        ) as session:
            session.run(train)
            written = session.run(t)
    with tf.Graph().as_default():
        t, _ = build(contextlib.nullcontext)
        with tf.Session() as session:
            tf.train.Saver().restore(session, tf.train.latest_checkpoint(str(tmp_path)))
            np.testing.assert_array_equal(session.run(t), written)
    with strategy.scope(), tf.Graph().as_default():
        t, _ = build(strategy.embedding_scope)
        with tf.train.MonitoredTrainingSession(checkpoint_dir=str(tmp_path)) as session:
            np.testing.assert_array_equal(session.run(t), written)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
def test_first_values_are_there_before_they_are_read(strategy, dtype):
    """They are written in place by a function of Python: the graph optimizer once let a cast read
    the memory before.
    """
    for _ in range(10):
        with strategy.scope(), tf.Graph().as_default():
            with strategy.embedding_scope():
                t = tf.get_variable("t", [6, 4], dtype, initializer=tf.ones_initializer())
            rows = tf.cast(tf.nn.embedding_lookup(t, tf.range(6)), tf.float32)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                np.testing.assert_array_equal(session.run(rows), np.ones([6, 4]))
