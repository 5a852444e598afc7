"""TensorFlow's operations use tables, and their slots, as one value, as they use any variable."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import RankError, TableError
from collective.tables.grouping import lookups_of
from tests.ranks import grouped, reference, training

pytestmark = pytest.mark.double

V, D = 11, 3  # rows that no number of ranks divides
ONES = np.ones([V, D], np.float32)
VALUES = reference.table_values(V, D)
READS = {
    "convert": lambda t: tf.convert_to_tensor(t),
    "identity": lambda t: tf.identity(t),
    "value": lambda t: t.value(),
    "read_value": lambda t: t.read_value(),
    "add": lambda t: t + 1.0,
    "matmul": lambda t: tf.matmul(t, tf.ones([D, 2])),
    "transposed": lambda t: tf.matmul(tf.ones([2, D]), t, transpose_b=True),
    "norm": lambda t: tf.nn.l2_loss(t),
    "row": lambda t: t[4],
    "slice": lambda t: t[2:9:3, 1:],
    "reduce": lambda t: tf.reduce_mean(t, 0),
    "gather_nd": lambda t: tf.gather_nd(t, [[[0, 1]], [[10, 2]]]),
    "gather_rows": lambda t: tf.gather_nd(t, [[3], [10]]),
    "gather_columns": lambda t: tf.gather(t, [2, 0], axis=1),
    "cast": lambda t: tf.cast(t, tf.float64),
    "unstack": lambda t: tf.stack(tf.unstack(t)[::-1]),
    "split": lambda t: tf.split(t, [4, 7])[1],
    "cond": lambda t: tf.cond(tf.constant(True), lambda: t + 1.0, lambda: tf.zeros([V, D])),
    "shape": lambda t: tf.shape(t),
    "initial": lambda t: t.initial_value,
}


@pytest.mark.sample(7)
@pytest.mark.parametrize("way", READS)
def test_a_read_has_every_row(strategy, rank, size, way):
    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", V, D)
        return {"out": READS[way](t)}, {}

    want, got = grouped.both(strategy, rank, size, build, [(["out"], {})])
    np.testing.assert_allclose(got[0]["out"], want[0]["out"], rtol=1e-6)


def test_a_graph_of_which_every_number_is_checked(strategy, rank, size):
    """Its tables' own errors, for sessions outside of scope(), are none of its numbers."""

    def train(loss, _):
        update = tf.train.AdagradOptimizer(0.1).minimize(loss)
        return {"train": tf.group(update, tf.add_check_numerics_ops())}

    training.compare(strategy, rank, size, train, steps=2)


def test_fetching_a_table(strategy, rank, size):
    """By itself, among others, by a hook in a finalized graph, and by `eval`."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = reference.table("t", V, D)
        row = tf.nn.embedding_lookup(t, [rank])

        class Hook(tf.train.SessionRunHook):
            def before_run(self, context):
                return tf.train.SessionRunArgs({"table": t})

            def after_run(self, context, values):
                np.testing.assert_array_equal(values.results["table"], VALUES)

        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            np.testing.assert_array_equal(session.run(t), VALUES)
            out = session.run({"a": [t, row], "b": t})
            np.testing.assert_array_equal(out["a"][0], VALUES)
            np.testing.assert_array_equal(out["a"][1], VALUES[[rank]])
            np.testing.assert_array_equal(t.eval(), VALUES)
            np.testing.assert_array_equal(session.make_callable(t)(), VALUES)
        with tf.train.MonitoredSession(hooks=[Hook()]) as session:
            session.run(row)
            np.testing.assert_array_equal(session.run(t), VALUES)


def test_fetches_are_in_any_order(strategy, rank):
    """As those that a script has from a set of names, whose order is another in each process."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            tables = [reference.table(name, V, D, seed) for seed, name in enumerate("tu")]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            order = tables if rank % 2 else tables[::-1]
            for _ in range(2):
                out = session.run({table.op.name: table for table in order})
                for seed, name in enumerate("tu"):
                    np.testing.assert_array_equal(out[name], reference.table_values(V, D, seed))


def test_writes_take_a_whole_value(strategy, rank, size):
    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", V, D)
        value = tf.placeholder(tf.float32, [V, D])
        with tf.control_dependencies([t.assign_sub(3 * ONES, read_value=False)]):
            after = t.read_value()
        return {
            "t": t,
            "assign": tf.assign(t, value),
            "add": t.assign_add(2 * ONES),
            "after": after,
        }, {"value": value}

    new = np.arange(V * D, dtype=np.float32).reshape(V, D)

    def run(scope, embedding_scope):
        with scope, tf.Graph().as_default():
            fetches, feeds = build(embedding_scope)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                out = [
                    session.run(fetches["assign"], {feeds["value"]: new}),
                    session.run(fetches["add"]),
                ]
                out += [session.run(fetches["t"]), session.run(fetches["after"])]
                fetches["t"].load(4 * new, session)
                return [*out, session.run(fetches["t"])]

    for got, want in zip(
        run(strategy.scope(), strategy.embedding_scope), [new, new + 2, new + 2, new - 1, 4 * new]
    ):
        np.testing.assert_array_equal(got, want)


def test_writes_of_another_shape_and_by_one_rank_alone(strategy, rank, size):
    if size == 1:
        return  # TensorFlow's own
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = reference.table("t", V, D)
        with pytest.raises(ValueError, match=r"table 't' is \[11, 3\].*shape \(4, 3\)"):
            t.assign(np.zeros([4, 3], np.float32))
        change, other = t.assign(ONES, read_value=False), tf.nn.embedding_lookup(t, [0])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(RankError, match="do not run the same"):
                session.run(change if rank == 0 else other)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(ValueError, match=r"table 't' is \[11, 3\].*shape \(2, 2\)"):
                t.load(np.zeros([2, 2]), session)


def test_slots_are_whole_to_whoever_reads_them(strategy, rank, size):
    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", V, D)
        ids = tf.placeholder(tf.int64, [None])
        optimizer = tf.train.AdamOptimizer(0.1)
        train = optimizer.minimize(tf.reduce_mean(tf.square(tf.nn.embedding_lookup(t, ids))))
        slots = {name: optimizer.get_slot(t, name) for name in optimizer.get_slot_names()}
        assert all(slot.shape.as_list() == [V, D] for slot in slots.values())
        return {
            "train": train,
            **slots,
            "row": tf.nn.embedding_lookup(slots["m"], [3, V - 1]),
            "norm": tf.linalg.global_norm(list(slots.values())),
        }, {"ids": ids}

    rng = np.random.default_rng(4)
    batches = [{"ids": rng.integers(0, V, grouped.B)} for _ in range(2)]
    want, got = grouped.both(
        strategy,
        rank,
        size,
        build,
        [(["train"], b) for b in batches] + [(["m", "v", "row", "norm"], {})],
    )
    grouped.same(got[-1], want[-1])


class Starting(tf.train.MomentumOptimizer):
    """Starts its slots from a value of the table's shape, as one that keeps copies of tables."""

    def _create_slots(self, var_list):
        for v in var_list:
            value = tf.constant(reference.table_values(*v.shape.as_list(), 3))
            self._get_or_make_slot(v, value, "momentum", self._name)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.train.MomentumOptimizer(0.1, 0.9),
        lambda: tf.train.AdagradOptimizer(0.1),
        lambda: Starting(0.1, 0.9),
    ],
    ids=["zeros", "constant", "value"],
)
def test_slots_that_a_script_makes_before_the_update(strategy, rank, size, make):
    """As it does where the update is in a branch, in which no variable may be made."""

    def build(embedding_scope):
        with embedding_scope():
            tables = [reference.table("t", V, D), reference.table("one", 1, D)]
        ids = tf.placeholder(tf.int64, [None])
        optimizer = make()
        optimizer._create_slots(tables)
        rows = [tf.nn.embedding_lookup(tables[0], ids), tf.nn.embedding_lookup(tables[1], ids * 0)]
        train = optimizer.minimize(tf.reduce_mean(tf.square(rows[0] + rows[1])))
        (name,) = optimizer.get_slot_names()
        slots = [optimizer.get_slot(table, name) for table in tables]
        assert [slot.shape.as_list() for slot in slots] == [[V, D], [1, D]]
        shards = [[len(range(rank, n, size)), D] for n in (V, 1)]
        assert embedding_scope is contextlib.nullcontext or (
            [slot.shard_shape.as_list() for slot in slots] == shards
        )
        return {"train": train, "slots": slots, "tables": tables}, {"ids": ids}

    rng = np.random.default_rng(4)
    batches = [{"ids": rng.integers(0, V, grouped.B)} for _ in range(2)]
    runs = [(["train"], batch) for batch in batches] + [(["slots", "tables"], {})]
    want, got = grouped.both(strategy, rank, size, build, runs)
    for name in ("slots", "tables"):
        for number in (0, 1):
            grouped.same(
                {name: got[-1][name][number]},
                {name: want[-1][name][number]},
            )


def test_nothing_is_read_whole_unasked(strategy, size, caplog):
    """By feature columns, name scopes, shapes and savers."""
    with (
        caplog.at_level("WARNING", "tensorflow"),
        strategy.scope(),
        tf.Graph().as_default() as graph,
    ):
        with strategy.embedding_scope():
            t = tf.get_variable("t", [1 << 21, 16])
            column = tf.feature_column.categorical_column_with_identity("x", 9)
            tf.feature_column.input_layer(
                {"x": tf.constant([[1]])}, [tf.feature_column.embedding_column(column, 4)]
            )
        with tf.name_scope(None, "inside", [t]):
            loss = tf.reduce_sum(
                tf.nn.safe_embedding_lookup_sparse(t, tf.sparse.from_dense([[1, 2]]))
            )
        assert tf.get_static_value(tf.shape(t)).tolist() == [1 << 21, 16]
        tf.train.AdagradOptimizer(0.1).minimize(loss)
        tf.train.Saver()
        tf.report_uninitialized_variables().mark_used()
        assert len(lookups_of(graph).written) == 2 and "read as one value" not in caplog.text
        tf.reduce_sum(t)
        if size > 1:
            assert len(lookups_of(graph).written) == 3
            assert (
                "table 't' is read as one value: each run that uses it sends all of its 0.1 GB"
                in caplog.text
            )


@pytest.mark.sample(1)
@pytest.mark.parametrize("version", [1, 2])
def test_a_table_that_a_loop_reads_is_read_before_it(strategy, rank, size, version):
    """A cell's kernel, made in embedding_scope(): ranks' sequences may have different lengths."""

    def build(embedding_scope):
        lengths = tf.placeholder(tf.int64, [None])
        with embedding_scope():
            t = reference.table("t", 9, 3)
            kernel = reference.table("kernel", 3, 3, 1)
        steps = tf.cast(tf.reduce_max(lengths), tf.int32)
        out = tf.while_loop(
            lambda i, x: i < steps,
            lambda i, x: (
                i + 1,
                tf.where(lengths > tf.cast(i, tf.int64), tf.tanh(tf.matmul(x, kernel)), x),
            ),
            [0, tf.nn.embedding_lookup(t, lengths)],
        )[1]
        train = tf.train.GradientDescentOptimizer(0.5).minimize(
            tf.reduce_mean(tf.square(out - 0.3))
        )
        return {"train": train, "rows": tf.nn.embedding_lookup(t, tf.range(9)), "kernel": kernel}, {
            "lengths": lengths
        }

    lengths = np.array([5, 1, 4, 3, 1, 2])  # the longest on the first rank
    if version == 1:
        tf.disable_control_flow_v2()
    try:
        want = reference.plain(build, [(["train"], {"lengths": lengths}), (["rows", "kernel"], {})])
        mine = {"lengths": reference.part(lengths, rank, size)}
        got = reference.sharded(strategy, build, [(["train"], mine), (["rows", "kernel"], {})])
    finally:
        tf.enable_control_flow_v2()
    grouped.same(got[1], want[1])


def written(table, i, _):
    """Writes a table, then reads it: in each iteration."""
    value = tf.fill([V, D], tf.cast(i + 2, tf.float32))
    with tf.control_dependencies([table.assign(value, read_value=False)]):
        return i + 1, table.read_value()[:1]


def assigned(table, i, _):
    """Writes a table, of which it uses what the assignment gives."""
    return i + 1, table.assign(tf.fill([V, D], tf.cast(i + 2, tf.float32)))[:1]


@pytest.mark.parametrize("body", [written, assigned])
def test_a_loop_reads_what_it_has_written(strategy, rank, size, flavour, body):
    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", V, D)
        step = lambda i, total: (i + 1, total + body(t, i, total)[1])  # noqa: E731
        out = tf.while_loop(lambda i, _: i < 3, step, [0, tf.zeros([1, D])], parallel_iterations=1)
        return {"out": out[1], "t": t}, {}

    want, got = grouped.both(strategy, rank, size, build, [(["out"], {}), (["t"], {})])
    for ours, truth in zip(got, want):
        grouped.same(ours, truth)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "write",
    [
        lambda t, value: t.assign(value * 0.5),
        lambda t, value: tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(value**2)),
    ],
)
def test_a_loop_that_writes_what_it_has_read_is_refused(strategy, flavour, write):
    """What it reads is read once, outside: the next iteration wouldn't see what is written."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = reference.table("t", V, D)

        def body(i):
            with tf.control_dependencies([write(t, t + 0.0)]):
                return i + 1

        with pytest.raises(TableError, match="table 't' is written in a loop that has read all of"):
            tf.while_loop(lambda i: i < 2, body, [0])


def test_a_read_in_a_loop_waits_for_what_the_loop_waits_for(strategy, rank, size, flavour):
    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", V, D)
        with tf.control_dependencies([t.assign(tf.fill([V, D], 3.0), read_value=False)]):
            out = tf.map_fn(lambda x: tf.reduce_sum(t * x), tf.ones([2]))
        return {"out": out}, {}

    want, got = grouped.both(strategy, rank, size, build, [(["out"], {})])
    grouped.same(got[0], want[0])


def test_a_function_reads_a_table_in_each_call(strategy, rank, size):
    def build(embedding_scope):
        with embedding_scope():
            t = reference.table("t", V, D)
        read = tf.function(lambda: tf.reduce_sum(t.read_value()))
        first = read()
        with tf.control_dependencies([first]):
            done = t.assign(tf.fill([V, D], 3.0), read_value=False)
        with tf.control_dependencies([done]):
            return {"first": first, "second": read()}, {}

    want, got = grouped.both(strategy, rank, size, build, [(["first", "second"], {})])
    grouped.same(got[0], want[0])


def test_a_session_outside_of_scope_gets_no_shard(strategy, size):
    if size == 1:
        return
    with tf.Graph().as_default():
        with strategy.scope(), strategy.embedding_scope():
            t = reference.table("t", V, D)
        with (
            tf.Session() as session,
            pytest.raises(tf.errors.InvalidArgumentError, match="is sharded, and fetched by"),
        ):
            session.run(t)


def test_first_values_that_a_checkpoint_gives(strategy, rank, size, folder):
    """They can't be had as one value; the table starts from them."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            reference.table("t", V, D)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            tf.train.Saver().save(session, f"{folder}/model")
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = tf.get_variable("t", [V, D], initializer=tf.zeros_initializer())
        tf.train.init_from_checkpoint(f"{folder}/model", {"t": "t"})
        if size > 1:
            with pytest.raises(TableError, match="initial value, a checkpoint's, of table 't'"):
                t.initial_value  # noqa: B018 (a property)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            np.testing.assert_array_equal(session.run(t), VALUES)


def test_object_based_checkpoints_are_refused(strategy, size, folder):
    """They would put the whole table into each rank's shard."""
    with strategy.scope(), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = reference.table("t", V, D)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with (
                pytest.raises(TableError, match="tf.train.Checkpoint of table 't'")
                if size > 1
                else contextlib.nullcontext()
            ):
                tf.train.Checkpoint(t=t).save(f"{folder}/model", session)
