"""Whole models as people write them train some steps as in plain TensorFlow.

Where the loss of a sample depends on which others are in its batch, the truth is the ranks' parts
in one graph and the mean of their losses; else it is the global batch.
"""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.ranks import grouped, reference

USERS, ITEMS, D = 23, 17, 4
RNG = np.random.default_rng(11)
STEPS = [
    {
        "user": RNG.integers(0, USERS, grouped.B),
        "item": RNG.integers(0, ITEMS, grouped.B),
        "history": grouped.padded(RNG, ITEMS, 5, least=0),
        "rating": RNG.normal(size=grouped.B),
        "age": RNG.normal(size=(grouped.B, 1)),
        "city": RNG.choice(["a", "b", "c", "d"], grouped.B),
    }
    for _ in range(5)
]


def inputs(name=""):
    kinds = {
        "user": (tf.int64, [None]),
        "item": (tf.int64, [None]),
        "history": (tf.int64, [None, 5]),
        "rating": (tf.float32, [None]),
        "age": (tf.float32, [None, 1]),
        "city": (tf.string, [None]),
    }
    return {key: tf.placeholder(kind, shape, key + name) for key, (kind, shape) in kinds.items()}


def tower(x, widths, name):
    with tf.variable_scope(name, reuse=tf.AUTO_REUSE):
        for i, width in enumerate(widths):
            x = tf.layers.dense(
                x,
                width,
                tf.nn.relu if i + 1 < len(widths) else None,
                name=f"dense{i}",
                kernel_initializer=tf.glorot_uniform_initializer(seed=i + 3),
            )
    return x


class MatrixFactorisation:
    """Multiplies rows and adds biases, all tables, penalised by the looked-up rows; by Adam."""

    def __init__(self, embedding_scope):
        with embedding_scope():
            self.tables = [
                reference.table("users", USERS, D),
                reference.table("items", ITEMS, D),
                reference.table("user_bias", USERS, 1),
                reference.table("item_bias", ITEMS, 1),
            ]
        self.mean = tf.get_variable("mean", [], initializer=tf.zeros_initializer())

    def loss(self, f):
        ids = [f["user"], f["item"]] * 2
        p, q, a, b = (tf.nn.embedding_lookup(table, x) for table, x in zip(self.tables, ids))
        predicted = tf.reduce_sum(p * q, 1) + a[:, 0] + b[:, 0] + self.mean
        penalty = tf.reduce_mean(tf.reduce_sum(tf.square(p) + tf.square(q), 1))
        return tf.losses.mean_squared_error(f["rating"], predicted) + 0.02 * penalty

    def train(self, loss, step):
        return tf.train.AdamOptimizer(0.05).minimize(loss, step)


class WideAndDeep:
    """Adds a linear model over crossed columns (Ftrl) to embeddings and a network (Adagrad)."""

    def __init__(self, embedding_scope):
        self.scope = embedding_scope

    def loss(self, f):
        column = tf.feature_column
        user, item = (
            column.categorical_column_with_identity(k, n)
            for k, n in (("user", USERS), ("item", ITEMS))
        )
        city = column.categorical_column_with_vocabulary_list(
            "city", ["a", "b", "c"], num_oov_buckets=1
        )
        found = {key: f[key] for key in ("user", "item", "city", "age")}
        with self.scope(), tf.variable_scope("wide", reuse=tf.AUTO_REUSE):
            wide = column.linear_model(
                found, [user, city, column.crossed_column(["city", item], 40)]
            )
        with self.scope(), tf.variable_scope("deep", reuse=tf.AUTO_REUSE):
            deep = column.input_layer(
                found,
                [
                    column.embedding_column(c, D, initializer=tf.constant_initializer(0.1))
                    for c in (user, item, city)
                ]
                + [column.numeric_column("age")],
            )
        logits = wide + tower(deep, [8, 1], "network")
        return tf.losses.sigmoid_cross_entropy(
            tf.cast(f["rating"][:, None] > 0, tf.float32), logits
        )

    def train(self, loss, step):
        wide, deep = (
            tf.trainable_variables("wide"),
            tf.trainable_variables("deep") + tf.trainable_variables("network"),
        )
        ftrl = tf.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01)
        with tf.control_dependencies([ftrl.minimize(loss, var_list=wide)]):
            return tf.train.AdagradOptimizer(0.1).minimize(loss, step, var_list=deep)


class TwoTowers:
    """Matches histories to items by `sampled_softmax_loss`; all batches have the same negatives."""

    def __init__(self, embedding_scope):
        with embedding_scope():
            self.users, self.items = (
                reference.table("users", USERS, D),
                reference.table("items", ITEMS, D),
            )
            self.out = reference.table("out", ITEMS, D, seed=2)
        self.biases = tf.get_variable("biases", [ITEMS], initializer=tf.zeros_initializer())

    def loss(self, f):
        seen = tf.nn.safe_embedding_lookup_sparse(
            self.items, grouped.sparse(f["history"]), combiner="mean"
        )
        x = tower(
            tf.concat([tf.nn.embedding_lookup(self.users, f["user"]), seen], 1), [6, D], "tower"
        )
        samples = (
            tf.constant([2, 3, 5, 7, 11], tf.int64),
            tf.fill([tf.shape(x)[0], 1], 0.5),
            tf.fill([5], 0.4),
        )
        return tf.reduce_mean(
            tf.nn.sampled_softmax_loss(
                self.out, self.biases, f["item"][:, None], x, 5, ITEMS, sampled_values=samples
            )
        )

    def train(self, loss, step):
        rate = tf.train.exponential_decay(0.2, step, 2, 0.7)
        return tf.train.AdagradOptimizer(rate).minimize(loss, step)


class InBatchNegatives(TwoTowers):
    """Takes every other item of the batch for a negative: each rank's batch is one of its own."""

    apart = True

    def loss(self, f):
        seen = tf.nn.safe_embedding_lookup_sparse(
            self.items, grouped.sparse(f["history"]), combiner="sqrtn"
        )
        user = tower(
            tf.concat([tf.nn.embedding_lookup(self.users, f["user"]), seen], 1), [6, D], "user"
        )
        item = tower(tf.nn.embedding_lookup(self.out, f["item"]), [D], "item")
        logits = tf.matmul(user, item, transpose_b=True) + tf.gather(self.biases, f["item"])[None]
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=tf.range(tf.shape(user)[0]), logits=logits
            )
        )


class EvaluatedBeside(MatrixFactorisation):
    """Evaluates a copy of the model in the same graph between steps, which changes nothing."""

    def evaluation(self):
        f = inputs("_evaluated")
        return f, self.loss(f)


def trained(script, scope, embedding_scope, step_feeds, parts):
    """Returns (losses, values of all trained variables) after the steps.

    `parts` copies of the loss have a share of the batch each.
    """
    with scope, tf.Graph().as_default():
        tf.set_random_seed(3)
        model = script(embedding_scope)
        copies = [inputs(f"_{i}") for i in range(parts)]
        losses = [model.loss(f) for f in copies]
        loss = tf.add_n(losses) / parts
        train = model.train(loss, tf.train.get_or_create_global_step())
        evaluation = model.evaluation() if hasattr(model, "evaluation") else None
        values = {v.op.name: v for v in tf.trainable_variables()}
        out = []
        with tf.train.MonitoredTrainingSession("") as session:
            for batches in step_feeds:
                out.append(
                    session.run(
                        [loss, train],
                        {f[k]: v for f, b in zip(copies, batches) for k, v in b.items()},
                    )[0]
                )
                if evaluation:
                    session.run(evaluation[1], {evaluation[0][k]: v for k, v in batches[0].items()})
            return out, session.run(values)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "script",
    [MatrixFactorisation, WideAndDeep, TwoTowers, InBatchNegatives, EvaluatedBeside],
    ids=lambda script: script.__name__,
)
def test_scripts(strategy, rank, size, script):
    def share(batch, r):
        return {k: reference.part(v, r, size) for k, v in batch.items()}

    apart = getattr(script, "apart", False)
    want = trained(
        script,
        contextlib.nullcontext(),
        contextlib.nullcontext,
        [[share(b, r) for r in range(size)] if apart else [b] for b in STEPS],
        size if apart else 1,
    )
    got = trained(
        script, strategy.scope(), strategy.embedding_scope, [[share(b, rank)] for b in STEPS], 1
    )
    np.testing.assert_allclose(np.mean(grouped.everyone(got[0]), 0), want[0], rtol=2e-5)
    grouped.same(got[1], want[1], rtol=2e-4, atol=2e-6)
