"""A batch in a few arrays, one for each type. It travels like this, and becomes tensors like this.

    layout    ids user     ids seen       dense age   labels click
    counts    3, -1        5, 4           3           3
    int64     values       values splits
    float32                               age         click

Forty columns then cost little more than one: nothing looks at each of them on its way from a
loader to a session. Of ids where each sample has one, the row splits are left out (-1).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import numpy as np

from collective.data.batches.batch import Batch
from collective.data.batches.ragged_ids import RaggedIds

_LEFT_OUT = -1


@dataclasses.dataclass(frozen=True, eq=False)
class PackedBatch:
    """Holds the samples of a `Batch`.

    Attributes:
        layout: the role, name, type and shape of each part, in JSON; batches that are alike have
            the same.
        counts: int64, the number of values of each part; ids have two, of values and row splits.
        arrays: the values of all parts of a type, by types in the order of their first part. Ids
            from 2⁶³ on are int64 of the same 64 bits.
        meta: bytes that travel with the batch.
    """

    layout: bytes
    counts: np.ndarray
    arrays: tuple[np.ndarray, ...]
    meta: bytes = b""

    def __post_init__(self) -> None:
        """Checks that the arrays have what layout and counts say.

        Raises:
            ValueError: they haven't.
        """
        layout, counts = _read(self.layout), self.counts
        lengths = [len(array) for array in self.arrays]
        expected = None
        if counts.shape == layout.type_of_count.shape and counts.min(initial=0) >= _LEFT_OUT:
            values = np.maximum(counts, 0)
            expected = np.bincount(layout.type_of_count, values, len(layout.types)).tolist()
        types = tuple(array.dtype for array in self.arrays)
        if types != layout.types or lengths != expected:
            raise ValueError(
                f"a packed batch has arrays of {', '.join(map(str, types))} and of the lengths "
                f"{lengths}; its layout says {', '.join(map(str, layout.types))} and {expected}"
            )

    def flat(self) -> tuple[np.ndarray, ...]:
        """Returns the counts, and the values of each type with all row splits."""
        ids = _read(self.layout).ids
        if not (self.counts[:ids] == _LEFT_OUT).any():
            return self.counts, *self.arrays
        counts, pieces, place = self.counts.copy(), [], 0
        for number, count in enumerate(self.counts[:ids].tolist()):
            if count == _LEFT_OUT:
                pieces.append(_single(int(counts[number - 1])))
                counts[number] = len(pieces[-1])
            else:
                pieces.append(self.arrays[0][place : place + count])
                place += count
        pieces.append(self.arrays[0][place:])
        return counts, np.concatenate(pieces), *self.arrays[1:]

    def unpacked(self) -> Batch:
        """Returns the batch. Its arrays are views of these, except for ids.

        Raises:
            ValueError: row splits don't divide the values.
        """
        counts, *arrays = self.flat()
        left = {array.dtype: array for array in arrays}
        number = iter(counts.tolist())

        def next_part(dtype: np.dtype) -> np.ndarray:
            count = next(number)
            part, left[dtype] = left[dtype][:count], left[dtype][count:]
            return part

        roles: dict[str, dict[str, Any]] = {"ids": {}, "dense": {}, "labels": {}}
        for role, name, dtype, shape in _read(self.layout).parts:
            if role == "ids":
                values = next_part(np.dtype(np.int64)).view(dtype)
                roles[role][name] = RaggedIds(values, next_part(np.dtype(np.int64)))
            else:
                roles[role][name] = next_part(dtype).reshape(-1, *shape)
        return Batch(roles["ids"], roles["dense"], roles["labels"], self.meta)


def pack(batch: Batch, first: int = 0, last: int | None = None) -> PackedBatch:
    """Packs the samples of a batch from `first` to before `last`, by default all.

    A batch of samples that follow each other needs no check that the whole one didn't.
    """
    size = len(batch)
    chosen = slice(first, size if last is None else last)
    parts: list[tuple[str, str, str, tuple[int, ...]]] = []
    counts: list[int] = []
    pieces: dict[np.dtype, list[np.ndarray]] = {}

    def add(values: np.ndarray) -> None:
        counts.append(len(values))
        pieces.setdefault(values.dtype, []).append(values)

    for name, ids in batch.ids.items():
        values, splits = ids.values.view(np.int64), ids.row_splits
        parts.append(("ids", name, ids.values.dtype.str, ()))
        if len(values) == size and (splits == _single(size)).all():
            add(values[chosen])
            counts.append(_LEFT_OUT)
        else:
            splits = splits[chosen.start : chosen.stop + 1]
            add(values[splits[0] : splits[-1]])
            add(splits - splits[0])
    for role, of_role in (("dense", batch.dense), ("labels", batch.labels)):
        for name, array in of_role.items():
            parts.append((role, name, array.dtype.str, array.shape[1:]))
            add(array[chosen].reshape(-1))
    arrays = tuple(each[0] if len(each) == 1 else np.concatenate(each) for each in pieces.values())
    return PackedBatch(_text(tuple(parts)), np.array(counts), arrays, batch.meta)


def types_of(layout: bytes) -> tuple[np.dtype, ...]:
    """Returns the types of the arrays of batches that have a layout.

    Raises:
        ValueError: it is none.
    """
    return _read(layout).types


@functools.lru_cache(maxsize=8)
def _single(samples: int) -> np.ndarray:
    """Returns the row splits of samples with one id each."""
    splits = np.arange(samples + 1, dtype=np.int64)
    splits.flags.writeable = False
    return splits


@dataclasses.dataclass(frozen=True, eq=False)
class _Layout:
    """Describes the parts of batches that are alike.

    Attributes:
        parts: role, name, type and shape of each.
        ids: how many of the counts are those of ids.
        types: the types of the arrays.
        type_of_count: for each count, which of the types its values have.
    """

    parts: tuple[tuple[str, str, np.dtype, tuple[int, ...]], ...]
    ids: int
    types: tuple[np.dtype, ...]
    type_of_count: np.ndarray


@functools.lru_cache(maxsize=64)
def _text(parts: tuple[Any, ...]) -> bytes:
    return json.dumps(parts).encode()


@functools.lru_cache(maxsize=64)
def _read(layout: bytes) -> _Layout:
    try:
        parts = tuple(
            (str(role), str(name), np.dtype(dtype), tuple(map(int, shape)))
            for role, name, dtype, shape in json.loads(layout)
        )
        if any(dtype.kind not in "biuf" for _, _, dtype, _ in parts):
            raise ValueError("a part isn't of numbers")
    except (ValueError, TypeError) as error:
        raise ValueError(f"a packed batch has no such layout as {layout[:80]!r}: {error}") from None
    of_counts: list[np.dtype] = []
    for role, _, dtype, _ in parts:
        of_counts += [np.dtype(np.int64)] * 2 if role == "ids" else [dtype]
    types = tuple(dict.fromkeys(of_counts))
    numbers = np.array([types.index(dtype) for dtype in of_counts], np.int64)
    return _Layout(parts, 2 * sum(role == "ids" for role, *_ in parts), types, numbers)
