"""Describes the columns of Parquet files, and makes tensors of them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import tensorflow.compat.v1 as tf

from collective.data import arrow
from collective.ops.counting import counted
from collective.policy import is_real, is_whole

Form = Literal["dense", "ragged", "sparse"]
FORMS = ("dense", "ragged", "sparse")
# TensorFlow's types by pyarrow's words, where they aren't the same.
_TYPES = {
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
    "binary": "string",
    "large_binary": "string",
    "large_string": "string",
}
_READABLE = frozenset(
    {"bool", "string", "float16", "float32", "float64"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)


@dataclasses.dataclass(frozen=True)
class Column:
    """Describes a column.

    Attributes:
        name: its name.
        dtype: the type of its values, also inside lists.
        depth: how many lists enclose a value; 0 for one value per record.
        width: how many values a list of fixed size has; None for any other column.
        form: of its tensors. 'dense': [B] (lists of fixed size: [B, width]; other lists are padded
            with zeros or empty strings); 'ragged'; 'sparse'.
    """

    name: str
    dtype: Any
    depth: int = 0
    width: int | None = None
    form: Form = "dense"

    @property
    def part_types(self) -> list[Any]:
        """Returns the types of the arrays of a batch: values, row splits."""
        return [self.dtype] + [tf.int64] * self.depth

    @property
    def kind(self) -> str:
        """Returns its type in words: 'lists of int64'."""
        if self.width is not None:
            return f"lists of {self.width} {self.dtype.name}"
        return "lists of " * self.depth + str(self.dtype.name)

    def in_form(self, form: str | None) -> Column:
        """Returns the column in another form; None keeps its own.

        Raises:
            ValueError: there is no such form.
        """
        if form is None:
            return self
        if form not in FORMS or (form == "ragged" and not self.depth):
            raise ValueError(
                f"column {self.name!r} ({self.kind}) can't be {form!r}: a form is 'dense' or "
                "'sparse', and for lists 'ragged'."
            )
        return dataclasses.replace(self, form=form)  # type: ignore[arg-type]

    def fill_value(self, value: Any) -> Any:
        """Returns the replacement of missing values as pyarrow expects it; None if there is none.

        Raises:
            ValueError: it isn't of the column's type.
        """
        if value is None:
            return None
        dtype = self.dtype
        if dtype == tf.string:
            words, is_good = "a string", isinstance(value, (str, bytes))
        elif dtype.is_bool:
            words, is_good = "True or False", isinstance(value, (bool, np.bool_))
        elif dtype.is_integer:
            words = f"a whole number from {dtype.min} to {dtype.max}"
            is_good = is_whole(value) and dtype.min <= value <= dtype.max
        else:
            words = f"a number that {dtype.name} can hold"
            is_good = is_real(value) and not dtype.max < abs(value) < np.inf
        if not is_good:
            raise ValueError(
                f"missing={value!r}: column {self.name!r} is of {self.kind}, and takes {words}. "
                f"Columns of other types have values of their own: missing={{{self.name!r}: …}}."
            )
        if dtype == tf.string:
            return value.encode() if isinstance(value, str) else value
        return bool(value) if dtype.is_bool else int(value) if dtype.is_integer else float(value)

    @property
    def is_number(self) -> bool:
        """Tells whether a record has one number, or a fixed number of them: a row of an array."""
        return self.depth == 0 and self.dtype != tf.string

    def prepared(self, array: Any) -> Any:
        """Returns a row group's records in a form of which `joined` takes slices.

        Numbers become an array once per row group, not once per batch; strings once per batch,
        because they take more memory outside of Arrow.
        """
        return self.parts(array)[0] if self.is_number else array

    def joined(self, slices: list[Any]) -> list[np.ndarray]:
        """Returns the parts of records in slices of what `prepared` returned."""
        if self.is_number:
            return [slices[0] if len(slices) == 1 else np.concatenate(slices)]
        one = slices[0] if len(slices) == 1 else arrow.module().concat_arrays(slices)
        return self.parts(one)

    def parts(self, array: Any) -> list[np.ndarray]:
        """Returns the values, and the row splits from the outermost list inwards.

        Numbers are views of the Arrow array's memory; booleans and strings are copied.

        Args:
            array: an Arrow array without missing values.
        """
        splits = []
        for _ in range(self.depth):
            offsets = np.asarray(array.offsets, np.int64)
            offsets = offsets if len(offsets) else np.zeros(1, np.int64)
            splits.append(offsets - offsets[0])
            array = array.flatten()
        if self.width is not None:
            array = array.flatten()
        values = array.to_numpy(zero_copy_only=False)
        if self.dtype == tf.string:
            values = values.astype(object)
        if self.width is not None:
            values = values.reshape(-1, self.width)
        return [values, *splits]

    def tensor(self, parts: list[tf.Tensor]) -> Any:
        """Returns the tensor of a batch from its parts."""
        values, *splits = parts
        of_a_record: list[int | None] = [] if self.width is None else [self.width]
        values.set_shape([None, *of_a_record])
        if self.form == "sparse" and not self.depth:
            return _sparse(values)
        for split in reversed(splits):
            split.set_shape([None])
            values = tf.RaggedTensor.from_row_splits(values, split, validate=False)
        if self.depth and self.form == "sparse":
            return values.to_sparse()
        return values.to_tensor() if self.depth and self.form == "dense" else values

    def without_missing(self, array: Any, fill: Any) -> Any:
        """Returns an Arrow array of this column without missing values.

        Args:
            array: as it was read; one chunk.
            fill: replaces missing values, see `fill_value`; a missing list becomes empty. None:
                missing values are an error.

        Raises:
            ValueError: a value is missing.
        """
        is_flat = self.depth == 0 and self.width is None
        if is_flat:
            array = _plain(array)
        if array.null_count and fill is None:
            raise ValueError(
                f"{array.null_count} of {counted(len(array), 'value')} are missing: fill them, or "
                f"read by collective.data.parquet(…, missing={{{self.name!r}: …}})"
            )
        if is_flat:
            return array.fill_null(fill) if array.null_count else array
        pyarrow = arrow.module()
        inner = dataclasses.replace(self, depth=max(self.depth - 1, 0), width=None)
        if self.width is not None:
            if array.null_count:
                raise ValueError("a list of fixed size is missing: there is no value for it")
            values = inner.without_missing(array.flatten(), fill)
            return pyarrow.FixedSizeListArray.from_arrays(values, self.width)
        if not array.null_count and not inner.changes(array.values):
            return array
        lengths = np.asarray(arrow.module("compute").list_value_length(array).fill_null(0))
        offsets = pyarrow.array(np.concatenate([[0], np.cumsum(lengths)]), pyarrow.int64())
        values = inner.without_missing(array.flatten(), fill)
        return pyarrow.LargeListArray.from_arrays(offsets, values)

    def changes(self, array: Any) -> bool:
        """Tells whether `without_missing` may return something else than `array`."""
        if array.null_count or (self.dtype == tf.string and not self.depth):
            return True
        return self.depth > 0 and dataclasses.replace(self, depth=self.depth - 1).changes(
            array.values
        )


def _plain(array: Any) -> Any:
    """Returns values without a dictionary, and strings as bytes, as TensorFlow stores them."""
    pyarrow = arrow.module()
    kinds = pyarrow.types
    if kinds.is_dictionary(array.type):
        array = array.dictionary_decode()
    if kinds.is_string(array.type):
        return array.cast(pyarrow.binary())
    return array.cast(pyarrow.large_binary()) if kinds.is_large_string(array.type) else array


def _sparse(values: tf.Tensor) -> Any:
    count = tf.shape(values, out_type=tf.int64)[0]
    rows = tf.expand_dims(tf.range(count), 1)
    return tf.SparseTensor(
        tf.concat([rows, tf.zeros_like(rows)], 1), values, tf.stack([count, tf.ones([], tf.int64)])
    )


def column_of(field: Any) -> Column:
    """Returns the column that a field of an Arrow schema describes.

    Raises:
        ValueError: it can't be read.
    """
    kinds = arrow.module().types
    kind, depth, width = field.type, 0, None
    while kinds.is_list(kind) or kinds.is_large_list(kind):
        kind, depth = kind.value_type, depth + 1
    if kinds.is_fixed_size_list(kind) and depth == 0:
        kind, width = kind.value_type, kind.list_size
    if kinds.is_dictionary(kind) and depth == 0 and width is None:
        kind = kind.value_type
    name = _TYPES.get(str(kind), str(kind))
    if name not in _READABLE:
        raise ValueError(
            f"column {field.name!r} is of type {field.type}. Only columns of numbers, strings and "
            "lists of them can be read: name the others that you need"
        )
    return Column(field.name, tf.as_dtype(name), depth, width, "ragged" if depth else "dense")
