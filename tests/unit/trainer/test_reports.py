"""Rates, bars and warnings of a Trainer's reports, by typed-out times."""

from __future__ import annotations

import io
import warnings

import pytest

from collective.ops.communication import collectives
from collective.trainer import reports
from collective.trainer.metrics_file import FILE
from collective.trainer.progress_bar import ProgressBar, is_on_terminal
from collective.trainer.reports import Reports, Throughput
from collective.trainer.schedule import Batch, Schedule, Seconds

collectives.init()


def test_a_rate_leaves_out_the_first_step_and_what_isn_t_training(monkeypatch):
    now = [50.0]
    monkeypatch.setattr(reports.time, "perf_counter", lambda: now[0])
    throughput = Throughput(batch=12)

    def steps(count):
        for _ in range(count):
            now[0] += 2
            throughput.step()

    assert throughput.now() is None
    throughput.restart()
    steps(1)
    assert throughput.now() is None
    steps(3)
    with throughput.pause():
        now[0] += 100
    assert throughput.now() == 12 * 3 / 6
    throughput.restart()
    assert throughput.now() is None
    now[0] += 1
    steps(2)
    assert throughput.now() == 12 * 2 / 5


@pytest.mark.parametrize("steps, shown", [(50, "12/50 steps |"), (None, "12 steps ")])
def test_the_bar_shows_loss_and_samples_per_second(steps, shown, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    file = io.StringIO()
    bar = ProgressBar(steps, finished=10, file=file)
    bar.step(None, None)
    bar.step(81234.5, 0.41236)
    bar.close()
    last = file.getvalue().split("\r")[-1]
    assert last.startswith(shown) and last.rstrip().endswith(", 81,234 samples/s, loss 0.4124")
    assert "samples/s" not in file.getvalue().split("\r")[1]


@pytest.mark.parametrize("told, terminal", [("1", True), ("0", False)])
def test_the_launcher_knows_whether_there_is_a_terminal(monkeypatch, told, terminal):
    monkeypatch.setenv("COLLECTIVE_TERMINAL", told)
    assert is_on_terminal() is terminal


def test_metrics_that_can_t_be_written_are_a_warning_once(tmp_path):
    (tmp_path / FILE).mkdir()
    shown = Reports(str(tmp_path), Schedule(Batch(9), 12))
    with pytest.warns(RuntimeWarning, match="metrics of the training in '.*' can't be written"):
        shown.begin(0, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown.validated(4, 1.0, {"auc": 0.5})
        shown.close()


@pytest.mark.parametrize(
    "seconds, found", [(0.0, (0.0, 8.0)), (2.0, (0.25, 6.0)), (9.0, (1.0, 0.0))]
)
def test_the_share_of_a_training_that_the_clock_ends(seconds, found):
    assert Schedule(Seconds(8), 12).share_of_time(seconds) == found
