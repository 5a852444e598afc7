"""A save that is cut off at any of its steps leaves a checkpoint that can be restored, and the next
one leaves no litter.

`Cut` stands for SIGKILL: nothing that the library does afterwards runs, since nothing here catches
it.
"""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.checkpoint import checkpoint_management

from collective.checkpoint.files import commit, tensor_bundle
from collective.checkpoint.files.layout import CheckpointLayout


class Cut(BaseException):
    pass


@pytest.fixture
def cut(monkeypatch):
    """Returns cut(n), which lets the n-th step from now on raise, before or after it was done.

    cut(None) lets none raise. Both return the steps so far.
    """
    state = {"count": 0, "at": None, "after": False}

    def stepping(function):
        def step(*args, **kwargs):
            state["count"] += 1
            if state["count"] == state["at"] and not state["after"]:
                raise Cut
            out = function(*args, **kwargs)
            if state["count"] == state["at"]:
                raise Cut
            return out

        return step

    monkeypatch.setattr(commit, "move", stepping(commit.move))
    monkeypatch.setattr(commit, "sync", stepping(commit.sync))
    for owner, name in (
        (tensor_bundle, "merge"),
        (tensor_bundle.BundleWriter, "_flush"),
        (tf.io.gfile, "rmtree"),
        (tf.io.gfile, "mkdir"),
        (tf.io.gfile, "remove"),
        (checkpoint_management, "remove_checkpoint"),
    ):
        monkeypatch.setattr(owner, name, stepping(getattr(owner, name)))

    def arm(at, after=False):
        count, state["count"], state["at"], state["after"] = state["count"], 0, at, after
        return count

    return arm


def save(folder, step, files, keep=2, before=(), value=None):
    """As Saver.save does: `files` files of one variable whose values all are `value`, by default
    `step`.
    """
    base, prefix = f"{folder}/m", f"{folder}/m-{step}"
    kept = [*(p for p in before if p != prefix), prefix]
    made = commit.Commit(base, prefix)
    written = []
    for i in range(files):
        writer = tensor_bundle.BundleWriter(f"{made.staging}/rank_{i}")
        writer.add(
            "v", (files * 2, 1), i * 2, np.full((2, 1), float(step if value is None else value))
        )
        written += writer.close()
    commit.sync_bundles(written)
    made.merge(written, CheckpointLayout())
    with open(made.meta, "w") as file:
        file.write(f"{step}")
    checkpoint_management.update_checkpoint_state_internal(
        folder, prefix, list(kept[-keep:]), os.path.relpath(made.state, folder)
    )
    made.publish(commit.Publication(f"{prefix}.meta", f"{folder}/checkpoint", kept[:-keep]))
    return kept[-keep:]


def values(prefix):
    return set(tf.train.load_checkpoint(prefix).get_tensor("v").ravel().tolist())


def check_no_litter(folder):
    listed = list(tf.train.get_checkpoint_state(folder).all_model_checkpoint_paths)
    used = {"checkpoint"}
    for prefix in listed:
        opened = tensor_bundle.Bundle(prefix)
        opened.check_files()
        used |= {
            os.path.basename(p) for p in [*opened.data_paths(), f"{prefix}.index", f"{prefix}.meta"]
        }
    assert set(os.listdir(folder)) == used


def scenario(folder, again):
    """Writes two checkpoints, then a third, which deletes the first.

    Or writes the second again, with another value and as many files.
    """
    kept = save(folder, 1, 2)
    kept = save(folder, 2, 2, before=kept)
    return (2, 2, 2, kept) if again == "same" else (2, 3, 1, kept) if again else (3, 2, 2, kept)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "again, after", [(False, True), (True, False), ("same", False), ("same", True)]
)
def test_every_moment(tmp_path, cut, again, after):
    moment = 0
    while True:
        moment += 1
        folder = str(tmp_path / f"{moment}")
        os.mkdir(folder)
        step, files, keep, before = scenario(folder, again)
        cut(moment, after)
        try:
            save(folder, step, files, keep, before, value=7)
        except Cut:
            cut(None)
        else:
            assert cut(None) < moment
            break
        latest = tf.train.latest_checkpoint(folder)
        assert latest in (f"{folder}/m-2", f"{folder}/m-{step}")
        old, new = {2.0}, {7.0}
        assert values(latest) in (
            (old, new) if step == 2 else (new,) if latest.endswith("3") else (old,)
        ), moment
        for other in (f"{folder}/m-1", f"{folder}/m-2"):
            if latest != f"{folder}/m-3" and keep > 1:
                assert values(other)
        listed = list(tf.train.get_checkpoint_state(folder).all_model_checkpoint_paths)
        save(folder, 4, 1, before=[p for p in listed if os.path.exists(f"{p}.index")])
        check_no_litter(folder)
    assert moment > 15


@pytest.mark.slow
def test_cleaning_may_be_cut_off_too(tmp_path, cut):
    """Killed at some moment, then killed again while that is cleaned up."""
    for moment in range(10, 40, 5):
        for second in (1, 2, 4, 7):
            folder = str(tmp_path / f"{moment}_{second}")
            os.mkdir(folder)
            step, files, keep, before = scenario(folder, moment % 2 == 0)
            for at, what in ((moment, (step, files, keep, before)), (second, (5, 1, 2, before))):
                cut(at)
                try:
                    save(folder, *what)
                except Cut:
                    pass
                cut(None)
                assert values(tf.train.latest_checkpoint(folder))
            listed = list(tf.train.get_checkpoint_state(folder).all_model_checkpoint_paths)
            save(folder, 6, 1, before=[p for p in listed if os.path.exists(f"{p}.index")])
            check_no_litter(folder)


def test_other_base_names_are_left_alone(tmp_path, cut):
    save(tmp_path, 1, 1)
    for name in (
        "other-1_temp_0123456789abcdef",
        "m2_temp_0123456789abcdef",
        "m_temp",
        "m-1_temp_short",
    ):
        (tmp_path / name).mkdir()
    save(tmp_path, 2, 1)
    assert len([p for p in tmp_path.iterdir() if "_temp" in p.name]) == 4


def test_a_full_disk_at_the_first_file_leaves_no_folder(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commit, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        commit.Commit(f"{tmp_path}/m", f"{tmp_path}/m-1")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("again", [False, True])
def test_what_is_moved_is_on_the_disk_and_moves_are_in_order(tmp_path, monkeypatch, again):
    """A loss of power keeps what was synced, and of all else anything or nothing."""
    folder, move, fsync = str(tmp_path), commit.move, os.fsync
    synced, moved = {}, []

    def noted(handle):
        of_file = os.fstat(handle)
        synced[of_file.st_ino] = of_file.st_mtime_ns
        fsync(handle)
        if os.path.samestat(of_file, os.stat(folder)):
            moved.append("-- synced --")

    def checked(source, target):
        of_file, staging = os.stat(source), os.stat(os.path.dirname(source))
        assert synced.get(of_file.st_ino) == of_file.st_mtime_ns, f"{source} was not synced"
        if os.path.dirname(target) == folder:
            record = os.stat(f"{os.path.dirname(source)}/record")
            assert synced.get(record.st_ino) == record.st_mtime_ns, "the record was not"
            assert staging.st_ino in synced, "the record's folder was not"
            moved.append(os.path.basename(target))
        move(source, target)

    step, files, keep, before = scenario(folder, again)
    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(commit, "move", checked)
    save(folder, step, files, keep, before, value=7)
    shards = tensor_bundle.BundleIndex(f"{folder}/m-{step}").shards
    name = f"m-{step}"
    data = [f"{name}.data-{i:05d}-of-{shards:05d}" for i in range(shards)]
    index, meta_and_state = [f"{name}.index"], [f"{name}.meta", "checkpoint"]
    end = ["-- synced --"]
    assert moved == [*data, *end, *index, *end, *meta_and_state, *end]


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_a_record_that_was_cut_off_tells_of_nothing(tmp_path, monkeypatch, kept):
    folder, sync = str(tmp_path), commit.sync
    before = save(folder, 2, 2, before=save(folder, 1, 2))

    def cut_off(path, *others):
        if os.path.basename(path) == commit.RECORD:
            text = open(path).read()
            assert len(text) > 100
            with open(path, "w") as file:
                file.write(text[:kept])
            raise Cut
        sync(path, *others)

    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(commit, "sync", cut_off)
        save(folder, 2, 3, before=before, value=7)
    assert values(f"{folder}/m-2") == {2.0}
    save(folder, 4, 1, before=before)
    check_no_litter(folder)


def test_a_checkpoint_that_is_there_is_one_though_nothing_can_be_removed(tmp_path, monkeypatch):
    """A save of which only the removal fails hasn't failed: a restart takes its checkpoint."""
    folder, remove = str(tmp_path), tf.io.gfile.rmtree
    kept = save(folder, 2, 2, before=save(folder, 1, 2))

    def refuse(path):
        raise tf.errors.PermissionDeniedError(None, None, f"{path}; Permission denied")

    monkeypatch.setattr(tf.io.gfile, "rmtree", refuse)
    for step in (3, 4):  # nor by the save after it
        kept = save(folder, step, 2, before=kept)
        assert tf.train.latest_checkpoint(folder) == f"{folder}/m-{step}"
        assert values(f"{folder}/m-{step}") == {step}
    monkeypatch.setattr(tf.io.gfile, "rmtree", remove)
    save(folder, 5, 2, before=kept)
    check_no_litter(folder)
