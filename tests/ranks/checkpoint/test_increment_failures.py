"""Increments where storage fails, or what they would follow is gone, replaced or not the latest."""

import os
import shutil

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError, checkpoint
from collective.coordination import barrier, milestones
from tests.ranks.increments import build, increments_in, restored, sessions_of, trained
from tests.ranks.stub_storage import Disk, warnings_noted

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3)]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
def test_increments_go_on_after_a_whole_save_that_failed(
    strategy, rank, size, folder, monkeypatch, blocking
):
    """They follow the whole checkpoint before, and have what was to be in the one that failed."""
    disk, warned = Disk(monkeypatch, rank, size), warnings_noted(monkeypatch)
    for step in sessions_of(strategy, folder, checkpoint_blocking=blocking):
        for row in (3, 4, 5):
            step(row)
        disk.error = OSError(28, "No space left on device")
        step(6)  # A whole save.
        step(7)  # By then a save during training has failed, too, and an increment fails.
        disk.error = None
        step(8)
    last = f"{folder}/model.ckpt-0.increment-4"
    assert increments_in(folder)[-1] == os.path.basename(last)
    posted = []  # What a launcher says of a restart.
    monkeypatch.setattr(
        milestones.MilestonePoster, "has_checkpoint", lambda _, *given: posted.append(given)
    )
    done, rows = restored(strategy, folder)
    assert done == 6 and posted == [(last, 6)]
    np.testing.assert_array_equal(rows, trained(strategy, 3, 4, 5, 6, 7, 8))
    # The whole save, an increment of the same step, and the next one.
    lost = [text for text in warned if "was not written" in text]
    assert len(lost) == (0 if rank else 3)
    assert all(f"latest checkpoint is '{last[:-1]}3' (step 3)." in text for text in lost)


@pytest.mark.slow
def test_a_folder_that_is_gone_is_a_failure_of_the_storage(strategy, rank, folder):
    """Training continues. Once it can be saved again, a whole checkpoint is, before its time."""
    inner, saved = f"{folder}/a/b", []
    barrier.run_on_all_ranks(None, "a", lambda: rank or os.makedirs(f"{folder}/a"))
    for step in sessions_of(strategy, inner):
        step(3)
        barrier.run_on_all_ranks(None, "b", lambda: rank or shutil.rmtree(f"{folder}/a"))
        step(4)
        step(5)
        assert not os.path.exists(f"{folder}/a")
        barrier.exchange(None, "c", {})
        barrier.run_on_all_ranks(None, "d", lambda: rank or os.makedirs(f"{folder}/a"))
        step(6)
        saved.append(tf.train.latest_checkpoint(inner))
        step(7)
    assert saved == [f"{inner}/model.ckpt-4"] and increments_in(inner)
    done, rows = restored(strategy, inner)
    assert done == 5
    np.testing.assert_array_equal(rows, trained(strategy, 3, 4, 5, 6, 7))
    with pytest.raises(checkpoint.CheckpointStorageError, match="ckpt-5', which it would .* gone"):
        for step in sessions_of(strategy, inner, checkpoint_on_error="stop"):
            step(3)
            barrier.run_on_all_ranks(None, "e", lambda: rank or shutil.rmtree(folder + "/a"))
            step(4)


def on_rank_0(rank, step):
    barrier.run_on_all_ranks(None, "a step of rank 0", lambda: rank or step())


@pytest.mark.parametrize("how", ["missing", "damaged", "empty"])
def test_the_file_that_tells_the_latest_is_gone_or_damaged(
    strategy, rank, folder, monkeypatch, how
):
    """A whole checkpoint is saved in the place of the increment; training goes on."""
    warned, path, saved = warnings_noted(monkeypatch), f"{folder}/checkpoint", []

    def spoil():
        os.remove(path)
        if how != "missing":
            with open(path, "wb") as file:
                file.write(b"\x00\xffmodel_checkpoint" if how == "damaged" else b"")

    for step in sessions_of(strategy, folder):
        step(3)
        on_rank_0(rank, spoil)
        step(4)
        saved.append(tf.train.latest_checkpoint(folder))
        step(5)
    assert saved == [f"{folder}/model.ckpt-2"]
    assert increments_in(folder)[-1] == "model.ckpt-2.increment-1"
    done, rows = restored(strategy, folder)
    assert done == 3
    np.testing.assert_array_equal(rows, trained(strategy, 3, 4, 5))
    lost = [text for text in warned if "gone or damaged" in text and "was not written" in text]
    assert len(lost) == (0 if rank else 1)
    for text in lost:
        assert f"'{path}'" in text and f"is '{folder}/model.ckpt-0.increment-1'." in text
        assert "are free" not in text


class Trainer:
    """Is a model with a session of its own, whose Saver begins chains in a folder."""

    def __init__(self, strategy, folder):
        self.folder = folder
        _, self._ids, self._train, _ = build(strategy)
        self.saver = tf.train.Saver()
        checkpoint.enable_increments(folder)
        self.session = tf.Session()
        self.session.run(tf.global_variables_initializer())

    def step(self, row):
        self.session.run(self._train, {self._ids: [row]})

    def save(self, name="m", **options):
        return self.saver.save(self.session, f"{self.folder}/{name}", **options)

    def increment(self):
        return checkpoint.save_increment(self.session, self.folder)


@pytest.mark.slow
def test_a_base_that_was_replaced_before_its_first_increment(strategy, folder):
    """Another session saves under the same name: what changed since ours belongs to nothing."""
    with strategy.scope(plan="quiet"):
        with tf.Graph().as_default():
            ours = Trainer(strategy, folder)
            ours.step(3)
            ours.save()
        with tf.Graph().as_default():
            other = Trainer(strategy, folder)
            other.save()
        ours.step(4)
        with pytest.raises(
            (ValueError, RankError), match="'.*/m' with the id '[0-9a-f]+', but ano"
        ):
            ours.increment()
        assert increments_in(folder) == []
        ours.save()
        ours.step(5)
        assert ours.increment() == f"{folder}/m.increment-1"
        ours.session.close()
        other.session.close()
    done, rows = restored(strategy, folder)
    assert done == 3
    np.testing.assert_array_equal(rows, trained(strategy, 3, 4, 5))


@pytest.mark.slow
def test_a_whole_checkpoint_that_is_not_the_latest_begins_no_chain(strategy, folder):
    """No restart would find its increments: they follow the latest one, and miss nothing."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        ours = Trainer(strategy, folder)
        ours.save("aside", write_state=False)
        with pytest.raises(ValueError, match="no whole checkpoint in .*write_state=False"):
            ours.increment()
        ours.save()
        ours.step(3)
        ours.save("aside", write_state=False)
        ours.save("other", latest_filename="others")
        ours.step(4)
        assert ours.increment() == f"{folder}/m.increment-1"
        ours.save(write_state=False)  # In the place of the latest, and so the latest.
        ours.step(5)
        assert ours.increment() == f"{folder}/m.increment-1"
        ours.session.close()
    done, rows = restored(strategy, folder)
    assert done == 3
    np.testing.assert_array_equal(rows, trained(strategy, 3, 4, 5))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("increments_too", [False, True], ids=["whole fails", "all fail"])
def test_the_last_whole_save_fails(strategy, rank, size, folder, monkeypatch, increments_too):
    """An increment takes less room: if it can be written a job has ended well."""
    disk, warned = Disk(monkeypatch, rank, size), warnings_noted(monkeypatch)

    def run():
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            _, ids, train, _ = build(strategy)
            with tf.train.MonitoredTrainingSession(
                checkpoint_dir=folder, save_checkpoint_steps=9, save_incremental_checkpoint_steps=2
            ) as session:
                for row in (3, 4, 5):
                    session.run(train, {ids: [row]})
                disk.error = OSError(28, "No space left on device")
                disk.spares = None if increments_too else ".increment-"
        disk.error = None

    if increments_too:
        with pytest.raises(checkpoint.CheckpointStorageError, match="ckpt-3' was not written"):
            run()
    else:
        run()
    disk.error = None
    done, rows = restored(strategy, folder)
    assert done == (2 if increments_too else 3)
    np.testing.assert_array_equal(rows, trained(strategy, *(3, 4, 5)[:done]))
    said = [text for text in warned if "nothing is lost" in text]
    assert len(said) == (0 if rank or increments_too else 1)
    assert all(
        "ckpt-3' was not written" in t and "increment-2' has all of step 3" in t for t in said
    )
