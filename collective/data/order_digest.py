"""Computes digests of a dealt dataset's elements, with which ranks detect that theirs differ.

    dataset ──► digest of all elements so far ──► shard(N, rank) ──► this rank's elements
                            │
                            └──► a table of the session:  how many elements ──► digest
                                 at 1, 2, 3, … 8, 10, 12, 15, … elements, and at the end

Each rank reads the whole dataset and drops other ranks' elements. So all ranks must see the same
elements in the same order: if Python has shuffled them differently on each rank, some are used
twice and others never. TensorFlow's own operations compute the digest, in the thread that reads the
dataset.

It is a sample: of an element's tensors at most `MOST_TENSORS`, from all over it, and of a record
the first `MOST_VALUES` values. A record that moves takes all of its values with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.ops.graph import device_scopes
from collective.ops.graph.sessions import run_unpatched

MOST_TENSORS = 4
MOST_VALUES = 64
MOST_ROWS = 1 << 16  # of an array in memory
MOST_MARKS = 16  # that ranks tell each other: from so many elements to 30 times as many
# The keys of the table other than numbers of elements.
_LATEST, _END = -1, -2
_COUNTS = 3  # begin a row: number of the pass, elements, records; then there is, for each tensor,
_FIELDS = 3  # its order, its content, its changes


class Mark(NamedTuple):
    """Describes the elements of a pass over the dataset, up to a number of them.

    Attributes:
        number: of the pass, from 1.
        elements: how many there were.
        records: how many records these had.
        order: for each tensor a digest of its records in their order.
        content: for each tensor a digest of its records in any order.
        changes: for each tensor how often a record differed from the previous one.
    """

    number: int
    elements: int
    records: int
    order: list[int]
    content: list[int]
    changes: list[int]

    @property
    def place(self) -> tuple[int, int]:
        return self.number, self.elements


class Reading(NamedTuple):
    """Holds what a rank has seen of a dataset.

    Attributes:
        marks: the last ones, of which the last is the latest element.
        end: the end of the last pass that has ended, if one has.
    """

    marks: list[Mark]
    end: Mark | None

    @classmethod
    def of_json(cls, value: Any) -> Reading:
        marks, end = value
        return cls([Mark(*mark) for mark in marks], end and Mark(*end))


@dataclasses.dataclass(frozen=True)
class OrderDigest:
    """Holds the digest of one dataset, in any session of its graph, or in eager code.

    Attributes:
        tensors: the names of the tensors that count.
        export: makes the operations that give the keys and rows of the table.
    """

    tensors: tuple[str, ...]
    export: Callable[[], tuple[Any, Any]]

    def read(self, session: Any) -> Reading:
        """Returns what this rank has seen, without asking other ranks.

        Args:
            session: in which it was seen; None: in eager code.
        """
        if session is None:
            keys, rows = (x.numpy() for x in self.export())
        else:
            keys, rows = run_unpatched(session, list(self.export()))
        marks = {int(key): self._mark(row.tolist()) for key, row in zip(keys, rows)}
        end, latest = marks.pop(_END, None), marks.pop(_LATEST, None)
        seen = {mark.place: mark for mark in [*marks.values(), *filter(None, [latest])]}
        return Reading([seen[place] for place in sorted(seen)][-MOST_MARKS:], end)

    def _mark(self, row: list[int]) -> Mark:
        count = len(self.tensors)
        fields = [row[i : i + count] for i in range(_COUNTS, len(row), count)]
        number, elements, records = row[:_COUNTS]
        return Mark(max(number, 1), elements, records, *fields)  # 0: it ended without an element


def with_digest(dataset: Any, table: str, by_record: bool) -> tuple[Any, OrderDigest | None]:
    """Returns `dataset` with a digest of its elements, and the digest.

    A dataset without tensors has none.

    Args:
        dataset: is about to be dealt.
        table: a name of the graph's.
        by_record: whether elements are batches of records; else each is a record.
    """
    if any(
        getattr(spec, "ragged_rank", None) == 0 for spec in tf.nest.flatten(dataset.element_spec)
    ):
        # Rows of ragged tensors become tensors in a function; batches of a row stay ragged.
        batches, digest = with_digest(dataset.batch(1), table, by_record)
        return batches.unbatch(), digest
    tensors = _named(dataset.element_spec)
    if not tensors:
        return dataset, None
    names = tuple(tensors)
    width = _COUNTS + _FIELDS * len(names)

    @tf.autograph.experimental.do_not_convert
    def follow(state: _State, element: Any) -> tuple[_State, Any]:
        parts = tf.nest.flatten(element)
        hashes = [_hashes(parts[tensors[name]], by_record) for name in names]
        next_state, noted = _next_state(_handle(table, width), width, state, hashes)
        with tf.control_dependencies([noted]):
            return _State(tf.identity(next_state.counts), *next_state[1:]), element

    @tf.autograph.experimental.do_not_convert
    def end(number: tf.Tensor) -> tf2.data.Dataset:
        handle = _handle(table, width)
        last = _found(handle, _LATEST, width)
        with tf.control_dependencies([_inserted(handle, [_END], last[None])]):
            return dataset.take(tf.identity(number))  # number 0: none

    none = tf.zeros([len(names)], tf.int64)
    start = _State(tf.zeros([_COUNTS], tf.int64), tf.constant(1, tf.int64), none, none, none, none)
    ending = tf2.data.Dataset.range(1).flat_map(end)
    followed = dataset.apply(lambda elements: elements.scan(start, follow).concatenate(ending))
    if tf.executing_eagerly() and (length := dataset.cardinality()) >= 0:
        # `ending` has none, so that Keras wouldn't know how long an epoch is.
        followed = followed.apply(tf2.data.experimental.assert_cardinality(length))
    return followed, OrderDigest(names, _export_of(table, width))


def with_digest_of_arrays(
    dataset: Any, table: str, arrays: dict[str, tf.Tensor]
) -> tuple[Any, OrderDigest]:
    """Returns `dataset` with a digest of its sources, computed when an iterator starts.

    Args:
        dataset: is about to be dealt.
        table: a name of the graph's.
        arrays: its sources by name, which aren't known before.
    """
    width = _COUNTS + _FIELDS * len(arrays)

    @tf.autograph.experimental.do_not_convert
    def start(_: tf.Tensor) -> tf2.data.Dataset:
        handle = _handle(table, width)
        number = _found(handle, _LATEST, width)[0] + 1
        hashes = [_hashes(_sample(x), True) for x in arrays.values()]
        records = tf.stack([tf.size(of_rows, out_type=tf.int64) for of_rows in hashes])
        orders = [_fingerprints(of_rows[None])[0] for of_rows in hashes]
        contents = [tf.reduce_sum(of_rows) for of_rows in hashes]
        changes = [
            1 + tf.math.count_nonzero(tf.not_equal(of_rows[1:], of_rows[:-1])) for of_rows in hashes
        ]
        row = tf.stack([number, records[0], records[0], *orders, *contents, *changes])
        with tf.control_dependencies([_inserted(handle, [_LATEST, _END], tf.stack([row, row]))]):
            return dataset.skip(tf.constant(0, tf.int64))

    options = dataset.options()
    started = dataset.apply(lambda _: tf2.data.Dataset.range(1).flat_map(start))
    return started.with_options(options), OrderDigest(tuple(arrays), _export_of(table, width))


def _sample(x: tf.Tensor) -> tf.Tensor:
    """Returns at most about `MOST_ROWS` rows, from all over `x`."""
    if x.shape.rank in (0, None):
        return tf.reshape(x, [-1])
    return x[:: 1 + tf.shape(x)[0] // MOST_ROWS]


def _named(spec: Any) -> dict[str, int]:
    """Returns the tensors of an element that count, by name: their numbers among its parts."""
    known = (tf.TensorSpec, tf.SparseTensorSpec, tf2.RaggedTensorSpec)
    names, parts = list(_names(spec)), tf.nest.flatten(spec)
    if len(names) != len(parts):
        names = [f"tensor {i}" for i in range(len(parts))]
    found = [
        (name, i)
        for i, (name, part) in enumerate(zip(names, parts))
        if isinstance(part, known) and part.dtype not in (tf.variant, tf.resource)
    ]
    count = min(MOST_TENSORS, len(found))
    return dict(found[len(found) * i // count] for i in range(count))


def _names(spec: Any, outside: str = "") -> Iterator[str]:
    """Yields the names of the parts of an element, in the order of `tf.nest.flatten`."""
    if isinstance(spec, Mapping):
        inside = [(str(key), spec[key]) for key in sorted(spec)]
    elif isinstance(spec, tuple):
        fields = getattr(spec, "_fields", range(len(spec)))
        inside = [(str(field), part) for field, part in zip(fields, spec)]
    else:
        yield outside or "element"
        return
    for name, part in inside:
        yield from _names(part, f"{outside}/{name}" if outside else name)


class _State(NamedTuple):
    """Holds the state after the elements so far.

    Attributes:
        counts: [3] int64, number of the pass, elements, records.
        due: at how many elements the next mark is made.
        order, content, changes: [T] int64, see `Mark`.
        last: [T] int64, the hash of the last record.
    """

    counts: tf.Tensor
    due: tf.Tensor
    order: tf.Tensor
    content: tf.Tensor
    changes: tf.Tensor
    last: tf.Tensor


def _next_state(
    handle: tf.Tensor, width: int, state: _State, hashes: list[tf.Tensor]
) -> tuple[_State, tf.Operation]:
    """Returns the state with one element more, and what notes it in the table.

    Args:
        handle: the table.
        width: of its rows.
        state: of the previous elements.
        hashes: for each tensor those of the element's records.
    """
    number, elements, _ = tf.unstack(state.counts)
    is_first = tf.equal(elements, 0)
    number = tf.where(is_first, _found(handle, _LATEST, width)[0] + 1, number)
    records = tf.size(hashes[0], out_type=tf.int64)
    counts = tf.stack([number, elements, 0]) + tf.stack([0, 1, state.counts[2] + records])
    elements += 1
    is_due = tf.equal(elements, state.due)
    by_tensor = _stacked(hashes)
    in_front = tf.concat([state.last[:, None], by_tensor], 1)
    changed = tf.not_equal(in_front[:, :-1], by_tensor)
    next_state = _State(
        counts,
        tf.where(is_due, state.due + tf.maximum(state.due // 4, 1), state.due),
        _fingerprints(tf.concat([state.order[:, None], by_tensor], 1)),
        state.content + tf.reduce_sum(by_tensor, 1),
        state.changes + tf.reduce_sum(tf.cast(changed, tf.int64), 1),
        in_front[:, -1],
    )
    row = tf.concat([counts, next_state.order, next_state.content, next_state.changes], 0)
    keys = tf.stack([tf.constant(_LATEST, tf.int64), tf.where(is_due, elements, _LATEST)])
    return next_state, _inserted(handle, keys, tf.stack([row, row]))


def _stacked(hashes: list[tf.Tensor]) -> tf.Tensor:
    """Returns the tensors' hashes, [T, n]; they may have different numbers of records.

    (They lie across the rows then: a row isn't a tensor's, but is the same on all ranks.)
    """
    if len(hashes) == 1:
        return hashes[0][None]
    flat = tf.concat(hashes, 0)
    missing = tf.math.floormod(-tf.size(flat), len(hashes))
    return tf.reshape(tf.pad(flat, [[0, missing]]), [len(hashes), -1])


def _hashes(x: Any, by_record: bool) -> tf.Tensor:
    """Returns a hash of each record of `x`, int64 [n]; n is 1 if `x` is one record."""
    if isinstance(x, tf.SparseTensor):
        place, columns = x.indices[:, 0], x.indices[:, -1]
        return _of_values(x.values, place, columns, x.dense_shape[0], by_record)
    if isinstance(x, tf.RaggedTensor):
        place = x.nested_value_rowids()[-1]
        for outer in reversed(x.nested_value_rowids()[:-1]):
            place = tf.gather(outer, place)
        place, numbers = (
            tf.cast(place, tf.int64),
            tf.range(tf.size(place, out_type=tf.int64)),
        )
        rows = tf.cast(x.nrows(), tf.int64)
        columns = numbers - tf.gather(tf.math.unsorted_segment_min(numbers, place, rows), place)
        return _of_values(x.flat_values, place, columns, rows, by_record)
    return _fingerprints(_rows(x, by_record and x.shape.rank not in (0, None)))


def _rows(x: tf.Tensor, has_records: bool) -> tf.Tensor:
    """Returns the first values of each record of `x`, [n, values]; n is 1 if it is one record."""
    if not has_records:
        x = x[None] if x.shape.rank is not None else tf.reshape(x, [1, tf.size(x)])
    if x.shape.rank == 1:
        return x[:, None]
    width = x.shape[1:].num_elements()
    if x.shape.rank != 2:
        known = tf.reduce_prod(tf.shape(x)[1:]) if width is None else width
        x = tf.reshape(x, tf.stack([tf.shape(x)[0], known]))
    return x[:, :MOST_VALUES] if width is None or width > MOST_VALUES else x


def _of_values(
    values: tf.Tensor, place: tf.Tensor, columns: tf.Tensor, rows: tf.Tensor, by_record: bool
) -> tf.Tensor:
    """Returns hashes of records that have any number of values.

    Args:
        values: of all records, below each other.
        place: the record of each value.
        columns: its place in the record.
        rows: how many records there are.
        by_record: False: they are taken for one.
    """
    parts = _fingerprints(_rows(values, True)) * (2 * columns + 1)
    hashes = tf.math.unsorted_segment_sum(parts, place, rows)
    return hashes if by_record else _fingerprints(hashes[None])


def _fingerprints(rows: tf.Tensor) -> tf.Tensor:
    """Returns 64 bits of each row, int64 [n]."""
    return tf.bitcast(tf.raw_ops.Fingerprint(data=rows, method="farmhash64"), tf.int64)


def _found(handle: tf.Tensor, key: int, width: int) -> tf.Tensor:
    """Returns a row of the table; of zeros if it has none."""
    return tf.raw_ops.LookupTableFindV2(
        table_handle=handle,
        keys=tf.constant([key], tf.int64),
        default_value=tf.zeros([width], tf.int64),
    )[0]


def _inserted(handle: tf.Tensor, keys: Any, rows: tf.Tensor) -> tf.Operation:
    keys = tf.convert_to_tensor(keys, tf.int64)
    return tf.raw_ops.LookupTableInsertV2(table_handle=handle, keys=keys, values=rows)


def _export_of(table: str, width: int) -> Callable[[], tuple[Any, Any]]:
    """Returns what gives the keys and rows of a table; in a graph, operations that exist."""

    def export() -> tuple[Any, Any]:
        with device_scopes.on_host():
            keys, rows = tf.raw_ops.LookupTableExportV2(
                table_handle=_handle(table, width), Tkeys=tf.int64, Tvalues=tf.int64
            )
        return keys, rows

    if tf.executing_eagerly():
        return export
    exported = export()
    return lambda: exported


def _handle(name: str, width: int) -> tf.Tensor:
    """Returns the session's table, by a name that functions of a dataset can use."""
    return tf.raw_ops.MutableHashTableOfTensorsV2(
        shared_name=name, key_dtype=tf.int64, value_dtype=tf.int64, value_shape=[width]
    )
