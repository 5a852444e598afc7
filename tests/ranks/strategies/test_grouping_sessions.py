"""Sessions take the right input for grouped lookups, in graphs finalized, changed or copied."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.ranks import reference
from tests.ranks.grouped import exchanged, rows_of, same

pytestmark = pytest.mark.backends("hb")

ROWS = 9
COLLECTIVES = {1: (0, 0, 0)}  # one rank exchanges nothing


def values(name, dim):
    return reference.table_values(ROWS, dim, ord(name))


def table(name, dim):
    return reference.table(name, ROWS, dim, ord(name))


def two(embedding_scope):
    with embedding_scope():
        return {"a": table("a", 3), "b": table("b", 4)}


def batches(rank, count, seed):
    """Draws [count] batches of 4 ids, this rank's own."""
    return np.random.default_rng([seed, rank]).integers(0, ROWS, (count, 4))


def drain(session, fetches):
    out = []
    while True:
        try:
            out.append(session.run(fetches))
        except tf.errors.OutOfRangeError:
            return out


# ---- Input


@pytest.mark.sample(1)
@pytest.mark.parametrize("moment", ["before", "after", "later"])
def test_training_takes_no_evaluation_input_nor_the_other_way_round(strategy, rank, size, moment):
    """The model twice over the same tables, each with an iterator; evaluated before gradients are
    taken, after, or later.

    Ranks have unequal parts of the evaluation: a rank that is done answers the others.
    """
    left = 3 + rank % 2
    mine = {"train": batches(rank, 5, 1), "evaluation": batches(rank, left, 2)}
    with strategy.scope(), tf.Graph().as_default():
        t = two(strategy.embedding_scope)

        def model(which):
            ids = tf.data.make_one_shot_iterator(
                tf.data.Dataset.from_tensor_slices(mine[which])
            ).get_next()
            pairs = tf.SparseTensor([[0, 0], [0, 1], [1, 0], [1, 1]], ids, [2, 2])
            pooled = tf.nn.embedding_lookup_sparse(t["b"], pairs, None, combiner="sum")
            return ids, tf.nn.embedding_lookup(t["a"], ids), pooled

        def trained():
            _, *rows = model("train")
            return tf.train.GradientDescentOptimizer(0.1).minimize(
                sum(tf.reduce_mean(tf.square(row)) for row in rows)
            )

        evaluation = model("evaluation") if moment == "before" else None
        train = trained()
        evaluation = model("evaluation") if moment == "after" else evaluation
        state = rows_of(t)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(2):
                session.run(train)
            evaluation = evaluation or model("evaluation")
            seen = [session.run(evaluation)]  # every rank has this one
            session.run(train)
            seen += drain(session, evaluation)
            now = session.run(state)
            trained_more = len(drain(session, train))
    assert (len(seen), trained_more) == (left, 2)
    for (ids, a, b), asked in zip(seen, mine["evaluation"]):
        np.testing.assert_array_equal(ids, asked)
        if ids is not seen[0][0]:  # the state that the others were evaluated in
            np.testing.assert_allclose(a, now["a"][asked], rtol=1e-6)
            np.testing.assert_allclose(
                b, now["b"][asked].reshape(2, 2, 4).sum(1), rtol=1e-5, atol=1e-6
            )


def test_two_inputs_without_any_optimizer(strategy, rank, size):
    """What shares an exchange in an inference takes the input of what is fetched only."""
    mine = [batches(rank, count, seed) for seed, count in enumerate((2, 3))]
    with strategy.scope(), tf.Graph().as_default():
        t = two(strategy.embedding_scope)
        rows = [
            tf.nn.embedding_lookup(
                table_,
                tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices(ids)).get_next(),
            )
            for table_, ids in zip(t.values(), mine)
        ]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            seen = drain(session, rows[0])
            other = drain(session, rows[1])
    assert len(seen) == 2 and len(other) == 3
    for got, ids in zip(other, mine[1]):
        np.testing.assert_allclose(got, values("b", 4)[ids], rtol=1e-6)


# ---- Sessions


def test_rows_that_only_have_to_be_there(strategy, rank, size):
    """Nobody looks at them: another lookup's input stays where it is all the same."""
    with strategy.scope(), tf.Graph().as_default():
        t = two(strategy.embedding_scope)
        data = tf.data.Dataset.from_tensor_slices(batches(rank, 3, 1))
        ids = tf.data.make_one_shot_iterator(data).get_next()
        rows = tf.nn.embedding_lookup(t["a"], ids)
        with tf.control_dependencies([tf.nn.embedding_lookup(t["b"], tf.constant([rank]))]):
            later = tf.constant(1.0)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            assert [session.run(later) for _ in range(4)] == [1.0] * 4
            assert len(drain(session, rows)) == 3


@pytest.mark.grouped
@pytest.mark.parametrize("monitored", [False, True])
@pytest.mark.parametrize("finalized", [False, True])
def test_inference_shares_two_all_to_alls(strategy, rank, size, monitored, finalized):
    """Keys and rows: no gradient is ever taken. A graph that is final is grouped, too."""
    with strategy.scope(), tf.Graph().as_default() as graph:
        t = two(strategy.embedding_scope)
        ids = tf.placeholder(tf.int64, [None])
        rows = {name: tf.nn.embedding_lookup(table_, ids) for name, table_ in t.items()}
        init = tf.global_variables_initializer()
        if finalized and not monitored:
            graph.finalize()
        with tf.train.MonitoredSession() if monitored else tf.Session() as session:
            if not monitored:
                session.run(init)
            got = session.run(rows, {ids: [rank, 8]})
            assert exchanged(session, rows, {ids: [rank]}) == COLLECTIVES.get(size, (2, 0, 1))
            assert graph.finalized == (finalized or monitored)
    same(got, {"a": values("a", 3)[[rank, 8]], "b": values("b", 4)[[rank, 8]]})


def test_training_in_a_final_graph(strategy, rank, size):
    def build(embedding_scope):
        t = two(embedding_scope)
        ids = tf.placeholder(tf.int64, [None])
        loss = sum(
            tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table_, ids))) for table_ in t.values()
        )
        fetches = {"train": tf.train.AdagradOptimizer(0.1).minimize(loss), "state": rows_of(t)}
        tf.get_default_graph().get_collection_ref("init").append(tf.global_variables_initializer())
        return fetches, {"ids": ids}

    ids = np.arange(12) % ROWS
    want = reference.plain(build, [(["train"], {"ids": ids}), (["state"], {})])
    with strategy.scope(), tf.Graph().as_default() as graph:
        fetches, p = build(strategy.embedding_scope)
        graph.finalize()
        with tf.Session() as session:
            session.run(tf.get_collection("init"))
            session.run(fetches["train"], {p["ids"]: reference.part(ids, rank, size)})
            same(session.run(fetches["state"]), want[1]["state"])


def test_lookups_that_are_added_after_a_session_has_run(strategy, rank, size):
    """They get an exchange of their own with the optimizer that comes with them; what was there
    stays as it is.
    """

    def build(embedding_scope, session):
        t = two(embedding_scope)
        ids = tf.constant([1, 8, 3])
        a = tf.nn.embedding_lookup(t["a"], ids)
        one = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.square(a)))
        unused = tf.nn.embedding_lookup(t["b"], ids)
        session.run(tf.global_variables_initializer())
        session.run(one)
        b = [tf.nn.embedding_lookup(t["b"], (ids + i) % ROWS) for i in range(2)]
        optimizer = tf.train.AdagradOptimizer(0.1)
        other = optimizer.minimize(
            tf.reduce_mean(tf.square(b[0] + b[1])) + tf.reduce_mean(a**3) + tf.reduce_mean(unused)
        )
        session.run(tf.variables_initializer(optimizer.variables()))
        for train in (other, one, other):
            session.run(train)
        return session.run(rows_of(t))

    with tf.Graph().as_default(), tf.Session() as session:
        want = build(contextlib.nullcontext, session)
    with strategy.scope(), tf.Graph().as_default(), tf.Session() as session:
        got = build(strategy.embedding_scope, session)
    same(got, want)


def test_grouping_that_is_switched_on_after_a_session_has_run(strategy, rank, size):
    """What ran ungrouped stays so: TensorFlow takes no change of it."""
    with strategy.scope(), tf.Graph().as_default():
        t = two(strategy.embedding_scope)
        rows = {name: tf.nn.embedding_lookup(table_, [1, 8, rank]) for name, table_ in t.items()}
        with tf.Session() as session:
            with strategy.scope(grouping=False):
                session.run(tf.global_variables_initializer())
                session.run(rows)
            train = tf.train.GradientDescentOptimizer(1.0).minimize(
                sum(tf.reduce_sum(row) for row in rows.values())
            )
            session.run(train)
            got = session.run(rows)
            assert exchanged(session, train) == COLLECTIVES.get(size, (6, 0, 1))
    for name, dim in (("a", 3), ("b", 4)):
        want = values(name, dim)
        want[[1, 8]] -= 1.0
        np.add.at(want, list(range(size)), -1.0 / size)
        np.testing.assert_allclose(got[name], want[[1, 8, rank]], rtol=1e-5, atol=1e-5)


# ---- Order within a run


@pytest.mark.parametrize("dtype", [tf.int64, tf.int32])
def test_a_lookup_under_control_dependencies_sees_the_value_after(strategy, rank, size, dtype):
    """Of an update in the same run, while the other lookups see the value before."""
    with strategy.scope(), tf.Graph().as_default():
        t = two(strategy.embedding_scope)
        ids = tf.placeholder(dtype, [None])
        before = {name: tf.nn.embedding_lookup(table_, ids) for name, table_ in t.items()}
        with tf.control_dependencies(list(before.values())):
            train = tf.train.GradientDescentOptimizer(1.0).minimize(
                sum(tf.reduce_sum(row) for row in before.values())
            )
        with tf.control_dependencies([train]):
            after = {name: tf.nn.embedding_lookup(table_, ids) for name, table_ in t.items()}
            pair = tf.SparseTensor([[0, 0], [0, 1]], tf.cast(ids[:2], tf.int64), [1, 2])
            pooled = tf.nn.embedding_lookup_sparse(t["a"], pair, None, combiner="sum")
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for step in range(4):
                got = session.run([before, after, pooled], {ids: [0, 3, 8]})
                for name, dim in (("a", 3), ("b", 4)):
                    row = values(name, dim)[[0, 3, 8]] - step
                    np.testing.assert_allclose(got[0][name], row, rtol=1e-5, atol=1e-5)
                    np.testing.assert_allclose(got[1][name], row - 1.0, rtol=1e-5, atol=1e-5)
                np.testing.assert_allclose(
                    got[2][0], (values("a", 3)[[0, 3]] - step - 1.0).sum(0), rtol=1e-5, atol=1e-5
                )


def test_ids_that_are_read_after_an_assignment(strategy, rank, size):
    with strategy.scope(), tf.Graph().as_default():
        t = two(strategy.embedding_scope)
        counter = tf.get_variable(
            "counter", [], tf.int64, initializer=tf.zeros_initializer(), trainable=False
        )
        other = tf.nn.embedding_lookup(t["b"], [rank])
        with tf.control_dependencies([counter.assign_add(1)]):
            rows = tf.nn.embedding_lookup(t["a"], counter.read_value()[None])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for step in (1, 2, 3):
                got = session.run([rows, other])
                np.testing.assert_allclose(got[0][0], values("a", 3)[step], rtol=1e-6)
                np.testing.assert_allclose(got[1][0], values("b", 4)[rank], rtol=1e-6)


# ---- Copies of a graph


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("way", ["graph_def", "meta_graph"])
def test_an_imported_graph_gives_right_numbers_or_a_clear_error(strategy, rank, size, way, trained):
    """A copy has none of what the ranks agree on: with several of them it says so, before anything
    is exchanged.
    """
    with strategy.scope(), tf.Graph().as_default() as graph:
        t = two(strategy.embedding_scope)
        rows = {
            name: tf.nn.embedding_lookup(table_, [1, 8], name=f"rows_{name}")
            for name, table_ in t.items()
        }
        if trained:
            tf.train.GradientDescentOptimizer(0.1).minimize(
                sum(tf.reduce_sum(row) for row in rows.values())
            )
        init = tf.global_variables_initializer().name
        proto = tf.train.export_meta_graph()
        with tf.Session() as session:
            session.run(init)
            session.run(rows)
        proto_after = graph.as_graph_def()
    with strategy.scope(), tf.Graph().as_default() as copy:
        if way == "meta_graph":
            tf.train.import_meta_graph(proto)
        else:
            tf.import_graph_def(proto_after, name="")
        with tf.Session() as session:
            session.run(init)
            fetches = {name: copy.get_tensor_by_name(f"rows_{name}:0") for name in t}
            if size == 1:
                got = session.run(fetches)
                same(got, {"a": values("a", 3)[[1, 8]], "b": values("b", 4)[[1, 8]]})
            else:
                with pytest.raises(
                    tf.errors.InvalidArgumentError, match="no session of strategy.scope"
                ):
                    session.run(fetches)


# ---- Outside of scope()


@pytest.mark.ranks(1)
def test_one_rank_outside_of_scope_takes_no_input_that_a_run_does_not_need(strategy, rank, size):
    """Nothing feeds the lookups of a group that a run leaves out: they share no group there."""
    with strategy.scope(), tf.Graph().as_default() as graph:
        t = two(strategy.embedding_scope)
        batch = tf.data.make_one_shot_iterator(tf.data.Dataset.range(6).batch(2)).get_next()
        fed, drawn = (
            tf.placeholder(tf.int64, [None]),
            tf.random.uniform([2], 0, 9, tf.int64, seed=1),
        )
        ids = {"batch": batch, "fed": fed, "drawn": drawn}
        rows = {name: tf.nn.embedding_lookup(t["a"], x) for name, x in ids.items()}
        both = tf.nn.embedding_lookup(t["b"], batch + 1)
        loss = tf.reduce_sum(tf.concat(list(rows.values()), 0)) + tf.reduce_sum(both)
        train = tf.train.GradientDescentOptimizer(0.0).minimize(loss)
        start = tf.global_variables_initializer()
    with tf.Session(graph=graph) as session:
        if size > 1:
            with pytest.raises(
                tf.errors.InvalidArgumentError, match="no session of strategy.scope"
            ):
                session.run(rows["batch"])
            return
        session.run(start)
        np.testing.assert_array_equal(session.run(rows["batch"]), values("a", 3)[[0, 1]])
        np.testing.assert_array_equal(session.run(rows["fed"], {fed: [8]}), values("a", 3)[[8]])
        np.testing.assert_array_equal(session.run(both), values("b", 4)[[3, 4]])
        session.run(train, {fed: [8]})
        with pytest.raises(tf.errors.OutOfRangeError):
            session.run(both)
    drawings = []
    for run_between in (False, True):
        with tf.Session(graph=graph) as session:
            session.run(start)
            drawings.append(session.run(drawn).tolist())
            if run_between:
                session.run(rows["fed"], {fed: [8]})
            drawings[-1] += session.run(drawn).tolist()
    assert drawings[0] == drawings[1]
