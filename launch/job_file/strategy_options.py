"""Checks a job file's options of `strategy.scope()` by their own declarations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from collective.options import ScopeOptions, declaration
from collective.yaml_file import Place, nearest

BACKEND = "backend"  # COLLECTIVE_STRATEGY
BACKENDS = ("hb", "sok")


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
    for name, field in declaration.fields(ScopeOptions).items():
        text = " ".join(field.metadata["text"].split())
        properties[name] = {"description": text, "default": _plain(field.default)}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
