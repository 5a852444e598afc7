"""Reads the files into which SparseOperationKit dumps embedding tables.

`sok.dump(path, variables, optimizer)`, in releases from 1.2 on, writes for the table `emb:0`

    emb_0-key, emb_0-weight        its keys, and its rows in the same order
    emb_0-Adam-m, emb_0-Adam-v     the slots of an optimizer, likewise

Punctuation in names becomes `_`. Each file begins with 296 bytes: the table's name (256, often
blank), 0, 1 or 2 for key, weight or slot (4), the slot's name (32), and the number of its type (4).
Text is padded with blanks on the left; numbers have the highest byte first. The values follow as in
memory. The ranks' rows follow each other, in no order. The file doesn't tell whether a table is a
`sok.Variable` or a `sok.DynamicVariable`: it is taken for static if its keys are 0 … V - 1.

`sok.Saver().dump_to_file(variable, path)`, in releases 1.0 and 1.1, writes `emb_keys.file`, int64,
and `emb_values.file`, float32, both without a header.

Sources: SparseOperationKit's `dump_load.py` (`write_file_head`, `save_table_to_filesystem_static`,
`save_table_to_filesystem_dynamic`, `data_type_convert`), and `raw_param.cc` (`dump_to_file`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from collective.checkpoint.files.tensor_bundle import slice_rows
from collective.checkpoint.importing.deeprec import add_variables
from collective.checkpoint.importing.source import KeyedRows, KeyedTable, Source
from collective.checkpoint.reading import table_reader
from collective.ops.counting import counted

HEAD_BYTES = 256 + 4 + 32 + 4
DTYPES: Mapping[int, np.dtype[Any]] = {
    0: np.dtype(np.int32),
    1: np.dtype(np.int64),
    2: np.dtype(np.uint32),
    3: np.dtype(np.uint64),
    4: np.dtype(np.float16),
    5: np.dtype(np.float32),
    6: np.dtype(np.float64),
}
# Maps the names of Keras's slots to those of TensorFlow's version-1 optimizers.
SLOTS = {
    ("Adam", "m"): "Adam",
    ("Adam", "v"): "Adam_1",
    ("Adagrad", "accumulator"): "Adagrad",
    ("Adadelta", "accum_grad"): "Adadelta",
    ("Adadelta", "accum_var"): "Adadelta_1",
    ("Ftrl", "accumulator"): "Ftrl",
    ("Ftrl", "linear"): "Ftrl_1",
    ("SGD", "momentum"): "Momentum",
}
KEY_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True)
class ArrayFile:
    """Describes a file of numbers.

    Attributes:
        path: the file's path.
        dtype: the type of a number.
        start: the place of the first number.
        count: how many numbers there are.
    """

    path: str
    dtype: np.dtype
    start: int
    count: int

    def read(self, first: int, count: int) -> np.ndarray:
        offset = self.start + first * self.dtype.itemsize
        return np.fromfile(self.path, self.dtype, count, offset=offset)


def read(path: str, kinds: Mapping[str, str] | None = None, dense: str | None = None) -> Source:
    """Describes a folder into which SOK dumped tables.

    Args:
        path: the folder.
        kinds: {table: 'static' or 'dynamic'}, for tables whose keys are 0 … V - 1.
        dense: a TensorFlow checkpoint with the other variables, or a folder, whose latest one is
            read; None: there are none.

    Raises:
        ValueError: there are no files of SOK, one is cut off, or `kinds` names an unknown table.
    """
    kinds = dict(kinds or {})
    source = Source(path)
    if not os.path.isdir(path):
        raise ValueError(f"There is no folder '{path}', into which sok.dump has written.")
    files = sorted(os.listdir(path))
    for file in files:
        stem, dash, kind = file.partition("-")
        if dash and kind == "key":
            _add_dump(path, stem, files, kinds, source)
        elif file.endswith("_keys.file"):
            _add_old_dump(path, file[: -len("_keys.file")], kinds, source)
    if not source.tables:
        raise ValueError(
            f"There are no tables of sok.dump in '{path}' (files …-key and …-weight, or "
            "…_keys.file and …_values.file)."
        )
    if kinds:
        names = ", ".join(table.rows.name for table in source.tables)
        raise ValueError(f"'{path}' has no table {', '.join(kinds)} (it has: {names}).")
    if any(slot.name.endswith("/Adam") for table in source.tables for slot in table.slots):
        source.notes.append(
            "the dump does not have beta1_power and beta2_power of Adam: "
            "scope(missing_slots='fresh') "
            "starts them fresh"
        )
    if dense is not None:
        bundle = table_reader.open_bundle(dense)
        bundle.check_files()
        add_variables(bundle, source, set())
    return source


def _add_dump(
    path: str, stem: str, files: list[str], kinds: dict[str, str], source: Source
) -> None:
    name = stem.removesuffix("_0")
    if f"{stem}-weight" not in files:
        raise ValueError(f"'{path}' has {stem}-key, but not {stem}-weight: the dump is incomplete.")
    keys = _file_with_head(os.path.join(path, f"{stem}-key"))
    weight = _file_with_head(os.path.join(path, f"{stem}-weight"))
    slots = []
    for file in files:
        if file.startswith(f"{stem}-") and file not in (f"{stem}-key", f"{stem}-weight"):
            optimizer, _, slot = file[len(stem) + 1 :].partition("-")
            slot_name = SLOTS.get((optimizer, slot), f"{optimizer}/{slot}")
            values = _file_with_head(os.path.join(path, file))
            slots.append(_rows(f"{name}/{slot_name}", keys, values))
    _add_table(name, keys, _rows(name, keys, weight), slots, kinds, source)


def _add_old_dump(path: str, name: str, kinds: dict[str, str], source: Source) -> None:
    keys_path, values_path = (
        os.path.join(path, f"{name}_{end}.file") for end in ("keys", "values")
    )
    if not os.path.exists(values_path):
        raise ValueError(f"There is no {values_path}: the dump is incomplete.")
    keys = _array_file(keys_path, np.dtype(np.int64), 0)
    values = _array_file(values_path, np.dtype(np.float32), 0)
    _add_table(name, keys, _rows(name, keys, values), [], kinds, source)


def _file_with_head(path: str) -> ArrayFile:
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    number = int.from_bytes(head[-4:], "big")
    if len(head) < HEAD_BYTES or number not in DTYPES:
        raise ValueError(f"{path} doesn't begin as a file of sok.dump does.")
    return _array_file(path, DTYPES[number], HEAD_BYTES)


def _array_file(path: str, dtype: np.dtype, start: int) -> ArrayFile:
    size = os.path.getsize(path) - start
    if size % dtype.itemsize:
        raise ValueError(f"{path} is cut off: {size:,} bytes are no whole number of {dtype}.")
    return ArrayFile(path, dtype, start, size // dtype.itemsize)


def _rows(name: str, keys: ArrayFile, values: ArrayFile) -> KeyedRows:
    if not keys.count or values.count % keys.count:
        raise ValueError(
            f"{values.path} has {counted(values.count, 'value')} for "
            f"{counted(keys.count, 'key')}: one of the files is cut off, or belongs to another "
            "dump."
        )
    dim = values.count // keys.count

    def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        block = slice_rows(dim, values.dtype)
        for first in range(0, keys.count, block):
            count = min(block, keys.count - first)
            rows = values.read(first * dim, count * dim).reshape(count, dim)
            yield keys.read(first, count).astype(np.int64), rows

    return KeyedRows(name, dim, values.dtype, keys.count, blocks, os.path.basename(values.path))


def _add_table(
    name: str,
    keys: ArrayFile,
    rows: KeyedRows,
    slots: list[KeyedRows],
    kinds: dict[str, str],
    source: Source,
) -> None:
    kind = kinds.pop(name, None)
    if kind is None:
        kind = "static" if _may_be_static(keys) else "dynamic"
        if kind == "static":
            source.notes.append(
                f"the keys of table '{name}' are 0 … {keys.count - 1:,}, so it is taken for "
                f"static; --dynamic {name} takes it for dynamic"
            )
    source.tables.append(KeyedTable(rows, slots, static=kind == "static"))


def _may_be_static(keys: ArrayFile) -> bool:
    """Tells whether keys are 0 … V - 1, each once."""
    seen = np.zeros(keys.count, bool)
    for first in range(0, keys.count, KEY_BLOCK):
        part = keys.read(first, min(KEY_BLOCK, keys.count - first))
        if part.min() < 0 or part.max() >= keys.count:
            return False
        seen[part.astype(np.int64)] = True
    return bool(seen.all())
