"""A hash table whose memory is not what it should be, or could come to be so, is an error."""

from __future__ import annotations

from typing import Callable

import numpy as np
import pytest

from collective.ops.gpu.checks.hash_table import colliding
from collective.ops.gpu.hash_table import BrokenError, HashTable, find, find_or_insert
from collective.ops.gpu.hash_table_maintenance import remove, set_steps, steps
from collective.ops.gpu.workspace import Workspace
from tests.kernels.gpu.emulator import EmulatedDevice
from tests.kernels.gpu.test_hash_table import whole


def filled_up(seed: int) -> tuple[HashTable, Workspace, np.ndarray]:
    """Returns a table all of whose slots have been taken by keys of nobody, except for those of
    keys that it has.
    """
    table, workspace, keys = (
        HashTable("t", EmulatedDevice(seed), slots=300),
        Workspace(EmulatedDevice(seed)),
        np.arange(1, 40),
    )
    find_or_insert([table], keys, whole(keys), [0], workspace)
    slots = table._sectors.reshape(-1, 2)[: table.slots]
    free = slots[:, 0] == 0
    slots[free, 0] = np.arange(10**6, 10**6 + free.sum())
    return table, workspace, keys


@pytest.mark.parametrize("seed", [0, 3])
def test_a_table_without_a_free_slot_is_an_error_and_no_hang(seed: int):
    table, workspace, keys = filled_up(seed)
    some = np.concatenate([keys, np.arange(500, 520)])
    assert find([table], some, whole(some), workspace).tolist() == [*range(1, 40), *[0] * 20]
    got = find_or_insert([table], some, whole(some), [1], workspace)
    assert got.rows.tolist() == [*range(1, 40), *[0] * 20] and got.new_counts.tolist() == [0]
    with pytest.raises(
        BrokenError,
        match="'t': 20 keys found no free slot .* row 0, though of its 300 slots only 39 are",
    ):
        table.count()
    assert table.count() == 39, "it is said once, and the other keys are there"


def test_the_host_reads_of_a_broken_table_before_long():
    table, workspace, _ = filled_up(1)
    with pytest.raises(BrokenError, match="found no free slot"):
        for step in range(1 + 300 // 20):
            some = np.arange(500, 520) + 20 * step
            find_or_insert([table], some, whole(some), [step], workspace)


def test_keys_without_a_slot_in_a_rebuilt_table_are_lost_loudly():
    table, _, keys = filled_up(2)
    small = table._free_sectors(8)
    table.launch(
        "hash_table_rebuild",
        table.slots + 2,
        (table.on_device(), np.int64(table.slots + 2), table.on_device(small)),
    )
    with pytest.raises(BrokenError, match=f"{39 - 8} keys found no free slot"):
        table.read()


def test_a_key_is_looked_for_in_some_sectors_only():
    """Else each of a batch's keys would be looked for in all of a large table that is full."""
    table, workspace = (
        HashTable("t", EmulatedDevice(), slots=2 * 2**16 + 200),
        Workspace(EmulatedDevice()),
    )
    slots = table._sectors.reshape(-1, 2)[: table.slots]
    slots[:, 0] = np.arange(10**6, 10**6 + len(slots))
    key = colliding(1)  # whose first sector is 0
    slots[[2 * 2**16 - 1, 2 * 2**16]] = [key[0], 7], [key[0], 8]
    assert find([table], key, whole(key), workspace).tolist() == [7]
    slots[2 * 2**16 - 1, 0] = 5
    assert find([table], key, whole(key), workspace).tolist() == [0]


@pytest.mark.parametrize(
    "use",
    [
        lambda table, keys: find([table], keys, whole(keys), Workspace(table.device)),
        lambda table, keys: find_or_insert(
            [table], keys, whole(keys), [1], Workspace(table.device)
        ),
        lambda table, keys: remove(table, keys, keys[:0], keys[:0], Workspace(table.device)),
        lambda table, keys: steps(table),
        lambda table, keys: set_steps(table, keys, keys, Workspace(table.device)),
        lambda table, keys: table.rebuild(1000),
        lambda table, keys: table.count(),
    ],
)
def test_a_table_is_of_one_stream(use: Callable[[HashTable, np.ndarray], object]):
    table, keys = HashTable("t", EmulatedDevice()), np.arange(3)
    find_or_insert([table], keys, whole(keys), [0], Workspace(table.device))
    table.device.current_stream = 5
    with pytest.raises(
        RuntimeError, match="hash table 't' was first used on stream 0x0 and now is on stream 0x5"
    ):
        use(table, keys)
    table.device.current_stream = 0
    assert (
        find([table], keys, whole(keys), Workspace(table.device)).tolist() == [1, 2, 3]
        and table.slots == 2048
    )
