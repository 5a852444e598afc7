"""setup.py builds against TensorFlow, or says how to have it built so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# An interpreter to which TensorFlow isn't installed, at the start of setup.py.
WITHOUT_TENSORFLOW = """
import runpy, sys
sys.modules["tensorflow"] = None
sys.argv = ["setup.py", *sys.argv[1:]]
runpy.run_path("setup.py", run_name="__main__")
"""


def build(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TENSORFLOW, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_build_without_tensorflow_ends_and_says_how_to_have_one(tmp_path: Path):
    finished = build("build_ext", "--build-lib", tmp_path / "lib", "--build-temp", tmp_path)
    assert finished.returncode == 1
    (sentence,) = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    assert "compiles its operations against TensorFlow, which can not be imported here" in sentence
    assert "`pip install .` brings TensorFlow along" in sentence
    assert "pip install 'tensorflow>=2.15.1,<2.22'" in sentence
    assert not list(tmp_path.iterdir())


def test_a_python_without_a_tensorflow_is_told_so(tmp_path: Path):
    """Else pip says that there is no matching distribution of TensorFlow, and not why."""
    newer = f"import setuptools, sys; sys.version_info = (3, 14, 1)\n{WITHOUT_TENSORFLOW}"
    command = [sys.executable, "-c", newer, "egg_info", "--egg-base", str(tmp_path)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 1
    assert "collective needs a Python from 3.9 to 3.13" in finished.stderr


def test_metadata_need_no_tensorflow(tmp_path: Path):
    finished = build("egg_info", "--egg-base", tmp_path)
    assert finished.returncode == 0, finished.stderr
