"""Checkpoints and exports of one TensorFlow, in another: restored bit for bit, served with the same
numbers.

It needs a second environment, with another TensorFlow, next to this one: `.venv` and those in
`.venvs` of a checkout, as `make setup` and `make setup TENSORFLOW=2.15 VENV=.venvs/2.15` make them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from collective import checkpoint

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
NAMES = ("static", "dynamic")

# Saves at step 5 or restores it, exports, and takes three more steps. 8 samples, of all ranks.
TRAIN = """
import json, sys
import numpy as np
import tensorflow.compat.v1 as tf
import collective

task, folder = sys.argv[1:]
strategy = collective.CollectiveStrategy()
rank, ranks = strategy.rank(), strategy.world_size()
normal = np.random.default_rng(1).normal(0, 1, (20, 3)).astype(np.float32)

def lookups():
    ids, keys = tf.placeholder(tf.int64, [None], 'ids'), tf.placeholder(tf.int64, [None], 'keys')
    with strategy.embedding_scope():
        static = tf.get_variable('static', [20, 3], initializer=tf.constant_initializer(normal))
        dynamic = collective.get_embedding_variable('dynamic', 3, initializer=tf.ones_initializer())
    rows = [tf.nn.embedding_lookup(table, each) for table, each in ((static, ids), (dynamic, keys))]
    return {'ids': ids, 'keys': keys}, dict(zip(('static', 'dynamic'), rows))

def serving():
    return tf.saved_model.predict_signature_def(*lookups())

with strategy.scope(), tf.Graph().as_default():
    inputs, rows = lookups()
    width = tf.get_variable('width', initializer=np.linspace(-1, 1, 3).astype(np.float32))
    loss = tf.reduce_mean(tf.square((rows['static'] + rows['dynamic']) * width - 0.3))
    step = tf.train.get_or_create_global_step()
    names = {v.op.name.split('/')[0]: v for v in tf.trainable_variables()}
    adam = tf.train.AdamOptimizer(0.05).minimize(loss, var_list=[names['static'], names['width']])
    adagrad = tf.train.AdagradOptimizer(0.1).minimize(loss, step, var_list=[names['dynamic']])
    saver, losses = tf.train.Saver(), []
    with tf.Session() as session:
        def train(first, last):
            for i in range(first, last):
                ids = np.array_split(np.random.default_rng([7, i]).integers(0, 20, 8), ranks)[rank]
                fed = {inputs['ids']: ids, inputs['keys']: ids * 7919000003 - 5}
                losses.append(float(session.run([loss, adam, adagrad], fed)[0]))
        if task == 'save':
            session.run(tf.global_variables_initializer())
            train(0, 5)
            losses.clear()
            prefix = saver.save(session, f'{folder}/saved', step)
            strategy.export_saved_model(f'{folder}/export', prefix, serving)
        else:
            saver.restore(session, tf.train.latest_checkpoint(folder))
            saver.save(session, f'{folder}/again/restored', step)
        train(5, 8)
with open(f'{folder}/{task}_{rank}.json', 'w') as file:
    json.dump([tf.__version__, losses], file)
"""

SERVE = """
import glob, sys
for name in ('collective', 'horovod'):
    sys.modules[name] = None
import numpy as np
import tensorflow as tf

folder, asked = sys.argv[1], np.load(sys.argv[2])
(path,) = glob.glob(folder + '/export/*/')
model = tf.saved_model.load(path).signatures['serving_default']
answers = model(ids=tf.constant(asked['ids']), keys=tf.constant(asked['keys']))
np.savez(folder + '/answers.npz', **{name: answer.numpy() for name, answer in answers.items()})
"""


def release(environment: Path) -> str | None:
    """Returns the TensorFlow of an environment, '2.21' say."""
    site_packages = environment.glob("lib/python*/site-packages/tensorflow-*.dist-info")
    found = [path.name.split("-")[1].rpartition(".")[0] for path in site_packages]
    return found[0] if found else None


@pytest.fixture(scope="module")
def pythons() -> list[str]:
    """Returns the Pythons of two environments with different TensorFlow: this one's first."""
    here = Path(sys.prefix)
    checkout = next((each for each in here.parents if (each / ".venvs").is_dir()), ROOT)
    for other in sorted([checkout / ".venv", *(checkout / ".venvs").glob("*")]):
        if release(other) not in (None, release(here)):
            return [sys.executable, str(other / "bin" / "python")]
    pytest.skip(
        f"there is one TensorFlow only, {release(here)}: make setup TENSORFLOW=… VENV=.venvs/… "
        "makes an environment with another one"
    )


def run(python: str, *arguments: object) -> None:
    """Runs a program with this checkout's library, which needs operations of that TensorFlow."""
    done = subprocess.run(
        [python, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout


def arrays(path: Path) -> dict[str, np.ndarray]:
    """Returns all of a checkpoint: keys and rows of tables and slots, and variables."""
    loaded = checkpoint.load(str(path))
    found = {name: np.asarray(loaded[name]) for name in loaded.variables}
    for name in loaded.tables:
        for each in (name, *loaded[name].slots):
            blocks = list(loaded[each].blocks())
            found[f"{each} keys"] = np.concatenate([keys for keys, _ in blocks])
            found[f"{each} rows"] = np.concatenate([rows for _, rows in blocks])
    return found


@pytest.mark.parametrize("direction", [1, -1], ids=["to the other", "from the other"])
def test_a_checkpoint_and_an_export(pythons: list[str], tmp_path: Path, direction: int):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "serve.py").write_text(SERVE)
    (tmp_path / "again").mkdir()
    writer, reader = pythons[::direction]
    launch = ("-m", "collective.launch", "--device", "cpu", "-np")
    run(writer, *launch, 2, tmp_path / "train.py", "save", tmp_path)
    run(reader, *launch, 1, tmp_path / "train.py", "restore", tmp_path)

    saved, restored = arrays(tmp_path), arrays(tmp_path / "again")
    assert saved.keys() == restored.keys() and len(saved) >= 10
    for name, values in saved.items():
        assert values.dtype == restored[name].dtype
        assert values.tobytes() == restored[name].tobytes(), name

    told = [json.loads((tmp_path / f"save_{rank}.json").read_text()) for rank in range(2)]
    version, losses = json.loads((tmp_path / "restore_0.json").read_text())
    assert version != told[0][0]
    # Each rank's loss is of its half of the samples; the sums of two ranks are rounded otherwise.
    np.testing.assert_allclose(np.mean([told[0][1], told[1][1]], axis=0), losses, rtol=1e-5)

    absent = 3
    keys = np.append(saved["dynamic keys"], absent)
    np.savez(tmp_path / "asked.npz", ids=np.arange(20), keys=keys)
    run(reader, tmp_path / "serve.py", tmp_path, tmp_path / "asked.npz")
    with np.load(tmp_path / "answers.npz") as answers:
        np.testing.assert_array_equal(answers["static"], saved["static rows"])
        np.testing.assert_array_equal(answers["dynamic"][:-1], saved["dynamic rows"])
        np.testing.assert_array_equal(answers["dynamic"][-1], np.zeros(3, np.float32))
