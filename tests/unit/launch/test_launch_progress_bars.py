"""Progress bars of other ranks are left out of a stream, and nothing else is."""

from __future__ import annotations

import random

import pytest

from collective.launch.output.progress_bars import ProgressBars

TQDM = b"\rtrain:   0%|          | 0/4 [00:00<?, ?it/s]\rtrain: 100%|####| 4/4 [00:01<00:00]\n"
# As Keras 2.15 writes where it takes its output for a terminal.
KERAS = (
    b"Epoch 1/2\n\r 1/20 [>.......] - ETA: 3s - loss: 0.9" + 39 * b"\x08"
    b"\r20/20 [========] - 1s 2ms/step - loss: 0.5\n"
)
CASES = [
    (TQDM, b""),
    (KERAS, b"Epoch 1/2\n"),
    (KERAS + KERAS, b"Epoch 1/2\nEpoch 1/2\n"),
    (b"step 1\nstep 2\n", b"step 1\nstep 2\n"),
    (b"step 1\r\nstep 2\r\n", b"step 1\r\nstep 2\r\n"),  # another system's ends of lines
    (TQDM[:-1] + b"\rloss 0.5\n", b"loss 0.5\n"),
    (b"a | b | 50%| 1/2\n", b"a | b | 50%| 1/2\n"),
    (b"3/4 [===.] - done\n", b"3/4 [===.] - done\n"),  # no bar was there to be drawn again
    (
        b"\r 1/20 [>...] - ETA: 3s\r 2/20 [>..] - loss: 1Traceback (most recent call last):\n  x\n",
        b" 2/20 [>..] - loss: 1Traceback (most recent call last):\n  x\n",
    ),
    (b"prompt> ", b"prompt> "),
]


@pytest.mark.parametrize("written, shown", CASES)
def test_whatever_the_pieces(written: bytes, shown: bytes):
    assert ProgressBars().without(written) == shown
    drawn = random.Random(1)
    for _ in range(50):
        bars, left, out = ProgressBars(), written, b""
        while left:
            size = drawn.randint(1, 40)
            # A piece ends with a segment, as a stream hands them on.
            end = max(left.rfind(b"\n", 0, size), left.rfind(b"\r", 0, size)) + 1 or len(left)
            out += bars.without(left[:end])
            left = left[end:]
        assert out == shown
