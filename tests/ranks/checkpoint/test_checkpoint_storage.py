"""Storage that fails costs a checkpoint, not the training; nothing half stays."""

import os
import resource
import shutil

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError, checkpoint
from collective.checkpoint.files import commit, storage, tensor_bundle
from collective.coordination.session_state import state_of_session
from collective.ops.graph.sessions import raw_session
from tests.ranks.checkpoints import model, steps, wait
from tests.ranks.stub_storage import Disk, StubStorage, warnings_noted

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 3)]


@pytest.fixture(params=[True, False], ids=["blocking", "background"])
def blocking(request):
    return request.param


def monitored(folder):
    return tf.train.MonitoredTrainingSession(
        checkpoint_dir=folder,
        save_checkpoint_steps=2,
        save_summaries_steps=0,
        log_step_count_steps=0,
    )


def joined(session):
    """Waits on all ranks for what writes during training, without hearing how it went."""
    save = state_of_session(raw_session(session)).background_save
    if save is not None:
        save._thread.join()
    wait()


def files(folder):
    return {name for name in os.listdir(folder) if name.startswith("model.ckpt")} - {
        "model.ckpt.owner"
    }


@pytest.mark.slow
def test_training_goes_on_and_the_next_save_tries_again(
    strategy, rank, size, folder, monkeypatch, blocking
):
    disk, warned = Disk(monkeypatch, rank, size), warnings_noted(monkeypatch)
    with strategy.scope(checkpoint_blocking=blocking), tf.Graph().as_default():
        m = model(strategy)
        with monitored(folder) as session:
            steps(session, m, rank, 1)
            joined(session)
            disk.error = OSError(28, "No space left on device")
            steps(session, m, rank, 4)  # saves at steps 2 and 4
            joined(session)
            disk.error = None
            steps(session, m, rank, 2)  # and 6, and 7 at the end
        wait()
        assert tf.train.latest_checkpoint(folder) == f"{folder}/model.ckpt-7"
        saved = {name.split(".")[1] for name in files(folder)}
        assert saved == {"ckpt-0", "ckpt-6", "ckpt-7"} and not any(
            "_temp_" in f for f in files(folder)
        )
        lost = [text for text in warned if "was not written" in text]
        assert len(lost) == (2 if rank == 0 else 0)
        for text in lost:
            assert f"rank {size - 1} on host" in text and "No space left on device" in text
            assert "The latest checkpoint is" in text and "model.ckpt-0'" in text
            needed, free = (int(x.replace(",", "")) for x in _numbers(text))
            assert needed > 3 * 9 * 3 * 4 and abs(free - shutil.disk_usage(folder).free) < 2**32


@pytest.mark.timeout(60)
def test_a_disk_without_room_for_words(strategy, rank, size, folder, monkeypatch):
    """A rank that can't say that its part failed is waited for no longer than that."""
    disk, GFile = Disk(monkeypatch, rank, size), tf.io.gfile.GFile

    class FullFile(GFile):
        def write(self, text):
            if disk.error is not None and rank == size - 1 and text and "note_" in self.name:
                raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")
            super().write(text)

    monkeypatch.setattr(tf.io.gfile, "GFile", FullFile)
    with strategy.scope(checkpoint_blocking=False), tf.Graph().as_default():
        m = model(strategy)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            disk.error = OSError(28, "No space left on device")
            tf.train.Saver().save(session, f"{folder}/model.ckpt", global_step=1)
            with pytest.raises(checkpoint.CheckpointStorageError, match=f"rank {size - 1}"):
                checkpoint.wait()
            disk.error = None
            tf.train.Saver().save(session, f"{folder}/model.ckpt", global_step=2)
            checkpoint.wait()
            steps(session, m, rank, 1)
    assert {name.split(".")[1] for name in files(folder)} == {"ckpt-2"}


def _numbers(text):
    import re

    return re.search(r"needs ([\d,]+) bytes, and in '.*' ([\d,]+) bytes are free", text).groups()


def test_the_last_save_is_never_lost_silently(strategy, rank, size, folder, monkeypatch, blocking):
    """A job must not end well without the state that it has come to."""
    disk = Disk(monkeypatch, rank, size)
    with strategy.scope(checkpoint_blocking=blocking), tf.Graph().as_default():
        m = model(strategy)
        words = "ckpt-4' was not written"
        with pytest.raises(checkpoint.CheckpointStorageError, match=words) as raised:
            with monitored(folder) as session:
                joined(session)
                disk.error = PermissionError(13, "Permission denied")
                steps(session, m, rank, 4)
    wait()
    assert "are free" not in str(raised.value)  # More room would not help.
    assert tf.train.latest_checkpoint(folder) == f"{folder}/model.ckpt-0"


def test_what_a_save_missed_is_saved_at_the_end(
    strategy, rank, size, folder, monkeypatch, blocking
):
    """TensorFlow's hook takes the last step for saved."""
    disk = Disk(monkeypatch, rank, size)
    with strategy.scope(checkpoint_blocking=blocking), tf.Graph().as_default():
        m = model(strategy)
        with monitored(folder) as session:
            steps(session, m, rank, 1)
            joined(session)
            disk.error = OSError(5, "Input/output error")
            steps(session, m, rank, 1)  # saves at step 2
            joined(session)
            disk.error = None
    wait()
    assert tf.train.latest_checkpoint(folder) == f"{folder}/model.ckpt-2"


def test_it_stops_if_asked(strategy, rank, size, folder, monkeypatch):
    disk = Disk(monkeypatch, rank, size)
    with strategy.scope(checkpoint_on_error="stop"), tf.Graph().as_default():
        m = model(strategy)
        with pytest.raises(checkpoint.CheckpointStorageError, match="No space left"):
            with monitored(folder) as session:
                disk.error = OSError(28, "No space left on device")
                steps(session, m, rank, 4)
    wait()


def test_a_limit_of_the_system(strategy, rank, folder):
    """TensorFlow's own operation meets it, and calls it the end of the data."""
    with strategy.scope(), tf.Graph().as_default():
        model(strategy, rows=4000)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10000, before[1]))
            try:
                with pytest.raises(checkpoint.CheckpointStorageError, match="File too large") as it:
                    saver.save(session, f"{folder}/m")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            assert not [name for name in os.listdir(folder) if not name.endswith(".owner")]
            # Nor does the error, as long as somebody has it, keep the room of what was removed.
            assert it.value is not None and not _removed_and_open(folder)
            wait()
            saver.save(session, f"{folder}/m")


def _removed_and_open(folder):
    opened = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    targets = [os.readlink(path) for path in opened if os.path.lexists(path)]
    return [path for path in targets if path.startswith(folder) and path.endswith(" (deleted)")]


def test_a_folder_that_is_gone(strategy, rank, folder):
    with strategy.scope(), tf.Graph().as_default():
        m = model(strategy)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for there in ("a", "a/b"):
                if rank == 0:
                    os.mkdir(f"{folder}/{there}")
            wait()
            saver.save(session, f"{folder}/a/b/m", global_step=1)
            wait()
            if rank == 0:
                shutil.rmtree(f"{folder}/a")
            wait()
            with pytest.raises(
                checkpoint.CheckpointStorageError, match="the folder is gone"
            ) as error:
                saver.save(session, f"{folder}/a/b/m", global_step=2)
            assert "There is no earlier checkpoint" in str(error.value)
            wait()
            steps(session, m, rank, 1)
            if rank == 0:
                os.mkdir(f"{folder}/a")
            wait()
            saver.save(session, f"{folder}/a/b/m", global_step=2)
            assert tf.train.latest_checkpoint(f"{folder}/a/b") == f"{folder}/a/b/m-2"


def test_a_folder_that_is_gone_is_known_among_others(strategy, rank, folder):
    """A job that saves in two folders by turns."""
    with strategy.scope(), tf.Graph().as_default():
        model(strategy)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            if rank == 0:
                os.makedirs(f"{folder}/a")
            wait()
            saver.save(session, f"{folder}/a/b/m")
            saver.save(session, f"{folder}/m")
            wait()
            if rank == 0:
                shutil.rmtree(f"{folder}/a")
            wait()
            with pytest.raises(checkpoint.CheckpointStorageError, match="the folder is gone"):
                saver.save(session, f"{folder}/a/b/m")
            with pytest.raises((ValueError, RankError), match="doesn't exist"):
                saver.save(session, f"{folder}/never/there/m")


@pytest.mark.slow
def test_a_job_does_not_begin_again_where_there_are_checkpoints(strategy, rank, folder):
    """TensorFlow takes a damaged file that names the latest checkpoint for none."""
    with strategy.scope(), tf.Graph().as_default():
        m = model(strategy)
        with monitored(folder) as session:
            steps(session, m, rank, 1)
    wait()
    with open(f"{folder}/checkpoint", "rb") as file:
        content = file.read()
    for damaged in (b"", b"\xff\x00", b"model_checkpoint_path"):
        wait()
        if rank == 0:
            with open(f"{folder}/checkpoint", "wb") as file:
                file.write(damaged)
        wait()
        before = set(os.listdir(folder))
        with strategy.scope(), tf.Graph().as_default():
            model(strategy)
            with pytest.raises((OSError, RankError), match="/checkpoint', which names the latest"):
                with monitored(folder):
                    pass
        assert set(os.listdir(folder)) <= before | {"graph.pbtxt"}
    wait()
    if rank == 0:
        with open(f"{folder}/checkpoint", "wb") as file:
            file.write(content)
    wait()
    with strategy.scope(), tf.Graph().as_default():
        m = model(strategy)
        with monitored(folder) as session:
            assert session.run(m["step"]) == 1
    wait()


def test_file_systems_that_are_not_there(strategy, rank):
    with strategy.scope(), tf.Graph().as_default():
        model(strategy)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            words = r"no file system for nowhere://. If fsspec has one: collective.data"
            with pytest.raises(ValueError, match=words):
                saver.save(session, "nowhere://bucket/folder/m")
            with pytest.raises(ValueError, match=words):
                saver.restore(session, "nowhere://bucket/folder/m")
        with pytest.raises(ValueError, match=words):
            with monitored("nowhere://bucket/folder"):
                pass


@pytest.fixture
def stub(folder, monkeypatch):
    return StubStorage(folder, monkeypatch)


def test_a_remote_file_system(strategy, rank, folder, stub, blocking):
    with strategy.scope(checkpoint_blocking=blocking), tf.Graph().as_default():
        m = model(strategy)
        saver = tf.train.Saver(max_to_keep=2)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for step in range(3):
                steps(session, m, rank, 1)
                want = session.run(m["rows"])
                saver.save(session, "stub://box/m", global_step=step)
            checkpoint.wait()
            steps(session, m, rank, 1)
            wait()
            saver.restore(session, f"{folder}/box/m-2")
            np.testing.assert_array_equal(session.run(m["rows"]), want)
    # Rank 0 may still be about to take its mark away.
    files = [name for name in os.listdir(f"{folder}/box") if name != "m.owner"]
    assert {name.partition(".")[0] for name in files} == {"m-1", "m-2", "checkpoint"}


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("what", ["save", "RenameFile", "merge", "CreateDir", "WritableFile"])
def test_a_remote_file_system_that_fails(strategy, rank, folder, stub, blocking, what):
    """Whatever fails: the checkpoint before stays the latest, and the next save works."""
    with strategy.scope(checkpoint_blocking=blocking), tf.Graph().as_default():
        m = model(strategy)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            saver.save(session, "stub://box/m", global_step=0)
            checkpoint.wait()
            wait()
            before = {name for name in os.listdir(f"{folder}/box") if not name.endswith(".owner")}
            wait()
            unavailable = tf.errors.UnavailableError(None, None, "the service is down")
            stub.fails = lambda did, path: unavailable if did == what and "_temp_" in path else None
            with pytest.raises(checkpoint.CheckpointStorageError, match="the service is down"):
                saver.save(session, "stub://box/m", global_step=1)
                checkpoint.wait()
            stub.fails = lambda did, path: None
            wait()
            assert tf.train.latest_checkpoint("stub://box") == "stub://box/m-0"
            wait()
            steps(session, m, rank, 1)
            saver.save(session, "stub://box/m", global_step=1)
            checkpoint.wait()
            wait()
            left = {name for name in os.listdir(f"{folder}/box") if not name.endswith(".owner")}
            assert not any("_temp_" in name for name in left) and before < left


@pytest.mark.slow
def test_a_remote_file_system_that_loses_what_is_moved(strategy, rank, folder, stub, monkeypatch):
    """Of each file in turn: the error says so, and the latest checkpoint is one that is there."""
    monkeypatch.setattr(commit, "VISIBILITY_TIMEOUT", 0.2)
    with strategy.scope(), tf.Graph().as_default():
        m = model(strategy)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            want = session.run(m["rows"])
            saver.save(session, "stub://box/m", global_step=0)
            for end in (".index", ".meta", "checkpoint", "data"):
                wait()
                stub.loses = lambda source, target, end=end: (
                    (target.endswith(end) or end == "data" and ".data-" in target)
                    and "_temp_" not in target
                )
                with pytest.raises(checkpoint.CheckpointStorageError, match="but doesn't exist"):
                    saver.save(session, "stub://box/m", global_step=1)
                stub.loses = lambda source, target: False
                wait()
                opened = tensor_bundle.Bundle(
                    tf.train.latest_checkpoint("stub://box") or "stub://box/m-0"
                )
                opened.check_files()
            saver.save(session, "stub://box/m", global_step=2)
            saver.restore(session, f"{folder}/box/m-2")
            np.testing.assert_array_equal(session.run(m["rows"]), want)


def test_a_remote_file_system_that_is_late(strategy, rank, folder, stub):
    """What was moved is seen a while later only."""
    stub.late = 2
    with strategy.scope(), tf.Graph().as_default():
        model(strategy)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            saver.save(session, "stub://box/m", global_step=0)
            assert rank > 0 or stub.looks > 2
            wait()
            saver.restore(session, f"{folder}/box/m-0")


def test_classes_of_errors():
    assert storage.is_failure(OSError(28, "No space left on device"))
    assert not storage.is_failure(OSError("another job saves here"))
    assert not storage.is_failure(ValueError("a mistake"))
    with pytest.raises(storage.StorageFailure, match="NotFoundError: gone"):
        with storage.failures():
            raise tf.errors.NotFoundError(None, None, "gone")
    with pytest.raises(tf.errors.InvalidArgumentError):
        with storage.failures():
            raise tf.errors.InvalidArgumentError(None, None, "a mistake")
