"""Converts the keys that scripts pass to a dynamic table's methods."""

from __future__ import annotations

from typing import Any

import numpy as np

_STRINGS = (
    "Hash strings as lookups do, in the graph: "
    "session.run(collective.ops.exchange.key_hashing.of_strings(strings))"
)


def int64_keys(given: Any, table: str) -> np.ndarray:
    """Returns the keys that were passed to a method of a dynamic table, as int64.

    Args:
        given: an array or array-like. An empty one may have any type.
        table: the table's name, for errors.

    Raises:
        ValueError: they aren't whole numbers, or are beyond int64.
    """
    keys = np.asarray(given)
    if not keys.size:
        return keys.astype(np.int64)
    if keys.dtype.kind not in "iu":
        is_text = keys.dtype.kind in "SU" or isinstance(keys.flat[0], (str, bytes))
        fix = _STRINGS if is_text else "Give whole numbers: keys.astype(np.int64)"
        raise ValueError(f"table '{table}': keys are of an integer type, not {keys.dtype}. {fix}.")
    if keys.dtype == np.uint64 and (largest := int(keys.max())) >= 2**63:
        raise ValueError(
            f"table '{table}': keys are int64, up to 2**63 - 1, not {largest} of {keys.dtype}. "
            "keys.view(np.int64) has the keys that lookups make of such ids."
        )
    return keys.astype(np.int64, copy=False)
