"""Averages move alike on all ranks: of batch normalisation, tensors, variables and tables."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import TableError
from tests.ranks import grouped, reference

pytestmark = [pytest.mark.either_backend, pytest.mark.double]

V, D = 11, 3
RNG = np.random.default_rng(5)
BATCHES = [
    {
        "ids": RNG.integers(0, V, grouped.B),
        "x": RNG.normal(size=(grouped.B, D)),
        "labels": RNG.normal(size=grouped.B),
    }
    for _ in range(3)
]


def placeholders():
    return {
        "ids": tf.placeholder(tf.int64, [None]),
        "x": tf.placeholder(tf.float32, [None, D]),
        "labels": tf.placeholder(tf.float32, [None]),
    }


def normalized(t, feeds, reuse=None):
    """Computes the loss of a batch normalised by itself, in front of a lookup and after it."""
    with tf.variable_scope("model", reuse=reuse):
        x = tf.layers.batch_normalization(feeds["x"], training=True, momentum=0.8, name="in")
        x += tf.nn.embedding_lookup(t, feeds["ids"])
        x = tf.layers.batch_normalization(x, training=True, momentum=0.8, name="after")
        out = tf.layers.dense(x, 1, kernel_initializer=tf.ones_initializer(), name="out")[:, 0]
        return tf.reduce_mean(tf.square(out - feeds["labels"]))


def test_batch_normalization(strategy, rank, size):
    """The truth: the ranks' parts in one graph, each normalised by itself; the averages take the
    mean of theirs.
    """

    def averages():
        return {v.op.name: v for v in tf.global_variables() if "moving" in v.op.name}

    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = reference.table("t", V, D)
        feeds = placeholders()
        loss = normalized(t, feeds)
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for batch in BATCHES:
                session.run(
                    train, {feeds[k]: reference.part(v, rank, size) for k, v in batch.items()}
                )
            counts = grouped.exchanged(session, train, {feeds[k]: v for k, v in BATCHES[0].items()})
            got = session.run(
                {"t": t, **{v.op.name: v for v in tf.trainable_variables()[1:]}, **averages()}
            )
    assert size == 1 or counts[1] == 3, (
        "one allreduce for gradients, one for averages of x alone, one for those after ids"
    )

    with tf.Graph().as_default():
        t = reference.table("t", V, D)
        parts = [placeholders() for _ in range(size)]
        updates = {}
        losses = [normalized(t, feeds, tf.AUTO_REUSE) for feeds in parts]
        for op in tf.get_collection(tf.GraphKeys.UPDATE_OPS):
            # what is taken off the average
            updates.setdefault(op.inputs[0].op.name, []).append(op.inputs[1])
        averages = averages()
        means = {name: tf.add_n(deltas) / size for name, deltas in updates.items()}
        with tf.control_dependencies(list(means.values())):
            with tf.control_dependencies(
                [tf.assign_sub(averages[name], delta) for name, delta in means.items()]
            ):
                train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.add_n(losses) / size)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for batch in BATCHES:
                session.run(
                    train,
                    {
                        feeds[k]: reference.part(v, r, size)
                        for r, feeds in enumerate(parts)
                        for k, v in batch.items()
                    },
                )
            # as it was counted
            session.run(train, {feeds[k]: v for feeds in parts for k, v in BATCHES[0].items()})
            want = session.run({v.op.name: v for v in tf.global_variables()})
    assert len(averages) == 4
    grouped.same(got, want)
    assert (
        grouped.everyone(str(sorted((k, v.tolist()) for k, v in got.items())))
        == [str(sorted((k, v.tolist()) for k, v in got.items()))] * size
    )


@pytest.mark.parametrize("debias", [False, True])
def test_of_a_tensor(strategy, rank, size, debias):
    """Of the loss, say: the average of everyone's, and the same on every rank."""

    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", V, D)
        feeds = placeholders()
        loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(t, feeds["ids"]) - feeds["x"]))
        average = tf.train.ExponentialMovingAverage(0.7, zero_debias=debias)
        update = average.apply([loss])
        with tf.control_dependencies(
            [tf.train.GradientDescentOptimizer(0.1).minimize(loss), update]
        ):
            return {"train": tf.no_op(), "average": average.average(loss)}, {
                k: feeds[k] for k in ("ids", "x")
            }

    runs = [(["train"], {k: b[k] for k in ("ids", "x")}) for b in BATCHES] + [(["average"], {})]
    want, got = grouped.both(strategy, rank, size, build, runs)
    grouped.same(got[-1], want[-1])


@pytest.mark.slow
def test_of_tables_and_other_variables(strategy, rank, size, folder):
    """After the update; looked up, read, and restored into the table, as for an evaluation."""

    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", V, D)
        feeds = placeholders()
        x = tf.nn.embedding_lookup(t, feeds["ids"])
        out = tf.layers.dense(x, 1, kernel_initializer=tf.ones_initializer())[:, 0]
        train = tf.train.AdamOptimizer(0.1).minimize(
            tf.reduce_mean(tf.square(out - feeds["labels"]))
        )
        average = tf.train.ExponentialMovingAverage(0.7)
        with tf.control_dependencies([train]):
            update = average.apply(tf.trainable_variables())
        averages = {average.average_name(v): average.average(v) for v in tf.trainable_variables()}
        assert average.average(t).shape.as_list() == [V, D]
        saver = tf.train.Saver(average.variables_to_restore(), save_relative_paths=True)
        return (
            {
                "train": train,
                "update": update,
                **averages,
                "row": tf.nn.embedding_lookup(average.average(t), [0, V - 1]),
            },
            {k: feeds[k] for k in ("ids", "labels")},
            saver,
            t,
        )

    def run(scope, embedding_scope, r, n, path):
        with scope, tf.Graph().as_default():
            fetches, feeds, saver, t = build(embedding_scope)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for batch in BATCHES:
                    session.run(
                        [fetches["train"], fetches["update"]],
                        {feeds[k]: reference.part(batch[k], r, n) for k in feeds},
                    )
                everything = tf.train.Saver()
                names = [name for name in fetches if name not in ("train", "update")]
                out = session.run({name: fetches[name] for name in names})
                saver.restore(session, everything.save(session, path))
                return {**out, "restored": session.run(t)}

    got = run(strategy.scope(), strategy.embedding_scope, rank, size, f"{folder}/model")
    want = run(contextlib.nullcontext(), contextlib.nullcontext, 0, 1, f"{folder}/plain-{rank}")
    grouped.same(got, want)
    np.testing.assert_allclose(got["restored"], got["t/ExponentialMovingAverage"], rtol=1e-6)


@pytest.mark.slow
def test_an_evaluation_that_takes_the_averages_for_the_variables(strategy, rank, size):
    """By a getter of the script's own, in a copy of the model."""

    def build(embedding_scope):
        feeds = placeholders()

        def model():
            with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
                with embedding_scope():
                    t = reference.table("t", V, D)
                w = tf.get_variable("w", [D, 1], initializer=tf.ones_initializer())
                out = tf.matmul(tf.nn.embedding_lookup(t, feeds["ids"]), w)[:, 0]
                return tf.reduce_mean(tf.square(out - feeds["labels"]))

        average = tf.train.ExponentialMovingAverage(0.6)
        with tf.control_dependencies([tf.train.AdagradOptimizer(0.3).minimize(model())]):
            train = average.apply(tf.trainable_variables())

        def averaged(getter, name, *args, **kwargs):
            variable = getter(name, *args, **kwargs)
            return average.average(variable) if average.average(variable) is not None else variable

        with tf.variable_scope(tf.get_variable_scope(), custom_getter=averaged):
            evaluation = model()
        return {"train": train, "loss": model(), "smooth": evaluation}, {
            k: feeds[k] for k in ("ids", "labels")
        }

    batches = [{k: b[k] for k in ("ids", "labels")} for b in BATCHES]
    want, got = grouped.both(
        strategy,
        rank,
        size,
        build,
        [(["train"], b) for b in batches]
        + [(["loss", "smooth"], {k: np.tile(v[:1], (grouped.B,)) for k, v in batches[0].items()})],
    )
    assert abs(want[-1]["loss"] - want[-1]["smooth"]) > 1e-3
    grouped.same(got[-1], want[-1])


def test_of_a_dynamic_table_is_refused(strategy):
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            collective.get_embedding_variable("t", D)
        with pytest.raises(TableError, match="ExponentialMovingAverage of table 't'.*dynamic"):
            tf.train.ExponentialMovingAverage(0.9).apply()


def layers(kind, x, training):
    if kind == "placeholder":
        return tf.layers.batch_normalization(x, training=training, momentum=0.8)
    if kind == "renorm":
        return tf.layers.batch_normalization(x, training=True, momentum=0.8, renorm=True)
    if kind in ("fused", "fused_placeholder"):
        images = tf.reshape(x, [-1, 1, 1, D])
        out = tf.layers.batch_normalization(
            images, training=True if kind == "fused" else training, momentum=0.8, fused=True
        )
        return tf.reshape(out, [-1, D])
    if kind == "keras":
        return tf.keras.layers.BatchNormalization(momentum=0.8)(x, training=True)
    mean, seen = (
        tf.get_variable(name, shape, initializer=tf.zeros_initializer(), trainable=False)
        for name, shape in (("mean", [D]), ("seen", []))
    )
    # the mean of all that was seen, by Welford's method: one update waits for another
    if kind == "own":
        count = tf.assign_add(seen, 1.0)
        tf.add_to_collection(
            tf.GraphKeys.UPDATE_OPS, tf.assign_add(mean, (tf.reduce_mean(x, 0) - mean) / count)
        )
    if kind == "branch":  # of what is computed outside
        batch_mean = tf.reduce_mean(x, 0)
        average = tf.train.ExponentialMovingAverage(0.8)

        def update():
            with tf.control_dependencies([average.apply([batch_mean])]):
                return tf.identity(batch_mean)

        return x - tf.cond(training, update, lambda: tf.zeros([D]))
    return x


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "kind", ["placeholder", "renorm", "fused", "fused_placeholder", "keras", "own", "branch"]
)
@pytest.mark.parametrize("version", [1, 2])
def test_all_ranks_have_the_same(strategy, rank, size, kind, version):
    """However a model updates them, and whatever else is in the graph: a second model with data of
    its own isn't touched.
    """
    if version == 1:
        tf.disable_control_flow_v2()
    try:
        with strategy.scope(check=1), tf.Graph().as_default():
            with strategy.embedding_scope():
                t = reference.table("t", V, D)
            feeds = placeholders()
            training, other = (
                tf.placeholder_with_default(True, []),
                tf.placeholder(tf.float32, [None, D]),
            )
            x = layers(kind, feeds["x"], training)
            with tf.variable_scope("other"):
                unfed = tf.layers.batch_normalization(other, training=True)
            updates = [
                op for op in tf.get_collection(tf.GraphKeys.UPDATE_OPS) if "other" not in op.name
            ]
            bn = [v for v in tf.global_variables() if v.op.name.startswith("batch_normalization")]
            loss = tf.reduce_mean(tf.square(x + tf.nn.embedding_lookup(t, feeds["ids"])))
            train = tf.group(tf.train.GradientDescentOptimizer(0.1).minimize(loss), *updates)
            both = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(unfed))
            averages = [v for v in tf.global_variables() if v not in tf.trainable_variables()]
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                before = session.run(averages)
                for batch in BATCHES:
                    session.run(
                        train, {feeds[k]: reference.part(batch[k], rank, size) for k in feeds}
                    )
                session.run(both, {other: BATCHES[0]["x"]})
                after = session.run(averages)
        assert averages and (bn or kind != "keras")
        if kind != "keras":  # whose updates a script has to run by itself
            assert any(not np.array_equal(a, b) for a, b in zip(before, after))
        told = grouped.everyone([v.tolist() for v in after])
        assert all(mine == told[0] for mine in told)
        if kind == "own":
            values = dict(zip((v.op.name for v in averages), after))
            want = np.mean([b["x"].mean(0) for b in BATCHES], 0)
            np.testing.assert_allclose(values["mean"], want, rtol=1e-5, atol=1e-6)
    finally:
        tf.enable_control_flow_v2()


@pytest.mark.parametrize("kind", ["scatter", "integer"])
def test_updates_that_have_no_mean_are_refused(strategy, size, kind):
    """Of what a rank alone knows, that is; a count of steps is everyone's."""
    with strategy.scope(), tf.Graph().as_default():
        w = tf.get_variable("w", [D], initializer=tf.ones_initializer())
        x, labels = tf.placeholder(tf.float32, [None, D]), tf.placeholder(tf.int64, [None])
        if kind == "scatter":  # the centre loss
            centers = tf.get_variable("centers", [V, D], trainable=False)
            change = tf.scatter_sub(centers, labels, 0.5 * (tf.gather(centers, labels) - x))
        else:
            change = tf.assign_add(
                tf.get_variable("seen", [], tf.int64, trainable=False),
                tf.size(x, out_type=tf.int64),
            )
        steps = tf.get_variable(
            "steps", [], tf.int64, initializer=tf.zeros_initializer(), trainable=False
        )
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(steps, 1))
        loss = tf.reduce_mean(x * w)
        tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, change)
        for _ in range(2):
            with (
                pytest.raises(NotImplementedError, match="replicated variable '(centers|seen)'")
                if size > 1
                else (contextlib.nullcontext())
            ):
                tf.train.GradientDescentOptimizer(0.1).minimize(loss)


def test_an_average_is_fetched_without_what_it_does_not_need(strategy, rank, size):
    """One of what is known before the step, one of what is known after it."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            ones = tf.get_variable(
                "ones", [V, D], initializer=tf.ones_initializer(), trainable=False
            )
        w = tf.get_variable("w", [D], initializer=tf.ones_initializer())
        x = tf.placeholder(tf.float32, [None, D])
        seen = x * tf.nn.embedding_lookup(ones, [rank])  # both wait for the same exchange
        loss = tf.reduce_mean(seen * w)
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        average_before, average_after = (
            tf.train.ExponentialMovingAverage(0.5),
            tf.train.ExponentialMovingAverage(0.5, name="after"),
        )
        with tf.control_dependencies([train]):
            updated = average_after.apply([tf.reduce_mean(tf.square(seen * w))])
        monitor = average_before.apply([loss])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            feed = {x: np.full([2, D], rank + 1.0)}
            session.run(monitor, feed)
            np.testing.assert_array_equal(session.run(w), np.ones(D))
            average = session.run(average_before.average(loss))
            np.testing.assert_allclose(average, 0.5 * (size + 1) / 2)
            session.run(updated, feed)
            assert not np.array_equal(session.run(w), np.ones(D))


def test_an_update_of_no_data_in_front_of_a_function(strategy, rank, size):
    """Which is then no source of data that the gate could wait for."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = reference.table("t", V, D)
        seen = tf.get_variable("seen", [], initializer=tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(seen, 1.0))
        loss = tf.reduce_mean(tf.nn.embedding_lookup(t, [rank, 3]))
        with tf.control_dependencies([x.op for x in tf.get_collection(tf.GraphKeys.UPDATE_OPS)]):
            rate = tf.reshape(tf.numpy_function(lambda: np.float32(0.1), [], tf.float32), [])
            train = tf.train.GradientDescentOptimizer(rate).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            assert session.run(seen) == 1


def test_an_average_of_a_table(strategy):
    """By TensorFlow's own slot, whose type it takes from the table."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable("t", [6, 2], initializer=tf.ones_initializer())
        loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table, [1, 2])))
        train = tf.train.GradientDescentOptimizer(1.0).minimize(loss)
        average = tf.train.ExponentialMovingAverage(0.5)
        with tf.control_dependencies([train]):
            update = average.apply([table])
        rows = tf.nn.embedding_lookup(average.average(table), [0, 1])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(update)
            # A row that is trained has lost 1/2, and its average half of that.
            np.testing.assert_allclose(session.run(rows), [[1, 1], [0.75, 0.75]])
