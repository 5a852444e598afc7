"""scope(local_steps=k) trains as plain TensorFlow does with a k times larger batch."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.ranks import reference
from tests.ranks.accumulation import B, D, K, V, compare, keys_until, larger, minimize
from tests.ranks.dynamic_tables import MORE_OPTIMIZERS, OPTIMIZERS, drawn, normal

pytestmark = pytest.mark.double


@functools.cache
def larger_by(optimizer):
    return larger(minimize(optimizer), 2)


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "optimizer, kind",
    [
        *itertools.product(OPTIMIZERS, ("static", "dynamic")),
        *zip(MORE_OPTIMIZERS, itertools.cycle(("static", "dynamic"))),
    ],
)
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
    """Clips dense gradients, whose repeated ids are summed: plain TensorFlow takes them apart."""
    gradients = tf.gradients(loss, list(variables.values()))
    if hasattr(variables["t"], "dim"):
        return tf.clip_by_global_norm(gradients, norm)[0]
    return tf.clip_by_global_norm([tf.convert_to_tensor(g) for g in gradients], norm)[0]


@pytest.mark.slow
def test_clipping_by_a_norm_of_all(strategy, rank, size):
    """The norm of the mean isn't the mean of the norms."""

    def train(loss, variables):
        return tf.train.GradientDescentOptimizer(0.5).apply_gradients(
            zip(clipped(loss, variables), variables.values()), tf.train.get_or_create_global_step()
        )

    compare(strategy, rank, size, train)


@pytest.mark.matrix
def test_two_optimizers_that_share_a_norm(strategy, rank, size):
    def train(loss, variables):
        gradients, (t, u, w) = clipped(loss, variables), variables.values()
        one = tf.train.AdagradOptimizer(0.3).apply_gradients([(gradients[0], t), (gradients[2], w)])
        two = tf.train.GradientDescentOptimizer(0.5).apply_gradients(
            [(gradients[1], u)], tf.train.get_or_create_global_step()
        )
        return tf.group(one, two)

    compare(strategy, rank, size, train)


@pytest.mark.matrix
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


@pytest.mark.matrix
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


@pytest.mark.slow
def test_what_a_script_computes_itself_is_summed_up_too(strategy, rank, size):
    """Gradients that come from no tf.gradients, some that do, and one that is no tensor."""

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
    """The gradient that is penalised isn't summed up, the gradient of the penalty is: with a mean
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


@pytest.mark.matrix
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
    """1 + 1e-3 + 1e-3 in float16 is 1.002, rounded; many such additions would each lose a bit."""

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
    assert sorted(rows) == [1, 4]


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
