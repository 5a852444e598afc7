"""Rows and gradients travel rounded, by no more than scope's wire types round."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.ranks import reference
from tests.ranks.grouped import B, padded, sparse

pytestmark = [pytest.mark.backends("sok"), pytest.mark.carriers]

V, D = 30, 5
# half the distance of two numbers near 1
EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
RNG = np.random.default_rng(21)
IDS, MANY = RNG.integers(0, V, B), padded(RNG, V, 6)
FACTORS = RNG.normal(size=(B, D)).astype(np.float32)
VALUES = reference.table_values(V, D)


def build(embedding_scope, factor):
    """Builds a loss that is linear in the rows: its gradient is `FACTORS`, exactly.

    `factor` is N, as training takes the mean.
    """
    with embedding_scope():
        t = [reference.table(name, V, D) for name in ("plain", "pooled")]
    p = {
        "ids": tf.placeholder(tf.int64, [None]),
        "many": tf.placeholder(tf.int64, [None, 6]),
        "factors": tf.placeholder(tf.float32, [None, D]),
    }
    rows = [
        tf.nn.embedding_lookup(t[0], p["ids"]),
        tf.nn.embedding_lookup_sparse(t[1], sparse(p["many"]), None, combiner="sum"),
    ]
    loss = factor * sum(tf.reduce_sum(row * p["factors"]) for row in rows)
    return {
        "rows": rows,
        "train": tf.train.GradientDescentOptimizer(1.0).minimize(loss),
        "after": [tf.nn.embedding_lookup(table, tf.range(V)) for table in t],
    }, p


def step(strategy, rank, size, **options):
    """Takes one step: (this rank's rows of both lookups, the moves of both tables' rows)."""
    feed = {"ids": IDS, "many": MANY, "factors": FACTORS}
    with strategy.scope(**options), tf.Graph().as_default():
        fetches, p = build(strategy.embedding_scope, float(size))
        # What training looks up has its exchange by now; the rows that are looked up for comparison
        # get an exact one.
        with strategy.scope(wire_dtype=None, gradient_wire_dtype=None), tf.Session() as session:
            session.run(tf.global_variables_initializer())
            rows, _ = session.run(
                [fetches["rows"], fetches["train"]],
                {p[key]: reference.part(value, rank, size) for key, value in feed.items()},
            )
            after = session.run(fetches["after"])
    return rows, [VALUES - table for table in after]


def exact(rank, size):
    """Computes in float64 this rank's rows of both lookups and the gradients of both tables.

    Returns them, and the sums of all absolute values in them.
    """
    many = [[i for i in sample if i >= 0] for sample in MANY]
    values, factors = VALUES.astype(np.float64), FACTORS.astype(np.float64)
    rows = [values[IDS], np.stack([values[sample].sum(0) for sample in many])]
    sizes = [np.abs(rows[0]), np.stack([np.abs(values[sample]).sum(0) for sample in many])]
    gradients = np.zeros((2, 2, V, D))  # themselves, and of absolute values; of both tables
    for i, sample in enumerate(many):
        for kind, f in enumerate((factors[i], np.abs(factors[i]))):
            np.add.at(gradients[kind][0], [IDS[i]], f)
            np.add.at(gradients[kind][1], sample, f)
    return (
        [reference.part(x, rank, size) for x in rows],
        [reference.part(x, rank, size) for x in sizes],
        *gradients,
    )


def near(got, want, size, epsilon):
    """Asserts that values are within one rounding of every addend from those of float32."""
    assert (np.abs(got - want) <= (epsilon + 1e-5) * size + 1e-6).all()


def rounded(got, want, size):
    """Tells whether a value is further away than float32 would be."""
    return bool((np.abs(got - want) > 1e-5 * size + 1e-6).any())


def test_by_default_rows_and_gradients_are_exact(strategy, rank, size):
    rows, sizes, gradients, gradient_sizes = exact(rank, size)
    got, moved = step(strategy, rank, size)
    np.testing.assert_array_equal(got[0], reference.part(VALUES[IDS], rank, size))
    near(got[1], rows[1], sizes[1], 0.0)
    for i in range(2):
        near(moved[i], gradients[i], gradient_sizes[i] + 1.0, 0.0)


@pytest.mark.grouped
@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("option", ["wire_dtype", "gradient_wire_dtype"])
def test_what_travels_is_rounded_once(strategy, rank, size, option, dtype):
    """The one that is asked for, not the other. Each table has the rounding of one rank's sum,
    whichever backend sums where.
    """
    rows, sizes, gradients, gradient_sizes = exact(rank, size)
    value = dtype if option == "wire_dtype" else tf.as_dtype(dtype)
    got, moved = step(strategy, rank, size, **{option: value})
    epsilon = {option: EPSILON[dtype]}
    for i in range(2):
        near(got[i], rows[i], sizes[i], epsilon.get("wire_dtype", 0.0))
        near(
            moved[i], gradients[i], gradient_sizes[i] + 1.0, epsilon.get("gradient_wire_dtype", 0.0)
        )
        assert rounded(got[i], rows[i], sizes[i]) == (size > 1 and option == "wire_dtype")
        assert rounded(moved[i], gradients[i], gradient_sizes[i] + 1.0) == (
            size > 1 and option == "gradient_wire_dtype"
        )
    if size > 1 and option == "wire_dtype":
        want = reference.part(VALUES[IDS], rank, size)
        np.testing.assert_array_equal(
            got[0], want.astype(tf.as_dtype(dtype).as_numpy_dtype).astype(np.float32)
        )


def test_a_type_that_nothing_travels_in_is_refused(strategy):
    with pytest.raises(ValueError, match="wire_dtype"):
        strategy.scope(wire_dtype="int8")
