"""The page of a profile in a real browser: nothing sticks out, in both themes and any width."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest

from collective.profiling.report import page, profile
from tests.unit.profiling import browser, test_report

pytestmark = [pytest.mark.matrix, browser.needed]

# Opens the page in a frame of a given width, and writes what it measures into its own document.
HARNESS = """<!DOCTYPE html>
<html><body style="margin: 0">
<iframe id="frame" style="border: 0; width: {width}px; height: 900px" srcdoc="{page}"></iframe>
<pre id="measured"></pre>
<script>
document.getElementById("frame").onload = function () {{
  const inner = document.getElementById("frame").contentDocument;
  const view = inner.defaultView;
  const sizes = selector => [...inner.querySelectorAll(selector)].map(each => {{
    const box = each.getBoundingClientRect();
    return [box.left, box.right, box.height];
  }});
  document.getElementById("measured").textContent = JSON.stringify({{
    scroll: inner.documentElement.scrollWidth,
    dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
    back: view.getComputedStyle(inner.body).backgroundColor,
    bars: sizes(".bar"),
    parts: sizes(".part"),
    values: sizes(".bar .value"),
    hidden: [...inner.querySelectorAll(".bar .value, .tiles dd, h1, h2, h3")]
      .filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.textContent),
  }});
}};
</script>
</body></html>
"""


def measured(text: str, width: int, dark: bool, folder: Path) -> dict:
    """Returns what a page measures in a window of a width, in pixels."""
    harness = folder / "harness.html"
    harness.write_text(HARNESS.format(width=width, page=html.escape(text)), encoding="utf-8")
    document = browser.shown(harness.as_uri(), folder, dark)
    found = document.partition('<pre id="measured">')[2].partition("</pre>")[0]
    return json.loads(html.unescape(found))


def long_names(count: int) -> list[str]:
    return [
        f"input_layer/a_feature_with_a_long_name_{i:03}_embedding/weights" for i in range(count)
    ]


@pytest.mark.parametrize("width", [360, 800, 1500])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("ranks, tables, count", [(2, 2, 1), (64, 300, 1), (64, 300, 2)])
def test_everything_is_in_sight(width, dark, ranks, tables, count, tmp_path):
    record = test_report.record(ranks, long_names(tables))
    profiles = [profile.from_record(name, record) for name in ("before", "after")[:count]]
    found = measured(page.page(profiles), width, dark, tmp_path)
    assert found["dark"] == dark
    assert found["back"] == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
    assert found["scroll"] <= width, "the page is wider than its window"
    assert found["hidden"] == []
    shown = [bar for bar in found["bars"] if bar[2] > 0]
    assert len(shown) >= 2 * count
    assert all(left >= 0 and right <= width for left, right, _ in shown)
    assert all(height >= 12 for _, _, height in shown)
    assert all(right - left > 0 for left, right, height in found["parts"] if height > 0)
