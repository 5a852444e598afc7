"""SparseOperationKit's variables show a rank what they show it there, and train as there."""

from datetime import datetime, timezone

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.compat.names.sok import SOK
from collective.coordination import barrier
from collective.errors import RankError
from tests.ranks import grouped, reference

pytestmark = pytest.mark.either_backend
NAMES = {name.theirs.removeprefix("sok."): name for name in SOK.names}
V, D = 7, 2
WHOLE = np.arange(V * D, dtype=np.float32).reshape(V, D)


def sok(name, /, *args, **kwargs):
    """Calls what a script finds under a name."""
    return NAMES[name].resolve()(*args, **kwargs)


def started():
    """Returns a session in which all variables are initialized."""
    session = tf.Session()
    session.run(tf.global_variables_initializer())
    return session


def test_a_static_variable_is_a_ranks_part(strategy, rank, size):
    mine = WHOLE[rank::size]
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        v = sok("Variable", WHOLE)
        assert isinstance(v, NAMES["DistributedVariable"].resolve())
        assert v.shape.as_list() == v.get_shape().as_list() == list(mine.shape)
        assert (v.global_shape, v.num_gpus, v.target_gpu) == ((V, D), size, -1)
        rows = sok("all2all_dense_embedding", v, tf.range(V))
        both = v.assign(v.read_value() * 2), sok("lookup_sparse", v, tf.sparse.eye(V, V, tf.int64))
        with started() as session:
            for value in (v.eval(session), session.run(v), session.run(tf.identity(v))):
                np.testing.assert_array_equal(value, mine)
            np.testing.assert_array_equal(session.run(rows), WHOLE)
            np.testing.assert_array_equal(session.run(both[0]), mine * 2)
            np.testing.assert_array_equal(session.run(rows), WHOLE * 2)
            v.load(mine, session)
            np.testing.assert_array_equal(session.run(both[1]), np.tile(WHOLE[1], (V, 1)))
        if size > 1:
            for look_up in (tf.nn.embedding_lookup, tf.gather):
                with pytest.raises(NotImplementedError, match="sok.all2all_dense_embedding"):
                    look_up(v, [0])


def test_a_localized_variable_is_one_ranks(strategy, rank, size):
    owner = size - 1
    mine = WHOLE if rank == owner else WHOLE[:0]
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        v = sok("Variable", WHOLE, mode=f"localized:{owner}")
        assert isinstance(v, NAMES["LocalizedVariable"].resolve())
        assert v.shape.as_list() == list(mine.shape) and v.target_gpu == owner
        rows = sok("all2all_dense_embedding", v, tf.range(V))
        doubled = v.assign(v.read_value() * 2)
        with started() as session:
            for value in (v.eval(session), session.run(v), session.run(tf.identity(v))):
                np.testing.assert_array_equal(value, mine)
            np.testing.assert_array_equal(session.run(doubled), mine * 2)
            np.testing.assert_array_equal(session.run(rows), WHOLE * 2)
        with pytest.raises(ValueError, match=f"localized:{size}'.*ranks 0 to {owner} only"):
            sok("Variable", WHOLE, mode=f"localized:{size}")


def test_a_localized_dynamic_variable_is_looked_up_by_all_ranks(strategy, rank, size):
    """One rank has all rows. In SOK it alone may call TensorFlow's lookups."""
    owner = size - 1
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        v = sok("DynamicVariable", D, initializer="13", mode=f"localized:{owner}")
        assert v.target_gpu == owner == v.placement.holder
        assert sok("DynamicVariable", D, mode="distributed").placement.holder is None
        keys = np.arange(V) + 7 * rank
        rows = sok("all2all_dense_embedding", v, keys)
        exported = sok("export", v)
        with started() as session:
            assert (session.run(rows) == 13).all()
            count = (V + 7 * owner) * (rank == owner)
            assert session.run(v.size).tolist() == [count, D]
            got, rows_here = session.run(exported)
            assert got.tolist() == list(range(count)) and (rows_here == 13).all()
        for look_up in (tf.nn.embedding_lookup, tf.gather):
            if size == 1:
                look_up(v, [0])
                continue
            wanted = f"rank {owner} looks .*Remove `if hvd.rank.. == {owner}`.*sok.lookup_sparse"
            with pytest.raises(NotImplementedError, match=wanted):
                look_up(v, [0])
        for mode, words in (
            ("localized:x", "'distributed' or 'localized:k'"),
            (f"localized:{size}", f"ranks 0 to {owner} only"),
        ):
            with pytest.raises(ValueError, match=f"sok.DynamicVariable.mode='{mode}'.: .*{words}"):
                sok("DynamicVariable", D, mode=mode)


@pytest.mark.parametrize("kind", ["Variable", "DynamicVariable"])
def test_a_localized_variable_that_one_rank_makes(strategy, rank, size, kind):
    """In SOK it may be: all its rows are there."""
    owner = size - 1
    mode = f"localized:{owner}"
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        tf.get_variable("before", [], initializer=tf.ones_initializer())
        sok("Variable", WHOLE, name="of_all")
        if rank == owner:
            sok(kind, WHOLE if kind == "Variable" else D, name="of_one", mode=mode)
        initialize = tf.global_variables_initializer()
        with tf.Session() as session:
            if size == 1:
                session.run(initialize)
                return
            with pytest.raises(RankError) as raised:
                session.run(initialize)
    assert (
        f"First difference: 'initialize of_one:0, whole on rank {owner}, made by "
        f"sok.{kind}(mode={mode!r}), which all ranks make' is used by rank {owner} "
        "only. Every rank must make and initialize the same variables: remove conditions such as "
        f"`if rank == {owner}:` around this one."
    ) in str(raised.value)
    assert "a summary" not in str(raised.value)


def test_a_localized_hybrid_variable_is_read_by_sok(strategy, rank, size):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        mode = f"localized:{size - 1}"
        v = sok("DynamicVariable", D, initializer="13", var_type="hybrid", mode=mode)
        rows, _, _ = sok("sparse_read_and_evict", v, tf.range(V, dtype=tf.int64))
        with started() as session:
            assert (session.run(rows) == 13).all()


@pytest.mark.parametrize("var_type", ["hbm", "hybrid"])
def test_every_lookup_gives_keys_their_rows(strategy, rank, size, var_type):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        v = sok("DynamicVariable", dimension=D, initializer="13", var_type=var_type)
        other = tf.get_variable("ev", [None, D], initializer=tf.ones_initializer())
        keys = tf.constant([3, 2**40 + rank])
        found = [tf.nn.embedding_lookup(v, keys), tf.nn.embedding_lookup(other, keys)]
        exported, number = sok("export", v), v.size
        with started() as session:
            assert session.run(number).tolist() == [0, D]
            rows, unknown = session.run(found)
            assert (rows == 13).all() and not unknown.any()
            keys, rows = session.run(exported)
            assert session.run(number).tolist() == [len(keys), D] and (rows == 13).all()
            np.testing.assert_array_equal(session.run(v), rows)
    everyones = [each["keys"] for each in barrier.exchange(None, "keys", {"keys": keys.tolist()})]
    assert sorted(sum(everyones, [])) == [3, *range(2**40, 2**40 + size)]


def test_rows_are_assigned_and_exported(strategy, rank, size):
    """Each rank gives keys of its own, and all the key 0; the last of a key's rows stays."""
    own = np.array([0, 10 + rank, 10 + rank])
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        v = sok("DynamicVariable", dimension=D, var_type="hbm")
        assign = sok("assign", v, own, tf.constant([[1.0, 2], [5, 6], [3, 4 + rank]]))
        exported = sok("export", v)
        with started() as session:
            session.run(assign)
            keys, rows = session.run(exported)
    told = {"rows": {int(key): row.tolist() for key, row in zip(keys, rows)}}
    everyones = {}
    for each in barrier.exchange(None, "rows", told):
        everyones.update({int(key): row for key, row in each["rows"].items()})
    assert everyones == {0: [1, 2], **{10 + i: [3, 4 + i] for i in range(size)}}


OPTIMIZERS = {
    "descent": lambda: tf.train.GradientDescentOptimizer(0.5),
    "momentum": lambda: tf.train.MomentumOptimizer(0.5, 0.9),
    "adagrad": lambda: tf.train.AdagradOptimizer(0.5),
    "adadelta": lambda: tf.train.AdadeltaOptimizer(5.0),
    "keras sgd": lambda: tf.keras.optimizers.SGD(0.5),
    "keras momentum": lambda: tf.keras.optimizers.SGD(0.5, momentum=0.9),
    "keras nesterov": lambda: tf.keras.optimizers.SGD(0.5, momentum=0.9, nesterov=True),
    "keras adamax": lambda: tf.keras.optimizers.Adamax(0.5),
    "keras adadelta": lambda: tf.keras.optimizers.Adadelta(0.5),
    "keras adagrad": lambda: tf.keras.optimizers.Adagrad(0.5),
    "keras ftrl": lambda: tf.keras.optimizers.Ftrl(0.5, l1_regularization_strength=0.01),
}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_wrapped_optimizers(strategy, rank, size, name):
    """A dynamic variable and a replicated one are trained alike, by one optimizer object."""
    rng = np.random.default_rng(6)
    feeds = [{"ids": rng.integers(0, 9, (12, 2)), "scale": rng.normal(size=12)} for _ in range(4)]
    runs = [(["train", "rows"], feed) for feed in feeds]

    def build(embedding_scope, wrapped):
        p = {"ids": tf.placeholder(tf.int64, [None, 2]), "scale": tf.placeholder("float", [None])}
        optimizer = OPTIMIZERS[name]()
        whole = tf.get_variable("whole", [9, D], initializer=tf.ones_initializer())
        tables = [(whole, optimizer)]
        if wrapped:
            dynamic = sok("DynamicVariable", D, initializer="1", var_type="hbm")
            tables.append((dynamic, sok("OptimizerWrapper", optimizer)))
        train = []
        for table, its_optimizer in tables:
            rows = tf.nn.embedding_lookup(table, p["ids"])
            loss = tf.reduce_mean(tf.reduce_sum(rows, [1, 2]) * p["scale"])
            gradients = tf.gradients(loss, [table])
            train.append(its_optimizer.apply_gradients(zip(gradients, [table])))
        rows = [tf.nn.embedding_lookup(table, tf.range(9)) for table, _ in tables]
        return {"train": train, "rows": rows}, p

    mine = [
        (names, {key: reference.part(value, rank, size) for key, value in feed.items()})
        for names, feed in runs
    ]
    want = reference.plain(lambda scope: build(scope, False), [*runs, (["rows"], {})])
    got = reference.sharded(strategy, lambda scope: build(scope, True), [*mine, (["rows"], {})])
    (want,) = want[-1]["rows"]
    for rows in got[-1]["rows"]:
        grouped.same(rows, want, 1e-4, 1e-5)
    assert np.abs(want - 1).max() > 1e-3


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [tf.train.AdamOptimizer, tf.keras.optimizers.Adam])
def test_adam_moves_the_rows_of_a_batch(strategy, kind):
    """By Kingma and Ba's rule, of all steps; a row that a batch doesn't have stays."""
    steps, rate, beta1, beta2, epsilon = [[1, 2], [2], [2]], 0.1, 0.8, 0.9, 1e-6
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        v = sok("DynamicVariable", D, initializer="1", var_type="hbm")
        ids = tf.placeholder(tf.int64, [None])
        loss = tf.reduce_sum(tf.nn.embedding_lookup(v, ids))
        optimizer = sok("OptimizerWrapper", kind(rate, beta1, beta2, epsilon))
        train = optimizer.apply_gradients(zip(tf.gradients(loss, [v]), [v]))
        with started() as session:
            for batch in steps:
                session.run(train, {ids: batch})
            rows = session.run(tf.nn.embedding_lookup(v, ids), {ids: [1, 2]})
    want = np.ones(3)
    m, u = np.zeros(3), np.zeros(3)
    for t, batch in enumerate(steps, 1):
        m[batch] = beta1 * m[batch] + 1 - beta1
        u[batch] = beta2 * u[batch] + 1 - beta2
        corrected = rate * np.sqrt(1 - beta2**t) / (1 - beta1**t)
        want[batch] -= corrected * m[batch] / (np.sqrt(u[batch]) + epsilon)
    np.testing.assert_allclose(rows, np.tile(want[1:, None], D), rtol=1e-5)


@pytest.mark.matrix
def test_a_rate_that_is_a_variable(strategy):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        v = sok("Variable", np.ones([3, D], np.float32))
        loss = tf.reduce_sum(sok("all2all_dense_embedding", v, tf.constant([1])))
        optimizer = sok("SGD", lr=1.0)
        train = optimizer.apply_gradients(zip(tf.gradients(loss, [v]), [v]))
        with started() as session:
            session.run(optimizer.lr.assign(0.25))
            session.run(train)
            rows = session.run(sok("all2all_dense_embedding", v, tf.range(3)))
    np.testing.assert_allclose(rows[:, 0], [1, 0.75, 1])


@pytest.mark.matrix
def test_nothing_is_evicted(strategy, size):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        tuning = {"init_capacity": 2, "max_capacity": 2}
        v = sok("DynamicVariable", D, initializer="11", var_type="hybrid", **tuning)
        rows, keys, evicted = sok("sparse_read_and_evict", v, tf.range(5))
        train = sok("SGD", 1.0).apply_gradients([(tf.gradients(rows, [v])[0], v)])
        with started() as session:
            found = session.run([rows, keys, evicted, train])[:3]
            assert [x.shape for x in found] == [(5, D), (0,), (0, D)] and (found[0] == 11).all()
            assert (session.run(rows) == 10).all()
        with pytest.raises(TypeError, match="var_type='hybrid'"):
            sok("sparse_read_and_evict", sok("Variable", WHOLE), tf.range(5))


@pytest.mark.matrix
def test_what_was_looked_up_after_a_time(strategy, rank, size):
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        ids = tf.placeholder(tf.int64, [None])
        variables = [sok("DynamicVariable", D + i, initializer=str(i)) for i in range(2)]
        rows = [tf.nn.embedding_lookup(v, ids) for v in variables]
        gradients = tf.gradients([tf.reduce_sum(each) for each in rows], variables)
        optimizer = sok("OptimizerWrapper", tf.keras.optimizers.SGD(1.0))
        train = optimizer.apply_gradients(zip(gradients, variables))
        with started() as session:
            session.run(train, {ids: [1, 2, 100 + rank]})
            barrier.exchange(None, "first", {})  # Ranks share a clock.
            time = datetime.now(timezone.utc)
            barrier.exchange(None, "timed", {})
            session.run(train, {ids: [2, 10 + rank]})
            dump = NAMES["incremental_model_dump"].resolve()
            keys, rows = dump(variables, time, session)
            with session.as_default():
                assert dump(variables[1], [datetime.now()])[0][0].tolist() == []
                longer = dump(variables, [time, datetime(2020, 1, 1)])[0]
            with pytest.raises(ValueError, match="for each of 2 variables, not 3"):
                dump(variables, [time] * 3, session)
        with pytest.raises(ValueError, match="needs a session"):
            dump(variables, time)
        with pytest.raises(TypeError, match="var_type='hybrid'"):
            dump(sok("DynamicVariable", D, var_type="hbm"), time, session)
    for i, (keys_of, rows_of) in enumerate(zip(keys, rows)):
        # A gradient is of ones, and the mean over ranks: 2 was looked up by all, in both runs.
        want = {2: i - 2.0, **{10 + r: i - 1 / size for r in range(size)}}
        told = dict(zip(keys_of.tolist(), rows_of[:, 0]))
        assert told == pytest.approx(want, rel=1e-5) and rows_of.shape == (len(want), D + i)
    assert sorted(longer[1]) == [
        1,
        2,
        *(10 + r for r in range(size)),
        *(100 + r for r in range(size)),
    ]


@pytest.mark.matrix
@pytest.mark.parametrize("use_hashtable", [True, False])
def test_layers_of_the_first_api(strategy, rank, size, use_hashtable):
    """They are TensorFlow's lookups in a table whose rows are all 1 at first."""
    slots = {"slot_num": 2, "use_hashtable": use_hashtable, "embedding_initializer": "ones"}
    keys = np.array([[[1, 2, 3], [1, 1, 0]]])
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        pooled = sok("DistributedEmbedding", "Mean", 4, D, max_nnz=3, **slots)
        dense = sok("All2AllDenseEmbedding", 4, D, nnz_per_slot=3, **slots)
        any_number = sok("All2AllDenseEmbedding", 4, D, nnz_per_slot=1, dynamic_input=True, **slots)
        places = [[0, 0], [0, 1], [1, 0], [1, 1]]
        found = [
            pooled(tf.SparseTensor(places, [1, 2, 3, 3], [4, 3])),
            dense(tf.constant(keys)),
            any_number(tf.constant([3, 1, 3])),
        ]
        shape = [None if use_hashtable else 4 * size, D]
        layers = pooled, dense, any_number
        for layer in layers:
            assert layer.embedding_variable.shape.as_list() == shape
            assert sok("split_embedding_variable_from_others", layer.trainable_variables) == (
                [layer.embedding_variable],
                [],
            )
        loss = tf.add_n([tf.reduce_sum(each) for each in found])
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with started() as session:
            first = session.run([found, train])[0]
            second = session.run(found)
    for rows, ids in zip(first[1:], (keys, [3, 1, 3])):
        assert rows.shape == (*np.shape(ids), D) and (rows == 1).all()
    (pooled_first, *_), (pooled_rows, dense_rows, any_rows) = first, second
    np.testing.assert_array_equal(pooled_first[..., 0], [[1, 1], [0, 0]])
    np.testing.assert_allclose(pooled_rows[..., 0], [[0.95, 0.9], [0, 0]], rtol=1e-6)
    counts = np.bincount(keys.ravel())
    np.testing.assert_allclose(dense_rows[..., 0], 1 - 0.1 * counts[keys], rtol=1e-6)
    np.testing.assert_allclose(any_rows[..., 0], [0.8, 0.9, 0.8], rtol=1e-6)
