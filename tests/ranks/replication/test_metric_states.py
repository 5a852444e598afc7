"""Metrics that a script makes itself, and Keras's, are of all ranks' records, or are refused."""

import contextlib

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.ops.graph import graph_analysis
from tests.ranks import reference
from tests.ranks.estimators import assert_equal, made, plain, records
from tests.ranks.metric_programs import COUNTED, REFUSED, K, own_variable

pytestmark = [pytest.mark.ranks(1, 3), pytest.mark.ungrouped, pytest.mark.double]

ROWS, DIM = 23, 3
# TensorFlow updates no variable of the old kind in a branch.
KINDS = [
    (name, resources)
    for resources in (True, False)
    for name in COUNTED
    if resources or name != "in_a_branch"
]


class Program:
    """A model with metrics, run by a session loop."""

    def __init__(self, embedding_scope, builders):
        with embedding_scope():
            table = reference.table("metrics", ROWS, DIM)
        self.ids = tf.placeholder(tf.int64, [None])
        self.score = tf.sigmoid(tf.reduce_sum(tf.nn.embedding_lookup(table, self.ids), -1))
        self.label = tf.cast(tf.equal(self.ids % 3, 0), tf.float32)
        made_now = {name: build(self.score, self.label) for name, build in builders.items()}
        self.values = {name: value for name, (value, _) in made_now.items()}
        self.updates = [update for _, update in made_now.values()]

    def start(self, session):
        session.run(
            [
                tf.global_variables_initializer(),
                tf.local_variables_initializer(),
                tf.get_collection("initializers"),
            ]
        )

    def update(self, session, batches):
        for ids in batches:
            # Targets: what updates return isn't looked at.
            session.run([getattr(x, "op", x) for x in self.updates], {self.ids: ids})


def measured(scope, embedding_scope, builders, batches):
    with scope, tf.Graph().as_default():
        program = Program(embedding_scope, builders)
        with tf.Session() as session:
            program.start(session)
            program.update(session, batches)
            return session.run(program.values)


def compare(got, want):
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def fetch_loop(strategy, rank, size, builders):
    """Feeds every rank as many steps, since updates with lookups are everyone's."""
    steps = [[(np.arange(3 + r + s) * (7 + r)) % ROWS for r in range(size)] for s in range(3)]
    got = measured(strategy.scope(), strategy.embedding_scope, builders, [s[rank] for s in steps])
    want = measured(
        contextlib.nullcontext(),
        contextlib.nullcontext,
        builders,
        [np.concatenate(s) for s in steps],
    )
    compare(got, want)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name, resources", KINDS)
def test_a_session_loop_counts_all_records(strategy, rank, size, name, resources):
    if not resources:
        tf.disable_resource_variables()
    try:
        fetch_loop(strategy, rank, size, {name: COUNTED[name]})
    finally:
        tf.enable_resource_variables()


@pytest.mark.slow
def test_many_metrics_at_once(strategy, rank, size):
    fetch_loop(strategy, rank, size, COUNTED)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", REFUSED)
def test_a_state_that_cannot_become_one_is_refused(strategy, rank, size, name):
    build, variable = REFUSED[name]
    with strategy.scope(), tf.Graph().as_default():
        program = Program(strategy.embedding_scope, {name: build})
        with tf.Session() as session:
            program.start(session)
            if size == 1:
                program.update(session, [[1, 2]])
                session.run(program.values, {program.ids: [3]})
                return
            with pytest.raises(ValueError, match=f"metric variable '{variable}'.*tf.metrics"):
                program.update(session, [[1, 2]])
                session.run(program.values, {program.ids: [3]})


def test_states_that_are_fetched_as_they_are(strategy, rank, size):
    """The variable itself, its name, and what its update returns."""
    with strategy.scope(), tf.Graph().as_default():
        total, most = own_variable("total", 0.0), own_variable("most", -9.0)
        x = tf.placeholder(tf.float32, [])
        added, raised = total.assign_add(x), most.assign(tf.maximum(most, x))
        following = total + x
        again = total.assign(following)
        with tf.Session() as session:
            session.run(tf.local_variables_initializer())
            seen = session.run({"added": added, "raised": [raised]}, {x: rank + 1.0})
            whole = session.run([total, most, total.value().name, most.value()])
            last = session.run([following, again], {x: 1.0})
    everything = size * (size + 1) / 2
    assert (seen["added"], seen["raised"]) == (everything, [size])
    assert whole == [everything, size, everything, size]
    assert last == [everything + size] * 2


def test_an_evaluation_of_unequal_length(strategy, rank, size):
    """A rank without data adds what it has; what the last step returns is the result."""
    counts = [5, 0, 2, 4]
    data = np.arange(counts[rank] * 4).reshape(-1, 4) * (rank + 3) % ROWS
    names = ["counter", "largest", "smallest", "keras_mean", "span"]

    def run(scope, embedding_scope, ids):
        with scope, tf.Graph().as_default():
            with embedding_scope():
                table = reference.table("uneven", ROWS, DIM)
            data = tf.data.Dataset.from_tensor_slices(ids.reshape(-1)).batch(4)
            batch = tf.data.make_one_shot_iterator(data).get_next()
            score = tf.sigmoid(tf.reduce_sum(tf.nn.embedding_lookup(table, batch), -1))
            pairs = [COUNTED[name](score, score) for name in names]
            total, low = own_variable("returned", 0.0), own_variable("low", 9.0)
            returned = [
                total.assign_add(tf.reduce_sum(score)),
                low.assign(tf.minimum(low, tf.reduce_min(score))),
            ]
            seen = None
            with tf.Session() as session:
                session.run(
                    [tf.global_variables_initializer(), tf.local_variables_initializer()]
                    + tf.get_collection("initializers")
                )
                with contextlib.suppress(tf.errors.OutOfRangeError):
                    while True:
                        seen, _ = session.run([returned, [update for _, update in pairs]])
                return seen, session.run([value for value, _ in pairs])

    seen, got = run(strategy.scope(), strategy.embedding_scope, data)
    everything = np.concatenate(
        [np.arange(counts[r] * 4).reshape(-1, 4) * (r + 3) % ROWS for r in range(size)]
    )
    last, want = run(contextlib.nullcontext(), contextlib.nullcontext, everything)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    if counts[rank] == 5:
        np.testing.assert_allclose(seen, last, rtol=1e-5)


def test_metrics_that_are_reset(strategy, rank, size):
    """By their initializers, by an assignment, and by Keras."""
    with strategy.scope(), tf.Graph().as_default(), tf.Session().as_default() as session:
        tf.keras.backend.set_session(session)
        x = tf.placeholder(tf.float32, [])
        total, most = own_variable("total", 0.0), own_variable("most", -9.0)
        mean = tf.keras.metrics.Mean()
        update = tf.group(
            total.assign_add(x), most.assign(tf.maximum(most, x)), mean.update_state(x)
        )
        value = {"total": tf.identity(total), "most": tf.identity(most), "mean": mean.result()}
        reset = tf.group(total.assign(0.0), most.assign(tf.fill([], -5.0)))
        session.run([tf.local_variables_initializer(), [v.initializer for v in mean.variables]])
        results = []
        for way in (None, "initializer", "assign"):
            if way == "initializer":
                session.run(tf.local_variables_initializer())
            elif way:
                session.run(reset)
            mean.reset_state()
            session.run(update, {x: 10.0 + rank if way is None else -6.0 - rank})
            results.append(session.run(value))
        tf.keras.backend.set_session(None)
    ranks = np.arange(size)
    for got, seen, most in zip(
        results, [10.0 + ranks, -6.0 - ranks, -6.0 - ranks], [9.0 + size, -6.0, -5.0]
    ):
        compare(got, {"total": seen.sum(), "mean": seen.mean(), "most": most})


def test_a_sum_that_is_set(strategy, rank, size):
    """What all ranks set it to counts once: what is fed, constant, or the same on all ranks."""
    with strategy.scope(), tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [])
        start = tf.get_variable("start", initializer=tf.constant(7.0))
        total = own_variable("total", 0.0)
        update, value = total.assign_add(x).op, tf.identity(total)
        sets = [total.assign(x), total.assign(3.0), total.assign(start)]
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            results = []
            for each in sets:
                session.run(each.op, {x: 5.0})
                results.append(session.run(value))
                session.run(update, {x: rank + 1.0})
                results.append(session.run(value))
    added = size * (size + 1) / 2
    assert results == [5.0, 5.0 + added, 3.0, 3.0 + added, 7.0, 7.0 + added]


def test_a_metric_of_keras_that_is_reset_before_its_first_update(strategy, rank, size):
    with strategy.scope(), tf.Graph().as_default(), tf.Session().as_default() as session:
        tf.keras.backend.set_session(session)
        x = tf.placeholder(tf.float32, [])
        mean = tf.keras.metrics.Mean()
        session.run([v.initializer for v in mean.variables])
        mean.reset_state()
        update = mean.update_state(x)
        value = mean.result()
        session.run(update, {x: rank + 1.0})
        got = session.run([value, *mean.variables])
        tf.keras.backend.set_session(None)
    added = size * (size + 1) / 2
    np.testing.assert_allclose(got, [added / size, added, size])


def test_a_metric_that_is_made_after_the_first_run(strategy, rank, size):
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("late", ROWS, DIM)
        row = tf.nn.embedding_lookup(table, [1])
        x = tf.placeholder(tf.float32, [])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(row)
            total = own_variable("late", 0.0)
            value, update = tf.identity(total), total.assign_add(x)
            session.run(tf.variables_initializer([total]))
            session.run(update.op, {x: rank + 1.0})
            assert session.run(value) == size * (size + 1) / 2


def test_a_best_value_of_a_metric(strategy, rank, size):
    """A state that depends on another metric's value takes the value of all ranks."""
    with strategy.scope(), tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [])
        total, best = own_variable("total", 0.0), own_variable("best", -1.0)
        kept = tf.Variable(0.0, trainable=False)
        update = total.assign_add(x)
        better = best.assign(tf.maximum(best, total * 2.0))
        keep = kept.assign(tf.maximum(kept, total))
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            session.run(update.op, {x: rank + 1.0})
            session.run([better.op, keep.op])
            everything = size * (size + 1) / 2
            assert session.run([tf.identity(best), tf.identity(kept)]) == [
                2 * everything,
                everything,
            ]


def test_training_has_no_more_collectives(strategy, size):
    """Where nobody looks at a value, updates need no peer."""
    with strategy.scope(), tf.Graph().as_default():
        # What an update of tf.metrics returns covers all ranks, wherever it is used.
        own = {name: build for name, build in COUNTED.items() if name != "tf_mean"}
        program = Program(strategy.embedding_scope, own)
        with tf.Session() as session:
            program.start(session)
            of_updates = graph_analysis.upstream(getattr(x, "op", x) for x in program.updates)
            lookup = graph_analysis.upstream([program.score.op])
            new = of_updates - lookup
            assert [op.name for op in new if graph_analysis.is_of_carrier(op.type)] == []
            value = program.values["keras_auc"].op
            reduced = graph_analysis.upstream([value])
            sums = [op for op in reduced if graph_analysis.collective_kind(op.type) == "Allreduce"]
            assert len(sums) <= 1


def many_of_keras(score, label):
    """Returns metrics of Keras of all kinds, and what they are updated with."""
    yes, both = tf.cast(score > 0.4, tf.float32), tf.stack([1 - score, score], 1)
    classes = tf.stack([1 - label, label], 1)
    whole, column = tf.cast(label, tf.int32), score[:, None]
    return {
        "sum": (K.Sum(), (score,)),
        "mean": (K.Mean(), (score, 0.5 + label)),
        "accuracy": (K.BinaryAccuracy(), (label[:, None], column)),
        "categories": (K.CategoricalAccuracy(), (classes, both)),
        "sparse": (K.SparseCategoricalAccuracy(), (label[:, None], both)),
        "top": (K.TopKCategoricalAccuracy(1), (classes, both)),
        "entropy": (K.BinaryCrossentropy(), (label[:, None], column)),
        "error": (K.RootMeanSquaredError(), (label[:, None], column)),
        "absolute": (K.MeanAbsoluteError(), (label[:, None], column)),
        "logcosh": (K.LogCoshError(), (label[:, None], column)),
        "hinge": (K.Hinge(), (label[:, None], column)),
        "cosine": (K.CosineSimilarity(), (classes, both)),
        "relative": (K.MeanRelativeError([1.0, 2.0]), (classes, both)),
        "iou": (K.MeanIoU(2), (whole, yes)),
        "auc": (K.AUC(curve="PR"), (label, score)),
        "recall": (K.Recall([0.3, 0.5]), (label, score)),
        "positives": (K.TruePositives(), (label, score)),
        "sensitivity": (K.SensitivityAtSpecificity(0.5, 20), (label, score)),
        "precision_at": (K.PrecisionAtRecall(0.5, 20), (label, score)),
        "f1": (K.F1Score(), (classes, both)),
        "r2": (K.R2Score(), (label[:, None], column)),
    }


@pytest.mark.long
def test_metrics_of_keras(strategy, rank, size):
    def builder(name):
        def build(score, label):
            metric, given = many_of_keras(score, label)[name]
            update = metric.update_state(*given)
            tf.get_collection_ref("initializers").extend(v.initializer for v in metric.variables)
            return metric.result(), update

        return build

    with tf.Graph().as_default():
        names = list(many_of_keras(tf.ones([3]), tf.ones([3])))
    fetch_loop(strategy, rank, size, {name: builder(name) for name in names})


# -- Where else a state is read


def test_a_loss_that_depends_on_a_metric(strategy, rank, size):
    """Training takes the value of all ranks, as one process would."""
    steps = [[(np.arange(4) * (7 + r) + s) % ROWS for r in range(size)] for s in range(3)]

    def trained(scope, embedding_scope, batches):
        with scope, tf.Graph().as_default():
            with embedding_scope():
                table = reference.table("trained", ROWS, DIM)
            ids = tf.placeholder(tf.int64, [None])
            rows = tf.nn.embedding_lookup(table, ids)
            total = own_variable("total", 0.0)
            update = total.assign_add(tf.reduce_sum(tf.cast(ids, tf.float32)))
            loss = tf.reduce_mean(tf.square(rows)) * (1.0 + total / 100.0)
            hvd.allreduce(loss, op=hvd.Sum)
            train = tf.train.GradientDescentOptimizer(0.5).minimize(loss)
            everything = tf.nn.embedding_lookup(table, np.arange(ROWS))
            with tf.Session() as session:
                session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
                for batch in batches:
                    session.run(update.op, {ids: batch})
                    session.run(train, {ids: batch})
                return session.run(everything)

    got = trained(strategy.scope(), strategy.embedding_scope, [each[rank] for each in steps])
    want = trained(
        contextlib.nullcontext(),
        contextlib.nullcontext,
        [np.concatenate(each) for each in steps],
    )
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_ids_that_depend_on_a_metric_are_refused(strategy, size):
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("ids", ROWS, DIM)
        total = own_variable("total", 0)
        update = total.assign_add(1)
        row = tf.nn.embedding_lookup(table, total[None] % ROWS)
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            session.run(update.op)
            if size == 1:
                session.run(row)
                return
            with pytest.raises(ValueError, match="metric variable 'total' for ids of a lookup"):
                session.run(row)


def test_what_a_script_adds_up_itself(strategy, rank, size):
    """A script for Horovod reduces its metrics: they are not added up twice."""
    with strategy.scope(), tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [])
        total, count = own_variable("total", 0.0), own_variable("count", 0.0)
        update = tf.group(total.assign_add(x), count.assign_add(1.0))
        own = tf.identity(total)
        summed = hvd.allreduce(own, op=hvd.Sum)
        everyones = tf.reduce_sum(hvd.allgather(count[None]))
        averaged = hvd.allreduce(total / count)
        with tf.Session() as session:
            session.run(tf.local_variables_initializer())
            session.run(update, {x: rank + 1.0})
            everything = size * (size + 1) / 2
            got = session.run([summed, everyones, averaged, total])
            np.testing.assert_allclose(got, [everything, size, everything / size, everything])
            if size > 1:
                with pytest.raises(ValueError, match="'total'.*the script adds it up"):
                    session.run(own)


def warnings_of(caplog, build):
    with tf.Graph().as_default(), caplog.at_level("WARNING", logger="tensorflow"):
        tf.get_logger().addHandler(caplog.handler)
        try:
            build()
        finally:
            tf.get_logger().removeHandler(caplog.handler)
    return {r.getMessage() for r in caplog.records}


def test_a_state_that_is_saved_is_warned_of(strategy, rank, size, folder, caplog):
    def build():
        total = own_variable("total", 0.0)
        update = total.assign_add(1.0)
        saver = tf.train.Saver([total])
        with tf.Session() as session:
            session.run(tf.local_variables_initializer())
            session.run(update.op)
            saver.save(session, f"{folder}/model")

    with strategy.scope():
        said = warnings_of(caplog, build)
    about = [text for text in said if "'total' is saved" in text]
    assert len(about) == (size > 1 and rank == 0)


def test_a_state_that_a_branch_reads_is_warned_of(strategy, size, caplog):
    def build():
        total = own_variable("total", 0.0)
        switch = tf.placeholder(tf.bool, [])
        inside = tf.cond(switch, lambda: total.read_value() * 2.0, lambda: tf.constant(0.0))
        update = total.assign_add(1.0)
        with tf.Session() as session:
            session.run(tf.local_variables_initializer())
            session.run(update.op)
            session.run(inside, {switch: True})

    with strategy.scope():
        said = warnings_of(caplog, build)
    assert any("'total' is read in a branch" in text for text in said) == (size > 1)


# -- Estimators


def in_estimator(build, name):
    def metrics(labels, p, weights):
        value, update = build(p, labels)
        for each in tf.get_collection("initializers"):
            tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, each)
        return {name: (value, update)}

    return metrics


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", COUNTED)
def test_an_estimator_counts_all_records(strategy, folder, name):
    metrics = in_estimator(COUNTED[name], name)
    got = made(strategy, folder, metrics=metrics).evaluate(records(13))
    assert_equal(got, plain(folder, metrics).evaluate(records(13)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", REFUSED)
def test_an_estimator_refuses_a_state_that_cannot_become_one(strategy, folder, size, name):
    build, variable = REFUSED[name]
    estimator = made(strategy, folder, metrics=in_estimator(build, "mine"))
    if size == 1:
        estimator.evaluate(records(9))
        return
    with pytest.raises(ValueError, match=f"metric 'mine' .* metric variable '{variable}'"):
        estimator.evaluate(records(9))
