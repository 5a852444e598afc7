"""SparseOperationKit's variables train in TensorFlow 2 as one process does with whole batches.

As there, gradients of variables are the sum over ranks, and a script reduces dense ones itself.
"""

import contextlib
from datetime import datetime, timezone

import numpy as np
import pytest
import tensorflow as tf2

from collective.compat.horovod_stand_in import modules
from collective.compat.names.sok import SOK
from collective.coordination import barrier
from collective.errors import TableError
from collective.tensorflow_internals.keras import package as keras

pytestmark = [pytest.mark.backends("hb", "sok"), pytest.mark.ranks(1, 2, 3)]
NAMES = {name.theirs.removeprefix("sok."): name for name in SOK.names}
LEGACY = keras.optimizers.legacy
SAMPLES, STEPS, V = 12, 4, 11
DIMENSIONS, COMBINERS = (4, 3, 2), ("mean", "sum", "mean")
_random = np.random.default_rng(7)
WHOLE = [_random.normal(size=(V, dim)).astype(np.float32) for dim in DIMENSIONS[:2]]
WHOLE.append(np.full((V, DIMENSIONS[2]), 0.5, np.float32))


def sok(name, /, *args, **kwargs):
    """Calls what a script finds under a name."""
    return NAMES[name].resolve()(*args, **kwargs)


@pytest.fixture
def hvd():
    stand_in = modules.Module("horovod.tensorflow")
    stand_in.init()
    yield stand_in
    stand_in.shutdown()


def in_scope(strategy):
    return strategy.scope(embedding_gradients="sum", plan="quiet")


def variables(size):
    """Makes one variable of each kind, all with the rows of WHOLE."""
    return [
        sok("Variable", WHOLE[0]),
        sok("Variable", WHOLE[1], mode=f"localized:{size - 1}"),
        sok("DynamicVariable", DIMENSIONS[2], initializer="0.5", var_type="hybrid"),
    ]


def batches():
    """Draws ids and weights of each table, ragged with 0 to 3 ids a sample, and factors [B]."""
    random, drawn = np.random.default_rng(1), []
    for _ in range(STEPS):
        ids, weights = [], []
        for _ in DIMENSIONS:
            lengths = random.integers(0, 4, SAMPLES)
            lengths[-1] = 1  # Plain TensorFlow leaves out samples after the last id.
            total = lengths.sum()
            ids.append(tf2.RaggedTensor.from_row_lengths(random.integers(0, V, total), lengths))
            weights.append(
                ids[-1].with_values(tf2.constant(random.uniform(0.5, 2, total), "float"))
            )
        drawn.append((ids, weights, tf2.constant(random.uniform(0.1, 1, SAMPLES), "float")))
    return drawn


def part(batch, rank, size):
    own = slice(SAMPLES // size * rank, SAMPLES // size * (rank + 1))
    return tf2.nest.map_structure(lambda x: x[own], batch, expand_composites=False)


def look_up_plainly(tables, ids, weights):
    return [
        tf2.nn.embedding_lookup_sparse(
            table, each.to_sparse(), None if weights is None else w.to_sparse(), combiner=combiner
        )
        for table, each, w, combiner in zip(tables, ids, weights or tables, COMBINERS)
    ]


def look_up(tables, ids, weights):
    return sok("lookup_sparse", tables, ids, weights, combiners=list(COMBINERS))


def step_of(dense, optimizers, look_up, weighted, reduce):
    """Returns a step of training by the sum of the samples' losses."""

    def step(tables, ids, weights, factors):
        with tf2.GradientTape() as tape:
            rows = look_up(tables, ids, weights if weighted else None)
            out = tf2.matmul(tf2.concat(rows, 1), dense)[:, 0]
            loss = tf2.reduce_sum(factors * out**2)
        of_tables, of_dense = tape.gradient(loss, [tables, [dense]])
        optimizers[0].apply_gradients(zip(of_tables, tables))
        optimizers[1].apply_gradients(zip(map(reduce, of_dense), [dense]))
        return reduce(loss)

    return step


def whole_rows(tables):
    return [sok("all2all_dense_embedding", table, tf2.range(V)).numpy() for table in tables]


OPTIMIZERS = {
    "legacy": lambda: LEGACY.Adagrad(0.1),
    "new": lambda: keras.optimizers.Adagrad(0.1),
    "momentum": lambda: LEGACY.SGD(0.002, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize(
    "kind, is_eager, weighted",
    [
        ("legacy", False, True),
        ("new", True, False),
        pytest.param("momentum", True, True, marks=pytest.mark.matrix),
        pytest.param("new", False, False, marks=pytest.mark.matrix),
    ],
)
def test_steps(strategy, hvd, rank, size, kind, is_eager, weighted):
    start = np.random.default_rng(5).normal(size=(sum(DIMENSIONS), 1)).astype(np.float32)
    plain, plain_dense = [tf2.Variable(each) for each in WHOLE], tf2.Variable(start)
    optimizers = OPTIMIZERS[kind](), OPTIMIZERS[kind]()
    step = step_of(plain_dense, optimizers, look_up_plainly, weighted, lambda x: x)
    want = [float(step(plain, *batch)) for batch in batches()]
    with in_scope(strategy):
        tables, dense = variables(size), tf2.Variable(start)
        optimizers = sok("OptimizerWrapper", OPTIMIZERS[kind]()), OPTIMIZERS[kind]()
        step = step_of(dense, optimizers, look_up, weighted, lambda x: hvd.allreduce(x, op=hvd.Sum))
        if not is_eager:
            step = tf2.function(step)
        got = [float(step(tables, *part(batch, rank, size))) for batch in batches()]
        rows = whole_rows(tables)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(dense, plain_dense, rtol=0, atol=1e-6)
    for own, whole, first in zip(rows, plain, WHOLE):
        np.testing.assert_allclose(own, whole, rtol=0, atol=1e-6)
        assert np.abs(own - first).max() > 0.01


@pytest.mark.either_backend
def test_a_function_that_gets_tables_is_one_for_each(strategy, rank, size):
    """TensorFlow traces a function once for variables of the same shape."""

    @tf2.function
    def look_up_and_double(table):
        rows = sok("all2all_dense_embedding", table, tf2.constant([1, 2 + rank]))
        return rows * 2

    with in_scope(strategy):
        tables = [sok("DynamicVariable", 2, initializer=str(n), var_type="hbm") for n in (3, 4, 3)]
        for table, value in zip(tables, (6, 8, 6)):
            np.testing.assert_array_equal(look_up_and_double(table), np.full((2, 2), value))
            assert len(sums(sok("export", table))) == 1 + size
        assert look_up_and_double.experimental_get_tracing_count() == len(tables)


@pytest.mark.either_backend
def test_a_function_trains_the_tables_that_it_gets(strategy, rank, size):
    """It updates nothing else: these alone tell that it trains."""
    with in_scope(strategy):
        tables = [sok("DynamicVariable", 2, initializer=str(n), var_type="hbm") for n in (3, 4)]
        optimizer = sok("SGD", lr=1.0)

        @tf2.function
        def step(tables):
            with tf2.GradientTape() as tape:
                ids = tf2.constant([1, 2 + rank])
                rows = [sok("all2all_dense_embedding", table, ids) for table in tables]
                loss = tf2.reduce_sum(rows)
            optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables))

        step(tables)
        for table, first in zip(tables, (3, 4)):
            want = {1: [first - size] * 2, **{2 + each: [first - 1] * 2 for each in range(size)}}
            assert sums(sok("export", table)) == want


@pytest.mark.either_backend
@pytest.mark.ranks(1)
def test_init_gives_scripts_legacy_optimizers(monkeypatch, size):
    """As there, unless the script says no; what they lack is that of the new ones."""
    new = tf2.keras.optimizers
    for module in (tf2, tf2.keras):
        monkeypatch.setattr(module, "optimizers", module.optimizers)
    monkeypatch.setattr("collective.compat.sok_functions.open_scope", lambda: None)
    sok("init", use_legacy_optimizer=False)
    assert tf2.keras.optimizers is new and tf2.keras.optimizers.Adam is not LEGACY.Adam
    with contextlib.ExitStack() as stack:
        if size > 1:  # each would train by itself
            stack.enter_context(pytest.raises(ValueError, match=f"{size} ranks here exchange"))
        sok("init", "single")
    for _ in range(2):
        sok("init")
        for optimizers in (tf2.optimizers, tf2.keras.optimizers):
            assert optimizers.Adam is optimizers.legacy.Adam is LEGACY.Adam
            assert optimizers.schedules is new.schedules


@pytest.mark.either_backend
@pytest.mark.parametrize("kind", [LEGACY.Adam, keras.optimizers.Adam])
def test_a_wrapped_optimizer_moves_the_rows_of_a_batch(strategy, rank, size, kind):
    """By Kingma and Ba's rule, of its own steps; a row that a batch doesn't have stays."""
    steps, rate, beta1, beta2, epsilon = [[1, 2], [2], [2]], 0.1, 0.8, 0.9, 1e-6
    with in_scope(strategy):
        v = sok("DynamicVariable", 2, initializer="1", var_type="hbm")
        optimizer = kind(0.5, beta1, beta2, epsilon)
        wrapped = sok("OptimizerWrapper", optimizer)
        other = tf2.Variable([1.0, 2.0])
        optimizer.apply_gradients([(tf2.constant([1.0, 1.0]), other)])
        optimizer.learning_rate.assign(rate)
        for batch in steps:
            with tf2.GradientTape() as tape:
                loss = tf2.reduce_sum(tf2.nn.embedding_lookup(v, batch)) / size
            wrapped.apply_gradients(zip(tape.gradient(loss, [v]), [v]))
        (rows,) = whole_rows([v])
        assert [int(each.iterations) for each in (optimizer, wrapped)] == [1, len(steps)]
    want = np.ones(3)
    m, u = np.zeros(3), np.zeros(3)
    for t, batch in enumerate(steps, 1):
        m[batch] = beta1 * m[batch] + 1 - beta1
        u[batch] = beta2 * u[batch] + 1 - beta2
        corrected = rate * np.sqrt(1 - beta2**t) / (1 - beta1**t)
        want[batch] -= corrected * m[batch] / (np.sqrt(u[batch]) + epsilon)
    np.testing.assert_allclose(rows[1:3], np.tile(want[1:, None], 2), rtol=1e-5)


def sums(rank_rows):
    """Returns the keys and rows of all ranks, by key."""
    keys, rows = rank_rows
    told = {"rows": {str(int(key)): row.tolist() for key, row in zip(keys, rows.numpy())}}
    everyones = [each["rows"] for each in barrier.exchange(None, "rows", told)]
    assert sum(map(len, everyones)) == len({key for each in everyones for key in each})
    return {int(key): row for each in everyones for key, row in each.items()}


@pytest.mark.either_backend
def test_a_rank_sees_its_part(strategy, rank, size):
    """One that reads or assigns it waits for no other rank."""
    owner = size - 1
    with in_scope(strategy):
        static, local, dynamic = made = variables(size)
        assert sok("filter_variables", [*made, tf2.Variable(1)])[0] == made
        own = WHOLE[0][rank::size]
        assert static.shape == own.shape
        np.testing.assert_array_equal(static, own)
        if rank == owner:
            static.assign(static * 2)
            np.testing.assert_array_equal(local, WHOLE[1])
            local.assign_add(tf2.ones(local.shape))
        else:
            assert local.shape == (0, DIMENSIONS[1])
        want = WHOLE[0].copy()
        want[owner::size] *= 2
        rows = whole_rows([static, local])
        np.testing.assert_array_equal(rows[0], want)
        np.testing.assert_array_equal(rows[1], WHOLE[1] + 1)
        keys = np.array([0, 10 + rank])
        sok("assign", dynamic, keys, tf2.constant([[1.0, 2], [3, 4 + rank]]))
        want = {0: [1, 2], **{10 + each: [3, 4 + each] for each in range(size)}}
        assert sums(sok("export", dynamic)) == want
        assert int(dynamic.size[0]) == len(sok("export", dynamic)[0])
        if size > 1:
            with pytest.raises(NotImplementedError, match="sok.all2all_dense_embedding"):
                tf2.nn.embedding_lookup(static, [0])
            for variable in (static, local):
                with pytest.raises(
                    TableError, match="made by sok.Variable, .* Save it by sok.dump"
                ):
                    tf2.train.Checkpoint(v=variable).save("unused")


@pytest.mark.either_backend
@pytest.mark.parametrize("kind", ["legacy", pytest.param("new", marks=pytest.mark.matrix)])
def test_a_dump_is_loaded(strategy, rank, size, folder, kind):
    """Also by an optimizer that hasn't made its slots; training goes on as if nothing was."""
    with in_scope(strategy):

        def train(tables, optimizer, batch):
            ids, _, factors = part(batch, rank, size)
            with tf2.GradientTape() as tape:
                rows = tf2.concat(look_up(tables, ids, None), 1)
                loss = tf2.reduce_sum(factors[:, None] * rows**2)
            optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables))

        first, second, third, _ = batches()
        tables, optimizer = variables(size), sok("OptimizerWrapper", OPTIMIZERS[kind]())
        for batch in (first, second):
            train(tables, optimizer, batch)
            sok("dump", folder, tables, optimizer)
        exported = sums(sok("export", tables[2]))
        if kind == "legacy":
            slot = optimizer.get_slot(tables[2], "accumulator")
            assert min(map(min, sums(sok("export", slot)).values())) >= 0.1
        train(tables, optimizer, third)
        want = whole_rows(tables)
        for table in tables[:2]:
            table.assign(tf2.zeros(table.shape))
        sok("assign", tables[2], [99], tf2.ones([1, DIMENSIONS[2]]))
        if kind == "legacy":
            optimizer = sok("OptimizerWrapper", OPTIMIZERS[kind]())
        sok("load", folder, tables, optimizer)
        assert sums(sok("export", tables[2])) == exported and int(optimizer.iterations) == 2
        train(tables, optimizer, third)
        for got, rows in zip(whole_rows(tables), want):
            np.testing.assert_allclose(got, rows, rtol=1e-6)
        with pytest.raises(FileNotFoundError, match="sok.dump has saved nothing there"):
            sok("load", f"{folder}/none", tables)


@pytest.mark.either_backend
@pytest.mark.matrix
def test_what_was_looked_up_after_a_time(strategy, rank, size):
    with in_scope(strategy):
        v = sok("DynamicVariable", 2, initializer="11", var_type="hybrid")
        optimizer = sok("SGD", lr=1.0)

        def train(keys):
            with tf2.GradientTape() as tape:
                rows, evicted, _ = sok("sparse_read_and_evict", v, tf2.constant(keys, tf2.int64))
                loss = tf2.reduce_sum(rows) / size
            optimizer.apply_gradients(zip(tape.gradient(loss, [v]), [v]))
            assert len(evicted) == 0

        train([1, 2, 100 + rank])
        barrier.exchange(None, "first", {})  # Ranks share a clock.
        time = datetime.now(timezone.utc)
        barrier.exchange(None, "timed", {})
        optimizer.lr.assign(2.0)
        train([2, 10 + rank])
        (keys,), (rows,) = sok("incremental_model_dump", v, time)
        want = {2: 8.0, **{10 + each: 11 - 2 / size for each in range(size)}}
        assert dict(zip(keys.tolist(), rows[:, 0])) == pytest.approx(want, rel=1e-6)
