"""Looks tables up eagerly, by a function for each lookup, on whose call all ranks agree.

    table(ids), eagerly ──► a tf.function with one lookup ──► agreement, exchange, rows

All ranks make the same lookups in the same order, each with ids of its own. It costs an agreement
and an exchange for each lookup. A tape that records knows of one that its rows depend on the table;
`collective.gradients.eager_gradients` goes on from the rows, for which the lookup is made again.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.ops.communication import collectives
from collective.ops.graph import training_flag
from collective.options.declaration import names
from collective.options.scopes import ExchangeOptions, PrecisionOptions, UpdateOptions
from collective.scope import SCOPES
from collective.tables.rows import rows_in_file
from collective.tables.table import Sharded
from collective.tensorflow_internals.graphs import pywrap_tfe, record, tape


@dataclasses.dataclass(eq=False)
class TapedLookup:
    """Records a lookup that a tape has seen, as long as the tape needs it.

    Attributes:
        table: the table.
        key: tells the table's kinds of lookups apart; key[1] is max_norm.
        look_up: makes the lookup in a function.
        inputs: its arguments, ids and weights.
        out: what it has returned.
        is_stale: whether an optimizer has updated the table since.
        is_counted: whether its gradient was taken, of a table that counts keys then.
        moves: `Sharded.moves` when it was made.
    """

    table: Sharded
    key: tuple[Any, ...]
    look_up: Callable[..., tf.Tensor]
    inputs: Sequence[Any]
    out: tf.Tensor
    is_stale: bool = False
    is_counted: bool = False
    moves: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.moves = self.table.moves


_numbers = itertools.count()


def taped(table: Sharded) -> list[TapedLookup]:
    """Returns the lookups of a table that tapes still need, in the order they were made."""
    return list(_taped(table).values())


def _taped(table: Sharded) -> weakref.WeakValueDictionary[int, TapedLookup]:
    known: weakref.WeakValueDictionary[int, TapedLookup] = table.__dict__.setdefault(
        "_taped_lookups", weakref.WeakValueDictionary()
    )
    return known


def rows(
    table: Sharded, ids: tf.Tensor, max_norm: float | None, lookup_rows: Callable[..., tf.Tensor]
) -> tf.Tensor:
    """Returns the rows of `ids` [...]: [..., D]; in a function `lookup_rows` looks them up."""

    def look_up(ids: tf.Tensor) -> tf.Tensor:
        return lookup_rows(table, ids, max_norm, None)

    flat = tf.TensorSpec([None], ids.dtype)
    found = _called(
        table, ("rows", _number(max_norm), ids.dtype), look_up, [flat], [tf.reshape(ids, [-1])]
    )
    return tf.reshape(found, [*ids.shape, table.dim])


def pooled(
    table: Sharded,
    ids: tf.SparseTensor,
    weights: tf.SparseTensor | None,
    combiner: str,
    max_norm: float | None,
    lookup_pooled: Callable[..., tf.Tensor],
) -> tf.Tensor:
    """Returns the combined rows of each sample of `ids` [B, K]: [b, D], b <= B.

    In a function `lookup_pooled` looks them up.

    Raises:
        NotImplementedError: a tape records `weights`, whose gradient would be lost.
    """

    def look_up(ids: tf.SparseTensor, weights: tf.SparseTensor | None = None) -> tf.Tensor:
        return lookup_pooled(table, ids, weights, combiner, max_norm, None)

    given = [ids] if weights is None else [ids, weights]
    if weights is not None and pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes([weights.values]):
        raise NotImplementedError(
            f"table '{table.op.name}' is looked up eagerly with weights that a tf.GradientTape "
            "records, and their gradient would be lost. Take it inside a tf.function."
        )
    specs = [tf.SparseTensorSpec([None, None], x.dtype) for x in given]
    key = ("pooled", _number(max_norm), combiner, *(x.dtype for x in given))
    return _called(table, key, look_up, specs, given)


def _called(
    table: Sharded,
    key: tuple[Any, ...],
    look_up: Callable[..., tf.Tensor],
    specs: list[Any],
    inputs: list[Any],
) -> tf.Tensor:
    """Calls a table's function for lookups of one kind, which is made at its first."""
    refuse_own_threads(f"table '{table.op.name}' is looked up")
    if table.trainable:
        tape.variable_accessed(table)
    is_taped = bool(pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes([table.handle]))
    # Training gives new keys of a dynamic table their rows, of one that isn't trainable, too.
    is_recorded = not pywrap_tfe.TFE_Py_TapeSetIsEmpty()
    if is_recorded and table.rows is None:
        _refuse_policy(table, is_taped)
    # A table that counts keys reads what it had before; its gradient counts them.
    adds_rows = table.rows is None and is_recorded and not table.counts_keys
    functions = table.__dict__.setdefault("_eager_lookups", {})
    kind = key, adds_rows, options_in_force()
    if kind not in functions:

        def in_function(*arguments: Any) -> tf.Tensor:
            if adds_rows:
                training_flag.set_always(tf.get_default_graph())
            found = look_up(*arguments)
            # A gradient may know rows by their places: they move after its update.
            rows_in_file.tables_of(tf.get_default_graph()).clear()
            return found

        in_function.__name__ = re.sub(r"\W", "_", f"lookup in {table.op.name}")
        made = tf2.function(in_function, input_signature=specs, autograph=False)
        # A function is itself called eagerly after tf.config.run_functions_eagerly(True).
        functions[kind] = made.get_concrete_function()
    with record.stop_recording():
        found: tf.Tensor = functions[kind](*inputs)
    if table.rows is None and table.policy.storage is not None and not is_recorded:
        rows_in_file.limit_memory([table])
    if is_taped:
        lookup = TapedLookup(table, key, look_up, inputs, found)
        _taped(table)[next(_numbers)] = lookup
        # The tape keeps the function, and with it the lookup.
        record.record_operation(
            "CollectiveLookup", [found], [table.handle], lambda *_, lookup=lookup: [None]
        )
    return found


def _refuse_policy(table: Any, is_taped: bool) -> None:
    """Refuses a lookup in training that a dynamic table's policy needs to know more about.

    Args:
        table: the table.
        is_taped: whether a tape watches it.

    Raises:
        NotImplementedError: the policy needs the step, or the gradient of the lookup.
    """
    policy, of = table.policy, f"table '{table.op.name}' is looked up eagerly, and"
    if policy.draws_keys:
        raise NotImplementedError(
            f"{of} admit_probability={policy.admit_probability} in its policy draws keys by the "
            "step to which the lookup leads, which only a tf.function knows. Train in one, or "
            "leave the option out."
        )
    if is_taped:
        return
    unwatched = (
        "but the tf.GradientTape doesn't watch it. Take its gradient, train in a tf.function"
    )
    if table.counts_keys:
        raise NotImplementedError(
            f"{of} counts its keys when a gradient of the lookup is taken, {unwatched}, or leave "
            "filter_freq out of its policy."
        )
    if table.last_used is not None:
        option = "capacity" if policy.steps_to_live is None else "steps_to_live"
        raise NotImplementedError(
            f"{of} notes the use of its rows when a gradient of the lookup is applied, "
            f"{unwatched}, or leave {option}={getattr(policy, option)} out of its policy."
        )


def options_in_force() -> tuple[Any, ...]:
    """Returns the options of scope() on which it depends what a kept function computes."""
    return tuple(
        getattr(SCOPES.options, name)
        for kind in (UpdateOptions, ExchangeOptions, PrecisionOptions)
        for name in names(kind)
    )


def is_in_own_thread() -> bool:
    """Tells whether a thread of TensorFlow's own calls, for a tf.py_function or a dataset."""
    return threading.current_thread().name.startswith("Dummy-")


def refuse_own_threads(what: str) -> None:
    """Refuses what ranks do together where a call of all ranks waits for it.

    Raises:
        NotImplementedError: it is done in a thread of TensorFlow's own.
    """
    if collectives.size() > 1 and is_in_own_thread():
        # The call that waits for it holds all others.
        raise NotImplementedError(
            f"{what} in a tf.py_function or a thread of TensorFlow's own, where ranks can't agree. "
            "Do it in the tf.function itself."
        )


def _number(max_norm: Any) -> float | None:
    return None if max_norm is None else float(max_norm)
