"""Converts between the values of a request and the tensors of a signature of a SavedModel."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.data.batches.ragged_ids import RaggedIds
from collective.ops.counting import counted


class Signature:
    """Describes what one function of a SavedModel takes and gives.

    Attributes:
        key: its name.
        proto: its SignatureDef.
        inputs, outputs: tensors of the loaded graph by name: dense, sparse [B, …] or ragged [B, …].

    Args:
        key: as above.
        proto: as above.
        graph: the loaded graph.
    """

    def __init__(self, key: str, proto: Any, graph: tf.Graph):
        self.key, self.proto = key, proto
        self.inputs, self.outputs = (
            {name: _tensor(name, info, graph) for name, info in sorted(infos.items())}
            for infos in (proto.inputs, proto.outputs)
        )

    def feed(self, values: Mapping[str, Any]) -> dict[Any, Any]:
        """Returns a feed_dict.

        Args:
            values: by the names of inputs: arrays, nested lists, or `RaggedIds`.

        Raises:
            ValueError: an input is missing or unknown, or a value has another type or shape than
                the input, or another number of samples than the others.
        """
        if missing := [name for name in self.inputs if name not in values]:
            raise ValueError(
                f"input {missing[0]!r} is missing: signature {self.key!r} takes "
                f"{', '.join(self.inputs)}."
            )
        for name in values:
            if name not in self.inputs:
                raise ValueError(
                    f"signature {self.key!r} has no input {name!r}. {self._hint(name)}"
                )
        feeds: dict[Any, Any] = {}
        samples: dict[str, int] = {}
        for name, tensor in self.inputs.items():
            feed, count = _feed(f"input {name!r}", tensor, values[name])
            feeds.update(feed)
            if count is not None:
                samples[name] = count
        for name, count in samples.items():
            first = next(iter(samples))
            if count != samples[first]:
                raise ValueError(
                    f"input {name!r} has {counted(count, 'sample')}, and input {first!r} "
                    f"{counted(samples[first], 'sample')}: all have the same number."
                )
        return feeds

    def samples(self, values: Mapping[str, Any]) -> int:
        """Returns how many samples values have at most, before they are checked; 0: unknown."""
        sized = (value for value in values.values() if hasattr(value, "__len__"))
        return max((len(value) for value in sized), default=0)

    def select(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values that are inputs; what is missing is told by `feed`."""
        return {name: value for name, value in values.items() if name in self.inputs}

    def _hint(self, name: str) -> str:
        near = difflib.get_close_matches(str(name), list(self.inputs), 1)
        return f"Did you mean {near[0]!r}?" if near else f"It takes {', '.join(self.inputs)}."


def _tensor(name: str, info: Any, graph: tf.Graph) -> Any:
    """Returns the tensor that a signature describes: dense, sparse or ragged.

    Raises:
        ValueError: it is of another kind.
    """
    get = graph.get_tensor_by_name
    encoding = info.WhichOneof("encoding")
    if encoding == "name":
        return get(info.name)
    if encoding == "coo_sparse":
        sparse = info.coo_sparse
        names = (
            sparse.indices_tensor_name,
            sparse.values_tensor_name,
            sparse.dense_shape_tensor_name,
        )
        return tf.SparseTensor(*map(get, names))
    spec = info.composite_tensor.type_spec
    if spec.type_spec_class != spec.RAGGED_TENSOR_SPEC:
        raise ValueError(f"the signature's {name!r} is a {spec.type_spec_class_name}.")
    values, *splits = (get(component.name) for component in info.composite_tensor.components)
    return tf.RaggedTensor.from_nested_row_splits(values, splits, validate=False)


def _feed(what: str, tensor: Any, value: Any) -> tuple[dict[Any, Any], int | None]:
    """Returns the feeds of an input, and its number of samples; None: it has no such dimension."""
    if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)):
        ragged = isinstance(tensor, tf.RaggedTensor)
        if ragged and tensor.ragged_rank != 1 or not ragged and tensor.shape.rank not in (2, None):
            raise ValueError(f"{what}: only inputs of samples of a list each can be fed.")
        values, splits = _rows(what, value, tensor.dtype)
        if ragged:
            given_splits = splits.astype(tensor.row_splits.dtype.as_numpy_dtype)
            return {tensor.values: values, tensor.row_splits: given_splits}, len(splits) - 1
        lengths = np.diff(splits)
        samples = np.repeat(np.arange(len(lengths)), lengths)
        places = np.arange(len(values)) - np.repeat(splits[:-1], lengths)
        return {
            tensor.indices: np.stack([samples, places], 1).astype(np.int64),
            tensor.values: values,
            tensor.dense_shape: np.array([len(lengths), max(lengths, default=0)], np.int64),
        }, len(lengths)
    if isinstance(value, RaggedIds):
        value = _rectangle(what, value, tensor.shape)
    array = _array(what, value, tensor.dtype)
    if not tensor.shape.is_compatible_with(array.shape):
        raise ValueError(
            f"{what} has shape {list(array.shape)}; the signature takes "
            f"{_shape_text(tensor.shape)}."
        )
    has_samples = bool(tensor.shape.rank) and tensor.shape.as_list()[0] is None
    return {tensor: array}, len(array) if has_samples else None


def _rectangle(what: str, ids: RaggedIds, shape: tf.TensorShape) -> np.ndarray:
    """Returns ids as an array [B], or [B, n] of samples with n ids each."""
    lengths = np.diff(ids.row_splits)
    wanted = 1
    if shape.rank != 1:
        width = shape.as_list()[1] if shape.rank == 2 else None
        wanted = width if width is not None else int(lengths[0]) if len(lengths) else 0
    if (lengths != wanted).any():
        sample = int(np.flatnonzero(lengths != wanted)[0])
        raise ValueError(
            f"{what} takes {counted(wanted, 'id')} a sample, of shape {_shape_text(shape)}, and "
            f"sample {sample} has {counted(int(lengths[sample]), 'id')}. Export the model with a "
            "ragged or sparse input for samples of any number of ids."
        )
    return ids.values if shape.rank == 1 else ids.values.reshape(len(ids), wanted)


def _rows(what: str, value: Any, dtype: tf.DType) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values and the row splits of a list for each sample."""
    if isinstance(value, RaggedIds):
        return _array(what, value.values, dtype), value.row_splits
    if isinstance(value, np.ndarray) and value.ndim == 2:
        flat = _array(what, value.reshape(-1), dtype)
        return flat, np.arange(len(value) + 1, dtype=np.int64) * value.shape[1]
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise ValueError(f"{what} is a list of a list for each sample, not {_kind(value)}.")
    lengths: list[int] = [0]
    flat_values: list[Any] = []
    for sample, row in enumerate(value):
        if not isinstance(row, (list, tuple, np.ndarray)):
            raise ValueError(f"{what}: sample {sample} is a list, not {_kind(row)}.")
        lengths.append(len(row))
        flat_values.extend(row)
    array = _array(what, flat_values, dtype)
    if array.ndim != 1:
        raise ValueError(f"{what}: a sample is a list of values, not of lists.")
    return array, np.cumsum(lengths, dtype=np.int64)


def _array(what: str, value: Any, dtype: tf.DType) -> np.ndarray:
    """Returns an array of a tensor's type, without changing a value."""
    wanted = np.dtype(dtype.as_numpy_dtype)
    if dtype == tf.string:
        return _text(what, value)
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        array = np.array([None])
    if array.dtype.kind == "O":
        raise ValueError(
            f"{what} takes {dtype.name}; no array can be made of this: lists of different lengths, "
            "missing values, or integers beyond 64 bits."
        )
    if not array.size:
        return array.astype(wanted)
    kind, kinds = array.dtype.kind, {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}
    is_bfloat16 = dtype == tf.bfloat16
    if kind not in ("fiu" if is_bfloat16 else kinds.get(wanted.kind, "")):
        raise ValueError(f"{what} takes {dtype.name}; these are {_kind_of(array)}.")
    if wanted.kind in "iu" and array.dtype != wanted:
        if wanted == np.int64 and array.dtype == np.uint64:
            return array.view(np.int64)  # as everywhere: the same 64 bits
        limits = np.iinfo(wanted)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            worst = low if low < limits.min else high
            raise ValueError(f"{what} takes {dtype.name}, which has no {worst}.")
    return np.asarray(array, wanted, order="C")


def _text(what: str, value: Any) -> np.ndarray:
    """Returns an array of bytes of text or bytes."""
    if isinstance(value, np.ndarray):
        array = value
    else:
        try:
            array = np.array(value, object)
        except ValueError:
            raise ValueError(f"{what}: lists of different lengths are no array.") from None
    flat = array.reshape(-1)
    texts = []
    for each in flat.tolist():
        if isinstance(each, str):
            try:
                each = each.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{what}: {each!r} is no text of Unicode.") from None
        if not isinstance(each, bytes):
            raise ValueError(f"{what} takes text; one value is {_kind(each)}.")
        texts.append(each)
    result = np.empty(len(texts), object)
    result[:] = texts
    return result.reshape(array.shape)


def _kind(value: Any) -> str:
    names = {"NoneType": "null", "dict": "an object", "list": "a list", "bool": "a boolean"}
    name = type(value).__name__
    return names.get(name, f"of type {name}")


def _kind_of(array: np.ndarray) -> str:
    return {"U": "text", "S": "bytes", "b": "booleans", "f": "numbers with a fraction"}.get(
        array.dtype.kind, str(array.dtype)
    )


def _shape_text(shape: tf.TensorShape) -> str:
    if shape.rank is None:
        return "any shape"
    return f"[{', '.join('any' if size is None else str(size) for size in shape.as_list())}]"
