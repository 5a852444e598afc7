"""scope(warm_start=…): sessions start from other models' checkpoints, as a dict of arrays says."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import checkpoint
from collective.checkpoint import WarmStart
from collective.coordination import barrier
from collective.errors import RankError
from tests.foreign_checkpoints import deeprec
from tests.ranks import estimators

RATE, INITIAL = 0.5, 0.1  # of Adagrad
RANDOM = np.random.default_rng(8)
TABLE = RANDOM.normal(size=(9, 2)).astype(np.float32)
KEYS = np.array([-7, 0, 3, 10**12, 2**63 - 1])
ROWS = RANDOM.normal(size=(5, 2)).astype(np.float32)
KERNEL = np.float32([[2.0], [3.0]])


@pytest.fixture
def folder(tmp_path, rank):
    """Writes two checkpoints, of a static table and a dynamic one, and names their folder."""
    path = barrier.exchange(None, "a folder", {"path": str(tmp_path)})[0]["path"]

    def write():
        entries = {
            "old/t": TABLE,
            "old/t/Adagrad": TABLE**2 + 1,
            "old/kernel": KERNEL,
            "old/kernel/Adagrad": KERNEL**2,
            "global_step": np.int64(70),
            "unused": np.float32([1]),
        }
        deeprec.write(f"{path}/first-70", entries)
        theirs = deeprec.embedding_variable("e", dict(zip(KEYS.tolist(), ROWS)))
        theirs |= deeprec.embedding_variable("e/Adagrad", dict(zip(KEYS.tolist(), ROWS**2 + 2)))
        theirs |= {"new/kernel": KERNEL * 0, "new/moved": np.float32([5])}
        deeprec.write(f"{path}/theirs", theirs)
        checkpoint.import_checkpoint("deeprec", f"{path}/theirs", f"{path}/second/model-3")

    barrier.run_on_all_ranks(None, "writing", lambda: None if rank else write())
    return path


def model(strategy):
    with strategy.embedding_scope():
        t = tf.get_variable("new/t", [9, 2], initializer=tf.zeros_initializer())
    e = collective.get_embedding_variable("e", 2, initializer=tf.zeros_initializer())
    kernel = tf.get_variable("new/kernel", [2, 1], initializer=tf.ones_initializer())
    bias = tf.get_variable("new/bias", [1], initializer=tf.ones_initializer())
    moved = tf.get_variable("new/moved", [1], initializer=tf.zeros_initializer(), trainable=False)
    step = tf.train.get_or_create_global_step()
    ids = tf.placeholder_with_default(np.arange(9), [None])
    keys = tf.placeholder_with_default(KEYS, [None])
    rows = tf.nn.embedding_lookup(t, ids), tf.nn.embedding_lookup(e, keys)
    loss = sum(tf.reduce_sum(tf.matmul(x, kernel)) for x in rows) + tf.reduce_sum(bias)
    average = tf.train.ExponentialMovingAverage(0.9)
    train = tf.train.AdagradOptimizer(RATE, INITIAL).minimize(loss, global_step=step)
    averaged = average.apply([kernel])
    return {
        "values": (*rows, kernel, bias, moved, step, average.average(kernel)),
        "train": train,
        "average": averaged,
    }


def sources(folder, slots):
    return [
        WarmStart(f"{folder}/first-70", {"old/*": "new/*"}, slots=slots),
        WarmStart(f"{folder}/second", slots=slots),
    ]


def session(checkpoint_dir=None):
    return tf.train.MonitoredTrainingSession(
        checkpoint_dir=checkpoint_dir, save_summaries_steps=None, log_step_count_steps=None
    )


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("slots", [True, False])
def test_a_session_starts_from_several(strategy, rank, folder, capfd, slots):
    scope = strategy.scope(warm_start=sources(folder, slots))
    with scope, tf.Graph().as_default():
        m = model(strategy)
        with session(f"{folder}/job-{slots}") as monitored:
            t, e, kernel, bias, moved, step, average = monitored.run(m["values"])
            np.testing.assert_array_equal(t, TABLE)
            np.testing.assert_array_equal(e, ROWS)
            np.testing.assert_array_equal(kernel, KERNEL)  # the first source has it
            np.testing.assert_array_equal(average, KERNEL)
            assert (bias, moved, step) == (1, 5, 0)
            monitored.run(m["train"])
            trained = monitored.run(m["values"])
    gradient = KERNEL[:, 0]  # of each row; all ranks have the same batch
    accumulated = (TABLE**2 + 1, ROWS**2 + 2) if slots else (INITIAL, INITIAL)
    for before, after, slot in zip((TABLE, ROWS), trained, accumulated):
        want = before - RATE * gradient / np.sqrt(slot + gradient**2)
        np.testing.assert_allclose(after, want, rtol=1e-5)
    of_kernel = TABLE.sum(0)[:, None] + ROWS.sum(0)[:, None]
    slot = KERNEL**2 if slots else INITIAL
    want = KERNEL - RATE * of_kernel / np.sqrt(slot + of_kernel**2)
    np.testing.assert_allclose(trained[2], want, rtol=1e-5)
    output = capfd.readouterr().err
    with scope, tf.Graph().as_default():  # its own checkpoint wins
        m = model(strategy)
        with session(f"{folder}/job-{slots}") as monitored:
            for a, b in zip(monitored.run(m["values"]), trained):
                np.testing.assert_array_equal(a, b)
    assert "warm_start" not in capfd.readouterr().err
    assert output.count("collective: scope(warm_start=…)") == (rank == 0)
    if rank == 0:
        assert "new/t (there old/t)" in output and "left over: global_step, " in output
        assert "/second/model-3': e" in output
        assert "fresh: new/bias, new/kernel/ExponentialMovingAverage\n" in output
        assert ("slots of optimizers: e/Adagrad, new/t/Adagrad" in output) == (not slots)


@pytest.mark.slow
def test_an_estimator_starts_from_another(strategy, folder, rank):
    start = f"{folder}/first"

    def write():
        rows = np.arange(20, dtype=np.float32).reshape(10, 2) / 10
        deeprec.write(f"{start}/model.ckpt-5", {"t": rows, "w": np.float32([[2], [3]])})
        (tf.io.gfile.GFile(f"{start}/checkpoint", "w")).write(
            'model_checkpoint_path: "model.ckpt-5"'
        )

    barrier.run_on_all_ranks(
        None, "writing", lambda: None if rank else (tf.io.gfile.makedirs(start), write()) and None
    )
    with strategy.scope(warm_start=start):
        estimator = strategy.estimator(
            estimators.model(
                strategy.embedding_scope, optimizer=lambda: tf.train.GradientDescentOptimizer(0)
            ),
            f"{folder}/estimator",
            params={},
        )
    estimator.train(lambda: estimators.records(40)().repeat(), steps=1)
    np.testing.assert_array_equal(estimator.get_variable_value("w"), [[2], [3]])
    rows = np.arange(20, dtype=np.float32).reshape(10, 2) / 10
    np.testing.assert_array_equal(estimator.get_variable_value("t"), rows)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "source, error, words",
    [
        ("nowhere", ValueError, "There is no checkpoint '.*nowhere'"),
        ("first-70", ValueError, "no variable of the graph starts from '.*first-70'. It has"),
        (WarmStart("second", {"old": "x"}), ValueError, "there is no variable 'old'"),
        (
            WarmStart("first-70", {"old/t": "new/bias", "old/kernel": "new/kernel"}),
            tf.errors.InvalidArgumentError,
            r"'new/bias' .there 'old/t'. is float32 \[1\] here, float32 \[9, 2\] in the checkpoint",
        ),
        (
            WarmStart("first-70", {"old/kernel": "new/t"}),
            tf.errors.InvalidArgumentError,
            r"'new/t' .there 'old/kernel'. has the shape \[9, 2\] here, \[2, 1\]",
        ),
        (
            WarmStart("second", {"e": "new/t"}),
            tf.errors.InvalidArgumentError,
            "'new/t' .there 'e'. is static here, dynamic in the checkpoint",
        ),
    ],
)
def test_what_does_not_fit_is_an_error_on_all_ranks(strategy, folder, source, error, words):
    source = source if isinstance(source, WarmStart) else WarmStart(source)
    source = WarmStart(f"{folder}/{source.path}", source.names)
    with strategy.scope(warm_start=source), tf.Graph().as_default():
        model(strategy)
        with pytest.raises((error, RankError), match=words):
            session()


def test_a_source_of_which_all_is_taken_from_others_is_named(strategy, folder):
    sources = [f"{folder}/second", f"{folder}/second/model-3"]
    words = (
        r"all that it has for the graph \(e, new/kernel, new/moved\) starts from "
        r"'.*second/model-3', which comes before it in the list"
    )
    with strategy.scope(warm_start=sources), tf.Graph().as_default():
        model(strategy)
        with pytest.raises((ValueError, RankError), match=words):
            session()


def test_ranks_must_name_the_same(strategy, size, tmp_path, rank):
    if size == 1:
        return  # there is no other rank
    with strategy.scope(warm_start=f"{tmp_path}/{rank}"), tf.Graph().as_default():
        model(strategy)
        with pytest.raises(RankError, match="Every rank must name the same"):
            session()


@pytest.mark.slow
def test_a_state_of_increments_is_loaded_kept_and_started_from(strategy, rank, folder):
    job = f"{folder}/job"
    with strategy.scope(), tf.Graph().as_default():
        checkpoint.enable_increments(job)
        m, saver = model(strategy), tf.train.Saver()
        with tf.Session() as live:
            live.run(tf.global_variables_initializer())
            live.run(m["train"])
            barrier.run_on_all_ranks(
                None, "a folder", lambda: None if rank else tf.io.gfile.makedirs(job)
            )
            saver.save(live, f"{job}/m", global_step=1)
            live.run(m["train"])
            checkpoint.save_increment(live, job)
            want = live.run(m["values"])
    assert checkpoint.keep_best(job, {"auc": 0.5}, ("auc", "max"))
    for path in (job, f"{job}/best"):
        loaded = checkpoint.load(path)
        np.testing.assert_array_equal(loaded["new/t"][:], want[0])
        np.testing.assert_array_equal(loaded["e"][KEYS], want[1])
        np.testing.assert_array_equal(loaded["e"].keys(), np.sort(KEYS))
        np.testing.assert_array_equal(loaded["new/kernel"], want[2])
        assert loaded["global_step"] == 2 and 5 not in loaded["e"]
    with strategy.scope(warm_start=job), tf.Graph().as_default():
        m = model(strategy)
        with session() as monitored:
            for a, b in zip(monitored.run(m["values"][:4]), want[:4]):
                np.testing.assert_array_equal(a, b)
