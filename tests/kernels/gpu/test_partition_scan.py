"""The scan over tiles, with so few threads that it takes several rounds: at its full width that
needs millions of keys.
"""

from __future__ import annotations

import numpy as np
import pytest

from collective.ops.gpu import partition as kernels
from collective.ops.gpu.reference import partition as reference
from collective.ops.gpu.segments import DYNAMIC, ON_ONE_RANK, STATIC, Segments
from collective.ops.gpu.workspace import Workspace
from tests.kernels.gpu.emulator import EmulatedDevice


@pytest.mark.parametrize("seed", range(4))
def test_several_rounds_of_tiles_and_of_owners(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "_SCAN_THREADS", 64)
    rng = np.random.default_rng(seed)
    segments = Segments.of(rng.integers(0, 4, 250), rng.integers(0, 5, 250))
    keys, kinds, ranks = (
        rng.integers(-(2**40), 2**40, segments.keys),
        [STATIC, DYNAMIC, STATIC] + [ON_ONE_RANK * 8 + kind for kind in (STATIC, DYNAMIC)],
        150,
    )
    got = kernels.partition(keys, segments, kinds, ranks, Workspace(EmulatedDevice(seed)))
    for field, wanted in reference.partition(keys, segments, kinds, ranks)._asdict().items():
        np.testing.assert_array_equal(getattr(got, field), wanted, field)
