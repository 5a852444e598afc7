"""Pages that translate another framework's lines: each line of ours is one that the page runs."""

from __future__ import annotations

import re

from tests.docs import blocks
from tests.docs.session import ROOT

PAGE = ROOT / "docs" / "coming-from" / "determined.md"
# Translations that are a part of a line, or of another page's.
PARTS = {
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
}


def translations() -> list[str]:
    """Returns the code on the right of the tables under "line by line"."""
    text = PAGE.read_text(encoding="utf-8")
    part = text.partition("line by line\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .* \|$", part, re.M)
    right = [re.split(r"(?<!\\) \| ", row)[1] for row in rows if " | here |" not in row]
    return [code for cell in right for code in re.findall(r"`([^`]+)`", cell)]


def test_each_line_is_one_that_runs():
    page = blocks.read(PAGE.read_text(encoding="utf-8"))
    run = [line.strip() for b in page if b.kind != "left out" for line in b.code.splitlines()]
    known = {*run, *(line.rstrip(",") for line in run)}
    found = translations()
    assert len(found) > 30
    missing = [
        code for code in found if code not in known | PARTS and code.rstrip(",") not in known
    ]
    assert not missing
