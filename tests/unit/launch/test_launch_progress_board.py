"""Tests the progress board: what a rank posts is what the launcher reads."""

from __future__ import annotations

import os
import time

import pytest

from collective.job.progress import Progress
from collective.job.progress_board import (
    VARIABLE,
    Board,
    Label,
    LauncherBoard,
    Phase,
    ProgressRecord,
)
from collective.launch.progress.stall_detector import read_records

AWAY, WORKING, RUNNING, AGREEING = Phase.AWAY, Phase.WORKING, Phase.RUNNING, Phase.AGREEING


def test_what_is_posted_is_read():
    board = LauncherBoard(3)
    progress = Progress({VARIABLE: board.path, "RANK": "2"})
    assert board.read(2) is None
    before = time.monotonic_ns()
    label = Label("runs a:0,\nb:0", ["collective.t.keys", "collective.t.rows"])
    progress.does(label).enters(RUNNING)
    read = board.read(2)
    assert before <= read.since <= time.monotonic_ns()
    assert read == ProgressRecord(
        os.getpid(), RUNNING, 0, read.since, "runs a:0, b:0", "collective.t.keys, collective.t.rows"
    )
    with progress.does("leaves its session"):
        progress.enters(AGREEING)
        progress.passed += 1
        read = board.read(2)
        assert (read.phase, read.doing) == (AGREEING, "leaves its session")
        assert read.collectives == ""
    read = board.read(2)
    assert (read.phase, read.passed, read.doing) == (AWAY, 1, "leaves its session")
    with progress:  # a run that is refused before it enters anything
        pass
    assert board.read(2) == read
    progress.works("writes")
    assert (board.read(2).phase, board.read(2).doing) == (WORKING, "writes")
    assert board.read(0) is board.read(1) is None
    with pytest.raises(IndexError):
        board.read(3)


def test_long_names_are_cut():
    board = LauncherBoard(1)
    names = [f"collective.table_{number}.keys" for number in range(1000)]
    label = Label("runs " + ", ".join(["ü" * 90] * 1000), names)
    board.post(0, (1, RUNNING, 1, 1), label, False)
    read = board.read(0)
    assert read.doing.startswith("runs ü") and read.doing.endswith("...")
    assert len(read.doing) < 2000
    shown = read.collectives.count(",") + 1
    assert read.collectives.startswith("collective.table_0.keys, ")
    assert read.collectives.endswith(f" and {1000 - shown} more")
    board.post(0, (1, RUNNING, 1, 1), Label("x", ["n" * 5000, "m"]), False)
    assert board.read(0).collectives == "2 collectives"


def test_without_memfd_a_file_without_a_name_does(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    board = LauncherBoard(2)
    Progress({VARIABLE: board.path, "RANK": "1"}).does("x").enters(RUNNING)
    assert board.read(1).doing == "x"
    assert "(deleted)" in os.readlink(board.path)


def test_a_rank_whose_process_has_ended_is_in_no_run():
    board = LauncherBoard(3)
    no_process = (1 << 22) + 1  # above the kernel's largest pid
    board.post(0, (no_process, RUNNING, 5, 1), Label("runs a:0"), False)
    board.post(1, (os.getpid(), RUNNING, 5, 1), Label("runs b:0"), False)
    ended, running, silent = read_records(board, 3)
    assert (ended.phase, ended.doing) == (AWAY, "runs a:0")
    assert running == board.read(1) and silent is None


def test_nothing_is_posted_without_a_launcher():
    for environment in ({}, {VARIABLE: ""}):
        progress = Progress(environment)
        with progress.does("runs"):
            progress.enters(RUNNING)
        progress.works("saves")


def test_what_is_no_board_is_left_alone(tmp_path):
    """A process may outlive its launcher, whose pid and descriptor may be reused by then."""
    file = tmp_path / "precious"
    file.write_bytes(bytes(range(256)) * 64)
    for path in (str(file), "/proc/1/fd/1", str(tmp_path / "none"), "/dev/null"):
        with pytest.warns(RuntimeWarning, match="will not see this rank stall"):
            progress = Progress({VARIABLE: path, "RANK": "0"})
        progress.does("runs").enters(RUNNING)
    assert file.read_bytes() == bytes(range(256)) * 64


def test_children_of_the_launcher_do_not_inherit_the_board():
    board = LauncherBoard(1)
    assert not os.get_inheritable(int(board.path.rpartition("/")[2]))
    assert isinstance(Board.open(board.path), Board)
