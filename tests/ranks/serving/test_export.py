"""A session script exports a SavedModel from its checkpoint, or fails on every rank alike."""

import functools
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError
from collective.checkpoint.saving import saver
from collective.coordination import barrier
from tests.ranks import reference
from tests.ranks.exports import an_output, left_in, one_table, served, signature, trained

pytestmark = [pytest.mark.either_backend, pytest.mark.backends("hb")]


@pytest.mark.parametrize("way", ["simple_save", "builder"])
def test_a_graph_that_trains_is_refused(strategy, folder, way):
    """It would hold one part of the table, and operations that TensorFlow alone doesn't have."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            inputs, outputs = one_table()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(ValueError, match=r"strategy\.export_saved_model"):
                if way == "builder":
                    tf.saved_model.Builder(
                        f"{folder}/{strategy.rank()}"
                    ).add_meta_graph_and_variables(session, ["serve"])
                else:
                    tf.saved_model.simple_save(
                        session, f"{folder}/{strategy.rank()}", inputs, outputs
                    )


@pytest.mark.slow
def test_what_is_exported_and_where(strategy, folder, rank):
    vocabulary = os.path.join(folder, "words.txt")
    if rank == 0:
        with open(vocabulary, "w") as f:
            f.write("a\nb\nc\n")
    barrier.exchange(None, "written", {})

    def build():
        words = tf.placeholder(tf.string, [None])
        lookup = tf.lookup.StaticHashTable(
            tf.lookup.TextFileInitializer(
                vocabulary,
                tf.string,
                tf.lookup.TextFileIndex.WHOLE_LINE,
                tf.int64,
                tf.lookup.TextFileIndex.LINE_NUMBER,
            ),
            0,
        )
        return {"words": words}, {
            "rows": tf.nn.embedding_lookup(reference.table("t", 5, 2), lookup.lookup(words))
        }

    def two():
        made = signature(strategy, build)()
        return {"first": made, "second": made}

    checkpoints = os.path.join(folder, "checkpoints")
    prefix = trained(strategy, build, checkpoints)
    base = os.path.join(folder, "export")
    # the prefix, its folder, and the one that was saved last
    paths = [
        strategy.export_saved_model(
            base, given, two, assets_extra={"notes/n.txt": vocabulary}, as_text=given is None
        )
        for given in (prefix, checkpoints, None)
    ]
    assert paths == barrier.exchange(None, "paths", {"paths": paths})[0]["paths"]
    assert (
        sorted(os.listdir(base)) == sorted(os.path.basename(path) for path in paths)
        and len(set(paths)) == 3
    )
    assert all(os.path.dirname(path) == base and os.path.basename(path).isdigit() for path in paths)
    assert [os.path.exists(os.path.join(path, "saved_model.pb")) for path in paths] == [
        True,
        True,
        False,
    ]
    for path in paths:
        assert open(os.path.join(path, "assets.extra", "notes", "n.txt")).read() == "a\nb\nc\n"
        for key in ("first", "second"):
            np.testing.assert_array_equal(
                served(path, {"words": ["c", "a", "?"]}, key)["rows"],
                reference.table_values(5, 2)[[2, 0, 0]],
            )


def test_the_last_checkpoint_is_the_last_saved_or_restored(strategy, folder):
    """While its session is open."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            one_table()
        step = tf.train.get_or_create_global_step()
        saver_, more = tf.train.Saver(), tf.assign_add(step, 1)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            saved = [
                saver_.save(session, os.path.join(folder, "model"), step)
                for _ in range(3)
                if session.run(more)
            ]

            def build():
                (inputs, outputs), counted = one_table(), tf.train.get_or_create_global_step()
                return inputs, {**outputs, "step": tf.identity(counted)}

            paths = [
                strategy.export_saved_model(
                    os.path.join(folder, "saved"), None, signature(strategy, build)
                )
            ]
            saver_.restore(session, saved[0])
            paths += [
                strategy.export_saved_model(
                    os.path.join(folder, "restored"), None, signature(strategy, build)
                )
            ]
            assert session.run(step) == 1
    assert [served(path, {"p": [4]})["step"] for path in paths] == [3, 1]


@pytest.mark.parametrize("monitored", [False, True])
def test_without_a_checkpoint_the_open_session_is_exported(
    strategy, folder, rank, monitored, monkeypatch
):
    """Through a temporary checkpoint, which is not the last one that was saved."""
    monkeypatch.setattr(saver, "_last_checkpoint", [])
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            one_table()
        tf.train.get_or_create_global_step()
        older = tf.Session()  # It stays open, and is never what is exported.
        older.run(tf.global_variables_initializer())
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            one_table()
        step = tf.train.get_or_create_global_step()
        more = tf.assign_add(step, 1)

        def build():
            (inputs, outputs), counted = one_table(), tf.train.get_or_create_global_step()
            return inputs, {**outputs, "step": tf.identity(counted)}

        export = functools.partial(strategy.export_saved_model, folder, None)
        with tf.train.MonitoredTrainingSession() if monitored else tf.Session() as session:
            if not monitored:
                session.run(tf.global_variables_initializer())
            session.run(more)
            paths = [export(signature(strategy, build))]
            session.run(more)
            paths.append(export(signature(strategy, build)))
            assert saver.last_checkpoint() is None
        with pytest.raises(ValueError if rank == 0 else RankError, match="no checkpoint to export"):
            export(signature(strategy, build))
    older.close()
    assert sorted(left_in(folder)) == sorted(map(os.path.basename, paths))
    assert [served(path, {"p": [4]})["step"] for path in paths] == [1, 2]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("with_table", [True, False])
def test_the_open_session_is_the_scripts_own(strategy, folder, with_table, monkeypatch):
    """Not the library's, in which ranks meet, nor one that is closed or has no variables."""
    monkeypatch.setattr(saver, "_last_checkpoint", [])

    def build():
        w = tf.get_variable("w", [1], initializer=tf.ones_initializer())
        if with_table:
            with strategy.embedding_scope():
                inputs, outputs = one_table()
            return inputs, {"w": w + 0 * tf.reduce_sum(outputs["rows"])}
        return {"p": tf.placeholder(tf.int64, [None], name="p")}, {"w": w + 0}

    folder = os.path.join(folder, "not", "there", "yet")
    export = functools.partial(strategy.export_saved_model, folder, None)
    with strategy.scope(), tf.Graph().as_default():
        inputs, outputs = build()
        train = tf.train.GradientDescentOptimizer(0.25).minimize(tf.reduce_mean(outputs["w"]))
        with tf.train.MonitoredTrainingSession() as session:
            session.run(train, {inputs["p"]: [4]})
            with tf.Graph().as_default(), tf.Session() as closed:
                closed.run(tf.constant(1))
            with tf.Graph().as_default(), tf.Session() as other:
                barrier.exchange(None, "paths", {})
                paths = []
                for _ in range(2):  # The first export runs sessions of its own.
                    other.run(tf.constant(1))
                    paths.append(export(signature(strategy, build)))
    assert sorted(left_in(folder)) == sorted(map(os.path.basename, paths))
    assert [served(path, {"p": [4]})["w"].tolist() for path in paths] == [[0.75], [0.75]]


@pytest.mark.parametrize(
    "wrong, kind, words",
    [
        (lambda: one_table() and one_table(), ValueError, ("t already exists", "AUTO_REUSE")),
        (lambda: one_table(6), ValueError, ("'t'", "[6, 2]", "[5, 2]")),
        (lambda: an_output(tf.get_variable("other", [5, 2])), ValueError, ("'other'", "it has t")),
        (lambda: an_output(tf.get_variable("b", [3])), ValueError, ("lacks b",)),
        (lambda: an_output(tf.get_variable("w", [4])), ValueError, ("'w'", "(4,)", "(3,)")),
        (lambda: an_output(tf.py_func(lambda: 1.0, [], tf.float32)), ValueError, ("PyFunc",)),
        (lambda: 1 // 0, ZeroDivisionError, ("division",)),
    ],
)
def test_what_does_not_fit_is_an_error_on_every_rank_and_leaves_nothing(
    strategy, folder, wrong, kind, words
):
    def build():
        tf.get_variable("w", [3])
        return one_table()

    prefix, base = trained(strategy, build, folder), os.path.join(folder, "export")
    with pytest.raises(kind) as error:
        strategy.export_saved_model(base, prefix, signature(strategy, wrong))
    assert all(word in str(error.value) for word in words), error.value
    assert left_in(base) == []
    assert strategy.export_saved_model(base, prefix, signature(strategy, build))


@pytest.mark.parametrize("when", ["while building", "once all is written"])
def test_one_rank_fails(strategy, folder, rank, size, when, monkeypatch):
    """Each in turn. The others hear of it, with its words."""
    prefix, base = trained(strategy, one_table, folder), os.path.join(folder, "export")
    for broken in range(size):

        def fail():
            raise OSError("no space left")

        def build(broken=broken, fail=fail):
            if rank == broken and when == "while building":
                fail()
            return one_table()

        with monkeypatch.context() as patch:
            if rank == broken and when != "while building":
                patch.setattr(tf.saved_model.Builder, "save", lambda *_, fail=fail: fail())
            with pytest.raises(OSError if rank == broken else RankError, match="no space left"):
                strategy.export_saved_model(base, prefix, signature(strategy, build))
        assert left_in(base) == []
    assert strategy.export_saved_model(base, prefix, signature(strategy, one_table))


def test_arguments(strategy, folder, rank, size):
    prefix = trained(strategy, one_table, folder)
    fine = signature(strategy, one_table)
    for wrong, words in ((None, "signature_def_fn"), (lambda: 3, "SignatureDef")):
        with pytest.raises(TypeError, match=words):
            strategy.export_saved_model(os.path.join(folder, "export"), prefix, wrong)
    for missing in (os.path.join(folder, "nothing"), os.path.join(folder, "empty")):
        os.makedirs(os.path.join(folder, "empty"), exist_ok=True)
        with pytest.raises((ValueError, RankError), match="no checkpoint"):
            strategy.export_saved_model(os.path.join(folder, "export"), missing, fine)
    if size > 1:
        with pytest.raises(RankError, match="on every rank"):
            strategy.export_saved_model(os.path.join(folder, f"export{rank}"), prefix, fine)
        with pytest.raises(RankError, match="different graphs"):
            strategy.export_saved_model(
                os.path.join(folder, "export"),
                prefix,
                signature(strategy, one_table if rank else lambda: an_output(1.0)),
            )


@pytest.mark.parametrize("plan", ["print", "quiet"])
@pytest.mark.parametrize("verbosity", [tf.logging.INFO, tf.logging.ERROR])
def test_rank_0_says_once_where_the_model_is(
    strategy, folder, rank, plan, verbosity, capsys, monkeypatch
):
    """TensorFlow would name a folder that is gone when the export is done."""
    prefix = trained(strategy, one_table, folder)
    logged = []
    before = tf.logging.get_verbosity()
    monkeypatch.setattr(
        tf.get_logger(), "handle", lambda record: record_of(record, logged), raising=True
    )
    tf.logging.set_verbosity(verbosity)
    try:
        with strategy.scope(plan=plan):
            path = strategy.export_saved_model(
                f"{folder}/export", prefix, signature(strategy, one_table)
            )
    finally:
        tf.logging.set_verbosity(before)
    said = [line for line in capsys.readouterr().err.splitlines() if "SavedModel" in line]
    logged = [text for text in logged if "SavedModel" in text]
    if rank > 0:
        assert (said, logged) == ([], [])
    elif verbosity == tf.logging.INFO:
        assert (said, logged) == ([], [f"SavedModel written to: {path}"])
    else:
        assert (said, logged) == (
            [f"collective: exported a SavedModel to {path}"] * (plan == "print"),
            [],
        )
    assert os.path.isdir(path)


def record_of(record, logged):
    """Notes what gets through the logger's filters."""
    if tf.get_logger().filter(record):
        logged.append(record.getMessage())
