"""Checks a job file's options of `strategy.scope()` by their own declarations."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from collective.options import ScopeOptions, declaration
from collective.options.scopes import DType
from collective.yaml_file import Place, nearest

BACKEND = "backend"  # COLLECTIVE_STRATEGY
BACKENDS = ("hb", "sok")
_UNIONS = (typing.Union, getattr(types, "UnionType", typing.Union))  # Python 3.9 has one


def complaints(given: Mapping[str, Any], place: Place) -> Iterator[tuple[Place, str]]:
    """Yields which options there aren't, or can't have their values."""
    known = declaration.fields(ScopeOptions)
    for name, value in given.items():
        here = (*place, name)
        if name == BACKEND:
            if value not in BACKENDS:
                yield here, f"it is one of {', '.join(BACKENDS)}, not {value!r}."
        elif name not in known:
            guess = nearest(name, [*known, BACKEND])
            yield here, f"strategy.scope() has no such option.{guess}"
        elif not known[name].metadata["rule"].holds(value):
            yield here, f"it is {known[name].metadata['rule'].words}, not {value!r}."


def schema() -> dict[str, Any]:
    """Returns the JSON schema of the options."""
    properties: dict[str, Any] = {
        BACKEND: {"enum": list(BACKENDS), "description": "The strategy: what is exchanged."}
    }
    try:
        hints = typing.get_type_hints(ScopeOptions)
    except TypeError:  # Python 3.9 can't evaluate `X | Y`: its schema lists no values
        hints = {}
    for name, field in declaration.fields(ScopeOptions).items():
        text = " ".join(field.metadata["text"].split())
        properties[name] = {"description": text, "default": _plain(field.default)}
        values = list(_values(hints.get(name)))
        if values and all(field.metadata["rule"].holds(value) for value in values):
            properties[name]["enum"] = values
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _values(hint: Any) -> Iterator[Any]:
    """Yields the values that a type has, if they can be listed; the file has no tf.DType."""
    if hint is bool:
        yield from (False, True)
    elif hint is type(None):
        yield None
    elif typing.get_origin(hint) is typing.Literal:
        yield from typing.get_args(hint)
    elif typing.get_origin(hint) in _UNIONS:
        inner = [list(_values(each)) for each in typing.get_args(hint) if each is not DType]
        if all(inner):
            yield from (value for values in inner for value in values)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
