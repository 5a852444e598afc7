"""Tests reading graphs: what operations wait for, functions hold, and assignments write."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import tensorflow.compat.v1 as tf

from collective.ops.graph import graph_analysis


@pytest.fixture(autouse=True)
def graph() -> Iterator[tf.Graph]:
    with tf.Graph().as_default() as graph:
        yield graph


def names(operations: set[tf.Operation]) -> set[str]:
    return {op.name for op in operations}


def diamond() -> tf.Tensor:
    """Builds source -> left, right -> sink, and a guard that the sink waits for."""
    source = tf.constant(1.0, name="source")
    left, right = tf.identity(source, "left"), tf.identity(source, "right")
    with tf.control_dependencies([tf.no_op("guard")]):
        return tf.add(left, right, "sink")


def test_upstream_holds_inputs_and_what_is_waited_for():
    assert names(graph_analysis.upstream([diamond().op])) == {
        "source",
        "left",
        "right",
        "guard",
        "sink",
    }


def test_upstream_stops_at_what_is_fed():
    assert names(graph_analysis.upstream([diamond().op], {"left:0"})) == {
        "source",
        "right",
        "guard",
        "sink",
    }


def test_walk_finds_but_does_not_pass_where_it_stops():
    found = graph_analysis.walk([diamond().op], stop=lambda op: op.name in ("left", "right"))
    assert names(found) == {"left", "right", "guard", "sink"}


def test_walk_follows_a_loop_once():
    out = tf.while_loop(lambda i: i < 3, lambda i: i + 1, [tf.constant(0, name="start")])
    assert "start" in names(graph_analysis.walk([out.op]))


def test_functions_are_searched_through_the_functions_that_they_call(graph: tf.Graph):
    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(x)

    @tf.function
    def outer(x: tf.Tensor) -> tf.Tensor:
        return inner(x) + 1.0

    call = next(
        op
        for op in graph_analysis.upstream([outer(tf.constant(1.0)).op])
        if op.type in graph_analysis.CALLS
    )
    assert graph_analysis.has_inside(graph, call, re.compile("Tanh").match)
    assert not graph_analysis.has_inside(graph, call, graph_analysis.is_of_carrier)


@pytest.mark.parametrize("resource", [False, True])
def test_the_holder_of_a_variable_is_found_through_operations_that_pass_it_on(resource: bool):
    variable = tf.get_variable("v", [2], use_resource=resource)
    memory = graph_analysis.memory(variable)
    handle = variable.handle if resource else variable._ref()
    assert graph_analysis.holder(handle) is memory
    assert (
        graph_analysis.holder(tf.raw_ops.Identity(input=handle) if resource else handle) is memory
    )


def test_fetches_are_flattened_and_variables_stay_whole():
    variable = tf.get_variable("v", [2], use_resource=True)
    sparse = tf.SparseTensor([[0]], [1.0], [1])
    leaves = graph_analysis.flatten({"a": [variable, (sparse, "name")], "b": None})
    assert leaves[0] is variable
    assert [x.name for x in leaves[1:4]] == [
        sparse.indices.name,
        sparse.values.name,
        sparse.dense_shape.name,
    ]
    assert leaves[4:] == ["name", None]


@pytest.mark.parametrize("dense_shape", [None, [2, 2]])
@pytest.mark.parametrize("indices", [[1.0, 2.0], [[1, 2], [2, 3]], 1, ["a", "b", "c"]])
def test_slices_of_any_indices_are_flattened(indices: object, dense_shape: object):
    """TensorFlow fetches them; values and indices that don't fit have no type of theirs."""
    shape = None if dense_shape is None else tf.constant(dense_shape)
    slices = tf.IndexedSlices(tf.ones([2, 2]), tf.constant(indices), shape)
    parts = [x for x in (slices.values, slices.indices, shape) if x is not None]
    assert [leaf.name for leaf in graph_analysis.flatten([slices])] == [x.name for x in parts]


@pytest.mark.parametrize("leaf, expected", [("x", ["x:0"]), ("x:1", ["x:1"]), (None, []), (3, [])])
def test_names_of_what_is_fed(leaf: object, expected: list[str]):
    assert list(graph_analysis.tensor_names(leaf)) == expected


@pytest.mark.parametrize(
    ("op_type", "is_of_carrier", "is_collective"),
    [
        ("HorovodAlltoall", True, True),
        ("HorovodGroupedAllreduce", True, True),
        ("HorovodBroadcastInplace", True, True),
        ("HorovodSize", True, False),
        ("CollectiveSharedAlltoall", True, True),
        ("CollectiveSharedAlltoallKeys", True, True),
        ("CollectiveSharedAlltoallRows", True, True),
        ("CollectiveSharedBroadcast", True, True),
        ("CollectiveAsk", False, False),
    ],
)
def test_collectives_wait_for_peers_and_questions_do_not(
    op_type: str, is_of_carrier: bool, is_collective: bool
):
    assert graph_analysis.is_of_carrier(op_type) == is_of_carrier
    assert graph_analysis.is_collective(op_type) == is_collective
