"""Element types of tables and of what travels: float32, float16 and bfloat16.

NumPy and CuPy have no bfloat16: an array of it is uint16, the upper half of a float32's bits, and
its `Element` goes with it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Element:
    """One element type.

    Attributes:
        name: 'float32', 'float16' or 'bfloat16'; kernels are named by it.
        storage: the NumPy type of an array.
    """

    name: str
    storage: Any

    @property
    def size(self) -> int:
        """Bytes."""
        return np.dtype(self.storage).itemsize

    def __str__(self) -> str:
        return self.name


FLOAT32 = Element("float32", np.float32)
FLOAT16 = Element("float16", np.float16)
BFLOAT16 = Element("bfloat16", np.uint16)
ELEMENTS = (FLOAT32, FLOAT16, BFLOAT16)


def to_float32(values: np.ndarray, element: Element) -> np.ndarray:
    """float32 of a NumPy array of `element`: exact."""
    if element is BFLOAT16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def from_float32(values: np.ndarray, element: Element) -> np.ndarray:
    """Rounded to the nearest, ties to even; too large is infinite; a NaN stays some NaN."""
    if element is not BFLOAT16:
        with np.errstate(over="ignore"):
            return values.astype(element.storage)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # In 64 bits, so that what is added can't overflow.
    wide = bits.astype(np.uint64)
    rounded = (
        (wide + np.uint64(0x7FFF) + ((wide >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    ).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def converted(values: np.ndarray, source: Element, target: Element) -> np.ndarray:
    """`values` of `source` as `target`; the very bits where the two are the same."""
    return values if source is target else from_float32(to_float32(values, source), target)
