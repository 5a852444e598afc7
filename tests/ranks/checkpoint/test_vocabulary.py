"""VocabInfo moves a table's rows to where their words are now, as plain TensorFlow a variable's."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import checkpoint
from collective import estimator as tf_estimator
from collective.coordination import barrier
from collective.errors import RankError

OLD_WORDS = [f"w{i}" for i in range(7)]
NEW_WORDS = ["x", "w3", "w0", "y", "w6", "z", "w1", "w5", "v", "w2"]
COLUMNS, NEW_COLUMNS = ["a", "b", "c"], ["c", "new", "a", "newer"]
OLD = np.random.default_rng(5).normal(size=(9, 3)).astype(np.float32)  # two rows for other words
SLOT = OLD**2 + 1


def natural_numbers(shape, dtype=tf.float32, partition_info=None):
    """Fills missing values by 1, 2, …, so that each shows which one it is."""
    return tf.reshape(1.0 + tf.range(tf.cast(tf.reduce_prod(shape), tf.float32)), shape)


@pytest.fixture
def files(folder, rank):
    """Writes vocabularies, each rank its own copies, and returns a function that names them."""

    def path(name):
        return f"{folder}/{name}-{rank}"

    words = {"old": OLD_WORDS, "new": NEW_WORDS, "columns": COLUMNS, "new_columns": NEW_COLUMNS}
    for name, some in words.items():
        with open(path(name), "w") as file:
            file.write("\n".join(some) + "\n")
    return path


def save(strategy, prefix):
    """Saves a table and a slot of it by ranks, as `<prefix>-ours`, and by TensorFlow: `-plain`."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            table = tf.get_variable("old/t", initializer=OLD)
        tf.get_variable("old/w", initializer=np.float32([2, 3]))
        train = tf.train.AdagradOptimizer(0.1).minimize(
            tf.reduce_sum(tf.nn.embedding_lookup(table, [0]))
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            slot = next(v for v in tf.global_variables() if v.op.name == "old/t/Adagrad")
            table.load(OLD, session)
            slot.load(SLOT, session)
            tf.train.Saver().save(session, f"{prefix}-ours")
    if strategy.rank() == 0:
        with tf.Graph().as_default():
            tf.get_variable("old/t", initializer=OLD)
            tf.get_variable("old/t/Adagrad", initializer=SLOT)
            tf.get_variable("old/w", initializer=np.float32([2, 3]))
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                tf.train.Saver().save(session, f"{prefix}-plain")
    barrier.exchange(None, "saved", {})


def started(scope, shape, info, prefix, names=None, makes_table=True):
    """Returns the values of 'new/t' that `tf.train.warm_start` gives it."""
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        with scope() if makes_table else tf.name_scope(""):
            t = tf.get_variable("new/t", shape, initializer=tf.ones_initializer())
        after = tf.get_variable("after", [2], initializer=tf.random_normal_initializer())
        with tf.name_scope("warm"):
            tf.train.warm_start(prefix, "new/t", {"new/t": info}, names or {"new/t": "old/t"})
        drawn = tf.random_normal([2])
        rows = tf.nn.embedding_lookup(t, np.arange(shape[0]))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            return session.run([rows, after, drawn])


# (shape of the table, arguments of VocabInfo after the files)
FORMS = {
    "grows": ((10, 3), {"new_vocab_size": 10, "num_oov_buckets": 0}),
    "few new words": ((4, 3), {"new_vocab_size": 4, "num_oov_buckets": 0}),
    "few old words": ((10, 3), {"new_vocab_size": 10, "num_oov_buckets": 0, "old_vocab_size": 3}),
    "buckets": ((13, 3), {"new_vocab_size": 10, "num_oov_buckets": 3}),
    "few words, buckets": ((7, 3), {"new_vocab_size": 5, "num_oov_buckets": 2}),
    "fewer rows than words": ((6, 3), {"new_vocab_size": 10, "num_oov_buckets": 1}),
    "columns": ((9, 4), {"new_vocab_size": 4, "num_oov_buckets": 0, "axis": 1}),
    "few columns": ((9, 2), {"new_vocab_size": 2, "num_oov_buckets": 0, "axis": 1}),
    "columns, few rows": ((5, 4), {"new_vocab_size": 4, "num_oov_buckets": 0, "axis": 1}),
    "columns, buckets": ((9, 6), {"new_vocab_size": 4, "num_oov_buckets": 2, "axis": 1}),
}
INITIALIZERS = {"none": None, "ones": tf.ones_initializer(), "natural numbers": natural_numbers}


def information(files, form, initializer):
    names = ("new_columns", "columns") if form.get("axis") else ("new", "old")
    form = dict(form)
    return tf_estimator.VocabInfo(
        files(names[0]),
        form.pop("new_vocab_size"),
        form.pop("num_oov_buckets"),
        files(names[1]),
        backup_initializer=initializer,
        **form,
    )


@pytest.mark.slow
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("initializer", INITIALIZERS)
def test_rows_go_where_their_words_are(strategy, folder, files, initializer):
    """From a checkpoint of ours or of TensorFlow, to a table; from ours to a plain variable."""
    save(strategy, f"{folder}/m")
    for form, (shape, arguments) in FORMS.items():
        info = information(files, arguments, INITIALIZERS[initializer])
        want = started(None, shape, info, f"{folder}/m-plain", makes_table=False)
        for saved, makes_table in (("ours", True), ("plain", True), ("ours", False)):
            with strategy.scope():
                got = started(
                    strategy.embedding_scope, shape, info, f"{folder}/m-{saved}", None, makes_table
                )
            for value, wanted in zip(got, want):  # numbers drawn by others stay, too
                words = f"{form}, {saved}, {makes_table}"
                np.testing.assert_array_equal(value, wanted, err_msg=words)


@pytest.mark.slow
@pytest.mark.ranks(2, 3)
def test_slots_move_with_their_words(strategy, folder, files):
    save(strategy, f"{folder}/m")
    info = tf_estimator.VocabInfo(
        files("new"), 10, 1, files("old"), backup_initializer=natural_numbers
    )

    def trained(marks, prefix):
        with tf.Graph().as_default():
            with marks():
                t = tf.get_variable("new/t", [11, 3])
            loss = tf.reduce_sum(tf.square(tf.nn.embedding_lookup(t, [1, 3, 10])))
            train = tf.train.AdagradOptimizer(0.1).minimize(loss)
            tf.train.warm_start(
                prefix,
                ["new/t", "new/t/Adagrad"],
                {"new/t": info, "new/t/Adagrad": info},
                {"new/t": "old/t", "new/t/Adagrad": "old/t/Adagrad"},
            )
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(train)
                return session.run(tf.nn.embedding_lookup(t, np.arange(11)))

    want = trained(lambda: tf.name_scope(""), f"{folder}/m-plain")
    with strategy.scope():
        got = trained(strategy.embedding_scope, f"{folder}/m-ours")
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.matrix
def test_new_words_get_random_first_values(strategy, folder, files):
    """Each row has its own, however many ranks there are, and old rows keep their values."""
    save(strategy, f"{folder}/m")
    bound = 0.5
    for initializer in (
        tf.truncated_normal_initializer(stddev=0.25),
        tf.random_uniform_initializer(-0.5, 0.5),
    ):
        info = tf_estimator.VocabInfo(files("new"), 10, 0, files("old"), -1, initializer)
        with strategy.scope():
            got, after, drawn = started(strategy.embedding_scope, (10, 3), info, f"{folder}/m-ours")
        fresh = [i for i, word in enumerate(NEW_WORDS) if word not in OLD_WORDS]
        moved = {i: OLD_WORDS.index(w) for i, w in enumerate(NEW_WORDS) if w in OLD_WORDS}
        np.testing.assert_array_equal(got[list(moved)], OLD[list(moved.values())])
        assert np.abs(got[fresh]).max() <= bound and len(np.unique(got[fresh])) == 3 * len(fresh)
        assert np.abs(got[fresh]).max() > bound / 4
        plain = started(None, (10, 3), info, f"{folder}/m-plain", makes_table=False)
        np.testing.assert_array_equal(after, plain[1])
        np.testing.assert_array_equal(drawn, plain[2])


@pytest.mark.matrix
def test_an_estimator_starts_from_an_old_vocabulary(strategy, folder, files, rank):
    save(strategy, f"{folder}/m")
    info = tf_estimator.VocabInfo(
        files("new"), 10, 0, files("old"), backup_initializer=natural_numbers
    )

    def model_fn(features, mode):
        with strategy.embedding_scope():
            t = tf.get_variable("new/t", [10, 3])
        rows = tf.nn.embedding_lookup(t, features["id"])
        step = tf.train.get_global_step()
        train = tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_sum(rows), step)
        return tf_estimator.EstimatorSpec(
            mode, loss=tf.reduce_sum(rows), train_op=train, predictions={"rows": rows}
        )

    def input_fn():
        return tf.data.Dataset.from_tensor_slices({"id": np.arange(10)}).batch(5)

    estimator = strategy.estimator(
        model_fn,
        f"{folder}/job",
        warm_start_from=tf_estimator.WarmStartSettings(
            f"{folder}/m-ours",
            "new/t",
            var_name_to_vocab_info={"new/t": info},
            var_name_to_prev_var_name={"new/t": "old/t"},
        ),
    )
    estimator.train(input_fn, max_steps=1)
    want = started(None, (10, 3), info, f"{folder}/m-plain", makes_table=False)[0]
    [(first, rows)] = checkpoint.read_table(f"{folder}/job", "new/t")
    assert first == 0
    np.testing.assert_array_equal(rows, want)


def refusal(strategy, prefix, info, shape=(10, 3), kind=ValueError):
    with strategy.scope(), pytest.raises(kind) as raised:
        started(strategy.embedding_scope, shape, info, prefix)
    return str(raised.value)


@pytest.mark.matrix
def test_what_does_not_fit_is_refused(strategy, folder, files, rank, size):
    save(strategy, f"{folder}/m")

    def info(**changes):
        form = {"new_vocab_size": 10, "num_oov_buckets": 0, **changes}
        return information(files, form, None)

    ours = f"{folder}/m-ours"
    assert "'new/t' has 12 rows" in refusal(strategy, ours, info(), (12, 3))
    assert "has 4 columns" in refusal(strategy, ours, info(), (10, 4))
    assert "/nothing'" in refusal(strategy, f"{folder}/nothing", info())
    if size > 1:
        other = tf_estimator.VocabInfo(files("new" if rank else "old"), 7, 0, files("old"))
        said = refusal(strategy, ours, other, (7, 3), RankError)
        assert "'new/t': rank 1 has another vocabulary than rank 0" in said


@pytest.mark.matrix
def test_dynamic_tables_are_refused(strategy, folder, files):
    info = tf_estimator.VocabInfo(files("new"), 10, 0, files("old"))
    with strategy.scope(), tf.Graph().as_default():
        e = collective.get_embedding_variable("old/t", 3)
        rows = tf.nn.embedding_lookup(e, [1, 2])
        train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(rows))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            tf.train.Saver().save(session, f"{folder}/dynamic")
    said = refusal(strategy, f"{folder}/dynamic", info)
    assert "'old/t'" in said and "dynamic" in said and "read_table" in said
    with strategy.scope(), tf.Graph().as_default():
        collective.get_embedding_variable("new/t", 3)
        with pytest.raises(ValueError, match="dynamic table 'new/t'.*init_from_checkpoint"):
            tf.train.warm_start(f"{folder}/dynamic", ".*", {"new/t": info}, {"new/t": "old/t"})
