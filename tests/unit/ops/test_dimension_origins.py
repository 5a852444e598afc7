"""Dimensions that are said to come from others grow as these do, and the batch's is found again."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.ops.graph.dimension_origins import origins, reduced

W = np.arange(12, dtype=np.float32).reshape(3, 4)

# What is computed of x [b, 3] and ids [b], and which of its dimensions is b, or a multiple.
EXPRESSIONS = {
    "a product": (lambda x, ids: tf.matmul(x, W), 0),
    "a turned product": (lambda x, ids: tf.matmul(W, x, transpose_a=True, transpose_b=True), 1),
    "products of a batch": (lambda x, ids: tf.matmul(x[:, None], x[:, :, None])[:, 0], 0),
    "a product of all with all": (lambda x, ids: tf.matmul(x, x, transpose_b=True), 1),
    "letters": (lambda x, ids: tf.einsum("bi,ij->jb", x, W), 1),
    "a stack": (lambda x, ids: tf.stack([x, x + 1], 1), 0),
    "a stack in front": (lambda x, ids: tf.stack([x[:, 0], x[:, 1]]), 1),
    "what is unstacked": (lambda x, ids: tf.unstack(tf.transpose(x))[1], 0),
    "one after another": (lambda x, ids: tf.concat([x, 2 * x], 0), 0),
    "more columns": (lambda x, ids: tf.concat([x, tf.one_hot(ids, 4)], 1), 0),
    "halves": (lambda x, ids: tf.split(tf.concat([x, x], 0), 2)[1], 0),
    "columns of other sizes": (lambda x, ids: tf.split(x, [1, 2], 1)[1], 0),
    "turned": (lambda x, ids: tf.transpose(x), 1),
    "broadcast from the right": (lambda x, ids: tf.stack([x, x]) * x, 1),
    "a difference to a mean": (lambda x, ids: x - tf.reduce_mean(x, 1, keepdims=True), 0),
    "a sum of columns": (lambda x, ids: tf.reduce_sum(x, -1), 0),
    "the largest": (lambda x, ids: tf.argmax(tf.transpose(x), 0), 0),
    "a slice": (lambda x, ids: x[..., tf.newaxis, 1:], 0),
    "a slice from the right": (lambda x, ids: tf.stack([x, x])[1, ..., 0], 0),
    "squeezed": (lambda x, ids: tf.squeeze(tf.expand_dims(x, 0), [0]), 0),
    "in a row": (lambda x, ids: tf.reshape(x, [-1]), 0),
    "rows of six": (lambda x, ids: tf.reshape(x, [-1, 6]), 0),
    "rows of a table": (lambda x, ids: tf.gather(W, ids), 0),
    "columns of a batch": (lambda x, ids: tf.gather(x, [0, 2], axis=1), 0),
    "columns of a table": (lambda x, ids: tf.gather(W, ids, axis=1), 1),
    "repeated": (lambda x, ids: tf.tile(x, [2, 3]), 0),
    "padded": (lambda x, ids: tf.pad(x, [[0, 0], [1, 1]]), 0),
    "chosen": (lambda x, ids: tf.where(ids > 1, x, -x), 0),
    "cross entropies": (
        lambda x, ids: tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids, logits=x),
        0,
    ),
    "a layer with a bias": (lambda x, ids: tf.nn.bias_add(tf.matmul(x, W), [1.0] * 4), 0),
    "normalized": (lambda x, ids: tf.nn.l2_normalize(x, 1), 0),
    "an image": (lambda x, ids: tf.nn.max_pool(tf.reshape(x, [-1, 1, 3, 1]), 1, 1, "SAME"), 0),
    "products of a batch with one": (lambda x, ids: tf.matmul(W[None, :, 1:], x[:, :, None]), 0),
    "one of each row": (lambda x, ids: tf.gather(x, ids, batch_dims=1), 0),
    "a row of each matrix": (
        lambda x, ids: tf.gather(tf.stack([x, x], 1), ids % 2, batch_dims=1),
        0,
    ),
    "places": (lambda x, ids: tf.gather_nd(W, tf.stack([ids, ids], 1)), 0),
    "a part": (lambda x, ids: tf.slice(x, [0, 1], [-1, 2]), 0),
    "a slice from 0": (lambda x, ids: x[0:, :2], 0),
    "the largest two": (lambda x, ids: tf.nn.top_k(x, 2)[0], 0),
    "a diagonal of all with all": (
        lambda x, ids: tf.linalg.diag_part(tf.matmul(x, x, transpose_b=True)),
        0,
    ),
    "columns made of one": (
        lambda x, ids: tf.broadcast_to(x[:, :1], [tf.shape(x)[0], 5]),
        0,
    ),
    "zeros": (lambda x, ids: tf.fill([tf.unstack(tf.shape(x))[0], 2], 0.0), 0),
    "as often as known later": (
        lambda x, ids: tf.tile(x, [1, tf.placeholder_with_default(2, [])]),
        0,
    ),
    "a product of three dimensions": (
        lambda x, ids: tf.tensordot(x[:, :, None] * W[None, :, :3], W, 1),
        0,
    ),
    "gradients of columns": (
        lambda x, ids: tf.gradients(tf.tanh(tf.matmul(tf.nn.relu(x), W))[:, 1], [x])[0],
        0,
    ),
    "gradients of a part": (
        lambda x, ids: tf.gradients(tf.matmul(tf.concat([x, x], 1), tf.ones([6, 2])), [x])[0],
        0,
    ),
}


def upstream(x, axis):
    """Returns all the dimensions from which one comes, of concatenated parts those of the first."""
    found, stack = {}, [(x, axis)]
    while stack:
        x, axis = stack.pop()
        if (x.name, axis) not in found:
            found[x.name, axis] = x
            stack += [each[0] for each in origins(x, axis)]
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_dimensions_grow_alike(expression):
    make, batch_axis = EXPRESSIONS[expression]
    with tf.Graph().as_default(), tf.Session() as session:
        x, ids = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.int64, [None])
        out = make(x, ids)
        assert {(x.name, 0), (ids.name, 0)} & set(upstream(out, batch_axis))
        for axis in range(out.shape.rank):
            found = upstream(out, axis)
            if axis != batch_axis and "all" not in expression:
                assert not {(x.name, 0), (ids.name, 0)} & set(found)
            shapes = []
            for b in (2, 8):
                feeds = {x: np.ones([b, 3]), ids: np.arange(b) % 3}
                sizes = [tf.shape(each)[at] for (_, at), each in found.items()]
                shapes.append(session.run(sizes, feeds))
            growth = np.divide(*shapes)
            np.testing.assert_array_equal(growth, growth[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda x, ids: tf.where(ids > 0),
        lambda x, ids: tf.unique(ids)[0],
        lambda x, ids: tf.reshape(x, [-1, tf.shape(ids)[0]]),
        lambda x, ids: tf.pad(x, [[0, 1], [0, 0]]),
        lambda x, ids: x[1:],
        lambda x, ids: tf.squeeze(x),
        lambda x, ids: tf.tile(x, [tf.shape(ids)[0], 1]),
    ],
)
def test_other_dimensions_come_from_none(make):
    with tf.Graph().as_default():
        out = make(tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.int64, [None]))
        assert not out.shape.rank or origins(out, 0) == []


def test_parts_of_a_concatenation_give_their_sum_together():
    with tf.Graph().as_default():
        a, b = tf.placeholder(tf.float32, [None]), tf.placeholder(tf.float32, [None])
        assert origins(tf.concat([a, b], 0), 0) == [[(a, 0), (b, 0)]]
        assert origins(tf.stack([a, b], 1), 0) == [[(a, 0)], [(b, 0)]]


@pytest.mark.parametrize(
    "make, names",
    [
        (lambda x, any_: tf.reduce_mean(x), {("x", 0), ("x", 1)}),
        (lambda x, any_: tf.reduce_mean(x, 1), {("x", 1)}),
        (lambda x, any_: tf.nn.l2_loss(x), {("x", 0), ("x", 1)}),
        (lambda x, any_: tf.reduce_mean(tf.square(x - any_)), {("x", 0), ("x", 1)}),
        (lambda x, any_: tf.reduce_mean(tf.exp(tf.squeeze(x))), {("x", 0), ("x", 1)}),
        (lambda x, any_: tf.reduce_mean(any_), set()),
        (lambda x, any_: tf.reduce_mean(x - any_, 0), set()),
        (
            lambda x, any_: tf.reduce_mean(tf.unique(tf.reshape(x - any_, [-1]))[0] - any_),
            {("Unique", 0)},
        ),
    ],
)
def test_a_mean_of_unknown_rank_is_over_what_shows_its_dimensions(make, names):
    with tf.Graph().as_default():
        x, any_ = tf.placeholder(tf.float32, [None, 3], name="x"), tf.placeholder(tf.float32)
        found = {(each.op.name, axis) for each, axis in reduced(make(x, any_).op)}
        assert found == names
