"""A new version of a SavedModel links what its base has, writes the rest, and stands alone.

Plain TensorFlow trains for comparison; processes that can't import the library load versions.
"""

import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError, checkpoint, get_embedding_variable
from collective.coordination import barrier
from collective.serving import unfinished, variable_files
from tests.ranks import reference
from tests.ranks.exports import an_output, left_in, one_table, served, signature, trained

pytestmark = [pytest.mark.either_backend, pytest.mark.backends("hb")]

ROWS, KEYS = 3000, np.arange(2000, dtype=np.int64) * 7919 - 5000

SERVE = """
import json, sys
for name in ('collective', 'horovod', 'horovod.tensorflow', 'cupy'):
    sys.modules[name] = None                # importing it is an ImportError
import numpy as np
import tensorflow as tf

for path, truth in json.loads(sys.argv[1]):
    truth = np.load(truth)
    feeds = {name: truth[name] for name in ('p', 'k')}
    got = tf.saved_model.load(path).signatures['serving_default'](
        **{name: tf.constant(value) for name, value in feeds.items()})
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        model = tf.compat.v1.saved_model.loader.load(session, ['serve'], path)
        told = model.signature_def['serving_default']
        also = session.run({name: info.name for name, info in told.outputs.items()},
                           {told.inputs[name].name: value for name, value in feeds.items()})
    for name in ('static', 'dynamic', 'dense'):
        np.testing.assert_allclose(got[name].numpy(), truth[name], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(also[name], got[name].numpy())
print('same')
"""


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """So that tables have several."""
    monkeypatch.setattr(variable_files, "LEAST_FILE_BYTES", 4096)


def digests(folder):
    """Returns what is in each file of a version, and where it lies."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, folder)] = (
                    hashlib.sha256(file.read()).hexdigest(),
                    os.stat(path).st_ino,
                )
    return found


def record_of(path):
    with open(os.path.join(path, "saved_model.collective.json")) as file:
        return json.load(file)


def model(vocabulary):
    """Builds static and dynamic tables, a dense variable, and an asset."""
    static = reference.table("static", ROWS, 4)
    dynamic = get_embedding_variable("dynamic", 4, initializer=tf.zeros_initializer())
    dense = tf.get_variable("dense", [3], initializer=tf.ones_initializer())
    words = tf.lookup.StaticHashTable(
        tf.lookup.TextFileInitializer(
            vocabulary,
            tf.string,
            tf.lookup.TextFileIndex.WHOLE_LINE,
            tf.int64,
            tf.lookup.TextFileIndex.LINE_NUMBER,
        ),
        0,
    )
    p, k = tf.placeholder(tf.int64, [None], "p"), tf.placeholder(tf.int64, [None], "k")
    outputs = {
        "static": tf.nn.embedding_lookup(static, p),
        "dynamic": tf.nn.embedding_lookup(dynamic, k),
        "dense": tf.identity(dense),
        "word": words.lookup(tf.constant(["be"])),
    }
    return {"p": p, "k": k}, outputs


@pytest.mark.matrix
def test_versions_stand_alone_and_share_what_is_the_same(strategy, folder, rank, capsys):
    """Each step trains a few ids; the first one all keys. Then a new key comes."""
    vocabulary, export = os.path.join(folder, "words.txt"), os.path.join(folder, "export")
    if rank == 0:
        with open(vocabulary, "w") as f:
            f.write("to\nbe\n" + "".join(f"word {i}\n" for i in range(5000)))
    barrier.exchange(None, "written", {})
    # Truth: gradient descent of the mean loss, in NumPy. A key that wasn't there begins at zero.
    static = reference.table_values(ROWS, 4).astype(np.float64)
    dynamic, dense = {}, np.ones([3])
    new_key = np.int64(7919 * 10 + 1)
    steps = [([0, 1], KEYS), ([5], KEYS[:1]), ([2999], [new_key]), ([2999], [new_key])]
    answers, paths, before = [], [], {}
    serving = signature(strategy, lambda: model(vocabulary))
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            inputs, outputs = model(vocabulary)
        loss = sum(tf.reduce_sum(outputs[name]) for name in ("static", "dynamic", "dense"))
        rate = tf.placeholder(tf.float32, [])
        train = tf.train.GradientDescentOptimizer(rate).minimize(loss)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.tables_initializer()])
            for number, (ids, keys) in enumerate(steps):
                # The last step changes nothing.
                lr = 0.0 if number == len(steps) - 1 else 0.5
                session.run(train, {inputs["p"]: ids, inputs["k"]: keys, rate: lr})
                np.add.at(static, ids, -lr)
                dense -= lr
                for key in keys:
                    dynamic[int(key)] = dynamic.get(int(key), 0.0) - lr
                prefix = saver.save(session, os.path.join(folder, "model"), number)
                asked = np.array([*KEYS[::50], KEYS[0], new_key, 3], np.int64)
                answers.append(os.path.join(folder, f"answers{number}.npz"))
                if rank == 0:
                    rows = np.array([dynamic.get(int(key), 0.0) for key in asked])
                    np.savez(
                        answers[-1],
                        p=np.arange(ROWS),
                        k=asked,
                        static=static,
                        dynamic=np.tile(rows[:, None], 4),
                        dense=dense,
                    )
                paths.append(strategy.export_saved_model(export, prefix, serving, base=export))
                assert before == {path: digests(path) for path in paths[:-1]}, (
                    "bases are left alone"
                )
                before[paths[-1]] = digests(paths[-1])
    said = [line for line in capsys.readouterr().err.splitlines() if "exported" in line]
    assert ["linked" in line for line in said] == ([False, True, True, True] if rank == 0 else [])
    records = [record_of(path) for path in paths]
    assert [record["base"] for record in records] == [None, *paths[:-1]]
    counts = []
    for path, record in zip(paths, records):
        # The record tells the truth.
        assert set(record["files"]) == set(before[path]) - {"saved_model.collective.json"}
        others = {inode for other in paths if other < path for _, inode in before[other].values()}
        for name, file in record["files"].items():
            assert file["bytes"] == os.path.getsize(os.path.join(path, name))
            assert file["linked"] == (before[path][name][1] in others), name
        sizes = [(file["bytes"], file["linked"]) for file in record["files"].values()]
        assert record["bytes_linked"] == sum(size for size, linked in sizes if linked)
        assert record["bytes_written"] == sum(size for size, linked in sizes if not linked)
        counts.append([linked for _, linked in sizes].count(False))
    # A row of each table, the dense variable, the index.
    assert counts[1] <= 4 and records[1]["files"]["assets/words.txt"]["linked"]
    assert records[1]["bytes_written"] < 0.2 * records[1]["bytes_linked"]
    # A new key: besides, its file of keys, the graph, and the files up to the next cut.
    assert counts[2] <= 12 and records[2]["bytes_written"] < records[2]["bytes_linked"]
    assert counts[3] <= 2 and records[3]["bytes_written"] < 20_000, "only the dense variable, if"
    barrier.exchange(None, "looked", {})
    if rank == 0:
        for path, answer in zip(paths[:2], answers[:2]):
            truth = np.load(answer)
            got = served(path, {"p": truth["p"], "k": truth["k"]})
            np.testing.assert_allclose(got["static"], truth["static"], rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(got["dynamic"], truth["dynamic"], rtol=1e-6, atol=1e-6)
            shutil.rmtree(path)
        # The last but one without its bases, and the last one without any.
        versions = list(zip(paths[2:], answers[2:]))
        found = loaded(folder, versions)
        assert "same" in found, found
        shutil.rmtree(paths[2])
        np.testing.assert_array_equal(
            served(paths[3], {"p": [5], "k": [3]})["static"], np.float32(static[[5]])
        )
    barrier.exchange(None, "loaded", {})


def loaded(folder, versions):
    """Returns what a process of TensorFlow alone says of (path, truth) pairs."""
    with open(os.path.join(folder, "serve.py"), "w") as file:
        file.write(SERVE)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHONPATH", "HOROVOD", "COLLECTIVE"))
    }
    done = subprocess.run(
        [sys.executable, os.path.join(folder, "serve.py"), json.dumps(versions)],
        text=True,
        timeout=100,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env=environment,
    )
    return done.stdout


def exports_of(strategy, folder):
    """Exports a version, and returns its path and a function that exports the next one."""
    prefix, export = trained(strategy, one_table, folder), os.path.join(folder, "export")
    fine = signature(strategy, one_table)

    def export_again(base, build=fine):
        return strategy.export_saved_model(export, prefix, build, base=base)

    return strategy.export_saved_model(export, prefix, fine), export_again


@pytest.mark.slow
def test_a_version_is_named_by_itself_or_by_its_folder(strategy, folder, rank):
    path, export_again = exports_of(strategy, folder)
    for base in (path, path + "/", os.path.dirname(path)):
        new = export_again(base)
        assert record_of(new)["base"].rstrip("/") in (path, last(new, path))
        np.testing.assert_array_equal(
            served(new, {"p": [4]})["rows"], reference.table_values(5, 2)[[4]]
        )


def last(new, path):
    """Returns the version before `new` in the folder."""
    folder = os.path.dirname(path)
    return os.path.join(
        folder, max(name for name in os.listdir(folder) if name < os.path.basename(new))
    )


def test_a_base_that_plain_tensorflow_wrote(strategy, folder, rank, capsys):
    """It is a base, of which nothing can be linked."""
    path, export_again = exports_of(strategy, folder)
    if rank == 0:
        os.remove(os.path.join(path, "saved_model.collective.json"))
    barrier.exchange(None, "removed", {})
    new = export_again(path)
    assert record_of(new)["bytes_linked"] == 0
    np.testing.assert_array_equal(
        served(new, {"p": [4]})["rows"], reference.table_values(5, 2)[[4]]
    )
    said = capsys.readouterr().err
    assert rank > 0 or "it has no saved_model.collective.json" in said


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "wrong, words",
    [
        ("missing", "it doesn't exist"),
        ("empty", "neither one nor a folder of versions"),
        ("cut off", "can't be linked from"),
        ("a damaged record", "can't be linked from"),
        ("another model", "is of another model"),
    ],
)
def test_a_wrong_base_is_an_error_on_every_rank(strategy, folder, rank, wrong, words):
    path, export_again = exports_of(strategy, folder)
    base = os.path.join(folder, "base")
    if rank == 0 and wrong != "missing":
        os.mkdir(base) if wrong == "empty" else shutil.copytree(path, base)
        if wrong == "cut off":
            os.truncate(glob.glob(os.path.join(base, "variables", "variables.data-*"))[0], 1)
        if wrong == "a damaged record":
            os.truncate(os.path.join(base, "saved_model.collective.json"), 30)
    barrier.exchange(None, "made", {})
    if wrong == "another model":
        with strategy.scope():
            prefix = trained(strategy, other_model, os.path.join(folder, "other"))

        def export_again(base):
            return strategy.export_saved_model(
                os.path.join(folder, "export"), prefix, signature(strategy, other_model), base=base
            )

    with pytest.raises(ValueError if rank == 0 else RankError, match=words) as error:
        export_again(base)
    assert base in str(error.value) and "without base=" in str(error.value)
    assert left_in(os.path.dirname(path)) == [os.path.basename(path)]


def other_model():
    return an_output(tf.get_variable("other", [3]))


def test_a_checkpoint_with_increments(strategy, folder):
    """It is made whole next to the version, for as long as the export takes."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            inputs, outputs = one_table()
        loss = tf.reduce_sum(outputs["rows"])
        train = tf.train.GradientDescentOptimizer(1.0).minimize(loss)
        checkpoint.enable_increments(folder)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            tf.train.Saver().save(session, os.path.join(folder, "model"))
            session.run(train, {inputs["p"]: [3]})
            prefix = checkpoint.save_increment(session, folder)
    export = os.path.join(folder, "export")
    path = strategy.export_saved_model(export, prefix, signature(strategy, one_table), base=export)
    want = reference.table_values(5, 2)
    want[3] -= 1
    np.testing.assert_array_equal(served(path, {"p": range(5)})["rows"], want)
    assert left_in(export) == [os.path.basename(path)]


def test_ranks_that_name_different_bases(strategy, folder, rank, size):
    path, export_again = exports_of(strategy, folder)
    if size > 1:
        with pytest.raises(RankError, match="on every rank"):
            export_again(path if rank else None)


def test_a_killed_exports_folder_is_removed(strategy, folder, rank, monkeypatch):
    """A kill leaves the folder in which a version was being written; the next export removes it."""
    path, export_again = exports_of(strategy, folder)
    left = os.path.join(os.path.dirname(path), "temp-1234567")
    if rank == 0:
        unfinished.make(left)
        with open(os.path.join(left, "owner"), "r+") as file:
            record = json.load(file)
            file.seek(0)
            file.write(json.dumps({**record, "started": "1"}).ljust(2000))
    barrier.exchange(None, "left", {})
    new = export_again(os.path.dirname(path))
    names = sorted(left_in(os.path.dirname(path)))
    assert names == sorted(map(os.path.basename, (path, new)))
