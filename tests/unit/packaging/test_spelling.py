"""Commands have one spelling wherever people read them: `collective launch`, not its module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MODULE = re.compile(
    r"python3? -m collective[. ]"
    r"(?:launch|checkpoint|report|data|check|build_horovod|ops\.gpu_check)\b(?!\.\w)"
    r"|\bcollective\.launch: "
)
# They start the interpreter of an environment or of an image, whose commands may not be on PATH.
PROGRAMS = ("docker/entrypoint.sh", "launch/manifests/slurm.py")


def texts() -> list[Path]:
    places = ["*.md", "docs/**/*.md", "docker/*", "tools/*.sh", "modelzoo/**/*.md"]
    for folder in ("benchmarks", "collective", "launch", "modelzoo", "ops", "strategies"):
        places += [f"{folder}/**/*.py", f"{folder}/**/*.md"]
    found = {path for place in places for path in ROOT.glob(place) if path.is_file()}
    return sorted(path for path in found if str(path.relative_to(ROOT)) not in PROGRAMS)


@pytest.mark.parametrize(
    "text", ["python -m collective.launch -np 2 x.py", "collective.launch: the job failed"]
)
def test_a_modules_name_is_recognised(text: str):
    assert MODULE.search(text)


def test_commands_have_one_spelling():
    lines = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in texts()
        for line in path.read_text(encoding="utf-8").splitlines()
        if MODULE.search(line)
    ]
    assert not lines
