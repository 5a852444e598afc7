"""NVIDIA's disassembler, from PyPI: reads what the compiler made of a kernel for sm_90."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

_KERNEL = re.compile(r"^\.text\.(\w+):$")
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\d|@!?U?PT)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;"
)
_LABEL = re.compile(r"^\.L_x_\d+:")
_REGISTER = re.compile(r"\bR(\d+)(\.64)?\b")


class Instruction(NamedTuple):
    """Holds one instruction.

    Attributes:
        name: as 'LDG.E.128.CONSTANT'; '' for a place to which branches lead.
        writes, reads: numbers of registers.
    """

    name: str
    writes: frozenset[int] = frozenset()
    reads: frozenset[int] = frozenset()


def disassembler() -> Path | None:
    """Finds nvdisasm; None where it isn't installed."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "nvdisasm"), None)


def disassembled(cubin: bytes) -> dict[str, list[Instruction]]:
    """Returns the instructions of each kernel."""
    program = disassembler()
    assert program is not None, "install nvidia-cuda-nvdisasm (make setup does)"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [str(program), "-c", file.name], check=True, capture_output=True, text=True
        ).stdout
    kernels: dict[str, list[Instruction]] = {}
    here: list[Instruction] = []
    for line in said.splitlines():
        if match := _KERNEL.match(line):
            here = kernels.setdefault(match[1], [])
        elif _LABEL.match(line):
            here.append(Instruction(""))
        elif match := _INSTRUCTION.match(line):
            here.append(_instruction(match[2], match[3]))
    return kernels


def _instruction(name: str, operands: str) -> Instruction:
    stores = name.startswith(("ST", "RED", "BRA", "EXIT", "BAR", "WARPSYNC"))
    first, _, others = operands.partition(",")
    if stores:
        return Instruction(name, frozenset(), _registers(operands, _width(name)))
    if name.startswith(("ISETP", "FSETP", "DSETP", "VOTE", "PLOP3", "R2P", "MUFU.PRED")):
        return Instruction(name, frozenset(), _registers(operands, 1))
    if name.startswith("SHFL"):  # predicate, target, source, …
        target, _, rest = others.partition(",")
        return Instruction(name, _registers(target, 1), _registers(rest, 1))
    return Instruction(name, _registers(first, _width(name)), _registers(others, 1))


def _width(name: str) -> int:
    return next((n for text, n in ((".128", 4), (".64", 2), ("WIDE", 2)) if text in name), 1)


def _registers(text: str, width: int) -> frozenset[int]:
    found: set[int] = set()
    for match in _REGISTER.finditer(text):
        first = int(match[1])
        found |= set(range(first, first + (2 if match[2] else width)))
    return frozenset(found)


def flights(instructions: list[Instruction], load: str) -> list[int]:
    """Counts the loads of a kind that are issued one after the other before a value of one of them
    is used: one number for each such row of loads. A branch ends it, too.

    Args:
        instructions: of one kernel.
        load: how the names of the loads begin, as 'LDG.E.128'.
    """
    counts: list[int] = []
    pending: set[int] = set()
    count = 0
    for one in [*instructions, Instruction("")]:
        branches = one.name == "" or one.name.startswith(("BRA", "EXIT", "RET", "BAR", "BRX"))
        if count and (branches or pending & (one.reads | one.writes)):
            counts.append(count)
            pending, count = set(), 0
        if one.name.startswith(load):
            pending |= one.writes
            count += 1
    return counts
