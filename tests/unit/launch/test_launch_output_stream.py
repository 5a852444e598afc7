"""Tests a rank's stream: which partial lines are held back, and for how long."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from collective.launch.output import rank_output
from collective.launch.output.rank_output import RankStream
from collective.launch.output.stderr_lines import may_begin_noise

NOISE = (
    b"2026-11-23 01:37:42.479186: E external/local_xla/xla/stream_executor/cuda/cuda_dnn.cc:9261] "
    b"Unable to register cuDNN factory: Attempting to register factory for plugin cuDNN when one "
    b"has already been registered\n"
)


class Shown:
    """Stands for the screen and for the digest of a rank."""

    def __init__(self):
        self.terminal = False
        self.text = b""

    def take(self, data):
        self.text += data


@pytest.fixture
def stream(monkeypatch):
    """The stderr of a job of one rank: what a test writes is read at once, at its time."""
    reading, writing = os.pipe()
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(rank_output, "time", SimpleNamespace(monotonic=lambda: clock.now))
    shown = Shown()
    rank_stream = RankStream(reading, "", shown, None, shown)

    def write(data, after=0.0):
        clock.now += after
        os.write(writing, data)
        rank_stream.read()
        if rank_stream.flush_time() <= clock.now:
            rank_stream.flush()
        return shown.text

    yield write
    rank_stream.close()
    os.close(writing)


def test_every_beginning_of_noise_may_become_noise():
    assert all(may_begin_noise(NOISE[:length]) for length in range(1, len(NOISE)))


@pytest.mark.parametrize(
    "line",
    [
        b"name? ",
        b"10/20",
        b"2026 steps: ",
    ],
)
def test_a_line_that_cannot_be_noise_is_shown_at_once(stream, line):
    assert stream(line) == line


def test_a_beginning_of_noise_waits_for_its_end(stream):
    assert stream(NOISE[:100]) == b""
    assert stream(NOISE[100:], after=0.9) == NOISE


def test_a_line_that_grows_slowly_is_shown_in_time(stream):
    """Each piece might become noise; the wait begins with the first."""
    assert stream(b"2") == b""
    assert stream(b"0", after=0.6) == b""
    assert stream(b"2", after=0.6) == b"202"
