"""Commands that compute nothing with TensorFlow and Horovod need neither, and show nothing of them.

Each runs in a process in which an import of either ends it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from collective.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import importlib.abc, sys

class Refusal(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tensorflow", "horovod", "keras"):
            sys.exit(f"{name} was imported")

sys.meta_path.insert(0, Refusal())
from collective.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def run(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("HOROVOD_RANK", "COLLECTIVE_LAUNCHED"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        *((command.name, "--help") for command in COMMANDS),
        ("data", "criteo", "--help"),
        *(("checkpoint", each, "--help") for each in ("show", "consolidate", "verify", "import")),
    ],
    ids=" ".join,
)
def test_help_comes_alone(arguments: tuple[str, ...]):
    finished = run(*arguments)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.startswith("usage: collective ")


def test_click_logs_are_converted(tmp_path: Path):
    (tmp_path / "day_0").write_text("\t".join(["1", *["5"] * 13, *["68fd1e64"] * 26]) + "\n")
    finished = run("data", "criteo", "day_*", "--output", "out", cwd=tmp_path)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout == "out/day_0.parquet\n"
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(tmp_path / "out" / "day_0.parquet")
    assert table["I1"].to_pylist() == [5] and table["C26"].to_pylist() == [0x68FD1E64]
