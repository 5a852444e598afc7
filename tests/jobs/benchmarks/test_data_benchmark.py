"""The benchmark of data reads the same records in each format, and prints a row for each reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[3] / "benchmarks" / "data.py"


@pytest.mark.long
def test_it_prints_a_table():
    ran = subprocess.run(
        [sys.executable, DATA, "--records", "5000", "--rounds", "1", "--batch", "512"],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    rows = [line for line in ran.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 7 and "| collective.data.parquet | " in ran.stdout
