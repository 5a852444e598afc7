"""Checks updates by compiled operations that launch kernels, by the emulator's in the place of a
GPU's: compared with NumPy in float64 and the operations for CPUs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import kernels, op_def_registry
from test_sparse_updates import CASES, Case, expected, start

from collective.ops import native_library
from collective.ops.gpu import rules, sums
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.tensorflow_binding import DeviceOperations
from collective.ops.rows import row_changes
from collective.ops.updates import reduced_updates, sparse_updates
from collective.ops.updates.reduced_updates import RowUpdate
from tests.gpu_double import driver
from tests.kernels.conftest import bind
from tests.kernels.gpu.emulator.bridge import EmulatedBridge

ROOT = Path(__file__).resolve().parents[3]
SHAPES = ((50, 16), (7, 3), (9, 160), (30, 4))  # of the tables
COUNTS = (40, 5, 9, 0)  # rows with a gradient
OPERATIONS = {
    "adagrad": "Adagrad",
    "keras_adagrad": "KerasAdagrad",
    "row_wise_adagrad": "RowWiseAdagrad",
    "momentum": "Momentum",
    "nesterov": "NesterovMomentum",
    "ftrl": "Ftrl",
    "ftrl_with_penalties": "Ftrl",
    "ftrl_of_another_power": "Ftrl",
    "lazy_adam": "LazyAdam",
    "adam": "Adam",
    "keras_adam": "KerasAdam",
}
_RMS = {"rms": (0.1, 1.0), "momentum": (-1.0, 1.0)}


def _case(rule: rules.Rule, slots: dict[str, tuple[float, float]]) -> Case:
    """Describes a rule for which there is no operation on a CPU."""

    def applied(w, g, *rest):
        weights, made = rule.applied(w, g, rest[: rule.slots])
        return (weights, *made)

    return Case(None, applied, rule.numbers(), slots, None)


ALL = {
    **{name: (OPERATIONS[name], case) for name, case in CASES.items()},
    "sgd": ("SGD", _case(rules.SGD(0.3), {})),
    "rmsprop": ("RMSProp", _case(rules.RMSProp(0.3, 0.8, 0.5, 1e-3), _RMS)),
    "centered_rmsprop": (
        "CenteredRMSProp",
        _case(rules.CenteredRMSProp(0.3, 0.8, 0.5, 0.5), {**_RMS, "mg": (-0.1, 0.1)}),
    ),
}


class Updated:
    """Builds the update of several tables by one operation.

    Args:
        rows: for each table those that have a gradient; drawn if None.
    """

    def __init__(
        self,
        bound: DeviceOperations,
        name: str,
        seed: int = 0,
        shapes: Sequence[tuple[int, int]] = SHAPES,
        counts: Sequence[int] = COUNTS,
        used: Sequence[int | None] = (),
        bounds: Sequence[float] = (),
        prefix: str = "",
    ):
        self.operation, self.case = ALL[name]
        rng = np.random.default_rng(seed)
        self.arrays = [start(self.case, rows, dim, rng) for rows, dim in shapes]
        self.rows = [rng.permutation(rows)[:n] for (rows, _), n in zip(shapes, counts)]
        self.gradients = [
            rng.normal(size=(n, dim)).astype(np.float32) for (_, dim), n in zip(shapes, counts)
        ]
        self.variables = [
            [
                tf.get_variable(f"{prefix}{name}/{t}/{i}", initializer=one, use_resource=True)
                for i, one in enumerate(of_table)
            ]
            for t, of_table in enumerate(self.arrays)
        ]
        self.row_inputs = [
            tf.placeholder_with_default(one.astype(np.int64), [None]) for one in self.rows
        ]
        self.gradient_inputs = [
            tf.placeholder_with_default(one, [None, None]) for one in self.gradients
        ]
        self.numbers = [tf.constant(number, tf.float32) for number in self.case.numbers]
        self.update = bound.collective_sparse_update(
            [table.handle for table, *_ in self.variables],
            [slot.handle for _, *slots in self.variables for slot in slots],
            self.numbers,
            [tf.constant(-1 if one is None else one, tf.int64) for one in used],
            self.gradient_inputs,
            self.row_inputs,
            rule=self.operation,
            bounds=bounds,
        )

    def alone(self) -> list[tf.Operation]:
        """Makes the operations for one table each."""
        used = tf.constant(-1, tf.int64) if self.case.all_rows else None
        return [
            RowUpdate(self.operation, table, slots, self.numbers, gradient, rows, used).alone()
            for (table, *slots), gradient, rows in zip(
                self.variables, self.gradient_inputs, self.row_inputs
            )
        ]

    def values(self, session: tf.Session) -> list[list[np.ndarray]]:
        return session.run([[one.read_value() for one in of] for of in self.variables])

    def wanted(self) -> list[list[np.ndarray]]:
        return [
            expected(self.case, arrays, [(gradients, rows)])
            for arrays, gradients, rows in zip(self.arrays, self.gradients, self.rows)
        ]


def assert_close(got: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    for one, other in zip(tf.nest.flatten(got), tf.nest.flatten(wanted)):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", ALL)
def test_rows_and_slots_are_those_of_numpy_and_of_a_cpu(
    name: str, bound: DeviceOperations, stand_in: driver.StandIn
):
    """By one upload and one kernel for all tables, delayed until somebody waits."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Updated(bound, name)
        by_cpu = Updated(bound, name, prefix="cpu/")
        session.run(tf.global_variables_initializer())
        stand_in.reset()
        stand_in.delays = True
        session.run(made.update)
        assert not stand_in.queued
        launched, calls = list(stand_in.launches), list(stand_in.calls)
        got = made.values(session)
        assert_close(got, made.wanted())
        if made.case.update is not None:
            session.run(by_cpu.alone())
            assert_close(got, by_cpu.values(session))
    assert len(launched) == 1 + made.case.all_rows and launched[0].startswith("update_")
    assert calls.count("copy_to_device") == 1 and "copy_to_host" not in calls
    assert calls[-1] == "wait_for_stream" and calls.count("wait_for_stream") == 1


@pytest.mark.parametrize("name", ["adagrad", "row_wise_adagrad", "adam"])
def test_rows_outside_of_a_table_are_left_out(name: str, bound: DeviceOperations):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Updated(bound, name)
        session.run(tf.global_variables_initializer())
        outside = [np.concatenate([[-1], one, [rows]]) for one, (rows, _) in zip(made.rows, SHAPES)]
        padded = [np.pad(one, ((1, 1), (0, 0)), constant_values=9) for one in made.gradients]
        session.run(
            made.update,
            {**dict(zip(made.row_inputs, outside)), **dict(zip(made.gradient_inputs, padded))},
        )
        assert_close(made.values(session), made.wanted())


def test_adam_goes_over_the_rows_that_are_used(bound: DeviceOperations):
    """Rows 1 to that one of a table that has a number; all of another."""
    with tf.Graph().as_default(), tf.Session() as session:
        shapes, used = [(50, 3), (40, 16), (9, 4), (5, 4)], [30, None, 0, 4]
        made = Updated(bound, "adam", shapes=shapes, counts=[0] * 4, used=used)
        session.run(tf.global_variables_initializer())
        rng = np.random.default_rng(3)
        made.rows = [rng.permutation(30)[:11] + 1, rng.permutation(40)[:9], *[np.zeros(0, int)] * 2]
        made.gradients = [
            rng.normal(size=(len(rows), dim)).astype(np.float32)
            for rows, (_, dim) in zip(made.rows, shapes)
        ]
        feeds = {
            **dict(zip(made.row_inputs, made.rows)),
            **dict(zip(made.gradient_inputs, made.gradients)),
        }
        for _ in range(2):  # what is marked as touched isn't any more
            session.run(made.update, feeds)
        got = made.values(session)
    for t, last in enumerate(used):
        there = slice(None) if last is None else slice(1, last + 1)
        first = 0 if last is None else 1
        batch = made.gradients[t], made.rows[t] - first
        wanted = expected(made.case, [array[there] for array in made.arrays[t]], [batch] * 2)
        for array, before, updated in zip(got[t], made.arrays[t], wanted):
            np.testing.assert_allclose(array[there], updated, rtol=2e-5, atol=2e-6)
            np.testing.assert_array_equal(np.delete(array, there, 0), np.delete(before, there, 0))


@pytest.mark.parametrize("name", ["sgd", "row_wise_adagrad", "adam"])
def test_weights_are_kept_within_a_bound(name: str, bound: DeviceOperations):
    """Where they have a gradient; slots and other tables are as without. A NaN stays one."""
    with tf.Graph().as_default(), tf.Session() as session:
        bounds = [0.5, np.inf, 0.25, 0.5]
        made = Updated(bound, name, bounds=bounds)
        made.arrays[0][0][made.rows[0][0], 3] = np.nan
        made.arrays[0][0][made.rows[0][1], 2] = np.inf
        made.arrays[1][0][made.rows[1][0], 2] = np.inf
        session.run(tf.global_variables_initializer())
        for variable, values in zip(made.variables, made.arrays):
            variable[0].load(values[0], session)
        session.run(made.update)
        wanted = made.wanted()
        for (weights, *_), rows, most in zip(wanted, made.rows, bounds):
            weights[rows] = np.clip(weights[rows], -most, most)
        assert np.isnan(wanted[0][0]).sum() == 1 and np.isinf(wanted[1][0]).sum() == 1
        assert_close(made.values(session), wanted)


def two_tables() -> list[tf.Variable]:
    return [
        tf.get_variable(f"t{i}", initializer=tf.ones([3, 2]), use_resource=True) for i in (0, 1)
    ]


def by_sgd(table: tf.Variable, rate: tf.Tensor) -> tf.Operation:
    return sparse_updates.update(
        "SGD", table, [], [rate], tf.fill([1, 2], 4.0), tf.constant([1], tf.int64)
    )


@pytest.mark.usefixtures("bound")
def test_updates_that_wait_are_one_operation_and_take_bounds():
    with tf.Graph().as_default() as graph, tf.Session() as session:
        tables, rate = two_tables(), tf.constant(1.0)
        with reduced_updates.fusing():
            done = [by_sgd(table, rate) for table in tables]
            assert reduced_updates.keep_within(0.5, done[1])
            assert not reduced_updates.keep_within(0.5, rate.op)
        assert not reduced_updates.keep_within(0.5, done[1])
        [update] = [op for op in graph.get_operations() if op.type == "CollectiveSparseUpdate"]
        assert update.get_attr("bounds") == [np.inf, 0.5]
        session.run(tf.global_variables_initializer())
        session.run(done[0])
        first, second = session.run([table.read_value() for table in tables])
    assert first[1].tolist() == [-3, -3] and second[1].tolist() == [-0.5, -0.5]
    assert (np.delete([first, second], 1, 1) == 1).all()


@pytest.mark.usefixtures("bound")
def test_updates_that_wait_for_each_other_are_no_circle():
    with tf.Graph().as_default() as graph, tf.Session() as session:
        tables, rate = two_tables(), tf.constant(1.0)
        with reduced_updates.fusing():
            with tf.control_dependencies([by_sgd(tables[0], rate)]):
                last = by_sgd(tables[1], rate)
        kinds = [op.type for op in graph.get_operations()]
        assert kinds.count("CollectiveSparseUpdate") == 2
        session.run(tf.global_variables_initializer())
        session.run(last)
        assert (session.run(tables[0].read_value())[1] == -3).all()


def test_nothing_is_launched_without_rows(bound: DeviceOperations, stand_in: driver.StandIn):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Updated(bound, "adagrad", counts=(0, 0, 0, 0))
        session.run(tf.global_variables_initializer())
        stand_in.reset()
        session.run(made.update)
        assert stand_in.launches == [] and stand_in.uploads == []


@pytest.mark.parametrize("name", ["ftrl", "adam"])
def test_the_plan_is_that_of_python(
    name: str, monkeypatch: pytest.MonkeyPatch, stand_in: driver.StandIn
):
    """Word by word, except for the addresses."""
    bound, rng = bind(EmulatedBridge(), monkeypatch), np.random.default_rng(2)
    for trial in range(4):
        dims = rng.choice([1, 3, 4, 16, 20, 64, 128, 200], 5)
        shapes = [(int(rng.integers(1, 300)), int(dim)) for dim in dims]
        counts = [int(rng.integers(0, 2) * rng.integers(0, rows + 1)) for rows, _ in shapes]
        with tf.Graph().as_default(), tf.Session() as session:
            made = Updated(bound, name, trial, shapes, counts)
            session.run(tf.global_variables_initializer())
            stand_in.reset()
            session.run(made.update)
        if not stand_in.uploads:
            continue
        (uploaded,) = stand_in.uploads
        words, some = np.frombuffer(uploaded, np.int64), np.count_nonzero(counts)
        lengths, rows = np.array(counts), np.array([rows for rows, _ in shapes])
        nowhere = np.zeros((len(shapes), 1 + sums.SLOTS), np.int64)
        given = sums.target_words(Segments.of(counts, range(5)), dims, nowhere, rows, 2)[0]
        decayed = sums.target_words(Segments.of(rows, range(5)), dims, nowhere, rows, 1)[0]
        runs = sums.Rows(np.arange(5) << 40, lengths, dims).words()
        given[:, -1] = len(runs)
        is_adam = name == "adam"
        make = functools.partial(rules.Adam, corrected=True) if is_adam else rules.Ftrl
        options = np.array(make(*made.case.numbers).options(), np.float32)
        ends = np.cumsum([13 * some, 3 * max(some, 1), some, 13 * len(decayed) * (name == "adam")])
        got_targets, got_runs, _, got_decayed, got_options = np.split(words, ends)
        addresses = [5, 7, 8, 9, 10]
        for got, wanted in [(got_targets, given), (got_decayed, decayed)][: 1 + (name == "adam")]:
            np.testing.assert_array_equal(
                np.delete(got.reshape(-1, 13), addresses, 1), np.delete(wanted, addresses, 1)
            )
        np.testing.assert_array_equal(got_runs.reshape(-1, 3)[:, :2], runs[:, :2])
        np.testing.assert_allclose(got_options.view(np.float32)[: len(options)], options, 1e-6)


def test_gradients_side_by_side_are_one_run(bound: DeviceOperations, stand_in: driver.StandIn):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Updated(bound, "sgd", shapes=[(9, 16)] * 2, counts=(8, 8))
        made.gradients = [np.abs(one) for one in made.gradients]
        # computed, so that it begins where TensorFlow wants parts to begin
        both = tf.square(tf.placeholder(tf.float32, [None]))
        halves = tf.split(tf.reshape(both, [16, 16]), 2)
        update = bound.collective_sparse_update(
            [table.handle for (table,) in made.variables],
            [],
            made.numbers,
            [],
            halves,
            made.row_inputs,
            rule="SGD",
        )
        session.run(tf.global_variables_initializer())
        stand_in.reset()
        session.run(update, {both.op.inputs[0]: np.sqrt(made.gradients).reshape(-1)})
        assert len(stand_in.uploads[0]) == 8 * (2 * 13 + 2 + 3 + 1)
        assert_close(made.values(session), made.wanted())


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_each_call_of_the_driver_may_fail(
    name: str, bound: DeviceOperations, stand_in: driver.StandIn
):
    """Then all tables are as they were, or the error says that they are not; the next run works."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Updated(bound, name)
        session.run(tf.global_variables_initializer())
        session.run(made.update)
        stand_in.reset()
        session.run(made.update)
        calls = list(stand_in.calls)
        assert len(calls) == (6 if name == "adam" else 4)
        for number, call in enumerate(calls[:-1], 1):  # the last waits for what emulates
            session.run(tf.global_variables_initializer())
            stand_in.reset()
            stand_in.delays, stand_in.fails_at = True, number
            with pytest.raises(tf.errors.InternalError, match="error 719 from cu") as caught:
                session.run(made.update)
            assert not stand_in.queued
            stand_in.reset()
            got = made.values(session)
            if "go on from a checkpoint" in str(caught.value):
                assert (name, call, number) == ("adam", "launch", 5)
                for t, rows in enumerate(made.rows):
                    kept = np.delete(got[t][0], rows, 0)
                    np.testing.assert_array_equal(kept, np.delete(made.arrays[t][0], rows, 0))
                assert_close(got[0][0][made.rows[0]], made.wanted()[0][0][made.rows[0]])
            else:
                for one, other in zip(tf.nest.flatten(got), tf.nest.flatten(made.arrays)):
                    np.testing.assert_array_equal(one, other)
            session.run(tf.global_variables_initializer())
            session.run(made.update)
            assert_close(made.values(session), made.wanted())


@pytest.mark.parametrize(
    "feed, words",
    [
        ("gradient", r"gradient of 5 rows of dimension 3 is \[5,4\]"),
        ("rows", r"gradient of 2 rows of dimension 3 is \[5,3\]"),
        ("used", "there are 7 rows in addition to row 0, but memory for 7 only"),
        ("uninitialized", "t: was it initialized|not initialized"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_launched(
    feed: str, words: str, bound: DeviceOperations, stand_in: driver.StandIn
):
    with tf.Graph().as_default(), tf.Session() as session:
        used = [None, 7, None, None] if feed == "used" else ()
        made = Updated(bound, "adam", used=used)
        if feed != "uninitialized":
            session.run(tf.global_variables_initializer())
        given = {
            "gradient": {made.gradient_inputs[1]: np.ones((5, 4))},
            "rows": {made.row_inputs[1]: [1, 2]},
        }.get(feed, {})
        stand_in.reset()
        kinds = (tf.errors.InvalidArgumentError, tf.errors.FailedPreconditionError)
        with pytest.raises(kinds, match=words):
            session.run(made.update, given)
        assert "launch" not in stand_in.calls


@pytest.mark.parametrize(
    "rule, slots, words",
    [("Lion", 1, "there is no rule 'Lion'"), ("Adagrad", 2, "Adagrad has 1 slots and 1 numbers")],
)
def test_rules_that_are_not_there(rule: str, slots: int, words: str, bound: DeviceOperations):
    with tf.Graph().as_default(), tf.Session() as session:
        one = tf.get_variable("one", [3, 2], use_resource=True)
        update = bound.collective_sparse_update(
            [one.handle],
            [one.handle] * slots,
            [tf.constant(0.1)],
            [],
            [tf.ones([1, 2])],
            [tf.constant([1], tf.int64)],
            rule=rule,
        )
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            session.run(update)


def test_who_read_a_table_before_has_what_he_read(bound: DeviceOperations):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Updated(bound, "adagrad")
        other = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=SHAPES[0], shared_name="other")
        share = tf.raw_ops.AssignVariableOp(resource=other, value=made.variables[0][0].read_value())
        session.run(tf.global_variables_initializer())
        session.run(share)
        session.run(made.update)
        held = session.run(tf.raw_ops.ReadVariableOp(resource=other, dtype=tf.float32))
        np.testing.assert_array_equal(held, made.arrays[0][0])
        assert_close(made.values(session), made.wanted())


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_who_follows_changes_learns_which_rows(
    name: str, bound: DeviceOperations, stand_in: driver.StandIn
):
    """Those with a gradient, of a table and of its slots; all of Adam's."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Updated(bound, name)
        session.run(tf.global_variables_initializer())
        numbers = session.run([row_changes.watch(of[-1].handle) for of in made.variables])
        changes = [row_changes.ChangeSet(rows) for rows, _ in SHAPES]
        for one, number in zip(changes, numbers):
            one.listen([int(number)])
        stand_in.reset()
        stand_in.delays = True
        session.run(made.update, {made.row_inputs[1]: [-1, 2, 3, 7, 0]})
        for one, rows in zip(changes, [made.rows[0], [0, 2, 3], *made.rows[2:]]):
            one.begin()
            seen = one.changes()
            assert seen.all == (name == "adam")
            if not seen.all:
                np.testing.assert_array_equal(seen.rows, np.sort(rows))
        assert ("copy_to_host" in stand_in.calls) == (name != "adam")


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", CASES)
def test_operations_for_one_table(name: str, bound: DeviceOperations, stand_in: driver.StandIn):
    """Those of a CPU have kernels that do the same."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Updated(bound, name)
        label = {"CollectiveSparseUpdate": "emulated"}
        with tf.get_default_graph()._kernel_label_map(label):
            updates = made.alone()
        session.run(tf.global_variables_initializer())
        stand_in.reset()
        for update in updates:
            session.run(update)
        assert_close(made.values(session), made.wanted())
        assert stand_in.launches


def test_every_rule_is_an_example_and_known_to_the_operations():
    """What checks kernels goes through the examples."""
    assert {type(rule) for rule in rules.EXAMPLES} == set(rules.RULES)
    text = ROOT.joinpath("ops", "native", "gpu", "rules.h").read_text(encoding="utf-8")
    known = set(re.findall(r'\{\{"(\w+)"', text))
    assert {rule.operation for rule in rules.EXAMPLES} == known


def test_tables_elsewhere_are_refused():
    with tf.Graph().as_default(), tf.Session() as session:
        one = tf.get_variable("elsewhere", [3, 2], use_resource=True)
        update = native_library.library().collective_sparse_update(
            [one.handle],
            [],
            [0.1],
            [],
            [tf.ones([1, 2])],
            [tf.constant([1], tf.int64)],
            rule="SGD",
            on_device=True,
        )
        session.run(one.initializer)
        with pytest.raises(
            tf.errors.FailedPreconditionError,
            match="elsewhere is on a CPU, but is updated on a GPU: make its table outside",
        ):
            session.run(update)


@pytest.mark.skipif(
    not tf.test.is_built_with_cuda(),
    reason="this TensorFlow is built without GPUs: no kernels for them",
)
@pytest.mark.parametrize("kind", ["Update", "ReduceUpdate"])
def test_a_gpu_has_the_kernels(kind: str):
    """All inputs are on the host but gradients, rows and messages."""
    name = f"CollectiveSparse{kind}"
    found = kernels.get_registered_kernels_for_op(name).kernel
    (one,) = [kernel for kernel in found if kernel.device_type == "GPU"]
    native_library.library()
    inputs = {argument.name for argument in op_def_registry.get(name).input_arg}
    on_device = {"gradients", "gradient", "rows", "message"} & inputs
    assert set(one.host_memory_arg) == inputs - on_device and not one.label
