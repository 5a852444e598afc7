"""A script that trains eagerly inside scope() ends before it has trained, with an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import pool

FORGOTTEN_GRAPH = """
import tensorflow.compat.v1 as tf
from collective import CollectiveStrategy

strategy = CollectiveStrategy()
with strategy.scope():
    w = tf.get_variable("w", initializer=[1.0, 2.0])
    {train}
    print("trained")
"""
TRAIN = {
    "optimizer": "tf.train.AdamOptimizer(0.1).minimize(lambda: tf.reduce_sum(w * w))",
    "session": "tf.train.MonitoredTrainingSession().run(w)",
}


@pytest.mark.parametrize("train", TRAIN)
def test_a_forgotten_graph(train: str, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(FORGOTTEN_GRAPH.format(train=TRAIN[train]))
    done = pool.launch("-np", 2, "--device", "cpu", script)
    assert done.returncode == 1
    assert "RuntimeError: scope() is for graphs, but" in done.stdout
    assert "`with strategy.scope(), tf.Graph().as_default():`" in done.stdout
    assert "[0] trained" not in done.stdout and "[1] trained" not in done.stdout
