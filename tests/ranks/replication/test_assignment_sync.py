"""Replicated variables keep the mean of what the ranks of a script assign to them."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.training import moving_averages

from collective.ops.graph import graph_analysis
from tests.ranks import grouped, reference
from tests.ranks.assignments import BATCHES, D, V, warnings

pytestmark = [pytest.mark.either_backend, pytest.mark.double]


def running_mean(kind, x, mean, training):
    """Takes its running mean off `x`; a script keeps it in the way that `kind` names."""

    def moved():
        return 0.8 * mean + 0.2 * tf.reduce_mean(x, 0)

    if kind == "written":
        with tf.control_dependencies([tf.assign(mean, moved())]):
            return x - tf.identity(mean)
    if kind == "read":
        step = 0.2 * (tf.reduce_mean(x, 0) - mean)
        return x - (
            mean.assign_add(delta=step) if hasattr(mean, "handle") else tf.assign(mean, moved())
        )
    if kind == "branch":

        def update():
            with tf.control_dependencies([mean.assign(moved())]):
                return tf.identity(mean)

        return x - tf.cond(training, update, lambda: tf.identity(mean))
    assert kind == "average"

    def average():  # computed, and updated, in the branch
        with tf.control_dependencies(
            [moving_averages.assign_moving_average(mean, tf.reduce_mean(x, 0), 0.8, False)]
        ):
            return tf.identity(mean)

    return x - tf.cond(training, average, lambda: tf.identity(mean))


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["written", "read", "branch", "average"])
def test_averages_that_a_script_keeps_by_itself(strategy, rank, size, kind, flavour):
    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", V, D)
        ids, x, training = (
            tf.placeholder(tf.int64, [None]),
            tf.placeholder(tf.float32, [None, D]),
            tf.placeholder(tf.bool),
        )
        mean = tf.get_variable("mean", [D], initializer=tf.ones_initializer(), trainable=False)
        less = running_mean(kind, x, mean, training)
        loss = tf.reduce_mean(tf.square(less + tf.nn.embedding_lookup(t, ids)))
        train = tf.train.GradientDescentOptimizer(0.3).minimize(loss)
        return {"train": train, "mean": mean, **grouped.rows_of({"t": t})}, {
            "ids": ids,
            "x": x,
            "training": training,
        }

    runs = [run for batch in BATCHES for run in ((["train"], batch), (["mean", "t"], {}))]
    want = reference.plain(*with_training(build, runs))
    got = reference.sharded(
        strategy,
        *with_training(
            build,
            [
                (names, {key: reference.part(value, rank, size) for key, value in values.items()})
                for names, values in runs
            ],
        ),
    )
    for mine, whole in zip(got[1::2], want[1::2]):
        grouped.same(mine, whole)
    everyone = grouped.everyone(got[-1]["mean"].tolist())
    assert all(mean == everyone[0] for mean in everyone)


def with_training(build, runs):
    return build, [
        (names, {**values, "training": True} if values else {}) for names, values in runs
    ]


def test_an_average_next_to_the_training_step(strategy, rank, size):
    """A script that shows a smooth loss makes it after the update; one warning names it."""

    def build(embedding_scope):
        w, x = (
            tf.get_variable("w", [D], initializer=tf.ones_initializer()),
            tf.placeholder(tf.float32, [None, D]),
        )
        smooth = tf.get_variable("smooth", [], initializer=tf.zeros_initializer(), trainable=False)
        loss = tf.reduce_mean(tf.square(x * w))
        train = tf.train.GradientDescentOptimizer(0.3).minimize(loss)
        return {
            "step": tf.group(train, tf.assign(smooth, 0.9 * smooth + 0.1 * loss)),
            "smooth": smooth,
            "w": w,
        }, {"x": x}

    with warnings() as said:
        want, got = grouped.both(
            strategy,
            rank,
            size,
            build,
            [*((["step"], {"x": batch["x"]}) for batch in BATCHES), (["smooth", "w"], {})],
        )
    grouped.same(got[-1], want[-1])
    about = [text for text in said if "'smooth'" in text]
    assert len(about) == (size > 1 and rank == 0), said
    assert all("mean over ranks" in text and "LOCAL_VARIABLES" in text for text in about)


def test_updates_that_a_session_had_run_are_refused(strategy, rank, size):
    def build(embedding_scope):
        w, x = (
            tf.get_variable("w", [D], initializer=tf.ones_initializer()),
            tf.placeholder(tf.float32, [None, D]),
        )
        mean = tf.get_variable("mean", [D], initializer=tf.ones_initializer(), trainable=False)
        update = tf.assign(mean, tf.reduce_mean(x, 0))
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(x * w))
        return {"step": tf.group(train, update), "mean": mean, "w": w}, {"x": x}

    with (
        pytest.raises(NotImplementedError, match="to 'mean' would stay")
        if size > 1
        else contextlib.nullcontext()
    ):
        reference.sharded(strategy, build, [(["step"], {"x": BATCHES[0]["x"]})])


def test_gradients_changed_by_what_a_rank_alone_knows(strategy, rank, size):
    """Noise, or a factor from the batch; and gradients that a script computed by itself."""
    with strategy.scope(check=1), tf.Graph().as_default():
        w = tf.get_variable("w", [D], initializer=tf.ones_initializer())
        v = tf.get_variable("v", [D], initializer=tf.ones_initializer())
        x = tf.placeholder(tf.float32, [None, D])
        optimizer = tf.train.GradientDescentOptimizer(0.5)
        ((gradient, _),) = optimizer.compute_gradients(tf.reduce_mean(x * w), [w])
        noisy = gradient * tf.reduce_mean(x) + 0 * tf.random.normal([D])
        train = optimizer.apply_gradients([(noisy, w), (tf.reduce_mean(x, 0), v)])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            batch = BATCHES[0]["x"]
            with warnings() as said:
                session.run(train, {x: reference.part(batch, rank, size)})
            got = session.run({"w": w, "v": v})
    assert not said, "it was said where the update was made"
    grouped.same(
        got, {"w": 1 - 0.5 * batch.mean(0) / D * batch.mean(), "v": 1 - 0.5 * batch.mean(0)}
    )


def test_settings_are_not_data(strategy, rank, size):
    """A rate or a norm that is fed costs no exchange, and one rank alone may set a variable to what
    it feeds.
    """
    with strategy.scope(), tf.Graph().as_default():
        w, x = (
            tf.get_variable("w", [D], initializer=tf.ones_initializer()),
            tf.placeholder(tf.float32, [None, D]),
        )
        rate = tf.get_variable("rate", [], initializer=tf.zeros_initializer(), trainable=False)
        fed, norm = tf.placeholder(tf.float64, []), tf.placeholder_with_default(1.0, [])
        slower, faster = (
            tf.assign(rate, tf.cast(fed, tf.float32)),
            tf.assign(rate, 2 * tf.cast(fed, tf.float32)),
        )
        row = tf.placeholder(tf.float32, [D])
        load = tf.assign(w, row)
        optimizer = tf.train.GradientDescentOptimizer(rate)
        ((gradient, _),) = optimizer.compute_gradients(tf.reduce_mean(x * w), [w])
        train = optimizer.apply_gradients([(tf.clip_by_norm(gradient, norm), w)])
        with warnings() as said, tf.Session() as session:
            session.run(tf.global_variables_initializer())
            assert grouped.exchanged(session, [slower, faster], {fed: 0.5})[1] == 0
            counts = grouped.exchanged(session, train, {x: BATCHES[0]["x"]})
            if rank == size - 1:
                session.run(load, {row: np.full(D, 7)})
                np.testing.assert_array_equal(session.run(w), np.full(D, 7))
    assert counts[1] == (size > 1)
    assert not said


def test_a_graph_of_a_ranks_own(strategy, rank, size):
    """Without tables and training: one rank may count in it by itself."""
    with strategy.scope(), tf.Graph().as_default(), warnings() as said:
        x = tf.placeholder(tf.float32, [None, D])
        total = tf.get_variable("total", [D], initializer=tf.zeros_initializer())
        tf.layers.batch_normalization(x, training=tf.placeholder_with_default(True, []))
        add = tf.assign_add(total, tf.reduce_sum(x, 0))
        if rank == 0:
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                np.testing.assert_array_equal(session.run(add, {x: np.ones([4, D])}), np.full(D, 4))
    assert not said


def test_a_partitioned_variable_in_a_branch(strategy, rank, size):
    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", V, D)
        x, training = tf.placeholder(tf.float32, [None, D]), tf.placeholder(tf.bool, [])
        parts = tf.get_variable(
            "v",
            [4, D],
            partitioner=tf.fixed_size_partitioner(2),
            initializer=tf.zeros_initializer(),
        )
        new = tf.tile(tf.reduce_mean(x, 0)[None], [4, 1]) + tf.nn.embedding_lookup(t, [0])
        done = tf.cond(training, lambda: tf.group(tf.assign(parts, new)), tf.no_op)
        return {"done": done, "v": parts.as_tensor()}, {"x": x, "training": training}

    want = reference.plain(
        build, [(["done"], {"x": BATCHES[0]["x"], "training": True}), (["v"], {})]
    )
    got = reference.sharded(
        strategy,
        build,
        [
            (["done"], {"x": reference.part(BATCHES[0]["x"], rank, size), "training": True}),
            (["v"], {}),
        ],
    )
    grouped.same(got[1], want[1])


@pytest.mark.parametrize("kind", ["noise", "by hand"])
def test_sparse_gradients_changed_by_what_a_rank_alone_knows(strategy, rank, size, kind):
    """Of a replicated variable."""

    def build(embedding_scope):
        v = tf.get_variable("v", [V, D], initializer=tf.ones_initializer())
        ids, x = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None, D])
        optimizer = tf.train.AdagradOptimizer(0.5)
        if kind == "noise":
            ((g, _),) = optimizer.compute_gradients(tf.reduce_mean(tf.gather(v, ids)))
            g = tf.IndexedSlices(g.values * tf.reduce_mean(x), g.indices, g.dense_shape)
        else:
            g = tf.IndexedSlices(x / tf.cast(tf.shape(x)[0], tf.float32), ids, [V, D])
        return {"train": optimizer.apply_gradients([(g, v)]), "v": v}, {"ids": ids, "x": x}

    want, got = grouped.both(strategy, rank, size, build, [(["train"], BATCHES[0]), (["v"], {})])
    grouped.same(got[1], want[1])


def test_a_warm_start_changes_nothing_else(strategy, rank, size, folder):
    def model():
        with strategy.embedding_scope():
            t = reference.table("t", V, D)
        w = tf.get_variable("w", [D], initializer=tf.random_normal_initializer())
        loss = tf.reduce_mean(tf.nn.embedding_lookup(t, [0, 1]) * w)
        return w, tf.train.GradientDescentOptimizer(0.1).minimize(loss)

    with strategy.scope(), tf.Graph().as_default():
        w, _ = model()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            tf.train.Saver().save(session, f"{folder}/model")
            want = session.run(w)
    with strategy.scope(), tf.Graph().as_default(), warnings() as said:
        w, train = model()
        tf.train.init_from_checkpoint(f"{folder}/model", {"w": "w"})
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            np.testing.assert_array_equal(session.run(w), want)
            session.run(train)
    assert not [text for text in said if "'w'" in text and "rank" in text], said


@pytest.mark.parametrize(
    "options", [{"dense_compression": "fp16"}, {"deterministic": True}, {"local_steps": 2}]
)
def test_what_is_reduced_is_reduced_once(strategy, rank, size, options):
    """Whatever it is reduced by; a norm of all gradients is everyone's, too."""
    with strategy.scope(**options), tf.Graph().as_default() as graph, warnings() as said:
        tf.set_random_seed(1)
        with strategy.embedding_scope():
            t = reference.table("t", V, D)
        x, w = (
            tf.placeholder(tf.float32, [None, D]),
            tf.get_variable("w", [D], initializer=tf.ones_initializer()),
        )
        optimizer = tf.train.AdamOptimizer(0.1)
        gradients, variables = zip(
            *optimizer.compute_gradients(tf.reduce_mean(x * w + tf.nn.embedding_lookup(t, [1])))
        )
        gradients, norm = tf.clip_by_global_norm(gradients, 0.1)
        train = (
            tf.cond(
                tf.math.is_finite(norm),
                lambda: optimizer.apply_gradients(zip(gradients, variables)),
                tf.no_op,
            )
            if "local_steps" not in options
            else optimizer.apply_gradients(zip(gradients, variables))
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {x: BATCHES[0]["x"]})
        assert not [op for op in graph.get_operations() if "written" in op.name]
    assert not said


def test_what_all_ranks_have_takes_no_mean(strategy, rank, size, flavour):
    """Averages of batch normalisation's averages, a teacher's weights, spectral normalisation in a
    loop, seeded numbers.
    """
    with strategy.scope(), tf.Graph().as_default() as graph, warnings() as said:
        with strategy.embedding_scope():
            t = reference.table("t", V, D)
        x, w = (
            tf.placeholder(tf.float32, [None, D]),
            tf.get_variable("w", [D, D], initializer=tf.ones_initializer()),
        )
        u, noise = (
            tf.get_variable(name, [1, D], initializer=tf.ones_initializer(), trainable=False)
            for name in "un"
        )
        own = tf.get_variable(
            "own",
            [],
            collections=[tf.GraphKeys.LOCAL_VARIABLES],
            initializer=tf.zeros_initializer(),
        )
        teacher = tf.get_variable(
            "teacher", [D, D], initializer=tf.zeros_initializer(), trainable=False
        )
        out = tf.layers.batch_normalization(
            tf.matmul(x, w), training=True
        ) + tf.nn.embedding_lookup(t, [1])
        loss = tf.reduce_mean(tf.square(out))
        updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        with tf.control_dependencies(updates):
            train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        before = len([op for op in graph.get_operations() if graph_analysis.is_of_carrier(op.type)])
        power = tf.while_loop(
            lambda i, _: i < 2, lambda i, v: (i + 1, tf.math.l2_normalize(tf.matmul(v, w))), [0, u]
        )[1]
        with tf.control_dependencies([train]):
            step = tf.group(
                tf.assign(u, power),
                tf.assign(noise, tf.random.normal([1, D], seed=3)),
                moving_averages.assign_moving_average(teacher, tf.identity(w), 0.9, False),
                moving_averages.assign_moving_average(own, loss, 0.9, False),
                tf.train.ExponentialMovingAverage(0.9).apply(tf.global_variables()),
            )
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            session.run(step, {x: BATCHES[0]["x"] + rank})
            got = session.run([noise, teacher])
        assert len(
            [
                op
                for op in graph.get_operations()
                if graph_analysis.is_of_carrier(op.type)
                and "make_equal" not in op.name
                and "gate" not in op.name
                and "agree" not in op.name
            ]
        ) <= before + (size > 1)
    assert not said
    grouped.same(dict(enumerate(grouped.everyone(got)[0])), dict(enumerate(got)), rtol=0, atol=0)


def test_whole_batches_have_a_mean(strategy, rank, size, flavour):
    """A loss that a branch computes; second moments."""

    def build(embedding_scope):
        with embedding_scope():
            reference.table("t", V, D)
        x, on = tf.placeholder(tf.float32, [None, D]), tf.placeholder(tf.bool, [])
        smooth, second = (
            tf.get_variable(name, shape, initializer=tf.zeros_initializer(), trainable=False)
            for name, shape in (("smooth", []), ("second", [D, D]))
        )
        loss = tf.cond(on, lambda: tf.reduce_mean(tf.square(x)), lambda: tf.reduce_mean(x))
        moments = tf.matmul(tf.transpose(x), x) / tf.cast(tf.shape(x)[0], tf.float32)
        return {
            "step": tf.group(
                tf.assign(smooth, 0.9 * smooth + 0.1 * loss), tf.assign(second, moments)
            ),
            "smooth": smooth,
            "second": second,
        }, {"x": x, "on": on}

    runs = [(["step"], {"x": BATCHES[0]["x"], "on": True}), (["smooth", "second"], {})]
    want = reference.plain(build, runs)
    got = reference.sharded(
        strategy,
        build,
        [(["step"], {"x": reference.part(BATCHES[0]["x"], rank, size), "on": True}), runs[1]],
    )
    grouped.same(got[1], want[1])


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_a_graph_that_is_run_where_it_is_not_the_default_one(strategy, rank, size, in_a_thread):
    """TensorFlow is eager there; what ranks assign becomes a mean all the same."""
    with strategy.scope():
        with tf.Graph().as_default() as graph:
            with strategy.embedding_scope():
                t = reference.table("t", V, D)
            rows = tf.nn.embedding_lookup(t, tf.constant([0, 1], tf.int64))
            loss = tf.reduce_mean(tf.square(rows))
            train = tf.train.GradientDescentOptimizer(0.3).minimize(loss)
            kept = tf.get_variable("kept", [], initializer=tf.zeros_initializer(), trainable=False)
            noted = tf.placeholder(tf.float32, [None])
            step = tf.group(train, tf.assign(kept, tf.reduce_mean(noted)))
            start = tf.global_variables_initializer()

        def run():
            assert tf.executing_eagerly()
            session = tf.Session(graph=graph)
            session.run(start)
            session.run(step, {noted: [rank, rank]})
            value = session.run(kept)
            session.close()
            return value

        with ThreadPoolExecutor(1) as executor:
            got = executor.submit(run).result() if in_a_thread else run()
    assert got == (size - 1) / 2
