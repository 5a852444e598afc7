"""Tables are saved and loaded alone, while training goes on and the graph is final."""

import contextlib
import glob

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import checkpoint
from collective.coordination import milestones
from tests.ranks import reference
from tests.ranks.checkpoints import wait

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 2, 3)]
KEYS = np.array([3, 5, 2**40, -7])


@contextlib.contextmanager
def training(strategy, optimizer="adam", **options):
    """Yields (session, step, state): `step()` trains once, `state()` has all values."""
    made = {
        "adam": lambda: tf.train.AdamOptimizer(0.1),
        "adagrad": lambda: tf.train.AdagradOptimizer(0.1),
    }
    with strategy.scope(plan="quiet", **options), tf.Graph().as_default():
        with strategy.embedding_scope():
            static = reference.table("static", 9, 3)
            dynamic = tf.get_variable("dynamic", [None, 2], initializer=tf.ones_initializer())
        w = tf.get_variable("w", initializer=reference.table_values(5, 1, 1))
        rows = [
            tf.nn.embedding_lookup(static, tf.constant([1, 4, 8, 4])),
            tf.nn.embedding_lookup(dynamic, tf.constant(KEYS)),
        ]
        loss = tf.reduce_mean(tf.square(tf.matmul(tf.concat(rows, 1), w) - 1))
        count = tf.train.get_or_create_global_step()
        used = made[optimizer]()
        op = used.minimize(loss, global_step=count)
        state = {"static": static, "w": w, "dynamic": rows[1], "step": count}
        with tf.train.MonitoredTrainingSession() as session:
            yield session, lambda: session.run(op), lambda: session.run(state)


def assert_same(found, expected, names):
    for name in names:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.slow
def test_tables_go_back_and_the_network_goes_on(strategy, folder, rank):
    with training(strategy) as (session, step, state):
        for _ in range(3):
            step()
        before, path = state(), checkpoint.dump_tables(session, f"{folder}/tables")
        assert path == f"{folder}/tables"
        for _ in range(2):
            step()
        later = state()
        assert not np.array_equal(later["static"], before["static"])
        assert checkpoint.load_tables(session, path) == ["dynamic", "static"]
        loaded = state()
        assert_same(loaded, before, ["static", "dynamic"])
        assert_same(loaded, later, ["w", "step"])
        step()
        went_on = state()
        checkpoint.load_tables(session, path, slots=False)
        assert_same(state(), before, ["static", "dynamic"])
        assert_same(state(), went_on, ["w", "step"])
    wait()
    if rank == 0:
        (first, rows), *_ = checkpoint.read_table(path, "static")
        np.testing.assert_array_equal(rows, before["static"])
        found = checkpoint.load(path)
        assert first == 0 and "w" not in found and "beta1_power" not in found
        assert "static/Adam" in found and "dynamic/Adam_1" in found


@pytest.mark.slow
def test_slots_are_those_of_the_dump(strategy, folder):
    """Rows and Adagrad's sums of squares go back, so the next step is the same one again."""
    with training(strategy, "adagrad") as (session, step, state):
        step()
        checkpoint.dump_tables(session, f"{folder}/after_1")
        step()
        expected = state()
        for _ in range(3):
            step()
        checkpoint.dump_tables(session, f"{folder}/after_5")
    for slots in (True, False):
        with training(strategy, "adagrad") as (session, step, state):
            step()
            checkpoint.load_tables(session, f"{folder}/after_5")
            checkpoint.load_tables(session, f"{folder}/after_1", slots=slots)
            step()
            if slots:
                assert_same(state(), expected, ["static", "dynamic", "w"])
            else:
                assert not np.array_equal(state()["static"], expected["static"])


@pytest.mark.slow
def test_one_table_of_a_whole_checkpoint(strategy, folder):
    with training(strategy) as (session, step, state):
        step()
        with session.graph.as_default():
            savers = tf.get_collection(tf.GraphKeys.SAVERS)
        savers[0].save(session._tf_sess(), f"{folder}/whole")
        saved = state()
        step()
        later = state()
        assert checkpoint.load_tables(session, f"{folder}/whole", ["static"]) == ["static"]
        assert_same(state(), saved, ["static"])
        assert_same(state(), later, ["dynamic", "w", "step"])


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [True, False])
def test_a_dump_is_replaced_and_is_no_checkpoint_of_the_job(strategy, folder, blocking):
    with training(strategy, checkpoint_blocking=blocking) as (session, step, state):
        step()
        before = milestones.poster().saves, milestones.poster().checkpoint_step
        for _ in range(2):
            step()
            expected = state()
            checkpoint.dump_tables(session, f"{folder}/tables", ["dynamic"], global_step=4)
        step()
        checkpoint.wait()
        assert (milestones.poster().saves, milestones.poster().checkpoint_step) == before
        checkpoint.load_tables(session, f"{folder}/tables-4", ["dynamic"])
        assert_same(state(), expected, ["dynamic"])
    wait()
    assert tf.train.latest_checkpoint(folder) is None
    assert not glob.glob(f"{folder}/*temp*")


@pytest.mark.slow
def test_what_is_refused(strategy, folder):
    with training(strategy) as (session, step, _):
        step()
        with pytest.raises(ValueError, match="no table 'user'; its tables are dynamic, static"):
            checkpoint.dump_tables(session, f"{folder}/tables", ["user"])
        checkpoint.dump_tables(session, f"{folder}/tables", ["static"])
        with pytest.raises(Exception, match="dynamic"):
            checkpoint.load_tables(session, f"{folder}/tables")
        step()
    with strategy.scope(), tf.Graph().as_default(), tf.Session() as session:
        with pytest.raises(ValueError, match="the graph has no tables: make them in"):
            checkpoint.dump_tables(session, f"{folder}/tables")
    with tf.Graph().as_default(), tf.Session() as session:
        with pytest.raises(RuntimeError, match="is for sessions inside strategy.scope"):
            checkpoint.load_tables(session, f"{folder}/tables")
