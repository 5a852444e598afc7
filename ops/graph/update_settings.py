"""Finds the numbers by which a run updates variables, such as a learning rate: ranks compare them.

Replicas would drift apart if ranks updated them by different numbers, as they do if a script takes
a rate from a setting of its host. Compared is what a graph says by itself: constants, and what is
computed of constants and variables. Numbers that are fed, or depend on data, aren't compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
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
        "logbase",
        "sign_decay",
    }
)
_UPDATES = ("Apply", "SparseApply", "ResourceApply", "ResourceSparseApply")
_ADDITIONS = frozenset({"ResourceScatterAdd", "ResourceScatterSub", "ScatterAdd", "ScatterSub"})
_MOST_NUMBERS = 8  # of a constant, that are shown
# Begins what is described.
UPDATE = "an update with "


def described(operations: Iterable[tf.Operation], trained: Iterable[Any]) -> list[str]:
    """Returns, sorted, what ranks compare of the updates of `trained` among `operations`.

    That is the numbers of each kind of update, once each, and a digest of which variable is updated
    by which.

    Args:
        operations: those of a run.
        trained: variables. Others may be each rank's own.
    """
    holders = {graph_analysis.memory(variable) for variable in trained}
    known: dict[str, str] = {}
    found: set[tuple[str, str]] = set()  # several updates of a variable come in any order
    for op in operations:
        if not op.inputs or (holder := graph_analysis.holder(op.inputs[0])) not in holders:
            continue
        numbers = []
        for x in _settings_of(op):
            if x.name not in known:
                known[x.name] = _described(x)
            numbers.append(known[x.name])
        numbers = sorted(filter(None, numbers))
        if "use_nesterov" in op.node_def.attr and op.get_attr("use_nesterov"):
            numbers.append("use_nesterov")
        if numbers:
            found.add((str(holder.name), ", ".join(numbers)))
    kinds = sorted({f"{UPDATE}{numbers}" for _, numbers in found})
    if len(kinds) > 1:
        digest = hashlib.blake2b(repr(sorted(found)).encode(), digest_size=4).hexdigest()
        kinds.append(f"{UPDATE}these, by variable: {digest}")
    return kinds


def _settings_of(op: tf.Operation) -> Iterator[tf.Tensor]:
    """Yields the inputs of an operation that are settings of an optimizer."""
    if op.type.startswith(_UPDATES):
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
    if any(
        graph_analysis.gives_other_values(op.type) or op.type in graph_analysis.FED
        for op in upstream
    ):
        return ""
    constants = [tf.get_static_value(op.outputs[0]) for op in upstream if op.type == "Const"]
    numbers = sorted({_text(each) for each in constants if each is not None})
    return f"a number computed of {', '.join(numbers)}" if numbers else ""


def _text(constant: np.ndarray) -> str:
    if constant.size <= _MOST_NUMBERS:
        return str(constant.tolist())
    return hashlib.blake2b(constant.tobytes(), digest_size=4).hexdigest()
