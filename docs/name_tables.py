"""Writes the tables of other frameworks' names into the pages that print them.

    python docs/name_tables.py      writes the pages in docs/coming-from

A table is found by its head, whose first cell is a title of SECTIONS. A name is a row of the first
section that has it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from collective.compat.framework import PROMISES, Framework, Name  # noqa: E402
from collective.compat.names.contrib import CONTRIB, MOVED  # noqa: E402
from collective.compat.names.deeprec import DEEPREC  # noqa: E402
from collective.compat.names.distributed_embeddings import (  # noqa: E402
    DISTRIBUTED_EMBEDDINGS,
)
from collective.compat.names.estimator import ESTIMATORS  # noqa: E402
from collective.compat.names.horovod import HOROVOD  # noqa: E402
from collective.compat.names.hybridbackend import HYBRIDBACKEND  # noqa: E402
from collective.compat.names.sok import SOK  # noqa: E402
from collective.compat.names.tfra import TFRA  # noqa: E402

FRAMEWORKS: tuple[Framework, ...] = (
    DEEPREC,
    HYBRIDBACKEND,
    SOK,
    HOROVOD,
    DISTRIBUTED_EMBEDDINGS,
    TFRA,
)
SECTIONS: tuple[tuple[str, tuple[Name, ...]], ...] = (
    ("tf.estimator", ESTIMATORS),
    ("tf.contrib", CONTRIB),
    ("TensorFlow 1.15", MOVED),
    *((framework.title, framework.names) for framework in FRAMEWORKS),
)


def tables() -> dict[str, list[str]]:
    """Returns the rows of each table, by its head."""
    found = {"| promise | meaning |": [f"| {name} | {text} |" for name, text in PROMISES.items()]}
    printed: set[Name] = set()
    for title, names in SECTIONS:
        rows = [name.row() for name in names if name not in printed]
        found[f"| {title} | here | promise | since |"] = rows
        printed.update(names)
    return found


def pages() -> list[Path]:
    """Returns the pages that may have tables of names."""
    return sorted((ROOT / "docs" / "coming-from").glob("*.md"))


def filled(text: str) -> str:
    """Returns the text of a page with the rows of its tables of names."""
    return "".join(f"{line}\n" for line in _filled(text.splitlines()))


def _filled(lines: list[str]) -> Iterator[str]:
    rows_by_head = tables()
    is_inside = False
    for line in lines:
        is_inside = is_inside and line.startswith("|")
        if line in rows_by_head:
            yield line
            yield "|" + "---|" * (line.count("|") - 1)
            yield from rows_by_head[line]
            is_inside = True
        if not is_inside:
            yield line


def main() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if filled(text) != text:
            page.write_text(filled(text), encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
