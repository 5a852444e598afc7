"""scope(dense_compression=…) sends gradients of replicated variables in 16 bits.

NumPy and plain TensorFlow give the numbers.
"""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives, dense_allreduce, gate
from collective.ops.graph import graph_analysis
from tests.ranks import reference

# half of the last place of 1
TYPES = {"fp16": (tf.float16, 2.0**-11), "bf16": (tf.bfloat16, 2.0**-8)}


def values_of(rank, shape):
    return np.random.default_rng([rank, *shape]).normal(0, 10, shape).astype(np.float32)


def reduced(strategy, tensors, wire):
    with strategy.scope(), tf.Graph().as_default():
        fed = [tf.placeholder(x.dtype, [None] * x.ndim) for x in tensors]
        zero = gate.gates_of(tf.get_default_graph()).of_collective(fed).zero
        means = dense_allreduce.compressed_mean(fed, wire, collectives.unique_name("means"), zero)
        with tf.Session() as session:
            return session.run(means, dict(zip(fed, tensors)))


@pytest.mark.parametrize("name", TYPES)
def test_means_of_any_shapes_are_rounded_twice(strategy, rank, size, name):
    """Sizes that ranks don't divide, a scalar, nothing at all, double precision."""
    shapes = [(5, 3), (), (0, 4), (1,), (7,)]
    got = reduced(
        strategy,
        [values_of(rank, shape) for shape in shapes] + [values_of(rank, (11,)).astype(np.float64)],
        TYPES[name][0],
    )
    assert got[-1].dtype == np.float64
    for mean, shape in zip(got, [*shapes, (11,)]):
        everyone = np.array([values_of(r, shape) for r in range(size)], np.float64)
        # each value is rounded, then the mean
        bound = TYPES[name][1] * (np.abs(everyone).mean(0) + np.abs(everyone.mean(0))) * 1.01 + 1e-7
        assert mean.shape == shape and np.all(
            np.abs(mean - everyone.mean(0)) <= (bound if size > 1 else 0)
        )


@pytest.mark.parametrize("name", TYPES)
def test_sums_do_not_overflow_and_what_is_infinite_stays(strategy, rank, size, name):
    if size == 1:
        return
    wire = TYPES[name][0]
    special = np.float32([65504.0, -65504.0, np.inf, -np.inf, np.nan])  # float16's largest
    got = reduced(strategy, [special, np.float32([0.0 if rank else 1e6])], wire)
    np.testing.assert_array_equal(got[0], special.astype(wire.as_numpy_dtype).astype(np.float32))
    assert np.isinf(got[1][0]) == (name == "fp16")


@pytest.mark.parametrize("name", TYPES)
def test_it_travels_in_two_bytes(strategy, size, name):
    if size == 1:
        return
    with strategy.scope(dense_compression=name), tf.Graph().as_default() as graph:
        w, b = tf.get_variable("w", [30, 2]), tf.get_variable("b", [2])
        tf.gradients(tf.reduce_sum(tf.matmul(tf.ones([5, 30]), w) + b), [w, b])
        sent = {
            graph_analysis.collective_kind(op.type): op.inputs[0].dtype.size
            for op in graph.get_operations()
            if collectives.collective_name(op)
        }
    assert sent == {"Alltoall": 2, "Allgather": 2}


def build(embedding_scope, penalty=False):
    with embedding_scope():
        t = reference.table("t", 9, 3)
    w = tf.get_variable("w", initializer=reference.table_values(3, 2, 1))
    ids, x = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None, 3])
    loss = tf.reduce_mean(tf.square(tf.matmul(tf.nn.embedding_lookup(t, ids) * x, w) - 1.0))
    if penalty:
        loss += 0.1 * tf.reduce_sum(tf.square(tf.gradients(loss, w)[0]))
    train = tf.train.AdagradOptimizer(0.05).minimize(loss)
    return {"train": train, "w": w.read_value(), "t": tf.nn.embedding_lookup(t, tf.range(9))}, {
        "ids": ids,
        "x": x,
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("penalty", [False, True], ids=["", "penalty"])
@pytest.mark.parametrize("name", ["none", *TYPES])
def test_training_stays_close_to_plain_tensorflow(strategy, rank, size, name, penalty):
    """Also through the gradient of a gradient, whose derivative is compressed, too."""
    ids, x = (
        np.random.default_rng(0).integers(0, 9, 24),
        np.random.default_rng(1).normal(size=(24, 3)).astype(np.float32),
    )
    want = reference.plain(
        lambda s: build(s, penalty), [(["train"], {"ids": ids, "x": x})] * 5 + [(["w", "t"], {})]
    )
    mine = {"ids": reference.part(ids, rank, size), "x": reference.part(x, rank, size)}
    with strategy.scope(dense_compression=name):
        got = reference.sharded(
            strategy, lambda s: build(s, penalty), [(["train"], mine)] * 5 + [(["w", "t"], {})]
        )
    for variable in ("w", "t"):
        error = np.abs(got[-1][variable] - want[-1][variable]).max()
        # five steps of 0.05 at most, each off by a part of what its gradient was rounded by
        assert error <= (1e-5 if name == "none" or size == 1 else 5 * 0.05 * 8 * TYPES[name][1])


def test_another_name_is_refused(strategy):
    with pytest.raises(ValueError, match="'none' or 'fp16' or 'bf16', not 'fp8'"):
        strategy.scope(dense_compression="fp8")
