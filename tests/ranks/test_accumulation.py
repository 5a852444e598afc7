"""scope(local_steps=k) is training with a k times larger batch, beside plain TensorFlow; what
happens in the middle of k.
"""

import functools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError, checkpoint
from tests.ranks import reference
from tests.ranks.test_dynamic import OPTIMIZERS, drawn, normal

pytestmark = pytest.mark.double

K, B, V, D = 3, 12, 40, 3  # batches an update, samples a batch, rows, dimension


def batch(update):
    """All samples of an update: (ids [K * B], ragged ids with their weights, a fifth of the samples
    empty; features).
    """
    rng = np.random.default_rng([11, update])
    lengths = rng.integers(0, 4, K * B) * (rng.random(K * B) < 0.8)
    places = np.array([(i, j) for i, length in enumerate(lengths) for j in range(length)], np.int64)
    return {
        "dense": np.minimum(rng.zipf(1.4, K * B) - 1, V - 1),
        "places": places,
        "ids": np.minimum(rng.zipf(1.4, len(places)) - 1, V - 1),
        "weights": rng.uniform(0.5, 2.0, len(places)).astype(np.float32),
        "x": rng.normal(size=(K * B, 3)).astype(np.float32),
    }


def share(update, step, rank, size):
    """This rank's share of one batch of the update."""
    whole, part = batch(update), B // size
    first = step * B + rank * part
    mine = (whole["places"][:, 0] >= first) & (whole["places"][:, 0] < first + part)
    return {
        "dense": whole["dense"][first : first + part],
        "x": whole["x"][first : first + part],
        "places": whole["places"][mine] - [first, 0],
        "ids": whole["ids"][mine],
        "weights": whole["weights"][mine],
    }


def shares(updates, rank, size):
    return [share(update, step, rank, size) for update in range(updates) for step in range(K)]


def network(embedding_scope, shape, init, samples):
    """(loss, {'t', 'u', 'w': variables}, placeholders): tables t in three kinds of lookups and u in
    one, a dense layer.
    """
    with embedding_scope():
        t = tf.get_variable("t", shape, initializer=init)
        u = reference.table("u", 7, 2)
    p = {
        "places": tf.placeholder(tf.int64, [None, 2]),
        "ids": tf.placeholder(tf.int64, [None]),
        "weights": tf.placeholder(tf.float32, [None]),
        "dense": tf.placeholder(tf.int64, [None]),
        "x": tf.placeholder(tf.float32, [None, 3]),
    }
    sparse = tf.SparseTensor(p["places"], p["ids"], [samples, 3])
    weights = tf.SparseTensor(p["places"], p["weights"], [samples, 3])
    wide = tf.concat(
        [
            p["x"],
            tf.nn.embedding_lookup(t, p["dense"]),
            tf.gather(t, (p["dense"] + 1) % V),
            tf.nn.safe_embedding_lookup_sparse(t, sparse, weights, combiner="mean", default_id=3),
            tf.nn.embedding_lookup(u, p["dense"] % 7),
        ],
        1,
    )
    w = tf.get_variable("w", initializer=tf.constant(reference.table_values(3 * D + 5, 1)))
    return tf.reduce_mean(tf.square(tf.matmul(wide, w) - 1.0)), {"t": t, "u": u, "w": w}, p


def model(embedding_scope, train, samples, shape=(V, D), init=None):
    """`train(loss, variables)` makes the update."""
    init = init or tf.constant_initializer(drawn(np.arange(V)))
    loss, variables, p = network(embedding_scope, list(shape), init, samples)
    op = train(loss, variables)
    return {
        "train": op,
        "w": variables["w"].read_value(),
        "u": tf.nn.embedding_lookup(variables["u"], tf.range(7)),
        "t": tf.nn.embedding_lookup(variables["t"], tf.range(V)),
        "step": tf.train.get_or_create_global_step().read_value(),
    }, p


VALUES = ("t", "u", "w", "step")


def minimize(optimizer):
    return lambda loss, _: OPTIMIZERS[optimizer]().minimize(
        loss, global_step=tf.train.get_or_create_global_step()
    )


def larger(train, updates, init=None):
    """Plain TensorFlow's values after each update with all samples of it."""
    return reference.plain(
        lambda s: model(s, train, K * B, init=init),
        [run for update in range(updates) for run in ((["train"], batch(update)), (VALUES, {}))],
    )[1::2]


def smaller(strategy, rank, size, train, updates, **kwargs):
    """Ours after each run."""
    runs = [
        run for feed in shares(updates, rank, size) for run in ((["train"], feed), (VALUES, {}))
    ]
    with strategy.scope(local_steps=K):
        return reference.sharded(strategy, lambda s: model(s, train, B // size, **kwargs), runs)[
            1::2
        ]


def keys_until(update):
    """Those that the updates before it look up."""
    batches = [batch(u) for u in range(update)]
    return np.unique(
        np.concatenate(
            [[3], *[np.concatenate([b["dense"], (b["dense"] + 1) % V, b["ids"]]) for b in batches]]
        )
    )


def compare(strategy, rank, size, train, updates=2, want=None, rtol=2e-5, **kwargs):
    want = want or larger(train, updates)
    got = smaller(strategy, rank, size, train, updates, **kwargs)
    for update in range(updates):
        theirs, ours = want[update], got[update * K + K - 1]
        for name in VALUES:
            at = keys_until(update + 1) if name == "t" else ...  # a dynamic table has no other
            np.testing.assert_allclose(
                ours[name][at],
                theirs[name][at],
                rtol=rtol,
                atol=rtol / 10,
                err_msg=f"{name}, update {update}",
            )
    return got


@functools.cache
def larger_by(optimizer):
    return larger(minimize(optimizer), 2)


@pytest.mark.sample(12)
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_updates_as_with_a_larger_batch(strategy, rank, size, optimizer, kind):
    static = kind == "static"
    # RMSProp divides by the root of a small mean square, which magnifies how a sum was rounded.
    got = compare(
        strategy,
        rank,
        size,
        minimize(optimizer),
        want=larger_by(optimizer),
        rtol=2e-4,
        shape=[V if static else None, D],
        init=None if static else normal(),
    )
    # the run before an update
    before = [values for i, values in enumerate(got) if i % K == K - 2]
    for values, earlier in zip(before, [got[0], got[K - 1]]):
        # training makes rows of a dynamic one in any run
        for name in ("w", "u", "step", *(["t"] if static else [])):
            np.testing.assert_array_equal(values[name], earlier[name])
    if static:
        untouched = np.setdiff1d(np.arange(V), keys_until(2))
        assert len(untouched)
        np.testing.assert_array_equal(got[-1]["t"][untouched], drawn(untouched))


def test_a_schedule_by_global_step(strategy, rank, size):
    def train(loss, _):
        step = tf.train.get_or_create_global_step()
        rate = tf.train.exponential_decay(0.5, step, 1, 0.3)
        return tf.train.MomentumOptimizer(rate, 0.9).minimize(loss, global_step=step)

    compare(strategy, rank, size, train, updates=3)


def clipped(loss, variables, norm=0.2):
    """Plain TensorFlow takes repeated ids apart: its gradient is made dense, that is, summed,
    first.
    """
    gradients = tf.gradients(loss, list(variables.values()))
    if hasattr(variables["t"], "dim"):
        return tf.clip_by_global_norm(gradients, norm)[0]
    return tf.clip_by_global_norm([tf.convert_to_tensor(g) for g in gradients], norm)[0]


def test_clipping_by_a_norm_of_all(strategy, rank, size):
    """The norm of the mean isn't the mean of the norms."""

    def train(loss, variables):
        return tf.train.GradientDescentOptimizer(0.5).apply_gradients(
            zip(clipped(loss, variables), variables.values()), tf.train.get_or_create_global_step()
        )

    compare(strategy, rank, size, train)


def test_two_optimizers_that_share_a_norm(strategy, rank, size):
    def train(loss, variables):
        gradients, (t, u, w) = clipped(loss, variables), variables.values()
        one = tf.train.AdagradOptimizer(0.3).apply_gradients([(gradients[0], t), (gradients[2], w)])
        two = tf.train.GradientDescentOptimizer(0.5).apply_gradients(
            [(gradients[1], u)], tf.train.get_or_create_global_step()
        )
        return tf.group(one, two)

    compare(strategy, rank, size, train)


def test_two_losses_with_optimizers_of_their_own(strategy, rank, size):
    def train(loss, variables):
        one = tf.train.MomentumOptimizer(0.2, 0.9).minimize(
            loss, var_list=[variables["t"], variables["w"]]
        )
        two = tf.train.AdagradOptimizer(0.1).minimize(
            3.0 * loss, tf.train.get_or_create_global_step(), var_list=[variables["u"]]
        )
        return tf.group(one, two)

    compare(strategy, rank, size, train)


def test_clipping_one_by_one(strategy, rank, size):
    def train(loss, variables):
        gradients = tf.gradients(loss, list(variables.values()))
        if not hasattr(variables["t"], "dim"):
            gradients = [tf.convert_to_tensor(g) for g in gradients]
        gradients = [
            tf.clip_by_value(gradients[0], -0.02, 0.01),
            tf.clip_by_norm(gradients[1], 0.05),
            gradients[2],
        ]
        return tf.train.AdagradOptimizer(0.3).apply_gradients(
            zip(gradients, variables.values()), tf.train.get_or_create_global_step()
        )

    compare(strategy, rank, size, train)


def test_the_gradient_tape_of_a_callable_loss(strategy, rank, size):
    def train(loss, variables):
        x = tf.get_default_graph().get_tensor_by_name("Placeholder_4:0")

        def again():
            row = tf.nn.embedding_lookup(variables["u"], [1, 2])[0]
            return tf.reduce_mean(tf.square(tf.matmul(x, variables["w"][:3]) + row))

        return tf.train.AdagradOptimizer(0.1).minimize(
            again, tf.train.get_or_create_global_step(), [variables["u"], variables["w"]]
        )

    compare(strategy, rank, size, train)


def test_what_a_script_computes_itself_is_summed_up_too(strategy, rank, size):
    """Gradients that come from no tf.gradients, beside some that do, and one that is no tensor."""

    def train(loss, variables):
        x = tf.get_default_graph().get_tensor_by_name("Placeholder_4:0")
        # not before the loss has read what it updates
        by_hand = tf.reduce_mean(x) * tf.ones([14, 1]) + 0.0 * loss
        if hasattr(variables["t"], "dim") and size > 1:
            import horovod.tensorflow as hvd

            by_hand = hvd.allreduce(by_hand + 0.0, name="by_hand")
        b = tf.get_variable("b", [2], initializer=tf.zeros_initializer())
        return tf.train.MomentumOptimizer(0.1, 0.9).apply_gradients(
            [
                (tf.gradients(loss, variables["t"])[0], variables["t"]),
                (by_hand, variables["w"]),
                (np.ones(2, np.float32), b),
                (None, variables["u"]),
            ],
            tf.train.get_or_create_global_step(),
        )

    compare(strategy, rank, size, train)


def test_a_penalty_is_each_batchs_own(strategy, rank, size):
    """The gradient that is penalised isn't summed up, the gradient of the penalty is: beside a mean
    over batches.
    """

    def build(embedding_scope, parts):
        with embedding_scope():
            t = reference.table("t", 9, 3)
        w = tf.get_variable("w", initializer=reference.table_values(3, 2, 1))
        ids = tf.placeholder(tf.int64, [None])
        losses = [
            tf.reduce_mean(tf.square(tf.matmul(tf.nn.embedding_lookup(t, part), w)))
            for part in tf.split(ids, parts)
        ]
        loss = (
            tf.add_n(
                [one + 0.5 * tf.reduce_sum(tf.square(tf.gradients(one, w)[0])) for one in losses]
            )
            / parts
        )
        train = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
        return {"train": train, "w": w.read_value(), "t": tf.nn.embedding_lookup(t, tf.range(9))}, {
            "ids": ids
        }

    ids = np.random.default_rng(3).integers(0, 9, (2, K, B))
    want = reference.plain(
        lambda s: build(s, K),
        [(["train"], {"ids": x.reshape(-1)}) for x in ids] + [(["w", "t"], {})],
    )
    with strategy.scope(local_steps=K):
        got = reference.sharded(
            strategy,
            lambda s: build(s, 1),
            [(["train"], {"ids": reference.part(x, rank, size)}) for x in ids.reshape(-1, B)]
            + [(["w", "t"], {})],
        )
    for name in ("w", "t"):
        np.testing.assert_allclose(got[-1][name], want[-1][name], rtol=2e-5, atol=1e-6)


def test_sparse_gradients_of_replicated_variables(strategy, rank, size):
    """An embedding outside embedding_scope(), also by constant ids, whose number is known: slices
    stay slices.
    """

    def build(embedding_scope, constant):
        v = reference.table("v", 9, 3)
        ids = tf.constant(constant) if constant else tf.placeholder(tf.int64, [None])
        loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(v, ids)))
        ((gradient, _),) = tf.train.GradientDescentOptimizer(1.0).compute_gradients(loss, [v])
        gradient = tf.clip_by_norm(gradient.values, 0.05), gradient.indices
        train = tf.train.MomentumOptimizer(0.5, 0.9).apply_gradients(
            [(tf.IndexedSlices(*gradient, [9, 3]), v)]
        )
        return {"train": train, "v": v.read_value()}, {"ids": ids}

    ids = np.random.default_rng(4).integers(0, 9, (2, K * B))
    ids[1] %= 4  # rows whose momentum stays
    want = reference.plain(
        lambda s: build(s, None), [(["train"], {"ids": x}) for x in ids] + [(["v"], {})]
    )
    with strategy.scope(local_steps=K):
        got = reference.sharded(
            strategy,
            lambda s: build(s, None),
            [(["train"], {"ids": reference.part(x, rank, size)}) for x in ids.reshape(-1, B)]
            + [(["v"], {})],
        )
        same = reference.sharded(
            strategy, lambda s: build(s, [1, 1, 5]), [(["train"], {})] * K + [(["v"], {})]
        )
    np.testing.assert_allclose(got[-1]["v"], want[-1]["v"], rtol=2e-5, atol=1e-6)
    want = reference.plain(
        lambda s: build(s, None), [(["train"], {"ids": [1, 1, 5] * K * size}), (["v"], {})]
    )
    np.testing.assert_allclose(same[-1]["v"], want[-1]["v"], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("resources", [True, False], ids=["resources", "references"])
def test_tensorflow_without_its_second_version(strategy, rank, size, resources):
    tf.disable_control_flow_v2()
    if not resources:
        tf.disable_resource_variables()
    try:
        compare(strategy, rank, size, minimize("adam"), rtol=2e-4)
        compare(
            strategy,
            rank,
            size,
            minimize("momentum"),
            shape=[None, D],
            init=tf.constant_initializer(0.25),
            want=larger(minimize("momentum"), 2, tf.constant_initializer(0.25)),
        )
    finally:
        tf.enable_control_flow_v2()
        tf.enable_resource_variables()


def test_half_precision_is_summed_in_single(strategy, rank, size):
    """1 + 1e-3 + 1e-3 in float16 is 1.002, rounded; each of many such additions would lose a bit."""

    def build(embedding_scope):
        w = tf.get_variable("w", [1], tf.float16, initializer=tf.zeros_initializer())
        x = tf.placeholder(tf.float16, [])
        return {
            "train": tf.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_sum(w) * x),
            "w": w.read_value(),
        }, {"x": x}

    xs = [1.0] + [0.0004] * 31
    with strategy.scope(local_steps=32):
        got = reference.sharded(
            strategy, build, [(["train"], {"x": x}) for x in xs] + [(["w"], {})]
        )
    np.testing.assert_array_equal(
        got[-1]["w"], -np.mean(np.float16(xs).astype(np.float32), keepdims=True).astype(np.float16)
    )


def test_gradients_that_are_fetched_are_the_mean_so_far_and_no_batch(strategy, rank, size):
    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", 9, 3)
        ids, x = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [])
        w = tf.get_variable("w", initializer=tf.ones([]))
        loss = x * w + tf.reduce_mean(tf.nn.embedding_lookup(t, ids))
        gradients = tf.gradients(loss, [t, w])
        train = tf.train.GradientDescentOptimizer(1.0).apply_gradients(zip(gradients, [t, w]))
        norm = tf.linalg.global_norm(gradients)
        return {
            "train": train,
            "w": w.read_value(),
            "gradient": gradients[1],
            "slices": gradients[0],
            "norm": norm,
        }, {"ids": ids, "x": x}

    def run(x, *names):
        return list(names), {"ids": [int(x)] * 2, "x": x}

    with strategy.scope(local_steps=K):
        got = reference.sharded(
            strategy,
            build,
            [
                run(1.0, "gradient"),
                run(1.0, "gradient"),
                run(1.0, "train"),
                run(4.0, "gradient", "slices"),
                run(4.0, "train"),
                run(1.0, "norm"),
                run(1.0, "train", "gradient"),
                run(7.0, "gradient"),
                (["w"], {}),
            ],
        )
    assert [values["gradient"] for values in got if "gradient" in values] == [
        1.0,
        1.0,
        2.5,
        2.0,
        7.0,
    ]
    assert got[-1]["w"] == -1.0
    # Ids 1, 4 and 1: the table's gradient has 2/3 and 1/3 of a row of thirds
    np.testing.assert_allclose(got[5]["norm"], np.sqrt(4.0 + (4 / 9 + 1 / 9) / 3), rtol=1e-6)
    rows = got[3]["slices"].indices
    assert len(set(rows)) == len(rows) == sum(row % size == rank for row in (1, 4))


def test_memory_is_bounded_by_the_rows_that_were_touched(strategy, rank, size):
    with strategy.scope(local_steps=100), tf.Graph().as_default() as graph:
        with strategy.embedding_scope():
            t = reference.table("t", 9, 3)
        ids = tf.placeholder(tf.int64, [None])
        train = tf.train.AdagradOptimizer(1.0).minimize(
            tf.reduce_mean(tf.nn.embedding_lookup(t, ids))
        )
        rows = tf.raw_ops.ReadVariableOp(
            resource=graph.get_tensor_by_name("collective/local_steps/sum_1:0"), dtype=tf.int64
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for i in range(10):
                session.run(train, {ids: np.repeat([i % 4, 8], 50)})
            kept = session.run(rows)
    np.testing.assert_array_equal(
        sorted(kept), sorted(row // size for row in (0, 1, 2, 3, 8) if row % size == rank)
    )


# ---- Sessions, checkpoints, the end of the data


def build_small(strategy, rate=1.0):
    """(placeholder, train_op, fetch): each run moves w and the rows of t by the mean of x."""
    with strategy.embedding_scope():
        t = tf.get_variable("t", [4, 2], initializer=tf.zeros_initializer())
    w = tf.get_variable("w", initializer=tf.zeros([]))
    x = tf.placeholder_with_default(tf.constant(1.0), [], "x")
    loss = w * x + tf.reduce_sum(tf.nn.embedding_lookup(t, [1, 2])) * x
    train = tf.train.GradientDescentOptimizer(rate).minimize(
        loss, tf.train.get_or_create_global_step()
    )
    return x, train, [w.read_value(), tf.nn.embedding_lookup(t, [1, 2])]


def moved(values):
    """By how much: the same everywhere."""
    everything = np.concatenate([np.ravel(value) for value in values])
    np.testing.assert_allclose(everything, everything[0], rtol=1e-6)
    return -everything[0]


def test_max_steps_and_hooks_count_updates(strategy, folder):
    with strategy.scope(local_steps=K), tf.Graph().as_default():
        _, train, fetch = build_small(strategy)
        runs = 0
        hooks = [tf.train.StopAtStepHook(last_step=2)]
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=folder,
            hooks=hooks,
            save_checkpoint_secs=None,
            save_checkpoint_steps=1,
            save_summaries_steps=None,
            log_step_count_steps=None,
        ) as session:
            while not session.should_stop():
                session.run(train)
                runs += 1
    assert runs == 2 * K
    assert [tf.train.load_variable(f"{folder}/model.ckpt-{step}", "w") for step in range(3)] == [
        0.0,
        -1.0,
        -2.0,
    ]


def test_batches_that_fill_no_update_are_dropped_at_the_end_of_the_data(strategy, folder):
    """The last checkpoint is of the last update, and a session that goes on from it starts a new
    mean.
    """

    def train_on(values):
        with strategy.scope(local_steps=K), tf.Graph().as_default():
            x = tf.data.make_one_shot_iterator(
                tf.data.Dataset.from_tensor_slices(np.float32(values))
            ).get_next()
            with strategy.embedding_scope():
                t = tf.get_variable("t", [4, 2], initializer=tf.zeros_initializer())
            loss = tf.reduce_sum(tf.nn.embedding_lookup(t, [1, 2])) * x
            train = tf.train.GradientDescentOptimizer(1.0).minimize(
                loss, tf.train.get_or_create_global_step()
            )
            with tf.train.MonitoredTrainingSession(checkpoint_dir=folder) as session:
                while not session.should_stop():
                    session.run(train)

    def saved(row):
        table = checkpoint.read_table(tf.train.latest_checkpoint(folder), "t")
        return np.concatenate([rows for _, rows in table])[row]

    train_on([1.0] * K + [2.0] * K + [100.0] * (K - 1))
    assert tf.train.latest_checkpoint(folder).endswith("-2")
    np.testing.assert_allclose(saved(1), -3.0, rtol=1e-6)
    train_on([5.0] * K)
    np.testing.assert_allclose(saved(2), -8.0, rtol=1e-6)


def test_saving_in_the_middle_changes_nothing_and_restoring_starts_anew(strategy, folder):
    with strategy.scope(local_steps=K), tf.Graph().as_default():
        x, train, fetch = build_small(strategy)
        saver = tf.train.Saver()

        def run(session, *values):
            for value in values:
                session.run(train, {x: value})
            return moved(session.run(fetch))

        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            assert run(session, *[1.0] * K) == 1.0
            assert run(session, *[8.0] * (K - 1)) == 1.0
            path = saver.save(session, f"{folder}/model.ckpt")
            assert run(session, 2.0) == pytest.approx(1.0 + (8.0 * (K - 1) + 2.0) / K)
            run(session, 100.0)
            saver.restore(session, path)
            assert run(session, *[4.0] * (K - 1)) == 1.0
            assert run(session, 4.0) == pytest.approx(5.0)
        with tf.Session() as session:  # without any initializer
            saver.restore(session, path)
            assert run(session, *[2.0] * (K - 1)) == 1.0
            assert run(session, 2.0) == pytest.approx(3.0)
    names = [name for name, _ in tf.train.list_variables(path)]
    assert not [name for name in names if "local_steps" in name or "alike" in name]


def test_initializing_anew_starts_anew(strategy):
    with strategy.scope(local_steps=K), tf.Graph().as_default():
        x, train, fetch = build_small(strategy)
        with tf.Session() as session:
            for _ in range(2):
                session.run(tf.global_variables_initializer())
                for value in [2.0] * K + [50.0]:
                    session.run(train, {x: value})
                assert moved(session.run(fetch)) == 2.0


def test_data_that_starts_again_goes_on_with_the_sum(strategy):
    with strategy.scope(local_steps=2), tf.Graph().as_default():
        data = tf.data.make_initializable_iterator(
            tf.data.Dataset.from_tensor_slices(np.float32([1.0, 3.0, 8.0]))
        )
        x = data.get_next()
        with strategy.embedding_scope():
            t = tf.get_variable("t", [4, 2], initializer=tf.zeros_initializer())
        train = tf.train.GradientDescentOptimizer(1.0).minimize(
            tf.reduce_sum(tf.nn.embedding_lookup(t, [1, 2])) * x
        )
        rows = tf.nn.embedding_lookup(t, [1, 2])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for want in (2.0, 2.0 + 4.5 + 5.5):  # 1, 3 | 8 and again 1, 3, 8
                session.run(data.initializer)
                with pytest.raises(tf.errors.OutOfRangeError):
                    while True:
                        session.run(train)
                np.testing.assert_allclose(session.run(rows), -want, rtol=1e-6)


def test_a_run_that_is_refused_is_no_batch(strategy):
    """An id outside of the table, in the run that would update."""
    with strategy.scope(local_steps=2), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = tf.get_variable("t", [4, 2], initializer=tf.zeros_initializer())
        ids = tf.placeholder(tf.int64, [None])
        w = tf.get_variable("w", initializer=tf.zeros([]))
        train = tf.train.GradientDescentOptimizer(1.0).minimize(
            tf.reduce_sum(tf.nn.embedding_lookup(t, ids)) + w
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {ids: [1]})
            with pytest.raises(
                (ValueError, tf.errors.InvalidArgumentError), match="id 7 is not in"
            ):
                session.run(train, {ids: [7]})
            np.testing.assert_array_equal(session.run(w), 0.0)
            session.run(train, {ids: [2]})
            np.testing.assert_allclose(session.run([w, tf.nn.embedding_lookup(t, [1])])[0], -1.0)


# ---- What it adds to a graph, and refuses


def test_variables_are_those_of_training_with_the_larger_batch(strategy):
    """So that a checkpoint is the other's start; and without local_steps nothing is added."""
    made = []
    for options in ({}, {"local_steps": 1}, {"local_steps": 2}):
        with strategy.scope(**options), tf.Graph().as_default() as graph:
            loss, _, _ = network(strategy.embedding_scope, [V, D], None, 4)
            op = tf.train.AdamOptimizer().minimize(loss, tf.train.get_or_create_global_step())
            made.append(
                (
                    [v.name for v in tf.global_variables()],
                    [v.name for v in tf.local_variables()],
                    op.name,
                    [op.name for op in tf.get_collection(tf.GraphKeys.TRAIN_OP)],
                )
            )
            added = [op.name for op in graph.get_operations() if "local_steps" in op.name]
            assert bool(added) == (options.get("local_steps", 1) > 1)
    assert made[0] == made[1] == made[2]


def test_ranks_with_different_numbers_of_batches(strategy, rank, size):
    if size == 1:
        return
    with strategy.scope(local_steps=2 + rank), tf.Graph().as_default():
        _, train, _ = build_small(strategy)
        with tf.Session() as session, pytest.raises(RankError, match="local_steps_"):
            session.run(tf.global_variables_initializer())
            session.run(train)


@pytest.mark.parametrize("version", [1, 2])
def test_an_update_inside_a_branch_is_refused(strategy, version):
    if version == 1:
        tf.disable_control_flow_v2()
    try:
        with strategy.scope(local_steps=2), tf.Graph().as_default():
            w = tf.get_variable("w", initializer=tf.zeros([]))
            optimizer = tf.train.GradientDescentOptimizer(1.0)
            gradients = optimizer.compute_gradients(w * 2.0)
            with pytest.raises(NotImplementedError, match="local_steps=2"):
                tf.cond(tf.constant(True), lambda: optimizer.apply_gradients(gradients), tf.no_op)
    finally:
        tf.enable_control_flow_v2()


def test_gradients_that_are_shared_in_part_are_refused(strategy):
    with strategy.scope(local_steps=2), tf.Graph().as_default():
        a, b, c = (tf.get_variable(name, initializer=tf.ones([])) for name in "abc")
        gradients = tf.gradients(a * b * c, [a, b, c])
        (x, y), _ = tf.clip_by_global_norm(gradients[:2], 0.1)
        tf.train.GradientDescentOptimizer(1.0).apply_gradients([(x, a)])
        with pytest.raises(ValueError, match="share all gradients"):
            tf.train.AdamOptimizer().apply_gradients([(y, b), (gradients[2], c)])


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2", None])
def test_the_option_is_a_whole_number(strategy, value):
    with pytest.raises(ValueError, match="local_steps"):
        strategy.scope(local_steps=value)
