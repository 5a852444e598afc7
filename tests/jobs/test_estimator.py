"""An Estimator's job that is interrupted and goes on, or in which one rank fails in an evaluation."""

import signal
import textwrap
import time

import pytest

from tests.jobs import pool

SCRIPT = '''
import os, sys
import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2
from collective import CollectiveStrategy
from collective import estimator as tf_estimator

tf.logging.set_verbosity(tf.logging.ERROR)
strategy = CollectiveStrategy()
rank, ranks = strategy.rank(), strategy.world_size()
mode_dir = sys.argv[1]
trouble = lambda mode: None

def batches(first, count=10 ** 9):
    """Batches first, first + 1, ... of an endless input."""
    def make(k):
        ids = np.random.default_rng(int(k)).integers(0, 50, [8, 3])
        return ids, (ids.sum(1) % 2).astype(np.float32)
    def input_fn():
        def entry(k):
            ids, labels = tf.numpy_function(make, [k], [tf.int64, tf.float32])
            return tf.ensure_shape(ids, [8, 3]), tf.ensure_shape(labels, [8])
        return tf2.data.Dataset.range(first, first + count).map(entry)
    return input_fn

def model_fn(features, labels, mode):
    trouble(mode)
    with strategy.embedding_scope():
        table = tf.get_variable('table', [50, 4], initializer=tf.random_normal_initializer(seed=1))
    w = tf.get_variable('w', [4, 1], initializer=tf.random_normal_initializer(seed=2))
    logit = tf.matmul(tf.reduce_mean(tf.nn.embedding_lookup(table, features), 1), w)[:, 0]
    loss = tf.losses.sigmoid_cross_entropy(labels, logit)
    step = tf.train.get_or_create_global_step()
    return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=tf.train.AdamOptimizer(0.05).minimize(loss, global_step=step))

class Losses(tf.train.SessionRunHook):
    def __init__(self, pause_at=None):
        self.losses, self.pause_at = [], pause_at
    def before_run(self, context):
        return tf.train.SessionRunArgs([tf.get_collection(tf.GraphKeys.LOSSES)[0], tf.train.get_global_step()])
    def after_run(self, context, values):
        self.losses.append(float(values.results[0]))
        if len(self.losses) == self.pause_at:
            print('ready', flush=True)
            import time
            time.sleep(60)

def estimator(folder):
    config = tf_estimator.RunConfig(save_checkpoints_steps=4)
    return strategy.estimator(model_fn, os.path.join(mode_dir, folder), config)
'''


def job(tmp_path, body, ranks, interrupt=False):
    """(exit code, output, seconds from the moment that a rank says 'ready')."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + textwrap.dedent(body))
    process = pool.start("-np", ranks, "--device", "cpu", "--grace", "2", script, tmp_path)
    try:
        lines, ready = [], None
        for line in process.stdout:
            lines.append(line)
            if "ready" in line and ready is None:
                ready = time.monotonic()
                if interrupt:
                    process.send_signal(signal.SIGINT)
        code = process.wait(60)
    finally:
        process.kill()
    print("".join(lines))
    return code, "".join(lines), time.monotonic() - (ready or 0)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_interrupt_and_continue(tmp_path):
    """Interrupted at step 6, it goes on from the checkpoint of step 4 as if nothing had been.

    It saves no other one: a hook that takes a minute has it killed at the end of --grace.
    The input is what is left: after s steps of N ranks, s N batches are used up.
    """
    code, output, _ = job(
        tmp_path,
        """
        estimator('interrupted').train(batches(0), max_steps=10, hooks=[Losses(pause_at=6)])
        """,
        ranks=2,
        interrupt=True,
    )
    assert code != 0 and "ready" in output
    code, output, _ = job(
        tmp_path,
        """
        whole, rest = Losses(), Losses()
        estimator('whole').train(batches(0), max_steps=10, hooks=[whole])
        again = estimator('interrupted')
        done = int(again.get_variable_value('global_step'))
        again.train(batches(2 * done), max_steps=10, hooks=[rest])
        assert done == 4 and len(whole.losses) == 10, (done, whole.losses)
        np.testing.assert_allclose(rest.losses, whole.losses[4:], rtol=1e-5)
        print('equal', flush=True)
        """,
        ranks=2,
    )
    assert code == 0 and output.count("equal") == 2


TROUBLE = {
    "model_fn": """
        def trouble(mode):
            if mode == 'eval' and rank == 1:
                print('ready', flush=True)
                raise KeyError('boom')
        evaluation = batches(0, 9)
        """,
    "data": """
        def bad(ids, labels):
            def check(x):
                if rank == 1 and check.count == 1:
                    print('ready', flush=True)
                    raise KeyError('boom')
                check.count += 1
                return x
            check.count = 0
            return tf.ensure_shape(tf.numpy_function(check, [ids], tf.int64), [8, 3]), labels
        evaluation = lambda: batches(0, 9)().shard(ranks, rank).map(bad)
        """,
}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.timeout(150)
@pytest.mark.parametrize("where", TROUBLE)
def test_one_rank_fails_in_an_evaluation(tmp_path, where):
    """Between training steps; the job ends at once, and with that rank's error."""
    code, output, seconds = job(
        tmp_path,
        textwrap.dedent(TROUBLE[where])
        + textwrap.dedent("""
        tf_estimator.train_and_evaluate(estimator('m'), tf_estimator.TrainSpec(batches(0), max_steps=8),
                                        tf_estimator.EvalSpec(evaluation, steps=None, throttle_secs=0))
        """),
        ranks=3,
    )
    assert code == 1 and "boom" in output and "rank 1" in output.split("root cause")[1]
    assert seconds < 15  # of the trouble: 1 to 2 on an idle machine
