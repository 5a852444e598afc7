"""Losses are recorded by rank 0 and drawn as an SVG."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

import loss_curve
from common.loss_record import LossRecord

NAMES = {"svg": "http://www.w3.org/2000/svg"}


def test_rank_0_records_means_of_a_hundredth_of_the_training(tmp_path):
    for rank, finished in ((1, 0), (0, 100)):
        record = LossRecord(str(tmp_path / f"{rank}.tsv"), 400, rank, finished)
        for step in range(finished, 400):
            record.step(float(step % 4))
    assert not (tmp_path / "1.tsv").exists()
    course = loss_curve.read(tmp_path / "0.tsv")
    assert course == [(step, 1.5) for step in range(104, 401, 4)]


def test_no_file_is_no_record():
    LossRecord(None, 3, 0).step(1.0)


def test_a_line_for_each_course():
    courses = {"a & b": [(1, 0.7), (50, 0.5), (100, 0.45)], "c": [(10, 0.6), (80, 0.6)]}
    root = ElementTree.fromstring(loss_curve.draw(courses))
    lines = root.findall("svg:polyline", NAMES)
    assert len(lines) == 2
    first = [tuple(map(float, point.split(","))) for point in lines[0].get("points").split()]
    assert [x for x, _ in first] == sorted(x for x, _ in first)
    assert [y for _, y in first] == sorted(y for _, y in first)  # a falling loss goes down
    level = [point.split(",")[1] for point in lines[1].get("points").split()]
    assert level[0] == level[1]
    texts = [text.text for text in root.findall("svg:text", NAMES)]
    assert {"a & b", "c", "step", "100", "0.5"} <= set(texts)


def test_a_column_of_a_course(tmp_path):
    path = tmp_path / "course.tsv"
    path.write_text("step\tauc\trows\n50\t0.6\t1000000\n100\t0.7\t3000000\n")
    assert loss_curve.read(path, "auc") == [(50, 0.6), (100, 0.7)]
    rows = loss_curve.read(path, "rows")
    assert rows == [(50, 1e6), (100, 3e6)]
    root = ElementTree.fromstring(loss_curve.draw({"free": rows}, "rows of all tables"))
    texts = {text.text for text in root.findall("svg:text", NAMES)}
    assert {"rows of all tables", "2,000,000"} <= texts and "training loss" not in texts
    with pytest.raises(ValueError, match="course.tsv: its first line names .*, not step and loss"):
        loss_curve.read(path, "loss")


def test_ticks_are_round():
    assert loss_curve.ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert loss_curve.ticks(0.43, 0.71) == pytest.approx([0.45, 0.5, 0.55, 0.6, 0.65, 0.7])


@pytest.mark.parametrize("text", ["1\t0.5\n", "1 0.5\n2 0.5\n", ""])
def test_another_file_is_an_error_that_names_it(tmp_path, text):
    (tmp_path / "losses.tsv").write_text(text)
    with pytest.raises(ValueError, match="losses.tsv"):
        loss_curve.read(tmp_path / "losses.tsv")


def test_metrics_of_a_trainer_have_a_diagram_each(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"kind": kind, "step": step, "metrics": metrics}
        for step in (10, 20)
        for kind, metrics in (
            ("training", {"loss": 1.0 - step / 40, "samples_per_s": 5.0}),
            ("validation", {"loss": None if step == 10 else 0.5, "auc": 0.5 + step / 80}),
        )
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert loss_curve.read_metric(path, "auc") == {"validation": [(10, 0.625), (20, 0.75)]}
    assert loss_curve.read_metric(path, "loss") == {
        "training": [(10, 0.75), (20, 0.5)],
        "validation": [(20, 0.5)],
    }
    root = ElementTree.fromstring(loss_curve.draw_metrics({"a": path, "b": path}, ["loss", "auc"]))
    assert len(list(root.iter(f"{{{NAMES['svg']}}}polyline"))) == 6
    texts = [text.text for text in root.iter(f"{{{NAMES['svg']}}}text")]
    assert {"loss", "auc", "a, training", "b, validation"} <= set(texts)
    path.write_text(json.dumps(lines[0]) + "\n")  # one point is a dot
    root = ElementTree.fromstring(loss_curve.draw_metrics({"a": path}, ["loss"]))
    assert len(list(root.iter(f"{{{NAMES['svg']}}}circle"))) == 1
    with pytest.raises(ValueError, match="metrics.jsonl: it has no value of 'accuracy'"):
        loss_curve.read_metric(path, "accuracy")
    path.write_text("step\t1\n")
    with pytest.raises(ValueError, match="metrics.jsonl, line 1: .* isn't one of a Trainer"):
        loss_curve.read_metric(path, "loss")
