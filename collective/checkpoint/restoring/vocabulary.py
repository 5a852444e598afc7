"""Starts tables from a checkpoint with another vocabulary: `VocabInfo` of warm starts.

    row i here ─► word i of the new vocabulary ─► its row in the old one ─► the checkpoint's row
                                               └► none: a value of the backup initializer

With axis=1, columns have words. A rank holds its shard, a slice of the checkpoint, and a number for
each word of the new vocabulary.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files.layout import DYNAMIC, StoredTable
from collective.checkpoint.files.tensor_bundle import Bundle
from collective.checkpoint.reading import table_reader
from collective.checkpoint.restoring import warm_start
from collective.checkpoint.rows.shards import Shard
from collective.coordination import barrier
from collective.errors import RankError
from collective.ops.communication import collectives
from collective.ops.counting import counted
from collective.ops.graph import device_scopes
from collective.tables import served_table
from collective.tables.rows import initializers
from collective.tensorflow_internals.checkpoints import gen_checkpoint_ops
from collective.tensorflow_internals.graphs import tensor_util

READ_BYTES = 16 << 20  # of a vocabulary, at a time


@dataclasses.dataclass(frozen=True)
class Words:
    """Says which words rows or columns have, as `tf.estimator.VocabInfo` does.

    Attributes:
        new_file: has one word per line, in the order of the rows here.
        new_size: how many of its words count.
        buckets: the number of rows after these, for all other words.
        old_file: has the words in the order of the rows in the checkpoint.
        old_size: how many of its words count; -1 for all.
        axis: 0 if rows have words, 1 if columns have.
    """

    new_file: Any
    new_size: int
    buckets: int
    old_file: Any
    old_size: int
    axis: int

    @property
    def kind(self) -> str:
        return "row" if self.axis == 0 else "column"


def start_from_words(
    original: Any,
    var: Any,
    current_vocab_path: Any,
    current_vocab_size: int,
    prev_ckpt: Any,
    prev_vocab_path: Any,
    previous_vocab_size: int = -1,
    current_oov_buckets: int = 0,
    prev_tensor_name: str | None = None,
    initializer: Any = None,
    axis: int = 0,
) -> None:
    """Replaces `warm_starting_util._warm_start_var_with_vocab`.

    Tables and slots get initializers that read the rank's rows, wherever they are stored.

    Raises:
        ValueError: the checkpoint has no such table; it or the vocabularies don't fit; or a table
            is dynamic.
        RankError: ranks have different vocabularies.
    """
    variable = var[0] if isinstance(var, list) and len(var) == 1 else var
    if warm_start.shard_or_none(variable) is None:
        return original(
            var,
            current_vocab_path,
            current_vocab_size,
            prev_ckpt,
            prev_vocab_path,
            previous_vocab_size,
            current_oov_buckets,
            prev_tensor_name,
            initializer,
            axis,
        )
    if served_table.served_graph(variable.graph) is not None:
        # A graph to be served takes its values from the exported checkpoint.
        return None
    shard = warm_start.shard_named_by_variable(variable)
    words = Words(
        current_vocab_path,
        current_vocab_size,
        current_oov_buckets,
        prev_vocab_path,
        previous_vocab_size,
        axis,
    )
    if shard.dynamic:
        raise ValueError(
            f"VocabInfo of dynamic table '{shard.table.op.name}': its rows belong to keys, not to "
            "lines of a vocabulary, so they don't move. Start it without VocabInfo, by "
            "tf.train.init_from_checkpoint or strategy.scope(warm_start=…)."
        )
    if not (current_vocab_path and current_vocab_size and prev_ckpt and prev_vocab_path):
        raise ValueError(
            f"VocabInfo of '{shard.name}' needs new_vocab, new_vocab_size and old_vocab, and the "
            f"checkpoint; it has {current_vocab_path!r}, {current_vocab_size!r}, "
            f"{prev_vocab_path!r} and {prev_ckpt!r}."
        )
    initializer = tf.zeros_initializer() if initializer is None else initializer
    if not callable(initializer):
        raise TypeError(
            f"VocabInfo of '{shard.name}': backup_initializer must be callable, not "
            f"{initializer!r}."
        )
    bundle = warm_start.open_agreed(warm_start.agreed_path(prev_ckpt))
    stored = warm_start.stored_for(bundle, prev_tensor_name or shard.name, shard)
    _check_fit(bundle, stored, shard, words)
    _agree(shard, words)
    with variable.graph.as_default(), tf.init_scope(), tf.name_scope("collective/checkpoint"):
        warm_start.initialize_by(variable, _moved(bundle, stored, shard, words, initializer))
    return None


def _check_fit(bundle: Bundle, stored: StoredTable, shard: Shard, words: Words) -> None:
    """Checks what can be known before the vocabularies are read."""
    name = f"'{shard.name}'" + (f" (there '{stored.name}')" if shard.name != stored.name else "")
    rows, dim = shard.table.rows, shard.dim
    problem = None
    if stored.kind == DYNAMIC:
        problem = (
            f"{name} is static here, dynamic in the checkpoint, where rows belong to keys, not to "
            "lines of a vocabulary. Read its keys and rows by collective.checkpoint.read_table"
        )
    elif shard.variable.dtype.base_dtype.name != stored.dtype:
        here = shard.variable.dtype.base_dtype.name
        problem = f"{name} is {here} here, {stored.dtype} in the checkpoint"
    elif words.axis == 0 and dim != stored.dim:
        problem = (
            f"{name} has {counted(dim, 'column')} here, {counted(stored.dim, 'column')} in the "
            "checkpoint"
        )
    elif words.axis == 1 and rows > (stored.rows or 0):
        problem = (
            f"{name} has {counted(rows, 'row')} here, {counted(stored.rows or 0, 'row')} in the "
            "checkpoint, and VocabInfo(axis=1) is about columns"
        )
    if problem is not None:
        raise ValueError(f"checkpoint '{bundle.prefix}': {problem}.")
    extent, most = (rows, dim)[words.axis], words.new_size + words.buckets
    if extent > most or words.axis == 1 and extent < most:
        raise ValueError(
            f"'{shard.name}' has {counted(extent, words.kind)}, and VocabInfo(new_vocab_size="
            f"{words.new_size}, num_oov_buckets={words.buckets}) is for {counted(most, words.kind)}"
            ". Make both the same."
        )


def _agree(shard: Shard, words: Words) -> None:
    """Checks that all ranks have the same vocabularies, maybe in separate files."""
    digests: list[list[str]] = barrier.run_on_all_ranks(
        None,
        f"reading the vocabularies of '{shard.name}'",
        lambda: [_digest(words.new_file), _digest(words.old_file)],
    )
    for place, file in enumerate((words.new_file, words.old_file)):
        other = next((r for r, d in enumerate(digests) if d[place] != digests[0][place]), None)
        if other is not None:
            raise RankError(
                f"'{shard.name}': rank {other} has another vocabulary than rank 0 (on this rank "
                f"it is '{file}'): the digests of their contents are {digests[other][place]} and "
                f"{digests[0][place]}. Give all ranks the same words in the same order."
            )


def _digest(path: Any) -> str:
    if tensor_util.is_tf_type(path):
        path = tensor_util.constant_value(path)
        path = None if path is None else path.item()
    if not path:
        raise ValueError("a vocabulary must be a path: a string, or a constant tensor.")
    digest = hashlib.blake2b(digest_size=8)
    with tf.io.gfile.GFile(tf.compat.as_text(path), "rb") as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def _moved(
    bundle: Bundle, stored: StoredTable, shard: Shard, words: Words, initializer: Any
) -> tf.Tensor:
    """Returns the value of a rank's shard, which is read when the tensor is computed."""
    rows, dim = shard.table.rows, shard.dim
    extent, other = (rows, dim) if words.axis == 0 else (dim, rows)
    loaded = min(extent, words.new_size)
    with device_scopes.on_host():
        mapping, present = gen_checkpoint_ops.generate_vocab_remapping(
            new_vocab_file=words.new_file,
            old_vocab_file=words.old_file,
            new_vocab_offset=0,
            num_new_vocab=loaded,
            old_vocab_size=words.old_size if words.axis == 0 else -1,  # as in TensorFlow
        )
    init = initializer() if isinstance(initializer, type) else initializer
    # TensorFlow calls it for new words, and for buckets if there are any. Each call may draw the
    # next number of the graph's generator.
    shapes: list[Any] = [[(loaded - present) * other, 1]]
    if extent > loaded:
        shapes.append([extent - loaded, other] if words.axis == 0 else [other, extent - loaded])
    fills = [initializers.by_row(init, (rows, dim), shard.name) for _ in shapes]
    given: list[tf.Tensor] = []
    if fills[0] is None:
        with initializers.same_on_all_ranks(init, shard.name), device_scopes.on_host():
            given = [tf.cast(tf.convert_to_tensor(init(shape)), stored.dtype) for shape in shapes]

    def fill(out: np.ndarray, mapping: np.ndarray, *given: np.ndarray) -> None:
        _check_mapping(mapping, stored, words)
        missing = np.flatnonzero(mapping < 0)
        values: Drawn | Given
        if fills[0] is None:
            values = Given(given, missing, loaded, rows, words.axis)
        else:
            values = Drawn(fills[0], missing, loaded, dim, words.axis)
        fill_shard = _fill_rows if words.axis == 0 else _fill_columns
        numbers = shard.table.row_placement.keys(collectives.rank(), rows)
        fill_shard(bundle, stored, out, numbers, mapping, values)

    dtype = shard.variable.dtype.base_dtype
    return initializers.filled(shard.shape, dtype, fill, [mapping, *given])


def _check_mapping(mapping: np.ndarray, stored: StoredTable, words: Words) -> None:
    """Checks where in the old vocabulary TensorFlow has found the new words."""
    there = stored.rows if words.axis == 0 else stored.dim
    found = mapping[mapping >= 0]
    if len(found) and found.max() >= (there or 0):
        raise ValueError(
            f"the old vocabulary '{words.old_file}' has a word in line {found.max() + 1}, and "
            f"'{stored.name}' has {counted(there or 0, words.kind)} in the checkpoint. Is it the "
            "vocabulary that it was trained with?"
        )
    is_taken = np.zeros(there or 0, bool)
    is_taken[found] = True
    if is_taken.sum() < len(found):
        once, counts = np.unique(found, return_counts=True)
        raise ValueError(
            f"the new vocabulary '{words.new_file}' has the word of line {once[counts > 1][0] + 1} "
            f"of the old one, '{words.old_file}', more than once. A word has one {words.kind}."
        )


class Drawn:
    """Draws the values of new words by rows, so that they are the same on any number of ranks.

    Args:
        fill: draws whole rows (see `initializers.by_row`).
        missing: tells which new words the old vocabulary lacks.
        loaded: how many new words there are.
        dim: D here.
        axis: the axis of the words.
    """

    def __init__(
        self, fill: initializers.Fill, missing: np.ndarray, loaded: int, dim: int, axis: int
    ):
        self._fill, self._dim = fill, dim
        everything = slice(None)
        self._columns: tuple[Any, Any] = (
            (everything, everything) if axis == 0 else (missing, slice(loaded, None))
        )

    def missing(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the new values in rows with these numbers [b]: all, or missing columns."""
        return self._draw(0, numbers)

    def buckets(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the buckets' values in rows with these numbers [b]: all, or the last columns."""
        return self._draw(1, numbers)

    def _draw(self, which: int, numbers: np.ndarray) -> np.ndarray:
        rows = self._fill(numbers.astype(np.uint64), self._dim)
        return np.asarray(rows[:, self._columns[which]])


class Given:
    """Takes the values of new words from the results of an initializer for all of them.

    Args:
        values: [elements, 1] for new words, and [rows, columns] for buckets if there are any.
        missing, loaded, axis: as in `Drawn`.
        rows: V here.
    """

    def __init__(
        self,
        values: Sequence[np.ndarray],
        missing: np.ndarray,
        loaded: int,
        rows: int,
        axis: int,
    ):
        count = len(missing) if axis == 0 else rows
        self._values = values[0].reshape(count, -1) if count else values[0]
        self._buckets = values[-1]
        self._places = missing if axis == 0 else np.arange(rows)
        self._first = loaded if axis == 0 else 0

    def missing(self, numbers: np.ndarray) -> np.ndarray:
        """See `Drawn`."""
        return np.asarray(self._values[np.searchsorted(self._places, numbers)])

    def buckets(self, numbers: np.ndarray) -> np.ndarray:
        """See `Drawn`."""
        return np.asarray(self._buckets[numbers - self._first])


def _fill_rows(
    bundle: Bundle,
    stored: StoredTable,
    out: np.ndarray,
    numbers: np.ndarray,
    mapping: np.ndarray,
    values: Drawn | Given,
) -> None:
    """Fills this rank's shard, whose rows are `numbers`: of old words, of new ones, buckets."""
    has_word = numbers < len(mapping)
    old = mapping[numbers[has_word]]
    found = np.flatnonzero(old >= 0)

    def receive(places: np.ndarray, read: np.ndarray) -> None:
        out[found[places]] = read

    table_reader.read_rows(bundle, stored, old[found], receive)
    fresh = (np.flatnonzero(old < 0), values.missing), (np.flatnonzero(~has_word), values.buckets)
    step = max(1, initializers.BLOCK // max(1, out.shape[1]))
    for places, draw in fresh:
        for first in range(0, len(places), step):
            block = places[first : first + step]
            out[block] = draw(numbers[block])


def _fill_columns(
    bundle: Bundle,
    stored: StoredTable,
    out: np.ndarray,
    numbers: np.ndarray,
    mapping: np.ndarray,
    values: Drawn | Given,
) -> None:
    """Fills this rank's shard, likewise: columns of old words, of new ones, buckets."""
    missing, present = np.flatnonzero(mapping < 0), np.flatnonzero(mapping >= 0)

    def receive(places: np.ndarray, read: np.ndarray) -> None:
        moved = np.empty((len(places), out.shape[1]), out.dtype)
        moved[:, present] = read[:, mapping[present]]
        if len(missing):
            moved[:, missing] = values.missing(numbers[places])
        if out.shape[1] > len(mapping):
            moved[:, len(mapping) :] = values.buckets(numbers[places])
        out[places] = moved

    table_reader.read_rows(bundle, stored, numbers, receive)
