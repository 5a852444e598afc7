"""Refuses an optimizer whose own rule TensorFlow would not use for a table.

An optimizer of TensorFlow 1 has a rule for variables of the first version (`_apply_dense`,
`_apply_sparse`) and one for resource variables (`_resource_apply_…`). A class that replaces only
the former trains as it means to where `tf.disable_v2_behavior` has been called. Tables are resource
variables, and would be trained by the rule of its base class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow.compat.v1 as tf

from collective.errors import TableError
from collective.tables.table import Sharded, is_replicated_table

_DENSE = ("_apply_dense", ("_resource_apply_dense",))
_SPARSE = (
    "_apply_sparse",
    (
        "_resource_apply_sparse",
        "_resource_apply_sparse_duplicate_indices",
        "_apply_sparse_shared",
    ),
)


def check(optimizer: Any, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
    """Checks that an optimizer updates tables by the rule by which it updates other variables.

    Args:
        optimizer: of `tf.compat.v1.train`, or a script's own.
        grads_and_vars: what it is about to apply.

    Raises:
        TableError: it has a rule of its own only for variables that tables are not.
    """
    if tf.resource_variables_enabled():
        return  # Plain TensorFlow doesn't use that rule either.
    for gradient, variable in grads_and_vars:
        if not (isinstance(variable, Sharded) or is_replicated_table(variable)):
            continue
        method, others = _SPARSE if isinstance(gradient, tf.IndexedSlices) else _DENSE
        kinds = type(optimizer).__mro__
        own = _first(kinds, (method,))
        if gradient is not None and own < _first(kinds, others):
            raise TableError(
                f"table '{variable.op.name}': {kinds[own].__name__} has {method}, a rule of its "
                "own for variables of TensorFlow's first version. A table is a resource variable, "
                f"and would be updated by another rule, that of {kinds[own + 1].__name__}. Define "
                f"{others[0]} in {kinds[own].__name__}, too."
            )


def _first(kinds: tuple[type, ...], methods: tuple[str, ...]) -> int:
    """Returns which of `kinds` is the first that defines one of `methods`."""
    return next(
        (i for i, kind in enumerate(kinds) if any(method in vars(kind) for method in methods)),
        len(kinds),
    )
