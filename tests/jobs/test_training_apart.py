"""Ranks that would train a model each, without a word, are an error on all of them."""

from __future__ import annotations

import pytest

from tests.jobs import pool

START = """
import os
import sys
import numpy as np
import tensorflow.compat.v1 as tf
x, y = np.ones([4, 3], np.float32), np.ones([4, 1], np.float32)
"""
SESSION = """
with tf.Graph().as_default():
    v = tf.get_variable("v", [2])
    loss = tf.reduce_sum(v * v)
    step = tf.train.get_or_create_global_step()
    train = tf.group(tf.train.AdamOptimizer(0.1).minimize(loss, step))
    with tf.train.MonitoredTrainingSession() as session:
        session.run(loss)
        print("evaluated", flush=True)
        if "evaluate" not in sys.argv:
            session.run({"loss": loss, "all": [train]})
"""
MODEL = """
model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
model.compile(OPTIMIZER, "mse")
"""
FIT = "model.fit(x, y, verbose=0)\n"
KERAS = MODEL.replace("OPTIMIZER", "'adam'")
# Read by TensorFlow 2.16 and newer, whose tf.keras is Keras 3 without it.
OLD = "os.environ['TF_USE_LEGACY_KERAS'] = '1'\n" + MODEL.replace(
    "OPTIMIZER", "tf.keras.optimizers.legacy.Adam()"
)
IN_SCOPE = """
from collective import CollectiveStrategy
with CollectiveStrategy().scope():
    """
TAPE = """
v = tf.Variable([1.0])
with tf.GradientTape() as tape:
    loss = v * v
STEP
"""
BY_TAPE = TAPE.replace(
    "STEP", "OPTIMIZER.apply_gradients(grads_and_vars=zip(tape.gradient(loss, [v]), [v]))"
)
ESTIMATOR = """
import collective.estimator
estimator = collective.estimator.LinearRegressor([tf.feature_column.numeric_column("x")])
data = lambda: tf.data.Dataset.from_tensors(({"x": [1.0]}, [1.0])).repeat(3)
estimator.train(data, steps=3)
"""
IN_BRANCH = """
tf.enable_control_flow_v2()
with tf.Graph().as_default(), tf.Session() as session:
    v = tf.get_variable("v", [2], use_resource=True)
    def train():
        return tf.train.AdagradOptimizer(0.1).minimize(tf.reduce_sum(v * v))
    step = tf.cond(tf.equal(tf.size(v), 2), lambda: [train(), 1][1], lambda: 0)
    session.run(tf.global_variables_initializer())
    session.run(step)
"""
CALLABLE = """
with tf.Graph().as_default(), tf.Session() as session:
    v = tf.get_variable("v", [2])
    train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(tf.reduce_sum(v * v))
    session.run(tf.global_variables_initializer())
    session.make_callable([train])()
"""
SAVING = SESSION.replace("TrainingSession()", "TrainingSession(checkpoint_dir='saved')")
SAVING_ESTIMATOR = ESTIMATOR.replace('("x")]', '("x")], model_dir="saved"')
SUPERVISED = """
with tf.Graph().as_default():
    step = tf.train.get_or_create_global_step()
    train = tf.train.AdagradOptimizer(0.1).minimize(tf.get_variable("v", []) ** 2, step)
    supervisor = tf.train.Supervisor(logdir="saved")
    with supervisor.managed_session() as session:
        session.run(train)
"""
HOROVOD = "import horovod.tensorflow as hvd\nhvd.init()\n"
CLUSTER = (
    'os.environ[\'TF_CONFIG\'] = \'{"cluster": {"ps": ["h:1"], "worker": ["h:2"]}, '
    '"task": {"type": "worker", "index": 0}}\'\n'
)


def launch(folder, program, *options, **environment):
    (folder / "program.py").write_text(START + program + "print('trained', flush=True)\n")
    own = [word for word in options if not word.startswith("evaluate")]
    arguments = [word for word in options if word.startswith("evaluate")]
    return pool.launch(
        *("-np", 2, "--verbose", *own, folder / "program.py", *arguments),
        environment=environment,
        cwd=folder,
        timeout=120,
        pool=False,
    )


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(SESSION, id="a session"),
        pytest.param(CALLABLE, id="a callable"),
        pytest.param(IN_BRANCH, id="a branch"),
        pytest.param(ESTIMATOR, id="an Estimator"),
        pytest.param(KERAS + FIT, id="fit"),
        pytest.param(OLD + FIT, id="fit with an old optimizer"),
        pytest.param("tf.disable_v2_behavior()\n" + OLD + FIT, id="fit in a graph"),
        pytest.param(
            IN_SCOPE + KERAS.strip().replace("\n", "\n    ") + "\n" + FIT, id="fit after scope"
        ),
        pytest.param(
            BY_TAPE.replace("OPTIMIZER", "tf.keras.optimizers.SGD(0.1)"), id="a tape, Keras"
        ),
        pytest.param(
            BY_TAPE.replace("OPTIMIZER", "tf.train.AdagradOptimizer(0.1)"), id="a tape, TensorFlow"
        ),
    ],
)
def test_an_update_outside_of_scope_is_refused(tmp_path, program):
    done = launch(tmp_path, program)
    assert done.returncode == 1, done.stdout
    assert "trained" not in done.stdout
    assert "Each of the 2 ranks would train a model of its own" in done.stdout
    assert "with strategy.scope()" in done.stdout and "--independent" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(SAVING, id="a session"),
        pytest.param(SAVING_ESTIMATOR, id="an Estimator", marks=pytest.mark.matrix),
        pytest.param(SUPERVISED, id="a Supervisor", marks=pytest.mark.matrix),
    ],
)
def test_nothing_is_written_before_it_is_refused(tmp_path, program):
    """Both ranks would write the first checkpoint into one folder."""
    done = launch(tmp_path, program)
    assert done.returncode == 1, done.stdout
    assert "Each of the 2 ranks would train a model of its own" in done.stdout
    assert not [path for path in tmp_path.glob("saved/**/*") if path.is_file()]


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "program, options, environment",
    [
        pytest.param(SESSION, ["--independent"], {}, id="it is wanted"),
        pytest.param(SESSION, [], {"COLLECTIVE_INDEPENDENT": "1"}, id="wanted by the environment"),
        pytest.param(SESSION, ["--as", "horovod"], {}, id="of another framework"),
        pytest.param(HOROVOD + SESSION, [], {}, id="Horovod"),
        pytest.param(
            HOROVOD + IN_SCOPE + "pass\n" + KERAS + FIT, [], {}, id="Horovod, and a scope"
        ),
        pytest.param(
            IN_SCOPE + "pass\n" + HOROVOD + KERAS + FIT, [], {}, id="a scope, and Horovod"
        ),
        pytest.param(CLUSTER + KERAS + FIT, [], {}, id="a cluster"),
        pytest.param(SESSION, ["evaluate"], {}, id="evaluation"),
        pytest.param(KERAS + "model.predict(x, verbose=0)\n", [], {}, id="inference"),
        pytest.param(SESSION, ["-np", 1], {}, id="one rank"),
        pytest.param(SAVING, ["-np", 1], {}, id="one rank that saves"),
    ],
)
def test_what_trains_nothing_apart_stays_as_it_is(tmp_path, program, options, environment):
    done = launch(tmp_path, program, *map(str, options), **environment)
    assert done.returncode == 0, done.stdout
    assert "trained" in done.stdout


def test_the_sitecustomize_of_others_runs_and_the_path_is_theirs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.of_others = 7\n")
    (tmp_path / "program.py").write_text(
        "import sys\n"
        "assert 'tensorflow' not in sys.modules and 'collective' not in sys.modules\n"
        "assert not any('startup_hook' in folder for folder in sys.path), sys.path\n"
        "print('of others:', of_others, sys.modules['sitecustomize'].__file__)\n"
    )
    path = f"{tmp_path}:{pool.ROOT}"
    done = pool.launch(
        *("-np", 2, tmp_path / "program.py"), environment={"PYTHONPATH": path}, pool=False
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(f"of others: 7 {tmp_path / 'sitecustomize.py'}") == 2
