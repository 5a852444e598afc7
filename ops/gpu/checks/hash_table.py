"""Checks and measurements of `collective.ops.gpu.hash_table` and
`hash_table_maintenance`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from collective.ops.gpu import hash_table as kernels
from collective.ops.gpu import hash_table_maintenance as maintenance
from collective.ops.gpu.checks import Measurement, Scale
from collective.ops.gpu.checks.inputs import EXTREME, assert_same, key_cases, on, segment_cases
from collective.ops.gpu.device import Device
from collective.ops.gpu.hash_table import MOST_ROWS, STEPS, HashTable
from collective.ops.gpu.reference import hash_table as reference
from collective.ops.gpu.segments import Segments
from collective.ops.gpu.workspace import Workspace


class _Both:
    """Gives tables and their references the same calls."""

    def __init__(self, device: Device, tables: int, slots: int = 1, most_rows: int = MOST_ROWS):
        self.workspace, self.device = Workspace(device), device
        self.tables = [HashTable(f"t{t}", device, slots, most_rows) for t in range(tables)]
        self.references = [
            reference.HashTable(f"t{t}", None, slots, most_rows) for t in range(tables)
        ]

    def find(self, keys: np.ndarray, segments: Segments, what: str) -> None:
        got = kernels.find(self.tables, on(self.device, keys), segments, self.workspace)
        assert_same(
            self.device,
            got,
            reference.find(self.references, keys, segments),
            f"rows found of {what}",
        )

    def insert(self, keys: np.ndarray, segments: Segments, step: int, what: str) -> None:
        """Inserts keys; each table's step is one less than the next table's."""
        steps = [step + t for t in range(len(self.tables))]
        got = kernels.find_or_insert(
            self.tables, on(self.device, keys), segments, steps, self.workspace
        )
        self.same(got, reference.find_or_insert(self.references, keys, segments, steps), what)

    def same(self, got: kernels.Inserted, wanted: kernels.Inserted, what: str) -> None:
        assert_same(
            self.device, got.new_counts, wanted.new_counts, f"numbers of new rows of {what}"
        )
        new = len(wanted.new_keys)
        assert_same(self.device, got.new_keys[:new], wanted.new_keys, f"new keys of {what}")
        assert_same(self.device, got.new_rows[:new], wanted.new_rows, f"new rows of {what}")
        assert_same(self.device, got.rows, wanted.rows, f"rows of {what}")

    def remove(self, t: int, keys: np.ndarray) -> None:
        """Removes existing keys among `keys`; the keys of the last rows get their rows."""
        table, known = self.tables[t], self.references[t]
        at, there = known.found(np.unique(keys))
        gone, left = known.keys[at[there]], known.count() - int(there.sum())
        beyond = (known.rows > left) & ~np.isin(known.keys, gone)
        moved, free = known.keys[beyond], np.sort(known.rows[at[there]])
        to = free[free <= left]
        maintenance.remove(table, gone, moved, to, self.workspace)
        reference.remove(known, gone, moved, to)

    def set_steps(self, t: int, keys: np.ndarray, steps: np.ndarray) -> None:
        maintenance.set_steps(self.tables[t], keys, steps, self.workspace)
        reference.set_steps(self.references[t], keys, steps)

    def all_same(self, what: str) -> None:
        """Compares the rows of all keys, and when they were last used."""
        for table, wanted in zip(self.tables, self.references):
            assert table.count() == wanted.count(), what
            found = kernels.find(
                [table],
                on(self.device, wanted.keys),
                Segments.of([wanted.count()], [0]),
                self.workspace,
            )
            assert_same(self.device, found, wanted.rows, f"rows of all keys of {what}")
            np.testing.assert_array_equal(
                maintenance.steps(table),
                reference.steps(wanted),
                f"last uses of {what}",
            )


def colliding(keys: int, last: bool = False) -> np.ndarray:
    """Draws different keys whose searches all begin in the first sector, or the last, for any
    number of sectors: the inverse of the hash.
    """
    x, word = np.arange(1, keys + 1, dtype=np.uint64), 2**64
    x = ~x if last else x
    for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
        x = (x ^ (x >> np.uint64(33))) * np.uint64(pow(factor, -1, word))
    return (x ^ (x >> np.uint64(33))).view(np.int64)


def any_keys(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Looks up, inserts and looks up keys of three tables that begin with one slot; the last batch
    repeats half of them.
    """
    for name, keys in key_cases(scale.keys // 4, rng):
        both, segments = _Both(device, 3), list(segment_cases(len(keys), 3, rng))[-1]
        both.find(keys, segments, f"keys {name} before")
        both.insert(keys, segments, 1, f"keys {name}")
        both.find(keys, segments, f"keys {name} after")
        both.insert(
            np.where(rng.random(len(keys)) < 0.5, keys, keys ^ 2**40),
            segments,
            2,
            f"keys {name} again",
        )
        both.all_same(f"keys {name}")


def large(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Inserts as many keys as a check has, all new at once: rows are their positions; then one new
    key as many times.
    """
    # Odd, so that all keys differ.
    keys = np.arange(scale.keys) * (2 * int(rng.integers(2**40, 2**62)) + 1)
    table, workspace, segments = (
        HashTable("large", device),
        Workspace(device),
        Segments.of([len(keys)], [0]),
    )
    here, wanted = on(device, keys), np.arange(1, len(keys) + 1)
    assert_same(
        device,
        kernels.find_or_insert([table], here, segments, [1], workspace).rows,
        wanted,
        f"rows of {len(keys)} keys",
    )
    assert_same(
        device,
        kernels.find([table], here, segments, workspace),
        wanted,
        f"rows found of {len(keys)} keys",
    )
    same = on(device, np.full(len(keys), keys[-1] + 1))
    got = kernels.find_or_insert([table], same, segments, [2], workspace)
    assert_same(device, got.rows, np.full(len(keys), len(keys) + 1), "rows of one key")
    assert_same(device, got.new_counts, np.ones(1, np.int32), "number of one key")


def collisions(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Inserts keys that all begin in one of two sectors, and 0; removes a third of them, and
    inserts half of these again.
    """
    size = min(scale.keys // 20, 1000)
    keys = rng.permutation(np.concatenate([colliding(size), colliding(size, last=True), [0]]))
    both, segments = _Both(device, 1, slots=len(keys)), Segments.of([len(keys)], [0])
    both.insert(keys, segments, 1, "colliding keys")
    both.remove(0, keys[: len(keys) // 3])
    both.find(keys, segments, "colliding keys, a third removed")
    again = keys[len(keys) // 6 :][::-1].copy()
    both.insert(again, Segments.of([len(again)], [0]), 2, "colliding keys again")
    both.find(keys, segments, "colliding keys")
    both.all_same("colliding keys")


def sequences(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Looks up in, inserts into, cleans and grows tables in turn, with extreme keys; also reads and
    sets their last uses.
    """
    both, size = _Both(device, 2), min(scale.keys // 8, 2**20)
    for step in range(1, 12):
        keys = rng.integers(-size, size, int(rng.integers(1, size)))
        keys[:20] = rng.choice(EXTREME, len(keys[:20]))
        segments = list(segment_cases(len(keys), 2, rng))[step % 3]
        both.find(keys, segments, f"step {step} before")
        both.insert(keys, segments, step, f"step {step}")
        if step % 3 == 0:
            both.remove(step % 2, np.concatenate([keys[::2], rng.integers(-size, size, 30)]))
        if step % 4 == 0:
            some = np.unique(keys)
            both.set_steps(step % 2, some, rng.integers(0, STEPS, len(some)))
        both.find(keys, segments, f"step {step}")
    both.all_same("sequences")
    both.insert(keys, segments, 3, "keys that were used later already")
    both.all_same("keys that were used later already")
    both.remove(1, both.references[1].keys)
    both.insert(keys, segments, 4, "a table that was cleared")
    both.all_same("a table that was cleared")


def full(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Inserts more keys than there are rows: the first of them get rows, and the others get theirs
    once there is more room.
    """
    size = scale.keys // 4
    both = _Both(device, 1, most_rows=size // 2)
    keys, segments = np.repeat(rng.permutation(size), 2), Segments.of([2 * size], [0])
    refusals = []
    for insert in (
        partial(kernels.find_or_insert, both.tables, on(device, keys)),
        partial(reference.find_or_insert, both.references, keys),
    ):
        try:
            insert(segments, [1], both.workspace)
        except kernels.FullError as error:
            refusals.append(error.inserted)
    assert len(refusals) == 2, "keys without rows are no error"
    both.same(refusals[0], refusals[1], "a full table")
    both.find(keys, segments, "a full table")
    both.all_same("a full table")
    both.tables[0].most_rows = both.references[0].most_rows = size
    both.insert(keys, segments, 2, "a table that was full")
    both.all_same("a table that was full")


CHECKS = (any_keys, large, collisions, sequences, full)


def _filled(
    device: Device, slots: int, load: float, rng: np.random.Generator, workspace: Workspace
) -> tuple[HashTable, Any]:
    """Returns a table, and a function from numbers below its count to its keys."""
    table, odd = HashTable("measured", device, slots), 2 * int(rng.integers(2**40, 2**62)) + 1
    block, count = max(slots // 32, 1), int(load * slots)

    def key(number: np.ndarray) -> np.ndarray:
        return number.astype(np.uint64) * np.uint64(odd)  # a bijection

    for first in range(0, count, block):
        keys = key(np.arange(first, min(first + block, count))).view(np.int64)
        kernels.find_or_insert(
            [table], on(device, keys), Segments.of([len(keys)], [0]), [0], workspace
        )
    return table, key


def measurements(device: Device, scale: Scale, rng: np.random.Generator) -> Iterator[Measurement]:
    """Measures a table of 10**8 slots, three quarters of which are in use, with batches of existing
    and of missing keys.
    """
    slots, load = min(10**8, scale.measured_bytes // 32), 0.75
    size, workspace = min(scale.measured_keys // 4, slots // 25), Workspace(device)
    table, key = _filled(device, slots, load, rng, workspace)
    there, segments = int(load * slots), Segments.of([size], [0])

    def batches(first: int, end: int) -> list[Any]:
        return [on(device, key(rng.integers(first, end, size)).view(np.int64)) for _ in range(3)]

    def runs(function: Any, inputs: Sequence[Any], **more: Any) -> list[Any]:
        return [
            partial(function, [table], keys, segments, workspace=workspace, **more)
            for keys in inputs
        ]

    known, unknown = batches(0, there), batches(there, 2 * there)
    yield Measurement("find, all there", runs(kernels.find, known), 48 * size, keys=size)
    yield Measurement("find, none there", runs(kernels.find, unknown), 48 * size, keys=size)
    # The host reads how full the table is before it inserts as many keys as could be new.
    yield Measurement(
        "find or insert, all there",
        runs(kernels.find_or_insert, known, steps=[1]),
        48 * size,
        keys=size,
        waits=True,
    )
    steps = iter(range(2, 2**30))
    later = [
        partial(lambda run: run(steps=[next(steps)]), run)
        for run in runs(kernels.find_or_insert, known)
    ]
    yield Measurement("find or insert, step moves", later, 80 * size, keys=size, waits=True)
    yield Measurement(
        "hash table, rebuilt",
        [lambda: table.rebuild(slots)],
        32 * slots + 64 * there,
        keys=there,
    )
    del known, unknown, later
    # Every run inserts keys that are new, and the load goes from 5/8 to at most 3/4, even though
    # some runs are repeated.
    few = max(min(size, slots // 8 // 90), 1)
    filled, key = _filled(device, slots, 0.625, rng, workspace)
    keys: Any = on(
        device, key(np.arange(int(0.625 * slots), int(0.625 * slots) + few)).view(np.int64)
    )
    stride = np.int64(key(np.array([few])).view(np.int64)[0])

    def new() -> object:
        keys[...] += stride
        return kernels.find_or_insert([filled], keys, Segments.of([few], [0]), [1], workspace)

    yield Measurement("find or insert, all new", [new], 80 * few, keys=few)
    assert filled.slots == slots, "the table grew while it was measured"
