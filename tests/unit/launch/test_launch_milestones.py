"""Tests the board of milestones, and what the launcher says of them at the end."""

from __future__ import annotations

import os
import signal
import time

import pytest

from collective.coordination.milestones import MilestonePoster
from collective.job.milestones import VARIABLE, LauncherMilestones, MilestoneBoard, Milestones
from collective.job.preempt_signals import signal_number
from collective.launch.progress.preemption import departure


@pytest.fixture
def board():
    board = LauncherMilestones(2)
    yield board
    board.close()


def test_what_is_posted_is_read(board):
    posted = Milestones(7, 3, 10, "/models/a/model.ckpt-12", 12)
    MilestoneBoard.open(board.path).post(1, posted)
    assert board.read(1) == posted and board.read(0) == Milestones()
    board.post_steps(1, 5)
    assert board.read(1).steps == 5 and board.read(1).last_step == 15
    with pytest.raises(IndexError):
        board.read(2)


def test_a_long_path_keeps_its_end(board):
    board.post(0, Milestones(7, checkpoint="x" * 9000 + "/m-3", step=3))
    assert board.read(0).checkpoint.endswith("/m-3") and board.read(1) == Milestones()


def test_a_rank_posts_its_steps_and_checkpoints(board):
    environment = {VARIABLE: board.path, "RANK": "1"}
    poster = MilestonePoster(environment)
    poster.has_checkpoint("/m/model.ckpt-40")
    for _ in range(3):
        poster.trained()
    assert board.read(1) == Milestones(os.getpid(), 3, 40, "/m/model.ckpt-40", 40)
    poster.has_checkpoint("/m/model.ckpt-43")
    assert board.read(1) == Milestones(os.getpid(), 3, 40, "/m/model.ckpt-43", 43)
    poster.has_checkpoint("/m/model.ckpt-43.increment-2", 57)
    assert board.read(1).step == 57 and board.read(1).last_step == 57
    poster.has_checkpoint("/m/best")
    assert board.read(1).step == 0 and board.read(1).last_step == 43
    assert not poster.is_ending
    board.mark_ending()
    assert poster.is_ending


def test_a_process_that_a_rank_has_started_posts_nothing(board):
    board.post(1, Milestones(os.getppid(), 3))
    poster = MilestonePoster({VARIABLE: board.path, "RANK": "1"})
    poster.trained()
    poster.has_checkpoint("m-9")
    assert board.read(1) == Milestones(os.getppid(), 3)


def test_without_a_launcher_nobody_posts(tmp_path):
    MilestonePoster({}).trained()
    (tmp_path / "file").write_bytes(b"no board")
    with pytest.warns(RuntimeWarning, match="is no board to post milestones on"):
        poster = MilestonePoster({VARIABLE: str(tmp_path / "file"), "RANK": "0"})
    poster.trained()


@pytest.mark.parametrize(
    "milestones, left, words",
    [
        ([Milestones()], True, ""),
        ([Milestones(1)], True, ""),
        ([Milestones(1, 4)], True, "all ranks stopped after step 4, and has saved no checkpoint"),
        (
            [Milestones(1, 4, 2, "m-6", 6), Milestones(2, 4, 2, "m-2", 2)],
            True,
            "all ranks stopped after step 6; its last checkpoint is 'm-6'",
        ),
        ([Milestones(1, 4, 2, "m-2", 2)], False, "the job was stopped at step 6; its last"),
    ],
)
def test_departures(milestones, left, words):
    assert departure(milestones, left).startswith(words) and bool(words) == bool(
        departure(milestones, left)
    )


@pytest.mark.parametrize("text", ["USR1", "sigusr1", " 10 "])
def test_signals_by_name_and_number(text):
    assert signal_number(text) == signal.SIGUSR1


@pytest.mark.parametrize("text", ["", "USR9", "0", "99", "KILL", "STOP", "CHLD", "INT", "2"])
def test_signals_that_announce_nothing(text):
    with pytest.raises(ValueError):
        signal_number(text)


def test_steps_are_posted_in_less_than_ten_microseconds(board):
    """It is done at each step."""
    poster = MilestonePoster({VARIABLE: board.path, "RANK": "0"})
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(200):
            poster.trained()
        times.append((time.perf_counter() - began) / 200)
    assert min(times) < 10e-6
