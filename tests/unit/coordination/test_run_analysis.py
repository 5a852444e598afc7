"""What a run will use, read off graphs that nothing runs."""

from __future__ import annotations

import horovod.tensorflow as hvd
import pytest
import tensorflow.compat.v1 as tf

from tests.unit.rank_threads import run_analysis


@pytest.fixture
def graph():
    with tf.Graph().as_default() as graph:
        v = tf.get_variable("v", [2], use_resource=True)
        tf.identity(v.read_value() * 2, "doubled")
        tf.assign_add(v, [1.0, 1.0], name="added")
        with tf.variable_scope("", use_resource=True):
            local = tf.get_local_variable("local", [], initializer=tf.zeros_initializer())
        tf.assign_add(local, 1.0, name="counted")
        x = tf.placeholder(tf.float32, [], "x")
        tf.identity(x + 1, "y")
        yield graph


def footprint(graph, *fetches, fed=()):
    return run_analysis.footprint_of(graph, fetches, fed)


def writer(graph, variable):
    """The operation that adds to a variable."""
    (found,) = (
        op
        for op in graph.get_operations()
        if op.type == "AssignAddVariableOp" and op.inputs[0].op.name == variable
    )
    return found


def test_who_writes_a_global_variable_trains(graph):
    assert footprint(graph, writer(graph, "v")).trains
    assert not footprint(graph, "doubled:0").trains
    assert not footprint(graph, writer(graph, "local")).trains, "a metric's own"


def test_an_initializer_does_not_train_and_is_everyones(graph):
    (v,) = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    found = footprint(graph, v.initializer)
    assert found.initialized == (v,) and not found.trains
    assert found.shared == ("initialize v:0",)


def test_what_is_fed_is_not_executed(graph):
    found = footprint(graph, "y:0", fed=["y:0"])
    assert not found.operations
    assert graph.get_operation_by_name("x") in footprint(graph, "y:0").operations


def test_signatures_tell_runs_apart(graph):
    """By what ranks must do alike: not by what each may run for itself."""
    (v,) = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    assert footprint(graph, "y:0").signature == footprint(graph, "doubled:0").signature
    signatures = {
        found.signature
        for found in (
            footprint(graph, "y:0"),
            footprint(graph, v.initializer),
            footprint(graph, writer(graph, "v")),
            footprint(graph, "y:0").comparing(["an option"]),
        )
    }
    assert len(signatures) == 4 and all(0 <= s < 2**63 for s in signatures)


def test_what_is_not_in_the_graph_is_tensorflows_error(graph):
    with pytest.raises(KeyError):
        footprint(graph, "nothing:0")


def test_a_broadcast_of_variables_is_no_step_of_training():
    """But a run that updates something in addition to it is."""
    with tf.Graph().as_default() as graph:
        v = tf.get_variable("v", [2], use_resource=True)
        w = tf.get_variable("w", [2], use_resource=True)
        broadcasts = [x.assign(hvd.broadcast(x, 0)).op for x in (v, w)]
        both = tf.group(broadcasts, name="both")
        mixed = tf.group(broadcasts[0], w.assign_add([1.0, 1.0]).op, name="mixed")
        loaded, read = v.assign([1.0, 2.0]).op, v.read_value().op
    found = footprint(graph, both)
    assert found.trains and not found.is_step
    assert footprint(graph, mixed).is_step and footprint(graph, loaded).is_step
    assert not footprint(graph, read).is_step
    assert footprint(graph, broadcasts[0]).signature != footprint(graph, loaded).signature
