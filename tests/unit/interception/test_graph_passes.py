"""The architecture page's table of passes is what the code does."""

import re
from pathlib import Path

from collective.interception import graph_passes

ROOT = Path(__file__).parents[3]


def test_the_architecture_page_lists_the_passes():
    """In their order, after the one that looks at each run's fetches."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = page.partition("| pass |")[2].partition("\n\n")[0].splitlines()[2:]
    listed = [re.match(r"\| `(\w+)`", row).group(1) for row in rows]
    passes = [one.__name__ for one in graph_passes.PASSES]
    assert listed == [graph_passes.fetch_whole_tables.__name__, *passes]
