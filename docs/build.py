"""Builds the API pages from docstrings: `make docs` writes build/docs/index.html.

It fails where a public name lacks documentation: a module, class, method or function without a
docstring, or a parameter that the docstring doesn't name.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What users import; the rest of the package is documented in its files.
PUBLIC_MODULES = (
    "collective",
    "collective.checkpoint",
    "collective.feature_column",
    "collective.launch",
    "collective.options",
)


def undocumented(module: ModuleType) -> Iterator[str]:
    """Yields a line for each public name of a module that isn't documented in full."""
    if not module.__doc__:
        yield f"{module.__name__}: no docstring"
    for name in getattr(module, "__all__", ()):
        yield from _undocumented(f"{module.__name__}.{name}", getattr(module, name))


def _undocumented(name: str, thing: Any) -> Iterator[str]:
    if inspect.isclass(thing):
        if not thing.__dict__.get("__doc__"):
            yield f"{name}: no docstring"
        for attribute, value in vars(thing).items():
            is_method = inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod))
            # Methods of the classes that it derives from are documented there.
            inherited = any(hasattr(base, attribute) for base in thing.__mro__[1:])
            if is_method and not attribute.startswith("_") and not inherited:
                yield from _undocumented(f"{name}.{attribute}", getattr(thing, attribute))
    elif inspect.isroutine(thing):
        text = inspect.getdoc(thing)
        if not text:
            yield f"{name}: no docstring"
            return
        for parameter in inspect.signature(thing).parameters.values():
            is_named = parameter.kind is not parameter.VAR_KEYWORD and parameter.name != "self"
            if is_named and not re.search(rf"\b{re.escape(parameter.name)}\b", text):
                yield f"{name}: the docstring doesn't name the parameter {parameter.name}"


def main() -> None:
    sys.path.insert(0, str(ROOT))
    missing = [
        line for name in PUBLIC_MODULES for line in undocumented(importlib.import_module(name))
    ]
    if missing:
        sys.exit("\n".join(["These public names are not documented:", *missing]))
    import pdoc

    for name in PUBLIC_MODULES:
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            # The package loads its names when they are first used; pdoc looks, but doesn't use.
            setattr(module, public, getattr(module, public))
    folder = ROOT / "build" / "docs"
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*PUBLIC_MODULES, output_directory=folder)
    print(folder / "index.html")


if __name__ == "__main__":
    main()
