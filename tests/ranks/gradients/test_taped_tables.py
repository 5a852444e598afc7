"""A tape trains tables that are read in branches, loops and functions, as plain TensorFlow does."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

import collective
from tests.ranks import grouped, reference
from tests.ranks.keras.models import keras

pytestmark = [pytest.mark.either_backend, pytest.mark.double]

V, D, STEPS = 11, 3, 2
RNG = np.random.default_rng(8)
BATCHES = [
    {"ids": RNG.integers(0, V, grouped.B), "x": RNG.normal(size=(grouped.B, V)).astype(np.float32)}
    for _ in range(STEPS)
]


READS = {
    "rows": lambda table, ids, x: tf.nn.embedding_lookup(table, ids),
    "gathered": lambda table, ids, x: tf.gather(table, ids),
    "pooled": lambda table, ids, x: tf.nn.safe_embedding_lookup_sparse(
        table, tf.sparse.from_dense(tf.one_hot(ids, V, dtype=tf.int64) * ids[:, None])
    ),
    "all": lambda table, ids, x: tf.matmul(x, table),
}


def in_branch(read, ids, x):
    return tf.cond(
        tf.reduce_max(ids) >= 0, lambda: read(ids, x), lambda: tf.zeros([tf.shape(ids)[0], D])
    )


def in_loop(read, ids, x):
    return tf.while_loop(
        lambda i, _: i < 2,
        lambda i, total: (i + 1, total + read(ids, x)),
        [0, tf.zeros([tf.shape(ids)[0], D])],
    )[1]


def by_record(read, ids, x):
    one = lambda each: read(each[0][None], each[1][None])[0]  # noqa: E731
    return tf.map_fn(one, (ids, x), fn_output_signature=tf.float32)


PLACES = {
    "directly": lambda read, ids, x: read(ids, x),
    "in a branch": in_branch,
    "in a branch of a branch": lambda read, ids, x: in_branch(
        lambda ids, x: in_branch(read, ids, x), ids, x
    ),
    "in a function": lambda read, ids, x: tf2.function(read)(ids, x),
}
IN_LOOPS = {
    "in a loop": in_loop,
    "by record": by_record,
    "by record, in a branch": lambda read, ids, x: in_branch(
        lambda ids, x: by_record(read, ids, x), ids, x
    ),
}


def squares(rows):
    return tf.reduce_mean(tf.reduce_sum(rows**2, 1))


@pytest.mark.parametrize("is_callable", [False, True])
@pytest.mark.parametrize(
    "place, read",
    [
        *((place, read) for place in PLACES for read in READS),
        *((place, "all") for place in IN_LOOPS),
    ],
)
def test_in_a_graph(strategy, rank, size, place, read, is_callable):
    def build(embedding_scope):
        with embedding_scope():
            table = reference.table("t", V, D)
        ids, x = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None, V])

        def loss():
            one = lambda ids, x: READS[read](table, ids, x)  # noqa: E731
            return squares({**PLACES, **IN_LOOPS}[place](one, ids, x)) + squares(one(ids, x)) / 2

        optimizer = tf.train.AdagradOptimizer(0.3)
        if is_callable:
            train = optimizer.minimize(loss, var_list=[table])
        else:
            with tf2.GradientTape() as tape:
                value = loss()
            train = optimizer.apply_gradients([(tape.gradient(value, table), table)])
        return {"train": train, "t": table}, {"ids": ids, "x": x}

    runs = [*((["train"], batch) for batch in BATCHES), (["t"], {})]
    want, got = grouped.both(strategy, rank, size, build, runs)
    grouped.same(got[-1], want[-1])


@pytest.mark.parametrize("is_taped", [False, True])
def test_a_loop_with_ids_of_rows_that_are_looked_up_outside_too(strategy, rank, size, is_taped):
    """The loop's gradients, and lookups that wait for them, are exchanged in one order."""

    def build(embedding_scope):
        with embedding_scope():
            tables = [reference.table(name, V, D, seed) for seed, name in enumerate("tu")]
        dense = tf.get_variable("dense", initializer=reference.table_values(V, D, 2))
        ids = tf.placeholder(tf.int64, [None])

        def read(variable, ids):
            first = tf.nn.embedding_lookup(variable, ids)[:, 0]
            ids = tf.cast(tf.abs(first) * 30.0, tf.int64) % V
            return tf.nn.embedding_lookup(variable, ids)

        def turn(total, i):
            rows = [read(variable, (ids + i) % V) for variable in (*tables, dense)]
            return tf.tanh(total + tf.add_n(rows))

        with tf2.GradientTape(persistent=True) as tape:
            start = tf.zeros([tf.shape(ids)[0], D])
            loop = tf.scan(turn, tf.range(3, dtype=tf.int64), start)[-1]
            one = squares(loop) + squares(read(tables[0], ids)) / 2
            two = squares(read(tables[0], ids) + read(tables[1], ids))
        gradient = tape.gradient if is_taped else tf.gradients
        pairs = [*zip(gradient(one, [tables[0], dense]), [tables[0], dense])]
        pairs += zip(gradient(two, [tables[1]]), [tables[1]])
        with tf.control_dependencies([one, two]):  # which read what is written
            train = tf.train.GradientDescentOptimizer(0.1).apply_gradients(pairs)
        return {"train": train, "all": [*tables, dense]}, {"ids": ids}

    runs = [*((["train"], {"ids": batch["ids"]}) for batch in BATCHES), (["all"], {})]
    want, got = grouped.both(strategy, rank, size, build, runs)
    grouped.same(dict(enumerate(got[-1]["all"])), dict(enumerate(want[-1]["all"])))


@pytest.mark.parametrize("place", ["directly", "in a branch", *IN_LOOPS])
def test_all_rows_in_a_function(strategy, rank, size, place):
    """Of a `tf.function` that eager code calls: the table is read once, outside of the loop."""

    def trained(embedding_scope, batches):
        with embedding_scope():
            layer = keras.layers.Embedding(V, D)
            layer.build([None])
        layer.set_weights([reference.table_values(V, D)])
        table, optimizer = layer.weights[0], keras.optimizers.Adagrad(0.3)

        @tf2.function
        def step(ids, x):
            one = lambda ids, x: READS["all"](table, ids, x)  # noqa: E731
            with tf2.GradientTape() as tape:
                loss = squares({**PLACES, **IN_LOOPS}[place](one, ids, x))
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])

        for batch in batches:
            step(*(tf2.constant(batch[name]) for name in ("ids", "x")))
        return layer.get_weights()[0]

    mine = [{k: reference.part(v, rank, size) for k, v in batch.items()} for batch in BATCHES]
    want = trained(contextlib.nullcontext, BATCHES)
    with strategy.scope(plan="quiet"):
        got = trained(strategy.embedding_scope, mine)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2, 3)
def test_a_tape_inside_a_loop_of_a_function_is_refused(strategy, size):
    """Ranks may have other numbers of iterations; nothing is left untrained without a word."""
    with strategy.scope(plan="quiet"), strategy.embedding_scope():
        layer = keras.layers.Embedding(V, D)
        layer.build([None])
        table = layer.weights[0]

        def of_record(x):
            with tf2.GradientTape() as tape:
                loss = tf.reduce_sum(tf.matmul(x[None], table))
            return tape.gradient(loss, table)

        with pytest.raises(NotImplementedError, match="is taken in a loop, a branch or a function"):
            tf2.function(lambda x: tf.map_fn(of_record, x))(tf2.ones([2, V]))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("is_taped", [False, True])
def test_a_gradient_inside_of_a_gradient_is_refused(strategy, flavour, is_taped):
    """TensorFlow would take this rank's rows for all."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("t", V, D, use_resource=True)
        ids = tf.placeholder(tf.int64, [None])
        with tf2.GradientTape() as tape:
            rows = tf2.recompute_grad(lambda: tf.nn.embedding_lookup(table, ids))()
            loss = squares(rows)
        with pytest.raises(NotImplementedError, match="'t' is taken inside of another gradient"):
            tape.gradient(loss, table) if is_taped else tf.gradients(loss, table)


@pytest.mark.ranks(2, 3)
def test_so_it_is_in_a_function(strategy):
    with strategy.scope(plan="quiet"), strategy.embedding_scope():
        layer = keras.layers.Embedding(V, D)
        layer.build([None])

        @tf2.function
        def step(ids):
            with tf2.GradientTape() as tape:
                loss = squares(tf2.recompute_grad(lambda: layer(ids))())
            return tape.gradient(loss, layer.weights)

        with pytest.raises(NotImplementedError, match="is taken inside of another gradient"):
            step(tf2.constant([1, 2]))


@pytest.mark.parametrize("is_taped", [False, True])
def test_rows_may_be_computed_with_again(strategy, rank, size, is_taped):
    def build(embedding_scope):
        with embedding_scope():
            table = reference.table("t", V, D, use_resource=True)
        kernel = tf.get_variable("kernel", initializer=np.eye(D, dtype=np.float32))
        ids = tf.placeholder(tf.int64, [None])
        with tf2.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table, ids)
            loss = squares(tf2.recompute_grad(lambda rows: tf.matmul(rows, kernel))(rows))
        both = [table, kernel]
        gradients = tape.gradient(loss, both) if is_taped else tf.gradients(loss, both)
        train = tf.train.AdagradOptimizer(0.3).apply_gradients(zip(gradients, both))
        return {"train": train, "t": table, "kernel": kernel}, {"ids": ids}

    runs = [*((["train"], {"ids": batch["ids"]}) for batch in BATCHES), (["t", "kernel"], {})]
    want, got = grouped.both(strategy, rank, size, build, runs)
    grouped.same(got[-1], want[-1])


def test_keys_that_are_not_admitted_yet(strategy, rank, size):
    """A tape, too, drops the gradients of keys that have no row."""

    def trained(is_taped):
        with strategy.scope(), tf.Graph().as_default():
            with strategy.embedding_scope():
                table = collective.get_embedding_variable(
                    "t",
                    D,
                    initializer=tf.ones_initializer(),
                    ev_option=collective.TablePolicy(filter_freq=2),
                )
            ids = tf.placeholder(tf.int64, [None])
            with tf2.GradientTape() as tape:
                loss = squares(tf.nn.embedding_lookup(table, ids))
            gradient = tape.gradient(loss, table) if is_taped else tf.gradients(loss, table)[0]
            train = tf.train.GradientDescentOptimizer(0.25).apply_gradients([(gradient, table)])
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for keys in ([5, 6, 6], [5, 7, 7], [5, 6, 8]):
                    session.run(train, {ids: keys})
                return session.run(tf.nn.embedding_lookup(table, [5, 6, 7, 8]))

    np.testing.assert_array_equal(trained(True), trained(False))
