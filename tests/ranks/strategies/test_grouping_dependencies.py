"""Lookups are grouped that need each other, serve several losses or stand in branches."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.ranks import reference
from tests.ranks.grouped import B, both, exchanged, padded, rows_of, same, sparse

pytestmark = [pytest.mark.backends("hb"), pytest.mark.ungrouped, pytest.mark.double]

RNG = np.random.default_rng(12)
IDS = RNG.integers(0, 9, B)
MANY = padded(RNG, 9, 3)
WEIGHTS = RNG.uniform(0.5, 2.0, (B, 3)).astype(np.float32)
FEED = {"ids": IDS, "many": MANY, "weights": WEIGHTS}


def tables(embedding_scope, **dims):
    """Makes tables of 9 rows, by name, of these dimensions."""
    with embedding_scope():
        return {
            name: reference.table(name, 9, dim, seed)
            for seed, (name, dim) in enumerate(dims.items())
        }


def placeholders():
    return {
        "ids": tf.placeholder(tf.int64, [None]),
        "many": tf.placeholder(tf.int64, [None, 3]),
        "weights": tf.placeholder(tf.float32, [None, 3]),
    }


def fed(*names):
    return {name: FEED[name] for name in names}


def check(strategy, rank, size, build, runs, rtol=2e-5, atol=1e-6):
    """Asserts that tables and weights are plain TensorFlow's after `runs`.

    `build` gives them as the fetch 'state'.
    """
    want, got = both(strategy, rank, size, build, [*runs, (["state"], {})])
    same(got[-1], want[-1], rtol, atol)
    return want, got


# ---- Several losses


def test_two_losses_whose_optimizers_share_lookups(strategy, rank, size):
    """Run in turn, and together where neither writes what the other reads."""

    def build(embedding_scope):
        t, p = tables(embedding_scope, a=3, b=3, c=3), placeholders()
        w = tf.get_variable("w", initializer=tf.constant([1.0, -2.0, 0.5]))
        a, b, c = (tf.nn.embedding_lookup(table, p["ids"]) for table in t.values())
        pooled = tf.nn.embedding_lookup_sparse(t["b"], sparse(p["many"]), None, combiner="sum")
        one = tf.reduce_mean(tf.square(a + b))
        two = tf.reduce_mean(tf.square(b * c - w)) + tf.reduce_mean(tf.square(pooled + a))
        three = tf.reduce_mean(tf.square(b * c + pooled))
        descend = tf.train.GradientDescentOptimizer(0.3)
        return {
            "one": tf.train.AdagradOptimizer(0.3).minimize(one),
            "two": tf.train.AdamOptimizer(0.02).minimize(two),
            "three": [
                descend.minimize(one, var_list=[t["a"]]),
                descend.minimize(three, var_list=[t["c"]]),
            ],
            "state": {**rows_of(t), "w": w.read_value()},
        }, p

    names = (["one"], ["two"], ["three"], ["one"], ["two"])
    feeds = {"one": fed("ids"), "two": fed("ids", "many"), "three": fed("ids", "many")}
    check(strategy, rank, size, build, [(run, feeds[run[0]]) for run in names])


def test_gradients_taken_directly_and_twice_and_before_further_lookups(strategy, rank, size):
    def build(embedding_scope):
        t, p = tables(embedding_scope, a=3, b=3), placeholders()
        w = tf.get_variable("w", initializer=reference.table_values(3, 2, 1))
        a = tf.nn.embedding_lookup(t["a"], p["ids"])
        loss = tf.reduce_mean(tf.square(tf.matmul(a, w) - 1.0)) + tf.reduce_mean(
            tf.nn.embedding_lookup(t["b"], p["ids"]) ** 3
        )
        first = tf.gradients(loss, [t["a"], t["b"], w])
        again = tf.gradients([loss, 2.0 * loss], t["a"])
        late = tf.nn.embedding_lookup_sparse(t["b"], sparse(p["many"]), None, combiner="mean")
        last = tf.gradients(tf.reduce_mean(tf.square(late * a)) + loss, [t["a"], t["b"]])
        descend = tf.train.GradientDescentOptimizer(0.2)
        return {
            "first": descend.apply_gradients(zip(first, [t["a"], t["b"], w])),
            "again": descend.apply_gradients([(again[0], t["a"])]),
            "last": tf.train.AdagradOptimizer(0.2).apply_gradients(zip(last, [t["a"], t["b"]])),
            "state": {**rows_of(t), "w": w.read_value()},
        }, p

    runs = [
        (["first"], fed("ids")),
        (["again"], fed("ids")),
        (["last"], fed("ids", "many")),
        (["first"], fed("ids")),
    ]
    check(strategy, rank, size, build, runs)


def test_gradients_with_respect_to_looked_up_rows(strategy, rank, size):
    """They are this rank's own, of its own loss; rows of one lookup are no rows of another of the
    same table.
    """

    def build(embedding_scope):
        t, p = tables(embedding_scope, a=3, b=3), placeholders()
        rows = [
            tf.nn.embedding_lookup(t["a"], p["ids"]),
            tf.nn.embedding_lookup(t["a"], (p["ids"] + 1) % 9),
            tf.nn.embedding_lookup_sparse(t["b"], sparse(p["many"]), None, combiner="mean"),
        ]
        loss = tf.reduce_sum(rows[0] * rows[1] * rows[2])
        gradients = tf.gradients(loss, rows)
        return {
            "gradients": gradients,
            "rows": rows,
            "train": tf.train.AdagradOptimizer(0.1).minimize(
                tf.reduce_mean(tf.square(gradients[0] - 1.0))
            ),
            "state": rows_of(t),
        }, p

    feed = fed("ids", "many")
    want, got = check(
        strategy,
        rank,
        size,
        build,
        [(["gradients"], feed), (["train"], feed), (["rows", "gradients"], feed)],
    )
    for step in (0, 2):
        for name in want[step]:
            for a, b in zip(got[step][name], want[step][name]):
                same(a, reference.part(b, rank, size), rtol=1e-4, atol=1e-5)


def test_penalties_on_gradients_of_looked_up_rows(strategy, rank, size):
    """Second derivatives of the network after the lookups."""

    def build(embedding_scope):
        t, p = tables(embedding_scope, a=3, b=3), placeholders()
        w = tf.get_variable("w", initializer=reference.table_values(6, 2, 1))
        rows = [
            tf.nn.embedding_lookup(t["a"], p["ids"]),
            tf.nn.embedding_lookup_sparse(
                t["b"], sparse(p["many"]), sparse(p["many"], p["weights"]), combiner="sum"
            ),
        ]
        hidden = tf.sigmoid(tf.matmul(tf.concat(rows, 1), w))
        penalty = tf.add_n(
            [tf.reduce_mean(tf.square(g)) for g in tf.gradients(tf.reduce_sum(hidden), rows)]
        )
        train = tf.train.AdagradOptimizer(0.3).minimize(
            tf.reduce_mean(tf.square(hidden - 1.0)) + penalty
        )
        return {"train": train, "state": {**rows_of(t), "w": w.read_value()}}, p

    check(strategy, rank, size, build, [(["train"], FEED)] * 2, rtol=1e-4)


@pytest.mark.grouped
def test_penalties_on_gradients_of_tables(strategy, rank, size):
    """Second derivatives through the exchange. A rank has its part of the whole gradient, each row
    summed once, and the penalty is that of all ranks' parts.

    TensorFlow's own pooling (and with one rank, or ungrouped, it is what pools) has no second
    derivative: the truth pools by hand.
    """
    if size == 1:
        return

    def by_hand(table, ids, weights, root):
        rows = weights.values[:, None] * tf.nn.embedding_lookup(table, ids.values)
        samples = ids.indices[:, 0]
        total = tf.math.segment_sum(weights.values ** (2 if root else 1), samples)[:, None]
        return tf.math.segment_sum(rows, samples) / (tf.sqrt(total) if root else total)

    def pooled(table, ids, weights, root):
        return tf.nn.embedding_lookup_sparse(
            table, ids, weights, combiner="sqrtn" if root else "mean"
        )

    def build(embedding_scope, whole, pool):
        t, p = tables(embedding_scope, a=3, b=2), placeholders()
        w = tf.get_variable("w", initializer=reference.table_values(5, 2, 1))
        many, weights = sparse(p["many"]), sparse(p["many"], p["weights"])
        rows = [
            tf.nn.embedding_lookup(t["a"], p["ids"]) + pool(t["a"], many, weights, False),
            pool(t["b"], many, weights, True),
        ]
        loss = tf.reduce_mean(tf.square(tf.sigmoid(tf.matmul(tf.concat(rows, 1), w)) - 0.3))
        gradients = tf.gradients(loss, list(t.values()))
        parts = [tf.convert_to_tensor(g) if whole else g.values for g in gradients]
        penalty = 20.0 * tf.add_n([tf.reduce_sum(tf.square(part)) for part in parts])
        return {
            "train": tf.train.GradientDescentOptimizer(0.5).minimize(loss + penalty),
            "state": {**rows_of(t), "w": w.read_value()},
        }, p

    runs = [(["train"], FEED)] * 2 + [(["state"], {})]
    want = reference.plain(lambda scope: build(scope, True, by_hand), runs)
    mine = [
        (names, {key: reference.part(value, rank, size) for key, value in feed.items()})
        for names, feed in runs
    ]
    got = reference.sharded(
        strategy, lambda scope: build(scope, False, pooled if size > 1 else by_hand), mine
    )
    same(got[-1], want[-1], rtol=1e-4, atol=1e-5)


# ---- Levels


def test_keys_of_keys_of_keys(strategy, rank, size):
    """Three levels, one of them pooled; tables are looked up at several levels."""

    def build(embedding_scope):
        t, p = tables(embedding_scope, a=9, b=9, c=2), placeholders()
        direct = tf.nn.embedding_lookup(t["b"], p["ids"])
        first = tf.nn.embedding_lookup(t["a"], p["ids"])
        second = tf.nn.embedding_lookup(t["b"], tf.argmax(first, 1))
        again = tf.nn.embedding_lookup(t["a"], tf.argmin(first, 1))
        keys = tf.stack([tf.argmax(second, 1), tf.argmin(again, 1)], 1)
        third = tf.nn.embedding_lookup_sparse(t["c"], sparse(keys), None, combiner="sum")
        loss = tf.reduce_mean(tf.square(first + 2.0 * second - direct + again)) + tf.reduce_mean(
            third**3
        )
        return {
            "train": tf.train.AdagradOptimizer(0.05).minimize(loss),
            "third": third,
            "state": rows_of(t),
        }, p

    want, got = check(strategy, rank, size, build, [(["third", "train"], fed("ids"))] * 2)
    for a, b in zip(got[:-1], want):
        same(a["third"], reference.part(b["third"], rank, size))


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_weights_that_come_from_another_lookup(strategy, rank, size, combiner):
    """Attention: the scores are rows of a table, trained through the weights that they become."""

    def build(embedding_scope):
        t, p = tables(embedding_scope, scores=1, a=3, b=2), placeholders()
        ids = sparse(p["many"])
        scores = tf.exp(tf.nn.embedding_lookup(t["scores"], ids.values)[:, 0])
        attended = tf.nn.embedding_lookup_sparse(
            t["a"], ids, tf.SparseTensor(ids.indices, scores, ids.dense_shape), combiner=combiner
        )
        direct = tf.nn.embedding_lookup_sparse(t["b"], ids, None, combiner=combiner)
        train = tf.train.AdagradOptimizer(0.2).minimize(
            tf.reduce_mean(tf.square(attended)) + tf.reduce_mean(direct**3)
        )
        return {"train": train, "attended": attended, "state": rows_of(t)}, p

    want, got = check(strategy, rank, size, build, [(["attended", "train"], fed("many"))] * 2)
    same(got[1]["attended"], reference.part(want[1]["attended"], rank, size))


def test_keys_that_come_from_attended_rows(strategy, rank, size):
    """Rows weigh rows, whose largest choose rows: each is a level of its own, though the keys of
    two are known at once.
    """

    def build(embedding_scope):
        t, p = tables(embedding_scope, scores=1, a=9, b=2), placeholders()
        ids = sparse(p["many"])
        scores = tf.exp(tf.nn.embedding_lookup(t["scores"], ids.values)[:, 0])
        attended = tf.nn.embedding_lookup_sparse(
            t["a"], ids, tf.SparseTensor(ids.indices, scores, ids.dense_shape), combiner="mean"
        )
        chosen = tf.nn.embedding_lookup(t["b"], tf.argmax(attended, 1))
        train = tf.train.AdagradOptimizer(0.05).minimize(
            tf.reduce_mean(tf.square(attended)) + tf.reduce_mean(chosen**3)
        )
        return {"train": train, "chosen": chosen, "state": rows_of(t)}, p

    want, got = check(strategy, rank, size, build, [(["chosen", "train"], fed("many"))] * 2)
    same(got[0]["chosen"], reference.part(want[0]["chosen"], rank, size))


def test_gradients_with_respect_to_weights(strategy, rank, size):
    """Of weights that are fed: they depend on no variable, and yet someone asks."""

    def build(embedding_scope):
        t, p = tables(embedding_scope, a=3), placeholders()
        rows = tf.nn.embedding_lookup_sparse(
            t["a"], sparse(p["many"]), sparse(p["many"], p["weights"]), combiner="mean"
        )
        return {"gradient": tf.gradients(tf.reduce_sum(tf.square(rows)), p["weights"])[0]}, p

    want, got = both(strategy, rank, size, build, [(["gradient"], fed("many", "weights"))])
    assert np.abs(want[0]["gradient"]).max() > 0.1
    same(got[0]["gradient"], reference.part(want[0]["gradient"], rank, size), rtol=1e-4, atol=1e-5)


def test_rows_of_the_first_level_that_are_fed(strategy, rank, size):
    """What is fed isn't looked up: only the second level is exchanged, whose keys come from what
    was fed.
    """
    with strategy.scope(), tf.Graph().as_default():
        t = tables(strategy.embedding_scope, a=9, b=2)
        ids = tf.placeholder(tf.int64, [None])
        first = tf.nn.embedding_lookup(t["a"], ids)
        second = tf.nn.embedding_lookup(t["b"], tf.argmax(first, 1))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            got = session.run(second, {first: np.eye(9)[[8, 3, rank]]})
            np.testing.assert_allclose(
                got, reference.table_values(9, 2, 1)[[8, 3, rank]], rtol=1e-6
            )
            keys = reference.table_values(9, 9, 0)[[1, 5]].argmax(1)
            np.testing.assert_allclose(
                session.run(second, {ids: [1, 5]}), reference.table_values(9, 2, 1)[keys], rtol=1e-6
            )


# ---- Control flow


@pytest.mark.sample(1)
@pytest.mark.parametrize("version", [1, 2])
def test_lookups_in_branches_and_loops_and_grouped_ones(strategy, rank, size, version):
    """Grouped rows are used inside, keys and rows from inside are used by lookups outside, all are
    trained.
    """

    def build(embedding_scope):
        t, p = tables(embedding_scope, a=3, b=3, c=3), placeholders()
        ids, many = p["ids"], sparse(p["many"])
        a, b = (
            tf.nn.embedding_lookup(t["a"], ids),
            tf.nn.embedding_lookup_sparse(t["b"], many, None, combiner="mean"),
        )
        chosen = tf.cond(
            tf.size(ids) > 0, lambda: a * tf.nn.embedding_lookup(t["c"], ids), lambda: a - b
        )
        pooled = tf.cond(
            tf.size(ids) > 0,
            lambda: tf.nn.embedding_lookup_sparse(t["a"], many, None, combiner="sum") + b,
            lambda: b,
        )
        total = tf.while_loop(
            lambda i, _: i < 2,
            lambda i, x: (i + 1, x + b * tf.nn.embedding_lookup(t["b"], (ids + 1) % 9)),
            [0, tf.zeros_like(a)],
        )[1]
        dependent = tf.nn.embedding_lookup(t["c"], tf.argmax(chosen, 1))
        loss = tf.reduce_mean(tf.square(a + b + chosen + pooled + total + dependent))
        return {
            "train": tf.train.AdagradOptimizer(0.05).minimize(loss),
            "loss": loss,
            "state": rows_of(t),
        }, p

    if version == 1:
        tf.disable_control_flow_v2()
    try:
        check(strategy, rank, size, build, [(["train"], fed("ids", "many"))] * 2, rtol=1e-4)
    finally:
        tf.enable_control_flow_v2()


# ---- What a run needs


def test_a_linear_loss_and_a_lookup_that_is_not_needed(strategy, rank, size):
    """Its gradient needs no row: only the train op is fetched, and the other lookup isn't fed."""
    with strategy.scope(), tf.Graph().as_default():
        t = tables(strategy.embedding_scope, a=3, b=3)
        p = [tf.placeholder(tf.int64, [None]) for _ in range(3)]
        a, b, other = (tf.nn.embedding_lookup(t[name], ids) for name, ids in zip("abb", p))
        part = tf.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_sum(a) + tf.reduce_sum(b))
        both_ = tf.train.GradientDescentOptimizer(1.0).minimize(
            tf.reduce_sum(a) + tf.reduce_sum(other)
        )
        state = rows_of(t)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(part, {p[0]: [1, 8], p[1]: [2, rank]})
            session.run(both_, {p[0]: [1, 8], p[2]: [7]})
            got = session.run(state)
    want = {"a": reference.table_values(9, 3, 0), "b": reference.table_values(9, 3, 1)}
    want["a"][[1, 8]] -= 2.0
    np.add.at(want["b"], [2, 7], -1.0)
    np.add.at(want["b"], list(range(size)), -1.0 / size)
    same(got, want, rtol=1e-5, atol=1e-5)


def test_one_embedding_alone_fed_with_nothing_else(strategy, rank, size):
    """Of lookups that share an exchange, in training and outside it; and a loss whose rows are fed,
    not looked up.
    """
    with strategy.scope(), tf.Graph().as_default():
        t = tables(strategy.embedding_scope, a=3, b=3, c=3)
        t["d"] = tf.get_variable("d", [None, 3], initializer=tf.ones_initializer())
        p = {name: tf.placeholder(tf.int64, [None]) for name in t}
        rows = {name: tf.nn.embedding_lookup(t[name], p[name]) for name in "ad"}
        for name in "bc":
            ids = tf.SparseTensor(
                tf.stack([tf.range(tf.size(p[name], out_type=tf.int64))] * 2, 1), p[name], [3, 3]
            )
            rows[name] = tf.nn.embedding_lookup_sparse(t[name], ids, None, combiner="mean")
        loss = tf.add_n([tf.reduce_sum(row) for row in rows.values()])
        train = tf.train.GradientDescentOptimizer(0.0).minimize(loss)
        values = {name: reference.table_values(9, 3, seed) for seed, name in enumerate("abc")}
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for turn in range(2):
                for name in "abc":
                    got = session.run(rows[name], {p[name]: [rank, 8, 4]})
                    np.testing.assert_allclose(got, values[name][[rank, 8, 4]], rtol=1e-6)
                np.testing.assert_array_equal(
                    session.run(rows["d"], {p["d"]: [5, -7]}), [[float(turn)] * 3] * 2
                )
                session.run(train, {p["a"]: [1], p["b"]: [2], p["c"]: [3], p["d"]: [5, -7]})
            total = session.run(
                loss,
                {rows["a"]: np.ones((2, 3)), p["b"]: [2], rows["c"]: np.ones((4, 3)), p["d"]: [5]},
            )
            np.testing.assert_allclose(total, 6 + 12 + 3 + values["b"][2].sum(), rtol=1e-5)
            if size > 1:
                # keys and rows, once
                assert exchanged(session, rows["a"], {p["a"]: [1]})[0] == 2
