"""Holds ids of samples, any number each; makes them, and arrays of numbers, of other forms."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from collective.data.batches import arrow_columns
from collective.ops.counting import counted
from collective.policy import is_whole


@dataclasses.dataclass(frozen=True, eq=False)
class RaggedIds:
    """Holds the ids of B samples, as TensorFlow's ragged tensors do.

    Sample i has `values[row_splits[i]:row_splits[i + 1]]`.

    Attributes:
        values: int64 or uint64 [n], of all samples.
        row_splits: int64 [B + 1], from 0 to n, never falling.

    Raises:
        TypeError: they have other types.
        ValueError: the splits don't divide the values.
    """

    values: np.ndarray
    row_splits: np.ndarray

    def __post_init__(self) -> None:
        values, splits = np.asarray(self.values), np.asarray(self.row_splits)
        object.__setattr__(self, "values", _integers("values", values))
        object.__setattr__(self, "row_splits", splits)
        if values.ndim != 1 or splits.ndim != 1 or splits.dtype != np.int64:
            raise TypeError(
                "RaggedIds takes values [n], and row_splits [B + 1] of int64, not shapes "
                f"{values.shape} and {splits.shape} of {splits.dtype}."
            )
        ends = (0, len(values))
        if not len(splits) or (splits[0], splits[-1]) != ends or (np.diff(splits) < 0).any():
            raise ValueError(
                f"row_splits {_few(splits)} don't divide {counted(len(values), 'value')}: they "
                "begin with 0, never fall, and end with the number of values."
            )

    def __len__(self) -> int:
        """Returns B."""
        return len(self.row_splits) - 1

    def __getitem__(self, sample: int) -> np.ndarray:
        """Returns the ids of a sample."""
        sample = range(len(self))[sample]
        return self.values[self.row_splits[sample] : self.row_splits[sample + 1]]

    def to_list(self) -> list[list[int]]:
        """Returns the ids of each sample."""
        return [self[sample].tolist() for sample in range(len(self))]


def ragged_ids(what: str, value: Any) -> RaggedIds:
    """Makes ids of what `Batch` takes for them.

    Args:
        what: names it, for messages.
        value: the ids.

    Raises:
        TypeError: it isn't of integers.
        ValueError: it has another shape, or a missing value.
    """
    if isinstance(value, RaggedIds):
        return value
    if arrow_columns.is_array(value):
        values, splits = arrow_columns.ragged(what, value)
        return RaggedIds(_integers(what, values), splits)
    if hasattr(value, "row_splits"):  # a tf.RaggedTensor, or its value
        inner = _array(what, value.values)
        return RaggedIds(_integers(what, inner), _array(what, value.row_splits).astype(np.int64))
    if hasattr(value, "dense_shape"):  # a tf.SparseTensor, or its value
        return _of_sparse(what, *(_array(what, part) for part in _sparse_parts(value)))
    if isinstance(value, (list, tuple)) and any(np.ndim(row) for row in value):
        return _of_rows(what, value)
    if isinstance(value, np.ndarray) and value.dtype == object:
        return _of_rows(what, list(value))
    array = _ids(what, value)
    if array.ndim not in (1, 2):
        raise ValueError(
            f"{what}: ids are [B], [B, n] or a list of B rows, not of shape {array.shape}."
        )
    if isinstance(value, (list, tuple)) and not array.size:
        array = array.astype(np.int64)
    width = 1 if array.ndim == 1 else array.shape[1]
    splits = np.arange(len(array) + 1, dtype=np.int64) * width
    return RaggedIds(_integers(what, array).reshape(-1), splits)


def _sparse_parts(value: Any) -> tuple[Any, Any, Any]:
    return value.indices, value.values, value.dense_shape


def _of_sparse(what: str, indices: np.ndarray, values: np.ndarray, shape: np.ndarray) -> RaggedIds:
    if shape.shape != (2,) or indices.shape != (len(values), 2):
        raise ValueError(f"{what}: sparse ids have two dimensions, not shape {shape.tolist()}.")
    rows = indices[:, 0]
    if len(rows) and ((np.diff(rows) < 0).any() or rows[0] < 0 or rows[-1] >= shape[0]):
        raise ValueError(f"{what}: the samples of sparse ids don't ascend from 0 to B - 1.")
    splits = np.searchsorted(rows, np.arange(int(shape[0]) + 1)).astype(np.int64)
    return RaggedIds(_integers(what, values), splits)


def _of_rows(what: str, rows: Any) -> RaggedIds:
    arrays = []
    for sample, row in enumerate(rows):
        array = _ids(f"{what}, sample {sample}", row)
        if array.ndim != 1:
            raise ValueError(
                f"{what}: sample {sample} has shape {array.shape}; the ids of a sample are a list."
            )
        if array.size or not isinstance(row, (list, tuple)):
            arrays.append(_integers(f"{what}, sample {sample}", array))
        else:
            arrays.append(np.zeros(0, np.int64))
    filled = [array for array in arrays if array.size]
    if len({array.dtype for array in filled}) > 1:
        if min(array.min() for array in filled if array.dtype == np.int64) < 0:
            raise TypeError(
                f"{what}: some samples have ids from 2⁶³ on, and some have negative ids. No type "
                "has both: give them as int64, 2⁶⁴ less."
            )
        filled = [array.astype(np.uint64) for array in filled]
    lengths = [len(array) for array in arrays]
    splits = np.cumsum([0, *lengths], dtype=np.int64)
    return RaggedIds(np.concatenate(filled or [np.zeros(0, np.int64)]), splits)


def dense_array(what: str, value: Any) -> np.ndarray:
    """Makes an array of numbers of what `Batch` takes for them.

    Args:
        what: names it, for messages.
        value: the numbers.

    Raises:
        TypeError: they aren't numbers.
        ValueError: they have another shape, or a missing value.
    """
    array = arrow_columns.dense(what, value) if arrow_columns.is_array(value) else None
    array = _array(what, value) if array is None else array
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise TypeError(
            f"{what}: these are numbers of 8 bytes at most, or bool, not {array.dtype}."
        )
    if not array.ndim or 0 in array.shape[1:]:
        raise ValueError(f"{what}: the shape is [B, …], with a value at least, not {array.shape}.")
    return _native(array)


def _ids(what: str, value: Any) -> np.ndarray:
    """Returns an array; of whole numbers one of int64, or of uint64 where int64 can't hold them.

    NumPy makes floats of a list that has numbers below and from 2⁶³ on.
    """
    array = _array(what, value)
    if array.dtype.kind in "iub" or not array.size:
        return array
    numbers = np.array(value, object)
    if not all(map(is_whole, numbers.flat)):
        return array
    if numbers.min() < 0 or numbers.max() >= 2**64:
        raise ValueError(
            f"{what}: ids from {numbers.min()} to {numbers.max()} fit neither int64 nor uint64."
        )
    return numbers.astype(np.uint64)


def _array(what: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except (NotImplementedError, TypeError) as error:  # of tensors of a graph
        raise TypeError(
            f"{what}: {type(value).__name__} has no values here ({error}). Take a tensor of a "
            "graph from session.run."
        ) from None
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{what}: no array can be made of it: {str(error).rstrip('.')}.") from None


def _integers(what: str, array: np.ndarray) -> np.ndarray:
    """Returns int64, or uint64 as it is."""
    if array.dtype.kind not in "iu":
        raise TypeError(f"{what}: ids are integers of 64 bits at most, not {array.dtype}.")
    if array.dtype.itemsize < 8:
        return array.astype(np.int64)
    return _native(array)


def _native(array: np.ndarray) -> np.ndarray:
    """Returns an array in this machine's order of bytes."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _few(values: np.ndarray) -> str:
    shown = ", ".join(map(str, values[:5].tolist()))
    return f"[{shown}, …]" if len(values) > 5 else f"[{shown}]"
