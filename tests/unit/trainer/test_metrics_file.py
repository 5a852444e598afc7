"""metrics.jsonl: what it holds, and that a training that goes on doesn't tell a step twice."""

from __future__ import annotations

import json

import numpy as np
import pytest

from collective.trainer.metrics_file import FILE, MetricsFile


def lines(folder):
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_lines_are_json_that_any_reader_takes(tmp_path):
    file = MetricsFile(str(tmp_path))
    file.begin(0)
    file.add("training", {"loss": np.float32(0.5), "samples_per_s": None}, step=3, epochs=0.5)
    metrics = {"auc": np.float64("nan"), "count": np.int64(3), "picture": b"\0", "pair": [1, 2]}
    file.add("validation", metrics, step=3)
    assert lines(tmp_path) == [
        {"kind": "training", "step": 3, "epochs": 0.5, "metrics": {"loss": 0.5}},
        {"kind": "validation", "step": 3, "metrics": {"auc": None, "count": 3.0}},
    ]
    assert "NaN" not in (tmp_path / FILE).read_text()


@pytest.mark.parametrize("step, kept", [(0, []), (3, [3]), (5, [3, 5]), (9, [3, 5, 8])])
def test_a_training_that_continues_drops_later_steps(tmp_path, step, kept):
    file = MetricsFile(str(tmp_path))
    for at in (3, 5, 8):
        file.add("training", {"loss": 1.0}, step=at)
    again = MetricsFile(str(tmp_path))
    again.begin(step)
    assert [line["step"] for line in lines(tmp_path)] == kept
    again.add("training", {"loss": 2.0}, step=step + 1)
    assert [line["step"] for line in lines(tmp_path)] == [*kept, step + 1]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("cut", ["", "{", '{"kind": "training", "step": 4', '{"step": null}\n'])
def test_what_a_killed_job_has_cut_off_is_dropped(tmp_path, cut):
    MetricsFile(str(tmp_path)).add("training", {"loss": 1.0}, step=3)
    with open(tmp_path / FILE, "a") as file:
        file.write(cut)
    MetricsFile(str(tmp_path)).begin(9)
    assert [line["step"] for line in lines(tmp_path)] == [3]
