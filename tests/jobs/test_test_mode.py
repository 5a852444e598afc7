"""`collective launch --test-mode` tries a script once: a batch, a checkpoint, an export, exit 0."""

from __future__ import annotations

import os
import re

import pytest

from tests.jobs import pool

PROGRAM = os.path.join(os.path.dirname(__file__), "tried_once.py")


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    "kind",
    [
        "by_estimator",
        "by_trainer",
        "by_monitored_session",
        "by_plain_session",
        "by_feeds",
        "to_the_end_of_data",
    ],
)
def test_a_script_is_tried_once(tmp_path, kind, ranks):
    folder = tmp_path / "job"
    folder.mkdir()
    start = ("-np", ranks, "--device", "cpu", "--test-mode")
    done = pool.launch(*start, PROGRAM, kind, folder, timeout=150)
    assert done.returncode == 0, done.stdout
    assert re.findall("evaluated (.*)", done.stdout) == ["1"] * ranks, done.stdout
    assert re.findall("saved (.*)", done.stdout) == ["model.ckpt-1"] * ranks


UNEQUAL = """
import os
if os.environ['RANK'] == '1':
    os.environ['COLLECTIVE_TEST_MODE'] = '1'
import tensorflow.compat.v1 as tf
from collective import CollectiveStrategy

strategy = CollectiveStrategy()
with strategy.scope(plan='quiet'), tf.Graph().as_default():
    with strategy.embedding_scope():
        table = tf.get_variable('t', [10, 2])
    loss = tf.reduce_mean(tf.nn.embedding_lookup(table, [1, 2]))
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    with tf.train.MonitoredTrainingSession('') as session:
        session.run(train)
"""


def test_one_rank_alone_is_not_in_it(tmp_path):
    """As on one host of several: the others would end with it, after a step, as if all were well."""
    script = tmp_path / "script.py"
    script.write_text(UNEQUAL)
    done = pool.launch("-np", 2, "--device", "cpu", script, timeout=100)
    assert done.returncode == 1
    assert "'--test-mode' is used by rank 1 only" in done.stdout, done.stdout
