"""Scripts of Horovod run on one host where Horovod isn't installed, with the numbers of Horovod."""

import os
import re

import pytest

from tests.jobs import pool

pytestmark = pytest.mark.matrix


@pytest.fixture
def without_horovod(tmp_path):
    """Gives the environment of a Python in which Horovod can't be imported."""
    package = tmp_path / "path" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'horovod'\", name='horovod')"
    )
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join([str(package.parent), *inherited])}


def launch(script, environment, *options):
    return pool.launch(
        *("-np", 2, "--device", "cpu", "--as", "horovod", *options),
        script,
        environment=environment,
        pool=False,
    )


SCRIPT = """
import numpy as np
import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()
tf.set_random_seed(hvd.rank())
x = tf.placeholder(tf.float32, [None, 4])
hidden = tf.layers.dense(x, 3, tf.tanh)
embedding = tf.get_variable("e", [9, 3], partitioner=tf.fixed_size_partitioner(1))
ids = tf.placeholder(tf.int64, [None])
rows = tf.nn.embedding_lookup(embedding, ids)
loss = tf.reduce_mean(tf.square(tf.reduce_sum(hidden * rows, 1) - 1))
step = tf.train.get_or_create_global_step()
optimizer = hvd.DistributedOptimizer(tf.train.AdagradOptimizer(0.1 * hvd.size()))
train = optimizer.minimize(loss, global_step=step)
mean = hvd.allreduce(loss)
hooks = [hvd.BroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(last_step=5)]
drawn = np.random.RandomState(hvd.rank())
with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
    while not session.should_stop():
        batch = {x: drawn.rand(8, 4), ids: drawn.randint(0, 9, 8)}
        print("losses", *session.run([loss, mean, train], batch)[:2])
hvd.shutdown()
"""


def losses(done):
    assert done.returncode == 0, done.stdout
    return sorted(re.findall(r"^\[\d\] losses .+$", done.stdout, re.M))


@pytest.mark.parametrize("scope", ["script", "auto"])
def test_a_script_has_the_same_losses(without_horovod, tmp_path, scope):
    script = tmp_path / "train.py"
    # Initial values of scope() are drawn otherwise on no rank: the seed is what differs.
    script.write_text(SCRIPT)
    options = ("--embedding-scope", scope)
    want, found = (losses(launch(script, env, *options)) for env in ({}, without_horovod))
    assert len(want) == 10
    assert found == want


@pytest.mark.parametrize(
    "line, words",
    [
        ("hvd.alltoall", "AttributeError: horovod.tensorflow.alltoall needs Horovod itself"),
        ("import horovod.torch", "ImportError: horovod.torch needs Horovod itself"),
        (
            "from horovod.tensorflow import elastic",
            "ImportError: horovod.tensorflow.elastic needs Horovod itself",
        ),
    ],
    ids=["function", "module", "from"],
)
def test_the_rest_of_horovod_is_refused_by_name(without_horovod, tmp_path, line, words):
    script = tmp_path / "train.py"
    script.write_text(f"import horovod.tensorflow as hvd\n{line}\n")
    done = launch(script, without_horovod)
    assert done.returncode == 1
    assert words in done.stdout and "collective build-horovod" in done.stdout
