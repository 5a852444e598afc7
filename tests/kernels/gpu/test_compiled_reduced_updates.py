"""Checks the compiled operation that sums gradients and updates rows by the sums, by kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from bagged import DIMS, MIXED, PLAIN, ROWS, SCALE, Bagged, Section, initialized
from tensorflow.python.framework import kernels, op_def_registry
from test_compiled_updates import ALL, assert_close, by_sgd
from test_reduced_updates import clipped, gradients_of, kinds_upstream, simulation
from test_sparse_updates import expected, start

from collective.ops import native_library
from collective.ops.gpu.tensorflow_binding import DeviceOperations
from collective.ops.rows import row_changes
from collective.ops.updates import reduced_updates, sparse_updates
from tests.gpu_double import driver


class Updated(Bagged):
    """Updates the tables by one operation, of which `updated` are some.

    Attributes:
        update: the operation.
    """

    def __init__(
        self,
        bound: DeviceOperations,
        name: str,
        sections: tuple[Section, ...] = MIXED,
        updated: tuple[int, ...] = (0, 1, 2),
        bounds: tuple[float, ...] = (),
        **shape: Any,
    ):
        super().__init__(sections, **shape)
        operation, self.case = ALL[name]
        rng = np.random.default_rng(5)
        self.updated = updated
        self.arrays = [start(self.case, ROWS, dim, rng) for dim in DIMS]
        self.variables = [
            [
                tf.get_variable(f"updated/{t}/{i}", initializer=one, use_resource=True)
                for i, one in enumerate(of_table)
            ]
            for t, of_table in enumerate(self.arrays)
        ]
        chosen = [self.variables[t] for t in updated]
        self.update = bound.collective_sparse_reduce_update(
            [table.handle for table, *_ in chosen],
            [slot.handle for _, *slots in chosen for slot in slots],
            [tf.constant(number, tf.float32) for number in self.case.numbers],
            [],
            self.gradient,
            [self.rows[t] for t in updated],
            self.message,
            self.splits,
            [self.headers],
            rule=operation,
            bounds=bounds,
            T=len(DIMS),
            updated=updated,
            scale=SCALE,
            **self.attributes,
        )

    def got(self, session: tf.Session) -> list[list[np.ndarray]]:
        return session.run([[one.read_value() for one in of] for of in self.variables])

    def wanted(self) -> list[list[np.ndarray]]:
        sums = self.wanted_sums()
        return [
            expected(self.case, arrays, [(sums[t], sums[len(DIMS) + t])])
            if t in self.updated
            else arrays
            for t, arrays in enumerate(self.arrays)
        ]


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", ALL)
def test_rows_are_updated_by_sums(name: str, bound: DeviceOperations, stand_in: driver.StandIn):
    """As NumPy updates them, with no sum that anybody writes."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Updated(bound, name)
        initialized(session, stand_in, delays=True)
        session.run(made.update)
        assert not stand_in.queued
        launches, calls = list(stand_in.launches), list(stand_in.calls)
        assert_close(made.got(session), made.wanted(), 5e-5)
    assert not any(one.startswith("sum_rows") for one in launches)
    assert launches[-1 - made.case.all_rows].startswith("update_")
    assert calls.count("copy_to_device") == 2 and calls.count("wait_for_event") == 1


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["adagrad", "row_wise_adagrad", "adam", "ftrl", "sgd"])
def test_rows_that_occur_often_are_updated_by_their_pieces(
    name: str, bound: DeviceOperations, stand_in: driver.StandIn
):
    sections = (Section(0, weighted=True), Section(1, False), Section(2))
    with tf.Graph().as_default(), tf.Session() as session:
        made = Updated(bound, name, sections, ranks=1, most=2500, keys=2, seed=3)
        initialized(session, stand_in)
        session.run(made.update)
        assert_close(made.got(session), made.wanted(), 2e-3)
    assert [one for one in stand_in.launches if one.endswith("_long")]
    assert "sum_pieces" in stand_in.launches


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_with_one_gradient_are_not_summed(
    name: str, ranks: int, bound: DeviceOperations, stand_in: driver.StandIn
):
    """One rank alone asks for what is of a table: nothing is ordered, and nobody waits. Two ranks
    ask for the same rows.
    """
    sections = (Section(0, False), Section(2, False))
    with tf.Graph().as_default(), tf.Session() as session:
        made = Updated(bound, name, sections, updated=(0, 2), ranks=ranks)
        initialized(session, stand_in, delays=True)
        session.run(made.update)
        launches, calls = list(stand_in.launches), list(stand_in.calls)
        assert_close(made.got(session), made.wanted(), 5e-5)
    updates = [one for one in launches if one.startswith("update_")]
    assert (launches[: len(updates)] == updates) == (ranks == 1), launches
    assert calls.count("wait_for_event") == ranks - 1


@pytest.mark.parametrize("sections", [PLAIN, (Section(1, False), Section(0, False))])
def test_some_tables_are_updated_and_keep_their_bounds(
    sections: tuple[Section, ...], bound: DeviceOperations
):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Updated(bound, "adagrad", sections, updated=(0,), bounds=(0.4,))
        session.run(tf.global_variables_initializer())
        session.run(made.update)
        wanted = made.wanted()
        rows = made.wanted_sums()[len(DIMS)]
        assert len(rows)
        wanted[0][0][rows] = np.clip(wanted[0][0][rows], -0.4, 0.4)
        assert_close(made.got(session), wanted, 5e-5)


def test_adam_goes_over_all_rows_where_nothing_came(
    bound: DeviceOperations, stand_in: driver.StandIn
):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Updated(bound, "adam", most=0)
        initialized(session, stand_in)
        session.run(made.update)
        assert_close(made.got(session), made.wanted())
    assert stand_in.launches == ["adam_decay"]


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_each_call_of_the_driver_may_fail(
    name: str, bound: DeviceOperations, stand_in: driver.StandIn
):
    """Then the operation fails, nothing of it is under way after it, and tables are as they were,
    or the error says that they are not; and the next one works.
    """
    with tf.Graph().as_default(), tf.Session() as session:
        made = Updated(bound, name)
        for _ in range(2):
            initialized(session, stand_in)
            session.run(made.update)
        calls, halves = list(stand_in.calls), 0
        assert len(calls) > 20
        for number, call in enumerate(calls[:-1], 1):  # the last waits for what emulates
            initialized(session, stand_in, delays=True)
            stand_in.fails_at = number
            if call == "destroy_event":
                session.run(made.update)
                continue
            with pytest.raises(tf.errors.InternalError, match="error 719 from cu") as caught:
                session.run(made.update)
            assert not stand_in.queued
            is_half = any(one.startswith("update_") for one in stand_in.launches)
            halves += is_half
            stand_in.reset()
            assert is_half == ("go on from a checkpoint" in str(caught.value)), (call, number)
            if not is_half:
                assert_close(made.got(session), made.arrays, 0)
        assert halves == 1 + (name == "adam"), "rows of which much occurs, and Adam's other rows"
        initialized(session, stand_in)
        session.run(made.update)
        assert_close(made.got(session), made.wanted(), 5e-5)


def test_who_follows_changes_learns_which_rows(bound: DeviceOperations, stand_in: driver.StandIn):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Updated(bound, "momentum")
        session.run(tf.global_variables_initializer())
        numbers = session.run([row_changes.watch(of[-1].handle) for of in made.variables])
        changes = [row_changes.ChangeSet(ROWS) for _ in DIMS]
        for one, number in zip(changes, numbers):
            one.listen([int(number)])
        stand_in.reset()
        stand_in.delays = True
        session.run(made.update)
        for one, rows in zip(changes, made.wanted_sums()[len(DIMS) :]):
            one.begin()
            np.testing.assert_array_equal(one.changes().rows, np.sort(rows))


def test_what_cannot_be_updated_is_refused(bound: DeviceOperations, stand_in: driver.StandIn):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Updated(bound, "adagrad")
        initialized(session, stand_in)
        other = tf.raw_ops.AssignVariableOp(
            resource=made.variables[1][0].handle,
            value=tf.placeholder_with_default(np.zeros((ROWS, 5), np.float32), [None, None]),
        )
        session.run(other)
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"slot is \[9,3\], the table"):
            session.run(made.update)
        with pytest.raises(tf.errors.InvalidArgumentError, match="the ranks asked for"):
            session.run(made.update, {made.rows[1]: [1]})
        assert not any(one.startswith("update_") for one in stand_in.launches)


@pytest.mark.parametrize("used", ["", "shown", "clipped", "of two rules", "of another"])
@pytest.mark.usefixtures("bound")
def test_updates_by_a_sum_are_one_operation_with_it(used: str):
    """Unless somebody else needs the sum; then they are one without it."""
    with tf.Graph().as_default(), tf.Session() as session:
        built = simulation(np.random.default_rng(3), 4)
        gradients = gradients_of(built)
        if used == "clipped":
            gradients[0] = clipped(gradients[0])
        if used == "shown":
            tf.reduce_sum(gradients[1].values)
        variables = [
            [
                tf.get_variable(f"{t}/{i}", [60, g.values.shape[1]], use_resource=True)
                for i in range(2)
            ]
            for t, g in enumerate(gradients)
        ]
        rate = tf.constant(0.5)
        with reduced_updates.fusing():
            done = [
                sparse_updates.update(
                    *(
                        ("SGD", table, [])
                        if used == "of two rules" and t
                        else ("Adagrad", table, [slot])
                    ),
                    [rate],
                    gradient.values,
                    gradient.indices,
                )
                for t, ((table, slot), gradient) in enumerate(zip(variables, gradients))
            ]
            if used == "of another":
                done.append(by_sgd(tf.get_variable("other", [3, 2], use_resource=True), rate))
            assert reduced_updates.keep_within(0.25, done[0])
        kinds = kinds_upstream(done)
        if used in ("", "of another"):
            assert kinds == ["CollectiveSparseReduceUpdate"] + ["CollectiveSparseUpdate"] * bool(
                used
            )
        else:
            count = 1 + (used == "of two rules")
            assert kinds == ["CollectiveReduceRows"] + ["CollectiveSparseUpdate"] * count
        session.run(tf.global_variables_initializer())
        session.run(done)
        table = session.run(variables[0][0].read_value())
        assert (np.abs(table) == 0.25).any()


@pytest.mark.skipif(
    not tf.test.is_built_with_cuda(),
    reason="this TensorFlow is built without GPUs: no kernels for them",
)
def test_a_gpu_has_the_kernel():
    """All inputs are on the host but the gradient, rows and the message."""
    name = "CollectiveSparseReduceUpdate"
    found = kernels.get_registered_kernels_for_op(name).kernel
    (one,) = [kernel for kernel in found if kernel.device_type == "GPU"]
    native_library.library()
    inputs = {argument.name for argument in op_def_registry.get(name).input_arg}
    assert set(one.host_memory_arg) == inputs - {"gradient", "rows", "message"} and not one.label
