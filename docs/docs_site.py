"""Writes the pages as a site: in one frame, with the list of all pages and a search over them."""

from __future__ import annotations

import posixpath
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pygments
import pygments.formatters
import pygments.lexers

import docs_search
from docs_pages import IMAGES, NAVIGATION, SOURCES, Page, copy_of

# Code of pages, of docstrings, and in signatures.
CODE = [".highlight", ".pdoc-code"]


def write(site: Path, root: Path, pages: Sequence[Page]) -> None:
    """Writes the pages, and the files of the repository that they link to."""
    theme = root / "docs" / "theme"
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(theme), trim_blocks=True, lstrip_blocks=True
    )
    writer = _Writer(site, root, templates.get_template("page.html"), _navigation(pages))
    sources = {page.source for page in pages}
    copies = set()
    for page in pages:
        writer.write(page.target, page.title, page.body, page.headings)
        places = [page.place_of(link)[0] for link in page.links]
        copies |= {x for x in places if x not in sources and f"{x}/README.md" not in sources}
    writer.copy(copies)
    style = (theme / "style.css").read_text(encoding="utf-8")
    (site / "style.css").write_text(style + _code_colours(), encoding="utf-8")
    shutil.copyfile(theme / "search.js", site / "search.js")
    (site / "search-index.js").write_text(docs_search.index(pages), encoding="utf-8")


def _navigation(pages: Sequence[Page]) -> list[dict[str, Any]]:
    by_source = {page.source: page for page in pages}
    # "Coming from DeepRec" is DeepRec, under this heading.
    titles = {page.source: page.title for page in pages} | {"docs/index.md": "Overview"}
    return [
        {
            "title": title,
            "entries": [
                {
                    "title": titles[source].removeprefix(title).strip(),
                    "target": by_source[source].target,
                }
                for source in sources
            ],
        }
        for title, sources in NAVIGATION
    ]


class _Writer:
    """Writes pages in the site's frame."""

    def __init__(
        self,
        site: Path,
        root: Path,
        template: jinja2.Template,
        navigation: Sequence[Mapping[str, Any]],
    ) -> None:
        self._site, self._root = site, root
        self._template, self._navigation = template, navigation

    def write(
        self, target: str, title: str, body: str, headings: Iterable[tuple[str, str]] = ()
    ) -> None:
        file = self._site / target
        file.parent.mkdir(parents=True, exist_ok=True)
        html = self._template.render(
            title=title,
            target=target,
            body=body,
            root="../" * target.count("/"),
            navigation=self._navigation,
            headings=[{"anchor": anchor, "text": text} for anchor, text in headings],
        )
        file.write_text(html, encoding="utf-8")

    def copy(self, places: Iterable[str]) -> None:
        """Copies files of the repository; of a folder it copies the files in it, and lists them."""
        for place in sorted(places):
            path = self._root / place
            if path.is_dir():
                inner = sorted(x.name for x in path.iterdir() if x.suffix in SOURCES)
                self.copy(f"{place}/{name}" for name in inner)
                self.write(copy_of(place), place, _listing(place, inner))
            elif place.endswith(IMAGES):
                target = self._site / copy_of(place)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
            else:
                self.write(copy_of(place), place, _highlighted(path, place))


def _listing(place: str, names: Iterable[str]) -> str:
    folder = posixpath.basename(place)
    entries = [f'<li><a href="{folder}/{name}.html">{name}</a></li>' for name in names]
    return f"<h1><code>{place}/</code></h1>\n<ul>\n" + "\n".join(entries) + "\n</ul>"


def _highlighted(path: Path, place: str) -> str:
    try:
        lexer = pygments.lexers.get_lexer_for_filename(path.name)
    except pygments.util.ClassNotFound:
        lexer = pygments.lexers.TextLexer()
    formatter = pygments.formatters.HtmlFormatter(cssclass="highlight")
    code = pygments.highlight(path.read_text(encoding="utf-8"), lexer, formatter)
    return f"<h1><code>{place}</code></h1>\n{code}"


def _code_colours() -> str:
    """Returns the colours of code, for light screens and for dark ones."""
    light = pygments.formatters.HtmlFormatter(style="friendly", nobackground=True)
    dark = pygments.formatters.HtmlFormatter(style="github-dark", nobackground=True)
    return "\n".join(
        [
            "",
            light.get_style_defs(CODE),
            "@media (prefers-color-scheme: dark) {",
            dark.get_style_defs(CODE),
            "}",
            "",
        ]
    )
