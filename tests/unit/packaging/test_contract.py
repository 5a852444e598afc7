"""Each row of docs/equal-to-tensorflow.md has tests, and each test of the contract has a row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "equal-to-tensorflow.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in PAGE.splitlines()
    if line.startswith("| ") and "::" in line
]
# Every test of these files, test_<name>.py, is a row of the contract, or part of one.
CONTRACT = (
    "assignment_sync",
    "assignment_warnings",
    "columns",
    "dense_view",
    "dense_view_gradients",
    "eager",
    "horovod_wrappers",
    "keras",
    "layers",
    "moving_averages",
    "optimizer_calls",
    "scripts",
    "session_ends",
    "tf_functions",
    "variables",
    "whole_batch",
)


def cases_in(file: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_row_has_its_tests(row):
    assert len(row) == 3 and all(row), row
    for named in row[2].split(", "):
        file, _, test = named.partition("::")
        paths = (ROOT / "tests").rglob(f"{file}.py")
        has_test = any(test in cases_in(path) for path in paths)
        assert has_test, f'no test {named}, which "{row[0]}" names'


@pytest.mark.parametrize("name", CONTRACT)
def test_a_test_has_its_row(name):
    named = set(re.findall(rf"test_{name}::(test_\w+)", PAGE))
    (file,) = (ROOT / "tests" / "ranks").rglob(f"test_{name}.py")
    missing = cases_in(file) - named
    assert not missing, f"{file}: no row of docs/equal-to-tensorflow.md names {sorted(missing)}"


def test_no_line_is_left_out():
    lines = [
        line
        for line in PAGE.splitlines()
        if line.startswith("| ") and not line.startswith(("| What", "|---"))
    ]
    assert len(lines) == len(ROWS) > 60, [line for line in lines if "::" not in line]
