"""Checkpoints and exports in an object store, through fsspec: all ranks share it, and it fails."""

import os
import sys
import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError, checkpoint
from collective.coordination import barrier
from tests import object_store
from tests.object_store import ObjectStore, bring_down, bring_up
from tests.ranks import reference
from tests.ranks.checkpoints import model, steps, wait
from tests.ranks.exports import one_table, served, signature, trained
from tests.ranks.increments import restored, sessions_of
from tests.ranks.increments import trained as trained_rows

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 2)]

DOWN = ConnectionError("the service is down")


@pytest.fixture
def box(folder):
    """Returns a path of its own: TensorFlow keeps the writers of event files by their paths."""
    object_store.register(folder)
    yield f"objects://box/{os.path.basename(folder)}"
    bring_up()


def keys(folder):
    """Returns the keys of all objects, once all ranks are done."""
    wait()
    names = [object_store.unquote(name) for name in os.listdir(folder) if not name.startswith(".")]
    wait()
    return names


@pytest.mark.matrix
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
def test_a_monitored_session_continues(strategy, rank, folder, box, blocking):
    """Every operation on the store takes a while."""
    ObjectStore.before = staticmethod(lambda operation, key: threading.Event().wait(0.001))
    with strategy.scope(checkpoint_blocking=blocking):
        for start in (0, 3):
            with tf.Graph().as_default():
                m = model(strategy)
                with tf.train.MonitoredTrainingSession(
                    checkpoint_dir=box, save_checkpoint_steps=2
                ) as session:
                    assert session.run(m["step"]) == start
                    steps(session, m, rank, 3)
            wait()
            assert tf.train.latest_checkpoint(box) == f"{box}/model.ckpt-{start + 3}"
    found = keys(folder)
    assert any("/events." in key for key in found)
    assert not any("_temp" in key for key in found)


@pytest.mark.parametrize("fails", ["write", "copy", "info"])
def test_a_save_that_fails_is_an_error_of_all_ranks(strategy, rank, size, folder, box, fails):
    """It names the file and the cause; what was there stays, and the session goes on."""
    with strategy.scope(), tf.Graph().as_default():
        m = model(strategy)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            steps(session, m, rank, 1)
            wait()
            want = session.run(m["rows"])
            saver.save(session, f"{box}/m", global_step=0)
            before = keys(folder)
            if rank == 0 or (rank == size - 1 and fails != "copy"):
                bring_down(DOWN, fails, name="m-1")
            words = f"{box}/m-1.*the service is down"
            with pytest.raises(checkpoint.CheckpointStorageError, match=words):
                saver.save(session, f"{box}/m", global_step=1)
            bring_up()
            assert sorted(keys(folder)) == sorted(before)
            steps(session, m, rank, 1)
            saver.save(session, f"{box}/m", global_step=2)
            saver.restore(session, f"{box}/m-0")
            np.testing.assert_array_equal(session.run(m["rows"]), want)


@pytest.mark.matrix
def test_increments(strategy, rank, folder, box):
    for step in sessions_of(strategy, box):
        for row in (3, 4, 5):
            step(row)
    for step in sessions_of(strategy, box):
        step(6)
    done, rows = restored(strategy, box)
    assert done == 4
    np.testing.assert_array_equal(rows, trained_rows(strategy, 3, 4, 5, 6))


@pytest.mark.backends("hb")
@pytest.mark.matrix
def test_an_export_with_a_base(strategy, folder, box):
    """A folder is renamed by copies; a version that couldn't be copied doesn't exist."""
    prefix = trained(strategy, one_table, "objects://box")

    def export():
        barrier.exchange(None, "exporting", {})
        return strategy.export_saved_model(box, prefix, signature(strategy, one_table), base=box)

    first = export()
    bring_down(DOWN, "copy")
    with pytest.raises((OSError, tf.errors.OpError, RankError), match="the service is down"):
        export()
    bring_up()
    wait()
    assert tf.io.gfile.listdir(box) == [os.path.basename(first)]
    second = export()
    wait()
    assert sorted(tf.io.gfile.listdir(box)) == sorted(map(os.path.basename, (first, second)))
    for path in (first, second):
        rows = served(path, {"p": range(5)})["rows"]
        np.testing.assert_array_equal(rows, reference.table_values(5, 2))


def test_a_folder_without_a_file_system(strategy, folder, monkeypatch):
    """Which of fsspec's packages is missing is said before anything is exported."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    prefix = trained(strategy, one_table, folder)
    with pytest.raises(ValueError, match=r"'s3://box/e'.*[Ii]nstall s3fs"):
        strategy.export_saved_model("s3://box/e", prefix, signature(strategy, one_table))
