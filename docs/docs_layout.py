"""Lays pages out: where their lines and tables may break, and what folds away."""

from __future__ import annotations

import re
from xml.etree import ElementTree

# Code of a table up to this length stays in one piece.
WHOLE = 24
OPTION = r"(?<!\S)--?[a-z][\w-]*"
# After a dot or an underline of a name, but not in a number.
BREAK = r"(?<=[_.:/])(?=[^\W\d])"
NUMBERS = r"[\d.,-]+"
# The title of a column that folds away: who reads the others rarely reads it.
FOLDED = "Tests"


def lay_out(page: ElementTree.Element) -> None:
    """Lays a page out.

    Options stay in one piece. So do numbers and short code in tables, whose long names may break
    after their dots and underlines. A table's last column folds away if it is the one of tests.
    """
    in_tables = set()
    for cell in page.iter("td"):
        _divide(cell, BREAK)
        if re.fullmatch(NUMBERS, "".join(cell.itertext())):
            cell.set("class", "whole")
        for code in cell.iter("code"):
            in_tables.add(code)
            if len(code.text or "") <= WHOLE and " " not in (code.text or ""):
                code.set("class", "whole")
            else:
                _divide(code, BREAK)
    for code in page.iter("code"):
        if code not in in_tables:
            _divide(code)
    for table in page.iter("table"):
        rows = list(table.iter("tr"))
        if rows[0][-1].text == FOLDED:
            _fold_last_column(rows)


def _divide(element: ElementTree.Element, may_break: str = "(?!)") -> None:
    """Keeps the options in an element's text whole, and lets it break at a pattern of no width."""
    text = element.text or ""
    pieces: list[ElementTree.Element] = []
    for position, piece in enumerate(re.split(f"({OPTION}|{may_break})", text)):
        if position % 2:
            pieces.append(ElementTree.Element("span" if piece else "wbr"))
            if piece:
                pieces[-1].set("class", "whole")
                pieces[-1].text = piece
        elif pieces:
            pieces[-1].tail = piece
        else:
            element.text = piece
    element[:0] = pieces


def _fold_last_column(rows: list[ElementTree.Element]) -> None:
    """Puts the last cell of each row into the one before it, under a word to click on."""
    for row in rows:
        last = row[-1]
        row.remove(last)
        if last.tag == "td":
            details = ElementTree.SubElement(row[-1], "details")
            ElementTree.SubElement(details, "summary").text = FOLDED.lower()
            last.tag = "p"
            details.append(last)
