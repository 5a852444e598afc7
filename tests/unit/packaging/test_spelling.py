"""Words have one spelling wherever people read them: `collective launch`, not its module."""

from __future__ import annotations

import os
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


# Plain English says "next to" or "in addition to", "again", and "after".
WORDS = re.compile(r"(?<![a-z])(beside|anew)(?![a-z])", re.IGNORECASE)
AFTER = re.compile(
    r"(?<![a-z])(?<!left )(?<!lags )(?<!lag )(?<!lagging )(?<!leave )behind(?![a-z])", re.IGNORECASE
)
FOLDERS = (
    *("benchmarks", "collective", "docker", "docs", "launch"),
    *("modelzoo", "ops", "strategies", "tests", "tools"),
)
KINDS = (".py", ".md", ".cc", ".h", ".cu", ".cuh", ".css", ".sh")
# Files in which something is behind in space or in a race.
IN_SPACE = {
    "collective/job/progress_board.py": "a rank",
    "launch/__init__.py": "children that ranks leave",
    "launch/check/host_findings.py": "a clock",
    "launch/progress/stall_detector.py": "a rank",
    "tests/image/debian.py": "a proxy",
    "tests/jobs/gpu_placement.py": "tensors that a run leaves",
    "tests/jobs/launch/test_launch_orphans.py": "processes",
    "tests/jobs/launch/test_launch_stalls.py": "files",
    "tests/jobs/packaging/test_wheel.py": "folders that a build leaves",
    "tests/unit/checkpoint/test_checkpoint_ownership.py": "a mark",
    "tests/unit/launch/test_file_record.py": "a rank",
    "tests/unit/launch/test_launch_host_findings.py": "a clock",
    "docs/guides/tables.md": "files that a job leaves",
}


def test_prepositions_are_those_of_plain_english():
    """In names, too: `beside` for next to, `behind` for after, and `anew` were everywhere once."""
    words, after = set(), set()
    for folder in FOLDERS:
        for directory, _, files in os.walk(ROOT / folder):
            for path in (Path(directory) / file for file in files if file.endswith(KINDS)):
                name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
                words |= {name} if WORDS.search(text) else set()
                after |= {name} if AFTER.search(text) else set()
    own = {"tests/unit/packaging/test_spelling.py"}
    assert not words - own
    assert not after - own - set(IN_SPACE), "write after"
