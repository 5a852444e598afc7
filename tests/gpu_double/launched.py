"""Does in NumPy what single kernels do that compiled operations launch, by the words that these
read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Callable

import numpy as np

from collective.ops import memory


class Launched:
    """Runs in the place of a kernel: see `driver.Launchable`.

    Args:
        function: f(arguments…), of the kernel's own arguments.
        types: those of its arguments: an address is an 'u8'.
    """

    def __init__(self, function: Callable[..., None], types: Sequence[str]):
        self._function, self._types = function, [np.dtype(one) for one in types]
        self.sizes = [one.itemsize for one in self._types]

    def run(self, blocks: int, threads: int, shared: int, arguments: Sequence[bytes]) -> None:
        self._function(
            *(np.frombuffer(one, dtype)[0].item() for one, dtype in zip(arguments, self._types))
        )


def _at(address: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return (
        memory.array_at(address, shape, dtype, None) if math.prod(shape) else np.zeros(shape, dtype)
    )


def _gather_rows(pieces: int, count: int, out: int) -> None:
    for _, rows, keys, table, table_rows, dim, first, _, _ in _at(pieces, (count, 9), np.int64):
        numbers = _at(int(rows), (keys,), np.int64)
        values = _at(int(table), (table_rows, dim), np.float32)
        to = _at(out + 4 * int(first), (keys, dim), np.float32)
        there = (numbers >= 0) & (numbers < table_rows)
        to[there], to[~there] = values[numbers[there]], 0


KERNELS = {"gather_rows": Launched(_gather_rows, ("u8", "i4", "u8"))}
