"""Training on N ranks is plain TensorFlow on the global batch: gradients, reductions, updates."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.ops.graph.graph_analysis import upstream
from tests.ranks import reference
from tests.ranks.training import IDS, OPTIMIZERS, X, compare, model

pytestmark = [
    pytest.mark.ranks(1, 3),
    pytest.mark.ungrouped,
    pytest.mark.double("matrix"),
]


@pytest.mark.carriers
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(strategy, rank, size, name):
    """More than the acceptance script's. Slots are the shard's, whatever their initial value."""
    compare(
        strategy,
        rank,
        size,
        lambda loss, _: {
            "train": OPTIMIZERS[name]().minimize(
                loss, global_step=tf.train.get_or_create_global_step()
            )
        },
        rtol=2e-4,
    )


def test_the_lookup_fetched_with_its_update_is_the_value_before(strategy, rank, size):
    want, got = compare(
        strategy,
        rank,
        size,
        lambda loss, _: {"train": tf.train.GradientDescentOptimizer(0.5).minimize(loss)},
        names=("emb", "loss", "train"),
    )
    for before, mine in zip(want, got[:-1]):
        np.testing.assert_allclose(
            mine["emb"], reference.part(before["emb"], rank, size), rtol=2e-5, atol=1e-6
        )


@pytest.mark.carriers
def test_a_linear_loss_does_not_update_before_peers_have_read(strategy):
    """The gradient of a linear loss needs no row: without an order, owners could update before they
    answer.
    """
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = tf.get_variable("t", [1000, 64], initializer=tf.ones_initializer())
        emb = tf.nn.embedding_lookup(t, tf.range(1000))
        train = tf.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_sum(emb))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for step in range(10):
                # a third of a gradient three times over is 1 except for rounding; a step taken too
                # early would be off by 1
                np.testing.assert_allclose(session.run([emb, train])[0], 1.0 - step, atol=1e-5)


@pytest.mark.carriers
def test_variables_made_in_another_order_on_each_rank(strategy, rank, size):
    """As a loop over a set of names does: Python hashes strings differently in every process."""

    def train(loss, variables):
        del variables
        names = ["a", "b", "c"]
        made = {
            name: tf.get_variable(name, initializer=reference.table_values(3, 2, ord(name)))
            for name in names[rank:] + names[:rank]
        }
        x = tf.get_default_graph().get_tensor_by_name("Placeholder_1:0")
        loss += sum(
            tf.reduce_mean(tf.matmul(x, made[name]) ** 2) * (i + 1) for i, name in enumerate(names)
        )
        return {
            "train": tf.train.GradientDescentOptimizer(0.1).minimize(loss),
            "abc": [made[n].read_value() for n in names],
        }

    feeds, mine = (
        {"ids": IDS, "x": X},
        {"ids": reference.part(IDS, rank, size), "x": reference.part(X, rank, size)},
    )
    want = reference.plain(lambda s: model(s, train), [(["train"], feeds), (["abc"], {})])
    got = reference.sharded(strategy, lambda s: model(s, train), [(["train"], mine), (["abc"], {})])
    np.testing.assert_allclose(got[1]["abc"], want[1]["abc"], rtol=1e-5)


def test_the_gradient_tape_of_a_callable_loss(strategy, rank, size):
    def train(loss, variables):
        ids, x = (
            tf.get_default_graph().get_tensor_by_name(f"Placeholder{i}:0") for i in ("", "_1")
        )

        def again():
            return tf.reduce_mean(
                tf.square(tf.matmul(tf.nn.embedding_lookup(variables[0], ids) * x, variables[1]))
            )

        return {"train": tf.train.GradientDescentOptimizer(0.1).minimize(again, var_list=variables)}

    compare(strategy, rank, size, train)


@pytest.mark.carriers
def test_moving_averages_do_not_run_ahead_of_a_refused_step(strategy, rank, size):
    with strategy.scope(), tf.Graph().as_default():
        data = tf.data.Dataset.from_tensors(
            (np.array([1, 2], np.int64), np.ones([2, 3], np.float32))
        ).repeat(2 + rank % 2)
        ids, x = tf.data.make_one_shot_iterator(data).get_next()
        with strategy.embedding_scope():
            t = reference.table("t", 9, 3)
        hidden = tf.layers.batch_normalization(
            x, training=True, momentum=0.5
        ) + tf.nn.embedding_lookup(t, ids)
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(hidden))
        mean = next(v for v in tf.global_variables() if "moving_mean" in v.name)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(tf.errors.OutOfRangeError):
                while True:
                    session.run(train)
            np.testing.assert_allclose(session.run(mean), 0.75)  # two updates, on every rank


def test_variables_initialized_before_the_optimizer_exists(strategy, rank, size):
    """Nothing in the graph is shared yet then; they are equal once something is."""
    with strategy.scope(), tf.Graph().as_default():
        w = tf.get_variable("w", [3, 2])
        session = tf.Session()
        session.run(w.initializer)
        train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(w * float(rank)))
        session.run(train)
        mine = session.run(w)
        session.close()
    everyone = hvd.allgather_object(mine)
    for theirs in everyone:
        np.testing.assert_array_equal(theirs, mine)


def test_gradient_penalties(strategy, rank, size):
    """A penalty on the global gradient of a replicated variable, differentiated through the ranks'
    mean.
    """

    def train(loss, variables):
        penalty = tf.reduce_sum(tf.square(tf.gradients(loss, variables[1])[0]))
        return {"train": tf.train.GradientDescentOptimizer(0.1).minimize(loss + 0.5 * penalty)}

    compare(strategy, rank, size, train, rtol=1e-4)


def test_gradients_with_respect_to_inputs_stay_local(strategy, rank, size):
    def train(loss, _):
        x = tf.get_default_graph().get_tensor_by_name("Placeholder_1:0")
        return {"gx": tf.gradients(loss, x)[0], "train": tf.no_op()}

    want, got = compare(strategy, rank, size, train, steps=1, names=("gx",))
    # the rank's loss is the mean of B / N samples, the reference's of B
    np.testing.assert_allclose(
        got[0]["gx"] / size, reference.part(want[0]["gx"], rank, size), rtol=1e-5, atol=1e-7
    )


@pytest.mark.carriers
def test_sparse_gradients_of_replicated_variables(strategy, rank, size):
    """An embedding outside embedding_scope() keeps its sparse updates: the momentum of absent rows
    stays.
    """

    def build(embedding_scope):
        v = reference.table("v", 9, 3)
        ids = tf.placeholder(tf.int64, [None])
        loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(v, ids)))
        return {
            "train": tf.train.MomentumOptimizer(0.5, 0.9).minimize(loss),
            "v": v.read_value(),
        }, {"ids": ids}

    want = reference.plain(build, [(["train"], {"ids": IDS})] * 3 + [(["v"], {})])
    got = reference.sharded(
        strategy, build, [(["train"], {"ids": reference.part(IDS, rank, size)})] * 3 + [(["v"], {})]
    )
    np.testing.assert_allclose(got[-1]["v"], want[-1]["v"], rtol=1e-5)


@pytest.mark.carriers
def test_keys_that_come_from_another_lookup(strategy, rank, size):
    """The second lookup's ids are known only after the first: a gate of its own, and one update
    for both.
    """

    def build(embedding_scope):
        with embedding_scope():
            a, b = reference.table("a", 9, 2), reference.table("b", 5, 2)
        ids = tf.placeholder(tf.int64, [None])
        first = tf.nn.embedding_lookup(a, ids)
        second = tf.nn.embedding_lookup(b, tf.cast(tf.abs(first[:, 0]) * 100, tf.int64) % 5)
        train = tf.train.AdagradOptimizer(0.3).minimize(tf.reduce_mean(first + second))
        return {
            "train": train,
            "a": tf.nn.embedding_lookup(a, tf.range(9)),
            "b": tf.nn.embedding_lookup(b, tf.range(5)),
        }, {"ids": ids}

    want = reference.plain(build, [(["train"], {"ids": IDS}), (["a", "b"], {})])
    got = reference.sharded(
        strategy, build, [(["train"], {"ids": reference.part(IDS, rank, size)}), (["a", "b"], {})]
    )
    for name in "ab":
        np.testing.assert_allclose(got[1][name], want[1][name], rtol=1e-5)


def test_two_losses_with_optimizers_of_their_own(strategy, rank, size):
    def train(loss, variables):
        one = tf.train.GradientDescentOptimizer(0.2).minimize(loss, var_list=variables[:1])
        two = tf.train.AdamOptimizer(0.02).minimize(3.0 * loss, var_list=variables[1:])
        return {"train": one, "other": two}

    compare(strategy, rank, size, train, names=("other",))


def test_the_sum_of_gradients_for_tuned_settings(strategy, rank, size):
    """scope(embedding_gradients='sum'): N times the table's gradient, the dense ones as ever."""

    def train(loss, _):
        return {"train": tf.train.GradientDescentOptimizer(0.1).minimize(loss)}

    with strategy.scope(embedding_gradients="sum"):
        got = reference.sharded(
            strategy,
            lambda s: model(s, train),
            [
                (
                    ["train"],
                    {"ids": reference.part(IDS, rank, size), "x": reference.part(X, rank, size)},
                ),
                (["rows", "w"], {}),
            ],
        )
    want = reference.plain(
        lambda s: model(s, train), [(["train"], {"ids": IDS, "x": X}), (["rows", "w"], {})]
    )
    start = reference.table_values(9, 3)
    np.testing.assert_allclose(
        got[1]["rows"] - start, size * (want[1]["rows"] - start), rtol=1e-3, atol=1e-5
    )
    np.testing.assert_allclose(got[1]["w"], want[1]["w"], rtol=1e-5)


def test_tensorflow_without_its_second_version(strategy):
    """Reference variables and version 1 control flow, as after tf.disable_v2_behavior()."""
    tf.disable_control_flow_v2()
    tf.disable_resource_variables()
    try:
        with strategy.scope(), tf.Graph().as_default():
            with strategy.embedding_scope():
                t = tf.get_variable("t", [6, 2], initializer=tf.ones_initializer())
            w = tf.get_variable("w", [], initializer=tf.ones_initializer())
            train = tf.train.GradientDescentOptimizer(0.5).minimize(
                w * tf.reduce_sum(tf.nn.embedding_lookup(t, [1]))
            )
            with tf.train.MonitoredTrainingSession("") as session:
                session.run(train)
                np.testing.assert_allclose(session.run(w), 0.0, atol=1e-6)
    finally:
        tf.enable_control_flow_v2()
        tf.enable_resource_variables()


@pytest.mark.slow
@pytest.mark.carriers
@pytest.mark.sample(1)
@pytest.mark.parametrize("version", [1, 2])
def test_lookups_inside_control_flow(strategy, rank, size, version):
    """A branch and loops that all ranks take alike, differentiated through; iterations don't wait
    for each other.
    """

    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", 9, 3)
        ids = tf.placeholder(tf.int64, [None])
        outside = tf.nn.embedding_lookup(t, ids)
        branch = tf.cond(
            tf.shape(ids)[0] > 0, lambda: 2.0 * tf.nn.embedding_lookup(t, ids), lambda: outside
        )
        total = tf.while_loop(
            lambda i, _: i < 3,
            lambda i, x: (i + 1, x + tf.nn.embedding_lookup(t, (ids + 1) % 9)),
            [0, tf.zeros_like(outside)],
        )[1]
        each = tf.map_fn(
            lambda row: (
                tf.nn.embedding_lookup(t, row)
                + tf.map_fn(
                    lambda i: tf.reduce_sum(tf.nn.embedding_lookup(t, i)), row[None], tf.float32
                )
            ),
            ids[:, None],
            tf.float32,
        )[:, 0]
        train = tf.train.GradientDescentOptimizer(0.5).minimize(
            tf.reduce_mean(tf.square(outside + branch + total + each))
        )
        return {"train": train, "rows": tf.nn.embedding_lookup(t, tf.range(9))}, {"ids": ids}

    if version == 1:
        tf.disable_control_flow_v2()
    try:
        want = reference.plain(build, [(["train"], {"ids": IDS}), (["rows"], {})])
        got = reference.sharded(
            strategy, build, [(["train"], {"ids": reference.part(IDS, rank, size)}), (["rows"], {})]
        )
    finally:
        tf.enable_control_flow_v2()
    np.testing.assert_allclose(got[1]["rows"], want[1]["rows"], rtol=2e-5, atol=1e-6)


class Delegating(tf.train.GradientDescentOptimizer):
    """Has another optimizer do the tables whose names end with '2', after `before` has run."""

    def __init__(self, rate, other, before):
        super().__init__(rate)
        self._other, self._before = other, before

    def _prepare(self):
        super()._prepare()
        self._other._prepare()

    def _resource_apply_sparse_duplicate_indices(self, grad, handle, indices):
        chosen = self._other if handle.op.name.endswith("2") else super()
        with tf.control_dependencies([self._before()]):
            return chosen._resource_apply_sparse_duplicate_indices(grad, handle, indices)


def test_an_optimizer_that_has_another_do_a_part(strategy, rank):
    """Each with its own rate, and not before what it has been told to wait for."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            tables = [
                tf.get_variable(name, [5, 2], initializer=tf.ones_initializer())
                for name in ("t1", "t2")
            ]
        told = tf.get_local_variable("told", [], initializer=tf.zeros_initializer())
        loss = tf.add_n(
            [
                tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant([1, 3]) + 0 * rank))
                for table in tables
            ]
        )
        optimizer = Delegating(
            1.0,
            tf.train.GradientDescentOptimizer(0.25),
            lambda: told.assign_add(1.0, use_locking=True).op,
        )
        train = optimizer.minimize(loss)
        every = tf.get_default_graph().get_operations()
        first = [op for op in every if op.type == "AssignAddVariableOp"]
        updates = [
            op for op in every if op.type in ("ResourceScatterAdd", "CollectiveSparseUpdate")
        ]
        assert len(first) == len(updates) == 2 and set(first) <= upstream(updates)
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            session.run(train)
            got = session.run(
                [tf.nn.embedding_lookup(table, tf.constant([1, 2])) for table in tables]
            )
            assert session.run(told) == 2
    np.testing.assert_allclose(got, [[[0, 0], [1, 1]], [[0.75, 0.75], [1, 1]]], rtol=1e-6)
