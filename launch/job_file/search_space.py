"""Understands ranges of hyperparameters, in Determined's words.

    lr: 0.1                                               a value
    lr: {type: const, val: 0.1}                           the same
    lr: {type: double, minval: 0.001, maxval: 0.1}        a range, for a search
    lr: {type: log, base: 10, minval: -3, maxval: -1}     from base**minval to base**maxval
    width: {type: int, minval: 16, maxval: 64}
    width: {type: categorical, vals: [16, 32, 64]}

A mapping without `type` is a value that has parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from collective.yaml_file import Place, nearest

_KEYS = {
    "const": {"val"},
    "int": {"minval", "maxval"},
    "double": {"minval", "maxval"},
    "log": {"minval", "maxval", "base"},
    "categorical": {"vals"},
}
RANGES = ("int", "double", "log", "categorical")


def is_spelt_out(value: Any) -> bool:
    """Tells whether a value is one of Determined's mappings with a type."""
    return isinstance(value, Mapping) and value.get("type") in _KEYS


def is_range(value: Any) -> bool:
    """Tells whether a value stands for several: a search has to choose one."""
    return is_spelt_out(value) and value["type"] in RANGES


def settled(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters with each constant as its value; without ranges."""
    return {
        name: value["val"] if is_spelt_out(value) else value
        for name, value in hyperparameters.items()
        if not is_range(value)
    }


def ranges(hyperparameters: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the hyperparameters that are ranges."""
    return {name: value for name, value in hyperparameters.items() if is_range(value)}


def complaints(hyperparameters: Mapping[str, Any], place: Place) -> Iterator[tuple[Place, str]]:
    """Yields what is wrong with hyperparameters, and where."""
    for name, value in hyperparameters.items():
        here = (*place, name)
        if is_spelt_out(value):
            yield from _of_range(value, here)
            continue
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            yield here, f"a rank gets it as JSON, which {value!r} isn't. Quote it."


def _of_range(value: Mapping[str, Any], place: Place) -> Iterator[tuple[Place, str]]:
    kind, keys = value["type"], _KEYS[value["type"]]
    for key in sorted(keys - {"base"} - set(value)):
        yield (*place, key), f"it is missing; a {kind} has {', '.join(sorted(keys))}."
    for key in value:
        if key not in keys | {"type", "count"}:
            yield (*place, key), f"a {kind} has no such key.{nearest(key, keys)}"
    if keys - {"base"} - set(value):
        return
    if "minval" in keys:
        number = (int,) if kind == "int" else (int, float)
        for key in sorted(keys & set(value)):
            if not isinstance(value[key], number) or isinstance(value[key], bool):
                text = f"it is a {'whole ' if kind == 'int' else ''}number, not {value[key]!r}."
                yield (*place, key), text
                return
        if value["minval"] >= value["maxval"]:
            yield (
                (*place, "maxval"),
                f"it is {value['maxval']}, not more than minval, {value['minval']}.",
            )
        if value.get("base", 10) <= 1:
            yield (*place, "base"), f"it is a number above 1, not {value['base']}."
    if kind == "categorical" and not (isinstance(value["vals"], list) and value["vals"]):
        yield (*place, "vals"), f"it is a list of values, not {value['vals']!r}."
