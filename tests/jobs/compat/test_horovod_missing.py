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
mean = hvd.allreduce(loss, op=hvd.mpi_ops.Average, compression=hvd.compression.NoneCompressor)
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


@pytest.mark.parametrize("scope", [pytest.param("script", marks=pytest.mark.long), "auto"])
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


FIT = """
import sys
import numpy as np
import tensorflow as tf
import horovod.tensorflow.keras as hvd

hvd.init()
own = slice(hvd.rank(), None, hvd.size())
drawn = np.random.default_rng(0)
x, y = drawn.normal(size=(48, 6)).astype(np.float32)[own], drawn.integers(0, 3, 48)[own]
rate = 0.01 * hvd.size()
model = tf.keras.Sequential(
    [tf.keras.layers.Dense(5, "tanh", input_shape=(6,)), tf.keras.layers.Dense(3, "softmax")])
model.set_weights([np.linspace(-1, 1 + hvd.rank(), w.size).reshape(w.shape)
                   for w in model.get_weights()])
model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(), metrics=["accuracy"],
    optimizer=hvd.DistributedOptimizer(tf.optimizers.Adam(rate), backward_passes_per_step=1),
    experimental_run_tf_function=False)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=2, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("{folder}/checkpoint-{{epoch}}.h5"))
dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(24 // hvd.size())
history = model.fit(dataset, steps_per_epoch=2, epochs=3, callbacks=callbacks, verbose=0)
print("losses", *history.history["loss"], *history.history["accuracy"])
print("weights", *np.concatenate([w.ravel() for w in model.get_weights()]))
"""
# Trains by the rates that Horovod's formula has on two ranks, without any of Horovod's names.
PLAIN = """
class Rising(tf.keras.callbacks.Callback):
    made = 0
    def on_train_batch_begin(self, batch, logs=None):
        self.made += 1
        self.model.optimizer.learning_rate.assign(0.02 * (1 + min(self.made / 4, 1)) / 2)
callbacks = [Rising()]
"""


def test_fit_of_tensorflow_2_has_the_numbers_of_one_process(without_horovod, tmp_path):
    """Only rank 0 saves, as in Horovod's examples."""
    script, plain = tmp_path / "train.py", tmp_path / "plain.py"
    text = FIT.format(folder=tmp_path)
    script.write_text(text)
    before, rest = text.split("callbacks = [")
    alone = before.replace("import horovod.tensorflow.keras as hvd\n", "").replace("hvd.init()", "")
    alone = re.sub(r"hvd.DistributedOptimizer\((.*), backward.*?\)", r"\1", alone)
    alone += PLAIN + rest[rest.index("dataset =") :]
    alone = alone.replace("rate = 0.01", "rate = 0.02")
    for theirs, number in (("hvd.rank()", "0"), ("hvd.size()", "1")):
        alone = alone.replace(theirs, number)
    plain.write_text(f"import os\nos.environ['TF_USE_LEGACY_KERAS'] = '1'\n{alone}")
    want = pool.launch("-np", 1, "--device", "cpu", plain, pool=False)
    assert want.returncode == 0, want.stdout
    done = launch(script, without_horovod)
    assert done.returncode == 0, done.stdout

    def numbers(word, text):
        found = re.findall(rf"^(?:\[\d\] )?{word} (.+)$", text, re.M)
        return [[float(x) for x in line.split()] for line in found]

    for word in ("losses", "weights"):
        (expected,), of_ranks = numbers(word, want.stdout), numbers(word, done.stdout)
        assert len(of_ranks) == 2
        for found in of_ranks:
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert len(list(tmp_path.glob("checkpoint-*.h5"))) == 3
    assert "is a script of TensorFlow 2" in done.stdout
