"""Makes the index by which the site is searched.

It is a script: a page that is opened as a file can load one, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser

from docs_pages import NAVIGATION, Page

HEADINGS = ("h1", "h2", "h3", "h4")


def index(pages: Iterable[Page]) -> str:
    """Returns the index as a script, which sets `searchIndex`.

    It is {"pages": [[title, file]], "sections": [[number of the page, anchor, heading, text]]}, in
    the order of the list of pages.
    """
    by_source = {page.source: page for page in pages}
    listed = [by_source[source] for _, sources in NAVIGATION for source in sources]
    found = {
        "pages": [[page.title, page.target] for page in listed],
        "sections": [
            [number, *section]
            for number, page in enumerate(listed)
            for section in sections(page.body)
        ],
    }
    return f"var searchIndex = {json.dumps(found, ensure_ascii=False, separators=(',', ':'))};\n"


def sections(html: str) -> Iterator[tuple[str, str, str]]:
    """Yields (anchor, heading, text) of the sections of a page; the first may have no anchor."""
    parser = _SectionParser()
    parser.feed(html)
    for anchor, heading, text in parser.sections:
        if heading.strip() or text.strip():
            yield anchor, " ".join(heading.split()), " ".join(text.split())


class _SectionParser(HTMLParser):
    """Divides a page at its headings, and at the members of a page of the API."""

    def __init__(self) -> None:
        super().__init__()
        self.sections = [["", "", ""]]
        self._is_heading = self._is_link_to_itself = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        anchor = values.get("id") or ""
        if anchor and tag in HEADINGS:
            self.sections.append([anchor, "", ""])
            self._is_heading = True
        elif anchor and (tag == "section" or values.get("class") == "part"):
            self.sections.append([anchor, anchor, ""])
        elif anchor and tag == "div":  # a message of the page of messages
            self.sections.append([anchor, "", ""])
        elif tag == "a":
            self._is_link_to_itself = values.get("class") == "headerlink"
        elif tag not in ("code", "em", "strong", "span", "wbr"):
            self.handle_data(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag in HEADINGS:
            self._is_heading = False
        elif tag == "a":
            self._is_link_to_itself = False

    def handle_data(self, text: str) -> None:
        if not self._is_link_to_itself:
            self.sections[-1][1 if self._is_heading else 2] += text
