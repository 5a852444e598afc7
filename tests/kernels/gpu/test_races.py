"""No kernel has a race: whatever it does in one order of threads and blocks it does in any other.

The emulator runs threads in a few orders; the search knows which of their accesses nothing orders.
"""

from __future__ import annotations

import numpy as np
import pytest

from collective.ops.gpu import checks
from collective.ops.gpu.checks import FAMILIES, SMALL, Check
from collective.ops.gpu.device import Kernel
from collective.ops.gpu.sources import Source
from tests.kernels.gpu.emulator import EmulatedDevice, races
from tests.kernels.gpu.emulator.build import library
from tests.kernels.gpu.emulator.device import EmulatedKernel, RaceError
from tests.kernels.gpu.nested import run_tests

CHECKS = [
    pytest.param(check, id=f"{name}-{check.__name__}")
    for name in FAMILIES
    for check in checks.family(name).CHECKS
]
IN_MATRIX = ("ask", "requests", "reduction", "spread_bags")


@pytest.mark.slow
@pytest.mark.sample(14)
@pytest.mark.parametrize("check", CHECKS)
def test_kernels_have_no_races(check: Check):
    check(EmulatedDevice(5, searches_races=True), SMALL, np.random.default_rng(5))


@pytest.mark.parametrize(
    "operations",
    [
        *(pytest.param(name, marks=pytest.mark.matrix) for name in IN_MATRIX),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("ask_bags", "bags", "pooling", "writes")
        ),
    ],
)
def test_what_compiled_operations_launch_has_no_races(operations: str):
    """By the operations' own tests, which find a kernel failing where it has one."""
    finished = run_tests(f"compiled_{operations}", **{races.WANTED: "1"})
    assert finished.returncode == 0, finished.stdout + finished.stderr


class Faulty(EmulatedDevice):
    """Runs kernels in whose sources something has been replaced, and searches for races."""

    def __init__(self, before: str, after: str):
        super().__init__(5, searches_races=True)
        self.before, self.after = before, after

    def _load(self, source: Source, name: str) -> Kernel:
        text = source.text().replace(self.before, self.after)
        return EmulatedKernel(self, library(text, source.kernels, searches_races=True), name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, check, before, after, found",
    [
        pytest.param(
            "partition",
            "by_owner",
            "    __syncwarp();\n  }\n  __syncthreads();\n",
            "    __syncwarp();\n  }\n",
            "partition_scatter.*by two threads in shared memory",
            id="a barrier",
        ),
        pytest.param(
            "partition",
            "by_owner",
            "mine[of_key] + __popc(before));\n    __syncwarp();\n",
            "mine[of_key] + __popc(before));\n",
            "partition_scatter.*by two threads in shared memory",
            id="a barrier of a warp",
        ),
        pytest.param(
            "partition",
            "by_owner",
            "counters[r] = 0;\n  __syncthreads();\n",
            "counters[r] = 0;\n",
            "partition_count.*by two threads in shared memory: plain at .*, atomic at",
            id="the barrier after zeroing",
        ),
        pytest.param(
            "partition",
            "by_owner",
            "mine[tiles] = before;",
            "counts[tiles] = before;",
            "partition_scan.*by two blocks in global memory: plain at .*, plain at",
            id="a word of two blocks",
        ),
        pytest.param(
            "partition",
            "by_owner",
            "  __threadfence();\n",
            "",
            r"partition_scan.*read after write by two blocks in global memory: plain at "
            r"partition.cu:\d+, L2 at partition.cu:\d+, \d+ times$",
            id="fences before and after an atomic operation",
        ),
        pytest.param(
            "hash_table",
            "full",
            "__stcg(word, value);",
            "*word = value;",
            "hash_table_insert.*by two blocks in global memory: plain at .*, L2 at",
            id="writing past the L2 cache",
        ),
    ],
)
def test_a_fault_in_a_kernel_is_found(family: str, check: str, before: str, after: str, found: str):
    (run,) = [one for one in checks.family(family).CHECKS if one.__name__ == check]
    with pytest.raises(RaceError, match=f"(?s){found}"):
        run(Faulty(before, after), SMALL, np.random.default_rng(5))
