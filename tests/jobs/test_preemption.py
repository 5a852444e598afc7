"""Ranks that are told to stop stop after the same step, save it, and go on from there."""

from __future__ import annotations

import os
import textwrap
import time
from pathlib import Path
from signal import SIGCONT, SIGINT, SIGTERM, SIGUSR1

import pytest
import tensorflow.compat.v1 as tf

from tests.jobs import pool

PROGRAM = Path(__file__).with_name("resumable_training.py")
ENDLESS = 0


class Training:
    """A job of resumable_training.py in a folder of its own."""

    def __init__(self, folder, ranks, *events, options=(), program=PROGRAM):
        self.folder, self.ranks = folder, ranks
        folder.mkdir(exist_ok=True)
        self.process = pool.start(
            "-np", ranks, "--device", "cpu", *options, program, folder, ENDLESS, *events
        )

    def number(self, name):
        """Returns what a file of a rank says; -1 while it says nothing."""
        try:
            return int((self.folder / name).read_text() or -1)
        except FileNotFoundError:
            return -1

    def wait_for(self, name, number):
        end = time.monotonic() + 90
        while self.number(name) < number:
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(0.01)

    def wait_for_step(self, step):
        self.wait_for("step.0", step)

    def pids(self):
        return [self.number(f"pid.{rank}") for rank in range(self.ranks)]

    def steps(self):
        return [self.number(f"step.{rank}") for rank in range(self.ranks)]

    def saved_step(self):
        path = tf.train.latest_checkpoint(str(self.folder / "saved"))
        return -1 if path is None else int(path.rpartition("-")[2])

    def end(self, timeout=60):
        done = pool.to_its_end(self.process, timeout)
        print(done.stdout)
        return done


def tell(training, who, signum):
    """Signals the launcher, some ranks, or all of them."""
    told = [] if who in ("one rank", "all ranks") else [training.process.pid]
    told += {"one rank": training.pids()[1:2], "launcher": []}.get(who, training.pids())
    for pid in told:
        os.kill(pid, signum)


def trained(folder, steps, ranks=2):
    """Returns what the weights are after so many steps, in bits."""
    done = pool.launch("-np", ranks, "--device", "cpu", PROGRAM, folder, steps)
    assert done.returncode == 0
    return {line.split("weights ")[1] for line in done.stdout.splitlines() if "weights " in line}


def check_stopped(training, done, code=143):
    """Checks that all ranks stopped after the same step, and have saved it."""
    steps = set(training.steps())
    assert done.returncode == code
    assert len(steps) == 1 and steps == {training.saved_step()}
    assert "went on" not in done.stdout and "Traceback" not in done.stdout
    assert "root cause" not in done.stdout
    assert f"all ranks stopped after step {training.saved_step()}; its last" in done.stdout
    assert "Resume with the same command, from step" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_preempted_job_goes_on_to_the_very_weights_of_another(tmp_path):
    """The launcher and both ranks are signalled at once, as a scheduler does: that is one signal.

    It isn't started again by --max-restarts.
    """
    training = Training(tmp_path / "preempted", 2, options=("--max-restarts", 2))
    training.wait_for_step(6)
    tell(training, "all", SIGTERM)
    check_stopped(training, training.end())
    steps = training.saved_step() + 3
    resumed = trained(tmp_path / "preempted", steps)
    (tmp_path / "other").mkdir()
    assert resumed == trained(tmp_path / "other", steps) and len(resumed) == 1


@pytest.mark.sample(1)
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "who, signum, ranks",
    [
        ("one rank", SIGTERM, 2),
        ("launcher", SIGTERM, 2),
        ("launcher", SIGINT, 3),
        ("all ranks", SIGTERM, 3),
        ("all ranks", SIGUSR1, 2),
        ("launcher", SIGUSR1, 1),
        ("launcher", SIGINT, 1),
        ("all", SIGTERM, 1),
        ("one rank", SIGINT, 2),
    ],
)
def test_who_is_told(tmp_path, who, signum, ranks):
    options = ("--preempt-signal", "USR1") if signum == SIGUSR1 else ()
    training = Training(tmp_path / "job", ranks, options=options)
    training.wait_for_step(3)
    tell(training, who, signum)
    check_stopped(training, training.end(), 130 if signum == SIGINT else 143)


@pytest.mark.matrix
@pytest.mark.timeout(150)
def test_a_rank_that_is_stopped_is_waited_for_until_the_grace_is_over(tmp_path):
    training = Training(tmp_path / "job", 2, "1:6:stop", options=("--grace", 2))
    training.wait_for_step(6)
    began = time.monotonic()
    training.process.send_signal(SIGTERM)
    done = training.end()
    assert done.returncode == 143 and 2 <= time.monotonic() - began < 20
    assert "still there: KILL" in done.stdout and training.saved_step() == 4
    assert "the job was stopped at step 6; its last checkpoint is" in done.stdout


@pytest.mark.matrix
@pytest.mark.timeout(150)
def test_a_rank_that_was_stopped_may_still_save(tmp_path):
    training = Training(tmp_path / "job", 2, "1:6:stop")
    training.wait_for_step(6)
    training.process.send_signal(SIGTERM)
    time.sleep(0.5)
    os.kill(training.pids()[1], SIGCONT)
    check_stopped(training, training.end())


@pytest.mark.matrix
@pytest.mark.timeout(150)
@pytest.mark.parametrize("signum", [SIGTERM, SIGINT])
def test_a_second_signal_ends_the_job_at_once(tmp_path, signum):
    """Rank 1 doesn't come; rank 0 waits for it inside of TensorFlow."""
    training = Training(tmp_path / "job", 2, "1:6:stop")
    training.wait_for_step(6)
    training.process.send_signal(signum)
    time.sleep(1.5)
    began = time.monotonic()
    training.process.send_signal(signum)
    done = training.end()
    assert done.returncode == 128 + signum and time.monotonic() - began < 15


@pytest.mark.matrix
@pytest.mark.timeout(150)
def test_a_second_signal_to_a_rank_ends_it_inside_of_tensorflow(tmp_path):
    training = Training(tmp_path / "job", 2, "1:6:stop")
    training.wait_for_step(6)
    rank = training.pids()[0]
    os.kill(rank, SIGTERM)
    time.sleep(2.5)  # within two seconds it would be the same signal
    assert training.process.poll() is None
    os.kill(rank, SIGTERM)
    while os.path.exists(f"/proc/{rank}"):
        time.sleep(0.02)
    os.kill(training.pids()[1], SIGCONT)
    done = training.end()
    assert done.returncode == 143 and "root cause: rank 0" in done.stdout


PLAIN = """
import os, sys, time
import tensorflow.compat.v1 as tf
from collective import CollectiveStrategy
from collective.errors import Preempted

tf.logging.set_verbosity(tf.logging.ERROR)
folder = sys.argv[1]
strategy = CollectiveStrategy()
rank = strategy.rank()
open(f'{folder}/pid.{rank}', 'w').write(str(os.getpid()))
with strategy.scope(plan='quiet'), tf.Graph().as_default():
    with strategy.embedding_scope():
        t = tf.get_variable('t', [10, 2], initializer=tf.ones_initializer())
    loss = tf.reduce_mean(tf.nn.embedding_lookup(t, [1, 2, rank]))
    step = tf.train.get_or_create_global_step()
    train = tf.train.AdagradOptimizer(0.1).minimize(loss, global_step=step)
    saver = tf.train.Saver()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        done = 0
        try:
            while True:
                session.run(train)
                done += 1
                open(f'{folder}/step.{rank}', 'w').write(str(done))
                time.sleep(0.01)
        except Preempted:
            assert session.run(step) == done
            saver.save(session, f'{folder}/saved/m', global_step=step)
            raise
print('went on')
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.matrix)])
def test_a_plain_session_is_told_by_an_error(tmp_path, ranks):
    """It may save, and leaves with the error's code."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PLAIN))
    training = Training(tmp_path / "job", ranks, program=tmp_path / "program.py")
    training.wait_for_step(3)
    tell(training, "launcher", SIGTERM)
    check_stopped(training, training.end())


ESTIMATOR = """
import os, sys, time
import tensorflow.compat.v1 as tf
from collective import CollectiveStrategy
from collective import estimator as tf_estimator

tf.logging.set_verbosity(tf.logging.ERROR)
folder, long = sys.argv[1], sys.argv[3]
strategy = CollectiveStrategy()
rank = strategy.rank()
open(f'{folder}/pid.{rank}', 'w').write(str(os.getpid()))


class Note(tf.train.SessionRunHook):
    def __init__(self, name):
        self.name, self.count = name, 0

    def after_run(self, context, values):
        self.count += 1
        open(f'{folder}/{self.name}.{rank}', 'w').write(str(self.count))
        time.sleep(0.01)


def model(features, labels, mode):
    with strategy.embedding_scope():
        t = tf.get_variable('t', [10, 2], initializer=tf.ones_initializer())
    loss = tf.reduce_mean(tf.nn.embedding_lookup(t, features))
    step = tf.train.get_or_create_global_step()
    train = tf.train.AdagradOptimizer(0.1).minimize(loss, global_step=step)
    return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=train,
                                      eval_metric_ops={'m': tf.metrics.mean(loss)})


def data(n=None):
    return tf.data.Dataset.from_tensor_slices(([[1, 2]] * 8, [0] * 8)).repeat(n).batch(2)


config = tf_estimator.RunConfig(model_dir=f'{folder}/saved', save_checkpoints_steps=5)
estimator = strategy.estimator(model, config=config)
train = tf_estimator.TrainSpec(data, max_steps=100000, hooks=[Note('step')])
evaluate = tf_estimator.EvalSpec(data if long == 'evaluation' else lambda: data(1),
                                 steps=None, hooks=[Note('evaluated')], throttle_secs=0)
tf_estimator.train_and_evaluate(estimator, train, evaluate)
print('went on')
"""


@pytest.mark.matrix
@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("during", ["training", "evaluation"])
def test_train_and_evaluate(tmp_path, ranks, during):
    """It saves the step, and neither evaluates nor goes on to evaluate."""
    (tmp_path / "program.py").write_text(textwrap.dedent(ESTIMATOR))
    training = Training(tmp_path / "job", ranks, during, program=tmp_path / "program.py")
    awaited, count = ("step.0", 7) if during == "training" else ("evaluated.0", 3)
    training.wait_for(awaited, count)
    tell(training, "launcher", SIGTERM)
    done = training.end()
    if during == "training":
        check_stopped(training, done)
    assert done.returncode == 143 and training.saved_step() >= 0
    assert "went on" not in done.stdout and "Traceback" not in done.stdout


OWN_HANDLER = """
import os, signal, sys, time
import tensorflow.compat.v1 as tf
from collective import CollectiveStrategy

told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
folder = sys.argv[1]
strategy = CollectiveStrategy()
with strategy.scope(plan='quiet'), tf.Graph().as_default():
    with strategy.embedding_scope():
        t = tf.get_variable('t', [10, 2], initializer=tf.ones_initializer())
    train = tf.train.AdagradOptimizer(0.1).minimize(
        tf.reduce_mean(tf.nn.embedding_lookup(t, [1])), tf.train.get_or_create_global_step())
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for step in range(10 ** 6):
            session.run(train)
            open(f'{folder}/step.{strategy.rank()}', 'w').write(str(step))
            if told:
                print('my own way', flush=True)
                os._exit(0)
"""


@pytest.mark.matrix
@pytest.mark.timeout(150)
def test_a_script_that_takes_the_signal_itself_keeps_it(tmp_path):
    (tmp_path / "program.py").write_text(textwrap.dedent(OWN_HANDLER))
    training = Training(tmp_path / "job", 1, program=tmp_path / "program.py")
    training.wait_for_step(3)
    training.process.send_signal(SIGTERM)
    done = training.end()
    assert done.returncode == 143 and "my own way" in done.stdout
