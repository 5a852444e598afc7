"""Scripts with Horovod's wrappers train as before; SyncReplicasOptimizer is refused."""

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from collective import RankError, TableError
from tests.ranks import grouped, reference

pytestmark = pytest.mark.either_backend

IDS = np.random.default_rng(0).integers(0, 9, grouped.B)
X = np.random.default_rng(1).normal(size=(grouped.B, 3)).astype(np.float32)
STEP = (["train"], {"ids": IDS, "x": X})


def model(embedding_scope):
    """Builds a table, a replicated embedding and a matrix: (loss, variables, placeholders)."""
    with embedding_scope():
        t = reference.table("t", 9, 3)
    r, w = (
        reference.table("r", 9, 3, 1),
        tf.get_variable("w", initializer=reference.table_values(3, 2, 1)),
    )
    ids, x = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None, 3])
    rows = tf.nn.embedding_lookup(t, ids) + tf.nn.embedding_lookup(r, ids)
    return (
        tf.reduce_mean(tf.square(tf.matmul(rows * x, w)) + rows[:, :2]),
        [t, r, w],
        {"ids": ids, "x": x},
    )


def compare(strategy, rank, size, train, wrap, **scope):
    """Asserts that an optimizer or tape in `wrap` takes plain TensorFlow's steps without it."""

    def build(wrap):
        def made(embedding_scope):
            loss, (t, r, w), feeds = model(embedding_scope)
            out = {"train": train(wrap, loss, [t, r, w]), "r": r.read_value(), "w": w.read_value()}
            return {**out, **grouped.rows_of({"t": t})}, feeds

        return made

    after = [(["t", "r", "w"], {})]
    want = reference.plain(build(lambda x: x), [STEP] * 3 + after)[-1]
    mine = {name: reference.part(value, rank, size) for name, value in STEP[1].items()}
    runs = [(["train"], mine)] * 3
    if "local_steps" in scope:  # half of the batch, twice, for each step
        runs = [
            (["train"], {name: value[k::2] for name, value in mine.items()}) for k in range(2)
        ] * 3
    with strategy.scope(**scope):
        grouped.same(reference.sharded(strategy, build(wrap), runs + after)[-1], want)


def minimize(wrap, loss, variables):
    return wrap(tf.train.AdagradOptimizer(0.3)).minimize(loss)


def clip(wrap, loss, variables):
    optimizer = wrap(tf.train.MomentumOptimizer(0.1, 0.9))
    gradients, variables = zip(*optimizer.compute_gradients(loss))
    # Plain TensorFlow takes the norm with repeated ids apart: only a norm that doesn't clip is the
    # same.
    return optimizer.apply_gradients(zip(tf.clip_by_global_norm(gradients, 1e6)[0], variables))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "train, options, scope",
    [
        (minimize, {}, {}),
        (clip, {}, {}),
        (clip, {"gradient_predivide_factor": 2.0, "groups": 2}, {}),
        (minimize, {}, {"local_steps": 2}),
        (minimize, {"sparse_as_dense": True}, {}),
        (clip, {"sparse_as_dense": True, "groups": 3}, {}),
    ],
    ids=["minimize", "clipped", "grouped", "local_steps", "dense", "dense_grouped"],
)
def test_gradients_are_reduced_once(strategy, rank, size, train, options, scope):
    if scope and grouped.B // size % 2:
        return
    compare(
        strategy,
        rank,
        size,
        train,
        lambda optimizer: hvd.DistributedOptimizer(optimizer, **options),
        **scope,
    )


@pytest.mark.slow
def test_wrappers_from_before_the_scope(strategy, rank, size):
    """A script makes them eagerly, at its top, or in another graph; or of Keras's optimizers."""
    assert tf.executing_eagerly()
    made = [hvd.DistributedOptimizer(tf.train.AdagradOptimizer(0.3), name="Eager")]
    with tf.Graph().as_default():
        made.append(hvd.DistributedOptimizer(tf.train.AdagradOptimizer(0.3), name="Graph"))
    for wrapper in made:
        compare(strategy, rank, size, minimize, lambda optimizer, wrapper=wrapper: wrapper)


@pytest.mark.slow
def test_keras_optimizers(strategy, rank, size):
    """Wrapped in the graph, or eagerly before the scope: a table's gradient is still known for one,
    here by its norm.
    """

    def train(wrap, loss, variables):
        return wrap(tf2.keras.optimizers.legacy.Adagrad(0.3)).get_updates(loss, variables)

    compare(strategy, rank, size, train, hvd_keras.DistributedOptimizer)
    eager = hvd_keras.DistributedOptimizer(tf2.keras.optimizers.legacy.SGD(0.3))
    with strategy.scope(), tf.Graph().as_default():
        loss, (t, r, w), feeds = model(strategy.embedding_scope)
        gradient = eager.get_gradients(loss, [t])[0]
        same = [tf.linalg.global_norm([gradient]), tf.linalg.global_norm(tf.gradients(loss, [t]))]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            one, other = session.run(
                same, {feeds[name]: reference.part(STEP[1][name], rank, size) for name in feeds}
            )
    np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize(
    "wrap", [lambda tape: tape, hvd.DistributedGradientTape], ids=["plain", "distributed"]
)
def test_tapes(strategy, rank, size, wrap):
    """They watch a table that they see looked up."""

    def train(wrap, loss, variables):
        ids, x = (
            tf.get_default_graph().get_tensor_by_name(f"Placeholder{i}:0") for i in ("", "_1")
        )
        t, r, w = variables
        with wrap(tf.GradientTape()) as tape:
            rows = tf.nn.embedding_lookup(t, ids) + tf.nn.embedding_lookup(r, ids)
            loss = tf.reduce_mean(tf.square(tf.matmul(rows * x, w)))
        return tf.train.AdagradOptimizer(0.3).apply_gradients(
            zip(tape.gradient(loss, variables), variables)
        )

    compare(strategy, rank, size, train, wrap)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"op": hvd.Sum}, "leave op out"),
        ({"op": hvd.Adasum}, "leave op out"),
        ({"backward_passes_per_step": 4}, r"scope\(local_steps=4\)"),
        ({"process_set": "one"}, "all ranks train together"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_asks_for_other_numbers_is_refused(strategy, rank, size, options, message):
    if size == 1:
        return
    if options.get("process_set"):
        options = {"process_set": type(hvd.global_process_set)([0])}
        options["process_set"].process_set_id = 7
    with strategy.scope(), tf.Graph().as_default():
        loss, _, _ = model(strategy.embedding_scope)
        with pytest.raises((NotImplementedError, TableError), match=message):
            hvd.DistributedOptimizer(tf.train.AdagradOptimizer(0.3), **options).minimize(loss)


def test_local_variables_are_refused(strategy, rank, size):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        loss, (t, r, w), _ = model(strategy.embedding_scope)
        optimizer = hvd.DistributedOptimizer(tf.train.AdagradOptimizer(0.3))
        tape = hvd.DistributedGradientTape(tf.GradientTape())
        for local in (t, w):
            optimizer.register_local_var(local)
            tape.register_local_source(local)
        with pytest.raises(NotImplementedError, match="register_local_var"):
            optimizer.minimize(loss)
        with tape:
            loss = tf.reduce_sum(w)
        with pytest.raises(NotImplementedError, match="register_local_var"):
            tape.gradient(loss, [w])


def test_compression_is_ours(strategy, rank, size):
    if size == 1:
        return
    with pytest.warns(UserWarning, match=r"scope\(dense_compression='fp16'\)"):
        compare(
            strategy,
            rank,
            size,
            minimize,
            lambda optimizer: hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16),
        )


@pytest.mark.slow
def test_broadcasts_leave_shards_alone(strategy, rank, size):
    with strategy.scope(), tf.Graph().as_default():
        loss, (t, r, w), feeds = model(strategy.embedding_scope)
        train = hvd.DistributedOptimizer(tf.train.AdagradOptimizer(0.3)).minimize(loss)
        rows = tf.nn.embedding_lookup(t, tf.range(9))
        feed = {feeds[name]: reference.part(value, rank, size) for name, value in STEP[1].items()}
        with tf.train.MonitoredTrainingSession(
            "", hooks=[hvd.BroadcastGlobalVariablesHook(0)]
        ) as session:
            np.testing.assert_array_equal(session.run(rows), reference.table_values(9, 3))
            session.run(train, feed)
        broadcasts = [
            hvd.broadcast_global_variables(size - 1),
            hvd.broadcast_variables(tf.global_variables(), root_rank=0),
            hvd.broadcast_variables(tf.global_variables(), 0, inplace=True),
            hvd.broadcast_variables([t], 0),
        ]
        shards = [
            tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=tf.float32) + 0.0
            for v in tf.global_variables()
        ]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, feed)
            before = session.run([shards, rows])
            for broadcast in broadcasts:
                session.run(broadcast)
                grouped.same(
                    dict(enumerate(session.run(shards))), dict(enumerate(before[0])), rtol=0, atol=0
                )
            np.testing.assert_array_equal(session.run(rows), before[1])


def test_a_broadcast_makes_what_is_replicated_equal(strategy, rank, size):
    """With a root of its own, as after each rank has given it another value."""
    with strategy.scope(), tf.Graph().as_default():
        loss, (t, r, w), feeds = model(strategy.embedding_scope)
        own, broadcast = (
            w.assign(tf.fill([3, 2], float(rank))),
            hvd.broadcast_global_variables(size - 1),
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(own)
            session.run(broadcast)
            np.testing.assert_array_equal(session.run(w), np.full([3, 2], size - 1))


def test_sync_replicas_is_refused(strategy, rank, size):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        loss, _, _ = model(strategy.embedding_scope)
        optimizer = tf.train.SyncReplicasOptimizer(
            tf.train.AdagradOptimizer(0.3), size, total_num_replicas=size
        )
        with pytest.raises(NotImplementedError, match="the optimizer that it wraps"):
            optimizer.minimize(loss, tf.train.get_or_create_global_step())


def test_the_mean_of_all_losses(strategy, rank, size):
    """Reported, and minimised in the place of the rank's own."""

    def build(mean):
        def made(embedding_scope):
            loss, (t, r, w), feeds = model(embedding_scope)
            loss = mean(loss)
            train = tf.train.AdagradOptimizer(0.3).minimize(loss)
            return {
                "train": train,
                "loss": loss,
                "w": w.read_value(),
                **grouped.rows_of({"t": t}),
            }, feeds

        return made

    mine = {name: reference.part(value, rank, size) for name, value in STEP[1].items()}
    names, after = ["loss", "train"], [(["t", "w"], {})]
    want = reference.plain(build(lambda loss: loss), [(names, STEP[1])] * 3 + after)
    got = reference.sharded(strategy, build(hvd.allreduce), [(names, mine)] * 3 + after)
    for a, b in zip(got, want):
        grouped.same({k: a[k] for k in a if k != "train"}, {k: b[k] for k in b if k != "train"})


def test_a_mean_that_no_lookup_is_part_of_ends_with_the_data(strategy, rank, size):
    """hvd.allreduce of something that waits for no exchange of ours: a rank whose data ends leaves
    nobody waiting in it.
    """
    with strategy.scope(), tf.Graph().as_default():
        data = tf.data.Dataset.from_tensors(
            (np.array([1, 2], np.int64), np.ones([2, 3], np.float32))
        ).repeat(2 + rank % 2)
        ids, x = tf.data.make_one_shot_iterator(data).get_next()
        with strategy.embedding_scope():
            t = reference.table("t", 9, 3)
        mean = hvd.allreduce(tf.reduce_mean(x))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(
            tf.reduce_mean(tf.nn.embedding_lookup(t, ids))
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(tf.errors.OutOfRangeError):
                for _ in range(5):
                    session.run([train, mean])


def test_an_evaluation_with_a_mean_of_its_own_does_not_wait(strategy, rank, size):
    """A rank without data answers lookups, but takes no part in a script's own collective."""
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        data = tf.data.Dataset.from_tensors(np.array([1, 2], np.int64)).repeat(2 + rank % 2)
        with strategy.embedding_scope():
            t = reference.table("t", 9, 3)
        mean = hvd.allreduce(
            tf.reduce_mean(
                tf.nn.embedding_lookup(t, tf.data.make_one_shot_iterator(data).get_next())
            )
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(RankError, match="Rank 0 is out of data.*hvd.allreduce"):
                for _ in range(5):
                    np.testing.assert_allclose(
                        session.run(mean), reference.table_values(9, 3)[1:3].mean(), rtol=1e-5
                    )
