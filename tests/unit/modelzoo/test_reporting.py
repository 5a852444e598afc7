"""Reports of the training programs: on rank 0 only, a bar on a terminal, ten lines elsewhere."""

from __future__ import annotations

import pytest
import tensorflow.compat.v1 as tf

from census_income import options
from common import reporting


def test_only_rank_0_reports(capsys):
    for rank in (0, 1):
        reporting.reporter(rank)(f"from rank {rank}")
    assert capsys.readouterr().out == "from rank 0\n"


@pytest.mark.parametrize("ranks, words", [(1, "1 rank,"), (2, "2 ranks,")])
def test_the_summary_is_the_line_of_the_readme(no_data_dir, ranks, words):
    summary = reporting.summary(options.parse([]), 32561, "rows", ranks, "8 tables of dimension 8")
    assert summary == (
        f"32561 training rows, 672 steps of 384 rows on {words} "
        "8 tables of dimension 8, adagrad at 0.05"
    )


@pytest.mark.parametrize("terminal", ["0", "1"])
def test_progress_is_a_bar_where_the_launcher_says_terminal_else_ten_lines(
    capsys, monkeypatch, terminal
):
    monkeypatch.setenv("COLLECTIVE_TERMINAL", terminal)
    for rank in (0, 1):
        with reporting.Progress(steps=25, batch_size=4, rank=rank) as progress:
            for _ in range(25):
                progress.step(0.5)
        printed = capsys.readouterr()
        assert printed.out == ""
        if rank:
            assert printed.err == ""
        elif terminal == "1":
            assert "\r" in printed.err and "25/25 steps" in printed.err
        else:
            lines = printed.err.splitlines()
            assert len(lines) == 10 and "\r" not in printed.err
            assert lines[0].startswith("step 3/25") and lines[-1].startswith("step 25/25")
            assert all("samples/s" in line and "loss 0.5000 (rank 0)" in line for line in lines)


def test_the_hook_starts_at_the_step_of_the_session(capsys, monkeypatch):
    monkeypatch.setenv("COLLECTIVE_TERMINAL", "0")
    with tf.Graph().as_default():
        step = tf.train.create_global_step()
        loss = tf.constant(0.5)
        hook = reporting.ProgressHook(loss, steps=20, batch_size=4, rank=0)
        start = tf.train.Scaffold(init_op=tf.assign(step, 10).op)
        next_step = tf.assign_add(step, 1)
        with tf.train.SingularMonitoredSession(hooks=[hook], scaffold=start) as session:
            for _ in range(10):
                session.run(next_step)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["12/20", "14/20", "16/20", "18/20", "20/20"]
