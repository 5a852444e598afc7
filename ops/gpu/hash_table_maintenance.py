"""Removes keys of a hash table, and reads and sets when keys were last used. The host waits for
the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from collective.ops.counting import counted
from collective.ops.gpu.hash_table import (
    DEAD,
    FIRST_SLOTS,
    HIGHEST,
    REFUSED,
    BrokenError,
    HashTable,
    check_steps,
    slots_for,
)
from collective.ops.gpu.workspace import Workspace

BLOCK = 1 << 20  # keys that are on the device at once
_FEW = 8  # a table is rebuilt if it has at least this many times the slots that it needs


def remove(
    table: HashTable, gone: np.ndarray, moved: np.ndarray, to: np.ndarray, workspace: Workspace
) -> None:
    """Removes keys, and gives other keys the rows that become free, so that rows stay dense.

    Bytes moved: per key 8, and a sector at random read and written; 4 for a new row.

    Args:
        table: the table. If it then has many more slots than it needs, it is rebuilt.
        gone: [K] int64, existing keys, each once.
        moved: [M] int64, existing keys: those of the rows after the last one that is left.
        to: [M], the rows that they get.
        workspace: on the same device.

    Raises:
        BrokenError: the device lacks some of the keys.
    """
    before = int(table.read()[DEAD])
    on_device = table.on_device()
    for keys, _ in _blocks(gone, None, workspace):
        table.launch("hash_table_remove", len(keys), (keys, np.int64(len(keys)), on_device))
    for keys, rows in _blocks(moved, to, workspace):
        table.launch("hash_table_move", len(keys), (keys, np.int64(len(keys)), on_device, rows))
    table.counters[HIGHEST:REFUSED] -= len(gone)
    counters = table.read()
    if int(counters[DEAD]) - before != len(gone):
        raise BrokenError(
            f"hash table '{table.name}': of {counted(len(gone), 'key')} that were to be removed, "
            f"{int(counters[DEAD]) - before:,} were there. Its memory was overwritten: go back to "
            "a checkpoint."
        )
    slots = max(slots_for(int(counters[HIGHEST])), FIRST_SLOTS)
    if slots * _FEW <= table.slots:
        with contextlib.suppress(MemoryError):  # Old and new slots must fit at the same time.
            table.rebuild(slots)


def steps(table: HashTable) -> np.ndarray:
    """Returns the step to which the last use of each row led, [R] int64 for rows 1 to R; 0: none.

    Reads 16 bytes a slot.

    Raises:
        MemoryError: the device has no room for 4 bytes a row in addition to the table.
    """
    by_row = table.empty(table.count() + 1, np.uint32, "the last uses of its keys")
    table.launch(
        "hash_table_steps",
        table.slots + 2,
        (table.on_device(), np.int64(table.slots + 2), by_row),
    )
    return table.device.download(by_row)[1:].astype(np.int64)


def set_steps(
    table: HashTable, keys: np.ndarray, steps_of_keys: np.ndarray, workspace: Workspace
) -> None:
    """Sets the step to which the last use of keys led.

    Args:
        table: the table.
        keys: [K] int64, each once; missing keys are ignored.
        steps_of_keys: [K].
        workspace: on the same device.

    Raises:
        ValueError: a slot can't hold such steps; nothing has changed.
    """
    check_steps(steps_of_keys)
    on_device = table.on_device()
    for some, steps_ in _blocks(keys, steps_of_keys, workspace):
        table.launch(
            "hash_table_set_steps", len(some), (some, np.int64(len(some)), on_device, steps_)
        )


def _blocks(
    keys: np.ndarray, words: np.ndarray | None, workspace: Workspace
) -> Iterator[tuple[Any, Any]]:
    """Yields keys [b] int64, and their words [b] uint32, on the device.

    They are valid until the next ones are requested.
    """
    size, device = min(len(keys), BLOCK), workspace.device
    key_block = workspace.take("hash_table.some_keys", size, np.int64)
    word_block = workspace.take("hash_table.some_words", size, np.uint32)
    for first in range(0, len(keys), BLOCK):
        last = min(first + BLOCK, len(keys))
        block = key_block[: last - first], word_block[: last - first]
        device.upload(np.ascontiguousarray(keys[first:last], np.int64), block[0])
        if words is not None:
            device.upload(words[first:last].astype(np.uint32), block[1])
        yield block
