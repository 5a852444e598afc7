"""Every block of code and every command of the pages runs, in the page's order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import blocks
from tests.docs.session import ROOT, Session

IN_TEST = ["README.md"]
# With the quickest guides; the other pages are left to the matrix.
SLOW = ["docs/quick-start.md"]
SLOW += [f"docs/guides/{guide}.md" for guide in ("clusters", "data", "hosts")]
PAGES = ["README.md", "docs/quick-start.md", "docs/install.md"]
PAGES += sorted(
    str(page.relative_to(ROOT))
    for folder in ("guides", "coming-from")
    for page in (ROOT / "docs" / folder).glob("*.md")
)

# The longest whose subjects have tests of jobs; `make test-all` runs them.
LONG = ["docs/coming-from/determined.md", "docs/coming-from/persia.md"]
LONG += [f"docs/guides/{guide}.md" for guide in ("jobs", "running", "testing", "trainer")]


def tier_of(page: str) -> str:
    return "slow" if page in SLOW else "long" if page in LONG else "matrix"


def blocks_of(page: str) -> list[blocks.Block]:
    return blocks.read((ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, marks=[] if p in IN_TEST else getattr(pytest.mark, tier_of(p)))
        for p in PAGES
    ],
)
def test_a_page_runs_as_it_is_written(page: str, tmp_path: Path):
    Session(page, tmp_path).run(blocks_of(page))


def test_what_is_left_out_has_a_reason(capsys):
    left_out = {page: [b for b in blocks_of(page) if b.kind == "left out"] for page in PAGES}
    with capsys.disabled():
        for page, found in left_out.items():
            for block in found:
                print(f"\n  {page}:{block.line} isn't run: {block.note}", end="")
    assert all(len(block.note) > 8 for found in left_out.values() for block in found)
    assert sum(len(blocks_of(page)) for page in PAGES) > 2 * sum(map(len, left_out.values()))
