"""Marks operations that stand in for compiled ones, and reads types and attributes of either."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.core.framework import attr_value_pb2

_KIND, _ATTRIBUTES = "_collective_kind", "_collective_attributes"
_TABLES = "_collective_tables"


def table_marks(tables: Sequence[str]) -> dict[str, Any]:
    """Returns attributes that mark an operation as one by kernels, about tables of these names."""
    return {_TABLES: attr_value_pb2.AttrValue(s=json.dumps(list(tables)).encode())}


def tables(op: tf.Operation) -> list[str] | None:
    """Returns the names of the tables that `op` is about; None unless it is one by kernels."""
    if _TABLES not in op.node_def.attr:
        return None
    return list(json.loads(op.get_attr(_TABLES).decode()))


def marks(kind: str, attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns attributes that mark an operation as the stand-in for one of this kind."""
    return {
        _KIND: attr_value_pb2.AttrValue(s=kind.encode()),
        _ATTRIBUTES: attr_value_pb2.AttrValue(s=json.dumps(attributes).encode()),
    }


def kind(op: tf.Operation) -> str:
    """Returns the type of `op`, or of the compiled operation for which it stands in."""
    return str(op.get_attr(_KIND).decode()) if stands_in(op) else str(op.type)


def attribute(op: tf.Operation, name: str) -> Any:
    """Returns an attribute of `op`, or of the compiled operation for which it stands in."""
    return (
        json.loads(op.get_attr(_ATTRIBUTES).decode())[name] if stands_in(op) else op.get_attr(name)
    )


def stands_in(op: tf.Operation) -> bool:
    """Tells whether `op` stands in for a compiled operation."""
    return op.type == "EagerPyFunc" and _KIND in op.node_def.attr
