"""Makes the keys that a checkpoint's index uses for the slices of an entry.

An entry that was saved in slices has a record that lists them, and one record per slice that tells
where its values are. The key of such a record is a zero, the entry's name, the number of
dimensions, and the first index and the length in each dimension. All are encoded so that keys sort
by them (TensorFlow's `OrderedCode`).
"""

from __future__ import annotations

from collections.abc import Sequence

WHOLE = -1  # the length of a dimension that isn't cut
_ESCAPES = {0x00: b"\x00\xff", 0xFF: b"\xff\x00"}


def slice_key(name: str, extents: Sequence[tuple[int, int]]) -> bytes:
    """Returns the key of a slice.

    Args:
        name: the entry's name.
        extents: (first index, length) in each dimension; (0, WHOLE) for a dimension that isn't cut.
    """
    key = _unsigned(0) + _string(name.encode()) + _unsigned(len(extents))
    return key + b"".join(_signed(number) for extent in extents for number in extent)


def _unsigned(number: int) -> bytes:
    """Encodes the number of bytes, and then the bytes, the highest first."""
    size = (number.bit_length() + 7) // 8
    return bytes([size]) + number.to_bytes(size, "big")


def _string(text: bytes) -> bytes:
    escaped = (_ESCAPES.get(byte, bytes([byte])) for byte in text)
    return b"".join(escaped) + b"\x00\x01"


def _signed(number: int) -> bytes:
    """Encodes in two's complement; the highest bits tell sign and size, so that bytes sort."""
    magnitude = ~number if number < 0 else number
    size = magnitude.bit_length() // 7 + 1
    header = ((1 << size) - 1) << (8 * size - size)  # `size` bits at the left
    pattern = number & ((1 << (8 * size)) - 1)
    return (pattern ^ header).to_bytes(size, "big")
