"""Updates keep the rows that they touch within a table's weight_bound; nothing else is changed."""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import collective
from collective import TablePolicy
from tests.ranks import grouped, reference
from tests.ranks.dynamic_tables import OPTIMIZERS

pytestmark = [pytest.mark.either_backend, pytest.mark.double]

V, D, B, STEPS = 10, 3, 12, 5
BOUND = 0.3
FIRST = np.linspace(-0.2, 0.2, D, dtype=np.float32)  # the row from which all rows start
KEYS = np.arange(V, dtype=np.int64) * 2**40 - 5  # of the dynamic table
KINDS = ("static", "dynamic")

# ---- The optimizers, in NumPy and float64


def sgd(w, slots, rows, g, step):
    w[rows] -= 0.5 * g[rows]


def momentum(w, slots, rows, g, step):
    m = slots["momentum"]
    m[rows] = 0.9 * m[rows] + g[rows]
    w[rows] -= 0.1 * m[rows]


def adagrad(w, slots, rows, g, step):
    a = slots["accumulator"]
    a[rows] += g[rows] ** 2
    w[rows] -= 0.1 * g[rows] / np.sqrt(a[rows])


def adam(w, slots, rows, g, step):
    """Moves all rows."""
    slots["m"] += 0.1 * (g - slots["m"])
    slots["v"] += 0.001 * (g**2 - slots["v"])
    rate = 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    w -= rate * slots["m"] / (np.sqrt(slots["v"]) + 1e-8)


def ftrl(w, slots, rows, g, step):
    a, linear = slots["accum"], slots["linear"]
    new = a[rows] + g[rows] ** 2
    linear[rows] += g[rows] - (np.sqrt(new) - np.sqrt(a[rows])) / 0.5 * w[rows]
    a[rows] = new
    over = np.abs(linear[rows]) - 0.01
    quotient = -np.sign(linear[rows]) * over / (np.sqrt(new) / 0.5)
    w[rows] = np.where(over > 0, quotient, 0)


REFERENCES = {
    "sgd": (sgd, {}, lambda: tf.train.GradientDescentOptimizer(0.5)),
    "momentum": (momentum, {"momentum": 0}, lambda: tf.train.MomentumOptimizer(0.1, 0.9)),
    "adagrad": (adagrad, {"accumulator": 0.1}, lambda: tf.train.AdagradOptimizer(0.1)),
    "adam": (adam, {"m": 0, "v": 0}, lambda: tf.train.AdamOptimizer(0.1)),
    "ftrl": (
        ftrl,
        {"accum": 0.1, "linear": 0},
        lambda: tf.train.FtrlOptimizer(0.5, l1_regularization_strength=0.01),
    ),
}

# ---- A model of a static and a dynamic table


def batches(steps=STEPS):
    """Draws ids [B, 2], which repeat, and targets outside of the bound, some far away."""
    rng = np.random.default_rng(5)
    return [
        (rng.integers(0, V if step else V - 3, (B, 2)), rng.normal(0, 2, (B, D)))
        for step in range(steps)
    ]


def tables(strategy, policy, bound_of_dynamic=None):
    own = TablePolicy(weight_bound=bound_of_dynamic) if bound_of_dynamic else policy
    rows = np.broadcast_to(FIRST, (V, D))
    with strategy.embedding_scope(policy=policy):
        static = tf.get_variable("static", [V, D], initializer=tf.constant_initializer(rows))
    dynamic = collective.get_embedding_variable(
        "dynamic", D, initializer=tf.constant_initializer(FIRST), ev_option=own
    )
    return {"static": static, "dynamic": dynamic}


class Model:
    """Trains both tables on the same ids, and looks all of their rows up."""

    def __init__(self, strategy, optimizer, made):
        self.tables, self.optimizer = made, optimizer
        self.ids = tf.placeholder(tf.int64, [None, 2])
        self.targets = tf.placeholder(tf.float32, [None, D])
        keys = {"static": self.ids, "dynamic": tf.gather(tf.constant(KEYS), self.ids)}
        self.loss = tf.add_n(
            [self._loss(tf.nn.embedding_lookup(made[kind], keys[kind])) for kind in KINDS]
        )
        self.rows = {
            "static": tf.nn.embedding_lookup(made["static"], tf.range(V)),
            "dynamic": tf.nn.embedding_lookup(made["dynamic"], KEYS),
        }

    def _loss(self, rows):
        """For each sample half the squared distance of each of its two rows from the target."""
        return tf.reduce_mean(tf.reduce_sum((rows - self.targets[:, None]) ** 2, [1, 2])) / 2

    def feed(self, batch, rank, size):
        ids, targets = (reference.part(array, rank, size) for array in batch)
        return {self.ids: ids, self.targets: targets}

    def rows_of_slots(self):
        """Looks up all rows of the static table's slots, by their names; it is trained already."""
        table = self.tables["static"]
        names = self.optimizer.get_slot_names()
        return grouped.rows_of({name: self.optimizer.get_slot(table, name) for name in names})


def gradient(w, batch):
    """Returns the rows that a batch touches, and the gradient of the loss as a matrix."""
    ids, targets = batch
    g = np.zeros_like(w)
    np.add.at(g, ids, (w[ids] - targets[:, None]) / len(ids))
    return np.unique(ids), g


def expected(name, bound, known_all=True):
    """Trains in NumPy; returns rows and slots after each step, and where the bound had an effect.

    Args:
        known_all: rows that no batch has touched so far are FIRST; else they are zeros.
    """
    update, firsts, _ = REFERENCES[name]
    w = np.tile(FIRST.astype(np.float64), (V, 1))
    slots = {slot: np.full((V, D), first, np.float64) for slot, first in firsts.items()}
    seen, steps, acted = np.zeros(V, bool), [], False
    for step, batch in enumerate(batches(), 1):
        rows, g = gradient(w, batch)
        update(w, slots, rows, g, step)
        acted |= (np.abs(w[rows]) > bound).any()
        w[rows] = np.clip(w[rows], -bound, bound)
        seen[rows] = True
        shown = w.copy() if known_all else np.where(seen[:, None], w, 0)
        steps.append((shown, {slot: value.copy() for slot, value in slots.items()}, rows))
    return steps, acted


@pytest.mark.sample(2)
@pytest.mark.ranks(1, 3)
@pytest.mark.double("matrix")
@pytest.mark.parametrize("name", REFERENCES)
def test_rows_and_slots_are_those_of_numpy(strategy, rank, size, name):
    """On static and dynamic tables, in one update."""
    by_kind = {kind: expected(name, BOUND, kind == "static")[0] for kind in KINDS}
    assert expected(name, BOUND)[1], "the bound never acts: the case shows nothing"
    with strategy.scope(), tf.Graph().as_default():
        made = tables(strategy, TablePolicy(weight_bound=BOUND))
        optimizer = REFERENCES[name][2]()
        model = Model(strategy, optimizer, made)
        train = optimizer.minimize(model.loss)
        slots = model.rows_of_slots()
        with tf.train.MonitoredTrainingSession("") as session:
            for step, batch in enumerate(batches()):
                session.run(train, model.feed(batch, rank, size))
                got, got_slots = session.run([model.rows, slots])
                for kind in KINDS:
                    want, want_slots, touched = by_kind[kind][step]
                    np.testing.assert_allclose(got[kind], want, rtol=2e-4, atol=2e-6)
                    assert np.abs(got[kind][touched].astype(np.float64)).max() <= BOUND
                grouped.same(got_slots, want_slots, 2e-4, 2e-6)


def test_adam_moves_rows_without_a_gradient_beyond_the_bound(strategy, rank, size):
    """Their momentum carries them on. With their next gradient they are within it again."""
    rows = {step: by[0] for step, by in enumerate(expected("adam", BOUND)[0])}
    assert max(np.abs(w).max() for w in rows.values()) > BOUND
    far = np.full((B, D), 5.0)
    with strategy.scope(), tf.Graph().as_default():
        optimizer = tf.train.AdamOptimizer(0.1)
        model = Model(strategy, optimizer, tables(strategy, TablePolicy(weight_bound=BOUND)))
        train = optimizer.minimize(model.loss)
        with tf.train.MonitoredTrainingSession("") as session:
            for ids in ([0, 1], [2, 3], [2, 3], [0, 1]):
                session.run(train, model.feed((np.tile(ids, (B, 1)), far), rank, size))
                got = session.run(model.rows)
                for kind in KINDS:
                    assert np.abs(got[kind][ids].astype(np.float64)).max() <= BOUND
                    if ids == [2, 3]:
                        assert (got[kind][[0, 1], -1] > BOUND).all()


@pytest.mark.sample(2)
@pytest.mark.double("matrix")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bound_that_never_acts_changes_no_bit(strategy, rank, size, name):
    """With every optimizer, also those that are compiled or update several tables at once."""
    with strategy.scope(), tf.Graph().as_default():
        optimizer = OPTIMIZERS[name]()
        models = []
        for part, bound in (("without", None), ("with", 100.0)):
            policy = None if bound is None else TablePolicy(weight_bound=bound)
            with tf.variable_scope(part):
                models.append(Model(strategy, optimizer, tables(strategy, policy)))
        loss = tf.add_n([model.loss for model in models])
        train = optimizer.minimize(loss, tf.train.get_or_create_global_step())
        rows = [[model.rows, model.rows_of_slots()] for model in models]
        with tf.train.MonitoredTrainingSession("") as session:
            for batch in batches(3):
                feeds = [model.feed(batch, rank, size) for model in models]
                session.run(train, {**feeds[0], **feeds[1]})
            without, never = session.run(rows)
        for want, got in zip(tf.nest.flatten(without), tf.nest.flatten(never)):
            assert want.tobytes() == got.tobytes()


@pytest.mark.matrix
@pytest.mark.ranks(3)
def test_a_checkpoint_is_restored_under_another_bound(strategy, rank, size, folder):
    """Rows are restored as they were saved, and clipped when an update touches them."""

    def session_of(bound, bound_of_dynamic):
        policy = None if bound is None else TablePolicy(weight_bound=bound)
        optimizer = tf.train.AdagradOptimizer(1.0)
        model = Model(strategy, optimizer, tables(strategy, policy, bound_of_dynamic))
        train = optimizer.minimize(model.loss, tf.train.get_or_create_global_step())
        session = tf.train.MonitoredTrainingSession(
            checkpoint_dir=folder, save_checkpoint_steps=2, log_step_count_steps=None
        )
        return model, train, session

    everything = (np.arange(2 * B).reshape(B, 2) % V, np.full((B, D), 9.0))
    some = (np.tile([1, 4], (B, 1)), np.full((B, D), -9.0))
    before = {}
    for bound, bound_of_dynamic, batch in (
        (None, 50.0, everything),
        (0.125, 0.25, some),
        (None, None, some),
    ):
        with strategy.scope(), tf.Graph().as_default():
            model, train, session = session_of(bound, bound_of_dynamic)
            with session:
                restored = session.run(model.rows)
                for kind in before:
                    np.testing.assert_array_equal(restored[kind], before[kind])
                for _ in range(2):
                    session.run(train, model.feed(batch, rank, size))
                after = session.run(model.rows)
                limits = {"static": bound, "dynamic": bound_of_dynamic}
                for kind in KINDS:
                    if batch is some and limits[kind]:
                        others = np.setdiff1d(np.arange(V), [1, 4])
                        np.testing.assert_array_equal(after[kind][[1, 4]], -limits[kind])
                        np.testing.assert_array_equal(after[kind][others], before[kind][others])
                        assert np.abs(before[kind][others]).min() > limits[kind]
                before = after


def test_where_several_batches_make_an_update(strategy, rank, size):
    """The rows are those of all its batches; until then they are as they were."""
    far = np.full((B, D), 9.0)
    with strategy.scope(local_steps=2), tf.Graph().as_default():
        optimizer = tf.train.GradientDescentOptimizer(1.0)
        model = Model(strategy, optimizer, tables(strategy, TablePolicy(weight_bound=BOUND)))
        train = optimizer.minimize(model.loss)
        with tf.train.MonitoredTrainingSession("") as session:
            for ids in ([0, 1], [2, 3]):
                session.run(train, model.feed((np.tile(ids, (B, 1)), far), rank, size))
                got = session.run(model.rows["static"])
                touched = [0, 1, 2, 3] if ids == [2, 3] else []
                want = np.tile(FIRST, (V, 1))
                want[touched] = np.float32(BOUND)
                np.testing.assert_allclose(got, want, atol=1e-7)


def test_keras_optimizers_keep_to_it(strategy, rank, size):
    """Legacy ones, which have ways of their own to an update; of a table that Keras made, too."""
    far = np.full((B, D), 9.0)
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope(policy=TablePolicy(weight_bound=BOUND)):
            static = tf.get_variable("static", [V, D], initializer=tf.zeros_initializer())
            layer = tf.keras.layers.Embedding(V, D, embeddings_initializer="zeros")
            ids = tf.placeholder(tf.int64, [None])
            rows = [tf.nn.embedding_lookup(static, ids), layer(ids)]
        made = [static, layer.embeddings]
        loss = tf.reduce_mean(tf.square(tf.concat(rows, 1) - np.tile(far[: B // size], (1, 2))))
        optimizer = tf2.keras.optimizers.legacy.Adam(1.0)
        train = optimizer.get_updates(loss, made)
        whole = [tf.nn.embedding_lookup(table, tf.range(V)) for table in made]
        with tf.train.MonitoredTrainingSession("") as session:
            for _ in range(2):
                session.run(train, {ids: np.arange(B // size) % 4})
            for got in session.run(whole):
                touched = np.arange(V) < min(4, B // size)
                np.testing.assert_allclose(got[touched], BOUND, rtol=1e-6)
                np.testing.assert_array_equal(got[~touched], 0)


def test_a_gradient_that_is_a_matrix_is_of_all_rows(strategy):
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope(policy=TablePolicy(weight_bound=BOUND)):
            t = tf.get_variable("t", [V, D], initializer=tf.zeros_initializer())
        train = tf.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_sum(t * -2.0))
        with tf.train.MonitoredTrainingSession("") as session:
            session.run(train)
            np.testing.assert_allclose(session.run(t), BOUND)


@pytest.mark.double("matrix")
def test_a_nan_stays_one(strategy, rank, size):
    """A bound doesn't hide that training has failed."""
    batch = (np.tile([0, 1], (B, 1)), np.full((B, D), [np.nan, 9.0, -9.0]))
    with strategy.scope(), tf.Graph().as_default():
        optimizer = tf.train.GradientDescentOptimizer(1.0)
        model = Model(strategy, optimizer, tables(strategy, TablePolicy(weight_bound=0.5)))
        train = optimizer.minimize(model.loss)
        with tf.train.MonitoredTrainingSession("") as session:
            session.run(train, model.feed(batch, rank, size))
            for rows in session.run(model.rows).values():
                np.testing.assert_array_equal(rows[:2], [[np.nan, 0.5, -0.5]] * 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64], ids=lambda t: t.name)
def test_tables_of_other_types(strategy, rank, size, dtype):
    with strategy.scope(), tf.Graph().as_default():
        policy = TablePolicy(tf.zeros_initializer(), 0.1)
        with strategy.embedding_scope(policy=policy):
            made = [tf.get_variable("s", [V, D], dtype), tf.get_variable("d", [None, D], dtype)]
        rows = [tf.nn.embedding_lookup(table, tf.constant([1, 3, 1])) for table in made]
        loss = tf.add_n([-tf.reduce_sum(tf.cast(r, tf.float32)) for r in rows])
        train = tf.train.GradientDescentOptimizer(tf.constant(1.0, dtype)).minimize(loss)
        with tf.train.MonitoredTrainingSession("") as session:
            session.run(train)
            for got in session.run(rows):
                assert got.dtype == dtype.as_numpy_dtype
                got = got.astype(np.float64)
                assert (got <= 0.1).all() and (got > 0.0995).all()
