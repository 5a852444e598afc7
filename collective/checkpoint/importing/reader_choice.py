"""Chooses the reader of another framework's checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from collective.checkpoint.importing import conversion, deeprec, hybridbackend, sok
from collective.checkpoint.reading.name_map import NAMES, NameMap

READERS: Mapping[str, Callable[..., Any]] = {
    "deeprec": deeprec.read,
    "hybridbackend": hybridbackend.read,
    "sok": sok.read,
}


def import_checkpoint(
    framework: str, path: str, target: str, names: NAMES | NameMap, slots: bool, **options: Any
) -> conversion.Report:
    """Imports a checkpoint (see `collective.checkpoint.import_checkpoint`)."""
    if framework not in READERS:
        raise ValueError(f"framework is {' or '.join(map(repr, READERS))}, not {framework!r}.")
    given = {name: value for name, value in options.items() if value}
    read = READERS[framework]
    foreign = sorted(set(given) - set(read.__code__.co_varnames[: read.__code__.co_argcount]))
    if foreign:
        raise ValueError(f"{', '.join(foreign)} has no effect on a checkpoint of {framework}.")
    source = read(path, **given)
    name_map = names if isinstance(names, NameMap) else NameMap(names)
    return conversion.convert(source, target, name_map, slots)
