"""An evaluation ends when every rank is out of data; its metrics are of all records."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError
from collective.coordination import barrier
from collective.ops.communication import collectives
from collective.ops.graph import graph_analysis
from collective.replication import metrics
from tests.ranks import reference

pytestmark = [pytest.mark.ranks(1, 3), pytest.mark.ungrouped, pytest.mark.double]

ROWS, DIM = 23, 3
VALUES = reference.table_values(ROWS, DIM)


def counts(rank, size):
    """Returns how many batches a rank has: none on the last of several, most on the first."""
    return 7 if size == 1 else [5, 0, 2, 4][(rank + 1) % size]


def records(r, size):
    rng = np.random.default_rng([11, r])
    return rng.integers(0, ROWS, (counts(r, size), 4))


def batches(ids):
    return tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices(ids)).get_next()


def drain(session, fetches):
    out = []
    while True:
        try:
            out.append(session.run(fetches))
        except tf.errors.OutOfRangeError:
            return out


def test_every_record_is_seen_once_though_ranks_have_more_or_fewer(strategy, rank, size):
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("eval", ROWS, DIM)
        ids = batches(records(rank, size))
        rows = tf.nn.embedding_lookup(table, ids)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            seen = drain(session, [ids, rows])
    assert len(seen) == counts(rank, size)
    for i, (got_ids, got) in enumerate(seen):
        np.testing.assert_array_equal(got_ids, records(rank, size)[i])
        np.testing.assert_allclose(got, VALUES[got_ids], rtol=1e-6)


def test_ids_that_come_from_another_lookup(strategy, rank, size):
    first = np.arange(ROWS, dtype=np.float32)[:, None] * 2 % ROWS
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            outer = tf.get_variable("outer", [ROWS, 1], initializer=tf.constant_initializer(first))
            inner = reference.table("inner", ROWS, DIM)
        ids = batches(records(rank, size))
        rows = tf.nn.embedding_lookup(
            inner, tf.cast(tf.nn.embedding_lookup(outer, ids)[..., 0], tf.int64)
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            seen = drain(session, rows)
    assert len(seen) == counts(rank, size)
    for got, asked in zip(seen, records(rank, size)):
        np.testing.assert_allclose(got, VALUES[asked * 2 % ROWS], rtol=1e-6)


def test_training_still_ends_with_the_first_rank(strategy, rank, size):
    have = rank + 2
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("train", ROWS, DIM)
        loss = tf.reduce_mean(tf.nn.embedding_lookup(table, batches(np.zeros((have, 4), np.int64))))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            assert len(drain(session, train)) == 2


def test_metrics_are_of_all_records(strategy, rank, size):
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("metrics", ROWS, DIM)
        ids = batches(records(rank, size))
        score = tf.sigmoid(tf.reduce_sum(tf.nn.embedding_lookup(table, ids), -1))
        label = tf.cast(tf.equal(ids % 3, 0), tf.float32)
        made = {
            "mean": tf.metrics.mean(score),
            "rmse": tf.metrics.root_mean_squared_error(label, score),
            "accuracy": tf.metrics.accuracy(label, tf.round(score)),
            "auc": tf.metrics.auc(label, score),
            "precision": tf.metrics.precision(label, tf.round(score)),
            "recall": tf.metrics.recall(label, tf.round(score)),
            "tensor": tf.metrics.mean_tensor(score[:1]),
        }
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            drain(session, {name: update for name, (_, update) in made.items()})
            got = session.run({name: value for name, (value, _) in made.items()})
    everything = np.concatenate([records(r, size) for r in range(size)])
    expected = _plain_metrics(everything)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)


def metrics_of(score, label):
    guess, weights = tf.round(score), 0.5 + label
    classes = tf.cast(label, tf.int64)
    return {
        "mean": tf.metrics.mean(score, weights),
        "rmse": tf.metrics.root_mean_squared_error(label, score),
        "accuracy": tf.metrics.accuracy(label, guess),
        "auc": tf.metrics.auc(label, score),
        "precision": tf.metrics.precision(label, guess),
        "recall": tf.metrics.recall(label, guess),
        "iou": tf.metrics.mean_iou(classes, tf.cast(guess, tf.int64), 2),
        "cosine": tf.metrics.mean_cosine_distance(
            tf.nn.l2_normalize(tf.stack([score, label], 1), 1),
            tf.nn.l2_normalize(tf.ones([tf.size(score), 2]), 1),
            1,
        ),
        "at k": tf.metrics.recall_at_k(classes, tf.stack([1 - score, score], 1), 1),
        "per class": tf.metrics.mean_per_class_accuracy(classes, tf.cast(guess, tf.int64), 2),
        "below": tf.metrics.percentage_below(score, 0.5),
        "at": tf.metrics.precision_at_thresholds(label, score, [0.3, 0.7]),
    }


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("resources", [True, False])
def test_what_updates_return_is_of_all_records(strategy, rank, size, resources):
    """After each step; where ranks have batches of unequal sizes, too."""
    rng = np.random.default_rng(12)
    steps = [[rng.integers(0, ROWS, 3 + (r + step) % 3) for r in range(size)] for step in range(3)]

    def run(scope, embedding_scope, mine):
        with scope, tf.Graph().as_default():
            with embedding_scope():
                table = reference.table("metrics", ROWS, DIM)
            ids = tf.placeholder(tf.int64, [None])
            score = tf.sigmoid(tf.reduce_sum(tf.nn.embedding_lookup(table, ids), -1))
            updates = {
                name: update
                for name, (_, update) in metrics_of(
                    score, tf.cast(tf.equal(ids % 3, 0), tf.float32)
                ).items()
            }
            # computed further, in a summary for one
            seen = tf.metrics.mean(tf.identity(score))[1] * 2
            with tf.Session() as session:
                session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
                return [session.run({**updates, "further": seen}, {ids: batch}) for batch in mine]

    if not resources:
        tf.disable_resource_variables()
    try:
        got = run(strategy.scope(), strategy.embedding_scope, [batches[rank] for batches in steps])
        want = run(
            contextlib.nullcontext(),
            contextlib.nullcontext,
            [np.concatenate(batches) for batches in steps],
        )
    finally:
        tf.enable_resource_variables()
    for mine, truth in zip(got, want):
        for name, value in truth.items():
            np.testing.assert_allclose(mine[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("in_order", [False, True])
def test_updates_in_an_evaluation_of_unequal_length(strategy, rank, size, in_order, monkeypatch):
    """A rank without data adds what it has; what the last step returns is the result."""
    if in_order:  # as with scope(deterministic=True)
        monkeypatch.setattr(collectives, "in_order", lambda: size > 2)
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("metrics", ROWS, DIM)
        ids = batches(records(rank, size))
        score = tf.sigmoid(tf.reduce_sum(tf.nn.embedding_lookup(table, ids), -1))
        value, update = tf.metrics.mean(score)
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            seen = drain(session, update)
            got = session.run(value)
    assert len(seen) == counts(rank, size)
    everything = np.concatenate([records(r, size) for r in range(size)])
    want = (1 / (1 + np.exp(-VALUES.astype(np.float64)[everything].sum(-1)))).mean()
    np.testing.assert_allclose(got, want, rtol=1e-5)
    if counts(rank, size) == max(counts(r, size) for r in range(size)):
        np.testing.assert_allclose(seen[-1], want, rtol=1e-5)


@pytest.mark.slow
def test_sums_that_nobody_looks_at_are_left_out(strategy, rank, size):
    """As an Estimator's evaluation does: states are updated all the same, and what else an update
    does stays.
    """
    with strategy.scope(), tf.Graph().as_default():
        label = tf.constant([0.0, 1, 1, 0])
        made = metrics_of(tf.constant([0.1, 0.6, 0.4, 0.8]) + 0.01 * rank, label)
        made["pr"] = tf.metrics.auc(label, tf.constant([0.1, 0.6, 0.4, 0.8]), curve="PR")
        made["sensitivity"] = tf.metrics.sensitivity_at_specificity(
            label, tf.constant([0.1, 0.6, 0.4, 0.8]), 0.5
        )
        own = tf.get_local_variable("own", [], initializer=tf.zeros_initializer())
        with tf.control_dependencies([made["mean"][1]]):
            more = own.assign_add(1.0)
        update = metrics.without_sums(tf.group(*(update for _, update in made.values())))
        assert not [
            op for op in graph_analysis.upstream([update]) if graph_analysis.is_of_carrier(op.type)
        ]
        both = metrics.without_sums(tf.group(more, made["auc"][1]))
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            session.run(update)
            got = session.run({name: value for name, (value, _) in made.items()})
            want = session.run(
                {
                    name: update
                    for name, (_, update) in made.items()
                    if name not in ("iou", "per class")
                }
            )
            session.run(both)
            assert session.run(own) == 1
    for name, value in want.items():  # after the same records twice
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)


def test_an_update_in_a_branch_is_warned_of(strategy, size, caplog):
    with strategy.scope(), tf.Graph().as_default(), caplog.at_level("WARNING", logger="tensorflow"):
        tf.get_logger().addHandler(caplog.handler)
        try:
            tf.cond(
                tf.constant(True), lambda: tf.metrics.mean([1.0, 3.0])[1], lambda: tf.constant(0.0)
            )
        finally:
            tf.get_logger().removeHandler(caplog.handler)
    said = [
        r.getMessage()
        for r in caplog.records
        if "covers only this rank's records" in r.getMessage()
    ]
    assert bool(said) == (size > 1)


def _plain_metrics(ids):
    """Computes the metrics by NumPy, and by plain TensorFlow the AUC, which it interpolates."""
    score = 1 / (1 + np.exp(-VALUES.astype(np.float64)[ids].sum(-1)))
    label, guess = ids % 3 == 0, np.round(score)
    with tf.Graph().as_default(), tf.Session() as session:
        _, auc = tf.metrics.auc(label.astype(np.float32), score.astype(np.float32))
        session.run(tf.local_variables_initializer())
        area = session.run(auc)
    return {
        "mean": score.mean(),
        "rmse": np.sqrt(np.mean((label - score) ** 2)),
        "accuracy": np.mean(label == guess),
        "auc": area,
        "precision": label[guess == 1].mean(),
        "recall": guess[label].mean(),
        "tensor": score[:, 0].mean(),
    }


def test_ranks_that_finished_early_go_on_while_others_still_answer(strategy, rank, size):
    """The first rank stops after two of its batches; the others have one, and answer the second."""
    have = 5 if rank == 0 else 1
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("early", ROWS, DIM)
        rows = tf.nn.embedding_lookup(table, batches(np.full((have, 4), rank)))
        again = tf.nn.embedding_lookup(table, tf.constant([3, 4]))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            if rank == 0:
                seen = [session.run(rows) for _ in range(2)]
            else:
                seen = drain(session, rows)
            last = session.run(again)
    assert len(seen) == (2 if rank == 0 else 1)
    np.testing.assert_allclose(last, VALUES[[3, 4]], rtol=1e-6)


def test_training_ends_where_a_rank_ran_out_of_data_in_another_run(strategy, rank, size):
    """A loop of two runs, loss and step, each with a batch of its own: a rank ends in the first,
    its peers in the second.
    """
    have = 5 if rank == 0 else 9
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("other", ROWS, DIM)
        loss = tf.reduce_mean(tf.nn.embedding_lookup(table, batches(np.full((have - 1, 4), rank))))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        steps = 0
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(tf.errors.OutOfRangeError):
                while True:
                    session.run(loss)
                    session.run(train)
                    steps += 1
    assert steps == 2


def test_training_goes_on_after_an_evaluation_that_some_left_early(strategy, rank, size):
    """Every rank evaluates at most two batches of its one or five, then trains on: nobody is out of
    training data.
    """
    have = 5 if rank == 0 else 1
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("on", ROWS, DIM)
        rows = tf.nn.embedding_lookup(table, batches(np.full((have, 4), rank)))
        loss = tf.reduce_mean(tf.nn.embedding_lookup(table, batches(np.full((9, 4), rank))))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            for _ in range(2):
                try:
                    session.run(rows)
                except tf.errors.OutOfRangeError:
                    break
            for _ in range(8):
                session.run(train)
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(train)


def test_an_evaluation_that_cannot_be_answered_is_an_error(strategy, rank, size):
    """A lookup in a branch: a rank without data can't take part, and records would be left out in
    silence.
    """
    have = 3 if rank == 0 else 1
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("branch", ROWS, DIM)
        ids = batches(np.full((have, 4), rank))
        rows = tf.cond(
            tf.reduce_sum(ids) >= 0,
            lambda: tf.nn.embedding_lookup(table, ids),
            lambda: tf.zeros([4, DIM]),
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(
                RankError if size > 1 else tf.errors.OutOfRangeError,
                match="can not answer" if size > 1 else "",
            ):
                while True:
                    session.run(rows)


def test_an_invalid_id_in_an_evaluation_is_everyones_error(strategy, rank, size):
    ids = np.zeros((1 if rank else 3, 2), np.int64)
    if rank == 0:
        ids[2] = ROWS
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("invalid", ROWS, DIM)
        rows = tf.nn.embedding_lookup(table, batches(ids))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(tf.errors.OpError, match=f"id {ROWS} is not in"):
                while True:
                    session.run(rows)


def test_hooks_by_the_clock_act_at_the_same_step_on_every_rank(strategy, rank, size):
    acted = []

    class Every(tf.train.SessionRunHook):
        def begin(self):
            self.timer = tf.train.SecondOrStepTimer(every_secs=0.03)
            self.step = 0

        def after_run(self, run_context, run_values):
            self.step += 1
            if self.timer.should_trigger_for_step(self.step):
                self.timer.update_last_triggered_step(self.step)
                acted.append(self.step)
                run_context.session.run(self.rows)

    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = reference.table("clock", ROWS, DIM)
        hook = Every()
        hook.rows = tf.nn.embedding_lookup(table, [1, 2])
        loss = tf.reduce_mean(tf.nn.embedding_lookup(table, [[rank]]))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.train.MonitoredTrainingSession("", hooks=[hook]) as session:
            for _ in range(40):
                session.run(train)
            told = barrier.exchange(None, "compare", {"acted": acted})
    assert acted and all(text["acted"] == acted for text in told)


def test_a_failed_step_of_a_meeting_is_told_to_all(strategy, rank, size):
    def step():
        if rank == size - 1:
            raise PermissionError("the disk is read-only")
        return rank

    assert barrier.run_on_all_ranks(None, "count", lambda: rank) == list(range(size))
    with pytest.raises(
        PermissionError if rank == size - 1 else RankError, match="the disk is read-only"
    ):
        barrier.run_on_all_ranks(None, "write", step)
    assert barrier.exchange(None, "after", {"rank": rank}) == [{"rank": r} for r in range(size)]


def test_ranks_that_meet_for_different_things_are_told(strategy, rank, size):
    if size == 1:
        return
    with pytest.raises(RankError, match="saves here") as raised:
        barrier.exchange(None, "saves here" if rank else "restores there", {})
    assert "restores there" in str(raised.value)


def test_tables_that_are_looked_up_by_the_same_ids(strategy, rank, size):
    """TensorFlow takes two operations of the same inputs for one; on a rank that answers without
    data they differ.
    """
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            one, other = (
                reference.table(name, ROWS, DIM, seed) for seed, name in enumerate(["one", "other"])
            )
            way = tf.get_variable("way", [ROWS, 1], initializer=tf.constant_initializer(3.0))
        ids = batches(records(rank, size))
        further = tf.cast(tf.nn.embedding_lookup(way, ids)[..., 0], tf.int64)
        rows = [
            tf.nn.embedding_lookup(table, keys) for table in (one, other) for keys in (ids, further)
        ]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            seen = drain(session, rows)
    assert len(seen) == counts(rank, size)
    for got, asked in zip(seen, records(rank, size)):
        np.testing.assert_allclose(got[2], reference.table_values(ROWS, DIM, 1)[asked], rtol=1e-6)
        np.testing.assert_allclose(
            got[3], reference.table_values(ROWS, DIM, 1)[np.full_like(asked, 3)], rtol=1e-6
        )
