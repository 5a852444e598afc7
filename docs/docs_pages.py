"""Reads the Markdown pages of the repository, as the pages of a site.

A link to another page leads to its page of the site. A link to another file of the repository leads
to a copy of the file. Code that names a part of the API links to it.
"""

from __future__ import annotations

import dataclasses
import html
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import markdown
from markdown.extensions.codehilite import CodeHiliteExtension
from markdown.extensions.toc import TocExtension
from markdown.preprocessors import Preprocessor
from markdown.treeprocessors import Treeprocessor

import docs_layout

# What users import; the rest of the package is documented in its files.
PUBLIC_MODULES = (
    "collective",
    "collective.checkpoint",
    "collective.data",
    "collective.feature_column",
    "collective.features",
    "collective.keras.callbacks",
    "collective.launch",
    "collective.options",
    "collective.serving",
    "collective.testing",
    "collective.train",
    "collective.trainer",
)
# The sections of the list of pages: a title, and what is in it.
NAVIGATION: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "",
        ("docs/index.md", "docs/quick-start.md", "docs/install.md", "docs/how-fast.md"),
    ),
    (
        "Coming from",
        (
            "docs/coming-from/tensorflow.md",
            "docs/coming-from/keras.md",
            "docs/coming-from/deeprec.md",
            "docs/coming-from/hybridbackend-sok.md",
            "docs/coming-from/horovod.md",
            "docs/coming-from/distributed-embeddings.md",
            "docs/coming-from/tfra.md",
            "docs/coming-from/torchrec.md",
            "docs/coming-from/persia.md",
            "docs/coming-from/determined.md",
        ),
    ),
    (
        "Guides",
        (
            "docs/guides/tables.md",
            "docs/guides/keras.md",
            "docs/guides/data.md",
            "docs/guides/features.md",
            "docs/guides/streams.md",
            "docs/guides/checkpoints.md",
            "docs/guides/estimator.md",
            "docs/guides/trainer.md",
            "docs/guides/serving.md",
            "docs/guides/running.md",
            "docs/guides/jobs.md",
            "docs/guides/hosts.md",
            "docs/guides/clusters.md",
            "docker/README.md",
            "docs/guides/metrics.md",
            "docs/guides/testing.md",
            "docs/guides/performance.md",
            "docs/guides/placement.md",
            "docs/guides/gpus.md",
            "docs/troubleshooting.md",
        ),
    ),
    (
        "Examples",
        ("modelzoo/README.md", "modelzoo/movielens/README.md", "modelzoo/hashed_ids/README.md"),
    ),
    ("Reference", ("docs/equal-to-tensorflow.md", "SECURITY.md", "CHANGELOG.md")),
    ("API", PUBLIC_MODULES),
    (
        "How it is built",
        (
            "docs/architecture.md",
            "CONTRIBUTING.md",
            "benchmarks/RESULTS.md",
            "benchmarks/RESULTS-checkpoint.md",
            "benchmarks/RESULTS-dynamic.md",
            "benchmarks/GPU.md",
        ),
    ),
)
# The page that is made of messages and what to do.
MESSAGES = "docs/troubleshooting.md"
FOLDERS = ("docs", "modelzoo", "benchmarks", "docker")
IMAGES = (".svg", ".png", ".jpg")
SOURCES = (".py", ".sh", ".md", ".cc", ".h", ".cu", ".cuh", ".toml", ".txt", ".tsv", ".yaml")


@dataclasses.dataclass
class Page:
    """Holds a page.

    Attributes:
        source: its file, from the root of the repository.
        target: its file in the site.
        text: its Markdown.
        title: its first heading.
        body: its HTML.
        headings: (anchor, text) of the headings of the second level.
        anchors: of all its headings.
        links: as they are written, those that leave the repository excepted.
        code: the texts of its code spans.
    """

    source: str
    target: str
    text: str
    title: str = ""
    body: str = ""
    headings: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    anchors: set[str] = dataclasses.field(default_factory=set)
    links: list[str] = dataclasses.field(default_factory=list)
    code: list[str] = dataclasses.field(default_factory=list)

    def place_of(self, link: str) -> tuple[str, str]:
        """Returns (the file or folder that a link names, from the root; the anchor in it)."""
        path, _, anchor = link.partition("#")
        if not path:
            return self.source, anchor
        return posixpath.normpath(posixpath.join(posixpath.dirname(self.source), path)), anchor


# ---- Reading


def read_all(root: Path, api: Mapping[str, str] | None = None) -> list[Page]:
    """Reads all pages of a repository.

    Args:
        root: the repository.
        api: where in the site a name of the API is documented.
    """
    files = [*root.glob("*.md")]
    for folder in FOLDERS:
        files += (root / folder).rglob("*.md")
    sources = sorted(file.relative_to(root).as_posix() for file in files)
    pages = []
    for source in sources:
        text = (root / source).read_text(encoding="utf-8")
        pages.append(read(source, text, sources, api or {}))
    return pages


def read(source: str, text: str, sources: Iterable[str], api: Mapping[str, str]) -> Page:
    """Reads one page.

    Args:
        source: its file, from the root of the repository.
        text: its Markdown.
        sources: the files of all pages.
        api: see `read_all`.
    """
    page = Page(source, target_of(source), text)
    reader = markdown.Markdown(
        extensions=[
            "tables",
            "fenced_code",
            CodeHiliteExtension(guess_lang=False, css_class="highlight"),
            TocExtension(slugify=anchor_of, permalink="#", permalink_class="headerlink"),
        ]
    )
    # After code in fences was taken out.
    reader.preprocessors.register(_ListIndenter(), "lists", 15)
    # After the spans of a block were read, and before headings get their anchors.
    reader.treeprocessors.register(_LinkReader(page, set(sources), api), "links", 10)
    # What pages tell their tests, in comments, is for no reader.
    page.body = reader.convert(re.sub(r"(?ms)^ *<!-- docs: .*?-->\n+", "", text))
    if source == MESSAGES:
        page.body = re.sub(
            r'<div class="highlight">(<pre>.*?</pre>)', _message, page.body, flags=re.S
        )
    for heading in _all_headings(reader.toc_tokens):
        page.anchors.add(heading["id"])
        if heading["level"] == 1 and not page.title:
            page.title = heading["name"]
        if heading["level"] == 2:
            page.headings.append((heading["id"], heading["name"]))
    return page


def _message(block: re.Match[str]) -> str:
    """Gives a message that a page quotes an anchor, which a search leads to."""
    text = html.unescape(re.sub(r"<[^>]*>", "", block[1]))
    anchor = re.sub("-+", "-", anchor_of(" ".join(text.split()))[:60].strip("-"))
    return f'<div class="highlight part" id="{anchor}">{block[1]}'


def target_of(source: str) -> str:
    """Returns the file of the site that a page is written to: docs/index.md is the first page."""
    folder, name = posixpath.split(source)
    if folder and name == "README.md":
        name = "index.md"
    path = posixpath.join(folder, name)
    return path.removeprefix("docs/").lower().removesuffix(".md") + ".html"


def anchor_of(heading: str, separator: str = "-") -> str:
    """Returns the anchor of a heading, the one by which links on GitHub reach it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def _all_headings(tokens: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for token in tokens:
        yield token
        yield from _all_headings(token["children"])


class _ListIndenter(Preprocessor):
    """Indents what belongs to an item of a list by four, where GitHub is content with two.

    An item of several paragraphs ends with an empty line. Fenced code of an item becomes indented.
    """

    def run(self, lines: list[str]) -> list[str]:
        indented: list[str] = []
        within, has_paragraphs, is_code = 0, False, False
        for line in lines:
            marker = re.match(r"- |\d+\. ", line)
            if marker:
                if has_paragraphs and indented[-1]:
                    indented.append("")
                within, has_paragraphs = len(marker[0]), False
            elif within and line.startswith(" " * within):
                has_paragraphs |= not indented[-1]
                line = line[within:]
                if line.startswith("```"):
                    is_code = not is_code
                    line = line.replace("```", " " * 8 + ":::") if is_code else ""
                else:
                    line = " " * (8 if is_code else 4) + line
            elif line:
                within, has_paragraphs = 0, False
            indented.append(line)
        return indented


class _LinkReader(Treeprocessor):
    """Notes the links and code of a page, and lets links lead to files of the site."""

    def __init__(self, page: Page, sources: set[str], api: Mapping[str, str]) -> None:
        super().__init__()
        self._page, self._sources, self._api = page, sources, api
        self._root = "../" * page.target.count("/")

    def run(self, root: ElementTree.Element) -> None:
        for tag, attribute in (("a", "href"), ("img", "src")):
            for element in root.iter(tag):
                element.set(attribute, self._link_in_site(element.get(attribute, "")))
        for parent in root.iter():
            if parent.tag not in ("a", "pre", "h1", "h2", "h3", "h4"):
                self._link_code(parent)
        docs_layout.lay_out(root)

    def _link_in_site(self, link: str) -> str:
        if re.match(r"[a-z]+:", link):
            return link
        self._page.links.append(link)
        place, anchor = self._page.place_of(link)
        if place in self._sources:
            target = target_of(place)
        elif f"{place}/README.md" in self._sources:
            target = target_of(f"{place}/README.md")
        else:
            target = copy_of(place)
        return self._root + target + ("#" + anchor if anchor else "")

    def _link_code(self, parent: ElementTree.Element) -> None:
        for position, child in enumerate(parent):
            if child.tag != "code":
                continue
            text = child.text or ""
            self._page.code.append(text)
            name = re.fullmatch(r"([\w.]+)(\(.*\))?", text, re.DOTALL)
            target = name and self._api.get(name[1])
            if target:
                link = ElementTree.Element("a", href=self._root + target)
                link.tail, child.tail = child.tail, None
                parent[position] = link
                link.append(child)


def copy_of(place: str) -> str:
    """Returns the file of the site that has a copy of a file of the repository."""
    if place.endswith(IMAGES):
        return place.removeprefix("docs/")
    return f"source/{place}.html"


# ---- Checking


def problems(root: Path, pages: Sequence[Page]) -> list[str]:
    """Lists the links that lead nowhere, and pages that can't be reached."""
    by_source = {page.source: page for page in pages}
    found = []
    for page in pages:
        for link in page.links:
            reason = _broken(root, page, link, by_source)
            if reason:
                found.append(f"{page.source}: the link {link}: {reason}")
    listed = {entry for _, entries in NAVIGATION for entry in entries} - set(PUBLIC_MODULES)
    found += [f"{entry}: there is no such page to list" for entry in listed - set(by_source)]
    for page in pages:
        if page.source.startswith("docs/") and page.source not in listed:
            found.append(f"{page.source}: no section of NAVIGATION lists it")
    return found


def _broken(root: Path, page: Page, link: str, by_source: Mapping[str, Page]) -> str:
    """Says why a link leads nowhere; "" if it leads somewhere."""
    place, anchor = page.place_of(link)
    if place.startswith("..") or not (root / place).exists():
        return "there is no such file"
    if not anchor:
        return ""
    other = by_source.get(place)
    if other is None:
        return "only pages have headings"
    return "" if anchor in other.anchors else f"{place} has no heading #{anchor}"
