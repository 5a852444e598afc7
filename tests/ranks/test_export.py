"""A SavedModel exported by a session script, served by TensorFlow's own operations, beside NumPy."""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError, feature_column, get_embedding_variable
from collective.coordination import barrier
from tests.ranks import reference

pytestmark = pytest.mark.backends("hb")

FOREIGN = ("Horovod", "PyFunc", "EagerPyFunc")


@pytest.fixture
def folder(strategy, tmp_path):
    """Rank 0's, which all ranks see."""
    return barrier.exchange(None, "a folder", {"path": str(tmp_path)})[0]["path"]


def trained(strategy, build, folder):
    """Builds the model, starts it and saves a checkpoint, whose prefix it returns."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            build()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            return tf.train.Saver().save(session, os.path.join(folder, "model"))


def signature(strategy, build):
    """The signature_def_fn of a model."""

    def serving():
        with strategy.embedding_scope():
            inputs, outputs = build()
        return tf.saved_model.predict_signature_def(inputs, outputs)

    return serving


def served(path, feeds, key="serving_default"):
    """What TensorFlow alone answers."""
    with tf.Graph().as_default() as graph, tf.Session(graph=graph) as session:
        model = tf.saved_model.loader.load(session, [tf.saved_model.tag_constants.SERVING], path)
        whole = graph.as_graph_def()
        types = {
            node.op
            for node in [*whole.node, *(n for f in whole.library.function for n in f.node_def)]
        }
        assert not {kind for kind in types if kind.startswith(FOREIGN)}
        told = model.signature_def[key]
        return session.run(
            {name: info.name for name, info in told.outputs.items()},
            {told.inputs[name].name: value for name, value in feeds.items()},
        )


def pooled(rows, samples, combiner="mean", weights=None, max_norm=None):
    """NumPy's answer: `rows` of the ids of each sample, combined; a sample without ids is zeros."""
    out = np.zeros((len(samples), rows.shape[1]), np.float64)
    for i, ids in enumerate(samples):
        w = np.ones(len(ids)) if weights is None else np.array(weights[i], np.float64)
        picked = rows[np.array(ids, np.int64)].astype(np.float64).reshape(len(ids), rows.shape[1])
        if max_norm is not None:
            picked *= np.minimum(
                1.0, max_norm / np.maximum(np.linalg.norm(picked, axis=1, keepdims=True), 1e-12)
            )
        if len(ids):
            total = {"sum": 1.0, "mean": w.sum(), "sqrtn": np.sqrt((w**2).sum())}[combiner]
            out[i] = (w[:, None] * picked).sum(0) / total
    return out


def sparse(samples, dtype=np.int64):
    """(indices, values, dense shape) of a batch of lists."""
    where = [(i, j) for i, ids in enumerate(samples) for j in range(len(ids))]
    return (
        np.array(where, np.int64).reshape(-1, 2),
        np.array([x for ids in samples for x in ids], dtype),
        np.array([len(samples), max(map(len, samples))], np.int64),
    )


@pytest.mark.parametrize("rows", [1, 2, 7, 300])
def test_every_way_to_look_up_a_static_table(strategy, folder, rows):
    values = reference.table_values(rows, 3)
    rng = np.random.default_rng(rows)
    ids = rng.integers(0, rows, [4, 5])
    samples = [list(rng.integers(0, rows, n)) for n in (2, 0, 5, 1)]
    full = [s or [0] for s in samples]
    weights = [list(rng.uniform(0.5, 2, len(s)).astype(np.float32)) for s in full]

    def build():
        t = reference.table("t", rows, 3)
        w = tf.get_variable("w", [3], initializer=tf.ones_initializer())
        p = tf.placeholder(tf.int64, [None, 5])
        empty, filled, weighted = (
            tf.sparse_placeholder(d, [None, None]) for d in (tf.int64, tf.int64, tf.float32)
        )
        outputs = {
            "rows": tf.nn.embedding_lookup(t, p) * w,
            "list": tf.nn.embedding_lookup([t], p, max_norm=0.5),
            "gather": tf.gather(t, p),
            "safe": tf.nn.safe_embedding_lookup_sparse(t, empty),
            "layer": tf.feature_column.input_layer(
                {"x": p},
                [
                    tf.feature_column.embedding_column(
                        tf.feature_column.categorical_column_with_identity("x", rows),
                        4,
                        initializer=tf.constant_initializer(reference.table_values(rows, 4)),
                    )
                ],
            ),
        }
        for combiner in ("sum", "mean", "sqrtn"):
            outputs[combiner] = tf.nn.embedding_lookup_sparse(
                t, filled, weighted, combiner=combiner, max_norm=1.0
            )
        inputs = {
            "p": p,
            **{
                f"{name}{i}": part
                for name, s in (("empty", empty), ("filled", filled), ("weighted", weighted))
                for i, part in enumerate((s.indices, s.values, s.dense_shape))
            },
        }
        return inputs, outputs

    prefix = trained(strategy, build, folder)
    path = strategy.export_saved_model(
        os.path.join(folder, "export"), prefix, signature(strategy, build)
    )
    feeds = {"p": ids}
    for name, batch in (
        ("empty", sparse(samples)),
        ("filled", sparse(full)),
        ("weighted", sparse(weights, np.float32)),
    ):
        feeds.update({f"{name}{i}": part for i, part in enumerate(batch)})
    got = served(path, feeds)
    np.testing.assert_array_equal(got["rows"], values[ids])
    np.testing.assert_array_equal(got["gather"], values[ids])
    norms = np.linalg.norm(values[ids], axis=-1, keepdims=True)
    np.testing.assert_allclose(got["list"], values[ids] * np.minimum(1, 0.5 / norms), rtol=1e-5)
    np.testing.assert_allclose(got["safe"], pooled(values, samples), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        got["layer"], pooled(reference.table_values(rows, 4), list(ids)), rtol=1e-5, atol=1e-6
    )
    for combiner in ("sum", "mean", "sqrtn"):
        np.testing.assert_allclose(
            got[combiner], pooled(values, full, combiner, weights, 1.0), rtol=1e-5, atol=1e-6
        )


def left_in(base):
    """What is there once rank 0 has cleaned up."""
    barrier.exchange(None, "cleaned", {})
    return os.listdir(base)


EXTREME = [-(2**63), -1, 0, 2**63 - 1]


def dynamic_model():
    """Inputs and outputs, and the tables: of keys, of words, and that of a feature column."""
    t = get_embedding_variable("t", 3, initializer=tf.zeros_initializer())
    by_word = get_embedding_variable("words", 2, tf.string, initializer=tf.ones_initializer())
    p, told = tf.placeholder(tf.int64, [None, None]), tf.placeholder(tf.string, [None])
    ids, weights = (
        tf.sparse_placeholder(tf.int64, [None, None]),
        tf.sparse_placeholder(tf.float32, [None, None]),
    )
    column = tf.feature_column.embedding_column(
        feature_column.categorical_column_with_embedding("p"), 2, initializer=tf.ones_initializer()
    )
    outputs = {
        "rows": tf.nn.embedding_lookup([t], p),
        "gather": tf.gather(t, p),
        "int32": tf.nn.embedding_lookup(t, tf.cast(p % 100, tf.int32)),
        "mean": tf.nn.safe_embedding_lookup_sparse(t, ids),
        "default": tf.nn.safe_embedding_lookup_sparse(t, ids, default_id=-1),
        "sqrtn": tf.nn.safe_embedding_lookup_sparse(
            [t], ids, weights, combiner="sqrtn", max_norm=1.0
        ),
        "sum": tf.nn.embedding_lookup_sparse(t, ids, weights, combiner="sum"),
        "words": tf.nn.embedding_lookup(by_word, told),
        "layer": tf.feature_column.input_layer({"p": p}, [column]),
    }
    inputs = {
        "p": p,
        "told": told,
        **{
            f"{name}{i}": part
            for name, s in (("ids", ids), ("weights", weights))
            for i, part in enumerate((s.indices, s.values, s.dense_shape))
        },
    }
    return inputs, outputs, t


@pytest.mark.parametrize("count", [0, 1, 60])
def test_every_way_to_look_up_a_dynamic_table(strategy, folder, count):
    """Of which so many keys are known, fewer than ranks perhaps; one step of training gave them
    rows that NumPy knows.
    """
    rng = np.random.default_rng(count)
    keys = np.array([*EXTREME, 5, *rng.integers(-(2**62), 2**62, 55)], np.int64)[:count]
    # the last: of no key
    values = np.concatenate([rng.normal(size=(count, 3)), np.zeros((1, 3))]).astype(np.float32)
    number = {int(key): i for i, key in enumerate(keys)}

    def numbers(asked):
        return [[number.get(int(key), count) for key in sample] for sample in asked]

    asked = np.array(
        [[*EXTREME, 5], [5, 6, -7, EXTREME[1], int(keys[-1]) if count else 0]], np.int64
    )
    samples, weights = (
        [list(asked[0]), [], [5, 77, -1], []],
        [[1.0, -1.0, 0.0, 2.0, 0.5], [], [0.5, 3.0, 1.0], []],
    )
    feeds = {
        "p": asked,
        "told": ["to", "?"],
        **{f"ids{i}": part for i, part in enumerate(sparse(samples))},
        **{f"weights{i}": part for i, part in enumerate(sparse(weights, np.float32))},
    }
    with strategy.scope(), tf.Graph().as_default():
        inputs, outputs, t = dynamic_model()
        loss = tf.reduce_sum(tf.nn.embedding_lookup(t, keys) * -values[:-1]) + 0.0 * (
            tf.reduce_sum(outputs["words"]) + tf.reduce_sum(outputs["layer"])
        )
        train = tf.train.GradientDescentOptimizer(1.0).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            if count:
                session.run(train, {inputs["told"]: ["to", "be"], inputs["p"]: keys[:, None]})
            here = session.run(outputs, {inputs[name]: value for name, value in feeds.items()})
            prefix = tf.train.Saver().save(session, os.path.join(folder, "model"))
    path = strategy.export_saved_model(
        os.path.join(folder, "export"), prefix, signature(strategy, lambda: dynamic_model()[:2])
    )
    got = served(path, feeds)
    for name in here:
        # Rounded otherwise: owners add up their parts of a sample (sok), and a group multiplies
        # where TensorFlow divides.
        np.testing.assert_allclose(got[name], here[name], rtol=1e-6, atol=1e-7, err_msg=name)
    assert served(path, {**feeds, "p": np.zeros([0, 5])})["rows"].shape == (0, 5, 3)
    rows = values[np.array(numbers(asked))]
    want = {
        "rows": rows,
        "gather": rows,
        "int32": values[np.array(numbers(asked % 100))],
        "mean": pooled(values, numbers(samples)),
        "default": pooled(values, numbers([sample or [-1] for sample in samples])),
        "sqrtn": pooled(
            values,
            numbers([[k for k, w in zip(*both) if w > 0] for both in zip(samples, weights)]),
            "sqrtn",
            [[w for w in ws if w > 0] for ws in weights],
            1.0,
        ),
        "sum": pooled(values, numbers(samples), "sum", weights)[:3],
        "words": [[1, 1] if count else [0, 0], [0, 0]],
        "layer": np.tile(np.mean(np.array(numbers(asked)) < count, axis=1, keepdims=True), 2),
    }
    assert set(want) == set(got)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def one_table(rows=5):
    p = tf.placeholder(tf.int64, [None], "p")
    return {"p": p}, {"rows": tf.nn.embedding_lookup(reference.table("t", rows, 2), p)}


def an_output(value):
    return {"p": tf.placeholder(tf.int64)}, {"x": tf.identity(value)}


def test_tables_that_are_used_as_one_value(strategy, folder):
    """The kernel of a dense layer that was built in embedding_scope(), slices, products, norms."""
    values = reference.table_values(7, 3)

    def build():
        t, x = reference.table("t", 7, 3), tf.placeholder(tf.float32, [None, 7])
        layer = tf.layers.dense(
            x, 3, use_bias=False, name="layer", kernel_initializer=tf.constant_initializer(values)
        )
        return {"x": x}, {
            "layer": layer,
            "product": tf.matmul(x, t),
            "slice": t[2:, 1],
            "sum": 2.0 * t + t.read_value(),
            "norm": tf.nn.l2_loss(t),
        }

    path = strategy.export_saved_model(
        os.path.join(folder, "export"), trained(strategy, build, folder), signature(strategy, build)
    )
    x = np.random.default_rng(0).normal(size=(4, 7)).astype(np.float32)
    want = {
        "layer": x @ values,
        "product": x @ values,
        "slice": values[2:, 1],
        "sum": 3 * values,
        "norm": 0.5 * np.sum(np.square(values)),
    }
    got = served(path, {"x": x})
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["layer", "by hand"])
def test_averages_that_training_alone_moves(strategy, folder, kind):
    """In a model that has a switch for it: the mean over ranks is none of what is served."""

    def build():
        x, training = tf.placeholder(tf.float32, [None, 2]), tf.placeholder_with_default(False, [])
        rows = x + tf.nn.embedding_lookup(reference.table("t", 5, 2), [0])
        if kind == "layer":
            out = tf.layers.batch_normalization(rows, training=training, epsilon=0.0)
        else:
            mean = tf.get_variable(
                "mean", [1, 2], initializer=tf.zeros_initializer(), trainable=False
            )

            def moved():
                with tf.control_dependencies([mean.assign(tf.reduce_mean(rows, 0, keepdims=True))]):
                    return tf.identity(mean)

            out = rows - tf.cond(training, moved, lambda: tf.identity(mean))
        return {"x": x}, {"out": out}

    path = strategy.export_saved_model(
        os.path.join(folder, "export"), trained(strategy, build, folder), signature(strategy, build)
    )
    x = np.ones([3, 2], np.float32)
    np.testing.assert_allclose(
        served(path, {"x": x})["out"], x + reference.table_values(5, 2)[0], rtol=1e-6
    )


def test_metrics_that_a_model_has_in_every_mode(strategy, folder):
    """They are each process's own where it is served."""

    def build():
        inputs, outputs = one_table()
        tf.metrics.mean(outputs["rows"])
        return inputs, outputs

    path = strategy.export_saved_model(
        os.path.join(folder, "export"),
        trained(strategy, one_table, folder),
        signature(strategy, build),
    )
    np.testing.assert_array_equal(
        served(path, {"p": [1, 3]})["rows"], reference.table_values(5, 2)[[1, 3]]
    )


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


def test_an_id_outside_of_the_table(strategy, folder):
    path = strategy.export_saved_model(
        folder, trained(strategy, one_table, folder), signature(strategy, one_table)
    )
    for wrong in (-1, 5, 2**40):
        with pytest.raises(tf.errors.InvalidArgumentError):
            served(path, {"p": [0, wrong]})


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
        saver, more = tf.train.Saver(), tf.assign_add(step, 1)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            saved = [
                saver.save(session, os.path.join(folder, "model"), step)
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
            saver.restore(session, saved[0])
            paths += [
                strategy.export_saved_model(
                    os.path.join(folder, "restored"), None, signature(strategy, build)
                )
            ]
            assert session.run(step) == 1
    assert [served(path, {"p": [4]})["step"] for path in paths] == [3, 1]


@pytest.mark.parametrize(
    "wrong, kind, words",
    [
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
