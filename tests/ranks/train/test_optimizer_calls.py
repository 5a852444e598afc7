"""The ways that scripts take from a loss to an update give plain TensorFlow's numbers."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.gradients.table_gradients import TableGradient
from tests.ranks import grouped, reference

V, D = 11, 3
RNG = np.random.default_rng(6)
BATCHES = [
    {"ids": RNG.integers(0, V, grouped.B), "labels": RNG.normal(size=grouped.B)} for _ in range(4)
]


class Model:
    """Holds two tables and a dense layer, and a loss of each table."""

    def __init__(self, embedding_scope, **kwargs):
        with embedding_scope():
            self.t, self.u = (
                reference.table("t", V, D, **kwargs),
                reference.table("u", V, 2, seed=1),
            )
        self.feeds = {
            "ids": tf.placeholder(tf.int64, [None]),
            "labels": tf.placeholder(tf.float32, [None]),
        }
        self.rows = [tf.nn.embedding_lookup(table, self.feeds["ids"]) for table in (self.t, self.u)]
        out = [
            tf.layers.dense(x, 1, kernel_initializer=tf.ones_initializer())[:, 0] for x in self.rows
        ]
        self.losses = [
            tf.reduce_mean(tf.square(y - self.feeds["labels"])) for y in (out[0], tf.add_n(out))
        ]
        self.step = tf.train.get_or_create_global_step()


def sgd(rate=0.1):
    return tf.train.GradientDescentOptimizer(rate)


def minimized(**kwargs):
    return lambda m: tf.train.AdagradOptimizer(0.2).minimize(m.losses[1], m.step, **kwargs)


def changed(change):
    """Changes the gradients of a table and of a matrix between computing and applying them."""

    def train(m):
        optimizer = tf.train.AdagradOptimizer(0.2)
        pairs = [(change(g), v) for g, v in optimizer.compute_gradients(m.losses[1])]
        return optimizer.apply_gradients(pairs, m.step)

    return train


def scaled(gradient):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * 3.0, gradient.indices, gradient.dense_shape)
    return gradient * 3.0


def summed(gradient):
    """Makes plain TensorFlow's gradient dense, which sums repeated ids, as norms here do."""
    plain = isinstance(gradient, tf.IndexedSlices) and not isinstance(gradient, TableGradient)
    return tf.convert_to_tensor(gradient) if plain else gradient


def schedule(m):
    rate = tf.train.piecewise_constant(tf.cast(m.step, tf.int32), [1, 2], [0.3, 0.2, 0.1])
    return tf.train.MomentumOptimizer(
        tf.train.exponential_decay(rate, m.step, 2, 0.5), 0.9
    ).minimize(m.losses[1], m.step)


def several(m):
    first = tf.train.AdamOptimizer(0.05).minimize(m.losses[0], m.step, var_list=[m.t])
    with tf.control_dependencies([first]):
        rest = [v for v in tf.trainable_variables() if v is not m.t]
        return tf.train.RMSPropOptimizer(0.05).minimize(m.losses[1], var_list=rest)


def taken(m):
    variables = tf.trainable_variables()
    gradients = tf.gradients(m.losses, variables, stop_gradients=[m.rows[1]])
    return sgd().apply_gradients([(g, v) for g, v in zip(gradients, variables) if g is not None])


def stopped(m):
    return sgd().minimize(
        tf.reduce_mean(tf.square(m.rows[0] - tf.stop_gradient(m.rows[0][:, ::-1] * 0.5))), m.step
    )


def clipped(m):
    """Clips with entries that are None: the first loss knows nothing of the second table."""
    variables = tf.trainable_variables()
    gradients, _ = tf.clip_by_global_norm(
        list(map(summed, tf.gradients(m.losses[0], variables))), 0.01
    )
    assert None in gradients
    return sgd().apply_gradients(zip(gradients, variables), m.step)


def penalised(m):
    """Adds a gradient of a gradient, by rows (each rank's own) and by a matrix (everyone's)."""
    kernel = tf.trainable_variables()[2]
    of_rows, of_kernel = (
        tf.gradients(m.losses[1], [m.rows[0]])[0],
        tf.gradients(m.losses[1], [kernel])[0],
    )
    # of the mean loss: each sample's is divided by how many there are
    count = tf.cast(tf.shape(of_rows)[0], tf.float32)
    penalty = tf.reduce_mean(tf.reduce_sum(tf.square(of_rows * count), 1)) + tf.reduce_sum(
        tf.square(of_kernel)
    )
    return sgd(0.01).minimize(m.losses[1] + 0.1 * penalty, m.step)


def by_keras(m):
    out = tf.layers.dense(m.rows[0], 1, kernel_initializer=tf.ones_initializer())
    labels = tf.cast(m.feeds["labels"][:, None] > 0, tf.float32)
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)(
        labels, out
    ) + tf.keras.losses.MeanSquaredError()(labels, out)
    return sgd().minimize(loss, m.step)


WAYS = {
    "minimize": minimized(),
    "var_list": lambda m: minimized(var_list=[m.u, tf.trainable_variables()[2]])(m),
    "gate_none": minimized(gate_gradients=tf.train.Optimizer.GATE_NONE),
    "gate_graph": minimized(gate_gradients=tf.train.Optimizer.GATE_GRAPH),
    "colocate": minimized(colocate_gradients_with_ops=True),
    "grad_loss": lambda m: minimized(grad_loss=tf.constant(2.0))(m),
    "aggregation": minimized(aggregation_method=tf.AggregationMethod.EXPERIMENTAL_TREE),
    "scaled": changed(scaled),
    "clip_by_norm": changed(lambda g: tf.clip_by_norm(summed(g), 0.05)),
    "schedule": schedule,
    "several": several,
    "taken": taken,
    "stopped": stopped,
    "clipped": clipped,
    "penalised": penalised,
    "keras_losses": by_keras,
}


def compared(strategy, rank, size, build):
    """Asserts that four steps end with the same tables, weights and step."""
    names = []

    def built(embedding_scope):
        model, train = build(embedding_scope)
        trained = {v.op.name: v for v in tf.trainable_variables()}
        names[:] = [
            *trained,
            "step",
            *(["frozen"] if model.t not in tf.trainable_variables() else []),
        ]
        return {"train": train, "step": model.step, "frozen": model.t, **trained}, model.feeds

    with tf.Graph().as_default():
        built(lambda: tf.name_scope(None))
    want, got = grouped.both(
        strategy, rank, size, built, [*((["train"], b) for b in BATCHES), (names, {})]
    )
    grouped.same(got[-1], want[-1])


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_an_update(strategy, rank, size, way):
    def build(embedding_scope):
        model = Model(embedding_scope)
        return model, WAYS[way](model)

    compared(strategy, rank, size, build)


def test_a_table_that_is_not_trained(strategy, rank, size):
    def build(embedding_scope):
        model = Model(embedding_scope, trainable=False)
        return model, minimized()(model)

    compared(strategy, rank, size, build)


@pytest.mark.slow
def test_an_optimizer_made_before_scope(strategy, rank, size):
    for make in (lambda: tf.train.AdamOptimizer(0.1), lambda: tf.train.FtrlOptimizer(0.1)):
        optimizers = [make(), make(), make()]  # one serves one graph

        def build(embedding_scope, optimizers=optimizers):
            model = Model(embedding_scope)
            return model, optimizers.pop().minimize(model.losses[1], model.step)

        compared(strategy, rank, size, build)


def test_a_constraint_of_a_table_is_refused(strategy, rank, size):
    """As TensorFlow refuses it for a sparsely updated variable."""
    with strategy.scope(), tf.Graph().as_default():
        model = Model(strategy.embedding_scope, constraint=lambda rows: tf.maximum(rows, 0.0))
        with pytest.raises(RuntimeError, match="constraint"):
            sgd().minimize(model.losses[1])


def second_order(m):
    """Takes Newton's direction of the kernel of a layer after a table.

    It comes by its hessian and by a jacobian of per-sample losses.
    """
    kernel = tf.trainable_variables()[2]
    gradient = tf.gradients(m.losses[0], [kernel])[0]
    hessian = tf.reshape(tf.hessians(m.losses[0], [kernel])[0], [D, D])
    step = tf.linalg.solve(hessian + tf.eye(D), gradient)
    return tf.group(
        tf.assign_sub(kernel, step), sgd().minimize(m.losses[0], m.step, var_list=[m.t])
    )


@pytest.mark.slow
def test_hessians(strategy, rank, size):
    def build(embedding_scope):
        model = Model(embedding_scope)
        return model, second_order(model)

    compared(strategy, rank, size, build)


def test_jacobians(strategy, rank, size):
    """Of a vector that all ranks have: row by row the mean of theirs, as gradients are."""

    def build(embedding_scope):
        model = Model(embedding_scope)
        kernel = tf.trainable_variables()[2]
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            out = tf.matmul(tf.nn.embedding_lookup(model.t, model.feeds["ids"]), kernel)[:, 0]
            losses = tf.stack(
                [tf.reduce_mean(tf.square(out - model.feeds["labels"])), tf.reduce_mean(out)]
            )
        return {"jacobian": tape.jacobian(losses, kernel, experimental_use_pfor=False)}, model.feeds

    want, got = grouped.both(strategy, rank, size, build, [(["jacobian"], BATCHES[0])])
    grouped.same(got[0], want[0])


def test_nan_gradients_of_one_rank(strategy, rank, size):
    """Of one sample: what it touches becomes NaN, as in one process, and nothing else."""

    def build(embedding_scope):
        model = Model(embedding_scope)
        return {"train": sgd().minimize(model.losses[0]), "t": model.t, "u": model.u}, model.feeds

    bad = {
        **BATCHES[0],
        "labels": np.where(np.arange(grouped.B) == grouped.B - 1, np.nan, BATCHES[0]["labels"]),
    }
    want, got = grouped.both(strategy, rank, size, build, [(["train"], bad), (["t", "u"], {})])
    for name in ("t", "u"):
        np.testing.assert_allclose(
            got[1][name], want[1][name], rtol=2e-5, atol=1e-6, equal_nan=True
        )
