"""What Python decides by hashes is one thing on all ranks of the launcher, or is said."""

from __future__ import annotations

import pytest

from tests.jobs import pool

SCRIPT = """
import tensorflow.compat.v1 as tf
from collective import CollectiveStrategy

tf.logging.set_verbosity(tf.logging.ERROR)
strategy = CollectiveStrategy()
names = {f"feature_{i}" for i in range(8)}
with strategy.scope(plan="quiet"), tf.Graph().as_default():
    word = tf.constant([hash("user_17") % 100 + strategy.rank()], tf.int64)
    with strategy.embedding_scope():
        tables = {name: tf.get_variable(name, [101, 2]) for name in sorted(names)}
    rows = [tf.nn.embedding_lookup(tables[name], word) for name in names]
    loss = tf.reduce_mean(tf.square(tf.concat(rows, 1)))
    train = tf.train.AdagradOptimizer(0.1).minimize(loss)
    with tf.train.MonitoredTrainingSession("") as session:
        print(hash("user_17"), session.run([loss, train])[0] > 0)
"""


def launch(tmp_path, **environment):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    arguments = ("-np", 2, "--device", "cpu", "--verbose", script)
    return pool.launch(*arguments, environment=environment, pool=False)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_model_that_is_built_along_a_set(tmp_path):
    done = launch(tmp_path, PYTHONHASHSEED="")
    lines = {line[4:] for line in done.stdout.splitlines() if line.endswith("True")}
    assert done.returncode == 0 and len(lines) == 1, "all ranks hash alike"
    assert "Python hashes strings" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ranks_that_hash_in_ways_of_their_own_are_told(tmp_path):
    """As other launchers start them."""
    done = launch(tmp_path, PYTHONHASHSEED="random")
    assert done.returncode == 1
    assert "Python hashes strings differently on each rank" in done.stdout
    assert "All ranks have the same lookups, in a different order: first comes" in done.stdout
    assert "sorted(names)" in done.stdout
