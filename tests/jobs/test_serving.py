"""What an Estimator exports on several ranks, served by processes that can't import this library;
what a killed export leaves; the memory it takes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from collective import serving
from tests.jobs import pool

CLI = (sys.executable, str(Path(sys.executable).with_name("saved_model_cli")))

TRAIN = """
import json, os, sys
import numpy as np
import tensorflow.compat.v1 as tf
from collective import CollectiveStrategy, RankError, feature_column as columns
from collective import estimator as tf_estimator
from collective.coordination import barrier

tf.logging.set_verbosity(tf.logging.ERROR)
strategy = CollectiveStrategy()
rank, ranks, out = strategy.rank(), strategy.world_size(), sys.argv[1]
vocabulary = os.path.join(out, 'words.txt')
trouble = lambda place: None

def records(n, seed):
    rng = np.random.default_rng(seed)
    return {'user': rng.integers(-20, 20, n) * 7919000003, 'item': rng.integers(0, 5, n),
            'words': rng.choice(['to', 'be', 'or'], [n, 3])}

def input_fn():
    def label(x):
        return x, tf.cast(x['user'] % 2, tf.float32)
    return tf.data.Dataset.from_tensor_slices(records(4000, 1)).batch(50).map(label)

def receiver():
    trouble('receiver')
    x = {'user': tf.placeholder(tf.int64, [None]), 'item': tf.placeholder(tf.int64, [None]),
         'words': tf.placeholder(tf.string, [None, 3])}
    return tf_estimator.export.ServingInputReceiver(x, x)

def model_fn(features, labels, mode):
    trouble(mode)
    random = tf.random_normal_initializer(stddev=0.5)
    with strategy.embedding_scope():
        deep = tf.feature_column.input_layer(features, [
            tf.feature_column.embedding_column(columns.categorical_column_with_embedding('user'), 4, initializer=random),
            tf.feature_column.embedding_column(tf.feature_column.categorical_column_with_vocabulary_file(
                'words', vocabulary, num_oov_buckets=2), 4, combiner='sum', initializer=random)])
        item = tf.get_variable('item', [5, 4], initializer=random)
    deep = tf.layers.dense(tf.concat([deep, tf.nn.embedding_lookup(item, features['item'])], 1), 8, tf.nn.relu)
    logit = tf.layers.dense(deep, 1)[:, 0]
    out = {'score': tf.sigmoid(logit), 'user': tf.identity(features['user'])}
    if mode == tf_estimator.ModeKeys.PREDICT:
        return tf_estimator.EstimatorSpec(mode, out)
    loss = tf.losses.sigmoid_cross_entropy(labels, logit)
    train = tf.train.AdagradOptimizer(0.1).minimize(loss, global_step=tf.train.get_or_create_global_step())
    return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=train)

def left():
    barrier.exchange(None, 'cleaned', {})
    return sorted(os.listdir(base)) if os.path.isdir(base) else []

with strategy.scope():
    if rank == 0:
        open(vocabulary, 'w').write('to\\nbe\\n')
    barrier.exchange(None, 'written', {})
    estimator = strategy.estimator(model_fn, os.path.join(out, 'model'))
    _, exports = estimator.train_and_evaluate(
        tf_estimator.TrainSpec(input_fn, max_steps=30),
        tf_estimator.EvalSpec(input_fn, steps=2, exporters=[
            tf_estimator.FinalExporter('final', receiver), tf_estimator.LatestExporter('latest', receiver)]))
    asked = {**records(40, 2), 'words': np.random.default_rng(3).choice(['to', 'be', 'or', 'else'], [40, 3])}
    asked['user'][::4] = np.array([-2 ** 63, -1, 0, 2 ** 63 - 1, 5] * 2)          # most of them unknown
    predicted = list(estimator.predict(lambda: tf.data.Dataset.from_tensor_slices(asked).batch(7), gather=True))
    base = os.path.join(out, 'export')
    for place in ('receiver', 'infer'):
        for broken in range(ranks):
            def trouble(where):
                if (rank, where) == (broken, place):
                    raise ValueError('no ' + place)
            try:
                estimator.export_saved_model(base, receiver)
                raise AssertionError('exported')
            except (RankError if rank != broken else ValueError) as error:
                assert 'no ' + place in str(error), error
            assert left() == [], left()
    trouble = lambda place: None
    path = estimator.export_saved_model(base, receiver, assets_extra={'words.txt': vocabulary})
    told = barrier.exchange(None, 'paths', {'path': path.decode()})
    assert left() == [os.path.basename(path.decode())] and all(text == told[0] for text in told)
    again = estimator.export_saved_model(base, receiver, assets_extra={'words.txt': vocabulary}, base=path)
    record = json.load(open(again.decode() + '/saved_model.collective.json'))
    values = [file['linked'] for name, file in record['files'].items() if '.data-' in name]
    assert record['base'] == path.decode() and values and all(values), record
    for mode in ('train', 'eval'):
        try:
            estimator.export_saved_model(base, receiver, experimental_mode=mode)
            raise AssertionError('exported')
        except ValueError as error:
            assert mode in str(error)
if rank == 0:
    np.savez(os.path.join(out, 'answers.npz'), **{'score': [p['score'] for p in predicted],
                                                  'told': [p['user'] for p in predicted], **asked})
    json.dump([p.decode() for p in [path, again, *exports]], open(os.path.join(out, 'paths.json'), 'w'))
print('done', rank)
"""

SERVE = """
import json, sys
for name in ('collective', 'horovod', 'horovod.tensorflow', 'cupy'):
    sys.modules[name] = None                # importing it is an ImportError
import numpy as np
import tensorflow as tf

answers = np.load(sys.argv[1] + '/answers.npz')
for path in json.load(open(sys.argv[1] + '/paths.json')):
    served = tf.saved_model.load(path).signatures['serving_default']
    got = served(**{name: tf.constant(answers[name]) for name in ('user', 'item', 'words')})
    np.testing.assert_array_equal(got['user'].numpy(), answers['told'])
    np.testing.assert_allclose(got['score'].numpy(), answers['score'], rtol=1e-6)
print('same')
"""


def alone(*arguments, **kwargs):
    """Runs a process of TensorFlow alone."""
    environment = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("PYTHONPATH", "HOROVOD", "COLLECTIVE"))
    }
    done = subprocess.run(
        arguments,
        text=True,
        timeout=100,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environment, TF_CPP_MIN_LOG_LEVEL="3"),
        **kwargs,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def launched(tmp_path, script, ranks, *arguments, timeout=240, preloaded=True):
    (tmp_path / "script.py").write_text(script)
    options = ("-np", ranks, "--device", "cpu")
    done = pool.launch(
        *options, tmp_path / "script.py", *arguments, timeout=timeout, pool=preloaded
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "ranks", [2, pytest.param(1, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)]
)
def test_processes_without_this_library_answer_as_predict_does(tmp_path, ranks):
    output = launched(tmp_path, TRAIN, ranks, tmp_path)
    assert all(f"done {rank}\n" in output for rank in range(ranks)), output
    (tmp_path / "serve.py").write_text(SERVE)
    assert "same" in alone(sys.executable, str(tmp_path / "serve.py"), str(tmp_path), cwd=tmp_path)
    path = json.loads((tmp_path / "paths.json").read_text())[0]
    shown = alone(*CLI, "show", "--dir", path, "--all", cwd=tmp_path)
    assert "signature_def['serving_default']" in shown and "inputs['words'] tensor_info" in shown
    answers = np.load(tmp_path / "answers.npz")
    for name in ("user", "item", "words"):
        np.save(tmp_path / f"{name}.npy", answers[name])
    alone(
        *CLI,
        "run",
        "--dir",
        path,
        "--tag_set",
        "serve",
        "--signature_def",
        "serving_default",
        "--outdir",
        str(tmp_path / "cli"),
        "--inputs",
        ";".join(f"{name}={tmp_path}/{name}.npy" for name in ("user", "item", "words")),
        cwd=tmp_path,
    )
    np.testing.assert_allclose(np.load(tmp_path / "cli" / "score.npy"), answers["score"], rtol=1e-6)


KILLED = """
import os, signal, sys
import tensorflow.compat.v1 as tf
from collective import CollectiveStrategy
from collective.checkpoint.files import tensor_bundle
from collective.serving import variable_files

strategy, folder, mode = CollectiveStrategy(), sys.argv[1], sys.argv[2]
variable_files.LEAST_FILE_BYTES = 4096

def model():
    with strategy.embedding_scope():
        t = tf.get_variable('t', [4000, 4], initializer=tf.ones_initializer())
    ids = tf.placeholder(tf.int64, [None], 'ids')
    return ids, tf.nn.embedding_lookup(t, ids)

def serving():
    ids, rows = model()
    return tf.saved_model.predict_signature_def({'ids': ids}, {'rows': rows})

with strategy.scope(), tf.Graph().as_default():
    ids, rows = model()
    train = tf.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_sum(rows))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        if mode != 'first':
            session.run(train, {ids: [7]})
        prefix = tf.train.Saver().save(session, folder + '/' + mode)

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

if mode == 'between files' and strategy.rank() == 1:
    add = variable_files.VariableFiles.add_table_part
    variable_files.VariableFiles.add_table_part = lambda *args: (add(*args), die())
if mode == 'before the merge' and strategy.rank() == 0:
    tensor_bundle.merge = die
if mode == 'before it is named' and strategy.rank() == 0:
    rename = tf.io.gfile.rename
    tf.io.gfile.rename = lambda *args, **kwargs: (
        die() if args[1].rsplit('/', 1)[1].isdigit() else rename(*args, **kwargs))
strategy.export_saved_model(folder + '/export', prefix, serving, base=folder + '/export')
"""


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("when", ["between files", "before the merge", "before it is named"])
def test_a_killed_export_leaves_the_version_before(tmp_path, when):
    """Nothing of that changes, nothing else is a version, and the next export cleans up."""
    export = tmp_path / "export"
    launched(tmp_path, KILLED, 2, tmp_path, "first", timeout=100)
    (first,) = os.listdir(export)
    before = contents(export / first)
    options = ("-np", 2, "--device", "cpu")
    done = pool.launch(*options, tmp_path / "script.py", tmp_path, when, timeout=100)
    assert done.returncode != 0
    left = set(os.listdir(export)) - {first}
    assert left and all(name.startswith("temp-") for name in left)
    assert serving.watch(export).latest() == str(export / first)
    assert contents(export / first) == before
    launched(tmp_path, KILLED, 2, tmp_path, "next", timeout=100)
    assert contents(export / first) == before
    (new,) = set(os.listdir(export)) - {first}
    assert serving.watch(export).latest() == str(export / new)
    record = json.loads((export / new / "saved_model.collective.json").read_text())
    assert record["bytes_linked"] > record["bytes_written"]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


MEMORY = """
import sys, threading
import psutil, tensorflow.compat.v1 as tf
from collective import CollectiveStrategy

strategy, folder = CollectiveStrategy(), sys.argv[1]
rows = 600 * 2 ** 20 // 128                                     # of 32 float32

def model():
    with strategy.embedding_scope():
        t = tf.get_variable('t', [rows, 32], initializer=tf.ones_initializer())
    ids = tf.placeholder(tf.int64, [None])
    return tf.saved_model.predict_signature_def({'ids': ids}, {'rows': tf.nn.embedding_lookup(t, ids)})

if sys.argv[2] == 'save':
    with strategy.scope(), tf.Graph().as_default(), tf.Session() as session:
        model()
        session.run(tf.global_variables_initializer())
        tf.train.Saver().save(session, folder + '/model')
    sys.exit()

process, peak, done = psutil.Process(), [0], threading.Event()
before = process.memory_info().rss

def watch():
    while not done.wait(0.005):
        peak[0] = max(peak[0], process.memory_info().rss)

watcher = threading.Thread(target=watch)
watcher.start()
path = strategy.export_saved_model(folder + '/export', folder + '/model', model)
done.set()
watcher.join()
print('grew by', (peak[0] - before) // 2 ** 20, flush=True)
if strategy.rank() == 0:
    with tf.Graph().as_default(), tf.Session() as session:
        tf.saved_model.loader.load(session, ['serve'], path)
        print('sum', session.run(tf.reduce_sum([tf.reduce_sum(v) for v in tf.global_variables()])) / rows)
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_export_takes_no_more_than_its_blocks(tmp_path):
    """A table of 600 MB, saved and exported by two ranks. The exporting processes hold no shard;
    promised are 300 MB more.

    (In the process that saved, the memory which that took would hide what exporting takes.)
    """
    launched(tmp_path, MEMORY, 2, tmp_path, "save", preloaded=False)
    output = launched(tmp_path, MEMORY, 2, tmp_path, "export", preloaded=False)
    grown = [int(line.split("grew by")[1]) for line in output.splitlines() if "grew by" in line]
    assert len(grown) == 2 and all(20 < megabytes < 250 for megabytes in grown), output
    assert "sum 32.0" in output
