"""Holds documents against structural schemas, those of Kubernetes' custom resources.

    python -m tests.manifest_schemas.checker DEFINITION.yaml ... <MANIFEST.yaml

prints what is wrong with the documents of the kinds that the published definitions describe.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def complaints(value: Any, schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yields a line for each place where a value isn't what the schema wants; unknown fields, too.

    Args:
      value: a document, or a part of one.
      schema: its structural schema.
      path: where the part is.
    """
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, (int, str)) or isinstance(value, bool):
            yield f"{path}: {value!r} is neither an integer nor a string"
    elif "type" in schema:
        types = _TYPES[schema["type"]]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            yield f"{path}: {value!r} is no {schema['type']}"
            return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} isn't one of {schema['enum']}"
    if "minimum" in schema and value < schema["minimum"]:
        yield f"{path}: {value} is below {schema['minimum']}"
    if isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", sys.maxsize):
            yield f"{path}: {value!r} has the wrong length"
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{path}: {value!r} doesn't match {schema['pattern']}"
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from complaints(item, schema.get("items", {}), f"{path}[{index}]")
    if isinstance(value, dict):
        yield from _fields(value, schema, path)


def _fields(value: dict[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}.{name} is missing"
    properties = schema.get("properties", {})
    # An object without a description, as the metadata in a definition, may hold anything.
    described = "properties" in schema or "additionalProperties" in schema
    for name, field in value.items():
        inner = properties.get(name, schema.get("additionalProperties"))
        if isinstance(inner, dict):
            yield from complaints(field, inner, f"{path}.{name}")
        elif described and not schema.get("x-kubernetes-preserve-unknown-fields"):
            yield f"{path}.{name} is unknown"


def schemas(file: str) -> dict[str, Any]:
    """Reads a file of this folder."""
    return yaml.safe_load((FOLDER / file).read_text(encoding="utf-8"))


def definition_schemas(path: str) -> dict[tuple[str, str], Any]:
    """Reads a custom resource definition: the schema of each version, by apiVersion and kind."""
    spec = yaml.safe_load(Path(path).read_text(encoding="utf-8"))["spec"]
    return {
        (f"{spec['group']}/{version['name']}", spec["names"]["kind"]): version["schema"][
            "openAPIV3Schema"
        ]
        for version in spec["versions"]
    }


def main(paths: list[str]) -> int:
    published = {key: schema for path in paths for key, schema in definition_schemas(path).items()}
    failed = False
    for document in yaml.safe_load_all(sys.stdin):
        key = (document["apiVersion"], document["kind"])
        if key not in published:
            print(*key, "not described")
            continue
        lines = list(complaints(document, published[key]))
        print(*key, "ok" if not lines else "is wrong:", *lines, sep="\n  " if lines else " ")
        failed |= bool(lines)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
