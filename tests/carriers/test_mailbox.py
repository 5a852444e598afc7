"""The mailbox's rings, in a program that plays two ranks' moments one after the other."""

import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(120)
def test_who_makes_room_in_a_ring_says_so(tmp_path):
    """A sender whose ring was filled while its peer looked there slept on, for 100 ms."""
    program = tmp_path / "interleavings"
    source = Path(__file__).with_name("interleavings.cc")
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-pthread", f"-I{REPOSITORY}", source, "-o", program],
        check=True,
    )
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["sent", "rung"], done
