"""Compares compiled updates with NumPy in float64 and TensorFlow's; and what they refuse."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Callable

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import train
from collective.ops import native_library
from collective.ops.updates import sparse_updates
from collective.tensorflow_internals.keras import package

ROWS = 50


def adagrad(w, g, a, rate):
    a = a + g**2
    return w - rate * g / np.sqrt(a), a


def keras_adagrad(w, g, a, rate, epsilon):
    a = a + g**2
    return w - rate * g / np.sqrt(a + epsilon), a


def row_wise_adagrad(w, g, a, rate, epsilon):
    a = a + (g**2).mean(1, keepdims=True)
    return w - rate * g / (np.sqrt(a) + epsilon), a


def momentum(w, g, m, rate, decay):
    m = decay * m + g
    return w - rate * m, m


def nesterov(w, g, m, rate, decay):
    m = decay * m + g
    return w - rate * (g + decay * m), m


def ftrl(w, g, a, z, rate, l1, l2, shrinkage, power):
    new_a = a + g**2
    z = z + g + 2 * shrinkage * w - (new_a**-power - a**-power) / rate * w
    over = np.maximum(np.abs(z) - l1, 0)
    return -np.sign(z) * over / (new_a**-power / rate + 2 * l2), new_a, z


def adam(w, g, m, v, rate, beta1, beta2, epsilon):
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
    return w - rate * m / (np.sqrt(v) + epsilon), m, v


def keras_adam(w, g, m, v, rate, rest1, rest2, epsilon):
    return adam(w, g, m, v, rate, 1 - rest1, 1 - rest2, epsilon)


@dataclasses.dataclass(frozen=True)
class Case:
    """Describes one rule.

    Attributes:
        update: the compiled operation.
        rule: returns (rows, rows of the slots) from them, a gradient and the numbers.
        numbers: what the rule depends on.
        slots: the names of the slots, and the range that they start from.
        optimizer: makes the same in plain TensorFlow, if a graph can have it.
        all_rows: rows without a gradient change, too.
        row_wise: slots have one number a row.
    """

    update: Callable[..., tf.Operation]
    rule: Callable[..., tuple[np.ndarray, ...]]
    numbers: Sequence[float]
    slots: dict[str, tuple[float, float]]
    optimizer: Callable[[], tf.train.Optimizer] | None
    all_rows: bool = False
    row_wise: bool = False


def ftrl_case(*numbers: float) -> Case:
    rate, l1, l2, shrinkage, power = numbers

    def optimizer():
        return tf.train.FtrlOptimizer(
            rate,
            power,
            l1_regularization_strength=l1,
            l2_regularization_strength=l2,
            l2_shrinkage_regularization_strength=shrinkage,
        )

    slots = {"accum": (0.1, 1.0), "linear": (-1.0, 1.0)}
    return Case(sparse_updates.ftrl, ftrl, numbers, slots, optimizer)


def rate_of_adam(rate: float, beta1: float, beta2: float) -> float:
    """Returns the corrected rate of the first step, in TensorFlow's type."""
    one, rate, beta1, beta2 = (np.float32(number) for number in (1, rate, beta1, beta2))
    return float(rate * np.sqrt(one - beta2) / (one - beta1))


ADAM = (rate_of_adam(0.3, 0.8, 0.9), 0.8, 0.9, 1e-3)
KERAS_ADAM = (ADAM[0], 0.2, 0.1, 1e-3)
MOMENTS = {"m": (-1.0, 1.0), "v": (0.0, 1.0)}
CASES = {
    "adagrad": Case(
        sparse_updates.adagrad,
        adagrad,
        (0.3,),
        {"accumulator": (0.1, 1.0)},
        lambda: tf.train.AdagradOptimizer(0.3),
    ),
    "keras_adagrad": Case(
        sparse_updates.keras_adagrad, keras_adagrad, (0.3, 1e-2), {"accumulator": (0.1, 1.0)}, None
    ),
    "row_wise_adagrad": Case(
        sparse_updates.row_wise_adagrad,
        row_wise_adagrad,
        (0.3, 1e-2),
        {"accumulator": (0.1, 1.0)},
        lambda: train.RowWiseAdagradOptimizer(0.3, epsilon=1e-2),
        row_wise=True,
    ),
    "momentum": Case(
        functools.partial(sparse_updates.momentum, nesterov=False),
        momentum,
        (0.3, 0.9),
        {"momentum": (-1.0, 1.0)},
        lambda: tf.train.MomentumOptimizer(0.3, 0.9),
    ),
    "nesterov": Case(
        functools.partial(sparse_updates.momentum, nesterov=True),
        nesterov,
        (0.3, 0.9),
        {"momentum": (-1.0, 1.0)},
        lambda: tf.train.MomentumOptimizer(0.3, 0.9, use_nesterov=True),
    ),
    "ftrl": ftrl_case(0.3, 0.0, 0.0, 0.0, -0.5),
    "ftrl_with_penalties": ftrl_case(0.3, 0.5, 0.2, 0.1, -0.5),
    "ftrl_of_another_power": ftrl_case(0.3, 0.5, 0.2, 0.1, -0.7),
    "lazy_adam": Case(
        sparse_updates.lazy_adam,
        adam,
        ADAM,
        MOMENTS,
        lambda: train.LazyAdamOptimizer(0.3, 0.8, 0.9, 1e-3),
    ),
    "adam": Case(
        sparse_updates.adam,
        adam,
        ADAM,
        MOMENTS,
        lambda: tf.train.AdamOptimizer(0.3, 0.8, 0.9, 1e-3),
        all_rows=True,
    ),
    "keras_adam": Case(
        sparse_updates.keras_adam, keras_adam, KERAS_ADAM, MOMENTS, None, all_rows=True
    ),
}


def matrices(name, arrays):
    """Makes variables: a table and its slots."""
    made = []
    for i, array in enumerate(arrays):
        values = np.asarray(array, np.float32)
        made.append(tf.get_variable(f"{name}/{i}", initializer=values, use_resource=True))
    return made


def start(case, rows, dim, rng):
    """Draws [table, *slots], float32."""
    arrays = [rng.normal(size=(rows, dim))]
    for low, high in case.slots.values():
        arrays.append(rng.uniform(low, high, (rows, 1 if case.row_wise else dim)))
    return [array.astype(np.float32) for array in arrays]


def draw(count, dim, rng, rows=ROWS):
    """Draws a gradient, and its rows."""
    return rng.normal(size=(count, dim)).astype(np.float32), rng.permutation(rows)[:count]


def compiled(case, variables, gradient, rows, **options):
    numbers = [tf.constant(number, tf.float32) for number in case.numbers]
    return case.update(*variables, *numbers, gradient, rows, **options)


def values_of(session, variables):
    return session.run([variable.read_value() for variable in variables])


def expected(case, arrays, batches):
    """Returns [table, *slots] after updates by (gradients, rows), in float64."""
    arrays = [array.astype(np.float64) for array in arrays]
    numbers = [np.float64(np.float32(number)) for number in case.numbers]
    for gradients, rows in batches:
        whole = np.zeros_like(arrays[0])
        whole[rows] = gradients
        changed = np.arange(len(whole)) if case.all_rows else rows
        updated = case.rule(
            arrays[0][changed], whole[changed], *(a[changed] for a in arrays[1:]), *numbers
        )
        for array, values in zip(arrays, updated):
            array[changed] = values
    return arrays


@pytest.mark.parametrize("dim", [1, 3, 16, 100, 128, 300])
def test_rows_and_slots_are_those_of_numpy(dim):
    with tf.Graph().as_default(), tf.Session() as session:
        gradient, at = tf.placeholder(tf.float32, [None, dim]), tf.placeholder(tf.int64, [None])
        for name, case in CASES.items():
            rng = np.random.default_rng(dim)
            arrays = start(case, ROWS, dim, rng)
            batches = [draw(count, dim, rng) for count in (0, 1, 7, 50)]
            variables = matrices(name, arrays)
            other = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[ROWS, dim], shared_name=name)
            before = variables[0].read_value()  # shares the variable's memory until it is updated
            update = compiled(case, variables, gradient, at)
            session.run([variable.initializer for variable in variables])
            session.run(tf.raw_ops.AssignVariableOp(resource=other, value=before))
            for g, r in batches:
                session.run(update, {gradient: g, at: r})
            got = values_of(session, variables)
            for array, want in zip(got, expected(case, arrays, batches)):
                np.testing.assert_allclose(array, want, rtol=1e-5, atol=1e-6, err_msg=name)
            # who read it before has what he read
            kept = session.run(tf.raw_ops.ReadVariableOp(resource=other, dtype=tf.float32))
            np.testing.assert_array_equal(kept, arrays[0])


def assert_like_tensorflow(make_case, names, rtol, atol):
    """Updates by the compiled operation, and in plain TensorFlow.

    Args:
        make_case: returns ([table, *slots], gradients, rows) for a case.
    """
    with tf.Graph().as_default(), tf.Session() as session:
        for name in names:
            case = CASES[name]
            if case.optimizer is None:
                continue
            arrays, gradients, rows = make_case(case)
            one, other = (matrices(f"{name}/{kind}", arrays) for kind in ("compiled", "plain"))
            gradient, at = tf.constant(gradients, tf.float32), tf.constant(rows, tf.int64)
            optimizer = case.optimizer()
            plain = optimizer.apply_gradients([(tf.IndexedSlices(gradient, at), other[0])])
            slots = [optimizer.get_slot(other[0], slot) for slot in case.slots]
            session.run(tf.variables_initializer([*one, *other, *optimizer.variables()]))
            session.run([tf.assign(slot, value) for slot, value in zip(slots, other[1:])])
            session.run([compiled(case, one, gradient, at), plain])
            for mine, theirs in zip(
                values_of(session, one), values_of(session, [other[0], *slots])
            ):
                np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dim", [1, 2, 16, 37])
def test_rows_and_slots_are_those_of_tensorflow(dim):
    rng = np.random.default_rng(dim)
    assert_like_tensorflow(
        lambda case: (start(case, ROWS, dim, rng), *draw(20, dim, rng)), CASES, 1e-5, 1e-6
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize("weight", [1.0, 0.0, np.inf, np.nan])
@pytest.mark.parametrize("shape", [(1, 9), (9, 1)])
def test_special_values_are_those_of_tensorflow(shape, weight):
    """Zeros, infinities and NaN."""
    gradients = np.reshape([0, 1, np.inf, np.nan, 1, 1, 1e-30, 1e38, -np.inf], shape)

    def make_case(case):
        # Less than 1.2e-38 is 0 to a processor that TensorFlow has told so, but not to a power.
        tiny = 2e-38 if "linear" in case.slots else 1e-38
        slots = np.reshape([0, 0, 1, 1, np.inf, np.nan, tiny, 1e38, 0.5], shape)
        arrays = [np.full(shape, weight), *(slots for _ in case.slots)]
        return arrays, gradients, np.arange(shape[0])

    assert_like_tensorflow(make_case, sorted(CASES.keys() - {"row_wise_adagrad"}), 1e-6, 0)


def test_adagrad_has_the_bits_of_keras():
    case, rng = CASES["keras_adagrad"], np.random.default_rng(3)
    arrays, (gradients, rows) = start(case, ROWS, 16, rng), draw(20, 16, rng)
    one, other = [tf.Variable(array) for array in arrays], tf.Variable(arrays[0])
    optimizer = package.optimizers.Adagrad(0.3, epsilon=1e-2)
    optimizer.build([other])
    optimizer._accumulators[0].assign(arrays[1])
    optimizer.apply_gradients([(tf.IndexedSlices(gradients, rows), other)])
    compiled(case, one, tf.constant(gradients), tf.constant(rows))
    assert one[0].numpy().tobytes() == other.numpy().tobytes()
    assert one[1].numpy().tobytes() == optimizer._accumulators[0].numpy().tobytes()


@pytest.mark.slow
def test_threads_change_no_bit():
    """Nor does the order of the rows."""
    rng, results = np.random.default_rng(1), []
    rows, count, dim = 4000, 3000, 64
    arrays = {name: start(case, rows, dim, rng) for name, case in CASES.items()}
    gradients, at = draw(count, dim, rng, rows)
    order = np.argsort(at)
    for threads, g, r in (1, gradients, at), (4, gradients, at), (4, gradients[order], at[order]):
        config = tf.ConfigProto(intra_op_parallelism_threads=threads)
        with tf.Graph().as_default(), tf.Session(config=config) as session:
            variables = {name: matrices(name, arrays[name]) for name in CASES}
            session.run(tf.global_variables_initializer())
            for name, case in CASES.items():
                session.run(compiled(case, variables[name], tf.constant(g), tf.constant(r)))
            results.append(values_of(session, tf.nest.flatten(variables)))
    for others in results[1:]:
        for one, other in zip(results[0], others):
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("used", [0, 1, 30, ROWS - 1])
def test_adam_leaves_rows_that_are_not_used_alone(used):
    """A dynamic table has rows 1 to `used`; after them may be memory that doesn't exist."""
    case, rng = CASES["adam"], np.random.default_rng(used)
    arrays = start(case, ROWS, 3, rng)
    gradients, rows = draw(used // 2, 3, rng, used)
    with tf.Graph().as_default(), tf.Session() as session:
        variables = matrices("v", arrays)
        last = tf.constant(used, tf.int64)
        update = compiled(case, variables, tf.constant(gradients), tf.constant(rows + 1), used=last)
        session.run(tf.global_variables_initializer())
        session.run(update)
        got = values_of(session, variables)
    there = slice(1, used + 1)
    want = expected(case, [array[there] for array in arrays], [(gradients, rows)])
    for array, before, updated in zip(got, arrays, want):
        np.testing.assert_allclose(array[there], updated, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(np.delete(array, there, 0), np.delete(before, there, 0))


@pytest.mark.parametrize(
    "row, used, words",
    [
        (4, 3, r"not in \[0, 4\)"),
        (1, ROWS, f"{ROWS} rows in addition to row 0, but memory for {ROWS} only"),
    ],
)
def test_rows_that_are_not_used_are_refused(row, used, words):
    with tf.Graph().as_default(), tf.Session() as session:
        variables = matrices("v", [np.ones((ROWS, 4))] * 3)
        session.run(tf.global_variables_initializer())
        rows, last = tf.constant([row], tf.int64), tf.constant(used, tf.int64)
        update = compiled(CASES["adam"], variables, tf.ones([1, 4]), rows, used=last)
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            session.run(update)
        for array in values_of(session, variables):
            assert (array == 1).all()


@pytest.mark.parametrize(
    "rows, shape, words",
    [
        ([0, ROWS], (2, 4), f"not in \\[0, {ROWS}\\)"),
        ([-1], (1, 4), "not in"),
        ([1], (2, 4), "gradient of 1 rows of dimension 4"),
        ([1], (1, 3), "gradient of 1 rows of dimension 4"),
    ],
)
def test_what_does_not_fit_is_refused(rows, shape, words):
    with tf.Graph().as_default(), tf.Session() as session:
        for name, case in CASES.items():
            arrays = start(case, ROWS, 4, np.random.default_rng(0))
            variables = matrices(name, arrays)
            update = compiled(case, variables, tf.ones(shape), tf.constant(rows, tf.int64))
            with pytest.raises(tf.errors.FailedPreconditionError, match="initialized"):
                session.run(update)
            session.run([variable.initializer for variable in variables])
            with pytest.raises(tf.errors.InvalidArgumentError, match=words):
                session.run(update)
            for got, array in zip(values_of(session, variables), arrays):
                np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize(
    "rule, slots, numbers, used, bounds, words",
    [
        ("Adagrad", 1, 1, 0, [0.5], "on a CPU have no bounds"),
        ("Adagrad", 1, 1, 1, [], "Adagrad of 1 tables has 1 numbers of rows, not 0"),
        ("Adam", 2, 4, 0, [], "Adam of 1 tables has 0 numbers of rows, not 1"),
        ("Adagrad", 1, 2, 0, [], "Adagrad has 1 slots and 1 numbers, but"),
        ("SGD", 0, 1, 0, [], "no rule 'SGD'"),
    ],
)
def test_what_a_cpu_does_not_do_is_refused(rule, slots, numbers, used, bounds, words):
    with tf.Graph().as_default(), tf.Session() as session:
        table, *its = matrices("v", [np.ones((ROWS, 4))] * (1 + slots))
        update = native_library.library().collective_sparse_update(
            [table.handle],
            [slot.handle for slot in its],
            [tf.constant(0.1)] * numbers,
            [tf.constant(-1, tf.int64)] * used,
            [tf.ones([1, 4])],
            [tf.constant([1], tf.int64)],
            rule=rule,
            bounds=bounds,
        )
        session.run(tf.global_variables_initializer())
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            session.run(update)


@pytest.mark.parametrize("name", ["momentum", "row_wise_adagrad"])
def test_a_slot_of_another_shape_is_refused(name):
    with tf.Graph().as_default(), tf.Session() as session:
        variables = matrices("v", [np.ones((ROWS, 4)), np.ones((ROWS, 3))])
        session.run(tf.global_variables_initializer())
        update = compiled(CASES[name], variables, tf.ones([1, 4]), tf.constant([1], tf.int64))
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"a slot is \[50,3\], the table"):
            session.run(update)
