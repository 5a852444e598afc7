"""Keeps what the library knows about a graph outside of the graph, in records that modules define.

A record lives and dies with its graph. Each module that remembers something defines a dataclass for
it, the record's kind, and no other layer's record is known here. The graph of a function or a
branch has its own records: those of `outermost(graph)` are of the graph that a session runs.
"""

from __future__ import annotations

import threading
from typing import TypeVar

import tensorflow.compat.v1 as tf

Kind = TypeVar("Kind")

_MAKING = threading.RLock()


def of(graph: tf.Graph, kind: type[Kind]) -> Kind:
    """Returns the record of `kind` of `graph`; `kind()` makes it at its first use.

    Threads that use a graph at once get the same record.
    """
    records: dict[type[Kind], Kind] = getattr(graph, "_collective_records", {})
    record = records.get(kind)
    return _made(graph, kind) if record is None else record


def _made(graph: tf.Graph, kind: type[Kind]) -> Kind:
    with _MAKING:
        records: dict[type[Kind], Kind] | None = getattr(graph, "_collective_records", None)
        if records is None:
            records = graph._collective_records = {}
        record = records.get(kind)
        if record is None:
            record = records[kind] = kind()
        return record
