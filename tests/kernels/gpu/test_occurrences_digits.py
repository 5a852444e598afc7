"""How many passes sort occurrences by row: as many as move the fewest bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from collective.ops.gpu.occurrences import digits, occurrences
from collective.ops.gpu.reference import occurrences as reference
from collective.ops.gpu.workspace import Workspace
from tests.kernels.gpu.emulator import EmulatedDevice


@pytest.mark.parametrize(
    "rows, passes, bits",
    [
        (1, 1, 1),
        (2, 1, 1),
        (256, 1, 8),
        (512, 1, 9),  # 28 bytes a key; two passes of 5 bits are 41
        (513, 2, 5),
        (2**18, 2, 9),  # 56; three of 6 are 63
        (2**18 + 1, 3, 7),
        (2**31 - 1, 4, 8),
    ],
)
def test_the_fewest_bytes(rows: int, passes: int, bits: int):
    assert digits(rows) == (passes, bits)


def test_all_bits_are_sorted_by_and_counters_have_room():
    for bits, more in itertools.product(range(31), (0, 1)):
        rows = 2**bits + more
        passes, width = digits(rows)
        assert 2 ** (passes * width) >= rows and width <= 9


@pytest.mark.parametrize("rows", [1000, 2**18])
def test_large_digits(rows: int):
    numbers = np.random.default_rng(rows).integers(0, rows, 5000, np.int32)
    device = EmulatedDevice(2)
    got = occurrences(numbers, rows, Workspace(device))
    wanted = reference.occurrences(numbers, rows)
    np.testing.assert_array_equal(got.order, wanted.order)
    np.testing.assert_array_equal(got.offsets, wanted.offsets)
