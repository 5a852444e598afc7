"""Tests which of a rank's streams tells why it has ended."""

from __future__ import annotations

import pytest

from collective.launch.output.error_excerpt import tells_more

NOISE = (
    "2026-11-23 01:37:42.479186: E external/local_xla/xla/stream_executor/cuda/cuda_dnn.cc:9261] "
    "Unable to register cuDNN factory: Attempting to register factory for plugin cuDNN when one "
    "has already been registered"
)
WARNING = (
    "WARNING:tensorflow:From a.py:3: f is deprecated.",
    "Instructions for updating:",
    "Use g",
)
LOST = "lost rank 1, which has ended, while 'x' waited for it in shared memory"
LOGGED = [
    "ERROR failed",
    "Traceback (most recent call last):",
    '  File "a.py", line 3',
    "ValueError",
]


@pytest.mark.parametrize(
    "stdout, stderr, on_stdout",
    [
        ([], [], False),
        ([], [NOISE], False),
        (["the disk is full"], [], True),
        (["the disk is full"], [NOISE], True),
        (["step 1"], ["the disk is full"], False),
        # The kernel may end the rank that was warned of the memory that it takes.
        (["step 1"], [NOISE, *WARNING], False),
        (LOGGED, [NOISE, *WARNING], True),
        ([f"stopped: {LOST}"], WARNING, True),
        (
            LOGGED,
            [*WARNING, "terminate called after throwing an instance of 'std::bad_alloc'"],
            False,
        ),
    ],
)
def test_which_stream_tells_why_a_rank_has_ended(stdout, stderr, on_stdout):
    """TensorFlow always writes noise to stderr; a script may log its errors to stdout."""
    assert tells_more(stdout, stderr) == on_stdout
