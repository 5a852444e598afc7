"""Tests the progress board between processes: writers and readers, forks and children of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import pytest

from collective.job.progress import Progress
from collective.job.progress_board import VARIABLE, Label, LauncherBoard, Phase

pytestmark = pytest.mark.timeout(60)


def test_a_reader_never_sees_halves():
    """One process posts two records in turn, as fast as it can; each record read is one of them."""
    board = LauncherBoard(1)
    source = """
        import sys
        from collective.job.progress_board import Board, Label, Phase
        board = Board.open(sys.argv[1])
        records = [(i + 1, Phase.RUNNING, i, i) for i in range(2)]
        labels = [Label("a" * 1000), Label("b" * 1400)]
        while True:
            for i in range(2):
                board.post(0, records[i], labels[i], False)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(source), board.path]) as writer:
        try:
            end = time.monotonic() + 40
            seen = {0: 0, 1: 0}
            while min(seen.values()) < 2000:
                assert time.monotonic() < end and writer.poll() is None
                read = board.read(0)
                if read is not None:
                    assert (read.pid, read.since) == (read.passed + 1, read.passed)
                    assert read.doing == ["a" * 1000, "b" * 1400][read.passed]
                    seen[read.passed] += 1
        finally:
            writer.kill()


def test_children_of_a_rank_post_nothing():
    board = LauncherBoard(1)
    environment = {VARIABLE: board.path, "RANK": "0"}
    progress = Progress(environment)
    progress.does("the rank").enters(Phase.AWAY)
    child = os.fork()
    if child == 0:
        progress.does("its fork").enters(Phase.RUNNING)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    source = """
        import os
        from collective.job.progress import Phase, Progress
        Progress(os.environ).does("its child").enters(Phase.RUNNING)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env={**os.environ, **environment},
        check=True,
        timeout=30,
    )
    assert (board.read(0).doing, board.read(0).phase) == ("the rank", Phase.AWAY)


def test_who_takes_over_from_a_dead_process_posts():
    """A rank that is a script, which starts Python a second time."""
    board = LauncherBoard(1)
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait(30)
    board.post(0, (dead.pid, Phase.RUNNING, 5, 1), Label("the first"), False)
    Progress({VARIABLE: board.path, "RANK": "0"}).does("the second").enters(Phase.AGREEING)
    assert board.read(0).doing == "the second"
