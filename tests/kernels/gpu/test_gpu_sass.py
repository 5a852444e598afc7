"""What the compiler makes of kernels for sm_90: how many rows are on their way at once, and how
many registers a thread has, which decides how many warps a multiprocessor holds.

Latency is what these kernels wait for. A source that asks for four rows at once is worth nothing if
the compiler puts a use, or a branch, between the loads, as it does where it is short of registers.
"""

from __future__ import annotations

import functools
import re

import pytest

from collective.ops.gpu import gather, pool, sums, update
from collective.ops.gpu.cupy_device import OPTIONS
from collective.ops.gpu.rules import RULES, Adagrad, KerasAdagrad, KerasAdam, Rule
from collective.ops.gpu.sources import Source
from tests.kernels.gpu.nvrtc import compiled
from tests.kernels.gpu.sass import Instruction, disassembled, disassembler, flights

pytestmark = pytest.mark.skipif(
    disassembler() is None, reason="nvidia-cuda-nvdisasm is missing; make setup installs it"
)

_MORE = (pytest.mark.matrix,)
ARCHITECTURE = "sm_90"
REGISTERS, WARPS = 65536, 8  # of a multiprocessor; of a block
ROWS = "LDG.E.128.CONSTANT"  # four elements of a row that nobody writes


@functools.cache
def compile_for_hopper(text: str) -> tuple[dict[str, list[Instruction]], dict[str, int]]:
    """Returns the instructions and the registers of each kernel."""
    made = compiled(text, ARCHITECTURE, (*OPTIONS, "-ftz=true", "--ptxas-options=-v"))
    used = re.findall(r"entry function '(\w+)'.*?Used (\d+) registers", made.log, re.DOTALL)
    return disassembled(made.cubin), {name: int(registers) for name, registers in used}


def resident_warps(registers: int) -> int:
    """Returns how many warps of blocks of 256 threads a multiprocessor has registers for."""
    of_warp = -(-registers * 32 // 256) * 256
    return REGISTERS // (of_warp * WARPS) * WARPS


@pytest.mark.slow
@pytest.mark.parametrize(
    "source, kernel, rows, warps",
    [
        (gather.SOURCE, "gather_rows", 4, 40),
        (pool.SOURCE, "pool_rows", 4, 24),
        (pool.SOURCE, "pool_rows_plain", 4, 24),
        (sums.SOURCE, "sum_rows", 4, 24),
        (sums.SOURCE, "sum_pieces", 4, 24),
        (sums.SOURCE, "sum_rows_long", 4, 16),
    ],
)
def test_rows_are_fetched_together(source: Source, kernel: str, rows: int, warps: int):
    kernels, registers = compile_for_hopper(source.text())
    assert rows in flights(kernels[kernel], ROWS)
    assert resident_warps(registers[kernel]) >= warps


def test_the_plain_kernel_has_no_other_ways_to_a_row():
    """One for samples of one id, one for others."""
    kernels, _ = compile_for_hopper(pool.SOURCE.text())
    assert flights(kernels["pool_rows_plain"], ROWS) == [4, 4]


def test_a_warp_reads_its_indices_at_once_and_shuffles_what_they_lead_to():
    """Each lane reads the index of one row, of 32 bits or 64; then four addresses, each of two
    registers, go round before four rows are fetched.
    """
    kernels, _ = compile_for_hopper(pool.SOURCE.text())
    names = [one.name for one in kernels["pool_rows_plain"]]
    names = [name for name in names if name.startswith(("LDG", "SHFL"))]
    first = names.index(ROWS)
    assert names[first : first + 4] == [ROWS] * 4
    assert names[first - 8 : first] == ["SHFL.IDX"] * 8
    assert sorted(names[first - 10 : first - 8]) == ["LDG.E.64.CONSTANT", "LDG.E.CONSTANT"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, marks=_MORE * (rule is not Adagrad))
        for rule in RULES
        if rule not in (KerasAdagrad, KerasAdam)  # whose kernels are Adagrad's and Adam's
    ],
)
def test_updates_fetch_rows_with_all_slots_together(rule: type[Rule]):
    """Two rows' weights and slots at once, and before these are used two rows of gradients.

    Where a row's slot is one number, later turns of the lanes fetch two rows' weights at once, too.
    """
    kernel = f"update_{rule.kernel}"
    others = re.compile(rf"^(UPDATE|KERNELS)\((?!{rule.kernel},).*\n", re.MULTILINE)
    kernels, registers = compile_for_hopper(others.sub("", update.SOURCE.text()))
    state = [one for one in kernels[kernel] if not one.name.endswith("CONSTANT")]
    assert 2 * (1 + rule.slots) in flights(state, "LDG.E")
    assert 2 in flights(kernels[kernel], ROWS)
    of_elements = 0 if rule.row_wise else rule.slots
    turns = 2 if rule.row_wise else 1
    assert flights(state, "LDG.E.128").count(2 * (1 + of_elements)) >= turns
    assert resident_warps(registers[kernel]) >= (16 if of_elements > 1 else 24)
    assert resident_warps(registers[f"{kernel}_long"]) >= 16


_LOADS = """
extern "C" __global__ void together(const float4* __restrict__ from, float* to) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 seen = from[i * 256 + threadIdx.x];
    sum += seen.x * seen.y + seen.z * seen.w;
  }
  to[threadIdx.x] = sum;
}
extern "C" __global__ void in_turn(const int4* __restrict__ from, int* to) {
  int at = threadIdx.x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int4 seen = from[at];
    at = seen.x ^ seen.y ^ seen.z ^ seen.w;
  }
  to[threadIdx.x] = at;
}
"""


def test_loads_in_turn_are_told_from_loads_together():
    kernels, _ = compile_for_hopper(_LOADS)
    assert flights(kernels["together"], ROWS) == [4]
    assert flights(kernels["in_turn"], ROWS) == [1, 1, 1, 1]


def test_resident_warps():
    assert [resident_warps(registers) for registers in (64, 65, 80, 81, 128)] == [
        32,
        24,
        24,
        16,
        16,
    ]
