"""Files of tables: what they say, and what is wrong in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from collective.planner import tables_file
from collective.planner.workload import TableWork, Workload
from collective.yaml_file import FileError


def load(folder: Path, text: str) -> Workload:
    file = folder / "t.yml"
    file.write_text(text)
    return tables_file.load(file).workload()


def test_a_file_is_a_workload(tmp_path: Path):
    text = """
batch: 65536
parameters: 1000
optimizer: ftrl
tables:
  user: {rows: 40_000_000, dimension: 128, distinct: 0.4}
  tag: {rows: 10, dimension: 4, ids: 2.5, optimizer: sgd, type: float16, placement: replicated}
  open: {rows: 10, dimension: 4, dynamic: true, weight_bound: true, imbalance: 2, placement: auto}
"""
    expected = (
        TableWork("user", 40_000_000, 128, distinct=0.4, optimizer="ftrl"),
        TableWork("tag", 10, 4, "float16", 2.5, optimizer="sgd", placement="replicated"),
        TableWork("open", 10, 4, optimizer="ftrl", imbalance=2.0, dynamic=True, bounded=True),
    )
    assert load(tmp_path, text) == Workload(expected, 65536, 1000)
    as_json = json.dumps({"tables": {"t": {"rows": 1, "dim": 2}}})
    assert load(tmp_path, as_json) == Workload((TableWork("t", 1, 2),), 8192)


def test_a_workload_is_a_file(tmp_path: Path):
    """Whatever its names; numbers have six digits."""
    tables = (
        TableWork("a/b: #x'", 10, 4, ids=2.5, distinct=0.25, distinct_at=3000.0, optimizer="adam"),
        TableWork("yes", 3_000_000_000, 2, "float16", ids=0.00001, dynamic=True, bounded=True),
        TableWork("c", 3, 2, imbalance=1.5, placement="replicated"),
        TableWork("d", 3, 2, bounded=True, placement="whole:12"),
        TableWork("e", 3, 2, placement="whole"),
        TableWork("f", 3, 2, dynamic=True, placement="whole:1"),
    )
    text = tables_file.text_of(Workload(tables, 96, 7), "Two\nlines", {"yes": "assumed: ids"})
    assert load(tmp_path, text) == Workload(tables, 96, 7)
    assert text.startswith("# Two\n# lines\nbatch: 96\n")
    assert '"yes": {rows: 3000000000, ' in text and "}  # assumed: ids\n" in text


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "tables:\n  user:\n    rows: 10\n    dimensoin: 4\n",
            "line 4: tables.user.dimensoin: there is no such key. Did you mean 'dimension'?",
        ),
        ("tables:\n  user: {rows: 10}\n", "line 2: tables.user.dimension: this key is missing"),
        ("tabels: {}\n", "line 1: tabels: there is no such key. Did you mean 'tables'?"),
        ("tables: {}\n", "line 1: tables: keys with values belong here, not {}."),
        ("tables: {u: {rows: {}, dimension: 4}}\n", "tables.u.rows: it should be a valid integer"),
        (f"tables: {{u: {{rows: 1{'0' * 400}, dimension: 4}}}}\n", "tables.u.rows: it should be"),
        ("tables: {u: {rows: 9, dimension: 4, ids: .inf}}\n", "tables.u.ids: it should be less"),
        ("tables: {u: {rows: 9, dimension: 4, imbalance: .inf}}\n", "tables.u.imbalance: it"),
        (f"parameters: 1{'0' * 400}\ntables: {{}}\n", "line 1: parameters: it should be less"),
        (
            f"tables: {{u: {{rows: 9, dimension: 4, placement: 'whole:{'9' * 5000}'}}}}\n",
            "tables.u.placement: it is 'auto', 'rows', 'replicated', 'whole' or 'whole:K'",
        ),
        ("tables:\n  user: {rows: 0, dimension: 4}\n", "line 2: tables.user.rows: it should be"),
        ("tables:\n  u: {rows: 9, dimension: 4, distinct: 2}\n", "line 2: tables.u.distinct: it"),
        (
            "tables:\n  u: {rows: 9, dimension: 4, distinct_at: 20}\n",
            "line 2: tables.u.distinct_at: it says at how many ids `distinct` was measured",
        ),
        ("tables:\n  u: {rows: 9, dimension: 4, optimizer: adm}\n", "tables.u.optimizer: it"),
        (
            "tables:\n  u: {rows: 9, dimension: 4, dynamic: true, placement: replicated}\n",
            "line 2: tables.u.placement: a dynamic table can't be replicated. Write 'rows'.",
        ),
        (
            "tables:\n  u: {rows: 9, dimension: 4, placement: columns}\n",
            "tables.u.placement: it is 'auto', 'rows', 'replicated', 'whole' or 'whole:K'",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, text, message):
    with pytest.raises(FileError) as raised:
        load(tmp_path, text)
    assert message in str(raised.value)
