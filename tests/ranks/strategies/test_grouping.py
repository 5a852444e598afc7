"""Lookups of any tables, ids and ways of pooling share three all-to-alls; the numbers stay."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from tests.ranks import reference
from tests.ranks.grouped import B, both, exchanged, padded, rows_of, same, sparse

pytestmark = [
    pytest.mark.ranks(1, 3),
    pytest.mark.backends("hb", "sok"),
    pytest.mark.two_levels,
]

TABLES = {"one": (9, 1), "three": (7, 3), "wide": (40, 16), "widest": (5, 128), "tiny": (1, 3)}
KEYS = 5  # of each dynamic table
COLLECTIVES = {1: (0, 0, 0)}  # one rank exchanges nothing


def batches(steps=3):
    rng = np.random.default_rng(4)
    return [
        {
            "ids": rng.permutation(np.arange(B) % KEYS),
            "dense": rng.integers(0, 40, B),
            "many": padded(rng, 40, 4),
            "few": padded(rng, 40, 3),
            "weights": rng.uniform(0.5, 2.0, (B, 4)).astype(np.float32),
        }
        for _ in range(steps)
    ]


def everything(embedding_scope, dynamic):
    """Builds a step over tables of all dimensions, in all kinds of lookups.

    `dynamic`: two of the tables are dynamic, one of them of strings.
    """
    p = {
        "ids": tf.placeholder(tf.int64, [None]),
        "dense": tf.placeholder(tf.int64, [None]),
        "many": tf.placeholder(tf.int64, [None, 4]),
        "few": tf.placeholder(tf.int64, [None, 3]),
        "weights": tf.placeholder(tf.float32, [None, 4]),
    }
    ones = tf.ones_initializer()
    with embedding_scope():
        t = {name: reference.table(name, *shape) for name, shape in TABLES.items()}
        integers, words = (
            tf.get_variable(name, [None if dynamic else KEYS, dim], initializer=ones)
            for name, dim in (("integers", 3), ("words", 16))
        )

    def as_integers(ids):
        return ids * (2**59 + 1) - 2**61 if dynamic else ids

    def as_words(ids):
        return tf.strings.as_string(ids) if dynamic else ids

    dense, many, few = p["dense"], sparse(p["many"]), sparse(p["few"])
    weights = sparse(p["many"], p["weights"])

    def below(ids, rows):
        return tf.SparseTensor(ids.indices, ids.values % rows, ids.dense_shape)

    features = [
        tf.nn.embedding_lookup(t["one"], dense % 9),
        tf.nn.embedding_lookup(t["one"], tf.cast(dense % 4, tf.int32)),
        tf.nn.embedding_lookup_sparse(t["one"], below(few, 9), None, combiner="sum"),
        tf.reshape(
            tf.nn.embedding_lookup(t["three"], tf.stack([dense % 7, (dense + 3) % 7], 1)), [-1, 6]
        ),
        tf.nn.embedding_lookup(t["wide"], dense),
        tf.gather(t["wide"], dense // 2),
        *(
            tf.nn.embedding_lookup_sparse(t["wide"], ids, w, combiner=combiner, max_norm=norm)
            for combiner in ("sum", "mean", "sqrtn")
            for ids, w, norm in (
                (few, None, None),
                (many, weights, None),
                (many, None, 2.0),
                (many, weights, 2.5),
            )
        ),
        tf.nn.embedding_lookup(t["wide"], dense % 3, max_norm=1.5),
        tf.nn.safe_embedding_lookup_sparse(t["widest"], below(many, 5), weights, combiner="mean"),
        tf.nn.embedding_lookup_sparse(t["widest"], below(few, 5), None, combiner="sqrtn"),
        tf.zeros([tf.shape(dense)[0], 1]) + tf.nn.embedding_lookup(t["widest"], 3)[None],
        tf.nn.embedding_lookup(t["tiny"], dense % 1),
        tf.nn.embedding_lookup(integers, as_integers(p["ids"])),
        tf.nn.embedding_lookup_sparse(
            integers, sparse(p["few"] % KEYS, as_integers(p["few"] % KEYS)), None, combiner="sum"
        ),
        tf.nn.embedding_lookup(words, as_words(p["ids"])),
        tf.nn.embedding_lookup_sparse(
            words, sparse(p["many"], as_words(p["many"] % KEYS)), weights, combiner="mean"
        ),
    ]
    wide = tf.concat(features, 1)
    w = tf.get_variable("w", initializer=tf.constant(reference.table_values(wide.shape[1], 2) / 10))
    loss = tf.reduce_mean(tf.square(tf.matmul(wide, w) - 1.0))
    train = tf.train.AdagradOptimizer(0.1).minimize(loss)
    keys = tf.range(KEYS, dtype=tf.int64)
    state = {
        **rows_of(t),
        "integers": tf.nn.embedding_lookup(integers, as_integers(keys)),
        "words": tf.nn.embedding_lookup(words, as_words(keys)),
        "w": w.read_value(),
    }
    return {"train": train, "wide": wide, "state": state}, p


@pytest.mark.slow
def test_lookups_of_all_kinds_train_as_in_plain_tensorflow(strategy, rank, size):
    runs = [(["train", "wide"], feed) for feed in batches()] + [(["state"], {})]
    want = reference.plain(lambda scope: everything(scope, False), runs)
    mine = [
        (names, {k: reference.part(v, rank, size) for k, v in feed.items()}) for names, feed in runs
    ]
    got = reference.sharded(strategy, lambda scope: everything(scope, True), mine)
    for step, (a, b) in enumerate(zip(got[:-1], want)):
        np.testing.assert_allclose(
            a["wide"],
            reference.part(b["wide"], rank, size),
            rtol=2e-4,
            atol=2e-5,
            err_msg=f"{step}",
        )
    same(got[-1]["state"], want[-1]["state"], rtol=2e-4, atol=2e-5)


@pytest.mark.matrix
@pytest.mark.ranks()
def test_ungrouped_lookups_give_the_same(strategy, rank, size):
    runs = [
        (["train", "wide"], {k: reference.part(v, rank, size) for k, v in feed.items()})
        for feed in batches()
    ]
    runs.append((["state"], {}))
    together = reference.sharded(strategy, lambda scope: everything(scope, True), runs)
    with strategy.scope(grouping=False):
        apart = reference.sharded(strategy, lambda scope: everything(scope, True), runs)
    for a, b in zip(together[:-1], apart):
        same(a["wide"], b["wide"], rtol=1e-6, atol=1e-6)
    same(together[-1], apart[-1], rtol=1e-6, atol=1e-6)


# ---- How much a step exchanges


def many_tables(strategy, tables):
    """Builds a lookup in each of `tables` tables of different dimensions, half of them pooled.

    Returns (train, feeds).
    """
    with strategy.embedding_scope():
        made = [
            tf.get_variable(f"t{i}", [10, (1, 3, 4)[i % 3]], initializer=tf.ones_initializer())
            for i in range(tables)
        ]
    ids = tf.placeholder(tf.int64, [None])
    places = tf.range(tf.size(ids, out_type=tf.int64))
    pairs = tf.SparseTensor(tf.stack([places // 2, places % 2], 1), ids, [3, 2])
    rows = [
        tf.nn.embedding_lookup(t, ids)
        if i % 2
        else tf.nn.embedding_lookup_sparse(t, pairs, None, combiner="sum")
        for i, t in enumerate(made)
    ]
    w = tf.get_variable("w", [], initializer=tf.ones_initializer())
    loss = w * tf.add_n([tf.reduce_mean(row) for row in rows])
    return tf.train.GradientDescentOptimizer(0.1).minimize(loss), {ids: [1, 9, 3, 3, 0]}


@pytest.mark.sample(1)
@pytest.mark.grouped
@pytest.mark.parametrize("tables", [3, 30])
def test_three_all_to_alls_whatever_the_number_of_tables(strategy, size, tables):
    """In addition to one allreduce of the dense gradients and the ranks' one agreement."""
    with strategy.scope(), tf.Graph().as_default():
        train, feed = many_tables(strategy, tables)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, feed)
            assert exchanged(session, train, feed) == COLLECTIVES.get(size, (3, 1, 1))


def test_three_all_to_alls_a_lookup_without_grouping(strategy, size):
    with strategy.scope(grouping=False), tf.Graph().as_default():
        train, feed = many_tables(strategy, 4)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            assert exchanged(session, train, feed) == COLLECTIVES.get(size, (12, 1, 1))


@pytest.mark.grouped
def test_three_more_for_keys_that_come_from_another_lookup(strategy, size):
    """A second level for two tables, in four lookups."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            a, b, c = (
                reference.table(name, 9, dim) for name, dim in (("a", 3), ("b", 3), ("c", 4))
            )
        first = [tf.nn.embedding_lookup(t, [1, 2, 8]) for t in (a, b)]
        second = [tf.nn.embedding_lookup(t, tf.argmax(rows, 1)) for t in (b, c) for rows in first]
        train = tf.train.GradientDescentOptimizer(0.1).minimize(
            sum(tf.reduce_mean(rows) for rows in first + second)
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            assert exchanged(session, train) == COLLECTIVES.get(size, (6, 0, 2))


@pytest.mark.grouped
def test_feature_columns_share_an_exchange(strategy, rank, size):
    rng = np.random.default_rng(6)
    feeds = [
        {
            "a": rng.integers(0, 9, B),
            "b": rng.integers(0, 9, (B, 2)),
            "c": padded(rng, 9, 3, least=0),
        }
        for _ in range(2)
    ]

    def build(embedding_scope):
        p = {
            "a": tf.placeholder(tf.int64, [None]),
            "b": tf.placeholder(tf.int64, [None, 2]),
            "c": tf.placeholder(tf.int64, [None, 3]),
        }
        column = {key: tf.feature_column.categorical_column_with_identity(key, 9) for key in p}

        def values(dim):
            return tf.constant_initializer(reference.table_values(9, dim))

        columns = [
            tf.feature_column.embedding_column(column["a"], 3, initializer=values(3)),
            tf.feature_column.embedding_column(
                column["c"], 4, combiner="sqrtn", initializer=values(4)
            ),
            *tf.feature_column.shared_embedding_columns(
                [column["b"], column["a"]], 2, initializer=values(2)
            ),
        ]
        with embedding_scope():
            layer = tf.feature_column.input_layer(
                {"a": p["a"], "b": p["b"], "c": sparse(p["c"])}, columns
            )
        train = tf.train.AdagradOptimizer(0.3).minimize(tf.reduce_mean(tf.square(layer - 1.0)))
        return {"layer": layer, "train": train}, p

    want, got = both(
        strategy,
        rank,
        size,
        build,
        [(["layer", "train"], feed) for feed in feeds] + [(["layer"], feeds[0])],
    )
    for a, b in zip(got, want):
        same(a["layer"], reference.part(b["layer"], rank, size))
    with strategy.scope(), tf.Graph().as_default():
        fetches, p = build(strategy.embedding_scope)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            feed = {p[key]: reference.part(value, rank, size) for key, value in feeds[0].items()}
            assert exchanged(session, fetches["train"], feed) == COLLECTIVES.get(size, (3, 0, 1))


def test_two_tables_that_are_looked_up_by_the_same_ids(strategy, rank, size):
    def build(embedding_scope):
        with embedding_scope():
            t = {name: reference.table(name, 9, 3, seed) for seed, name in enumerate("ab")}
        ids = tf.placeholder(tf.int64, [None])
        rows = [tf.nn.embedding_lookup(table, ids) for table in t.values()]
        train = tf.train.AdagradOptimizer(0.3).minimize(
            tf.reduce_mean(tf.square(rows[0] - 2 * rows[1]))
        )
        return {"train": train, "rows": rows, "state": rows_of(t)}, {"ids": ids}

    ids = np.random.default_rng(0).integers(0, 9, B)
    want, got = both(
        strategy, rank, size, build, [(["rows", "train"], {"ids": ids})] * 2 + [(["state"], {})]
    )
    same(got[-1], want[-1])
    for a, b in zip(got[1]["rows"], want[1]["rows"]):
        same(a, reference.part(b, rank, size))


# ---- Ranks with little or nothing


def sums(embedding_scope, factor):
    """Builds a loss that is a sum over samples: batches may be of any size.

    `factor` is N, as training takes the mean over ranks.
    """
    with embedding_scope():
        t = {
            name: reference.table(name, rows, dim)
            for name, rows, dim in (("a", 9, 3), ("b", 7, 4), ("c", 5, 1))
        }
    p = {"ids": tf.placeholder(tf.int64, [None]), "many": tf.placeholder(tf.int64, [None, 3])}
    many = sparse(p["many"])
    rows = [
        tf.nn.embedding_lookup(t["a"], p["ids"]),
        tf.nn.embedding_lookup_sparse(t["b"], many, None, combiner="mean"),
        tf.nn.safe_embedding_lookup_sparse(t["c"], many, None, combiner="sum"),
        tf.nn.embedding_lookup_sparse(t["a"], many, None, combiner="sum", max_norm=1.0),
    ]
    loss = factor * tf.add_n([tf.reduce_sum(tf.square(row - 1.0)) for row in rows])
    return {"train": tf.train.AdagradOptimizer(0.1).minimize(loss), "state": rows_of(t)}, p


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "lengths", [(3, 0, 5, 1), (0, 0, 4, 2), (0, 6, 0, 0), (0, 0, 0, 0), (7, 1, 2, 12)]
)
def test_batches_of_unequal_sizes_some_empty(strategy, rank, size, lengths):
    rng = np.random.default_rng(8)
    steps = [
        [(rng.integers(0, 9, n), padded(rng, 5, 3, samples=n)) for n in lengths[:size]]
        for _ in range(2)
    ]
    whole = [
        {
            "ids": np.concatenate([ids for ids, _ in step]),
            "many": np.concatenate([many for _, many in step]),
        }
        for step in steps
    ]
    mine = [dict(zip(("ids", "many"), step[rank])) for step in steps]
    want = reference.plain(
        lambda scope: sums(scope, 1.0), [(["train"], feed) for feed in whole] + [(["state"], {})]
    )
    got = reference.sharded(
        strategy,
        lambda scope: sums(scope, float(size)),
        [(["train"], feed) for feed in mine] + [(["state"], {})],
    )
    same(got[-1]["state"], want[-1]["state"], rtol=1e-4, atol=1e-5)


def test_a_member_with_ids_and_one_without(strategy, rank, size):
    """Each rank feeds one of two lookups only; the other's rows and slots stay."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = {name: reference.table(name, 6, 2) for name in "ab"}
        p = [tf.placeholder(tf.int64, [None]) for _ in t]
        rows = [tf.nn.embedding_lookup(table, ids) for table, ids in zip(t.values(), p)]
        train = tf.train.GradientDescentOptimizer(1.0).minimize(
            tf.reduce_sum(rows[0]) + 2 * tf.reduce_sum(rows[1])
        )
        state = rows_of(t)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {p[rank % 2]: [4], p[1 - rank % 2]: []})
            got = session.run(state)
    for place, name in enumerate("ab"):
        want = reference.table_values(6, 2)
        want[4] -= (place + 1) * sum(r % 2 == place for r in range(size)) / size
        np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=1e-6)


def test_a_lookup_that_is_not_needed_makes_no_rows_of_a_dynamic_table(strategy, rank, size):
    """Training one loss must not insert the keys that another one would look up."""
    with strategy.scope(), tf.Graph().as_default():
        t = [collective.get_embedding_variable(name, 2) for name in "ab"]
        losses = [
            tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant([1, 2 + rank, 9])))
            for table in t
        ]
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        together = optimizer.minimize(losses[0] + losses[1])
        alone = optimizer.minimize(losses[0])
        totals = [table.total_count() for table in t]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(alone)
            assert session.run(totals) == [2 + size, 0]
            session.run(together)
            assert session.run(totals) == [2 + size, 2 + size]


@pytest.mark.parametrize("dynamic", [False, True])
def test_two_features_of_one_table_of_very_different_lengths(strategy, rank, size, dynamic):
    """33 and 1,280 ids, many of them alike, and joined: each feature gets its own rows back."""
    rng = np.random.default_rng(6)
    runs = [(rng.integers(0, 50, 33), rng.integers(20, 70, 1280)) for _ in range(3)]
    named = np.unique(np.concatenate([ids for run in runs for ids in run]))

    def trained(embedding_scope, rows):
        short, long = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.int64, [None])
        with embedding_scope():
            table = tf.get_variable(
                "t", [rows, 3], initializer=tf.constant_initializer(0.5)
            )  # a constant: a dynamic table has it, too
        first = tf.nn.embedding_lookup(table, short)
        second = tf.nn.embedding_lookup(table, long)
        # Each id has a target of its own: a row in the wrong place changes the loss.
        losses = [
            tf.reduce_mean(tf.square(x - factor * tf.cast(ids[:, None], tf.float32)))
            for x, ids, factor in ((first, short, 0.1), (second, long, -0.05))
        ]
        train = tf.train.AdagradOptimizer(0.3).minimize(tf.add_n(losses))
        out = []
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for run in runs:
                feed = dict(zip((short, long), run))
                *seen, _ = session.run([first, second, train], feed)
                out.append(seen)
            out.append(session.run(tf.nn.embedding_lookup(table, named)))
        return out

    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        *seen, got = trained(strategy.embedding_scope, None if dynamic else 70)
    with tf.Graph().as_default():
        *plain_seen, want = trained(contextlib.nullcontext, 70)
    # All ranks train on the same batch: the mean of their losses is one rank's.
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    for rows, plain_rows in zip(seen, plain_seen):
        for x, y in zip(rows, plain_rows):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)
