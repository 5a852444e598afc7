"""The course of a training is recorded by rank 0, and read by loss_curve.py."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

import loss_curve
from common import training_course
from common.training_course import TrainingCourse


def test_rank_0_records_a_line_an_evaluation(tmp_path):
    """A graph without dynamic tables has no rows."""
    for rank in (0, 1):
        path = tmp_path / f"{rank}.tsv"
        with tf.Graph().as_default(), tf.Session() as session:
            course = TrainingCourse(5, str(path), rank, ranks=2)
            for step in (5, 10):
                scores = {"auc": 0.6 + step / 100, "log_loss": 0.5}
                assert course.record(session, step, scores) == {}
        assert path.exists() == (rank == 0)
    assert loss_curve.read(tmp_path / "0.tsv", "auc") == [(5, 0.65), (10, 0.7)]
    assert loss_curve.read(tmp_path / "0.tsv", "capacity") == [(5, 0), (10, 0)]


def test_when_an_evaluation_is_due():
    with tf.Graph().as_default():
        course, never = TrainingCourse(5, None, 0, 1), TrainingCourse(None, None, 0, 1)
    assert [step for step in range(1, 12) if course.is_due(step)] == [5, 10]
    assert not any(never.is_due(step) for step in range(1, 12))


def test_a_line_for_each_table():
    counts = {"ids": [50_000, 4_200_000, 60_000, 1_000, 3, 0, 10_000], "crosses": [1] * 7}
    assert training_course.lines(counts) == [
        "table ids: rows 50,000, 4.2 MB, 60,000 admitted, 1,000 refused, 3 returned, "
        "10,000 evicted by capacity",
        "table crosses: rows 1, 0.0 MB, 1 admitted, 1 refused, 1 returned, "
        "1 evicted by steps_to_live, 1 evicted by capacity",
    ]
