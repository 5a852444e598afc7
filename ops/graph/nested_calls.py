"""Makes a `tf.function` that another one calls a part of it, where it has to be one.

What ranks do together in a call, they agree on and group once for all of it. So a function with
lookups isn't called by the one around it: its Python function is, as if it were no `tf.function`.
This shows while it is traced:

    the outer function calls the inner one ──► it is traced ──► it wants to look up a table
    ──► its trace is given up ──► its Python function is called in the outer function's graph
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops.graph import graphs
from collective.tensorflow_internals.graphs import FuncGraph, autograph_util


@dataclasses.dataclass
class _Attempt:
    """Records that a function is called inside a traced one, by an operation.

    Attributes:
        is_given_up: whether it has to be a part of the other.
    """

    is_given_up: bool = False


_attempts: list[_Attempt] = []
# Of the functions that eager code calls now, whether XLA compiles them.
_compiled: list[bool] = []
# Those that have to be parts of functions that call them.
_parts: weakref.WeakSet[Any] = weakref.WeakSet()


def want_inlining(graph: tf.Graph) -> bool:
    """Asks for the function that is being called to become a part of the one around it.

    The caller then raises an error, which is the script's if that isn't possible.

    Args:
        graph: where it has to be a part: that of the function, or of a branch or a loop in it,
            which stay what they are; or the one around it.

    Returns:
        Whether a function is being called that can become a part.
    """
    while not graphs.is_traced(graph):
        if type(graph) is not FuncGraph:
            return False
        graph = graph.outer_graph
    if _attempts:
        _attempts[-1].is_given_up = True
    return bool(_attempts)


def is_compiled() -> bool:
    """Tells whether XLA would compile the function that eager code calls now."""
    return bool(_compiled) and _compiled[-1]


def call(original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces a `tf.function`'s `__call__`, inside of functions that eager code calls."""
    if tf.executing_eagerly():
        _compiled.append(bool(function._jit_compile))
        try:
            return original(function, *args, **kwargs)
        finally:
            _compiled.pop()
    if not graphs.is_traced(tf.get_default_graph()):
        return original(function, *args, **kwargs)
    if function not in _parts:
        attempt = _Attempt()
        _attempts.append(attempt)
        try:
            return original(function, *args, **kwargs)
        except Exception:
            # XLA would have compiled it, and compiles no exchange.
            if not attempt.is_given_up or function._jit_compile:
                raise
        finally:
            _attempts.remove(attempt)
        _parts.add(function)
    python_function = function._python_function
    if function._autograph:
        python_function = autograph_util.py_func_from_autograph(
            python_function, function._experimental_autograph_options
        )
    args, kwargs = tf.nest.map_structure(_as_in_a_function, (args, kwargs))
    return tf.nest.map_structure(_as_of_a_function, python_function(*args, **kwargs))


def _as_in_a_function(x: Any) -> Any:
    """Returns an argument as a function gets it: arrays are tensors."""
    return tf.convert_to_tensor(x) if isinstance(x, (np.ndarray, np.generic)) else x


def _as_of_a_function(x: Any) -> Any:
    """Returns a result without what has computed it, for which losses of Keras look."""
    return tf.identity(x) if isinstance(x, tf.Tensor) else x
