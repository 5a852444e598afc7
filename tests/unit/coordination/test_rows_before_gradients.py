"""Which exchanges of rows a run's gradients must wait for, read off a graph."""

from __future__ import annotations

import pytest
import tensorflow.compat.v1 as tf

from collective.coordination.run_analysis import rows_before_gradients
from collective.ops import native_library
from collective.ops.communication.gate import gates_of


def exchange(name, phase, *inputs):
    """Makes an exchange that waits for `inputs`; returns what comes of it."""
    with tf.control_dependencies([x.op for x in inputs]):
        x = tf.zeros([2, 3])
        made = native_library.library().collective_shared_alltoall(
            x, [1, 1], phase=phase, name=f"collective.{name}"
        )
    return made.output


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def names(*operations):
    found = rows_before_gradients(gates_of(tf.get_default_graph()), operations)
    return [op.name.removeprefix("collective.") for op in found]


def test_rows_on_which_all_gradients_depend_need_no_more(graph):
    keys = exchange("keys", "other")
    rows = [exchange("a", "rows", keys), exchange("b", "rows", keys)]
    for name in ("ga", "gb"):
        exchange(name, "gradients", tf.add_n(rows))
    assert names(*graph.get_operations()) == []


def test_other_rows_are_waited_for(graph):
    a, b, c = (exchange(name, "rows") for name in "abc")
    ga, gb = exchange("ga", "gradients", a, b), exchange("gb", "gradients", b)
    everything = graph.get_operations()
    assert names(*everything) == ["a", "c"]  # gb doesn't depend on a.
    without_gb = [op for op in everything if op is not gb.op]
    assert names(*without_gb) == ["c"]
    assert names(*(op for op in without_gb if op is not c.op)) == []
    assert names(*(op for op in without_gb if op is not ga.op)) == []


def test_rows_after_the_update_are_not_waited_for(graph):
    a = exchange("a", "rows")
    gradients = exchange("ga", "gradients", a)
    exchange("after", "rows", tf.identity(gradients))
    assert names(*graph.get_operations()) == []


def test_rows_after_a_later_gate_are_not_waited_for(graph):
    """Such a gate opens when all is exchanged that an earlier one lets go."""
    gates = gates_of(graph)
    exchange("g", "gradients", exchange("a", "rows", gates.at(1).zero))
    exchange("b", "rows", gates.at(1).zero)
    exchange("c", "rows", gates.at(2).zero)
    assert names(*graph.get_operations()) == ["b"]


def test_rows_in_a_loop_are_left_out(graph):
    tf.disable_control_flow_v2()
    try:
        tf.while_loop(
            lambda x: tf.reduce_sum(x) < 1,
            lambda x: tf.ensure_shape(exchange("l", "rows", x), [2, 3]),
            [tf.zeros([2, 3])],
        )
    finally:
        tf.enable_control_flow_v2()
    exchange("g", "gradients", exchange("a", "rows"))
    assert names(*graph.get_operations()) == []


def test_rows_after_a_call_that_exchanges_gradients_are_not_waited_for(graph):
    """A later gate opens after the call: gradients that waited for its rows would wait for ever."""
    gates = gates_of(graph)
    first = tf.identity(gates.at(1).zero)
    inner = tf.function(lambda x: tf.ensure_shape(exchange("inner", "gradients", x), [2, 3]))
    outer = tf.function(lambda x: inner(x) + inner(x))
    called = outer(exchange("a", "rows", first))
    rows = exchange("b", "rows", gates.at(2).zero)
    exchange("g", "gradients", rows)
    exchange("after", "rows", called)
    exchange("c", "rows", first)
    # "b" waits for a later gate, and "after" for the call itself.
    assert names(*graph.get_operations()) == ["a", "c"]


@pytest.mark.slow
def test_it_takes_time_in_proportion_to_the_graph(graph):
    """A chain that is deeper than Python's stack, of which every operation has two inputs."""
    x = tf.zeros([])
    for _ in range(3000):
        x = x + x
    rows = exchange("a", "rows", x)
    for _ in range(3000):
        rows = rows + rows
    exchange("g", "gradients", rows)
    exchange("b", "rows", x)
    assert names(*graph.get_operations()) == ["b"]
