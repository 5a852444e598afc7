"""The best checkpoints are kept: by value, across restarts, and whole when a job is killed."""

from __future__ import annotations

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import checkpoint
from collective.checkpoint import KeepBest
from collective.checkpoint.files import commit
from tests.foreign_checkpoints import deeprec


class Cut(BaseException):
    pass


@pytest.fixture
def job(tmp_path):
    """Returns job(step, value), which saves a checkpoint and keeps it if it is good."""

    def save_and_keep(step, value, option=("auc", "max", 2), content=None):
        prefix = str(tmp_path / f"model.ckpt-{step}")
        deeprec.write(prefix, {"w": np.float32([step if content is None else content])})
        out = checkpoint.keep_best(prefix, {"auc": value, "loss": 1 - value}, option)
        for path in tmp_path.glob("model.ckpt-*"):
            path.unlink()  # as max_to_keep does
        return out

    return save_and_keep


def kept(tmp_path):
    """Returns {step: content} of the kept checkpoints, the best one at the end."""
    state = tf.train.get_checkpoint_state(str(tmp_path / "best"))
    if state is None:
        return {}
    return {
        int(path.rpartition("-")[2]): float(tf.train.load_variable(path, "w")[0])
        for path in state.all_model_checkpoint_paths
    }


def test_the_best_are_kept(tmp_path, job):
    decisions = [job(s, v) for s, v in [(1, 0.5), (2, 0.7), (3, 0.4), (4, 0.6), (5, 0.8)]]
    assert decisions == [True, True, False, True, True]
    assert list(kept(tmp_path)) == [2, 5]
    assert tf.train.latest_checkpoint(str(tmp_path / "best")).endswith("model.ckpt-5")
    assert checkpoint.load(str(tmp_path / "best"))["w"] == 5
    files = {
        path.name.partition(".index")[0].partition(".data")[0]
        for path in (tmp_path / "best").iterdir()
    }
    assert files == {"model.ckpt-2", "model.ckpt-5", "record.json", "checkpoint"}


def test_a_folder_by_its_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    deeprec.write("model.ckpt-1", {"w": np.float32([1])})
    assert checkpoint.keep_best("model.ckpt-1", {"auc": 0.5}, ("auc", "max", 1))
    os.unlink("model.ckpt-1.index")
    assert checkpoint.load("best")["w"] == 1
    os.rename("best", "moved")
    assert checkpoint.load("moved")["w"] == 1


def test_less_is_better(tmp_path, job):
    for step, value in enumerate([0.5, 0.7, 0.4], 1):
        job(step, value, ("loss", "min"))
    assert list(kept(tmp_path)) == [2]


def test_of_equal_ones_the_first_stays_and_nan_is_none(tmp_path, job):
    assert job(1, 0.5) and job(2, 0.5) and not job(3, 0.5) and not job(4, float("nan"))
    assert list(kept(tmp_path)) == [2, 1]
    assert job(5, float("inf"))
    assert list(kept(tmp_path)) == [1, 5]


def test_a_checkpoint_that_is_evaluated_again(tmp_path, job):
    job(1, 0.5)
    job(2, 0.6)
    assert job(2, 0.4) and list(kept(tmp_path)) == [2, 1]
    assert job(2, 0.7, content=20) and kept(tmp_path) == {1: 1.0, 2: 20.0}
    job(3, 0.8)
    assert not job(2, 0.3, ("auc", "max", 1)) and list(kept(tmp_path)) == [3]


@pytest.mark.parametrize("new", [3, 2])
@pytest.mark.parametrize("at", range(14))
def test_a_kill_at_any_step_leaves_checkpoints_whole(tmp_path, job, monkeypatch, at, new):
    job(1, 0.5)
    job(2, 0.6)
    steps = {"count": 0}

    def cut(owner, name):
        function = getattr(owner, name)

        def step(*args, **kwargs):
            if steps["count"] == at:
                raise Cut
            steps["count"] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, step)

    cut(os, "link")
    cut(commit, "move")
    cut(commit, "sync")
    cut(tf.io.gfile, "remove")
    try:
        job(new, 0.7, content=20)
    except Cut:
        pass
    monkeypatch.undo()
    found = kept(tmp_path)
    assert all(value in (step, 20) for step, value in found.items())
    assert 2 in found or new == 2 and 1 in found
    job(new, 0.7, content=20)
    assert kept(tmp_path) == {3: {2: 2.0, 3: 20.0}, 2: {1: 1.0, 2: 20.0}}[new]
    assert len(list((tmp_path / "best").glob("*.index"))) == 2


def test_where_there_are_no_links_files_are_copied(tmp_path, job, monkeypatch):
    def no_link(*_):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", no_link)
    assert job(1, 0.5) and kept(tmp_path) == {1: 1.0}


def test_what_cannot_be_kept_is_an_error(tmp_path, job):
    with pytest.raises(ValueError, match="no metric 'f1' .there is: auc, loss"):
        job(1, 0.5, ("f1", "max"))
    job(1, 0.5)
    with pytest.raises(ValueError, match=r"best checkpoints by auc .max., not by loss .min."):
        job(2, 0.5, ("loss", "min"))
    with pytest.raises(ValueError, match="there is no checkpoint"):
        checkpoint.keep_best(str(tmp_path / "none"), {"auc": 1}, ("auc", "max"))
    for bad in ["auc", ("auc",), ("auc", "most"), ("auc", "max", 0), ("", "min"), 5]:
        with pytest.raises(ValueError, match="keep_best"):
            KeepBest.of(bad)
