"""Pages that translate another framework's lines: each line of ours is one that the page runs."""

from __future__ import annotations

import re

import pytest

from tests.docs import blocks
from tests.docs.session import ROOT

PAGES = ROOT / "docs" / "coming-from"
# By page, translations that are a part of a line, or of another page's.
PARTS = {
    "persia.md": {
        "loader.py",
        "train.py",
        'strategy.scope(mixed_precision="float16")',
        "scope(carrier=)",
        "collective launch --emit compose",
    },
    "determined.md": {
        "scope(save_code=True)",
        "collective.load(path, run_code=True)",
        "model_fn",
        "fit",
        "scope()",
        "test_mode=True",
        "job_info().config",
        "--emit",
        "max_length",
        "slots: 8",
        "seed: 1",
        "entrypoint: train.py",
        '"model/best"',
        "collective launch det.yaml",
        "--set searcher.max_length.batches=20",
        "collective.job_info()",
    },
}


def translations(text: str) -> list[str]:
    """Returns the code on the right of the tables under "line by line"."""
    part = text.partition("line by line\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .* \|$", part, re.M)
    right = [re.split(r"(?<!\\) \| ", row)[1] for row in rows if " | here" not in row]
    return [code for cell in right for code in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("name", PARTS)
def test_each_line_is_one_that_runs(name: str):
    text = (PAGES / name).read_text(encoding="utf-8")
    page = blocks.read(text)
    run = [line.strip() for b in page if b.kind != "left out" for line in b.code.splitlines()]
    known = {*run, *(line.rstrip(",") for line in run)}
    found = translations(text)
    assert len(found) > 30
    missing = [
        code for code in found if code not in known | PARTS[name] and code.rstrip(",") not in known
    ]
    assert not missing
