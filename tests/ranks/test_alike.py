"""What a script itself writes to replicated variables, by what each rank alone knows: all ranks keep the mean."""
import contextlib
import logging

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.training import moving_averages

from tests.ranks import grouped, reference

V, D = 11, 3
RNG = np.random.default_rng(6)
BATCHES = [{'ids': RNG.integers(0, V, grouped.B), 'x': RNG.normal(size=(grouped.B, D))} for _ in range(3)]


@pytest.fixture(params=['v1', 'v2', 'references'])
def flavour(request):
    """Control flow of either version, and variables of the first version."""
    if request.param != 'v2':
        tf.disable_control_flow_v2()
    if request.param == 'references':
        tf.disable_resource_variables()
    yield request.param
    tf.enable_control_flow_v2()
    tf.enable_resource_variables()


@contextlib.contextmanager
def warnings():
    """The warnings that TensorFlow's logger is given."""
    said, logger, level = [], tf.get_logger(), tf.get_logger().level
    handler = logging.Handler()
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

    if kind == 'written':
        with tf.control_dependencies([tf.assign(mean, moved())]):
            return x - tf.identity(mean)
    if kind == 'read':
        step = 0.2 * (tf.reduce_mean(x, 0) - mean)
        return x - (mean.assign_add(delta=step) if hasattr(mean, 'handle') else tf.assign(mean, moved()))
    if kind == 'branch':
        def update():
            with tf.control_dependencies([mean.assign(moved())]):
                return tf.identity(mean)
        return x - tf.cond(training, update, lambda: tf.identity(mean))
    assert kind == 'average'

    def average():      # computed, and updated, in the branch
        with tf.control_dependencies([moving_averages.assign_moving_average(mean, tf.reduce_mean(x, 0), 0.8, False)]):
            return tf.identity(mean)
    return x - tf.cond(training, average, lambda: tf.identity(mean))


@pytest.mark.parametrize('kind', ['written', 'read', 'branch', 'average'])
def test_averages_that_a_script_keeps_by_itself(strategy, rank, size, kind, flavour):
    def build(embedding_scope):
        with embedding_scope():
            t = reference.table('t', V, D)
        ids, x, training = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None, D]), tf.placeholder(tf.bool)
        mean = tf.get_variable('mean', [D], initializer=tf.ones_initializer(), trainable=False)
        less = running_mean(kind, x, mean, training)
        loss = tf.reduce_mean(tf.square(less + tf.nn.embedding_lookup(t, ids)))
        train = tf.train.GradientDescentOptimizer(0.3).minimize(loss)
        return {'train': train, 'mean': mean, **grouped.rows_of({'t': t})}, {'ids': ids, 'x': x, 'training': training}

    runs = [run for batch in BATCHES for run in ((['train'], batch), (['mean', 't'], {}))]
    want = reference.plain(*with_training(build, runs))
    got = reference.sharded(strategy, *with_training(build, [
        (names, {key: reference.part(value, rank, size) for key, value in values.items()}) for names, values in runs]))
    for mine, whole in zip(got[1::2], want[1::2]):
        grouped.same(mine, whole)
    everyone = grouped.everyone(got[-1]['mean'].tolist())
    assert all(mean == everyone[0] for mean in everyone)


def with_training(build, runs):
    return build, [(names, {**values, 'training': True} if values else {}) for names, values in runs]


def test_an_average_beside_the_training_step(strategy, rank, size):
    """Made after the update, by a script that shows a smooth loss; it says once what becomes of it."""
    def build(embedding_scope):
        w, x = tf.get_variable('w', [D], initializer=tf.ones_initializer()), tf.placeholder(tf.float32, [None, D])
        smooth = tf.get_variable('smooth', [], initializer=tf.zeros_initializer(), trainable=False)
        loss = tf.reduce_mean(tf.square(x * w))
        train = tf.train.GradientDescentOptimizer(0.3).minimize(loss)
        return {'step': tf.group(train, tf.assign(smooth, 0.9 * smooth + 0.1 * loss)), 'smooth': smooth, 'w': w}, {'x': x}

    with warnings() as said:
        want, got = grouped.both(strategy, rank, size, build, [
            *((['step'], {'x': batch['x']}) for batch in BATCHES), (['smooth', 'w'], {})])
    grouped.same(got[-1], want[-1])
    about = [text for text in said if "'smooth'" in text]
    assert len(about) == (size > 1 and rank == 0), said
    assert all('mean over ranks' in text and 'LOCAL_VARIABLES' in text for text in about)


def test_updates_that_a_session_saw_before_there_was_an_optimizer(strategy, rank, size):
    def build(embedding_scope):
        w, x = tf.get_variable('w', [D], initializer=tf.ones_initializer()), tf.placeholder(tf.float32, [None, D])
        mean = tf.get_variable('mean', [D], initializer=tf.ones_initializer(), trainable=False)
        update = tf.assign(mean, tf.reduce_mean(x, 0))
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(x * w))
        return {'step': tf.group(train, update), 'mean': mean, 'w': w}, {'x': x}

    want, got = grouped.both(strategy, rank, size, build, [
        *((['step'], {'x': batch['x']}) for batch in BATCHES), (['mean', 'w'], {})])
    grouped.same(got[-1], want[-1])


def test_gradients_changed_by_what_a_rank_alone_knows(strategy, rank, size):
    """Noise, or a factor from the batch; and gradients that a script computed by itself."""
    with strategy.scope(check=1), tf.Graph().as_default():
        w = tf.get_variable('w', [D], initializer=tf.ones_initializer())
        v = tf.get_variable('v', [D], initializer=tf.ones_initializer())
        x = tf.placeholder(tf.float32, [None, D])
        optimizer = tf.train.GradientDescentOptimizer(0.5)
        (gradient, _), = optimizer.compute_gradients(tf.reduce_mean(x * w), [w])
        noisy = gradient * tf.reduce_mean(x) + 0 * tf.random.normal([D])
        train = optimizer.apply_gradients([(noisy, w), (tf.reduce_mean(x, 0), v)])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            batch = BATCHES[0]['x']
            with warnings() as said:
                session.run(train, {x: reference.part(batch, rank, size)})
            got = session.run({'w': w, 'v': v})
    assert not said, 'it was said where the update was made'
    grouped.same(got, {'w': 1 - 0.5 * batch.mean(0) / D * batch.mean(), 'v': 1 - 0.5 * batch.mean(0)})


def test_settings_are_not_data(strategy, rank, size):
    """A rate or a norm that is fed costs no exchange, and one rank alone may set a variable to what it feeds."""
    with strategy.scope(), tf.Graph().as_default():
        w, x = tf.get_variable('w', [D], initializer=tf.ones_initializer()), tf.placeholder(tf.float32, [None, D])
        rate = tf.get_variable('rate', [], initializer=tf.zeros_initializer(), trainable=False)
        fed, norm = tf.placeholder(tf.float64, []), tf.placeholder_with_default(1.0, [])
        slower, faster = tf.assign(rate, tf.cast(fed, tf.float32)), tf.assign(rate, 2 * tf.cast(fed, tf.float32))
        row = tf.placeholder(tf.float32, [D])
        load = tf.assign(w, row)
        optimizer = tf.train.GradientDescentOptimizer(rate)
        (gradient, _), = optimizer.compute_gradients(tf.reduce_mean(x * w), [w])
        train = optimizer.apply_gradients([(tf.clip_by_norm(gradient, norm), w)])
        with warnings() as said, tf.Session() as session:
            session.run(tf.global_variables_initializer())
            assert grouped.exchanged(session, [slower, faster], {fed: 0.5})[1] == 0
            counts = grouped.exchanged(session, train, {x: BATCHES[0]['x']})
            if rank == size - 1:
                session.run(load, {row: np.full(D, 7)})
                np.testing.assert_array_equal(session.run(w), np.full(D, 7))
    assert counts[1] == (size > 1)
    assert not said


def test_what_has_no_mean_is_said(strategy, rank, size):
    """Integers, some elements only, what grows, what belongs to samples, what comes of such: each rank's own, as a rank's local
    variables are, of which nothing is said."""
    with strategy.scope(), tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None])
        seen = tf.get_variable('seen', [], tf.int64, initializer=tf.zeros_initializer(), trainable=False)
        last = tf.get_variable('last', [2], initializer=tf.zeros_initializer(), trainable=False)
        own = tf.get_variable('own', [], initializer=tf.zeros_initializer(), collections=[tf.GraphKeys.LOCAL_VARIABLES])
        steps = tf.get_variable('steps', [], tf.int64, initializer=tf.zeros_initializer(), trainable=False)
        grown = tf.Variable([1.0], validate_shape=False, trainable=False, name='grown', shape=[None])
        state = tf.get_variable('state', [2, 1], initializer=tf.zeros_initializer(), trainable=False)
        of_own = tf.get_variable('of_own', [], initializer=tf.zeros_initializer(), trainable=False)
        step = [tf.assign_add(seen, tf.size(x, out_type=tf.int64)), tf.scatter_update(last, [1], x[:1]),
                tf.assign_add(own, x[0]), tf.assign_add(steps, 1), tf.assign(grown, tf.reduce_sum(x)[None]),
                tf.assign(state, tf.tanh(state + x[0])), tf.assign(of_own, 2 * own)]
        with strategy.embedding_scope():
            reference.table('t', V, D)
        with warnings() as said, tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            for _ in range(2):
                session.run(step, {x: [rank + 1.0] * (rank + 1)})
            assert session.run([seen, own, steps]) == [2 * (rank + 1), 2 * (rank + 1), 2]
    names = ('seen', 'last', 'grown', 'state', 'of_own')
    for name in names:
        about = [text for text in said if f"'{name}'" in text]
        assert len(about) == (size > 1 and rank == 0), said
        assert all('drift' in text and 'LOCAL_VARIABLES' in text for text in about)
    assert len(said) == len(names) * (size > 1 and rank == 0)


@pytest.mark.parametrize('kind', ['rate', 'count', 'update'])
def test_what_a_rank_alone_decides_is_said(strategy, rank, size, kind):
    """A rate that one rank halves, by numbers that all have; an update that it leaves out."""
    with strategy.scope(), tf.Graph().as_default(), warnings() as said:
        x = tf.placeholder(tf.float32, [None])
        w = tf.get_variable('w', [], initializer=tf.ones_initializer())
        count = tf.get_variable('count', [], tf.int64, initializer=tf.zeros_initializer(), trainable=False)
        loss = tf.reduce_mean(x) * w
        pairs = tf.train.GradientDescentOptimizer(0.1).compute_gradients(loss, [w])

        def change():
            if kind == 'update':
                return tf.train.GradientDescentOptimizer(0.1).apply_gradients(pairs)
            return tf.group(tf.assign(w, w * 0.5) if kind == 'rate' else tf.assign_add(count, 1))
        done = tf.cond(loss < 2.5, change, tf.no_op)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(done, {x: [2.0 + rank]})
    about = [text for text in said if 'drift' in text and ("'count'" if kind == 'count' else "'w'") in text]
    assert len(about) == len(said) == (size > 1 and rank == 0), said


@pytest.mark.parametrize('kind', ['branch', 'case', 'loop'])
def test_where_ranks_do_not_all_come_by_nobody_waits(strategy, rank, size, kind, flavour):
    """The best loss of a rank's own so far: taken on one rank, not on another."""
    with strategy.scope(), tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None])
        best = tf.get_variable('best', [], initializer=tf.constant_initializer(9.0), trainable=False,
                               use_resource=True if kind == 'case' else None)     # a function takes no reference
        loss = tf.reduce_mean(x)

        def better():
            with tf.control_dependencies([tf.assign(best, loss)]):
                return tf.identity(loss)
        with warnings() as said:
            if kind == 'branch':
                now = tf.cond(loss < best, better, lambda: tf.identity(best))
            elif kind == 'case':
                now = tf.switch_case(tf.cast(loss < best, tf.int32), [lambda: tf.identity(best), better])
            else:
                now = tf.while_loop(lambda i, _: tf.cast(i, tf.float32) < loss, lambda i, _: (i + 1, better()), [0, loss])[1]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(now, {x: [8.0 + 2 * rank]})
            assert session.run(best) == (9.0 if rank and kind != 'loop' else 8.0 + 2 * rank)
    about = [text for text in said if "'best'" in text and 'drift' in text]
    assert len(about) == len(said) == (size > 1 and rank == 0)


def test_a_graph_of_a_ranks_own(strategy, rank, size):
    """Without tables and training: one rank may count in it by itself."""
    with strategy.scope(), tf.Graph().as_default(), warnings() as said:
        x = tf.placeholder(tf.float32, [None, D])
        total = tf.get_variable('total', [D], initializer=tf.zeros_initializer())
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
            t = reference.table('t', V, D)
        mean = tf.get_variable('mean', [], initializer=tf.zeros_initializer(), trainable=False)
        ids = tf.random.uniform([4], maxval=V, dtype=tf.int64)
        with tf.control_dependencies([tf.assign(mean, 0.9 * mean + 0.1 * tf.reduce_mean(tf.cast(ids, tf.float32)))]):
            ids = tf.identity(ids)
        queue = tf.queue.FIFOQueue(2, [tf.int64], [[4]])
        tf.train.add_queue_runner(tf.train.QueueRunner(queue, [queue.enqueue(ids)]))
        loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(t, queue.dequeue())))
        train = tf.train.AdagradOptimizer(0.1).minimize(loss, tf.train.get_or_create_global_step())
        with tf.train.MonitoredTrainingSession('', hooks=[tf.train.StopAtStepHook(last_step=5)]) as session:
            while not session.should_stop():
                session.run(train)
    assert len([text for text in said if "'mean'" in text and 'drift' in text]) == (size > 1 and rank == 0)


def test_a_partitioned_variable_in_a_branch(strategy, rank, size):
    def build(embedding_scope):
        with embedding_scope():
            t = reference.table('t', V, D)
        x, training = tf.placeholder(tf.float32, [None, D]), tf.placeholder(tf.bool, [])
        parts = tf.get_variable('v', [4, D], partitioner=tf.fixed_size_partitioner(2), initializer=tf.zeros_initializer())
        new = tf.tile(tf.reduce_mean(x, 0)[None], [4, 1]) + tf.nn.embedding_lookup(t, [0])
        done = tf.cond(training, lambda: tf.group(tf.assign(parts, new)), tf.no_op)
        return {'done': done, 'v': parts.as_tensor()}, {'x': x, 'training': training}
    want = reference.plain(build, [(['done'], {'x': BATCHES[0]['x'], 'training': True}), (['v'], {})])
    got = reference.sharded(strategy, build, [
        (['done'], {'x': reference.part(BATCHES[0]['x'], rank, size), 'training': True}), (['v'], {})])
    grouped.same(got[1], want[1])


@pytest.mark.parametrize('kind', ['noise', 'by hand'])
def test_sparse_gradients_changed_by_what_a_rank_alone_knows(strategy, rank, size, kind):
    """Of a replicated variable."""
    def build(embedding_scope):
        v = tf.get_variable('v', [V, D], initializer=tf.ones_initializer())
        ids, x = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None, D])
        optimizer = tf.train.AdagradOptimizer(0.5)
        if kind == 'noise':
            (g, _), = optimizer.compute_gradients(tf.reduce_mean(tf.gather(v, ids)))
            g = tf.IndexedSlices(g.values * tf.reduce_mean(x), g.indices, g.dense_shape)
        else:
            g = tf.IndexedSlices(x / tf.cast(tf.shape(x)[0], tf.float32), ids, [V, D])
        return {'train': optimizer.apply_gradients([(g, v)]), 'v': v}, {'ids': ids, 'x': x}
    want, got = grouped.both(strategy, rank, size, build, [(['train'], BATCHES[0]), (['v'], {})])
    grouped.same(got[1], want[1])


def test_an_update_at_a_rate_of_the_ranks_own_is_said(strategy, rank, size):
    with strategy.scope(), tf.Graph().as_default():
        w, x = tf.get_variable('w', [D], initializer=tf.ones_initializer()), tf.placeholder(tf.float32, [None, D])
        loss = tf.reduce_mean(x * w)
        train = tf.train.GradientDescentOptimizer(0.1 * loss).minimize(loss)
        with warnings() as said, tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {x: np.full([2, D], rank + 1)})
    assert len([text for text in said if "'w'" in text and 'drift' in text]) == len(said) == (size > 1 and rank == 0)


def test_a_warm_start_changes_nothing_else(strategy, rank, size, folder):
    def model():
        with strategy.embedding_scope():
            t = reference.table('t', V, D)
        w = tf.get_variable('w', [D], initializer=tf.random_normal_initializer())
        loss = tf.reduce_mean(tf.nn.embedding_lookup(t, [0, 1]) * w)
        return w, tf.train.GradientDescentOptimizer(0.1).minimize(loss)

    with strategy.scope(), tf.Graph().as_default():
        w, _ = model()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            tf.train.Saver().save(session, f'{folder}/model')
            want = session.run(w)
    with strategy.scope(), tf.Graph().as_default(), warnings() as said:
        w, train = model()
        tf.train.init_from_checkpoint(f'{folder}/model', {'w': 'w'})
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            np.testing.assert_array_equal(session.run(w), want)
            session.run(train)
    assert not [text for text in said if "'w'" in text and 'rank' in text], said
