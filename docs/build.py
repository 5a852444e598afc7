"""Builds the site of the documentation: `make docs` writes build/docs/index.html.

    python docs/build.py [FOLDER]      another folder than build/docs; what is in it is removed

It needs no network. It fails where a public name lacks documentation (a module, class, method or
function without a docstring, or a parameter that the docstring doesn't name), where a link of a
page leads nowhere, and where a page speaks of a name, variable or target that isn't there.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# Without a GPU TensorFlow's import says that it can't register CUDA's libraries.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "docs"
# What users import; the rest of the package is documented in its files.
PUBLIC_MODULES = (
    "collective",
    "collective.checkpoint",
    "collective.data",
    "collective.feature_column",
    "collective.launch",
    "collective.options",
    "collective.serving",
    "collective.train",
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


def build_api(folder: Path) -> None:
    """Writes the pages of the public modules, of their docstrings."""
    import pdoc

    import docs_pages

    for name in PUBLIC_MODULES:
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            # The package loads its names when they are first used; pdoc looks, but doesn't use.
            thing = getattr(module, public)
            setattr(module, public, thing)
            if inspect.isclass(thing):
                _hide_overrides(thing)
    pdoc.render.configure(
        docformat="google",
        include_undocumented=False,
        show_source=False,
        template_directory=ROOT / "docs" / "theme",
    )
    # The launcher's parts are no API: its command line is.
    pdoc.pdoc(*PUBLIC_MODULES, r"!collective\.launch\.", output_directory=folder)
    style = f"<style>{docs_pages.code_colours('.pdoc-code')}</style>"
    for file in folder.rglob("*.html"):
        html = _without_guessed_links(file.read_text("utf-8"))
        file.write_text(html.replace("</head>", f"{style}</head>"), encoding="utf-8")


def _without_guessed_links(html: str) -> str:
    """Takes links away from parameters that pdoc took for hidden members of the same name."""
    anchors = set(re.findall(r'\bid="([^"]+)"', html))

    def link_or_text(link: re.Match[str]) -> str:
        return link[0] if link[1] in anchors else link[2]

    return re.sub(r'<a href="#([\w.]+)">([\w.]+)</a>', link_or_text, html)


def _hide_overrides(kind: type) -> None:
    """Leaves out what a class overrides without a word: TensorFlow documents it, with its links."""
    for name, value in vars(kind).items():
        is_overridden = any(hasattr(base, name) for base in kind.__mro__[1:])
        is_mutable = inspect.isfunction(value) or isinstance(value, property)
        if is_overridden and is_mutable and not value.__doc__:
            value.__doc__ = "@private"


def main(site: Path = SITE) -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
    missing = [
        line for name in PUBLIC_MODULES for line in undocumented(importlib.import_module(name))
    ]
    if missing:
        sys.exit("\n".join(["These public names are not documented:", *missing]))
    import docs_checks
    import docs_pages

    shutil.rmtree(site, ignore_errors=True)
    build_api(site / "api")
    pages = docs_pages.read_all(ROOT, docs_pages.api_names(site / "api"))
    problems = [*docs_pages.problems(ROOT, pages), *docs_checks.unknown_names(ROOT, pages)]
    if not problems:
        docs_pages.write(site, ROOT, pages)
        problems = docs_checks.broken_links(site)

    if problems:
        sys.exit("\n".join(["These pages are wrong:", *problems]))
    print(site / "index.html")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
