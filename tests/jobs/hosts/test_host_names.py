"""A host whose own name leads to no address, as containers may have: ranks start all the same."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import tensorflow.compat.v1 as tf
from collective import CollectiveStrategy

strategy = CollectiveStrategy()
with strategy.scope(plan='quiet'), tf.Graph().as_default():
    with strategy.embedding_scope():
        table = tf.get_variable('t', [10, 2])
    loss = tf.reduce_mean(tf.nn.embedding_lookup(table, [1, 2]))
    train = tf.train.AdamOptimizer().minimize(loss)
    with tf.train.MonitoredTrainingSession('') as session:
        session.run(train)
print('trained on', strategy.world_size())
"""
LAUNCH = ("-m", "collective.launch", "--device", "cpu", "-np")


@pytest.mark.slow
@pytest.mark.parametrize("ranks, words", [(1, ()), (1, (*LAUNCH, "1")), (2, (*LAUNCH, "2"))])
def test_a_name_without_an_address_keeps_no_rank_from_training(hosts, tmp_path, ranks, words):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    rename = 'hostname no-such-host.invalid && exec "$@"'
    done = subprocess.run(
        ["unshare", "--uts", "sh", "-c", rename, "sh", sys.executable, *words, str(script)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"trained on {ranks}") == ranks
