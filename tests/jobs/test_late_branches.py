"""A branch that ranks turn out to take differently inside a call ends the job, with its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import pool

LATE = """
import tensorflow as tf
from collective import CollectiveStrategy

strategy = CollectiveStrategy()
with strategy.scope():
    weight = tf.Variable(2.0)

    @tf.function
    def step(x, limit):
        with tf.GradientTape() as tape:
            loss = weight * x
        gradient = tape.gradient(loss, weight)
        if gradient > limit:  # It is known after the exchange alone.
            weight.assign_sub(0.25 * gradient)
        return weight.read_value()

    print("first", float(step(tf.constant(1.0), tf.constant(0.0))))
    print("second", float(step(tf.constant(1.0), tf.constant(2.0 * strategy.rank()))))
"""


@pytest.mark.slow
def test_a_branch_after_an_exchange(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(LATE)
    done = pool.launch("-np", 2, "--device", "cpu", script)
    assert done.returncode == 1
    assert "[0] first 1.75" in done.stdout and "[1] first 1.75" in done.stdout
    assert "[0] second" not in done.stdout and "[1] second" not in done.stdout
    assert "of a tf.function is not the same on all ranks" in done.stdout
