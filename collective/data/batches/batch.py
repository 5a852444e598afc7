"""Defines a batch: ids, numbers and labels of samples, by name, checked when it is made."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from collective.data.batches import arrow_columns, batch_dataset
from collective.data.batches.ragged_ids import RaggedIds, dense_array, ragged_ids
from collective.ops.counting import counted

ROLES = ("ids", "dense", "labels")


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Holds the samples of a batch in NumPy's arrays, by name. What it is made of is checked once.

        batch = Batch(
            ids={'user': np.array([7, 9], np.uint64), 'history': [[1, 2, 3], []]},
            dense={'age': np.array([31.0, 42.0], np.float32)},
            labels={'click': np.array([1.0, 0.0], np.float32)},
        )

    A sample has any number of ids of each kind. Ids are int64; uint64 ids stay uint64. In a tensor
    they are int64 of the same 64 bits: u from 2⁶³ on is the key u - 2⁶⁴, so no two ids meet.

    Arrays aren't copied where their type is right; don't write to them afterwards.

    Args:
        ids: by name: an array [B] of one id a sample, or [B, n] of n; a list of B lists or arrays
            of any length; a `RaggedIds`; a ragged tensor or a sparse one that a session returned or
            that is eager; a pyarrow array of integers or of lists of them.
        dense: numbers by name, arrays [B, …] of bool, int8 to int64, uint8 to uint64, float16 to
            float64, or what NumPy or pyarrow make such an array of.
        labels: the same.
        meta: bytes that travel with the batch; nothing here reads them.
        finite: whether numbers and labels must be finite.

    Attributes:
        ids: `RaggedIds` by name.
        dense, labels: arrays by name.
        meta: as given.

    Raises:
        TypeError: a value has another type. The message names it.
        ValueError: a value has another number of samples or another shape, is missing or isn't
            finite; there is nothing at all. The message names it.
    """

    ids: Mapping[str, RaggedIds]
    dense: Mapping[str, np.ndarray]
    labels: Mapping[str, np.ndarray]
    meta: bytes

    def __init__(
        self,
        ids: Mapping[str, Any] | None = None,
        dense: Mapping[str, Any] | None = None,
        labels: Mapping[str, Any] | None = None,
        meta: bytes = b"",
        *,
        finite: bool = False,
    ):
        if not isinstance(meta, (bytes, bytearray, memoryview)):
            raise TypeError(f"Batch(meta=…) is bytes, not {type(meta).__name__}.")
        set_ = object.__setattr__
        set_(self, "ids", _by_name("ids", ids, ragged_ids))
        set_(self, "dense", _by_name("dense", dense, dense_array))
        set_(self, "labels", _by_name("labels", labels, dense_array))
        set_(self, "meta", bytes(meta))
        self._check_lengths()
        if finite:
            self._check_finite()

    def __len__(self) -> int:
        """Returns B, how many samples it has."""
        return next(len(value) for _, _, value in self._columns())

    def _columns(self) -> Iterator[tuple[str, str, Any]]:
        for role in ROLES:
            for name, value in getattr(self, role).items():
                yield role, name, value

    def _check_lengths(self) -> None:
        columns = list(self._columns())
        if not columns:
            raise ValueError("Batch(…) has neither ids nor dense numbers nor labels.")
        first_role, first, value = columns[0]
        for role, name, other in columns[1:]:
            if len(other) != len(value):
                raise ValueError(
                    f"{role}[{name!r}] has {counted(len(other), 'sample')}, and "
                    f"{first_role}[{first!r}] {counted(len(value), 'sample')}: all of a batch have "
                    "the same number."
                )

    def _check_finite(self) -> None:
        for role, name, value in self._columns():
            if role == "ids" or value.dtype.kind != "f" or np.isfinite(value).all():
                continue
            sample = int(np.argwhere(~np.isfinite(value))[0][0])
            raise ValueError(
                f"{role}[{name!r}] has a value that isn't finite, in sample {sample}: "
                f"{value[sample].tolist()}."
            )

    # ---- From columns

    @classmethod
    def of(
        cls,
        columns: Any,
        *,
        ids: Sequence[str] = (),
        dense: Sequence[str] = (),
        labels: Sequence[str] = (),
        meta: bytes = b"",
        finite: bool = False,
    ) -> Batch:
        """Makes a batch of columns by name, each a part of it or left out.

            Batch.of(pyarrow_table, ids=['user', 'history'], labels=['click'])
            Batch.of(session.run(next_element), ids=['user'], dense=['age'])

        Args:
            columns: a dict of what `Batch` takes, such as an element of a `tf.data.Dataset` that a
                session returned or of `as_numpy_iterator`; or a pyarrow Table or RecordBatch.
            ids, dense, labels: names of columns.
            meta, finite: as for `Batch`.

        Raises:
            KeyError: there is no column of a name. The message has the nearest one.
            TypeError, ValueError: as for `Batch`.
        """
        if arrow_columns.is_table(columns):
            columns = arrow_columns.columns_of(columns)
        parts: dict[str, dict[str, Any]] = {}
        for role, names in zip(ROLES, (ids, dense, labels)):
            if isinstance(names, str):
                raise TypeError(f"Batch.of({role}=…) is a list of names, not {names!r}.")
            for name in names:
                if name not in columns:
                    near = difflib.get_close_matches(str(name), list(columns), 1)
                    hint = f" Did you mean {near[0]!r}?" if near else ""
                    raise KeyError(f"{role}: there is no column {name!r}.{hint}")
            parts[role] = {name: columns[name] for name in names}
        return cls(parts["ids"], parts["dense"], parts["labels"], meta, finite=finite)

    @classmethod
    def from_parquet(
        cls,
        path: str | os.PathLike[str],
        batch_size: int = 1024,
        *,
        ids: Sequence[str] = (),
        dense: Sequence[str] = (),
        labels: Sequence[str] = (),
        finite: bool = False,
    ) -> Iterator[Batch]:
        """Yields the batches of a Parquet file, in its order, in memory one by one.

        On several ranks, `collective.data.parquet` reads less: each rank its part.

        Args:
            path: of the file.
            batch_size: samples a batch; the last may have fewer.
            ids, dense, labels, finite: as for `of`.

        Raises:
            ImportError: pyarrow isn't installed.
            KeyError, TypeError, ValueError: as for `of`; or it is no Parquet file.
        """
        for table in arrow_columns.read_parquet(path, batch_size, [*ids, *dense, *labels]):
            yield cls.of(table, ids=ids, dense=dense, labels=labels, finite=finite)

    # ---- Bytes

    def to_bytes(self) -> bytes:
        """Returns the batch as a stream of Arrow IPC with one record batch.

        Any Arrow library reads it. Columns are called 'ids/user', 'dense/age' and so on.

        Raises:
            ImportError: pyarrow isn't installed.
        """
        return arrow_columns.to_bytes(self.to_arrow())

    def to_arrow(self) -> Any:
        """Returns the batch as a `pyarrow.RecordBatch`, with columns 'ids/user', 'dense/age', ….

        Raises:
            ImportError: pyarrow isn't installed.
        """
        arrays = [(f"{role}/{name}", value) for role, name, value in self._columns()]
        return arrow_columns.record_batch(dict(arrays), self.meta)

    @classmethod
    def from_bytes(cls, data: Any, *, finite: bool = False) -> Batch:
        """Returns the batch whose `to_bytes` is `data`. Its arrays are views of these bytes.

        Args:
            data: bytes, a memoryview or another buffer.
            finite: as for `Batch`.

        Raises:
            ImportError: pyarrow isn't installed.
            TypeError, ValueError: `data` isn't the bytes of a whole batch.
        """
        return cls._of_record_batch(*arrow_columns.from_bytes(data), finite=finite)

    @classmethod
    def from_arrow(cls, data: Any, *, finite: bool = False) -> Batch:
        """Returns the batch whose `to_arrow` is `data`. Its arrays are views of its memory.

        Args:
            data: a `pyarrow.RecordBatch`.
            finite: as for `Batch`.

        Raises:
            ImportError: pyarrow isn't installed.
            TypeError, ValueError: `data` isn't such a record batch.
        """
        return cls._of_record_batch(*arrow_columns.from_record_batch(data), finite=finite)

    @classmethod
    def _of_record_batch(cls, columns: dict[str, Any], meta: bytes, *, finite: bool) -> Batch:
        parts: dict[str, dict[str, Any]] = {role: {} for role in ROLES}
        for column, value in columns.items():
            role, _, name = column.partition("/")
            if role not in parts:
                raise ValueError(f"these aren't the bytes of a Batch: it has a column {column!r}.")
            parts[role][name] = value
        return cls(parts["ids"], parts["dense"], parts["labels"], meta, finite=finite)

    # ---- Tensors

    def arrays(self) -> dict[str, dict[str, Any]]:
        """Returns what a session takes: {'ids': {…}, 'dense': {…}, 'labels': {…}}.

        Ids are `tf.compat.v1.ragged.RaggedTensorValue`s of int64.
        """
        return batch_dataset.values(self.ids, self.dense, self.labels)

    def placeholders(self) -> dict[str, dict[str, Any]]:
        """Makes placeholders for batches like this one, of any number of samples.

        Returns:
            Tensors like the values of `arrays`; ids are RaggedTensors.
        """
        return batch_dataset.placeholders(self.arrays())

    def feed(self, placeholders: Mapping[str, Mapping[str, Any]]) -> dict[Any, Any]:
        """Returns a feed_dict of this batch.

        Args:
            placeholders: of `placeholders`, of a batch like this one.

        Raises:
            ValueError: that batch had other names or types.
        """
        arrays = self.arrays()
        batch_dataset.check_alike(arrays, placeholders, "the batch that is fed")
        return {
            tensor: arrays[role][name]
            for role, of_role in placeholders.items()
            for name, tensor in of_role.items()
        }

    @staticmethod
    def dataset(
        batches: Iterable[Batch] | Callable[[], Iterable[Batch]], *, like: Batch | None = None
    ) -> Any:
        """Makes a `tf.data.Dataset` of batches; its elements are like `arrays`, of tensors.

            dataset = Batch.dataset(batches)
            dataset = collective.data.resumable(dataset.unbatch(), batch_size=B)   # samples, or
            dataset = strategy.shard(dataset)                                      # whole batches

        All ranks make it of the same batches in the same order. `resumable` deals the samples: N
        ranks take the steps of one process, and the position is in checkpoints. `strategy.shard`
        deals whole batches to the ranks in turn, as PERSIA does, and so does an Estimator with what
        its input_fn returns; a step then has N batches.

        Args:
            batches: can be read again for each iteration: a list, or a function that returns an
                iterator.
            like: a batch with the names, types and shapes of all. Default: the first one; it is
                read when the dataset is made.

        Raises:
            TypeError: `batches` is an iterator, which is empty after the first reading.
            ValueError: there are none, and no `like`.
            tf.errors.InvalidArgumentError: while reading: a batch has other names, types or
                shapes, or is no Batch.
        """
        return batch_dataset.dataset(batches, like)


def _by_name(
    role: str, values: Mapping[str, Any] | None, convert: Callable[[str, Any], Any]
) -> dict[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise TypeError(f"Batch({role}=…) is a dict by name, not {type(values).__name__}.")
    for name in values:
        if not (isinstance(name, str) and name):
            raise TypeError(f"Batch({role}=…): a name is text, and not empty, not {name!r}.")
    return {name: convert(f"{role}[{name!r}]", value) for name, value in values.items()}
