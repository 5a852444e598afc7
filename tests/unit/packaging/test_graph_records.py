"""What the library remembers of a graph is in records that layers own, each typed."""

from __future__ import annotations

import ast
import dataclasses
import functools
import gc
import importlib
import re
import sys
import threading
import weakref
from concurrent import futures

import pytest
import tensorflow.compat.v1 as tf

from collective.ops.graph import graph_state
from collective.ops.graph.seen_operations import SeenOperations
from collective.ops.graph.training_flag import TrainingFlag
from tests.unit.packaging.test_layout import imported_modules, package_modules

GRAPH_STATE = "collective.ops.graph.graph_state"
# Each is a value of the whole process, set from several functions.
MOST_GLOBALS = 5


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse(package_modules()[name].read_text(encoding="utf-8"))


@functools.cache
def kinds() -> frozenset[type]:
    """Returns all records' classes, found where they are asked for by `graph_state.of`."""
    found = set()
    for name in package_modules():
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "graph_state.of":
                module = importlib.import_module(name)
                found.add(eval(ast.unparse(node.args[1]), vars(module)))
    return frozenset(found)


@pytest.mark.slow
def test_every_record_is_a_dataclass_of_typed_fields():
    assert len(kinds()) >= 40
    untyped = [
        f"{kind.__module__}.{kind.__name__}.{field.name}"
        for kind in kinds()
        for field in dataclasses.fields(kind)  # TypeError: it is no dataclass.
        if re.search(r"\bAny\b", str(field.type))
    ]
    assert not untyped, "say what these are instead of Any"


def test_the_place_of_records_knows_none_of_them():
    file = package_modules()[GRAPH_STATE]
    assert imported_modules(GRAPH_STATE, file) == set()
    assert not [node for node in ast.walk(tree(GRAPH_STATE)) if isinstance(node, ast.ClassDef)]


def test_a_record_is_its_graphs_and_ends_with_it():
    graph, other = tf.Graph(), tf.Graph()
    record = graph_state.of(graph, SeenOperations)
    assert graph_state.of(graph, SeenOperations) is record
    assert graph_state.of(other, SeenOperations) is not record
    assert isinstance(graph_state.of(graph, TrainingFlag), TrainingFlag)
    ends = weakref.ref(record)
    del record, graph
    gc.collect()
    assert ends() is None


@pytest.mark.slow
def test_threads_get_the_same_record():
    """A second record would never hear of what the first one knows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(2000):
            graph, together = tf.Graph(), threading.Barrier(3)

            def ask(graph=graph, together=together):
                together.wait()
                return id(graph_state.of(graph, TrainingFlag))

            with futures.ThreadPoolExecutor(3) as threads:
                found = [threads.submit(ask) for _ in range(3)]
                assert len({one.result() for one in found}) == 1
    finally:
        sys.setswitchinterval(interval)


def test_no_more_global_statements():
    """State of a process is an object that says what it is, not a name that functions reassign."""
    places = [
        f"{name}: {', '.join(node.names)}"
        for name in package_modules()
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Global)
    ]
    assert len(places) <= MOST_GLOBALS, places
