"""Finds the numbers by which a run updates variables, such as a learning rate: ranks compare them.

Replicas would drift apart if ranks updated them by different numbers, as they do if a script takes
a rate from a setting of its host. Compared is what a graph says by itself: constants, and what is
computed of constants and variables. Numbers that are fed, or depend on data, aren't compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import tensorflow.compat.v1 as tf

from collective.ops.graph import graph_analysis

# The inputs of TensorFlow's update operations that are settings of an optimizer.
_SETTINGS = frozenset(
    {
        "lr",
        "alpha",
        "rho",
        "momentum",
        "epsilon",
        "beta",
        "beta1",
        "beta2",
        "l1",
        "l2",
        "l2_shrinkage",
        "lr_power",
        "decay",
    }
)
_UPDATES = ("Apply", "SparseApply", "ResourceApply", "ResourceSparseApply")
_ADDITIONS = frozenset({"ResourceScatterAdd", "ResourceScatterSub", "ScatterAdd", "ScatterSub"})
_COMPILED = "CollectiveSparse"
# Begins what is described.
UPDATE = "an update with "


def described(operations: Iterable[tf.Operation]) -> list[str]:
    """Returns, sorted, the numbers of each kind of update among `operations`, once each."""
    found = set()
    for op in operations:
        numbers = sorted(filter(None, map(_described, _settings_of(op))))
        if numbers:
            found.add(f"{UPDATE}{', '.join(numbers)}")
    return sorted(found)


def _settings_of(op: tf.Operation) -> Iterator[tf.Tensor]:
    """Yields the inputs of an operation that are settings of an optimizer."""
    if op.type.startswith(_COMPILED):
        place = 0
        for argument in op.op_def.input_arg:
            count = op.get_attr(argument.number_attr) if argument.number_attr else 1
            if argument.name == "numbers":
                yield from op.inputs[place : place + count]
            place += count
    elif op.type.startswith(_UPDATES):
        for argument, x in zip(op.op_def.input_arg, op.inputs):
            if argument.name in _SETTINGS:
                yield x
    elif op.type in _ADDITIONS and op.inputs[2].op.type == "Mul":
        # Gradient descent, by rows.
        yield from (x for x in op.inputs[2].op.inputs if x.shape.rank == 0)


def _described(x: tf.Tensor) -> str:
    """Returns a number, or the constants that it is computed of; "" if it isn't known here."""
    value = tf.get_static_value(x)
    if value is not None:
        return str(value)
    upstream = graph_analysis.walk([x.op], control=False)
    if any(graph_analysis.gives_other_values(op.type) for op in upstream):
        return ""
    constants = [tf.get_static_value(op.outputs[0]) for op in upstream if op.type == "Const"]
    numbers = sorted({str(each) for each in constants if each is not None and each.size == 1})
    return f"a number computed of {', '.join(numbers)}" if numbers else ""
