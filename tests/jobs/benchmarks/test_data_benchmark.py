"""The benchmarks of data read the same records in each format, and print a row for each reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.mark.long
@pytest.mark.parametrize(
    "program, rows, reader",
    [("data.py", 7, "collective.data.parquet"), ("stream.py", 4, "a stream")],
)
def test_it_prints_a_table(program, rows, reader):
    ran = subprocess.run(
        [
            sys.executable,
            BENCHMARKS / program,
            "--records",
            "5000",
            "--rounds",
            "1",
            "--batch",
            "512",
        ],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    table = [line for line in ran.stdout.splitlines() if line.startswith("| ")]
    assert len(table) == rows and f"| {reader} | " in ran.stdout
