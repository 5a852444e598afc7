"""Checks the hash table against a dictionary, and what it asks of host and memory."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import pytest

from collective.ops.gpu import hash_table_maintenance as maintenance
from collective.ops.gpu.checks.hash_table import colliding
from collective.ops.gpu.hash_table import (
    DEAD,
    FIRST_SLOTS,
    MOST_LOAD,
    MOST_ROWS,
    STEPS,
    USED,
    BrokenError,
    FullError,
    HashTable,
    find,
    find_or_insert,
)
from collective.ops.gpu.reference import hash_table as reference
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.workspace import Workspace
from collective.ops.rows import keymap
from tests.kernels.gpu.emulator import EmulatedDevice

EXTREME = [0, -1, 1, -(2**63), 2**63 - 1, 2**31, -(2**31)]


def whole(keys: np.ndarray) -> Segments:
    return Segments.of([len(keys)], [0])


def remove(table: HashTable, keys: np.ndarray, workspace: Workspace) -> None:
    """Removes distinct keys that are there, when those of the last rows are among them."""
    none = np.zeros(0, np.int64)
    maintenance.remove(table, keys, none, none, workspace)


class Model:
    """Does what one table's page describes, key by key."""

    def __init__(self) -> None:
        self.keys: list[int] = []  # By rows, from 1 on.
        self.steps: dict[int, int] = {}

    def insert(self, keys: np.ndarray, step: int) -> list[int]:
        for key in keys.tolist():
            if key not in self.steps:
                self.keys.append(key)
            self.steps[key] = max(self.steps.get(key, 0), step)
        return self.find(keys)

    def find(self, keys: np.ndarray) -> list[int]:
        rows = {key: row for row, key in enumerate(self.keys, 1)}
        return [rows.get(key, 0) for key in keys.tolist()]

    def remove(self, keys: np.ndarray) -> tuple[list[int], list[int], list[int]]:
        """Returns the keys that were there, those that move, and their new rows."""
        gone = sorted(set(keys.tolist()) & set(self.keys))
        free = sorted(row for row, key in enumerate(self.keys, 1) if key in gone)
        left = len(self.keys) - len(gone)
        moved = [key for key in self.keys[left:] if key not in gone]
        to = [row for row in free if row <= left]
        for key, row in zip(moved, to):
            self.keys[row - 1] = key
        del self.keys[left:]
        for key in gone:
            del self.steps[key]
        return gone, moved, to


@pytest.mark.parametrize("seed", range(5))
def test_random_sequences_do_what_a_dictionary_does(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(maintenance, "BLOCK", 7)
    rng = np.random.default_rng(seed)
    device = EmulatedDevice(seed)
    workspace, model = Workspace(device), Model()
    table = HashTable("t", device, slots=int(rng.integers(1, 60)))
    pool = np.concatenate(
        [rng.integers(-(2**63), 2**63 - 1, 150), colliding(40), EXTREME, np.arange(-50, 50)]
    )
    for step in range(30):
        keys = rng.choice(pool, int(rng.integers(0, 60)))
        kind = rng.choice(["insert", "insert", "insert", "earlier", "find", "remove", "set"])
        if kind in ("insert", "earlier"):
            to_step = step if kind == "insert" else max(0, step - 5)
            before = len(model.keys)
            got = find_or_insert([table], keys, whole(keys), [to_step], workspace)
            assert got.rows.tolist() == model.insert(keys, to_step)
            new = int(got.new_counts[0])
            assert got.new_rows[:new].tolist() == list(range(before + 1, len(model.keys) + 1))
            assert got.new_keys[:new].tolist() == model.keys[before:]
        elif kind == "find":
            assert find([table], keys, whole(keys), workspace).tolist() == model.find(keys)
        elif kind == "remove":
            parts = (np.array(part, np.int64) for part in model.remove(keys))
            maintenance.remove(table, *parts, workspace)
        else:
            some, steps = np.unique(keys), rng.integers(0, STEPS, len(np.unique(keys)))
            maintenance.set_steps(table, some, steps, workspace)
            for key, to_step in zip(some.tolist(), steps.tolist()):
                if key in model.steps:
                    model.steps[key] = to_step
        known = np.array(model.keys, np.int64)
        found = find([table], known, whole(known), workspace)
        assert found.tolist() == list(range(1, len(known) + 1)) and table.count() == len(known)
        assert maintenance.steps(table).tolist() == [model.steps[key] for key in model.keys]


def test_rows_are_those_of_the_cpus_map():
    rng, cpu = np.random.default_rng(1), keymap.KeyMap(10000)
    table, workspace = HashTable("t", EmulatedDevice(1)), Workspace(EmulatedDevice(1))
    for _ in range(3):
        keys = rng.integers(-700, 700, 900)
        np.testing.assert_array_equal(
            find_or_insert([table], keys, whole(keys), [0], workspace).rows,
            cpu.find_or_insert(keys),
        )
        np.testing.assert_array_equal(
            find([table], keys - 9, whole(keys), workspace), cpu.find(keys - 9)
        )


class Waiting(EmulatedDevice):
    """Counts how often the host waits."""

    waited = 0

    def download(self, array: object) -> np.ndarray:
        self.waited += 1
        return super().download(array)


def test_the_host_waits_where_a_table_may_be_full_only():
    device = Waiting(2)
    table, workspace = HashTable("t", device, slots=1100), Workspace(device)
    for step in range(24):
        keys = np.arange(64) + 64 * (step // 2)  # half of the batches are known already
        find_or_insert([table], keys, whole(keys), [step], workspace)
        find([table], keys, whole(keys), workspace)
    assert table.slots == 1100 and device.waited <= 4
    assert table.count() == 64 * 12


def test_nothing_is_allocated_once_warm():
    device = EmulatedDevice()
    table, workspace = HashTable("t", device, slots=4096), Workspace(device)
    for step in range(6):
        keys = np.random.default_rng(step).integers(0, 300, 900 if step == 0 else 700 + step)
        find_or_insert([table], keys, whole(keys), [step], workspace)
        find([table], keys, whole(keys), workspace)
        if step == 1:
            warm = device.allocations, workspace.nbytes, table.nbytes
    assert (device.allocations, workspace.nbytes, table.nbytes) == warm


def test_removed_keys_leave_their_slots_when_those_are_needed():
    table, workspace = HashTable("t", EmulatedDevice(3), slots=512), Workspace(EmulatedDevice(3))
    for step in range(12):
        keys = np.arange(100) + 100 * step
        find_or_insert([table], keys, whole(keys), [step], workspace)
        remove(table, keys, workspace)
    assert table.slots == 512 and table.count() == 0


def test_a_table_that_lost_keys_of_its_own_says_so():
    table, workspace = HashTable("t", EmulatedDevice(5), slots=512), Workspace(EmulatedDevice(5))
    keys = np.arange(40)
    find_or_insert([table], keys, whole(keys), [0], workspace)
    words = "'t': of 31 keys that were to be removed, 30 were there"
    with pytest.raises(BrokenError, match=words):
        remove(table, np.append(keys[10:], 77), workspace)
    assert int(table.read()[DEAD]) == 30


def test_a_table_gives_slots_back_that_it_needs_no_more():
    device = EmulatedDevice(2)
    table, workspace, keys = HashTable("t", device), Workspace(device), np.arange(30_000)
    find_or_insert([table], keys, whole(keys), [3], workspace)
    slots, few = table.slots, keys[:3000]
    remove(table, keys[10_000:], workspace)
    assert table.slots == slots, "a third is left"
    allocate, device.empty = device.empty, refusing(device.empty, 4000)  # type: ignore[assignment]
    remove(table, keys[3000:10_000], workspace)
    assert table.slots == slots, "there was no room for both"
    device.empty = allocate  # type: ignore[method-assign]
    remove(table, keys[2999:3000], workspace)
    assert table.slots < slots / 8
    wanted = [*range(1, 3000), 0]
    assert find([table], few, whole(few), workspace).tolist() == wanted
    assert set(maintenance.steps(table).tolist()) == {3}
    slots = table.slots
    remove(table, few[:-1], workspace)
    assert table.slots == slots < 8 * FIRST_SLOTS and table.count() == 0


def refusing(allocate: Callable[..., Any], most: int) -> Callable[..., Any]:
    """Returns what makes arrays of up to so many elements, and has no room for larger ones."""

    def empty(shape: int, dtype: object) -> np.ndarray:
        if np.prod(shape) > most:
            raise MemoryError("none left")
        made: np.ndarray = allocate(shape, dtype)
        return made

    return empty


def test_keys_that_come_back_are_not_taken_for_removed_ones():
    """Their slots were thought to become free: building the table again makes no room, and it must
    grow.
    """
    table, workspace = HashTable("t", EmulatedDevice(4), slots=500), Workspace(EmulatedDevice(4))
    keys, more = np.arange(390), np.arange(1000, 1020)
    find_or_insert([table], keys, whole(keys), [0], workspace)
    remove(table, keys, workspace)
    for part in keys.reshape(-1, 10):
        assert table.count() == part[0]  # which tells the host that nothing was added
        find_or_insert([table], part, whole(part), [1], workspace)
    assert (table.slots, table.count()) == (500, 390)
    find_or_insert([table], more, whole(more), [2], workspace)
    assert (
        table.slots * MOST_LOAD
        >= 410
        == table.count()
        == np.count_nonzero(
            find([table], np.concatenate([keys, more]), Segments.of([410], [0]), workspace)
        )
    )


def test_a_key_uses_one_slot_however_often_it_comes():
    table, workspace = HashTable("t", EmulatedDevice(6), slots=300), Workspace(EmulatedDevice(6))
    keys = np.repeat(np.arange(1, 16), 5)
    for step in range(8):
        find_or_insert([table], keys, whole(keys), [step], workspace)
    assert table.slots == 300 and table.read()[USED] == 15


def test_a_table_that_can_not_grow_keeps_what_it_has():
    device = EmulatedDevice()
    table, workspace = HashTable("users", device, slots=300), Workspace(device)
    keys, many = np.arange(200), np.arange(100, 300)
    find_or_insert([table], keys, whole(keys), [0], workspace)
    allocate, device.empty = device.empty, refusing(device.empty, 400)  # type: ignore[assignment]
    with pytest.raises(
        MemoryError, match=r"hash table 'users' needs [\d,]+ bytes for [\d,]+ slots: none left"
    ):
        find_or_insert([table], many, whole(many), [1], workspace)
    assert np.all(find([table], keys, whole(keys), workspace) > 0) and table.count() == 200
    device.empty = allocate  # type: ignore[method-assign]
    assert (
        np.all(find_or_insert([table], many, whole(many), [1], workspace).rows > 0)
        and table.count() == 300
    )


def test_full_tables_are_named_each():
    device = EmulatedDevice()
    tables, workspace = [HashTable(name, device, most_rows=30) for name in "abc"], Workspace(device)
    keys, segments = np.arange(90), Segments.of([40, 30, 20, 0], [2, 1, 0, 0])
    with pytest.raises(
        FullError,
        match=r"^hash table 'c' is full: all of its 30 rows are taken, and 10 new keys got n",
    ):
        find_or_insert(tables, keys, segments, [0] * 3, workspace)
    assert find(tables, keys, segments, workspace).tolist() == [
        *range(1, 31),
        *[0] * 10,
        *range(1, 31),
        *range(1, 21),
    ]
    with pytest.raises(FullError, match=r"'b' is full.*, and 40 .*'c' is full.*, and 30 "):
        find_or_insert(
            tables, keys + 1000, Segments.of([40, 30, 10, 10], [1, 2, 0, 0]), [0] * 3, workspace
        )
    assert [table.count() for table in tables] == [30, 30, 30]
    assert find_or_insert(
        tables, keys[:30], Segments.of([30], [2]), [0] * 3, workspace
    ).rows.tolist() == list(range(1, 31))


def test_keys_that_a_full_table_refuses_leave_their_slots():
    table, workspace = (
        HashTable("t", EmulatedDevice(7), slots=300, most_rows=30),
        Workspace(EmulatedDevice(7)),
    )
    for step in range(15):
        keys = np.arange(60) + 100 * step
        with pytest.raises(FullError, match=f"{30 if step == 0 else 60} new keys") as raised:
            find_or_insert([table], keys, whole(keys), [step], workspace)
        assert raised.value.inserted.rows.tolist() == (
            [*range(1, 31), *[0] * 30] if step == 0 else [0] * 60
        )
    assert table.slots == 300 and table.count() == 30


def test_tables_of_one_call_have_steps_of_their_own():
    device = EmulatedDevice(3)
    tables, workspace = [HashTable(name, device) for name in "abc"], Workspace(device)
    keys, segments = np.arange(60), Segments.of([10, 20, 30], [2, 0, 1])
    for steps in ([7, 0, STEPS - 1], [5, 0, STEPS - 1], [9, 0, 1]):
        find_or_insert(tables, keys, segments, steps, workspace)
    find(tables, keys, segments, workspace)
    assert [set(maintenance.steps(table).tolist()) for table in tables] == [{9}, {0}, {STEPS - 1}]


@pytest.mark.parametrize(
    "options", [{"slots": 0}, {"slots": 2**33}, {"most_rows": MOST_ROWS + 1}, {"most_rows": 0}]
)
def test_tables_that_can_not_be(options: dict[str, int]):
    with pytest.raises(ValueError, match="hash table 't': .* there can be"):
        HashTable("t", EmulatedDevice(), **options)


def test_calls_that_are_wrong():
    device = EmulatedDevice()
    table, workspace, keys = HashTable("t", device), Workspace(device), np.arange(3)
    for step in (-1, STEPS):
        with pytest.raises(ValueError, match="they can be from 0 to 4,294,967,295"):
            find_or_insert([table], keys, whole(keys), [step], workspace)
        with pytest.raises(ValueError, match="they can be from 0 to 4,294,967,295"):
            maintenance.set_steps(table, keys, np.array([0, step, 1]), workspace)
    with pytest.raises(ValueError, match="is given twice"):
        find([table, table], keys, whole(keys), workspace)
    with pytest.raises(ValueError, match="a segment is of section 0, but there are 0"):
        find_or_insert([], keys, whole(keys), [], workspace)
    assert table.count() == 0


def test_the_reference_does_what_a_dictionary_does():
    rng, table, model = np.random.default_rng(9), reference.HashTable("t"), Model()
    for step in range(60):
        keys = rng.integers(-20, 20, 30)
        rows = reference.find_or_insert([table], keys, whole(keys), [step % 7]).rows
        assert rows.tolist() == model.insert(keys, step % 7)
        parts = (np.array(part, np.int64) for part in model.remove(rng.integers(-20, 20, 5)))
        reference.remove(table, *parts)
        assert reference.find([table], keys, whole(keys)).tolist() == model.find(keys)
        assert reference.steps(table).tolist() == [model.steps[key] for key in model.keys]
