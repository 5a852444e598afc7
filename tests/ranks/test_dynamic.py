"""Dynamic tables: the static table's numbers for every optimizer, any int64 for a key, and only
training makes rows.
"""

import gc

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2
from hypothesis import given
from hypothesis import strategies as st

import collective
from collective import DynamicTable, TableError
from collective.ops import key_hashing as key_ops
from collective.tables import initializers, row_store
from tests.ranks import reference

pytestmark = [pytest.mark.ranks(1, 3), pytest.mark.double("matrix")]

V, D, B = 20, 3, 12
EXTREME = np.array(
    [-(2**63), -(2**63) + 1, -(2**40), -1, 0, 1, 2**32 - 1, 2**32, 2**32 + 1, 2**62, 2**63 - 1],
    np.int64,
)
OPTIMIZERS = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.5),
    "momentum": lambda: tf.train.MomentumOptimizer(0.1, 0.9),
    "nesterov": lambda: tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "adagrad": lambda: tf.train.AdagradOptimizer(0.1),
    "adam": lambda: tf.train.AdamOptimizer(0.01),
    "ftrl": lambda: tf.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01),
    "rmsprop": lambda: tf.train.RMSPropOptimizer(0.01),
    "centered": lambda: tf.train.RMSPropOptimizer(0.01, momentum=0.9, centered=True),
    "adadelta": lambda: tf.train.AdadeltaOptimizer(1.0),
    "adagrad_da": lambda: tf.train.AdagradDAOptimizer(0.1, tf.train.get_or_create_global_step()),
    "proximal_sgd": lambda: tf.train.ProximalGradientDescentOptimizer(0.1, 0.01, 0.01),
    "proximal_adagrad": lambda: tf.train.ProximalAdagradOptimizer(
        0.1, l1_regularization_strength=0.01
    ),
}


def normal():
    return tf.truncated_normal_initializer(stddev=0.5)


def drawn(keys, name="t", init=None, dim=D):
    """The rows that keys start from, drawn without any rank or table."""
    with tf.Graph().as_default():
        tf.set_random_seed(7)
        fill = initializers.by_key(init or normal(), dim, name)
        return fill(np.asarray(keys, np.int64).view(np.uint64), dim).astype(np.float32)


def ragged(step):
    """Ids without an empty sample: those move row 0 of a static table. Returns (places [K, 2], ids
    [K], weights [K]).
    """
    rng = np.random.default_rng([5, step])
    lengths = rng.integers(1, 4, B)
    places = np.array([(i, j) for i, length in enumerate(lengths) for j in range(length)], np.int64)
    return (
        places,
        np.minimum(rng.zipf(1.4, len(places)) - 1, V - 1),
        rng.uniform(0.5, 2.0, len(places)).astype(np.float32),
    )


def batches(rank, size):
    """Feeds of this rank's share of six global batches."""
    for step in range(6):
        places, ids, weights = ragged(step)
        first, last = rank * B // size, (rank + 1) * B // size
        mine = (places[:, 0] >= first) & (places[:, 0] < last)
        yield {
            "places": places[mine] - [first, 0],
            "ids": ids[mine],
            "weights": weights[mine],
            "dense": np.random.default_rng([6, step]).integers(0, V, B)[first:last],
        }


def model(embedding_scope, optimizer, make, samples):
    """One table in four kinds of lookups, and a dense layer."""
    with embedding_scope():
        t = make()
    p = {
        "places": tf.placeholder(tf.int64, [None, 2]),
        "ids": tf.placeholder(tf.int64, [None]),
        "weights": tf.placeholder(tf.float32, [None]),
        "dense": tf.placeholder(tf.int64, [None]),
    }
    sparse = tf.SparseTensor(p["places"], p["ids"], [samples, 3])
    weights = tf.SparseTensor(p["places"], p["weights"], [samples, 3])
    wide = tf.concat(
        [
            tf.nn.embedding_lookup(t, p["dense"]),
            tf.gather(t, (p["dense"] + 1) % V),
            tf.nn.safe_embedding_lookup_sparse(t, sparse, weights, combiner="mean"),
            tf.nn.embedding_lookup_sparse(t, sparse, None, combiner="sqrtn"),
        ],
        1,
    )
    w = tf.get_variable("w", initializer=tf.constant(reference.table_values(4 * D, 1)))
    loss = tf.reduce_mean(tf.square(tf.matmul(wide, w) - 1.0))
    train = OPTIMIZERS[optimizer]().minimize(loss, global_step=tf.train.get_or_create_global_step())
    return {"train": train, "rows": tf.nn.embedding_lookup(t, tf.range(V)), "w": w}, p


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trained_as_plain_tensorflow_trains_the_static_table(strategy, rank, size, optimizer):
    runs = [(["train"], feed) for feed in batches(0, 1)] + [(["rows", "w"], {})]
    want = reference.plain(
        lambda s: model(
            s,
            optimizer,
            lambda: tf.get_variable(
                "t", [V, D], initializer=tf.constant_initializer(drawn(np.arange(V)))
            ),
            B,
        ),
        runs,
    )
    runs = [(["train"], feed) for feed in batches(rank, size)] + [(["rows", "w"], {})]
    got = reference.sharded(
        strategy,
        lambda s: model(
            s, optimizer, lambda: tf.get_variable("t", [None, D], initializer=normal()), B // size
        ),
        runs,
    )
    assert np.abs(want[-1]["rows"] - drawn(np.arange(V))).max() > 0.002
    np.testing.assert_allclose(got[-1]["rows"], want[-1]["rows"], rtol=2e-4, atol=2e-6)
    np.testing.assert_allclose(got[-1]["w"], want[-1]["w"], rtol=2e-4, atol=2e-6)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "init",
    [
        tf.zeros_initializer(),
        tf.ones_initializer(),
        tf.constant_initializer(2.5),
        tf.constant_initializer([1.0, 2.0, 3.0]),
        tf.random_uniform_initializer(-1, 1),
        tf.random_normal_initializer(),
        tf.truncated_normal_initializer(),
        tf.variance_scaling_initializer(mode="fan_out"),
    ],
    ids=lambda i: type(i).__name__,
)
def test_initial_rows_are_those_of_the_static_table(strategy, init):
    static = (
        init
        if not isinstance(getattr(init, "value", 0), list)
        else tf.constant_initializer(np.tile(init.value, (V, 1)))
    )
    found = []
    for shape, use in (([V, D], static), ([None, D], init)):
        with strategy.scope(), tf.Graph().as_default():
            tf.set_random_seed(7)
            with strategy.embedding_scope():
                t = tf.get_variable("t", shape, initializer=use)
            train, rows = touch(t, np.arange(V))
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(train)
                found.append(session.run(rows))
    np.testing.assert_array_equal(found[0], found[1])


def touch(table, keys):
    """(what trains these keys without moving them, a lookup of them)."""
    ids = tf.constant(np.asarray(keys, np.int64))
    rows = tf.nn.embedding_lookup(table, ids)
    return tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_sum(rows)), rows


def test_extreme_keys_and_the_same_key_new_on_every_rank(strategy, rank, size):
    """All ranks ask for all keys in one step, in another order each: one row for each key, moved by
    the mean gradient.
    """
    with strategy.scope(), tf.Graph().as_default():
        tf.set_random_seed(7)
        t = tf.get_variable("t", [None, D], initializer=normal())
        p = tf.placeholder(tf.int64, [None])
        rows = tf.nn.embedding_lookup(t, p)
        train = tf.train.AdagradOptimizer(0.1).minimize(tf.reduce_sum(rows))
        total, sizes = t.total_count(), collective.embedding_sizes()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            np.testing.assert_array_equal(session.run(rows, {p: EXTREME}), 0)
            assert session.run(total) == 0
            session.run(train, {p: np.roll(EXTREME, rank)})
            assert session.run(total) == len(EXTREME)
            moved = drawn(EXTREME) - 0.1 / np.sqrt(1.1, dtype=np.float32)
            np.testing.assert_allclose(session.run(rows, {p: EXTREME}), moved, rtol=1e-5, atol=1e-6)
            owners = key_ops.owners_np(EXTREME, size)
            assert session.run(sizes)["t"].tolist() == np.bincount(owners, minlength=size).tolist()
            np.testing.assert_array_equal(session.run(t.owners(tf.constant(EXTREME))), owners)
    assert len(np.unique(drawn(EXTREME), axis=0)) == len(EXTREME)


@pytest.mark.parametrize(
    "optimizer",
    [lambda: tf.train.AdagradOptimizer(0.1), lambda: tf.train.AdamOptimizer(0.1)],
    ids=["adagrad", "adam"],
)
def test_updates_in_a_branch_wait_for_the_keys(strategy, optimizer):
    """Slots of rows that are new in this very run have their first values, and Adam goes over these
    rows, too.
    """
    found = []
    for branch in (True, False):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            tables = [tf.get_variable(name, [None, D], initializer=normal()) for name in "tuvw"]
            ids, does = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.bool, [])
            opt = optimizer()
            given = opt.compute_gradients(
                tf.add_n([tf.reduce_sum(tf.nn.embedding_lookup(t, ids)) for t in tables]), tables
            )

            def apply(opt=opt, given=given):
                with tf.control_dependencies([opt.apply_gradients(given)]):
                    return tf.constant(True)

            train = tf.cond(does, apply, lambda: tf.constant(False)) if branch else apply()
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for first in range(0, 30, 10):
                    assert session.run(train, {ids: np.arange(first, first + 10), does: True})
                rows = [
                    np.concatenate([r for _, r in t.export(session)])
                    for t in tables
                    if t.local_count(session)
                ]
                found.append(
                    [
                        *rows,
                        *(
                            slot.column(session).read(np.arange(t.local_count(session) + 1))
                            for t in tables
                            for slot in t.slots
                        ),
                    ]
                )
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


class Handing(tf.train.Optimizer):
    """Has another optimizer do the updates."""

    def __init__(self, inner):
        super().__init__(False, "Handing")
        self._inner = inner

    def _create_slots(self, var_list):
        self._inner._create_slots(var_list)

    def _prepare(self):
        self._inner._prepare()

    def _resource_apply_sparse_duplicate_indices(self, grad, handle, indices):
        return self._inner._resource_apply_sparse_duplicate_indices(grad, handle, indices)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: tf.train.AdagradOptimizer(0.1),
        lambda: tf.train.MomentumOptimizer(0.1, 0.9),
        lambda: tf.train.FtrlOptimizer(0.1),
    ],
    ids=["adagrad", "momentum", "ftrl"],
)
def test_slots_of_an_optimizer_that_another_hands_updates_to(strategy, optimizer):
    found = []
    for hands in (lambda inner: inner, Handing):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            table, ids = (
                tf.get_variable("t", [None, D], initializer=normal()),
                tf.placeholder(tf.int64, [None]),
            )
            train = hands(optimizer()).minimize(
                tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2)
            )
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for first in range(3):
                    session.run(train, {ids: np.arange(first, first + 2000)})
                found.append(np.concatenate([rows for _, rows in table.export(session)]))
    np.testing.assert_allclose(*found, rtol=1e-6, atol=1e-7)


def test_an_unknown_key_has_zeros_whatever_adam_divides_by(strategy):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        table = tf.get_variable("t", [None, D], initializer=normal())
        train = tf.train.AdamOptimizer(0.1, epsilon=0.0).minimize(
            tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2]))
        )
        unknown = tf.nn.embedding_lookup(table, [99])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            np.testing.assert_array_equal(session.run(unknown), 0)


def test_huge_keys_start_from_rows_of_their_own(strategy):
    """k * D + d goes round for huge keys: key 2**63 would be key 0, were the upper half not a
    stream of its own.
    """
    keys = np.array([0, 2**62, -(2**63), -(2**62), 2**32, 2**33], np.int64)
    rows = drawn(keys, dim=4)
    assert len(np.unique(rows)) == rows.size
    many = drawn(np.arange(3000) - 2**62, dim=8)
    assert (
        abs(many.mean()) < 5 * 0.44 / many.size**0.5 and abs(many.std() / (0.5 * 0.8796) - 1) < 0.02
    )


@given(data=st.data())
def test_any_keys_in_any_order(strategy, rank, size, data):
    """Each rank has keys of its own, some of them none: every key has its row, whoever brought it
    and when.
    """
    key = st.one_of(
        st.sampled_from([int(k) for k in EXTREME]),
        st.integers(-(2**63), 2**63 - 1),
        st.integers(0, 5),
    )
    steps = [[data.draw(st.lists(key, max_size=6)) for _ in range(size)] for _ in range(3)]
    with strategy.scope(), tf.Graph().as_default():
        tf.set_random_seed(7)
        t = tf.get_variable("t", [None, D], initializer=normal())
        p = tf.placeholder(tf.int64, [None])
        rows = tf.nn.embedding_lookup(t, p)
        train = tf.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_sum(rows))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for step in steps:
                session.run(train, {p: np.array(step[rank], np.int64)})
            every = np.array([k for step in steps for one in step for k in one], np.int64)
            distinct, times = np.unique(every, return_counts=True)
            want = drawn(distinct) - times[:, None].astype(np.float32) / size
            np.testing.assert_allclose(session.run(rows, {p: distinct}), want, rtol=1e-5, atol=1e-5)
            assert session.run(t.total_count()) == len(distinct)


def test_only_training_inserts(strategy, rank):
    """A run that updates nothing finds no key and leaves none, though it computes a gradient; nor
    does its zero row move.
    """
    with strategy.scope(), tf.Graph().as_default():
        t = collective.get_embedding_variable("t", 2, initializer=tf.ones_initializer())
        ids = tf.placeholder(tf.int64, [None])
        rows = tf.nn.embedding_lookup(t, ids)
        loss = tf.reduce_sum(rows)
        optimizer = tf.train.AdagradOptimizer(0.5)
        gradients = optimizer.compute_gradients(loss)
        train = optimizer.apply_gradients(gradients)
        mean = tf.metrics.mean(rows)[1]
        total = t.total_count()
        sparse = tf.SparseTensor([[0, 0], [0, 1]], tf.constant([1, 2], tf.int64), [1, 2])
        pooled = tf.nn.safe_embedding_lookup_sparse(t, sparse)
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            assert (session.run([rows, gradients[0][0], mean], {ids: [1, 5, 9]})[0] == 0).all()
            assert session.run(total) == 0
            session.run(train, {ids: [1]})
            found = session.run(rows, {ids: [1, 5]})
            assert session.run(total) == 1 and (found[0] != 0).all() and (found[1] == 0).all()
            # an unknown key counts as a row of zeros
            np.testing.assert_allclose(session.run(pooled), found[:1] / 2)


def test_an_update_by_a_session_that_isnt_the_scopes_is_an_error(strategy, size):
    if size > 1:
        return
    with tf.Graph().as_default():
        with strategy.scope():
            t = collective.get_embedding_variable("t", 2)
            train, _ = touch(t, [1])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(tf.errors.InvalidArgumentError, match="inside `with strategy.scope"):
                session.run(train)


def test_strings_and_small_integers_are_keys(strategy):
    with strategy.scope(), tf.Graph().as_default():
        tf.set_random_seed(7)
        t = collective.get_embedding_variable("t", D, key_dtype=tf.string, initializer=normal())
        words = tf.constant(["a", "bc", ""])
        train = tf.train.GradientDescentOptimizer(0.0).minimize(
            tf.reduce_sum(tf.nn.embedding_lookup(t, words))
            + tf.reduce_sum(tf.nn.embedding_lookup(t, [3, -4]))
        )
        hashed = tf.strings.to_hash_bucket_fast(words, 2**63 - 1)
        sparse = tf.sparse.from_dense([["a", "bc"]])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            np.testing.assert_array_equal(
                session.run(tf.nn.embedding_lookup(t, words)), drawn(session.run(hashed))
            )
            np.testing.assert_array_equal(
                session.run(tf.gather(t, tf.constant([3, -4], tf.int32))), drawn([3, -4])
            )
            np.testing.assert_allclose(
                session.run(tf.nn.safe_embedding_lookup_sparse(t, sparse, combiner="sum"))[0],
                drawn(session.run(hashed[:2])).sum(0),
                rtol=1e-6,
            )
    assert len({"t", *drawn([3], "t")[0].tolist()}) == D + 1


PLACES = np.array([[0, 0, 0], [0, 0, 2], [0, 1, 1], [2, 0, 0], [2, 0, 1]], np.int64)


@pytest.mark.sample(6)
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("default", [None, 3])
def test_safe_lookups_are_tensorflows_for_keys_that_it_takes_for_valid(
    strategy, combiner, weighted, default
):
    """Three dimensions, samples without ids, weights that aren't positive; the last samples are
    empty, too.
    """
    ids, weights = np.array([1, 4, 2, 1, 7], np.int64), np.array([1, 0.5, -1, 2, 0], np.float32)

    def lookup(t):
        sparse = tf.SparseTensor(PLACES, ids, [4, 2, 3])
        return tf.nn.safe_embedding_lookup_sparse(
            t,
            sparse,
            tf.SparseTensor(PLACES, weights, [4, 2, 3]) if weighted else None,
            combiner,
            default,
        )

    with tf.Graph().as_default(), tf.Session() as session:
        want = session.run(lookup(tf.constant(drawn(np.arange(8)))))
    with strategy.scope(), tf.Graph().as_default():
        tf.set_random_seed(7)
        t = collective.get_embedding_variable("t", D, initializer=normal())
        rows = lookup(t)
        assert rows.shape.rank == 3 and rows.shape[-1] == D
        train = tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_sum(rows))
        total = t.total_count()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            np.testing.assert_allclose(session.run(rows), want, rtol=1e-6, atol=1e-6)
            used = ids if not weighted or combiner == "sum" else ids[weights > 0]
            assert session.run(total) == len(set(used) | ({default} - {None}))


def test_safe_lookups_keep_negative_keys_and_take_nothing_for_nothing(strategy):
    with strategy.scope(), tf.Graph().as_default():
        tf.set_random_seed(7)
        t = collective.get_embedding_variable("t", D, initializer=normal())
        places, ids = tf.placeholder(tf.int64, [None, 2]), tf.placeholder(tf.int64, [None])
        sparse = tf.SparseTensor(places, ids, [3, 2])
        rows = [
            tf.nn.safe_embedding_lookup_sparse(t, sparse, combiner="sum"),
            tf2.nn.safe_embedding_lookup_sparse([t], sparse, combiner="sum"),
        ]
        train = tf.train.AdamOptimizer(0.0).minimize(tf.reduce_sum(rows[0]))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {places: np.empty((0, 2)), ids: []})
            assert session.run(t.total_count()) == 0
            for r in session.run(rows, {places: np.empty((0, 2)), ids: []}):
                np.testing.assert_array_equal(r, np.zeros((3, D)))
            feed = {places: [[1, 0], [1, 1]], ids: [-1, -5]}
            session.run(train, feed)
            for r in session.run(rows, feed):
                np.testing.assert_allclose(r, [[0] * D, drawn([-1, -5]).sum(0), [0] * D], rtol=1e-6)


def test_a_key_starts_the_same_whenever_it_comes(strategy, rank):
    """Its slot, too: two optimizers, other keys before it, in another session of the same graph."""
    with strategy.scope(), tf.Graph().as_default():
        tf.set_random_seed(7)
        t = collective.get_embedding_variable("t", D, initializer=normal())
        p = tf.placeholder(tf.int64, [None])
        loss = tf.reduce_sum(tf.nn.embedding_lookup(t, p))
        trains = [
            tf.train.AdagradOptimizer(0.1).minimize(loss),
            tf.train.RMSPropOptimizer(0.1).minimize(loss),
        ]
        row = tf.nn.embedding_lookup(t, [42])
        found = []
        for before in ([], [[1, 2, 3], [7], [-9, 2]]):
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for keys in before:
                    session.run(trains[0], {p: keys})
                for train in trains:
                    session.run(train, {p: [42]})
                found.append(session.run(row))
        np.testing.assert_array_equal(found[0], found[1])


def test_rows_are_exported_ascending_and_imported_by_their_owners(strategy, rank, size):
    rng = np.random.default_rng(3)
    keys = np.unique(np.concatenate([rng.integers(-(2**63), 2**63 - 1, 300), EXTREME]))
    shuffled = rng.permutation(keys)
    values = rng.normal(size=(len(keys), D)).astype(np.float32)
    with strategy.scope(), tf.Graph().as_default():
        t = collective.get_embedding_variable("t", D)
        p = tf.placeholder(tf.int64, [None])
        rows = tf.nn.embedding_lookup(t, p)
        train = tf.train.AdagradOptimizer(0.1, initial_accumulator_value=0.5).minimize(
            tf.reduce_sum(rows)
        )
        with tf.train.MonitoredTrainingSession("") as session:
            session.run(train, {p: keys[:10]})
            for first in range(0, len(keys), 100):
                t.import_(session, shuffled[first : first + 100], values[first : first + 100])
            t.import_(session, shuffled[:3], values[:3] + 1)
            values[:3] += 1
            np.testing.assert_array_equal(session.run(rows, {p: shuffled}), values)
            blocks = list(t.export(session, block=7))
            assert all(len(k) == len(r) <= 7 for k, r in blocks)
            mine = np.concatenate([k for k, _ in blocks] or [np.empty(0, np.int64)])
            np.testing.assert_array_equal(mine, keys[key_ops.owners_np(keys, size) == rank])
            by_key = dict(zip(shuffled.tolist(), values))
            for k, r in blocks:
                np.testing.assert_array_equal(r, np.stack([by_key[int(key)] for key in k]))
            # a slot that was there is kept, a new one starts fresh
            session.run(train, {p: keys[8:12]})
            accumulated = np.array([2.5, 2.5, 1.5, 1.5], np.float32)[:, None]
            want = np.stack([by_key[int(k)] for k in keys[8:12]]) - 0.1 / np.sqrt(accumulated)
            np.testing.assert_allclose(
                session.run(rows, {p: keys[8:12]}), want, rtol=1e-5, atol=1e-6
            )


def test_many_keys_ascend_through_several_ranges(strategy, monkeypatch):
    monkeypatch.setattr(row_store, "SORTED_AT_ONCE", 50)
    keys = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 1000)
    held = row_store.host_store(
        5000, 2, np.float32, "t", lambda rows, dim: np.zeros((len(rows), dim))
    )
    held.rows(keys, True)
    found = list(held.ascending(64))
    assert all(len(k) <= 64 for k, _ in found)
    np.testing.assert_array_equal(np.concatenate([k for k, _ in found]), np.sort(keys))
    np.testing.assert_array_equal(
        held.rows(np.sort(keys), False), np.concatenate([r for _, r in found])
    )


def test_what_was_read_replaces_all_at_once(strategy, rank, size):
    """The way of a checkpoint: rows and one slot are given, the other slot starts fresh; the old
    rows are gone.
    """
    keys = np.array([5, -7, 11, 2**50], np.int64)
    rows, accumulators = np.ones((4, D), np.float32) * 3, np.ones((4, D), np.float32) * 4
    with strategy.scope(), tf.Graph().as_default():
        t = collective.get_embedding_variable("t", D, initializer=normal())
        p = tf.placeholder(tf.int64, [None])
        found = tf.nn.embedding_lookup(t, p)
        loss = tf.reduce_sum(found)
        adagrad, momentum = tf.train.AdagradOptimizer(1.0), tf.train.MomentumOptimizer(1.0, 0.5)
        trains = [adagrad.minimize(loss), momentum.minimize(loss)]
        slot = adagrad.get_slot(t, "accumulator")
        total = t.total_count()
        tf.get_default_graph().finalize()
        for start in (False, True):
            with tf.Session() as session:
                if start:
                    session.run([v.initializer for v in tf.global_variables()])
                    session.run(trains[1], {p: [5, 6, 7]})
                loading, mine = t.loading([slot]), key_ops.owners_np(keys, size) == rank
                for block in (slice(0, 3), slice(3, None)):
                    own = mine[block]
                    loading.add(
                        keys[block][own], rows[block][own], {slot.op.name: accumulators[block][own]}
                    )
                loading.assign(session)
                del loading
                assert session.run(total) == 4
                np.testing.assert_array_equal(
                    session.run(found, {p: [6, *keys]}), [[0] * D] + [[3] * D] * 4
                )
                session.run(trains[0], {p: keys})
                np.testing.assert_allclose(
                    session.run(found, {p: keys}), 3 - 1 / np.sqrt(5), rtol=1e-6
                )
                session.run(trains[1], {p: keys})
                np.testing.assert_allclose(
                    session.run(found, {p: keys}), 2 - 1 / np.sqrt(5), rtol=1e-6
                )
                t.initialize_slot_rows(session, [slot])
                assert t.local_count(session) == (key_ops.owners_np(keys, size) == rank).sum()


@pytest.mark.parametrize(
    "way",
    [
        lambda t: tf.convert_to_tensor(t),
        lambda t: tf.matmul(t, tf.ones([3, 1])),
        lambda t: tf.nn.l2_loss(t),
        lambda t: t + 1.0,
        lambda t: t[0],
        lambda t: t.value(),
        lambda t: t.assign(tf.ones([10, 3])),
        lambda t: tf.identity(t),
        lambda t: tf.scatter_update(t, [0], tf.ones([1, 3])),
        lambda t: tf.gather_nd(t, [[0, 1]]),
        lambda t: t.eval(),
        lambda t: tf.get_default_session().run(t),
        lambda t: tf.train.ExponentialMovingAverage(0.9).apply([t]),
    ],
)
def test_what_would_need_all_rows_is_refused(strategy, way):
    with strategy.scope(), tf.Graph().as_default():
        t = tf.get_variable("t", [None, 3])
        # a TableError is one
        with tf.Session(), pytest.raises(TypeError, match="table 't' .*export"):
            way(t)


def test_ragged_keys(strategy):
    """As rows; TensorFlow's own way of pooling them takes negative keys for none, so they are
    pooled as sparse ones.
    """
    with strategy.scope(), tf.Graph().as_default():
        t = tf.get_variable("t", [None, 3], initializer=tf.ones_initializer())
        keys = tf.RaggedTensor.from_row_lengths(tf.constant([7, -1, 7], tf.int64), [1, 0, 2])
        loss = tf.reduce_sum(tf.nn.embedding_lookup(t, keys).flat_values)
        for pooled in (tf.nn.embedding_lookup_sparse, tf.nn.safe_embedding_lookup_sparse):
            with pytest.raises(TableError, match=r"table 't'.*ids\.to_sparse\(\)"):
                pooled(t, keys, None)
        rows = tf.nn.safe_embedding_lookup_sparse(t, keys.to_sparse(), combiner="sum")
        train = tf.train.GradientDescentOptimizer(0.0).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            np.testing.assert_array_equal(session.run(rows), [[1] * 3, [0] * 3, [2] * 3])


def test_an_optimizer_that_goes_over_whole_slots_is_refused(strategy):
    class Own(tf.train.AdamOptimizer):
        def _apply_sparse_shared(self, grad, var, indices, scatter_add):
            m = self.get_slot(var, "m")
            return tf.assign(m, m * 0.9)

    with strategy.scope(), tf.Graph().as_default():
        t = tf.get_variable("t", [None, 3])
        with pytest.raises(TableError, match="a slot of the dynamic table 't'.*single rows"):
            Own(0.1).minimize(tf.reduce_sum(tf.nn.embedding_lookup(t, [1])))


def test_what_makes_a_dynamic_table(strategy):
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            a = tf.get_variable("a", [None, 3], partitioner=tf.fixed_size_partitioner(2))
        with tf.variable_scope("s", initializer=tf.ones_initializer(), reuse=tf.AUTO_REUSE):
            b = collective.get_embedding_variable("b", 4, trainable=False, collections=["mine"])
            assert collective.get_embedding_variable("b", 4) is b
        for table in (a, b):
            assert isinstance(table, DynamicTable)
        assert a.shape.as_list() == [None, 3] and a.name == "a:0" and a in tf.trainable_variables()
        assert (
            b.name == "s/b:0" and b in tf.get_collection("mine") and b not in tf.global_variables()
        )
        with pytest.warns(UserWarning, match="no effect yet"):
            collective.get_embedding_variable("c", 4, ev_option=object())
        glorot, orthogonal = tf.glorot_uniform_initializer(), tf.orthogonal_initializer()
        for wrong, message in (
            (lambda: tf.get_variable("d", [None, 3], initializer=glorot), "fan_out"),
            (lambda: tf.get_variable("e", [None, 3], initializer=orthogonal), "single rows"),
            (lambda: tf.get_variable("f", [None, 3], tf.int32), "floating-point"),
            (lambda: collective.get_embedding_variable("g", 3, key_dtype=tf.float32), "key_dtype"),
            (lambda: collective.get_embedding_variable("h", 0), "positive"),
        ):
            with pytest.raises(ValueError, match=message):
                wrong()


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_other_types_of_values(strategy, dtype):
    with strategy.scope(), tf.Graph().as_default():
        tf.set_random_seed(7)
        t = collective.get_embedding_variable("t", D, value_dtype=dtype, initializer=normal())
        train, rows = touch(t, EXTREME)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            np.testing.assert_allclose(
                session.run(tf.cast(rows, tf.float32)),
                drawn(EXTREME),
                rtol={tf.float16: 1e-3, tf.bfloat16: 1e-2, tf.float64: 1e-7}[dtype],
            )


@pytest.mark.parametrize("version", [1, 2])
def test_lookups_inside_control_flow(strategy, size, version):
    """They answer; their gradient is refused, for TensorFlow would make a matrix of all reserved
    memory of it.
    """
    if version == 1:
        tf.disable_control_flow_v2()
    try:
        with strategy.scope(), tf.Graph().as_default():
            tf.set_random_seed(7)
            t = collective.get_embedding_variable("t", D, initializer=normal())
            ids = tf.constant([1, 2], tf.int64)
            train, rows = touch(t, [1, 2, 3])
            branch = tf.cond(
                tf.shape(ids)[0] > 1,
                lambda: tf.nn.embedding_lookup(t, ids),
                lambda: tf.zeros([2, D]),
            )
            loop = tf.while_loop(
                lambda i, _: i < 3,
                lambda i, x: (i + 1, x + tf.nn.embedding_lookup(t, ids)),
                [0, tf.zeros([2, D])],
            )[1]
            with pytest.raises(TableError, match="look up outside"):
                tf.gradients(branch, t)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(train)
                for got, factor in zip(session.run([branch, loop]), (1, 3)):
                    np.testing.assert_allclose(got, factor * drawn([1, 2]), rtol=1e-6)
    finally:
        tf.enable_control_flow_v2()


def test_a_session_that_is_gone_leaves_no_memory(strategy):
    gc.collect()
    before = len(row_store._registry)

    def use():
        with strategy.scope(), tf.Graph().as_default():
            t = collective.get_embedding_variable("t", D)
            train, _ = touch(t, np.arange(1000))
            with tf.Session() as session:
                for _ in range(3):  # initialized anew, it forgets what was
                    session.run(tf.global_variables_initializer())
                    session.run(train)
                    assert t.local_count(session) <= 1000
                assert len(row_store._registry) <= before + 6

    use()
    gc.collect()
    # TensorFlow lets go of arrays when it next meets Python
    with tf.Graph().as_default(), tf.Session() as session:
        session.run(tf.numpy_function(lambda: np.float32(1), [], tf.float32))
    assert len(row_store._registry) <= before


def test_without_tensorflows_second_version(strategy, rank, size):
    """As after tf.disable_v2_behavior(): shapes are of other numbers, branches and variables of the
    first version.
    """
    switches = ("v2_tensorshape", "control_flow_v2", "resource_variables")
    for name in switches:
        getattr(tf, f"disable_{name}")()
    try:
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            t = collective.get_embedding_variable("t", 2, initializer=tf.ones_initializer())
            column = tf.feature_column.embedding_column(
                collective.feature_column.categorical_column_with_embedding("key"),
                2,
                initializer=tf.ones_initializer(),
            )
            with strategy.embedding_scope():
                out = tf.feature_column.input_layer(
                    {"key": tf.constant([[7], [9]], tf.int64)}, [column]
                )
                static = tf.get_variable("static", [5, 2], initializer=tf.ones_initializer())
            ids = tf.constant([1, 2], tf.int64)
            loss = tf.reduce_sum(
                tf.nn.embedding_lookup(t, ids) + out + tf.nn.embedding_lookup(static, ids)
            )
            train = tf.train.GradientDescentOptimizer(0.5).minimize(loss)
            with tf.train.MonitoredTrainingSession("") as session:
                session.run(train)
                assert session.run(loss) == 2 * 2 * 1.5
    finally:
        for name in switches:
            getattr(tf, f"enable_{name}")()
