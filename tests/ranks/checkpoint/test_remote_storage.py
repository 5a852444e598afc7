"""Increments, restarts, consumers and exports where a remote file system fails, comes late, or
loses what is moved.
"""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError, checkpoint
from collective.checkpoint.files import chain, commit
from collective.coordination import barrier
from tests.ranks import reference
from tests.ranks.checkpoints import wait
from tests.ranks.exports import one_table, served, signature
from tests.ranks.exports import trained as exported_model
from tests.ranks.increments import build, restored, sessions_of, trained
from tests.ranks.stub_storage import StubStorage, warnings_noted

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3)]

BOX = "stub://box"
DOWN = tf.errors.UnavailableError(None, None, "the service is down")


@pytest.fixture
def stub(folder, monkeypatch):
    monkeypatch.setattr(commit, "VISIBILITY_TIMEOUT", 0.2)
    return StubStorage(folder, monkeypatch)


def left_in(folder):
    """Lists the folder once all ranks are done."""
    wait()
    names = {name for name in os.listdir(f"{folder}/box") if not name.endswith(".owner")}
    wait()
    return names


class Job:
    """Trains in a session of its own that saves in `BOX`; a consumer follows its table."""

    def __init__(self, strategy):
        _, self._ids, self._train, self.step = build(strategy)
        self.saver = tf.train.Saver()
        checkpoint.enable_increments(BOX)
        self.consumer = checkpoint.changes("serving")
        self.session, self.trained = tf.Session(), []
        self.session.run(tf.global_variables_initializer())

    def train(self, row):
        self.session.run(self._train, {self._ids: [row]})
        self.trained.append(row)

    def save(self):
        self.saver.save(self.session, f"{BOX}/m", global_step=self.step)

    def increment(self):
        return checkpoint.save_increment(self.session, BOX)

    def taken(self):
        """Returns the rows that changed since the consumer looked last, on this rank."""
        with self.consumer.take(self.session) as updates:
            blocks = list(updates["s"].blocks())
        return {int(key): row for keys, rows in blocks for key, row in zip(keys, rows)}

    def check(self, strategy, rank, size, changed):
        """Looks at what is there, and at what the consumer gets."""
        done, rows = restored(strategy, BOX)
        wanted = trained(strategy, *self.trained)
        assert done == len(self.trained)
        np.testing.assert_array_equal(rows, wanted)
        found = self.taken()
        assert sorted(found) == [row for row in sorted(changed) if row % size == rank]
        for key, row in found.items():
            np.testing.assert_array_equal(row, wanted[key])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("what", ["RenameFile", "WritableFile", "merge", "save", "CreateDir"])
def test_an_increment_that_fails(strategy, rank, size, folder, stub, what):
    """The state before stays, the next increment has all that has changed, and so do consumers."""
    with strategy.scope(plan="quiet"):
        with tf.Graph().as_default():
            job = Job(strategy)
            job.save()
            job.taken()
            job.train(3)
            job.increment()
            before = left_in(folder)
            job.train(4)
            stub.fails = lambda did, path: DOWN if did == what and "increment-2" in path else None
            with pytest.raises(checkpoint.CheckpointStorageError, match="service is down") as error:
                job.increment()
            stub.fails = lambda did, path: None
            assert f"'{BOX}/m-0.increment-1' (step 1)" in str(error.value)
            assert left_in(folder) == before
            job.train(5)
            assert job.increment() == f"{BOX}/m-0.increment-2"
            job.check(strategy, rank, size, [3, 4, 5])
            assert not any("_temp_" in name for name in left_in(folder))
            job.session.close()


@pytest.mark.slow
def test_an_increment_of_which_files_are_lost(strategy, rank, size, folder, stub):
    """Of each file in turn: what is there can be restored, and what follows is complete."""
    with strategy.scope(plan="quiet"):
        with tf.Graph().as_default():
            job = Job(strategy)
            job.save()
            job.taken()
            for row, end in enumerate((".index", "data")):
                job.train(row)
                stub.loses = lambda source, target, end=end: (
                    "increment" in target
                    and (target.endswith(end) or end == "data" and ".data-" in target)
                    and "_temp_" not in target
                )
                with pytest.raises(checkpoint.CheckpointStorageError, match="but doesn't exist"):
                    job.increment()
                stub.loses = lambda source, target: False
                wait()
                for part in chain.open_chain(f"{BOX}/m-0").increments:
                    part.check_files()
            job.increment()
            job.check(strategy, rank, size, [0, 1])
            job.session.close()


@pytest.mark.slow
def test_a_file_system_that_is_late(strategy, rank, size, folder, stub, monkeypatch):
    """What was moved is seen a while later only: no increment is missed by a restart."""
    monkeypatch.setattr(commit, "VISIBILITY_TIMEOUT", 10.0)
    with strategy.scope(plan="quiet"):
        with tf.Graph().as_default():
            job = Job(strategy)
            stub.late = 2
            job.save()
            job.taken()
            for row in (3, 4):
                job.train(row)
                job.increment()
            assert rank > 0 or stub.looks > 4
            stub.late = 0
            wait()
            job.check(strategy, rank, size, [3, 4])
            job.session.close()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
def test_a_job_that_is_started_again(strategy, rank, size, folder, stub, monkeypatch, blocking):
    """It goes on at the newest state, whatever failed before; a restore that fails says so."""
    warned = warnings_noted(monkeypatch)

    def down(did, path):
        return DOWN if did in ("RenameFile", "save") and "_temp_" in path else None

    for step in sessions_of(strategy, BOX, checkpoint_blocking=blocking):
        for row in (3, 4, 5):
            step(row)
        stub.fails = down
        step(6)  # A whole save, and
        step(7)  # an increment.
        stub.fails = lambda did, path: None
        step(8)
    assert len([text for text in warned if "service is down" in text]) == (0 if rank else 3)
    for does, file in (("restore", ""), ("FileExists", "checkpoint"), ("Stat", ".index")):
        stub.fails = lambda did, path, does=does, file=file: (
            DOWN if did == does and path.endswith(file) else None
        )
        with pytest.raises((OSError, tf.errors.OpError, RankError), match="service is down"):
            for _ in sessions_of(strategy, BOX, checkpoint_blocking=blocking):
                raise AssertionError("it began without its checkpoint")
        stub.fails = lambda did, path: None
        wait()
    for step in sessions_of(strategy, BOX, checkpoint_blocking=blocking):
        for row in (9, 10):
            step(row)
    done, rows = restored(strategy, BOX)
    assert done == 8
    np.testing.assert_array_equal(rows, trained(strategy, 3, 4, 5, 6, 7, 8, 9, 10))


@pytest.mark.backends("hb")
@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", ["loses", "fails", "late"])
def test_an_export_with_a_base(strategy, rank, folder, stub, fault):
    """A version whose files fail or are lost doesn't exist; the next one is complete."""
    prefix = exported_model(strategy, one_table, folder)

    def export():
        return strategy.export_saved_model(BOX, prefix, signature(strategy, one_table), base=BOX)

    first = export()
    barrier.exchange(None, "exported", {})
    if fault == "late":
        stub.late = 2
    elif fault == "fails":
        stub.fails = lambda did, path: DOWN if did == "RenameFile" else None
    else:
        stub.loses = lambda source, target: os.path.dirname(target) == BOX
    if fault != "late":
        with pytest.raises(
            (OSError, tf.errors.OpError, RankError), match="down|doesn't exist there"
        ):
            export()
        wait()
        assert os.listdir(f"{folder}/box") == [os.path.basename(first)]
        stub.fails, stub.loses = (lambda did, path: None), (lambda source, target: False)
    wait()
    second = export()
    wait()
    assert sorted(os.listdir(f"{folder}/box")) == sorted(map(os.path.basename, (first, second)))
    for path in (first, second):
        local = path.replace("stub://", f"{folder}/")
        rows = served(local, {"p": range(5)})["rows"]
        np.testing.assert_array_equal(rows, reference.table_values(5, 2))
