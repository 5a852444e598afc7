"""Builds the plan of tables that eager code has made, and tells `Model.summary` which they are."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination.functions import calls
from collective.coordination.run_analysis import RunFootprint
from collective.ops.communication import collectives
from collective.ops.counting import counted
from collective.plan import builder
from collective.plan.data import TablePlan
from collective.plan.plan import Plan
from collective.tables import table as tables_module
from collective.tensorflow_internals.keras import Layer, print_message

NAMED = 6  # Tables in a line of `Model.summary`.
NOT_TRAINED = (
    "not known before a tf.function trains the tables; without a function each lookup is an "
    "exchange of its own"
)


def is_layer(x: Any) -> bool:
    """Tells whether `x` is a model or layer of Keras 2."""
    return isinstance(x, Layer)


def build(model: Any = None) -> Plan:
    """Builds the plan of a Keras model, or of all tables that eager code has made.

    Args:
        model: a model or layer. What it has built until now is described; one that was built in a
            graph has the graph's plan.
    """
    weights = [] if model is None else _weights_of(model)
    if weights and not tf.executing_eagerly_outside_functions():
        return builder.build_plan(weights[0].graph)
    tables = tables_module.eager_tables()
    if model is not None:
        own = {id(weight) for weight in weights}
        tables = [table for table in tables if id(table) in own]
    plans = [plan for plan in map(calls.training_of, tables) if plan is not None]
    graph, footprint = tf.Graph(), None
    if plans:
        trains = plans[-1]
        graph = trains.graph
        footprint = RunFootprint(
            trains.executed, trains.shared, trains.signature, (), trains.trains, ()
        )
    plan = builder.plan_of_tables(
        tables, tables_module.eager_slots, tf.get_default_graph(), graph, footprint
    )
    notes = dict(plan.notes)
    if model is not None and not model.built:
        notes["model"] = f"'{model.name}' isn't built yet, which makes its tables"
    elif tables and not plans and collectives.size() > 1:
        notes["exchanges"] = NOT_TRAINED
    return dataclasses.replace(plan, notes=notes)


def _weights_of(model: Any) -> list[Any]:
    """Returns the weights of the layers of a model that are built; it may not be."""
    layers = [layer for layer in (model, *model.submodules) if isinstance(layer, Layer)]
    return [
        weight
        for layer in layers
        for weight in (*layer._trainable_weights, *layer._non_trainable_weights)
    ]


def summary(original: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces `Model.summary`: a line more says which weights are tables."""
    call = inspect.signature(original).bind(model, *args, **kwargs)
    original(*call.args, **call.kwargs)
    tables = build(model).tables
    if tables:
        (call.arguments.get("print_fn") or print_message)(_line(tables))


def _line(tables: Sequence[TablePlan]) -> str:
    more = f", and {counted(len(tables) - NAMED, 'other')}" if len(tables) > NAMED else ""
    named = ", ".join(map(_described, tables[:NAMED]))
    return f"Tables on {counted(collectives.size(), 'rank')}: {named}{more}"


def _described(table: TablePlan) -> str:
    rows = "dynamic" if table.rows is None else f"{table.rows:,}"
    place = "" if table.placement == "rows" else f", {table.placement}"
    return f"{table.name} ({rows} x {table.dim}{place})"
