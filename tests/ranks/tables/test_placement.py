"""Where a table's rows are changes nothing but what travels: numbers are plain TensorFlow's."""

import functools
from pathlib import Path

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import collective
from collective import RankError, TablePolicy, checkpoint
from collective.checkpoint import WarmStart
from collective.tables.table import Table
from tests.ranks import exports, grouped, reference
from tests.ranks.checkpoints import wait
from tests.ranks.training import OPTIMIZERS

pytestmark = [
    pytest.mark.either_backend,
    pytest.mark.ranks(1, 3),
    pytest.mark.backends("hb"),
    pytest.mark.double,
]

V, D = 11, 4
GOLDEN = str(Path(__file__).resolve().parents[2] / "golden" / "version_1" / "m")
PLACEMENTS = {
    "rows": {"placement": "rows"},
    "whole": {"placement": "whole"},
    "last": {"placement": "whole:5"},  # 5 mod 3 ranks
    "replicated": {"placement": "replicated"},
    "small": {"replicate_below": V * D * 4 + 1},
    "large": {"replicate_below": V * D * 4},
}
MOVES = pytest.mark.parametrize(
    "there, here",
    [("rows", "replicated"), ("replicated", "last"), ("last", "rows"), ("rows", "whole")],
)


def ids_of(rank):
    """Returns a batch: ranks have different numbers of ids, and ids repeat."""
    return np.random.default_rng([5, rank]).integers(0, V, 7 - 2 * rank)


def loss_of(tables, ids):
    rows = [tf.nn.embedding_lookup(table, (ids + i) % V) for i, table in enumerate(tables)]
    weight = tf.get_variable("w", [D, 1], initializer=tf.constant_initializer(0.3))
    return tf.add_n([tf.reduce_mean(tf.square(tf.matmul(x, weight) - 0.5)) for x in rows])


def model(strategy, rank, placement="rows", optimizer=None, seed=0):
    """Builds a table of some placement, with a step that trains it on this rank's batch."""
    with strategy.embedding_scope(**PLACEMENTS[placement]):
        table = reference.table("t", V, D, seed)
    loss = loss_of([table], tf.constant(ids_of(rank)))
    step = tf.train.get_or_create_global_step()
    train = (optimizer or tf.train.AdamOptimizer(0.1)).minimize(loss, global_step=step)
    return table, train, tf.nn.embedding_lookup(table, tf.range(V))


@pytest.mark.ungrouped
@pytest.mark.parametrize("optimizer", ["adam", "adagrad_da", "nesterov"])
def test_training_is_plain_tensorflows(strategy, rank, size, optimizer):
    def trained(tables, parts):
        with tf.variable_scope("", reuse=tf.AUTO_REUSE):
            losses = [loss_of(tables, tf.constant(part)) for part in parts]
        train = OPTIMIZERS[optimizer]().minimize(tf.add_n(losses) / len(losses))
        every = [tf.nn.embedding_lookup(table, tf.range(V)) for table in tables]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(3):
                session.run(train)
            return session.run(every)

    with strategy.scope(), tf.Graph().as_default():
        tables = []
        for placement, options in PLACEMENTS.items():
            with strategy.embedding_scope(**options):
                tables.append(reference.table(placement, V, D))
        kinds = [isinstance(table, Table) for table in tables]
        assert kinds == [True, True, True, False, False, True]
        got = trained(tables, [ids_of(rank)])
    with tf.Graph().as_default():
        tables = [reference.table(name, V, D, use_resource=True) for name in PLACEMENTS]
        expected = trained(tables, [ids_of(r) for r in range(size)])
    for placement, a, b in zip(PLACEMENTS, got, expected):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6, err_msg=placement)


@pytest.mark.parametrize(
    "initializer",
    [
        tf.truncated_normal_initializer(seed=3),
        None,
        np.arange(V * D, dtype=np.float32).reshape(V, D),
        tf.orthogonal_initializer(),
    ],
    ids=["drawn by row", "default", "array", "drawn whole"],
)
def test_initial_values_are_the_same_everywhere(strategy, initializer):
    shape = None if isinstance(initializer, np.ndarray) else [V, D]
    values = []
    for options in PLACEMENTS.values():
        with strategy.scope(), tf.Graph().as_default(), strategy.embedding_scope(**options):
            table = tf.get_variable("a/t", shape, initializer=initializer)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                values.append(session.run(tf.nn.embedding_lookup(table, tf.range(V))))
    assert np.unique(values[0]).size > V
    for other in values[1:]:
        np.testing.assert_array_equal(values[0], other)


@MOVES
def test_a_checkpoint_goes_on_in_another_placement(strategy, rank, folder, there, here):
    """By a Saver, a monitored session and both ways to start from another job's checkpoint."""
    with strategy.scope(), tf.Graph().as_default():
        table, train, rows = model(strategy, rank, there)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            tf.train.Saver().save(session, f"{folder}/m", global_step=1)
            saved = session.run(rows)
            session.run(train)
            expected = session.run(rows)
    wait()
    np.testing.assert_array_equal(checkpoint.load(folder)["t"][:], saved)
    with strategy.scope(missing_slots="fresh"), tf.Graph().as_default():
        table, train, rows = model(strategy, rank, here, seed=1)
        with tf.Session() as session:
            tf.train.Saver().restore(session, f"{folder}/m-1")
            np.testing.assert_array_equal(session.run(rows), saved)
            session.run(train)
            np.testing.assert_allclose(session.run(rows), expected, rtol=1e-5, atol=1e-6)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        table, train, rows = model(strategy, rank, here, seed=1)
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=folder, save_checkpoint_steps=100
        ) as session:
            session.run(train)
            np.testing.assert_allclose(session.run(rows), expected, rtol=1e-5, atol=1e-6)
    start = WarmStart(f"{folder}/m-1", slots=True)
    with strategy.scope(plan="quiet", warm_start=start), tf.Graph().as_default():
        table, train, rows = model(strategy, rank, here, seed=1)
        with tf.train.MonitoredTrainingSession() as session:
            session.run(train)
            np.testing.assert_allclose(session.run(rows), expected, rtol=1e-5, atol=1e-6)
    with strategy.scope(), tf.Graph().as_default():
        table, train, rows = model(strategy, rank, here, seed=1)
        tf.train.init_from_checkpoint(f"{folder}/m-1", {"t": table})
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            np.testing.assert_array_equal(session.run(rows), saved)


@MOVES
def test_increments_go_on_in_another_placement(strategy, rank, folder, there, here):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        table, train, rows = model(strategy, rank, there, tf.train.AdagradOptimizer(0.1))
        checkpoint.enable_increments(folder)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            saver.save(session, f"{folder}/m", global_step=0)
            for _ in range(2):
                session.run(train)
                checkpoint.save_increment(session, folder)
            saved = session.run(rows)
            session.run(train)
            expected = session.run(rows)
    wait()
    latest = tf.train.latest_checkpoint(folder)
    with strategy.scope(), tf.Graph().as_default():
        table, train, rows = model(strategy, rank, here, tf.train.AdagradOptimizer(0.1))
        with tf.Session() as session:
            tf.train.Saver().restore(session, latest)
            np.testing.assert_array_equal(session.run(rows), saved)
            session.run(train)
            np.testing.assert_allclose(session.run(rows), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(checkpoint.load(folder).table("t")[:], saved)


def test_a_table_of_two_ranks_is_restored_whole_on_any_number(strategy):
    """The committed checkpoint of two ranks; its rows and slots are in test_checkpoint_golden."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope(placement="replicated"):
            user = tf.get_variable("user", [5, 2])
        ids = tf.constant([0, 1, 4])
        train = tf.train.MomentumOptimizer(0.5, 0.5)
        train = train.minimize(tf.reduce_sum(tf.nn.embedding_lookup(user, ids)))
        with tf.Session() as session:
            tf.train.Saver().restore(session, GOLDEN)
            before = [[-0.625, -0.375], [0.375, 0.625], [2, 2.25], [3, 3.25], [2.75, 3]]
            np.testing.assert_array_equal(session.run(user), before)
            session.run(train)
            slots = np.array([0.75, 0.75, 0, 0, 1.5])[:, None]
            gradients = np.array([1, 1, 0, 0, 1])[:, None]
            after = before - (slots / 2 + gradients) / 2
            np.testing.assert_array_equal(session.run(user), after)


def test_what_does_not_fit_is_named(strategy):
    def restore(**variable):
        with strategy.scope(), tf.Graph().as_default():
            tf.get_variable(**variable)
            with tf.Session() as session:
                tf.train.Saver().restore(session, GOLDEN)

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"'user' has the shape \[6, 2\] here"):
        restore(name="user", shape=[6, 2])
    with pytest.raises(tf.errors.InvalidArgumentError, match="'user' is float64 here, float32 in"):
        restore(name="user", shape=[5, 2], dtype=tf.float64)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="is a dynamic table in the checkpoint, an ordinary variable here",
    ):
        restore(name="item", shape=[3, 2])
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope(placement="replicated"):
            with pytest.raises(ValueError, match="dynamic table 'd': placement='replicated' is"):
                tf.get_variable("d", [None, 2])
            with strategy.embedding_scope(policy=TablePolicy(weight_bound=2.0)):
                with pytest.raises(ValueError, match="table 'b': .*weight_bound=2.0"):
                    tf.get_variable("b", [3, 2])
        bounded = TablePolicy(weight_bound=2.0)
        with strategy.embedding_scope(replicate_below="1 MB", policy=bounded):
            assert isinstance(tf.get_variable("c", [3, 2]), Table)
            assert isinstance(tf.get_variable("e", [None, 2]), Table)


@MOVES
def test_a_model_is_served_in_another_placement(strategy, rank, folder, there, here):
    def build(placement):
        with strategy.embedding_scope(**PLACEMENTS[placement]):
            table = reference.table("t", V, D)
        ids = tf.placeholder(tf.int64, [None], "ids")
        return {"ids": ids}, {"rows": tf.nn.embedding_lookup(table, ids)}

    prefix = exports.trained(strategy, lambda: build(there), folder)
    for placement in (there, here):
        path = strategy.export_saved_model(
            f"{folder}/{placement}",
            prefix,
            exports.signature(strategy, functools.partial(build, placement)),
        )
        got = exports.served(path, {"ids": [3, 10]})["rows"]
        np.testing.assert_array_equal(got, reference.table_values(V, D)[[3, 10]])
        wait()


def test_every_way_to_make_a_table_is_replicated(strategy, rank):
    """A column, a Keras layer, a function of tables, and a name that a scope asks for again."""
    ids = tf.feature_column.categorical_column_with_identity("ids", V)
    column = tf.feature_column.embedding_column(ids, D)
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        batch = tf.constant(ids_of(rank))
        with strategy.embedding_scope(placement="replicated"):
            rows = [tf.compat.v1.feature_column.input_layer({"ids": batch[:, None]}, [column])]
            rows.append(tf.keras.layers.Embedding(V, D)(batch))
            table = tf.get_variable("table", [V, D])
            with tf.variable_scope("", reuse=True):
                assert tf.get_variable("table", [V, D]) is table
            with strategy.embedding_scope(placement="rows"), tf.variable_scope("", reuse=True):
                assert tf.get_variable("table", [V, D]) is table
        sparse = tf.sparse.from_dense(1 + batch[:, None])
        rows += collective.group_embedding_lookup_sparse([table], [sparse], ["sum"])
        loss = tf.add_n([tf.reduce_mean(tf.square(1 - x)) for x in rows])
        train = tf.train.AdagradOptimizer(0.5).minimize(loss)
        assert len(tf.trainable_variables()) == 3
        assert not any(isinstance(v, Table) for v in tf.global_variables())
        assert [table.placement for table in strategy.plan().tables] == ["replicated"] * 3
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            before = session.run(loss)
            session.run(train)
            assert session.run(loss) < before


def test_tables_that_one_rank_has_whole(strategy, rank, size):
    """Each goes to the rank with the fewest bytes of them; a rank without rows works as well."""
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope(placement="whole"):
            tables = [reference.table(f"t{i}", rows, D) for i, rows in enumerate([9, 2, 2, 8, 1])]
        with strategy.embedding_scope(placement=f"whole:{size + 1}"):
            tables.append(reference.table("named", 3, D))
        train = tf.train.AdagradOptimizer(0.1).minimize(
            tf.add_n([tf.reduce_sum(tf.nn.embedding_lookup(t, [0])) for t in tables])
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
        plan = strategy.plan()
    owners = {1: [0] * 6, 2: [0, 1, 1, 1, 0, 1], 3: [0, 1, 2, 1, 2, 1]}[size]
    by_name = {described.name: described for described in plan.tables}
    for table, owner in zip(tables, owners):
        described = by_name[table.op.name]
        assert described.placement == f"whole:{owner}"
        assert described.slots == (f"{described.name}/Adagrad",)
        assert described.shard_rows == tuple(described.rows * (r == owner) for r in range(size))
    assert f"whole on rank {owners[-1]}" in plan.to_text(full=True)


@pytest.mark.parametrize("rows", [V, None])
def test_ranks_that_have_a_table_elsewhere_say_so(strategy, rank, size, rows):
    """Each would train a table of its own."""
    if size == 1:
        return
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        tf.get_variable("before", [], initializer=tf.ones_initializer())
        with strategy.embedding_scope(placement=f"whole:{rank}"):
            table = tf.get_variable("t", [rows, D])
        found = tf.nn.embedding_lookup(table, [0])
        with tf.Session() as session:
            for fetched in (tf.global_variables_initializer(), found):
                with pytest.raises(RankError, match="whole on rank"):
                    session.run(fetched)


def test_lookups_of_a_replicated_table_exchange_nothing(strategy, rank, size):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        table, train, rows = model(strategy, rank, "replicated")
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(rows)
            _, counts = grouped.counted(session, rows)
            assert not counts.get("Alltoall") and not counts.get("Allreduce")
        plan = strategy.plan()
    (described,) = plan.tables
    assert (described.name, described.placement) == ("t", "replicated")
    assert described.slots == ("t/Adam", "t/Adam_1")
    assert described.shard_rows == (V,) * size
    assert described.shard_bytes == (V * D * 4 * 3,) * size
    assert "replicated: nothing is exchanged" in plan.to_text(full=True)


def test_tables_are_made_in_another_order_after_a_restore(strategy, rank, size, folder):
    """Tables that one rank has whole are then on other ranks; each is restored by its name."""
    kinds = {"a": "rows", "b": "whole", "c": "replicated", "d": "whole", "e": "rows"}
    ids = np.arange(V)[:: 1 + rank]

    def build(order, seed):
        tables = {}
        for name in order:
            number = ord(name)
            with strategy.embedding_scope(placement=kinds[name]):
                rows = V + number % 3
                tables[name] = reference.table(name, rows, D, seed + number)
        with strategy.embedding_scope():
            tables["f"] = collective.get_embedding_variable("f", D)
        losses = [
            tf.reduce_mean(tf.square(tf.nn.embedding_lookup(t, ids) - ord(name) / 100))
            for name, t in tables.items()
        ]
        train = tf.train.AdagradOptimizer(0.1).minimize(tf.add_n(losses))
        every = {n: tf.nn.embedding_lookup(t, np.arange(V)) for n, t in sorted(tables.items())}
        return train, every

    results = []
    for start, order in enumerate(["abcde", "edcba", "cdaeb"]):
        with strategy.scope(plan="quiet"), tf.Graph().as_default():
            train, every = build(order, seed=100 * start)
            saver = tf.train.Saver()
            with tf.Session() as session:
                if start == 0:
                    session.run(tf.global_variables_initializer())
                    session.run(train)
                    saver.save(session, f"{folder}/m")
                else:
                    saver.restore(session, f"{folder}/m")
                restored = session.run(every)
                session.run(train)
                results.append((restored, session.run(every)))
        wait()
    for there, then in results[1:]:
        for name in results[0][0]:
            np.testing.assert_array_equal(there[name], results[0][0][name], err_msg=name)
            np.testing.assert_allclose(then[name], results[0][1][name], rtol=1e-5, err_msg=name)
