"""Collectives give NumPy's results, and their gradients the transposed collective's, by hand."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError
from collective.ops.communication import carrier_choice, collectives, gate

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3), pytest.mark.carriers]


def data(rank, rows, dtype=np.float32):
    return np.random.default_rng([rank, rows]).normal(size=(rows, 2)).astype(dtype)


def splits(rank, size):
    return [(rank + k) % 3 for k in range(size)]


def session_run(strategy, build):
    with strategy.scope(), tf.Graph().as_default():
        zero = (
            gate.gates_of(tf.get_default_graph()).of_collective([]).zero
            if collectives.size() > 1
            else 0
        )
        fetches = build(zero)
        tf.get_variable("any", [])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            return session.run(fetches)


@pytest.mark.parametrize(
    "dtype", [tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64]
)
def test_alltoall(strategy, rank, size, dtype):
    mine = data(rank, sum(splits(rank, size)))

    def build(zero):
        out, received = collectives.alltoall(
            tf.cast(mine * 8, dtype), tf.constant(splits(rank, size)), "collective.x", zero
        )
        return tf.cast(out, tf.float64), received

    out, received = session_run(strategy, build)
    want = []
    for k in range(size):
        theirs, cut = data(k, sum(splits(k, size))) * 8, np.cumsum([0] + splits(k, size))
        want.append(theirs[cut[rank] : cut[rank + 1]])
    assert received.tolist() == [splits(k, size)[rank] for k in range(size)]
    want = np.concatenate(want)
    want = np.trunc(want) if dtype.is_integer else want
    np.testing.assert_allclose(
        out, want, rtol={tf.float16: 1e-3, tf.bfloat16: 1e-2}.get(dtype, 1e-6)
    )


def test_gradients_are_the_transposed_collectives(strategy, rank, size):
    """d/dx of the sum over all ranks of f(received), twice, with f = x ** 3 times the receiver's
    number.
    """
    mine = data(rank, sum(splits(rank, size)))

    def build(zero):
        x = tf.constant(mine)
        out, _ = collectives.alltoall(x, tf.constant(splits(rank, size)), "collective.x", zero)
        first = tf.gradients((rank + 1.0) * tf.reduce_sum(out**3), x)[0]
        return first, tf.gradients(tf.reduce_sum(first), x)[0]

    first, second = session_run(strategy, build)
    receiver = np.repeat(np.arange(size), splits(rank, size))[:, None] + 1.0
    np.testing.assert_allclose(first, 3 * receiver * mine**2, rtol=1e-5)
    np.testing.assert_allclose(second, 6 * receiver * mine, rtol=1e-5)


def test_allreduce_and_allgather(strategy, rank, size):
    def build(zero):
        x, y = tf.constant(data(rank, 3)), tf.constant(data(rank, rank + 1))
        a, b = collectives.allreduce_sum([x, x[0]], "collective.sum", zero)
        g = collectives.allgather(y, "collective.all", zero)
        weight = tf.reshape(tf.range(tf.size(g), dtype=tf.float32), tf.shape(g)) * (rank + 1.0)
        return a, b, g, tf.gradients((rank + 1.0) * a[0], x)[0], tf.gradients(g * weight, y)[0]

    a, b, g, da, dg = session_run(strategy, build)
    total = sum(data(k, 3) for k in range(size))
    np.testing.assert_allclose(a, total, rtol=1e-5)
    np.testing.assert_allclose(b, total[0], rtol=1e-5)
    np.testing.assert_array_equal(g, np.concatenate([data(k, k + 1) for k in range(size)]))
    every = sum(k + 1 for k in range(size))
    np.testing.assert_allclose(da, [[every, every], [0, 0], [0, 0]])
    first = sum(k + 1 for k in range(rank)) * 2
    np.testing.assert_allclose(dg, every * np.arange(first, first + 2 * (rank + 1)).reshape(-1, 2))


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_allgather_of_half_precision_keeps_every_bit(strategy, rank, size, dtype):
    """Infinities, the smallest numbers and -0 among them; bfloat16 travels as the bits of another
    type.
    """
    with strategy.scope(), tf.Graph().as_default():
        bits = tf.constant(
            np.array([0x7F80, 0xFF80, 0x8000, 0x0001, 0x3F80 + rank, 0x7BFF], np.uint16)
        )
        zero = gate.gates_of(tf.get_default_graph()).at(1).zero if size > 1 else 0
        got = tf.bitcast(
            collectives.allgather(tf.bitcast(bits, dtype), collectives.unique_name("bits"), zero),
            tf.uint16,
        )
        with tf.Session() as session:
            got = session.run(got).reshape(size, 6)
    if dtype == tf.bfloat16:
        assert got[:, :4].tolist() == [[0x7F80, 0xFF80, 0x8000, 0x0001]] * size
    assert got[:, 4].tolist() == [0x3F80 + r for r in range(size)]


def test_names_are_the_same_on_every_rank_and_unlike_each_other(strategy):
    with tf.Graph().as_default():
        assert [collectives.unique_name("a/b") for _ in range(3)] == [
            "collective.a.b",
            "collective.a.b.1",
            "collective.a.b.2",
        ]
    with tf.Graph().as_default():
        assert collectives.unique_name("a/b") == "collective.a.b"


def trained(strategy, rank, carrier):
    """Returns the losses of three steps by a carrier, and the plan."""
    with strategy.scope(carrier=carrier, plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable("t", [20, 3], initializer=tf.random_normal_initializer(seed=2))
        weights = tf.get_variable("w", [3, 2], initializer=tf.ones_initializer())
        rows = tf.nn.embedding_lookup(table, [1 + rank, 7, 7, 12 + rank])
        loss = tf.reduce_mean(tf.square(tf.matmul(rows, weights) - 1.0))
        train = tf.train.AdagradOptimizer(0.3).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            losses = [session.run([loss, train])[0] for _ in range(3)]
        return losses, strategy.plan()


def test_both_carriers_train_alike_and_the_plan_says_which(strategy, rank, size):
    by_horovod, _ = trained(strategy, rank, "horovod")
    by_memory, plan = trained(strategy, rank, "shared_memory")
    if size <= 2:  # The sum of three gradients has an order.
        assert by_horovod == by_memory
    np.testing.assert_allclose(by_horovod, by_memory, rtol=1e-6)
    if size > 1:
        asked = "scope(carrier='shared_memory')"
        said = {
            "shared_memory": f"shared memory of the ranks of this host, by {asked}",
            "mixed": "shared memory between the ranks of a host, Horovod between hosts, by "
            f"{asked}",
            "horovod": f"Horovod, though {asked} asks for shared memory: "
            "COLLECTIVE_CARRIER=horovod",
        }[carrier_choice.of_agreement()]
        assert f"carrier: {said}" in str(plan)


def test_ranks_that_choose_different_carriers_are_told(strategy, rank, size):
    if size > 1 and carrier_choice.configured() != "horovod":
        with pytest.raises(
            RankError, match=r"'scope\(carrier='shared_memory'\)' is used by rank 0"
        ):
            trained(strategy, rank, "horovod" if rank else "shared_memory")
