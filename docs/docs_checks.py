"""Checks that what the pages speak of is there: links of the site, names, variables, targets."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from docs_pages import Page

# Where environment variables are read, by programs and by tools.
PROGRAMS = (
    "collective",
    "launch",
    "ops",
    "strategies",
    "modelzoo",
    "benchmarks",
    "tools",
    "tests",
    ".ci",
)

# ---- Links


class _LinkParser(HTMLParser):
    """Collects the anchors of a page, and its links with the attribute that has them."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for attribute, value in attributes:
            if attribute == "id" and value:
                self.anchors.add(value)
            elif attribute in ("href", "src") and value:
                # A page may name an address, but loads nothing from it.
                self.links.append((attribute if tag == "a" else "src", value))


def broken_links(site: Path) -> list[str]:
    """Lists the links of a site's pages that lead nowhere, and what they load from elsewhere."""
    parsed: dict[Path, _LinkParser] = {}
    for file in sorted(site.rglob("*.html")):
        parsed[file] = _LinkParser()
        parsed[file].feed(file.read_text(encoding="utf-8"))
    found = []
    for file, page in parsed.items():
        for attribute, link in page.links:
            reason = _broken(site, file, attribute, link, parsed)
            if reason:
                found.append(f"{file.relative_to(site)}: the link {link}: {reason}")
    return found


def _broken(
    site: Path, file: Path, attribute: str, link: str, parsed: Mapping[Path, _LinkParser]
) -> str:
    """Says why a link leads nowhere; "" if it leads somewhere."""
    if link.startswith(("data:", "mailto:")):
        return ""
    if re.match(r"[a-z]+:|//", link):
        return "it is loaded from the network" if attribute == "src" else ""
    path, _, anchor = unquote(link).partition("#")
    target = (file.parent / path).resolve() if path else file
    if not target.is_file() or site.resolve() not in target.resolve().parents:
        return "there is no such file"
    if anchor and anchor not in parsed[target].anchors:
        return f"{target.relative_to(site.resolve())} has no #{anchor}"
    return ""


# ---- Names


def unknown_names(root: Path, pages: Iterable[Page]) -> list[str]:
    """Lists what pages speak of, and the repository lacks; and Python in them that can't be read.

    These are names of the package, methods of the strategy, options of its scopes, environment
    variables, and targets of the Makefile.
    """
    variables = _environment_variables(root)
    targets = set(re.findall(r"^([\w-]+):", (root / "Makefile").read_text("utf-8"), re.MULTILINE))
    found = []
    for page in pages:
        if page.source == "CHANGELOG.md":  # it speaks of what was
            continue
        for name in sorted(set(re.findall(r"\bCOLLECTIVE_[A-Z_]+[A-Z]\b", page.text))):
            if name not in variables:
                found.append(f"{page.source}: no program reads {name}")
        commands = "".join(re.findall(r"^```sh\n(.*?)^```", page.text, re.MULTILINE | re.DOTALL))
        targets_of_page = re.findall(r"(?:^ {4}|`)make ([a-z][\w-]*)", page.text, re.MULTILINE)
        targets_of_page += re.findall(r"^make ([a-z][\w-]*)", commands, re.MULTILINE)
        for name in targets_of_page:
            if name not in targets:
                found.append(f"{page.source}: the Makefile has no target {name}")
        found += [f"{page.source}: {line}" for text in page.code for line in _unknown_names(text)]
        found += [f"{page.source}: {line}" for line in _unreadable_code(page.text)]
    return found


def _environment_variables(root: Path) -> set[str]:
    found = set()
    for folder in PROGRAMS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".py", ".sh", ".cc") or file.parent.name == ".ci":
                found |= set(re.findall(r"\bCOLLECTIVE_[A-Z_]+", file.read_text("utf-8")))
    return found


def _unknown_names(text: str) -> Iterator[str]:
    """Yields a line for each name in a code span that doesn't exist."""
    for dotted in re.findall(r"(?<![\w./])collective(?:\.[A-Za-z]\w*)+", text):
        if not _is_there(dotted.split(".")):
            yield f"there is no {dotted}"
    from collective import CollectiveStrategy

    for method in re.findall(r"(?<![\w.])strategy\.(?!py\b)([a-z]\w*)", text):
        if not hasattr(CollectiveStrategy, method):
            yield f"a strategy has no {method}"
    for scope, arguments in re.findall(r"(?<!\w)(scope|embedding_scope)\(([^()]*)\)", text):
        parameters: Mapping[str, Any] = inspect.signature(
            getattr(CollectiveStrategy, scope)
        ).parameters
        for option in re.findall(r"(\w+)=", arguments):
            if option not in parameters:
                yield f"{scope}() has no option {option}"


def _is_there(names: Sequence[str]) -> bool:
    """Tells whether a dotted name is a module, or an attribute of one.

    A module is only found, not imported: to import one that lets scripts of other frameworks run
    changes the process.
    """
    if _is_module(".".join(names)):
        return True
    for length in range(len(names), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(names[:length]))
        except ModuleNotFoundError:
            continue
        for name in names[length:]:
            if not hasattr(thing, name):
                return False
            thing = getattr(thing, name)
        return True
    return False


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # What is before the last dot is no package.
        return False


def _unreadable_code(text: str) -> Iterator[str]:
    for code in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        try:
            compile(code, "the page", "exec")
        except SyntaxError as error:
            yield f"Python can't read {(error.text or '').strip()!r}: {error.msg}"
