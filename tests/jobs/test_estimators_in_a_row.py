"""An Estimator's run fails on all ranks, and the program goes on with the next one."""

import pytest

from tests.jobs import pool

SCRIPT = """
import sys

import numpy as np
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy
from collective import estimator as tf_estimator

tf.logging.set_verbosity(tf.logging.ERROR)
strategy = CollectiveStrategy()
trouble, folder = sys.argv[1:]


class Hook(tf.train.SessionRunHook):
    def __init__(self, trouble):
        self.trouble = trouble
        self.runs = 0

    def after_create_session(self, session, coord):
        if self.trouble == "created":
            raise KeyError("made")

    def before_run(self, context):
        if self.trouble == "before" and self.runs == 1:
            raise KeyError("made")

    def after_run(self, context, values):
        self.runs += 1
        if self.trouble == "after" and self.runs == 2:
            raise KeyError("made")

    def end(self, session):
        if self.trouble == "end":
            raise KeyError("made")


def train(trouble, name):
    def fails(*values):
        raise KeyError("made")

    def record(number):
        if trouble == "record" and number == 7:
            raise KeyError("made")
        return number % 8

    def input_fn():
        if trouble == "input_fn":
            fails()
        numbers = tf.data.Dataset.range(12 * strategy.world_size())
        return numbers.map(lambda x: tf.numpy_function(record, [x], tf.int64)).batch(2)

    def model_fn(features, mode):
        with strategy.embedding_scope():
            table = tf.get_variable("table", [8, 2])
        if trouble == "model_fn":
            fails()
        rows = tf.nn.embedding_lookup(table, tf.ensure_shape(features, [None]))
        if trouble == "rows":
            rows += tf.numpy_function(fails, [rows], tf.float32)
        step = tf.train.get_global_step()
        train_op = tf.train.AdagradOptimizer(0.1).minimize(tf.reduce_sum(rows), step)
        return tf_estimator.EstimatorSpec(mode, loss=tf.reduce_sum(rows), train_op=train_op)

    estimator = strategy.estimator(model_fn, f"{folder}/{name}")
    estimator.train(input_fn, hooks=[Hook(trouble)])
    return estimator.get_variable_value("global_step")


for number, kind in enumerate((trouble, trouble, "none", "none")):
    try:
        print("attempt", number, "trained", train(kind, number), flush=True)
    except Exception as error:
        text = str(error).replace("\\n", " ")
        print("attempt", number, type(error).__name__, text, flush=True)
"""


def said(tmp_path, trouble):
    """Returns what each rank prints of its four trainings, by rank."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = pool.start("-np", 2, "--device", "cpu", script, trouble, tmp_path)
    try:
        lines = process.stdout.read().splitlines()
        assert process.wait(60) == 0, lines
    finally:
        process.kill()
    by_rank = [
        [line[12:] for line in lines if line.startswith(f"[{rank}] attempt ")] for rank in range(2)
    ]
    assert [len(of_rank) for of_rank in by_rank] == [4, 4], lines
    return by_rank


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "trouble", ["input_fn", "model_fn", "record", "created", "before", "after", "end"]
)
def test_the_next_one_trains(tmp_path, trouble):
    """Nothing is in doubt where no collective of a run has begun."""
    for first, second, third, fourth in said(tmp_path, trouble):
        for line in (first, second):
            assert "made" in line and "trained" not in line
        assert third == "2 trained 6" and fourth == "3 trained 6"


def test_the_next_one_is_refused_after_a_run_that_failed_half_way(tmp_path):
    """Rows had come, gradients had not: every later attempt says so, and why, at once."""
    for first, *later in said(tmp_path, "rows"):
        assert "KeyError: 'made'" in first and first.startswith("0 UnknownError")
        for number, line in enumerate(later, 1):
            words = f"{number} RankError An earlier run failed half-way on rank "
            assert line.startswith(words) and "Start the job again" in line and "made" in line
