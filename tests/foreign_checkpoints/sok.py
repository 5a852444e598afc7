"""Writes dumps of embedding tables as SparseOperationKit does.

Sources: SparseOperationKit's `dump_load.py` (`write_file_head`: 256 + 4 + 32 + 4 bytes, text padded
at the left, numbers big-endian; `save_table_to_filesystem_static`: keys are local row * N + rank,
ranks one after the other; `save_table_to_filesystem_dynamic`: each rank's keys ascending), and
`raw_param.cc` (`dump_to_file`: `_keys.file` int64 and `_values.file` float32, no head).
"""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np

NUMBERS = {"int32": 0, "int64": 1, "uint32": 2, "uint64": 3, "float16": 4, "float32": 5}
KEY, WEIGHT, SLOT = 0, 1, 2


def _file(path: Path, kind: int, slot: str, values: np.ndarray) -> None:
    head = b"".rjust(256) + kind.to_bytes(4, "big") + slot.encode().rjust(32)
    path.write_bytes(head + NUMBERS[values.dtype.name].to_bytes(4, "big") + values.tobytes())


def dump(
    folder: Path,
    name: str,
    keys: np.ndarray,
    rows: np.ndarray,
    ranks: int = 2,
    slots: dict[tuple[str, str], np.ndarray] | None = None,
) -> None:
    """Dumps a table, `name` being the variable's with ':0' at its end.

    Args:
        folder: must be there.
        name: the table's.
        keys: [n].
        rows: [n, D] in the order of keys.
        ranks: key k is rank k mod ranks's.
        slots: {(optimizer, slot): [n, D]}.
    """
    stem = "".join("_" if letter in string.punctuation else letter for letter in name)
    order = np.lexsort((keys, keys % ranks))
    _file(folder / f"{stem}-key", KEY, "", keys[order])
    _file(folder / f"{stem}-weight", WEIGHT, "", rows[order])
    for (optimizer, slot), values in (slots or {}).items():
        _file(folder / f"{stem}-{optimizer}-{slot}", SLOT, slot, values[order])


def old_dump(folder: Path, name: str, keys: np.ndarray, rows: np.ndarray) -> None:
    """Dumps a table as `sok.Saver` of release 1.0 does."""
    (folder / f"{name}_keys.file").write_bytes(keys.astype(np.int64).tobytes())
    (folder / f"{name}_values.file").write_bytes(rows.astype(np.float32).tobytes())
