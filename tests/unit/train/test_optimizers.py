"""The optimizers of `collective.train` follow their rules in plain TensorFlow.

The rules are written once more in NumPy.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import train
from tests import numpy_optimizers

V, D, STEPS = 6, 3, 7
START = np.random.default_rng(1).normal(size=(V, D))

Reference = numpy_optimizers.Reference


def global_step() -> Any:
    return tf.train.get_or_create_global_step()


# How an optimizer is made; its rule in NumPy for sparse gradients; and for dense ones, where it
# differs.
CASES: dict[str, tuple[Callable[[], Any], Reference] | tuple[Any, Reference, Reference]] = {
    "row_wise_adagrad": (
        lambda: train.RowWiseAdagradOptimizer(0.3),
        numpy_optimizers.row_wise_adagrad(0.3, 0.1, 0.0),
    ),
    "row_wise_adagrad_as_torchrecs": (
        lambda: train.RowWiseAdagradOptimizer(lambda: 0.3, 0.0, epsilon=1e-2),
        numpy_optimizers.row_wise_adagrad(0.3, 0.0, 1e-2),
    ),
    "persia_adagrad": (
        lambda: train.PersiaAdagradOptimizer(),
        numpy_optimizers.persia_adagrad(0.01, 0.01, 1.0, 1e-10),
    ),
    "persia_adagrad_that_forgets": (
        lambda: train.PersiaAdagradOptimizer(lambda: 0.3, 0.2, lambda: 0.6, 1e-2),
        numpy_optimizers.persia_adagrad(0.3, 0.2, 0.6, 1e-2),
    ),
    "persia_adagrad_shared_by_rows": (
        lambda: train.PersiaAdagradOptimizer(0.3, 0.2, 0.6, 1e-2, vectorwise_shared=True),
        numpy_optimizers.persia_adagrad(0.3, 0.2, 0.6, 1e-2, shared=True),
    ),
    "adagrad_decay": (
        lambda: train.AdagradDecayOptimizer(
            0.3,
            global_step(),
            initial_accumulator_value=0.2,
            accumulator_decay_step=3,
            accumulator_decay_rate=0.4,
        ),
        numpy_optimizers.adagrad_decay(0.3, 0.2, 3, 0.4),
    ),
    "adagrad_decay_v2": (
        lambda: train.AdagradDecayOptimizerV2(0.3, global_step(), 0.1, 1, 0.9),
        numpy_optimizers.adagrad_decay(0.3, 0.1, 1, 0.9),
    ),
    "adam_async": (
        lambda: train.AdamAsyncOptimizer(0.1, 0.8, lambda: 0.9, epsilon=1e-3),
        numpy_optimizers.adam(0.1, 0.8, 0.9, 1e-3, lazy=True),
    ),
    "adam_async_with_rmsprop": (
        lambda: train.AdamAsyncOptimizer(0.1, 0.8, 0.9, 1e-3, apply_sparse_rmsprop=True),
        numpy_optimizers.rmsprop_of_adam_async(0.1, 0.8, 0.9, 1e-3),
        numpy_optimizers.adam(0.1, 0.8, 0.9, 1e-3, lazy=True),
    ),
    "adam_w": (
        lambda: train.AdamWOptimizer(lambda: 0.05, 0.1, 0.8, 0.9, 1e-3),
        numpy_optimizers.adam(0.1, 0.8, 0.9, 1e-3, lazy=False, decay=0.05),
    ),
    "lazy_adam": (
        lambda: train.LazyAdamOptimizer(lambda: 0.1, 0.8, 0.9, epsilon=1e-3),
        numpy_optimizers.adam(0.1, 0.8, 0.9, 1e-3, lazy=True),
    ),
    "group_lasso_ftrl": (
        lambda: train.GroupLassoFtrlOptimizer(
            0.3, l1_regularization_strength=1.5, l2_regularization_strength=0.1
        ),
        numpy_optimizers.ftrl(0.3, -0.5, 1.5, 0.1, 0.0, 0.0, group=True),
        numpy_optimizers.ftrl(0.3, -0.5, 1.5, 0.1, 0.0, 0.0, group=False),
    ),
    "group_lasso_ftrl_with_everything": (
        lambda: train.GroupLassoFtrlOptimizer(
            0.3,
            -0.7,
            l1_regularization_strength=1.0,
            l2_regularization_strength=0.1,
            accum_name="n",
            linear_name="z",
            l2_shrinkage_regularization_strength=0.2,
            beta=0.4,
        ),
        numpy_optimizers.ftrl(0.3, -0.7, 1.0, 0.1, 0.2, 0.4, group=True),
        numpy_optimizers.ftrl(0.3, -0.7, 1.0, 0.1, 0.2, 0.4, group=False),
    ),
}


def batches(sparse: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draws gradients: of some rows, of which some come several times; or of all rows once."""
    drawn = []
    for step in range(STEPS):
        rng = np.random.default_rng([2, step])
        ids = rng.integers(0, V - 1, 5) if sparse else np.arange(V)
        drawn.append((ids, rng.normal(size=(len(ids), D))))
    return drawn


@contextlib.contextmanager
def resource_variables(on: bool) -> Iterator[None]:
    if not on:
        tf.disable_resource_variables()
    try:
        yield
    finally:
        tf.enable_resource_variables()


@pytest.mark.parametrize(
    "sparse, resource, dtype",
    [(True, True, "float32"), (False, True, "float64"), (True, False, "float64")],
    ids=["sparse", "dense", "reference"],
)
@pytest.mark.parametrize("name", CASES)
def test_rule(name: str, sparse: bool, resource: bool, dtype: str):
    make, *references = CASES[name]
    reference = references[0 if sparse else -1]
    rows, states = numpy_optimizers.trained(reference, START, batches(sparse))
    with resource_variables(resource), tf.Graph().as_default(), tf.Session() as session:
        variable = tf.get_variable("w", initializer=tf.constant(START, dtype))
        ids = tf.placeholder(tf.int64, [None])
        gradients = tf.placeholder(dtype, [None, D] if sparse else [V, D])
        step = global_step()
        optimizer = make()
        gradient = tf.IndexedSlices(gradients, ids, [V, D]) if sparse else gradients
        update = optimizer.apply_gradients([(gradient, variable)], step)
        session.run(tf.global_variables_initializer())
        for batch_ids, values in batches(sparse):
            session.run(update, {ids: batch_ids, gradients: values})
        tolerances = {"rtol": 1e-5, "atol": 1e-6}
        np.testing.assert_allclose(session.run(variable), rows, **tolerances)
        for slot in states[0]:
            np.testing.assert_allclose(
                session.run(optimizer.get_slot(variable, slot)),
                np.stack([state[slot] for state in states]),
                **tolerances,
                err_msg=slot,
            )


@pytest.mark.parametrize(
    "shape", [[], [4], [2, 3, 2]], ids=["scalar", "vector", "of_three_dimensions"]
)
@pytest.mark.parametrize("name", CASES)
def test_variables_of_any_shape(name: str, shape: list[int]):
    """A row is what lies after the first dimension; of a vector it is one element."""
    make, *references = CASES[name]
    start = np.random.default_rng(3).normal(size=shape)
    gradients = [np.random.default_rng([4, step]).normal(size=shape) for step in range(3)]
    matrix = (1, 1) if not shape else (shape[0], start.size // shape[0])
    ids = np.arange(matrix[0])
    rows, _ = numpy_optimizers.trained(
        references[-1],
        start.reshape(matrix),
        [(ids, g.reshape(matrix)) for g in gradients],
    )
    with tf.Graph().as_default(), tf.Session() as session:
        variable = tf.get_variable("w", initializer=tf.constant(start, tf.float64))
        fed = tf.placeholder(tf.float64, shape)
        step = global_step()
        update = make().apply_gradients([(fed, variable)], step)
        session.run(tf.global_variables_initializer())
        for gradient in gradients:
            session.run(update, {fed: gradient})
        np.testing.assert_allclose(session.run(variable), rows.reshape(shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: train.RowWiseAdagradOptimizer(0.1, -0.1), "initial_accumulator_value must be"),
        (lambda: train.RowWiseAdagradOptimizer(0.1, 0.0), "epsilon must be"),
        (lambda: train.RowWiseAdagradOptimizer(0.1, use_locking=True), "use_locking=True is not"),
        (lambda: train.PersiaAdagradOptimizer(0.1, -0.1), "initial_accumulator_value must be"),
        (lambda: train.PersiaAdagradOptimizer(0.1, 0.0, epsilon=0.0), "epsilon must be"),
        (lambda: train.PersiaAdagradOptimizer(g_square_momentum=1.1), "g_square_momentum must be"),
        (lambda: train.AdamAsyncOptimizer(0.1, use_locking=True), "use_locking=True is not"),
        (lambda: train.AdamWOptimizer(0.1, use_locking=True), "use_locking=True is not"),
        (lambda: train.LazyAdamOptimizer(0.1, use_locking=True), "use_locking=True is not"),
        (lambda: train.GroupLassoFtrlOptimizer(0.1, use_locking=True), "use_locking=True is not"),
        (lambda: train.GroupLassoFtrlOptimizer(0.1, 0.5), "learning_rate_power"),
        (lambda: train.AdagradDecayOptimizer(0.1, None), "global_step must be an integer"),
        (lambda: train.AdagradDecayOptimizer(0.1, tf.constant(0.5)), "global_step must be an int"),
        (lambda: train.AdagradDecayOptimizer(0.1, tf.constant(0), 0.0), "initial_accumulator_v"),
        (lambda: train.AdagradDecayOptimizer(0.1, tf.constant(0), 0.1, 0), "decay_step must be"),
        (lambda: train.AdagradDecayOptimizer(0.1, tf.constant(0), 0.1, 9, 1.0), "decay_rate must"),
    ],
)
def test_arguments_that_are_refused(make: Callable[[], Any], message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_only_the_listed_variables_decay():
    """Given to `minimize` or to `apply_gradients`; none, if the list is empty."""
    with tf.Graph().as_default(), tf.Session() as session:
        variables = [tf.get_variable(name, initializer=[2.0, 4.0]) for name in "ab"]
        loss = tf.add_n([tf.reduce_sum(0.0 * variable) for variable in variables])

        def decayed_by(make: Callable[[Any], Any]) -> list[list[float]]:
            train_op = make(train.AdamWOptimizer(0.5))
            session.run(tf.global_variables_initializer())
            session.run(train_op)
            return [session.run(variable).tolist() for variable in variables]

        listed = variables[:1]
        once = [[1.0, 2.0], [2.0, 4.0]]
        assert decayed_by(lambda w: w.minimize(loss, decay_var_list=listed)) == once
        assert (
            decayed_by(
                lambda w: w.apply_gradients(w.compute_gradients(loss), decay_var_list=listed)
            )
            == once
        )
        assert decayed_by(lambda w: w.minimize(loss)) == [[1.0, 2.0], [1.0, 2.0]]
        assert decayed_by(lambda w: w.minimize(loss, decay_var_list=[])) == [[2.0, 4.0]] * 2


def test_adam_async_counts_the_steps_of_each_variable():
    """DeepRec's published case: beta ** (t + 1) after t updates, and the powers are variables."""
    with tf.Graph().as_default(), tf.Session() as session:
        first, second = (tf.get_variable(name, initializer=[1.0, 2.0]) for name in "ab")
        optimizer = train.AdamAsyncOptimizer()
        both = optimizer.apply_gradients([(tf.constant([0.1, 0.1]), v) for v in (first, second)])
        one = optimizer.apply_gradients([(tf.constant([0.1, 0.1]), first)])
        session.run(tf.global_variables_initializer())
        powers = [optimizer.get_slot(v, f"beta{i}_power") for v in (first, second) for i in (1, 2)]
        assert all(power in tf.global_variables() for power in powers)
        session.run(both)
        session.run(one)
        np.testing.assert_allclose(
            session.run(powers), [0.9**3, 0.999**3, 0.9**2, 0.999**2], rtol=1e-6
        )


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("name", ["row_wise_adagrad", "adagrad_decay_v2"])
def test_slots_by_row_of_a_partitioned_variable_are_saved(tmp_path: Path, name: str, axis: int):
    """As parts of one slot where the variable is cut between rows, else each by its own name."""
    make, by_row = CASES[name][0], {"row_wise_adagrad": "accumulator"}
    with tf.Graph().as_default(), tf.Session() as session:
        with tf.variable_scope("s", partitioner=tf.fixed_size_partitioner(2, axis)):
            variable = tf.get_variable("w", initializer=tf.constant(START, tf.float32))
        step, optimizer = global_step(), make()
        loss = tf.reduce_sum(variable.as_tensor() * tf.constant(START, tf.float32))
        update, saver = optimizer.minimize(loss, step), tf.train.Saver()
        slots = [
            optimizer.get_slot(part, by_row.get(name, "accumulator_decay_power"))
            for part in variable
        ]
        assert [slot.shape.as_list()[1] for slot in slots] == [1, 1]
        session.run(tf.global_variables_initializer())
        session.run(update)
        trained = session.run(slots)
        saver.save(session, str(tmp_path / "model"))
        session.run(tf.global_variables_initializer())
        saver.restore(session, str(tmp_path / "model"))
        for restored, want in zip(session.run(slots), trained):
            np.testing.assert_array_equal(restored, want)
    reader = tf.train.load_checkpoint(str(tmp_path / "model"))
    saved = [slot.op.name for slot in slots]
    if axis == 0:
        (whole,) = {re.sub("/part_[01]", "", slot) for slot in saved}
        np.testing.assert_array_equal(reader.get_tensor(whole), np.concatenate(trained))
    else:
        for slot, want in zip(saved, trained):
            np.testing.assert_array_equal(reader.get_tensor(slot), want)
