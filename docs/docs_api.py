"""Makes the pages of the API from the docstrings of the public modules."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import docs_pages

THEME = Path(__file__).parent / "theme"
# Methods by which the parts of the library work together: scripts never call them.
FOR_THE_LIBRARY = {
    "collective.DynamicTable": (
        *("initial_value", "new_store", "new_column", "shard_shape", "placement", "local"),
        *("local_of_tables", "fetch", "ids_of_rows", "rows_of_ids", "refuse", "store"),
        *("ascending", "columns_of_slots", "initialize_slot_rows", "loading"),
    ),
    "collective.EmbeddingConfig": ("to_policy", "without_effect"),
    "collective.EmbeddingVariableOption": ("to_policy", "without_effect"),
    "collective.StorageOption": ("moves_the_least_frequent",),
    "collective.TablePolicy": ("counts_keys", "draws_keys", "memory_bytes", "options"),
    "collective.checkpoint.KeepBest": ("of",),
    "collective.data.WorkQueue": ("contribution", "gather", "restore", "restart"),
    "collective.options.ScopeOptions": ("warm_starts", "runs_between_checks"),
}

# ---- What is documented


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


# ---- Pages


def pages(names: Iterable[str] = docs_pages.PUBLIC_MODULES) -> list[docs_pages.Page]:
    """Returns the pages of public modules."""
    import pdoc

    pdoc.render.configure(
        docformat="google",
        include_undocumented=False,
        show_source=False,
        search=False,
        template_directory=THEME,
    )
    # A package's documentation is of its names; the modules in it that are public have their own.
    modules = {name: pdoc.doc.Module(_loaded(name)) for name in names}
    return [_page(name, pdoc.render.html_module(modules[name], modules)) for name in names]


def _loaded(name: str) -> ModuleType:
    """Returns a module, all of whose public names are loaded, without what scripts never call."""
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        # The package loads its names when they are first used; pdoc looks, but doesn't use.
        thing = getattr(module, public)
        setattr(module, public, thing)
        if inspect.isclass(thing):
            _hide(thing, FOR_THE_LIBRARY.get(f"{name}.{public}", ()))
    return module


def _hide(kind: type, names: Iterable[str]) -> None:
    """Leaves out members by name, and what a class overrides without a word.

    TensorFlow documents the latter, with its links.
    """
    for name, value in vars(kind).items():
        is_overridden = any(hasattr(base, name) for base in kind.__mro__[1:])
        function = getattr(value, "__func__", value)
        is_mutable = inspect.isfunction(function) or isinstance(function, property)
        if is_mutable and (name in names or (is_overridden and not function.__doc__)):
            function.__doc__ = "@private"


def _page(name: str, html: str) -> docs_pages.Page:
    page = docs_pages.Page(name, target_of(name), text="", title=name, body=_plain(html))
    page.anchors = set(re.findall(r'\bid="([^"]+)"', html))
    page.headings = [(x, x) for x in re.findall(r'<section id="([\w.]+)"', html)]
    return page


def target_of(module: str) -> str:
    """Returns the file of the site that documents a module."""
    return f"api/{module.replace('.', '/')}.html"


def _plain(html: str) -> str:
    """Names types without their modules, and links to what is on the page only.

    Pdoc takes parameters for hidden members of the same name.
    """
    anchors = set(re.findall(r'\bid="([^"]+)"', html))

    def link_or_text(link: re.Match[str]) -> str:
        return link[0] if link[1] in anchors else link[2]

    html = re.sub(r'<a href="#([\w.]+)">([\w.]+)</a>', link_or_text, html)
    return re.sub(r'(<span class="n">[a-z_]+</span><span class="o">\.</span>)+(?=<)', "", html)


def places(api: Iterable[docs_pages.Page]) -> dict[str, str]:
    """Maps the names by which pages speak of the API to their places in the site."""
    found: dict[str, str] = {}
    for page in api:
        module = page.source
        found[module] = page.target
        for anchor in re.findall(r'<(?:section|div) id="([\w.]+)"', page.body):
            target = f"{page.target}#{anchor}"
            found[f"{module}.{anchor}"] = target
            owner, _, method = anchor.rpartition(".")
            if owner == "CollectiveStrategy":
                found[anchor] = found[f"strategy.{method}"] = target
            if method.endswith("scope") and module == "collective":
                found[method] = target
            if not owner and module == "collective":
                found[anchor] = target
    # It stands for TensorFlow's, too.
    found.pop("Table", None)
    return found
