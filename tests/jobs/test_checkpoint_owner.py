"""Two jobs with one checkpoint folder: the second is told, the first goes on; killed ones are followed."""

import os
import signal
import time

import pytest

from tests.jobs import pool

SCRIPT = """
import os, sys, time
import numpy as np
import tensorflow.compat.v1 as tf
from collective import CollectiveStrategy
from collective.checkpoint.saving import ownership

ownership._PATIENCE = 8.0  # an owner renews its mark meanwhile
tf.logging.set_verbosity(tf.logging.ERROR)
folder, until, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
strategy = CollectiveStrategy()
with strategy.scope(plan='quiet'), tf.Graph().as_default():
    with strategy.embedding_scope():
        table = tf.get_variable('t', [50, 2], initializer=tf.zeros_initializer())
    ids = tf.placeholder(tf.int64, [None])
    loss = -tf.reduce_sum(tf.nn.embedding_lookup(table, ids))
    step = tf.train.get_or_create_global_step()
    train = tf.train.GradientDescentOptimizer(1.0).minimize(loss, global_step=step)
    rows = tf.nn.embedding_lookup(table, [1])
    hooks = [tf.train.StopAtStepHook(last_step=until)]
    with tf.train.MonitoredTrainingSession(checkpoint_dir=folder, hooks=hooks, save_checkpoint_steps=5,
                                           save_checkpoint_secs=None, log_step_count_steps=None) as session:
        done = session.run_step_fn(lambda step_context: step_context.session.run(step))
        print('began at', done, flush=True)
        while not session.should_stop():
            value = session.run([rows, train], {ids: [1, 2]})[0]
            np.testing.assert_array_equal(value, np.full([1, 2], float(done)))
            done += 1
            if done == until // 2:
                print('half way', flush=True)
                time.sleep(pause)
        print('ended at', done, flush=True)
"""


@pytest.fixture
def job(tmp_path):
    """Returns the launcher's arguments for a job of two ranks that trains in one folder."""
    (tmp_path / "script.py").write_text(SCRIPT)

    def arguments(until, pause=0.0):
        script = tmp_path / "script.py"
        return ("-np", 2, "--device", "cpu", script, tmp_path / "saved", until, pause)

    return arguments


def read_until(process, text):
    for line in process.stdout:
        print(line, end="")
        if text in line:
            return
    raise AssertionError(f"the job never said '{text}'")


def files(folder):
    """Returns when each file was written; summaries aside, to which a thread adds in its own time."""
    names = [name for name in os.listdir(folder) if "tfevents" not in name]
    return {name: os.path.getmtime(folder / name) for name in names}


@pytest.mark.matrix
@pytest.mark.timeout(150)
def test_two_jobs_and_one_folder(tmp_path, job):
    """The second writes nothing and ends with an error; the first never learns of it."""
    first = pool.start(*job(20, pause=120))
    try:
        for _ in range(2):  # both ranks: neither saves any more
            read_until(first, "half way")
        before = files(tmp_path / "saved")
        assert "model.ckpt.owner" in before
        done = pool.launch(*job(20))
        assert done.returncode not in (0, 124)
        assert "another job saves its checkpoints as" in done.stdout
        assert first.poll() is None, "it outlives the time that it is given to end"
        assert "began at" not in done.stdout, "it hasn't trained"
        after = files(tmp_path / "saved")
        for written in (before, after):
            written.pop("model.ckpt.owner", None)  # is renewed
        assert after == before
    finally:
        first.kill()


@pytest.mark.matrix
@pytest.mark.timeout(150)
def test_a_job_goes_on_where_a_killed_one_was(tmp_path, job):
    """By nobody's hand and at once, though its mark is there; with the rows that were saved."""
    killed = pool.start(*job(20, pause=60))
    read_until(killed, "half way")
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(30)
    assert "model.ckpt.owner" in files(tmp_path / "saved")
    began = time.monotonic()
    done = pool.launch(*job(12))
    assert done.returncode == 0 and done.stdout.count("ended at 12") == 2
    assert done.stdout.count("began at 10") + done.stdout.count("began at 6") == 2
    assert time.monotonic() - began < 50, "it has not waited for the mark to grow old"
    assert "model.ckpt.owner" not in files(tmp_path / "saved")
