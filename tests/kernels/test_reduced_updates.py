"""Updates that one operation makes with the sum of their gradients: bit for bit those of two."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from bag_exchange import Lookup, Simulation, Table, dense
from test_sparse_updates import CASES, Case, expected, start, values_of

from collective.ops.exchange import embedding_bag
from collective.ops.updates import reduced_updates

RANKS, RANK = 3, 1  # Ranks, and the one that updates.
SCALE = 0.3  # It is no power of two: sums are multiplied by it at their end.


@pytest.fixture(autouse=True)
def graph() -> Any:
    with tf.Graph().as_default() as made:
        yield made


def simulation(rng: np.random.Generator, dim: int, count: int = 40) -> Simulation:
    """Builds lookups in a table that is pooled by its owners, a dynamic one, and one of no ids."""
    keys = np.sort(rng.choice(1000, 30, replace=False)).astype(np.int64)
    tables = [
        Table(rng.normal(size=[50, dim])),
        Table(rng.normal(size=[30, dim]), keys),
        Table(rng.normal(size=[9, 3])),
    ]

    def ids(most: int, size: int = count) -> list[np.ndarray]:
        return [rng.integers(0, most, size) for _ in range(RANKS)]

    samples = [np.sort(rng.integers(0, 9, count)) for _ in range(RANKS)]
    weights = [rng.uniform(0.5, 2, count) for _ in range(RANKS)]
    return Simulation(
        tables,
        [
            Lookup(0, ids(50), "sum", samples, weights, by_owner=True),
            Lookup(0, ids(50)),
            Lookup(1, ids(30), "mean", samples),
            Lookup(2, ids(9, 0)),
        ],
        RANKS,
    )


def loss(outputs: Any) -> tf.Tensor:
    return tf.add_n([tf.reduce_sum(tf.sin(o)) for each in outputs for o in each])


def gradients_of(built: Simulation) -> list[tf.IndexedSlices]:
    """Returns the gradients of one rank's shards."""
    with embedding_bag.scaled(SCALE):
        gradients = tf.gradients(
            loss(built.outputs), [shards[RANK].handle for shards in built.shards]
        )
    return list(gradients)


def shards_of(case: Case, built: Simulation, seed: int) -> list[list[np.ndarray]]:
    """Returns the rank's shard and its slots for each table."""
    rng = np.random.default_rng(seed)
    return [
        start(case, len(numbers[RANK]), table.shape[1], rng)
        for numbers, table in zip(built.numbers, built.tables)
    ]


def copies(name: str, arrays: list[list[np.ndarray]]) -> list[list[tf.Variable]]:
    return [
        [
            tf.get_variable(f"{name}/{t}/{i}", initializer=array, use_resource=True)
            for i, array in enumerate(each)
        ]
        for t, each in enumerate(arrays)
    ]


def updates(case: Case, variables: Any, gradients: Any) -> list[tf.Operation]:
    numbers = [tf.constant(number, tf.float32) for number in case.numbers]
    return [
        case.update(*of_table, *numbers, g.values, g.indices)
        for of_table, g in zip(variables, gradients)
    ]


def kinds_upstream(operations: Any) -> list[str]:
    """Returns the types of the operations that sum or update."""
    reached, stack = set(operations), list(operations)
    while stack:
        op = stack.pop()
        new = {x.op for x in op.inputs}.union(op.control_inputs) - reached
        reached |= new
        stack += new
    return sorted(
        x.type for x in reached if x.type.startswith(("CollectiveReduce", "CollectiveSparse"))
    )


def hide_some_rows(op: tf.Operation, table: int) -> None:
    """Has some keys of a dynamic table no row, and others one that later runs see."""
    place = 1 + op.get_attr("T") + table
    rows = op.inputs[place]
    seen_later = tf.where(rows % 3 == 1, -1 - rows, rows)
    op._update_input(place, tf.where(rows % 3 == 2, -tf.ones_like(rows), seen_later))


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("dim", [1, 16, 37, 128])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("threads", [1, 4])
def test_one_operation_does_what_two_do(dim: int, hidden: bool, threads: int):
    """Each optimizer: the same bits; and what NumPy makes of the gradients of whole tables."""
    built = simulation(np.random.default_rng(dim), dim)
    gradients = gradients_of(built)
    plain = tf.gradients(loss(built.plain), built.tables)
    if hidden:
        hide_some_rows(gradients[0].indices.op, 1)
    steps, alone, pairs, wanted = [], [], [], []
    for name, case in CASES.items():
        arrays = shards_of(case, built, dim)
        one, other = (copies(f"{kind}/{name}", arrays) for kind in ("one", "two"))
        with reduced_updates.fusing():
            done = updates(case, one, gradients)
        [fused] = kinds_upstream(done)
        assert fused == "CollectiveSparseReduceUpdate"
        steps += done
        alone.append((case, other))
        pairs += zip(tf.nest.flatten(one), tf.nest.flatten(other))
        wanted.append((case, arrays, one))
    # Only now is the sum used.
    for case, other in alone:
        steps += updates(case, other, gradients)
    config = tf.ConfigProto(intra_op_parallelism_threads=threads)
    with tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        whole = [dense(g, t.shape) for g, t in zip(session.run(plain), built.tables)]
        session.run(steps)
        for one, other in zip(*(values_of(session, side) for side in zip(*pairs))):
            assert one.tobytes() == other.tobytes()
        for case, arrays, one in [] if hidden else wanted:
            for t, of_table in enumerate(arrays):
                numbers = built.numbers[t][RANK]
                touched = np.flatnonzero(whole[t][numbers].any(1))
                batch = SCALE * whole[t][numbers][touched], touched
                got = values_of(session, one[t])
                for array, want in zip(got, expected(case, of_table, [batch])):
                    np.testing.assert_allclose(array, want, rtol=1e-4, atol=1e-5)


def adagrad_of(gradients: Any, name: str) -> list[tf.Operation]:
    variables = [
        [
            tf.get_variable(f"{name}/{t}/{i}", [60, g.values.shape[1]], use_resource=True)
            for i in range(2)
        ]
        for t, g in enumerate(gradients)
    ]
    return updates(CASES["adagrad"], variables, gradients)


def clipped(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    return tf.IndexedSlices(gradient.values * 0.5, gradient.indices)


@pytest.mark.parametrize("used", ["clipped", "shown", "waited for", "of two optimizers", "clips"])
def test_a_sum_that_is_used_is_made_once(used: str):
    """Updates are operations of their own where others need the sum; rows that max_norm reads are
    as they were.
    """
    built = simulation(np.random.default_rng(3), 4)
    first = gradients_of(built)
    if used == "clipped":
        first[0] = clipped(first[0])
    if used == "shown":
        tf.reduce_sum(first[1].values)
    if used == "waited for":
        with tf.control_dependencies([first[1].values]):
            tf.constant(1)
    if used == "clips":
        op = first[0].indices.op
        norms = tf.AttrValue(list=tf.AttrValue.ListValue(f=[1.0] * len(op.get_attr("max_norms"))))
        op._set_attr("max_norms", norms)
    with reduced_updates.fusing():
        done = adagrad_of(first[:2], "some")
        if used == "of two optimizers":
            done += updates(
                CASES["momentum"],
                [[tf.get_variable(f"m/{i}", [9, 3], use_resource=True) for i in range(2)]],
                first[2:],
            )
    kinds = kinds_upstream(done)
    updated = 2 + (used == "of two optimizers")
    assert kinds == ["CollectiveReduceRows", *["CollectiveSparseUpdate"] * updated]


def test_some_tables_of_a_sum_are_updated():
    built = simulation(np.random.default_rng(3), 4)
    first = gradients_of(built)
    with reduced_updates.fusing():
        done = adagrad_of(first[1:2], "some")
    assert kinds_upstream(done) == ["CollectiveSparseReduceUpdate"]


def test_updates_that_wait_for_each_other_are_no_circle():
    built = simulation(np.random.default_rng(3), 4)
    first = gradients_of(built)
    with reduced_updates.fusing():
        [one] = adagrad_of(first[:1], "one")
        with tf.control_dependencies([one]):
            [other] = adagrad_of(first[1:2], "other")
    assert kinds_upstream([other]).count("CollectiveSparseUpdate") == 2
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(other)


def test_what_does_not_fit_is_refused_before_any_update():
    """The last table's rows are not there; the first table stays as it is."""
    built = simulation(np.random.default_rng(3), 4)
    first = gradients_of(built)
    case = CASES["adagrad"]
    sizes = [60, 1]
    variables = [
        [
            tf.get_variable(f"{t}/{i}", initializer=tf.ones([n, 4]), use_resource=True)
            for i in (0, 1)
        ]
        for t, n in enumerate(sizes)
    ]
    with reduced_updates.fusing():
        done = updates(case, variables, first[:2])
    with tf.Session() as session:
        with pytest.raises(tf.errors.FailedPreconditionError, match="initialized"):
            session.run(done)
        session.run(tf.global_variables_initializer())
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"not in \[0, 1\)"):
            session.run(done)
        for array in values_of(session, tf.nest.flatten(variables)):
            assert (array == 1).all()


def test_outside_nothing_is_fused():
    built = simulation(np.random.default_rng(3), 4)
    first = gradients_of(built)
    kinds = kinds_upstream(adagrad_of(first[:2], "some"))
    assert kinds == ["CollectiveReduceRows", *["CollectiveSparseUpdate"] * 2]
