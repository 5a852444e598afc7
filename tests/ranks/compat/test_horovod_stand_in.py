"""What stands in for Horovod gives the numbers of Horovod itself, gradients included."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.compat.horovod_stand_in import modules, process
from tests.ranks import reference

pytestmark = [pytest.mark.either_backend, pytest.mark.ranks(1, 2, 3)]
TYPES = ("uint8", "int8", "int32", "int64", "float16", "float32", "float64")
FLOATS = ("float16", "float32", "float64")


@pytest.fixture(scope="module")
def ours():
    stand_in = modules.Module("horovod.tensorflow")
    stand_in.init()
    yield stand_in
    stand_in.shutdown()


def values(rank, dtype, shape=(3, 2)):
    """Returns numbers of this rank; in floating-point types, with a fraction."""
    drawn = np.random.default_rng([rank, 5]).integers(-9, 9, shape)
    return (drawn if np.dtype(dtype).kind != "f" else drawn / 4).astype(dtype)


def run(build):
    """Returns what a graph's tensors are, and their gradients by the placeholder's value."""
    with tf.Graph().as_default(), tf.Session() as session:
        fetches, feeds = build()
        session.run(tf.global_variables_initializer())
        return session.run(fetches, feeds)


def same(ours, build, rtol=0.0):
    """Asserts that `build(module)` computes the same by Horovod and by the stand-in.

    `rtol` allows for sums of three ranks in another order, and factors that are rounded apart.
    """
    want, found = run(lambda: build(hvd)), run(lambda: build(ours))
    tf.nest.map_structure(
        lambda w, f: np.testing.assert_allclose(f, w, rtol=rtol, atol=rtol), want, found
    )
    assert [x.dtype for x in tf.nest.flatten(found)] == [x.dtype for x in tf.nest.flatten(want)]
    return found


def with_gradient(out, x, weights):
    """Returns a result and the gradient of its weighted sum by `x`, if its type has one."""
    if not out.dtype.is_floating:
        return out, out
    return out, tf.gradients(tf.reduce_sum(out * tf.cast(weights, out.dtype)), x)[0]


def near(dtype, size):
    """Returns the tolerance: none where a sum has one order."""
    if size < 3 or np.dtype(dtype).kind != "f":
        return 0.0
    return {"float16": 4e-3, "float32": 1e-6, "float64": 1e-14}[dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("op", ["Average", "Sum", "Min", "Max", "Product"])
def test_allreduce(ours, rank, size, dtype, op):
    if op not in ("Average", "Sum") and dtype in ("uint8", "int8", "float16"):
        return  # Horovod's Gloo doesn't have all of these.

    def build(module):
        x = tf.placeholder(dtype, [None, 2])
        out = module.allreduce(x, op=getattr(module, op))
        return with_gradient(out, x, rank + 1), {x: values(rank, dtype)}

    same(ours, build, near(dtype, size))


@pytest.mark.parametrize("dtype", ["int32", *FLOATS])
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_scales(ours, rank, size, dtype, op):
    def build(module):
        x = tf.placeholder(dtype, [3, 2])
        out = module.allreduce(x, op=getattr(module, op), prescale_factor=0.5, postscale_factor=3.0)
        return with_gradient(out, x, rank + 1), {x: values(rank, dtype)}

    same(ours, build, near(dtype, size))


@pytest.mark.parametrize("dtype", ["bool", *TYPES])
def test_allgather_of_ragged_rows(ours, rank, size, dtype):
    def build(module):
        x = tf.placeholder(dtype, [None, 2])
        rows = values(rank, "int8" if dtype == "bool" else dtype, (rank % 2 * 3, 2)).astype(dtype)
        out = module.allgather(x)
        weights = tf.reshape(tf.range(tf.size(out)), tf.shape(out)) * (rank + 1)
        return with_gradient(out, x, weights), {x: rows}

    same(ours, build, near("float16" if dtype == "bool" else dtype, size))


@pytest.mark.parametrize("dtype", ["bool", *TYPES])
@pytest.mark.parametrize("root", ["first", "last"])
def test_broadcast(ours, rank, size, dtype, root):
    def build(module):
        # Of no known shape: else TensorFlow takes Horovod's `gradient * 0`, on other ranks than the
        # root, for a constant, and leaves out the allreduce for which the root waits.
        x = tf.placeholder(dtype, [None, 2])
        out = module.broadcast(x, {"first": 0, "last": size - 1}[root])
        return with_gradient(out, x, rank + 1), {x: values(rank, "int8").astype(dtype)}

    same(ours, build, near("float16" if dtype == "bool" else dtype, size))


def test_a_broadcast_of_a_known_shape(ours, rank, size):
    """Without other ranks' part in the gradient's mean the root would wait for ever."""

    def build():
        x = tf.placeholder("float32", [3, 2])
        out = ours.broadcast(x, 0)
        gradient = tf.gradients(tf.reduce_sum(out * float(rank + 1)), x)[0]
        return [out, gradient], {x: np.full((3, 2), rank + 1.0)}

    value, gradient = run(build)
    np.testing.assert_array_equal(value, np.ones((3, 2)))
    mean = np.mean(np.arange(size) + 1)
    np.testing.assert_allclose(gradient, np.full((3, 2), mean if rank == 0 else 0), rtol=1e-6)


def test_groups(ours, rank, size):
    def build(module):
        x = tf.placeholder("float32", [3, 2])
        summed = module.grouped_allreduce([x, x[:1] * 2, x[0, 0]], op=module.Sum)
        gathered = module.grouped_allgather([x[: rank + 1], x[:, :1]])
        loss = sum(tf.reduce_sum(out) for out in [*summed, *gathered])
        return [summed, gathered, tf.gradients(loss, x)], {x: values(rank, "float32")}

    same(ours, build, near("float32", size))


def test_slices(ours, rank, size):
    """Their allreduce is an allgather of rows and numbers of rows; a mean divides the rows."""

    def build(module):
        x = tf.placeholder("float32", [None, 2])
        slices = tf.IndexedSlices(x, tf.range(rank + 1), dense_shape=[9, 2])
        outs = [module.allreduce(slices, op=op) for op in (module.Average, module.Sum)]
        pairs = [(out.values, out.indices) for out in outs]
        return pairs, {x: values(rank, "float32", (rank + 1, 2))}

    same(ours, build, near("float32", size))


def test_compression(ours, rank, size):
    def build(module):
        x = tf.placeholder("float32", [3, 2])
        out = module.allreduce(x / 3, compression=module.Compression.fp16)
        return out, {x: values(rank, "float32")}

    same(ours, build, near("float16", size))


def test_constants_are_reduced_in_the_run(ours, rank, size):
    """TensorFlow computes what depends on constants alone once, at another time on each rank."""

    def build(module):
        return [module.allreduce(tf.constant([1.0])), module.allgather(tf.zeros([0, 2]))], {}

    found = run(lambda: build(ours))
    np.testing.assert_array_equal(found[0], [1.0])
    assert found[1].shape == (0, 2)


def test_order_does_not_matter(ours, rank, size):
    """Ranks start ten allreduces in different orders, ten times."""
    with tf.Graph().as_default(), tf.Session() as session:
        fed = tf.placeholder("float32", [10])
        sums = [ours.allreduce(fed[i], op=ours.Sum, name=f"sum{i}") for i in range(10)]
        for turn in range(10):
            order = np.random.default_rng([rank, turn]).permutation(10)
            for i in order[:5] if size == 1 else ():
                session.run(sums[i], {fed: np.arange(10.0)})
            started = [sums[i] for i in order]
            found = session.run(started, {fed: np.arange(10.0) + turn + rank})
            want = size * (order + turn) + size * (size - 1) / 2
            np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("case", ["shape", "rank", "type", "op", "scale", "kind"])
def test_ranks_that_do_not_do_the_same_are_told(ours, rank, size, case):
    if size == 1:
        return
    other = rank == size - 1
    calls = {
        "shape": lambda: ours.allreduce(tf.zeros([2, 3] if other else [3, 2]), name="it"),
        "rank": lambda: ours.broadcast(tf.zeros([6] if other else [3, 2]), 0, name="it"),
        "type": lambda: ours.allgather(tf.zeros([2], "int32" if other else "float32"), name="it"),
        "op": lambda: ours.allreduce(
            tf.zeros([2]), op=ours.Sum if other else ours.Average, name="it"
        ),
        "scale": lambda: ours.allreduce(
            tf.zeros([2]), prescale_factor=0.5 if other else 2.0, name="it"
        ),
        "kind": lambda: (
            ours.allgather(tf.zeros([2]), name="it")
            if other
            else ours.allreduce(tf.zeros([2]), name="it")
        ),
    }
    with tf.Graph().as_default(), tf.Session() as session:
        with pytest.raises(tf.errors.InvalidArgumentError, match="do not call the same at hvd.it:"):
            session.run(calls[case]())


OPTIMIZERS = {
    "plain": {},
    "dense": {"sparse_as_dense": True},
    "sums": {"op": hvd.Sum},
    # Horovod takes it for matrices only.
    "divided": {"gradient_predivide_factor": 2.0, "sparse_as_dense": True},
    "groups": {"groups": 2},
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_optimizers(ours, rank, size, case):
    """Variables that start as rank 0's take Horovod's steps; one has no gradient."""

    def build(module):
        table = tf.get_variable("t", initializer=reference.table_values(9, 3, rank))
        weights = tf.get_variable("w", initializer=reference.table_values(3, 2, rank))
        tf.get_variable("unused", [2])
        ids = tf.placeholder("int64", [3])
        rows = tf.nn.embedding_lookup(table, ids)
        loss = tf.reduce_mean(tf.square(tf.matmul(rows, weights) - rank))
        # Momentum also moves the rows that have no gradient if the table's is dense.
        momentum = tf.train.MomentumOptimizer(0.3, 0.9)
        inner = momentum if case == "dense" else tf.train.AdagradOptimizer(0.3)
        optimizer = module.DistributedOptimizer(inner, **OPTIMIZERS[case])
        train = optimizer.minimize(loss)
        start = module.broadcast_global_variables(size - 1)
        return ids, loss, train, start, table, weights, optimizer

    outcomes = []
    for module in (hvd, ours):
        with tf.Graph().as_default(), tf.Session() as session:
            ids, loss, train, start, *variables, optimizer = build(module)
            session.run(tf.global_variables_initializer())
            session.run(start)
            fed = [{ids: [step, rank + 1, rank + 1]} for step in range(3)]
            losses = [session.run([loss, train], feeds)[0] for feeds in fed]
            outcomes.append([losses, *session.run(variables)])
            assert optimizer.get_slot_names() == ["momentum" if case == "dense" else "accumulator"]
    for want, found in zip(*outcomes):
        np.testing.assert_allclose(found, want, rtol=2e-6 if size > 2 or case == "plain" else 0)


def test_a_hook_gives_all_ranks_the_variables_of_one(ours, rank, size):
    with tf.Graph().as_default():
        v = tf.get_variable("v", initializer=[rank + 1.0, 2.0])
        flag = tf.get_variable("flag", initializer=rank == 0)
        hook = ours.BroadcastGlobalVariablesHook(size - 1)
        with tf.train.MonitoredTrainingSession(hooks=[hook]) as session:
            np.testing.assert_array_equal(session.run(v), [size, 2.0])
            assert session.run(flag) == (size == 1)


def test_inside_scope_nothing_is_reduced_twice(ours, strategy, rank, size):
    """Tables and gradients are left alone; a script's own collective waits for the agreement."""
    x = np.arange(6 * size, dtype=np.float32).reshape(-1, 3)
    ids = np.arange(2 * size) % 5

    def build(wrap, reduce, start):
        def made(embedding_scope):
            with embedding_scope():
                table = reference.table("t", 5, 3)
            weights = tf.get_variable("w", initializer=reference.table_values(3, 1, 1))
            fed = {"x": tf.placeholder(tf.float32, [None, 3]), "ids": tf.placeholder(tf.int64)}
            rows = tf.nn.embedding_lookup(table, tf.reshape(fed["ids"], [-1])) * fed["x"]
            loss = tf.reduce_mean(tf.square(tf.matmul(rows, weights)))
            train = wrap(tf.train.AdagradOptimizer(0.3)).minimize(loss)
            out = {"loss": reduce(loss), "train": train, "w": weights.read_value(), "s": start()}
            return {**out, "rows": tf.nn.embedding_lookup(table, np.arange(5))}, fed

        return made

    step, after = (["loss", "train"], {"x": x, "ids": ids}), (["w", "rows"], {})
    runs = [(["s"], {}), step, step, after]
    want = reference.plain(build(lambda o: o, tf.identity, tf.no_op), runs)
    own = {name: reference.part(value, rank, size) for name, value in step[1].items()}
    with strategy.scope():
        found = reference.sharded(
            strategy,
            build(
                ours.DistributedOptimizer,
                ours.allreduce,
                lambda: ours.broadcast_global_variables(0),
            ),
            [runs[0], (step[0], own), (step[0], own), after],
        )
    for got, expected in zip(found[1:], want[1:]):
        for name in set(expected) - {"train"}:
            np.testing.assert_allclose(got[name], expected[name], rtol=2e-5)


def test_refusals(ours, size):
    for what, call in {
        "backward_passes_per_step": lambda: ours.DistributedOptimizer(
            tf.train.AdagradOptimizer(0.3), backward_passes_per_step=2
        ),
        "process_set": lambda: ours.allreduce(tf.constant(1.0), process_set=object()),
        "Adasum": lambda: ours.allreduce(tf.constant(1.0), op=ours.Adasum),
        "process_sets": lambda: ours.init(process_sets=[]),
    }.items():
        with tf.Graph().as_default():
            with pytest.raises(NotImplementedError, match=f"{what}.*collective build-horovod"):
                call()
    with pytest.raises(AttributeError, match="horovod.tensorflow.alltoall needs Horovod itself"):
        ours.alltoall(tf.constant(1.0))
    with pytest.raises(RuntimeError, match=r"in eager code outside of scope\(\) needs Horovod"):
        ours.allreduce(tf.constant(1.0))
    assert (ours.size(), ours.rank()) == (hvd.size(), hvd.rank())
    for name in ("local_rank", "local_size", "cross_size", "is_initialized", "is_homogeneous"):
        assert getattr(ours, name)() == getattr(hvd, name)(), name
    for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product"):
        assert getattr(ours, name) == getattr(hvd, name), name
    process.shutdown()
    with pytest.raises(ValueError, match="not been initialized"):
        ours.rank()
    ours.init()
