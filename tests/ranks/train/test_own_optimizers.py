"""What an optimizer of a script's own computes in its updates is of all ranks' rows, or is refused.

Inside of `_resource_apply_sparse` a table presents itself as this rank's shard.
"""

import pytest
import tensorflow.compat.v1 as tf

from collective import TableError
from tests.ranks import reference
from tests.ranks.gradients.test_gradient_parts import summed
from tests.ranks.training import compare

pytestmark = [pytest.mark.ranks(1, 3), pytest.mark.ungrouped]

V, D = 9, 3


class Own(tf.train.Optimizer):
    """Moves the rows of a table by what `rule(gradient, table, rows)` returns."""

    def __init__(self, rule):
        super().__init__(False, "Own")
        self._rule = rule

    def _resource_apply_dense(self, grad, var):
        return var.assign_sub(0.1 * grad).op

    _apply_dense = _resource_apply_dense

    def _resource_apply_sparse(self, grad, var, indices):
        return tf.raw_ops.ResourceScatterSub(
            resource=var.handle, indices=indices, updates=0.1 * self._rule(grad, var, indices)
        )

    def _apply_sparse(self, grad, var):
        return tf.scatter_sub(
            var, grad.indices, 0.1 * self._rule(grad.values, var, grad.indices)
        ).op


def trust_ratio(g, v, rows):
    return g * tf.norm(v) / (tf.norm(g) + 1e-6)


def trust_ratio_of_rows(g, v, rows):
    return g * tf.norm(tf.gather(v, rows)) / tf.norm(g)


def mean_of_the_table(g, v, rows):
    return g * tf.reduce_mean(tf.abs(v)) * tf.reduce_max(v)


def by_number_of_rows(g, v, rows):
    return g / tf.cast(tf.size(rows), tf.float32) / tf.cast(tf.shape(g)[0], tf.float32)


def by_a_condition_on_it(g, v, rows):
    return tf.cond(tf.size(rows) > 5, lambda: g * 2.0, lambda: g)


def covariance(g, v, rows):
    return tf.matmul(g, tf.matmul(g, g, transpose_a=True))


def norm_of_the_matrix(g, v, rows):
    matrix = tf.scatter_nd(tf.cast(rows, tf.int64)[:, None], g, tf.shape(v, out_type=tf.int64))
    return g / tf.norm(matrix)


def distinct_rows(g, v, rows):
    return g / tf.cast(tf.size(tf.unique(rows)[0]), tf.float32)


RULES = [
    trust_ratio,
    trust_ratio_of_rows,
    mean_of_the_table,
    by_number_of_rows,
    by_a_condition_on_it,
    covariance,
    norm_of_the_matrix,
    distinct_rows,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_over_all_rows(strategy, rank, size, rule):
    def train(loss, variables):
        optimizer = Own(rule)
        gradients = optimizer.compute_gradients(loss, variables)
        applied = optimizer.apply_gradients(
            [(summed(g) if isinstance(g, tf.IndexedSlices) else g, v) for g, v in gradients]
        )
        return {"train": applied}

    compare(strategy, rank, size, train, rtol=1e-4)


REFUSED = {
    "ids": lambda g, v, rows: g * tf.cast(rows, g.dtype)[:, None],
    "mask": lambda g, v, rows: tf.where(tf.equal(rows, 3), tf.zeros_like(g), g),
    "list": lambda g, v, rows: g * tf.gather(tf.linspace(0.0, 1.0, V), rows)[:, None],
    "top_k": lambda g, v, rows: g * tf.nn.top_k(tf.reshape(g, [-1]), 2)[0][-1],
    "first": lambda g, v, rows: g - g[:1],
    "branch": lambda g, v, rows: tf.cond(tf.norm(v) > 0, lambda: g / tf.norm(g), lambda: g),
    "python": lambda g, v, rows: g * tf.py_func(lambda x: x.max(), [g], tf.float32),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_a_rule_that_would_see_one_shard_is_refused(strategy, size, rule):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("t", V, D)
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2, 5]) ** 2)
        train = Own(REFUSED[rule]).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(TableError, match="Own/update_t/.*gradient of table 't'"):
                session.run(train)
