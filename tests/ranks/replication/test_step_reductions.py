"""What a step adds up over ranks travels with its dense gradients, whatever it is."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError
from tests.ranks import grouped, reference

pytestmark = pytest.mark.double
V, D, B = 7, 3, 12  # 1 to 4 ranks divide the samples


def batches(count):
    rng = np.random.default_rng(5)
    return [
        {
            "ids": rng.integers(0, V, B),
            "label": rng.integers(0, 2, B).astype(np.float32),
        }
        for _ in range(count)
    ]


def ten_metrics(score, label):
    said = tf.round(score)
    return [
        tf.metrics.auc(label, score, num_thresholds=20),
        tf.metrics.accuracy(label, said),
        tf.metrics.precision(label, said),
        tf.metrics.recall(label, said),
        tf.metrics.mean(score),
        tf.metrics.mean(label, name="base_rate"),
        tf.metrics.mean_absolute_error(label, score),
        tf.metrics.root_mean_squared_error(label, score),
        tf.metrics.false_positives(label, said),
        tf.metrics.true_positives(label, said),
    ]


class Model:
    """A table, a dense kernel, and replicated embeddings and metrics as asked for."""

    def __init__(self, strategy, embeddings=0, metrics=ten_metrics, optimizer=None, steps=1):
        def scope(**options):
            return strategy.embedding_scope(**options) if strategy else contextlib.nullcontext()

        self.ids = tf.placeholder(tf.int64, [None])
        self.label = tf.placeholder(tf.float32, [None])
        with scope():
            table = reference.table("table", 9, D)
        with scope(min_rows=1000):
            self.small = [reference.table(f"small{i}", V, D, seed=i) for i in range(embeddings)]
        kernel = tf.get_variable("kernel", [D], initializer=tf.ones_initializer())
        rows = [tf.nn.embedding_lookup(table, self.ids)]
        rows += [tf.nn.embedding_lookup(x, (self.ids + i) % V) for i, x in enumerate(self.small)]
        bias = tf.get_variable("bias", [], initializer=tf.zeros_initializer())
        self.score = tf.sigmoid(tf.reduce_sum(kernel * tf.add_n(rows), 1) / len(rows) + bias)
        self.loss = tf.reduce_mean(tf.square(self.score - self.label))
        optimizers = optimizer or [tf.train.MomentumOptimizer(0.5, 0.9)]
        variables = tf.trainable_variables()
        parts = [variables[:-1], variables[-1:]] if len(optimizers) == 2 else [variables]
        self.trains = [
            each.minimize(self.loss, var_list=part) for each, part in zip(optimizers, parts)
        ]
        made = metrics(self.score, self.label)
        self.values, self.updates = [x for x, _ in made], [x for _, x in made]
        self.learned = [kernel, bias, *self.small, tf.nn.embedding_lookup(table, tf.range(9))]

    def feed(self, batch):
        return {self.ids: batch["ids"], self.label: batch["label"]}


def initialize(session):
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])


def exchanges(strategy, fetches_of, **options):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        model = Model(strategy, **options)
        (batch,) = batches(1)
        with tf.Session() as session:
            initialize(session)
            session.run(fetches_of(model), model.feed(batch))
            return grouped.exchanged(session, fetches_of(model), model.feed(batch))


def step_of(model):
    return [model.trains, model.updates]


@pytest.mark.slow
@pytest.mark.parametrize("embeddings", [2, pytest.param(50, marks=pytest.mark.matrix)])
def test_a_step_takes_as_many_exchanges_with_embeddings_and_metrics_as_without(
    strategy, embeddings
):
    with_them = exchanges(strategy, step_of, embeddings=embeddings)
    assert with_them == exchanges(strategy, lambda model: model.trains, metrics=lambda *_: [])


@pytest.mark.matrix
def test_values_and_updates_run_with_a_step_travel_with_it(strategy):
    alone = exchanges(strategy, lambda model: model.trains)
    assert alone == exchanges(strategy, lambda m: [m.trains, m.values, m.updates])


def results_of(model, runs):
    """Runs a list of (names of what is fetched, batch), and returns what was learned at last."""
    with tf.Session() as session:
        initialize(session)
        got = [
            session.run({name: getattr(model, name) for name in names.split()}, model.feed(batch))
            for names, batch in runs
        ]
        seen = [[run.get("updates"), run.get("values")] for run in got]
        return seen, session.run(model.learned)


def same(got, want):
    for one, other in zip(tf.nest.flatten(got), tf.nest.flatten(want)):
        if other is not None:
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


RUNS = ("trains updates", "trains", "updates", "values", "trains values")


def optimizers_of(names):
    made = {
        "momentum": lambda: tf.train.MomentumOptimizer(0.5, 0.9),
        "adam": lambda: tf.train.AdamOptimizer(0.1),
        "descent": lambda: tf.train.GradientDescentOptimizer(0.5),
    }
    return [made[name]() for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [["momentum"], pytest.param(["adam", "descent"], marks=pytest.mark.matrix)],
    ids=" ".join,
)
def test_numbers_are_those_of_one_process_whatever_a_run_needs(strategy, rank, size, names):
    runs = [(run, batch) for run, batch in zip(RUNS, batches(5))]
    with tf.Graph().as_default():
        want = results_of(Model(None, 5, optimizer=optimizers_of(names)), runs)
    own = [(run, {k: reference.part(x, rank, size) for k, x in b.items()}) for run, b in runs]
    with strategy.scope(), tf.Graph().as_default():
        got = results_of(Model(strategy, 5, optimizer=optimizers_of(names)), own)
    same(got, want)


@pytest.mark.matrix
def test_each_of_two_optimizers_takes_the_metrics_with_it(strategy):
    names = ["momentum", "descent"]
    steps = (lambda m: m.trains[0], lambda m: m.trains[1])
    for step in steps:
        alone = exchanges(strategy, step, optimizer=optimizers_of(names))
        together = exchanges(
            strategy, lambda m, step=step: [step(m), m.updates], optimizer=optimizers_of(names)
        )
        assert alone == together


def test_a_step_that_waits_for_a_metric(strategy, rank, size):
    """Its gradients can't travel with the sums that come first."""
    with strategy.scope(), tf.Graph().as_default():
        kernel = tf.get_variable("kernel", [], initializer=tf.ones_initializer())
        with strategy.embedding_scope():
            reference.table("table", 9, D)
        _, mean = tf.metrics.mean(tf.constant(float(rank)))
        train = tf.train.GradientDescentOptimizer(1.0).minimize(kernel * tf.stop_gradient(mean))
        with tf.control_dependencies([train]):
            _, after = tf.metrics.mean(kernel.read_value() + 0.0, name="after")
        with tf.Session() as session:
            initialize(session)
            got = session.run([train, mean, after])[1:]
    mean_rank = np.arange(size).mean()
    np.testing.assert_allclose(got, [mean_rank, 1 - mean_rank], rtol=1e-6)


@pytest.mark.matrix
def test_ranks_of_which_one_needs_no_metrics_are_told(strategy, rank, size):
    if size == 1:
        return
    with strategy.scope(), tf.Graph().as_default():
        model = Model(strategy, 2)
        (batch,) = batches(1)
        with tf.Session() as session:
            initialize(session)
            session.run(step_of(model), model.feed(batch))
            with pytest.raises(RankError, match="the ranks' sum of 'accuracy/"):
                session.run(step_of(model) if rank else model.trains, model.feed(batch))


@pytest.mark.matrix
def test_a_norm_of_slices_counts_each_occurrence(strategy, rank, size):
    """What a script looks at are everyone's slices; what nobody looks at are rows."""

    def trained(scope, parts):
        with scope(min_rows=1000):
            tables = [reference.table(f"small{i}", V, D, seed=i) for i in range(2)]
        kernel = tf.get_variable("kernel", [D], initializer=tf.ones_initializer())
        loss = tf.add_n(
            [
                tf.reduce_mean(tf.square(kernel * tf.nn.embedding_lookup(table, part)))
                for table in tables
                for part in parts
            ]
        ) / len(parts)
        optimizer = tf.train.AdagradOptimizer(0.5)
        gradients = optimizer.compute_gradients(loss)
        (clipped, *_), norm = tf.clip_by_global_norm([gradients[0][0]], 0.1)
        train = optimizer.apply_gradients([(clipped, gradients[0][1]), *gradients[1:]])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            norms = [session.run([norm, train])[0] for _ in range(3)]
            return norms, session.run([*tables, kernel])

    every = batches(1)[0]["ids"]
    parts = [reference.part(every, r, size) for r in range(size)]
    with strategy.scope(), tf.Graph().as_default():
        got = trained(strategy.embedding_scope, [tf.constant(parts[rank])])
    with tf.Graph().as_default():
        want = trained(lambda **_: contextlib.nullcontext(), list(map(tf.constant, parts)))
    same(got, want)


@pytest.mark.matrix
def test_large_embeddings_travel_as_slices(strategy, size):
    """Their ids and values take one exchange for each type."""

    def step(rows):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            tables = [
                tf.get_variable(f"large{i}", [rows, 64], dtype, tf.ones_initializer())
                for i, dtype in enumerate([tf.float32, tf.float64, tf.float16])
            ]
            kernel = tf.get_variable("kernel", [], initializer=tf.ones_initializer())
            found = [tf.nn.embedding_lookup(x, [1, rows - 1, 1]) for x in tables]
            loss = kernel * tf.add_n([tf.cast(tf.reduce_sum(x), tf.float32) for x in found])
            train = tf.train.GradientDescentOptimizer(0.5).minimize(loss)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                exchanged = grouped.exchanged(session, train)
                return exchanged, session.run([tf.gather(x, [1, 2, rows - 1]) for x in tables])

    (_, _, gathers), rows = step(5000)
    np.testing.assert_allclose(rows[1][:, 0], [0, 1, 0.5], atol=1e-6)
    (_, _, fewer), _ = step(50)
    assert gathers - fewer == 2 * (size > 1)
