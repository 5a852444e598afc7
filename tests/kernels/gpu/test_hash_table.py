"""Checks the hash table against a dictionary, and what it asks of host and memory."""

from __future__ import annotations

import numpy as np
import pytest

from collective.ops import keymap
from collective.ops.gpu.checks.hash_table import colliding
from collective.ops.gpu.hash_table import (
    DEAD,
    MOST_LOAD,
    MOST_ROWS,
    STEPS,
    USED,
    FullError,
    HashTable,
    find,
    find_or_insert,
)
from collective.ops.gpu.hash_table_maintenance import export, import_, remove, remove_unused
from collective.ops.gpu.reference import hash_table as reference
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.workspace import Workspace
from tests.kernels.gpu.emulator import EmulatedDevice

EXTREME = [0, -1, 1, -(2**63), 2**63 - 1, 2**31, -(2**31)]


def whole(keys: np.ndarray) -> Segments:
    return Segments.of([len(keys)], [0])


class Model:
    """Does what one table's page describes, key by key."""

    def __init__(self, filter_freq: int):
        self.filter_freq, self.highest = filter_freq, 0
        self.rows: dict[int, int] = {}
        self.steps: dict[int, int] = {}
        self.seen: dict[int, int] = {}
        self.free: list[int] = []

    def insert(self, keys: np.ndarray, counts: np.ndarray, step: int) -> list[int]:
        for key, count in zip(keys.tolist(), counts.tolist()):
            if key not in self.rows:
                self.seen[key] = self.seen.get(key, 0) + count
            self.steps[key] = step
        for key in keys.tolist():
            if key not in self.rows and self.seen[key] >= self.filter_freq:
                del self.seen[key]
                if self.free:
                    self.rows[key] = self.free.pop(0)
                else:
                    self.highest += 1
                    self.rows[key] = self.highest
        return self.find(keys)

    def find(self, keys: np.ndarray) -> list[int]:
        return [self.rows.get(key, 0) for key in keys.tolist()]

    def remove(self, keys: list[int]) -> int:
        freed = [self.rows.pop(key) for key in set(keys) if key in self.rows]
        for key in set(keys):
            self.steps.pop(key, None)
            self.seen.pop(key, None)
        self.free = sorted(self.free + freed)
        return len(freed)


@pytest.mark.parametrize("seed", range(5))
def test_random_sequences_do_what_a_dictionary_does(seed: int):
    rng = np.random.default_rng(seed)
    device, filter_freq = EmulatedDevice(seed), int(rng.integers(1, 4))
    workspace, model = Workspace(device), Model(filter_freq)
    table = HashTable("t", device, slots=int(rng.integers(1, 60)), filter_freq=filter_freq)
    pool = np.concatenate(
        [rng.integers(-(2**63), 2**63 - 1, 150), colliding(40), EXTREME, np.arange(-50, 50)]
    )
    for step in range(30):
        keys = rng.choice(pool, int(rng.integers(0, 60)))
        kind = rng.choice(["insert", "insert", "insert", "find", "remove", "unused", "export"])
        if kind == "insert":
            counts = rng.integers(0 if filter_freq > 1 else 1, 3, len(keys), np.int32)
            got = find_or_insert([table], keys, whole(keys), step, workspace, counts)
            before = len(model.rows)
            assert got.rows.tolist() == model.insert(keys, counts, step)
            new = int(got.new_counts[0])
            assert len(set(got.new_rows[:new].tolist())) == new == len(model.rows) - before
            assert got.new_rows[:new].tolist() == model.find(got.new_keys[:new])
        elif kind == "find":
            assert find([table], keys, whole(keys), workspace).tolist() == model.find(keys)
        elif kind == "remove":
            assert remove(table, keys, workspace) == model.remove(keys.tolist())
        elif kind == "unused":
            gone = [key for key, last in model.steps.items() if last < step - 5]
            assert remove_unused(table, step - 5, workspace) == model.remove(gone)
        held = export(table)
        live = sorted(key for key in model.steps if key in model.rows or model.seen[key])
        assert held.keys.tolist() == live and held.rows.tolist() == [
            model.rows.get(key, 0) for key in live
        ]
        assert held.steps.tolist() == [model.steps[key] for key in live]
        assert held.counts.tolist() == [model.seen.get(key, 0) for key in live]
        assert (table.count(), table.highest()) == (len(model.rows), model.highest)


def test_rows_are_those_of_the_cpus_map():
    rng, cpu = np.random.default_rng(1), keymap.KeyMap(10000)
    table, workspace = HashTable("t", EmulatedDevice(1)), Workspace(EmulatedDevice(1))
    for _ in range(3):
        keys = rng.integers(-700, 700, 900)
        np.testing.assert_array_equal(
            find_or_insert([table], keys, whole(keys), 0, workspace).rows, cpu.find_or_insert(keys)
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
        find_or_insert([table], keys, whole(keys), step, workspace)
        find([table], keys, whole(keys), workspace)
    assert table.slots == 1100 and device.waited <= 4
    assert table.highest_bound >= 64 * 12 == table.count()


def test_nothing_is_allocated_once_warm():
    device = EmulatedDevice()
    table, workspace = HashTable("t", device, slots=4096), Workspace(device)
    for step in range(6):
        keys = np.random.default_rng(step).integers(0, 300, 900 if step == 0 else 700 + step)
        find_or_insert([table], keys, whole(keys), step, workspace)
        find([table], keys, whole(keys), workspace)
        if step == 1:
            warm = device.allocations, workspace.nbytes, table.nbytes
    assert (device.allocations, workspace.nbytes, table.nbytes) == warm


def test_removed_keys_leave_their_slots_when_those_are_needed():
    table, workspace = HashTable("t", EmulatedDevice(3), slots=512), Workspace(EmulatedDevice(3))
    for step in range(12):
        keys = np.arange(100) + 100 * step
        find_or_insert([table], keys, whole(keys), step, workspace)
        assert remove(table, keys, workspace) == 100
    assert table.slots == 512 and (table.count(), table.highest()) == (0, 100)


def test_a_key_is_removed_once_however_often_it_is_named():
    """The dead are counted once, whichever threads have the key: counted twice, they would make
    room that isn't there.
    """
    table, workspace = HashTable("t", EmulatedDevice(5), slots=512), Workspace(EmulatedDevice(5))
    keys = np.arange(40)
    find_or_insert([table], keys, whole(keys), 0, workspace)
    assert remove(table, np.repeat(keys[:30], 20), workspace) == 30
    assert int(table.read()[DEAD]) == 30 and table.count() == 10


def test_keys_that_come_back_are_not_taken_for_removed_ones():
    """Their slots were thought to become free: building the table anew makes no room, and it must
    grow.
    """
    table, workspace = HashTable("t", EmulatedDevice(4), slots=500), Workspace(EmulatedDevice(4))
    keys, more = np.arange(390), np.arange(1000, 1020)
    find_or_insert([table], keys, whole(keys), 0, workspace)
    remove(table, keys, workspace)
    for part in keys.reshape(-1, 10):
        assert table.count() == part[0]  # which tells the host that nothing was added
        find_or_insert([table], part, whole(part), 1, workspace)
    assert (table.slots, table.count()) == (500, 390)
    find_or_insert([table], more, whole(more), 2, workspace)
    assert (
        table.slots * MOST_LOAD
        >= 410
        == table.count()
        == np.count_nonzero(
            find([table], np.concatenate([keys, more]), Segments.of([410], [0]), workspace)
        )
    )


@pytest.mark.parametrize("filter_freq", [1, 10])
def test_a_key_uses_one_slot_however_often_it_comes(filter_freq: int):
    table, workspace = (
        HashTable("t", EmulatedDevice(6), slots=300, filter_freq=filter_freq),
        Workspace(EmulatedDevice(6)),
    )
    keys = np.repeat(np.arange(1, 16), 5)
    for step in range(8):
        find_or_insert([table], keys, whole(keys), step, workspace)
    assert table.slots == 300 and table.read()[USED] == 15


def test_a_table_that_can_not_grow_keeps_what_it_has():
    device = EmulatedDevice()
    table, workspace = HashTable("users", device, slots=300), Workspace(device)
    keys, many = np.arange(200), np.arange(100, 300)
    find_or_insert([table], keys, whole(keys), 0, workspace)
    allocate = device.empty

    def refuse(shape: int, dtype: object) -> np.ndarray:
        if np.prod(shape) > 400:
            raise MemoryError("none left")
        return allocate(shape, dtype)

    device.empty = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(
        MemoryError, match=r"hash table 'users' needs [\d,]+ bytes for [\d,]+ slots: none left"
    ):
        find_or_insert([table], many, whole(many), 1, workspace)
    assert np.all(find([table], keys, whole(keys), workspace) > 0) and table.count() == 200
    device.empty = allocate  # type: ignore[method-assign]
    assert (
        np.all(find_or_insert([table], many, whole(many), 1, workspace).rows > 0)
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
        find_or_insert(tables, keys, segments, 0, workspace)
    assert find(tables, keys, segments, workspace).tolist() == [
        *range(1, 31),
        *[0] * 10,
        *range(1, 31),
        *range(1, 21),
    ]
    with pytest.raises(FullError, match=r"'b' is full.*, and 40 .*'c' is full.*, and 30 "):
        find_or_insert(
            tables, keys + 1000, Segments.of([40, 30, 10, 10], [1, 2, 0, 0]), 0, workspace
        )
    assert [table.count() for table in tables] == [30, 30, 30]
    assert find_or_insert(
        tables, keys[:30], Segments.of([30], [2]), 0, workspace
    ).rows.tolist() == list(range(1, 31))


def test_keys_that_a_full_table_refuses_leave_their_slots():
    table, workspace = (
        HashTable("t", EmulatedDevice(7), slots=300, most_rows=30),
        Workspace(EmulatedDevice(7)),
    )
    for step in range(15):
        keys = np.arange(60) + 100 * step
        with pytest.raises(FullError, match=f"{30 if step == 0 else 60} new keys") as raised:
            find_or_insert([table], keys, whole(keys), step, workspace)
        assert raised.value.inserted.rows.tolist() == (
            [*range(1, 31), *[0] * 30] if step == 0 else [0] * 60
        )
    assert table.slots == 300 and table.count() == 30


def test_what_is_imported_may_have_been_seen_often_enough_here():
    device = EmulatedDevice(5)
    table, workspace = HashTable("t", device, filter_freq=3), Workspace(device)
    got = import_(
        table, np.array([-5, 0, 7, 8]), np.array([4, 5, 6, 7]), np.array([0, 2, 3, 0]), workspace
    )
    assert got.rows.tolist() == [1, 0, 2, 3] and got.new_keys[:3].tolist() == [-5, 7, 8]
    held = export(table)
    assert (held.keys.tolist(), held.rows.tolist()) == ([-5, 0, 7, 8], [1, 0, 2, 3])
    assert (held.steps.tolist(), held.counts.tolist()) == ([4, 5, 6, 7], [0, 2, 0, 0])
    with pytest.raises(ValueError, match="steps and counts must be from 0"):
        import_(table, np.array([1]), np.array([-1]), np.array([0]), workspace)


@pytest.mark.parametrize(
    "options", [{"slots": 0}, {"slots": 2**33}, {"most_rows": MOST_ROWS + 1}, {"filter_freq": 0}]
)
def test_tables_that_can_not_be(options: dict[str, int]):
    with pytest.raises(ValueError, match="hash table 't': .* there can be"):
        HashTable("t", EmulatedDevice(), **options)


def test_calls_that_are_wrong():
    device = EmulatedDevice()
    table, workspace, keys = HashTable("t", device), Workspace(device), np.arange(3)
    for step in (-1, STEPS):
        with pytest.raises(ValueError, match="steps from 0 to 1,073,741,823"):
            find_or_insert([table], keys, whole(keys), step, workspace)
    with pytest.raises(ValueError, match="is given twice"):
        find([table, table], keys, whole(keys), workspace)
    with pytest.raises(ValueError, match="a segment is of section 0, but there are 0"):
        find_or_insert([], keys, whole(keys), 0, workspace)
    assert table.count() == 0


def test_the_reference_does_what_a_dictionary_does():
    rng, table, model = np.random.default_rng(9), reference.HashTable("t", filter_freq=2), Model(2)
    for step in range(60):
        keys, counts = rng.integers(-20, 20, 30), rng.integers(0, 2, 30, np.int32)
        assert reference.find_or_insert(
            [table], keys, whole(keys), step, None, counts
        ).rows.tolist() == model.insert(keys, counts, step)
        gone = rng.integers(-20, 20, 5)
        assert reference.remove(table, gone) == model.remove(gone.tolist())
