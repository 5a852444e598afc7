"""Memory of a GPU that grows where it is: what the driver is asked for, in which order, and what is
left after an error.

The driver's structures are those of CUDA's cuda.h, whose sizes and offsets were printed by its
compiler.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from collective.ops.gpu import reserved_memory
from collective.ops.gpu.reserved_memory import Reserved

PIECE = 2 << 20
BEGIN = 0x7_0000_0000


class Driver:
    """Functions of CUDA's driver, as far as `Reserved` needs them.

    Attributes:
        room: how many bytes of memory are left.
        mapped: size by address; what can be used is in `usable`.
    """

    def __init__(self, room: int):
        self.room, self.space = room, 0
        self.mapped: dict[int, int] = {}
        self.usable: set[int] = set()
        self.handles: dict[int, int] = {}  # those that were not released, and their sizes
        self.fail: str | None = None
        self._number = 0

    def _status(self, name: str) -> int:
        return 1 if self.fail == name else 0

    def cuMemGetAllocationGranularity(self, piece: Any, properties: Any, option: int) -> int:
        described = properties._obj
        assert (
            described.type,
            described.handles,
            described.location.type,
            described.location.id,
            option,
        ) == (1, 0, 1, 3, 0)
        piece._obj.value = PIECE
        return self._status("cuMemGetAllocationGranularity")

    def cuMemAddressReserve(
        self, address: Any, size: int, alignment: int, fixed: int, flags: int
    ) -> int:
        assert size % PIECE == 0 and (alignment, fixed, flags) == (0, 0, 0)
        address._obj.value, self.space = BEGIN, size
        return self._status("cuMemAddressReserve")

    def cuMemAddressFree(self, address: int, size: int) -> int:
        assert (address, size) == (BEGIN, self.space) and not self.mapped
        self.space = 0
        return 0

    def cuMemCreate(self, handle: Any, size: int, properties: Any, flags: int) -> int:
        assert size % PIECE == 0 and size > 0 and properties._obj.location.id == 3 and flags == 0
        if size > self.room:
            return 2
        self.room -= size
        self._number += 1
        self.handles[self._number] = size
        handle._obj.value = self._number
        return 0

    def cuMemRelease(self, handle: Any) -> int:
        size = self.handles.pop(handle.value)
        if size not in self.mapped.values():
            self.room += size
        return 0

    def cuMemMap(self, address: int, size: int, offset: int, handle: Any, flags: int) -> int:
        assert self.handles[handle.value] == size and offset == flags == 0
        assert BEGIN <= address and address + size <= BEGIN + self.space
        assert all(
            address + size <= at or at + there <= address for at, there in self.mapped.items()
        )
        if not self._status("cuMemMap"):
            self.mapped[address] = size
        return self._status("cuMemMap")

    def cuMemUnmap(self, address: int, size: int) -> int:
        assert self.mapped.pop(address) == size
        self.usable.discard(address)
        self.room += size
        return 0

    def cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> int:
        described = access._obj
        assert self.mapped[address] == size and count == 1
        assert (described.location.type, described.location.id, described.flags) == (1, 3, 3)
        if not self._status("cuMemSetAccess"):
            self.usable.add(address)
        return self._status("cuMemSetAccess")

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = {1: b"invalid argument", 2: b"out of memory"}[status]
        return 0


def make(driver: Driver, size: int, waits: list[str] | None = None) -> Reserved:
    said: list[str] = [] if waits is None else waits
    return Reserved(size, 3, lambda: said.append("entered"), lambda: said.append("waited"), driver)


def test_structures_are_those_of_cuda():
    properties, access = reserved_memory._Properties, reserved_memory._Access
    assert (ctypes.sizeof(properties), ctypes.sizeof(access)) == (32, 12)
    offsets = [
        getattr(properties, name).offset
        for name in ("type", "handles", "location", "of_windows", "flags")
    ]
    assert offsets == [0, 4, 8, 16, 24] and access.flags.offset == 8


def test_it_takes_pieces_one_after_another():
    driver = Driver(100 * PIECE)
    made = make(driver, 40 * PIECE - 5)
    assert (made.address, made.size, made.taken, driver.mapped) == (BEGIN, 40 * PIECE, 0, {})
    made.grow(1)
    made.grow(PIECE)
    assert made.taken == PIECE == driver.mapped[BEGIN]
    made.grow(16 * PIECE + 1)
    assert made.taken == 17 * PIECE
    made.grow(17 * PIECE + 1)  # an eighth more than there was
    assert made.taken == 20 * PIECE
    made.grow(40 * PIECE)
    assert made.taken == 40 * PIECE and driver.usable == set(driver.mapped)
    assert sorted(driver.mapped.items()) == [
        (BEGIN, PIECE),
        (BEGIN + PIECE, 16 * PIECE),
        (BEGIN + 17 * PIECE, 3 * PIECE),
        (BEGIN + 20 * PIECE, 20 * PIECE),
    ]
    assert not driver.handles
    with pytest.raises(ValueError, match=f"{40 * PIECE + 1:,} bytes are wanted of {40 * PIECE:,}"):
        made.grow(40 * PIECE + 1)


def test_without_room_for_more_it_takes_the_least():
    driver = Driver(18 * PIECE)
    made = make(driver, 40 * PIECE)
    made.grow(16 * PIECE)
    made.grow(16 * PIECE + 1)  # two pieces would be an eighth: there are two
    assert (made.taken, driver.room) == (18 * PIECE, 0)
    driver.room = PIECE
    made.grow(18 * PIECE + 1)  # three would be
    assert (made.taken, driver.room) == (19 * PIECE, 0)
    before = dict(driver.mapped)
    with pytest.raises(MemoryError, match=r"cuMemCreate: out of memory \(2\)"):
        made.grow(19 * PIECE + 1)
    assert (made.taken, driver.mapped) == (19 * PIECE, before)


def test_pieces_after_what_is_needed_go_back():
    driver, waits = Driver(50 * PIECE), []
    made = make(driver, 40 * PIECE, waits)
    for pieces in (1, 16, 17):
        made.grow(pieces * PIECE)  # 1, 15 and 2 at once
    waits.clear()
    made.shrink(16 * PIECE + 1)  # in the last piece
    assert (made.taken, waits) == (18 * PIECE, [])
    made.shrink(16 * PIECE)
    assert (made.taken, waits, driver.room) == (16 * PIECE, ["entered", "waited"], 34 * PIECE)
    made.shrink(PIECE + 1)
    assert made.taken == 16 * PIECE
    made.shrink(100)
    assert driver.mapped == {BEGIN: PIECE} and made.taken == PIECE
    made.grow(3 * PIECE)
    assert sorted(driver.mapped.items()) == [(BEGIN, PIECE), (BEGIN + PIECE, 2 * PIECE)]
    made.shrink(0)
    assert (made.taken, driver.mapped, driver.room) == (0, {}, 50 * PIECE)
    made.shrink(0)


@pytest.mark.parametrize("name", ["cuMemMap", "cuMemSetAccess"])
def test_an_error_on_the_way_takes_nothing(name: str):
    driver = Driver(10 * PIECE)
    made = make(driver, 5 * PIECE)
    made.grow(PIECE)
    driver.fail = name
    with pytest.raises(RuntimeError, match=rf"{name}: invalid argument \(1\)"):
        made.grow(3 * PIECE)
    assert (made.taken, driver.room, driver.mapped, driver.handles) == (
        PIECE,
        9 * PIECE,
        {BEGIN: PIECE},
        {},
    )
    driver.fail = None
    made.grow(3 * PIECE)
    assert made.taken == 3 * PIECE


@pytest.mark.parametrize("name", ["cuMemGetAllocationGranularity", "cuMemAddressReserve"])
def test_without_address_space(name: str):
    driver = Driver(0)
    driver.fail = name
    with pytest.raises(RuntimeError, match=name):
        make(driver, PIECE)


def test_it_goes_back_once_the_gpu_is_done():
    driver, waits = Driver(10 * PIECE), []
    made = make(driver, 5 * PIECE, waits)
    made.grow(PIECE)
    made.grow(4 * PIECE)
    del made
    assert (driver.room, driver.mapped, driver.space, waits) == (
        10 * PIECE,
        {},
        0,
        ["entered"] * 4 + ["waited"],
    )
