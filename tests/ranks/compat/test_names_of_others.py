"""Names of other frameworks, used as their scripts do, give the numbers that they promise."""

import contextlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective.compat import sok_functions
from collective.compat.names.deeprec import DEEPREC
from collective.compat.names.hybridbackend import HYBRIDBACKEND
from collective.compat.names.sok import SOK
from collective.coordination import barrier
from collective.scope import SCOPES
from tests import numpy_optimizers
from tests.ranks import grouped, reference

pytestmark = pytest.mark.either_backend
NAMES = {name.theirs: name for name in (*DEEPREC.names, *HYBRIDBACKEND.names, *SOK.names)}
PYTHON = "tensorflow.python"
OPS = f"{PYTHON}.data.experimental.ops"
V = 12
RNG = np.random.default_rng(8)
RUNS = [{"ids": grouped.padded(RNG, V, 3)} for _ in range(2)]


def named(theirs):
    """Returns what a script finds under a name."""
    return NAMES[theirs].resolve()


def trained(found, tables, p, samples):
    """Descends by a loss that is a mean over samples."""
    loss = sum(tf.reduce_sum(tf.square(rows - 0.2)) for rows in found) / samples
    optimizer = tf.train.GradientDescentOptimizer(0.4)
    return {"train": optimizer.minimize(loss), "tables": tables}, p


def compare(strategy, rank, size, build, theirs):
    """Trains in plain TensorFlow by `build(False)`, and in scope() by the names."""
    runs = [(["train"], run) for run in RUNS] + [(["tables"], {})]
    mine = [
        (names, {key: reference.part(value, rank, size) for key, value in feed.items()})
        for names, feed in runs
    ]
    (*_, want) = reference.plain(lambda scope: build(scope, None, grouped.B), runs)
    (*_, got) = reference.sharded(
        strategy, lambda scope: build(scope, theirs, grouped.B // size), mine
    )
    for a, b in zip(got["tables"], want["tables"]):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "theirs",
    [
        "tf.nn.fused_embedding_lookup_sparse",
        "tf.nn.fused_safe_embedding_lookup_sparse",
        "sok.lookup_sparse",
    ],
)
def test_sparse_lookups(strategy, rank, size, theirs):
    def build(embedding_scope, theirs, samples):
        p = {"ids": tf.placeholder(tf.int64, [None, 3])}
        with embedding_scope():
            tables = [reference.table(name, V, dim) for name, dim in (("a", 2), ("b", 3))]
        ids, combiners = grouped.sparse(p["ids"]), ("sum", "mean")
        if theirs == "sok.lookup_sparse":
            found = named(theirs)(tables, [ids, ids], None, list(combiners))
        elif theirs:
            pairs = zip(tables, combiners)
            found = [named(theirs)(table, ids, combiner=combiner) for table, combiner in pairs]
        else:
            found = [
                tf.nn.safe_embedding_lookup_sparse(table, ids, combiner=combiner)
                for table, combiner in zip(tables, combiners)
            ]
        return trained(found, tables, p, samples)

    compare(strategy, rank, size, build, theirs)


# Whether the framework's lookup leaves ids out whose weight isn't positive, as
# tf.nn.safe_embedding_lookup_sparse does and tf.nn.embedding_lookup_sparse doesn't.
PRUNES = {
    "tf.nn.group_embedding_lookup_sparse": False,
    "tf.nn.fused_embedding_lookup_sparse": False,
    "sok.lookup_sparse": False,
    "tf.nn.fused_safe_embedding_lookup_sparse": True,
    "tf.contrib.layers.safe_embedding_lookup_sparse": True,
}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("theirs", PRUNES)
def test_weights_that_are_not_positive(strategy, rank, size, theirs, combiner):
    ids = np.array([[3, 1, 2], [-1, -1, -1], [0, 4, 4], [5, 1, 0], [2, 0, 1], [-1, -1, -1]] * 2)
    rows = [[1, 2, -1], [0, 0, 0], [-2, 0.5, 0], [0, 1, 1], [0, -1, 3], [0, 0, 0]] * 2
    feed = {"ids": ids, "weights": np.array(rows, np.float32)}

    def build(embedding_scope, theirs):
        p = {key: tf.placeholder(value.dtype, [None, 3]) for key, value in feed.items()}
        with embedding_scope():
            table = reference.table("a", V, 2)
        args = table, grouped.sparse(p["ids"]), grouped.sparse(p["ids"], p["weights"])
        if theirs is None:
            prunes = PRUNES[name]
            lookup = tf.nn.safe_embedding_lookup_sparse if prunes else tf.nn.embedding_lookup_sparse
            found = lookup(*args, combiner=combiner)
            missing = tf.shape(p["ids"])[0] - tf.shape(found)[0]
            found = tf.pad(found, [[0, missing], [0, 0]])
        elif "group" in theirs or theirs.startswith("sok"):
            (found,) = named(theirs)(
                [args[0]], [args[1]], sp_weights=[args[2]], combiners=[combiner]
            )
        else:
            found = named(theirs)(*args, combiner=combiner)
        loss = tf.reduce_mean(tf.square(found - 0.2))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        return {"found": found, "train": train}, p

    name, runs = theirs, [(["found", "train"], feed), (["found"], feed)]
    mine = [
        (names, {key: reference.part(value, rank, size) for key, value in values.items()})
        for names, values in runs
    ]
    want = reference.plain(lambda scope: build(scope, None), runs)
    got = reference.sharded(strategy, lambda scope: build(scope, theirs), mine)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a["found"], reference.part(b["found"], rank, size), rtol=1e-4)


def test_dense_lookups(strategy, rank, size):
    def build(embedding_scope, theirs, samples):
        p = {"ids": tf.placeholder(tf.int64, [None, 3])}
        with embedding_scope():
            table = reference.table("a", V, 2)
        lookup = named(theirs) if theirs else tf.nn.embedding_lookup
        return trained([lookup(table, tf.maximum(p["ids"], 0))], [table], p, samples)

    compare(strategy, rank, size, build, "sok.all2all_dense_embedding")


@pytest.fixture
def folder(tmp_path):
    """Returns rank 0's folder, which all ranks see."""
    return barrier.exchange(None, "a folder", {"path": str(tmp_path)})[0]["path"]


def write(folder, rank, size):
    """Lets rank 0 write two files for each rank, of four records; returns their paths."""
    paths = [f"{folder}/{i}" for i in range(2 * size)]
    for i, path in enumerate(paths if rank == 0 else ()):
        ids = list(range(4 * i, 4 * i + 4))
        lists = pyarrow.array([[k] * (k % 3) for k in ids], pyarrow.list_(pyarrow.int64()))
        pyarrow.parquet.write_table(
            pyarrow.table({"id": ids, "tags": lists, "label": [k / 2 for k in ids]}), path
        )
    barrier.exchange(None, "written", {})
    return paths


def read_by_deeprec(paths):
    queue = named(f"{PYTHON}.ops.work_queue.WorkQueue")(paths, num_epochs=1, shuffle=True, seed=2)
    queue.add_summary()
    field = named(f"{OPS}.parquet_dataset_ops.DataFrame").Field
    fields = [field("id", tf.int64), field("tags", tf.int64, ragged_rank=1)]
    read = named(f"{OPS}.parquet_dataset_ops.read_parquet")(2, fields=fields)
    batch = tf.data.make_one_shot_iterator(queue.input_dataset().apply(read)).get_next()
    return batch["id"], batch["tags"].to_sparse()


def read_by_hybridbackend(paths):
    field = named("hb.data.DataFrame").Field
    fields = [
        field("id", tf.int64),
        field("tags", tf.int64, ragged_rank=1),
        field("new", tf.int64, default_value=1),
    ]
    context = named("hb.context")
    mine = paths[context.rank :: context.world_size]
    dataset = named("hb.data.Dataset").from_parquet(mine, fields=fields).batch(2).prefetch(2)
    batch = named("hb.data.make_one_shot_iterator")(dataset).get_next()
    return batch["id"] * batch["new"], batch["tags"]


@pytest.mark.slow
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("read", [read_by_deeprec, read_by_hybridbackend])
def test_files_are_read_and_trained_on(strategy, rank, size, folder, read):
    """Each record is used once over all ranks."""
    paths = write(folder, rank, size)
    used = []
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        ids, tags = read(paths)
        with strategy.embedding_scope():
            table = reference.table("t", 8 * size, 2)
        rows = tf.nn.embedding_lookup(table, ids)
        rows += tf.nn.safe_embedding_lookup_sparse(table, tags, combiner="sum")
        step = tf.train.get_or_create_global_step()
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        train = optimizer.minimize(tf.reduce_mean(tf.square(rows)), global_step=step)
        with tf.train.MonitoredTrainingSession() as session:
            while not session.should_stop():
                used += session.run([ids, train])[0].tolist()
    of_all = [each["used"] for each in barrier.exchange(None, "used", {"used": used})]
    assert sorted(record for share in of_all for record in share) == list(range(8 * size))
    assert {len(share) for share in of_all} == {8}


@pytest.mark.slow
@pytest.mark.parametrize(
    "theirs", ["tf.config.experimental.enable_distributed_strategy", "sok.Init"]
)
def test_a_scope_until_the_process_ends(rank, size, theirs):
    """DeepRec's grouped lookups of embedding variables train in it, by the sum of gradients."""
    assert not SCOPES.is_open
    with contextlib.ExitStack() as ends, tf.Graph().as_default():
        made = named(theirs)()
        ends.callback(lambda: sok_functions._scope.pop().__exit__(None, None, None))
        assert SCOPES.is_open
        named(theirs)()  # A second call changes nothing.
        assert len(sok_functions._scope) == 1
        tables = [
            named("tf.get_embedding_variable")(
                f"var_{dim}",
                embedding_dim=dim,
                initializer=tf.ones_initializer(tf.float32),
                ev_option=named("tf.EmbeddingVariableOption")(
                    evict_option=None, filter_option=None
                ),
            )
            for dim in (4, 2)
        ]
        ids = tf.RaggedTensor.from_row_splits([3, 1, 3], [0, 2, 2, 3])
        found = named("tf.nn.group_embedding_lookup_sparse")(tables, [ids, ids], ["sum", "sum"])
        loss = tf.add_n([tf.reduce_sum(rows) for rows in found])
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run([train] if made is None else [made, train])
            rows = session.run(found)
    assert not SCOPES.is_open
    once, twice = 1 - 0.1 * size, 1 - 0.2 * size  # Key 3 comes twice on each rank.
    np.testing.assert_allclose(rows[1][:, 0], [once + twice, 0, twice], rtol=1e-5)
    if theirs.startswith("tf."):
        with pytest.raises(NotImplementedError, match="no parameter servers"):
            named(theirs)(strategy="parameter_server")


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["option", "argument", "column"])
def test_glorots_initializer_scales_by_the_rows_that_deeprec_draws(strategy, way):
    keys = np.arange(400)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        rows, initializer = 12, tf.glorot_uniform_initializer
        option = named("tf.InitializerOption")(initializer=initializer, default_value_dim=rows)
        option = named("tf.EmbeddingVariableOption")(init_option=option)
        if way == "column":
            make = named("tf.feature_column.categorical_column_with_embedding")
            column = make("key", dtype=tf.int64, ev_option=option)
            columns = [tf.feature_column.embedding_column(column, 4)]
            found = tf.feature_column.input_layer({"key": tf.constant(keys)}, columns)
        else:
            rows = rows if way == "option" else 4096
            table = named("tf.get_embedding_variable")(
                "t", 4, **{"ev_option": option} if way == "option" else {"initializer": initializer}
            )
            found = tf.nn.embedding_lookup(table, tf.constant(keys))
        train = tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_sum(found))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            values = session.run([found, train])[0]
    limit = np.sqrt(6 / (rows + 4))
    assert 0.98 * limit < np.abs(values).max() <= limit
    assert abs(values.mean()) < 0.1 * limit


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["table", "column", "buckets"])
def test_first_rows_are_drawn_as_there(strategy, way):
    """Without an initializer: of deviation 1, and of 1 / √V where a column has V buckets."""
    keys, buckets = np.arange(400), 100
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        if way == "table":
            table = named("tf.get_embedding_variable")("t", 16)
            found = tf.nn.embedding_lookup(table, tf.constant(keys))
        else:
            layers = "tf.contrib.layers"
            if way == "column":
                column = named(f"{layers}.sparse_column_with_embedding")("key", dtype=tf.int64)
            else:
                column = tf.feature_column.categorical_column_with_identity("key", buckets)
                keys = keys % buckets
            columns = [named(f"{layers}.embedding_column")(column, 16)]
            features = {"key": tf.constant(keys)}
            found = named(f"{layers}.input_from_feature_columns")(features, columns)
        train = tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_sum(found))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            values = session.run([found, train])[0]
    deviation = buckets**-0.5 if way == "buckets" else 1
    # That of a normal distribution which is cut at twice its deviation.
    assert values.std() == pytest.approx(0.8796 * deviation, rel=0.1)
    assert deviation < np.abs(values).max() <= 2 * deviation


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["table", "column"])
def test_steps_to_live_with_another_option(strategy, way):
    """It acts unless the option has a GlobalStepEvict, as in DeepRec."""
    option, old = named("tf.EmbeddingVariableOption"), named("tf.GlobalStepEvict")
    small = named("tf.L2WeightEvict")

    def policy(steps, ev_option):
        if way == "column":
            make = named("tf.contrib.feature_column.sparse_column_with_embedding")
            return make("key", steps_to_live=steps, ev_option=ev_option).policy
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            make = named("tf.get_embedding_variable")
            return make("t", 2, steps_to_live=steps, ev_option=ev_option).policy

    for wanted, steps, ev_option in (
        (5, 5, None),
        (5, 5, option()),
        (5, 5, option(filter_option=named("tf.CounterFilter")(3))),
        (5, 5, option(evict_option=small())),
        (5, 5, collective.TablePolicy(weight_bound=1.0)),
        (3, 5, collective.TablePolicy(steps_to_live=3)),
        (3, 5, option(evict_option=old(3))),
        (None, 5, option(evict_option=old())),
        (None, 0, option()),
        (3, None, option(evict_option=old(3))),
    ):
        made = policy(steps, ev_option)
        assert (made and made.steps_to_live) == wanted, (steps, ev_option)
        if isinstance(ev_option, collective.TablePolicy):
            assert made.weight_bound == ev_option.weight_bound
    with pytest.raises(ValueError, match=r"steps_to_live=5 and L2WeightEvict\(.*leave one out"):
        policy(5, option(evict_option=small(0.5)))


SHRINKING = {
    "l1_regularization_strength": 1.5,
    "l2_regularization_strength": 0.1,
    "l2_shrinkage_regularization_strength": 0.2,
}
# The optimizer of DeepRec with its arguments; its rule for an embedding variable, by its kernels;
# and the one of every other variable.
RULES = {
    "adam": (
        "tf.train.AdamOptimizer",
        {"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "use_locking": True},
        numpy_optimizers.adam(0.1, 0.8, 0.9, 1e-3, lazy=True),
        numpy_optimizers.adam(0.1, 0.8, 0.9, 1e-3, lazy=False),
    ),
    "adam_w": (
        "tf.train.AdamWOptimizer",
        {
            "weight_decay": 0.2,
            "learning_rate": 0.1,
            "beta1": 0.8,
            "beta2": 0.9,
            "epsilon": 1e-3,
        },
        numpy_optimizers.adam(0.1, 0.8, 0.9, 1e-3, lazy=True, decay=0.2, decays_by_rate=True),
        numpy_optimizers.adam(0.1, 0.8, 0.9, 1e-3, lazy=False, decay=0.2),
    ),
    "ftrl": (
        "tf.train.FtrlOptimizer",
        {"learning_rate": 0.3, "l1_regularization_strength": 1.5, "use_locking": True},
        numpy_optimizers.ftrl(0.3, -0.5, 1.5, 0.0, 0.0, 0.0, group=True),
        numpy_optimizers.ftrl(0.3, -0.5, 1.5, 0.0, 0.0, 0.0, group=False),
    ),
    "ftrl_with_shrinkage": (
        "tf.train.FtrlOptimizer",
        {"learning_rate": 0.3, "learning_rate_power": -0.7, **SHRINKING},
        numpy_optimizers.ftrl(0.3, -0.7, 1.5, 0.1, 0.2, 0.0, group=True, sees_shrinkage=True),
        numpy_optimizers.ftrl(0.3, -0.7, 1.5, 0.1, 0.2, 0.0, group=False),
    ),
}

RARE = ("adam_w", "ftrl_with_shrinkage")


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(
    "name",
    ["adam", "ftrl", *(pytest.param(name, marks=pytest.mark.matrix) for name in RARE)],
)
def test_rules_of_embedding_variables(strategy, rank, size, name):
    """DeepRec's kernels update an embedding variable by rows; static tables keep TensorFlow's."""
    theirs, arguments, *rules = RULES[name]
    start = np.tile([0.5, -0.7, 0.9], (V, 1))
    rng = np.random.default_rng(4)
    batches = [
        (rng.choice(V, 2 * size), rng.normal(size=(2 * size, 3)).astype(np.float32))
        for _ in range(6)
    ]
    first = (np.arange(V), np.ones((V, 3), np.float32))  # All keys get their rows.
    first = tuple(np.repeat(part, size, 0) for part in first)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        ids, factors = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None, 3])
        of = tf.constant_initializer
        dynamic = named("tf.get_embedding_variable")("dynamic", 3, initializer=of(start[0]))
        with strategy.embedding_scope():
            static = tf.get_variable("static", [V, 3], initializer=of(start))
        rows = [tf.nn.embedding_lookup(table, ids) for table in (dynamic, static)]
        loss = size * tf.add_n([tf.reduce_sum(found * factors) for found in rows])
        update = named(theirs)(**arguments).minimize(loss)
        found = []
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for batch in (first, *batches):
                mine = (reference.part(part, rank, size) for part in batch)
                session.run(update, dict(zip((ids, factors), mine)))
            found = session.run(rows, {ids: np.arange(V), factors: np.ones([V, 3])})
    for rule, values in zip(rules, found):
        want, _ = numpy_optimizers.trained(rule, start, [first, *batches])
        np.testing.assert_allclose(values, want, rtol=1e-4, atol=1e-5)
