"""Dynamic tables train as static tables do in plain TensorFlow, and only training makes rows."""

import functools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import TableError
from tests.ranks import reference
from tests.ranks.dynamic_tables import OPTIMIZERS, B, D, V, drawn, normal, touch

pytestmark = [pytest.mark.ranks(1, 3), pytest.mark.double("matrix")]


def ragged(step):
    """Draws ids without an empty sample, which would move row 0 of a static table.

    Returns (places [K, 2], ids [K], weights [K]).
    """
    rng = np.random.default_rng([5, step])
    lengths = rng.integers(1, 4, B)
    places = np.array([(i, j) for i, length in enumerate(lengths) for j in range(length)], np.int64)
    return (
        places,
        np.minimum(rng.zipf(1.4, len(places)) - 1, V - 1),
        rng.uniform(0.5, 2.0, len(places)).astype(np.float32),
    )


def batches(rank, size):
    """Yields feeds of this rank's share of six global batches."""
    for step in range(6):
        places, ids, weights = ragged(step)
        first, last = rank * B // size, (rank + 1) * B // size
        mine = (places[:, 0] >= first) & (places[:, 0] < last)
        yield {
            "places": places[mine] - [first, 0],
            "ids": ids[mine],
            "weights": weights[mine],
            "dense": np.random.default_rng([6, step]).integers(0, V, B)[first:last],
        }


def model(embedding_scope, optimizer, make, samples):
    """Builds one table in four kinds of lookups, and a dense layer."""
    with embedding_scope():
        t = make()
    p = {
        "places": tf.placeholder(tf.int64, [None, 2]),
        "ids": tf.placeholder(tf.int64, [None]),
        "weights": tf.placeholder(tf.float32, [None]),
        "dense": tf.placeholder(tf.int64, [None]),
    }
    sparse = tf.SparseTensor(p["places"], p["ids"], [samples, 3])
    weights = tf.SparseTensor(p["places"], p["weights"], [samples, 3])
    wide = tf.concat(
        [
            tf.nn.embedding_lookup(t, p["dense"]),
            tf.gather(t, (p["dense"] + 1) % V),
            tf.nn.safe_embedding_lookup_sparse(t, sparse, weights, combiner="mean"),
            tf.nn.embedding_lookup_sparse(t, sparse, None, combiner="sqrtn"),
        ],
        1,
    )
    w = tf.get_variable("w", initializer=tf.constant(reference.table_values(4 * D, 1)))
    loss = tf.reduce_mean(tf.square(tf.matmul(wide, w) - 1.0))
    train = OPTIMIZERS[optimizer]().minimize(loss, global_step=tf.train.get_or_create_global_step())
    return {"train": train, "rows": tf.nn.embedding_lookup(t, tf.range(V)), "w": w}, p


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("placement", ["rows", "whole:5"])
def test_trained_as_plain_tensorflow_trains_the_static_table(
    strategy, rank, size, optimizer, placement
):
    runs = [(["train"], feed) for feed in batches(0, 1)] + [(["rows", "w"], {})]
    want = reference.plain(
        lambda s: model(
            s,
            optimizer,
            lambda: tf.get_variable(
                "t", [V, D], initializer=tf.constant_initializer(drawn(np.arange(V)))
            ),
            B,
        ),
        runs,
    )
    runs = [(["train"], feed) for feed in batches(rank, size)] + [(["rows", "w"], {})]
    got = reference.sharded(
        strategy,
        lambda s: model(
            functools.partial(s, placement=placement),
            optimizer,
            lambda: tf.get_variable("t", [None, D], initializer=normal()),
            B // size,
        ),
        runs,
    )
    assert np.abs(want[-1]["rows"] - drawn(np.arange(V))).max() > 0.002
    np.testing.assert_allclose(got[-1]["rows"], want[-1]["rows"], rtol=2e-4, atol=2e-6)
    np.testing.assert_allclose(got[-1]["w"], want[-1]["w"], rtol=2e-4, atol=2e-6)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "optimizer",
    [lambda: tf.train.AdagradOptimizer(0.1), lambda: tf.train.AdamOptimizer(0.1)],
    ids=["adagrad", "adam"],
)
def test_updates_in_a_branch_wait_for_the_keys(strategy, optimizer):
    """Slots of rows that are new in this very run have their initial values, and Adam goes over
    these rows, too.
    """
    found = []
    for branch in (True, False):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            tables = [tf.get_variable(name, [None, D], initializer=normal()) for name in "tuvw"]
            ids, does = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.bool, [])
            opt = optimizer()
            given = opt.compute_gradients(
                tf.add_n([tf.reduce_sum(tf.nn.embedding_lookup(t, ids)) for t in tables]), tables
            )

            def apply(opt=opt, given=given):
                with tf.control_dependencies([opt.apply_gradients(given)]):
                    return tf.constant(True)

            train = tf.cond(does, apply, lambda: tf.constant(False)) if branch else apply()
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for first in range(0, 30, 10):
                    assert session.run(train, {ids: np.arange(first, first + 10), does: True})
                rows = [
                    np.concatenate([r for _, r in t.export(session)])
                    for t in tables
                    if t.local_count(session)
                ]
                found.append(
                    [
                        *rows,
                        *(
                            slot.column(session).read(np.arange(t.local_count(session) + 1))
                            for t in tables
                            for slot in t.slots
                        ),
                    ]
                )
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


class Handing(tf.train.Optimizer):
    """Has another optimizer do the updates."""

    def __init__(self, inner):
        super().__init__(False, "Handing")
        self._inner = inner

    def _create_slots(self, var_list):
        self._inner._create_slots(var_list)

    def _prepare(self):
        self._inner._prepare()

    def _resource_apply_sparse_duplicate_indices(self, grad, handle, indices):
        return self._inner._resource_apply_sparse_duplicate_indices(grad, handle, indices)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: tf.train.AdagradOptimizer(0.1),
        lambda: tf.train.MomentumOptimizer(0.1, 0.9),
        lambda: tf.train.FtrlOptimizer(0.1),
    ],
    ids=["adagrad", "momentum", "ftrl"],
)
def test_slots_of_an_optimizer_that_another_hands_updates_to(strategy, optimizer):
    found = []
    for hands in (lambda inner: inner, Handing):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            table, ids = (
                tf.get_variable("t", [None, D], initializer=normal()),
                tf.placeholder(tf.int64, [None]),
            )
            train = hands(optimizer()).minimize(
                tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2)
            )
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for first in range(3):
                    session.run(train, {ids: np.arange(first, first + 2000)})
                found.append(np.concatenate([rows for _, rows in table.export(session)]))
    np.testing.assert_allclose(*found, rtol=1e-6, atol=1e-7)


def test_an_unknown_key_has_zeros_whatever_adam_divides_by(strategy):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        table = tf.get_variable("t", [None, D], initializer=normal())
        train = tf.train.AdamOptimizer(0.1, epsilon=0.0).minimize(
            tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2]))
        )
        unknown = tf.nn.embedding_lookup(table, [99])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            np.testing.assert_array_equal(session.run(unknown), 0)


@pytest.mark.slow
def test_only_training_inserts(strategy, rank):
    """A run that updates nothing finds no key and leaves none, though it computes a gradient; nor
    does its zero row move.
    """
    with strategy.scope(), tf.Graph().as_default():
        t = collective.get_embedding_variable("t", 2, initializer=tf.ones_initializer())
        ids = tf.placeholder(tf.int64, [None])
        rows = tf.nn.embedding_lookup(t, ids)
        loss = tf.reduce_sum(rows)
        optimizer = tf.train.AdagradOptimizer(0.5)
        gradients = optimizer.compute_gradients(loss)
        train = optimizer.apply_gradients(gradients)
        mean = tf.metrics.mean(rows)[1]
        total = t.total_count()
        sparse = tf.SparseTensor([[0, 0], [0, 1]], tf.constant([1, 2], tf.int64), [1, 2])
        pooled = tf.nn.safe_embedding_lookup_sparse(t, sparse)
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            assert (session.run([rows, gradients[0][0], mean], {ids: [1, 5, 9]})[0] == 0).all()
            assert session.run(total) == 0
            session.run(train, {ids: [1]})
            found = session.run(rows, {ids: [1, 5]})
            assert session.run(total) == 1 and (found[0] != 0).all() and (found[1] == 0).all()
            # an unknown key counts as a row of zeros
            np.testing.assert_allclose(session.run(pooled), found[:1] / 2)


def test_an_update_by_a_session_that_isnt_the_scopes_is_an_error(strategy, size):
    if size > 1:
        return
    with tf.Graph().as_default():
        with strategy.scope():
            t = collective.get_embedding_variable("t", 2)
            train, _ = touch(t, [1])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(tf.errors.InvalidArgumentError, match="inside `with strategy.scope"):
                session.run(train)


def test_an_optimizer_that_goes_over_whole_slots_is_refused(strategy):
    class Own(tf.train.AdamOptimizer):
        def _apply_sparse_shared(self, grad, var, indices, scatter_add):
            m = self.get_slot(var, "m")
            return tf.assign(m, m * 0.9)

    with strategy.scope(), tf.Graph().as_default():
        t = tf.get_variable("t", [None, 3])
        with pytest.raises(TableError, match="a slot of the dynamic table 't'.*single rows"):
            Own(0.1).minimize(tf.reduce_sum(tf.nn.embedding_lookup(t, [1])))


@pytest.mark.parametrize("version", [1, 2])
def test_lookups_inside_control_flow(strategy, size, version):
    """They answer; their gradient is refused, for TensorFlow would make a matrix of all reserved
    memory of it.
    """
    if version == 1:
        tf.disable_control_flow_v2()
    try:
        with strategy.scope(), tf.Graph().as_default():
            tf.set_random_seed(7)
            t = collective.get_embedding_variable("t", D, initializer=normal())
            ids = tf.constant([1, 2], tf.int64)
            train, rows = touch(t, [1, 2, 3])
            branch = tf.cond(
                tf.shape(ids)[0] > 1,
                lambda: tf.nn.embedding_lookup(t, ids),
                lambda: tf.zeros([2, D]),
            )
            loop = tf.while_loop(
                lambda i, _: i < 3,
                lambda i, x: (i + 1, x + tf.nn.embedding_lookup(t, ids)),
                [0, tf.zeros([2, D])],
            )[1]
            with pytest.raises(TableError, match="look up outside"):
                tf.gradients(branch, t)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(train)
                for got, factor in zip(session.run([branch, loop]), (1, 3)):
                    np.testing.assert_allclose(got, factor * drawn([1, 2]), rtol=1e-6)
    finally:
        tf.enable_control_flow_v2()


def test_without_tensorflows_second_version(strategy, rank, size):
    """As after tf.disable_v2_behavior(): shapes are of other numbers, branches and variables of the
    first version.
    """
    switches = ("v2_tensorshape", "control_flow_v2", "resource_variables")
    for name in switches:
        getattr(tf, f"disable_{name}")()
    try:
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            t = collective.get_embedding_variable("t", 2, initializer=tf.ones_initializer())
            column = tf.feature_column.embedding_column(
                collective.feature_column.categorical_column_with_embedding("key"),
                2,
                initializer=tf.ones_initializer(),
            )
            with strategy.embedding_scope():
                out = tf.feature_column.input_layer(
                    {"key": tf.constant([[7], [9]], tf.int64)}, [column]
                )
                static = tf.get_variable("static", [5, 2], initializer=tf.ones_initializer())
            ids = tf.constant([1, 2], tf.int64)
            loss = tf.reduce_sum(
                tf.nn.embedding_lookup(t, ids) + out + tf.nn.embedding_lookup(static, ids)
            )
            train = tf.train.GradientDescentOptimizer(0.5).minimize(loss)
            with tf.train.MonitoredTrainingSession("") as session:
                session.run(train)
                assert session.run(loss) == 2 * 2 * 1.5
    finally:
        for name in switches:
            getattr(tf, f"enable_{name}")()
