"""What a script itself writes to replicated variables, by what each rank alone knows: all ranks
keep the mean.
"""

import contextlib
import logging

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.training import moving_averages

from tests.ranks import grouped, reference

V, D = 11, 3
RNG = np.random.default_rng(6)
BATCHES = [
    {"ids": RNG.integers(0, V, grouped.B), "x": RNG.normal(size=(grouped.B, D))} for _ in range(3)
]


@pytest.fixture(params=["v1", "v2", "references"])
def flavour(request):
    """Control flow of either version, and variables of the first version."""
    if request.param != "v2":
        tf.disable_control_flow_v2()
    if request.param == "references":
        tf.disable_resource_variables()
    yield request.param
    tf.enable_control_flow_v2()
    tf.enable_resource_variables()


@contextlib.contextmanager
def warnings():
    """The warnings about ranks that TensorFlow's logger is given."""
    said, logger, level = [], tf.get_logger(), tf.get_logger().level
    handler = logging.Handler()
    handler.addFilter(lambda record: "each rank" in record.getMessage())
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def running_mean(kind, x, mean, training):
    """`x` less its running mean, which a script keeps in one of the ways that scripts have."""

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


@pytest.mark.sample(6)
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


def test_an_average_beside_the_training_step(strategy, rank, size):
    """Made after the update, by a script that shows a smooth loss; it says once what becomes of it."""

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


def test_what_has_no_mean_is_said(strategy, rank, size):
    """Integers, some elements only, what grows, what belongs to samples, what comes of such: each
    rank's own, as a rank's local variables are, of which nothing is said.
    """
    with strategy.scope(), tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None])
        seen = tf.get_variable(
            "seen", [], tf.int64, initializer=tf.zeros_initializer(), trainable=False
        )
        last = tf.get_variable("last", [2], initializer=tf.zeros_initializer(), trainable=False)
        own = tf.get_variable(
            "own",
            [],
            initializer=tf.zeros_initializer(),
            collections=[tf.GraphKeys.LOCAL_VARIABLES],
        )
        steps = tf.get_variable(
            "steps", [], tf.int64, initializer=tf.zeros_initializer(), trainable=False
        )
        grown = tf.Variable(
            [1.0], validate_shape=False, trainable=False, name="grown", shape=[None]
        )
        state = tf.get_variable(
            "state", [2, 1], initializer=tf.zeros_initializer(), trainable=False
        )
        of_own = tf.get_variable("of_own", [], initializer=tf.zeros_initializer(), trainable=False)
        step = [
            tf.assign_add(seen, tf.size(x, out_type=tf.int64)),
            tf.scatter_update(last, [1], x[:1]),
            tf.assign_add(own, x[0]),
            tf.assign_add(steps, 1),
            tf.assign(grown, tf.reduce_sum(x)[None]),
            tf.assign(state, tf.tanh(state + x[0])),
            tf.assign(of_own, 2 * own),
        ]
        with strategy.embedding_scope():
            reference.table("t", V, D)
        with warnings() as said, tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            for _ in range(2):
                session.run(step, {x: [rank + 1.0] * (rank + 1)})
            assert session.run([seen, own, steps]) == [2 * (rank + 1), 2 * (rank + 1), 2]
    names = ("seen", "last", "grown", "state", "of_own")
    for name in names[:-1]:
        about = [text for text in said if f"'{name}'" in text]
        assert len(about) == (size > 1 and rank == 0), said
        assert all("drift" in text and "LOCAL_VARIABLES" in text for text in about)
    assert len(said) == len(names) * (size > 1 and rank == 0)


@pytest.mark.parametrize("kind", ["rate", "count", "update"])
def test_what_a_rank_alone_decides_is_said(strategy, rank, size, kind):
    """A rate that one rank halves, by numbers that all have; an update that it leaves out."""
    with strategy.scope(), tf.Graph().as_default(), warnings() as said:
        x = tf.placeholder(tf.float32, [None])
        w = tf.get_variable("w", [], initializer=tf.ones_initializer())
        count = tf.get_variable(
            "count", [], tf.int64, initializer=tf.zeros_initializer(), trainable=False
        )
        loss = tf.reduce_mean(x) * w
        pairs = tf.train.GradientDescentOptimizer(0.1).compute_gradients(loss, [w])

        def change():
            if kind == "update":
                return tf.train.GradientDescentOptimizer(0.1).apply_gradients(pairs)
            return tf.group(tf.assign(w, w * 0.5) if kind == "rate" else tf.assign_add(count, 1))

        done = tf.cond(loss < 2.5, change, tf.no_op)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(done, {x: [2.0 + rank]})
    about = [
        text
        for text in said
        if "drift" in text and ("'count'" if kind == "count" else "'w'") in text
    ]
    assert len(about) == len(said) == (size > 1 and rank == 0), said


@pytest.mark.parametrize("kind", ["branch", "case", "loop"])
def test_where_ranks_do_not_all_come_by_nobody_waits(strategy, rank, size, kind, flavour):
    """The best loss of a rank's own so far: taken on one rank, not on another."""
    with strategy.scope(), tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None])
        best = tf.get_variable(
            "best",
            [],
            initializer=tf.constant_initializer(9.0),
            trainable=False,
            # a function takes no reference
            use_resource=True if kind == "case" else None,
        )
        loss = tf.reduce_mean(x)

        def better():
            with tf.control_dependencies([tf.assign(best, loss)]):
                return tf.identity(loss)

        with warnings() as said:
            if kind == "branch":
                now = tf.cond(loss < best, better, lambda: tf.identity(best))
            elif kind == "case":
                now = tf.switch_case(
                    tf.cast(loss < best, tf.int32), [lambda: tf.identity(best), better]
                )
            else:
                now = tf.while_loop(
                    lambda i, _: tf.cast(i, tf.float32) < loss,
                    lambda i, _: (i + 1, better()),
                    [0, loss],
                )[1]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(now, {x: [8.0 + 2 * rank]})
            assert session.run(best) == (9.0 if rank and kind != "loop" else 8.0 + 2 * rank)
    about = [text for text in said if "'best'" in text and "drift" in text]
    assert len(about) == len(said) == (size > 1 and rank == 0)


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


def test_a_queue_is_filled_by_a_thread_of_its_own(strategy, rank, size):
    """Which takes part in no mean, while training waits for what it enqueues."""
    with strategy.scope(), tf.Graph().as_default(), warnings() as said:
        with strategy.embedding_scope():
            t = reference.table("t", V, D)
        mean = tf.get_variable("mean", [], initializer=tf.zeros_initializer(), trainable=False)
        ids = tf.random.uniform([4], maxval=V, dtype=tf.int64)
        with tf.control_dependencies(
            [tf.assign(mean, 0.9 * mean + 0.1 * tf.reduce_mean(tf.cast(ids, tf.float32)))]
        ):
            ids = tf.identity(ids)
        queue = tf.queue.FIFOQueue(2, [tf.int64], [[4]])
        tf.train.add_queue_runner(tf.train.QueueRunner(queue, [queue.enqueue(ids)]))
        loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(t, queue.dequeue())))
        train = tf.train.AdagradOptimizer(0.1).minimize(loss, tf.train.get_or_create_global_step())
        with tf.train.MonitoredTrainingSession(
            "", hooks=[tf.train.StopAtStepHook(last_step=5)]
        ) as session:
            while not session.should_stop():
                session.run(train)
    assert len([text for text in said if "'mean'" in text and "drift" in text]) == (
        size > 1 and rank == 0
    )


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


def test_an_update_at_a_rate_of_the_ranks_own_is_said(strategy, rank, size):
    with strategy.scope(), tf.Graph().as_default():
        w, x = (
            tf.get_variable("w", [D], initializer=tf.ones_initializer()),
            tf.placeholder(tf.float32, [None, D]),
        )
        loss = tf.reduce_mean(x * w)
        train = tf.train.GradientDescentOptimizer(0.1 * loss).minimize(loss)
        with warnings() as said, tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {x: np.full([2, D], rank + 1)})
    assert (
        len([text for text in said if "'w'" in text and "drift" in text])
        == len(said)
        == (size > 1 and rank == 0)
    )


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


@pytest.mark.parametrize("kind", ["count", "unlisted"])
def test_branches_that_ranks_come_to_by_their_own_counts(strategy, rank, size, kind, flavour):
    """One has seen enough, another hasn't: nobody waits."""
    if kind == "unlisted" and flavour == "references":
        return
    with strategy.scope(), tf.Graph().as_default(), warnings() as said:
        with strategy.embedding_scope():
            reference.table("t", V, D)
        x = tf.placeholder(tf.float32, [None, D])
        mean = tf.get_variable("mean", [D], initializer=tf.zeros_initializer(), trainable=False)
        collections = [tf.GraphKeys.GLOBAL_VARIABLES] if kind == "count" else []
        seen = tf.get_variable(
            "seen",
            [],
            tf.int64,
            initializer=tf.zeros_initializer(),
            trainable=False,
            collections=collections,
        )
        now = tf.assign_add(seen, tf.shape(x, out_type=tf.int64)[0])
        update = tf.cond(
            now >= 10,
            lambda: tf.group(tf.assign(mean, 0.5 * mean + tf.reduce_mean(x, 0))),
            tf.no_op,
        )
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), seen.initializer])
            session.run(update, {x: np.ones([9 if rank else 11, D])})
            np.testing.assert_array_equal(session.run(mean), np.zeros(D) if rank else np.ones(D))
    assert len([text for text in said if "'mean'" in text and "drift" in text]) == (
        size > 1 and rank == 0
    ), said


def test_functions_take_no_mean(strategy, rank, size):
    """Which may be called twice in a run."""
    with strategy.scope(), tf.Graph().as_default(), warnings() as said:
        with strategy.embedding_scope():
            reference.table("t", V, D)
        x, mean = (
            tf.placeholder(tf.float32, [None, D]),
            tf.get_variable("mean", [D], use_resource=True, trainable=False),
        )
        move = tf.function(lambda y: mean.assign_add(tf.reduce_mean(y, 0)))
        both = [move(x), move(2.0 * x)]
        with tf.Session() as session:
            session.run(mean.initializer)
            session.run(both, {x: BATCHES[0]["x"]})
    assert len([text for text in said if "'mean'" in text and "drift" in text]) == (
        size > 1 and rank == 0
    ), said


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
        before = len([op for op in graph.get_operations() if op.type.startswith("Horovod")])
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
                if op.type.startswith("Horovod")
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


def test_a_count_in_front_of_batch_normalization_is_said_not_refused(strategy, rank, size):
    with strategy.scope(), tf.Graph().as_default(), warnings() as said:
        with strategy.embedding_scope():
            t = reference.table("t", V, D)
        x = tf.placeholder(tf.float32, [None, D])
        seen = tf.get_variable(
            "seen", [], tf.int64, initializer=tf.zeros_initializer(), trainable=False
        )
        with tf.control_dependencies([tf.assign_add(seen, tf.size(x, out_type=tf.int64))]):
            out = tf.layers.batch_normalization(
                tf.identity(x), training=True
            ) + tf.nn.embedding_lookup(t, [1])
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(out))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {x: BATCHES[0]["x"]})
    assert len([text for text in said if "'seen'" in text]) == len(said) == (size > 1 and rank == 0)


def test_a_table_that_is_assigned_what_a_rank_alone_knows_is_warned_of(strategy, rank, size):
    """Rows by their owners' data; what all ranks have, a value that is fed, or a mean needs no
    word.
    """
    with strategy.scope(plan="quiet"), tf.Graph().as_default(), warnings() as said:
        with strategy.embedding_scope():
            codebook = reference.table("codebook", V, D)
        x = tf.placeholder(tf.float32, [None, D])
        fine = [
            codebook.assign(codebook * 0.5),
            tf.assign_add(codebook, np.ones([V, D])),
            codebook.assign_sub(tf.ones([V, D])),
            codebook.assign(tf.placeholder(tf.float32, [V, D])),
            codebook.assign_add(tf.zeros([V, D]) + tf.norm(codebook)),
        ]
        assert not said and len(fine) == 5
        codebook.assign(0.9 * codebook + 0.1 * tf.reduce_mean(x, 0))
    assert len(said) == (size > 1 and rank == 0)
    assert (
        not said
        or said[0].startswith("The table 'codebook' is assigned what depends on")
        and "allreduce" in said[0]
    )
