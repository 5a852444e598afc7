"""Opens a checkpoint with the increments that follow it, and checks that they belong together.

    base ◄── increment 1 ◄── increment 2 …      each names its base, number and predecessor

The prefix of an increment names the state that the base and the increments up to it give. The
prefix of a base names the base alone, with one exception: that of a folder's latest checkpoint
names the newest state of its chain. So restoring the latest checkpoint gives what was saved last.
`<base>.increment-0` always names the base.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files.chain_names import increment_prefix, increments_of, split
from collective.checkpoint.files.layout import StoredTable
from collective.checkpoint.files.tensor_bundle import Bundle, index_path
from collective.ops.counting import counted
from collective.tensorflow_internals.checkpoints import checkpoint_management


@dataclasses.dataclass(frozen=True)
class Chain:
    """Holds a checkpoint and the increments to apply to it, in order."""

    base: Bundle
    increments: tuple[Bundle, ...] = ()

    @property
    def last(self) -> Bundle:
        """Returns the part with the newest values of everything except tables."""
        return self.increments[-1] if self.increments else self.base

    def updates_of(self, stored: StoredTable) -> Iterator[tuple[Bundle, StoredTable]]:
        """Yields the increments that contain rows of a table or slot of the base."""
        for bundle in self.increments:
            if stored.name in bundle.layout.tables:
                yield bundle, bundle.layout.tables[stored.name]

    def rows_of(self, stored: StoredTable) -> Bundle:
        """Returns the part with all rows of a table or slot, to which its updates apply.

        A matrix that was saved as an ordinary variable is whole in each part.
        """
        return self.base if stored.name in self.base.layout.tables else self.last

    @contextlib.contextmanager
    def advising(self, bundle: Bundle) -> Iterator[None]:
        """Adds to errors of reading an increment what can be restored without it."""
        try:
            yield
        except tf.errors.DataLossError as error:
            number = 0 if bundle is self.base else 1 + self.increments.index(bundle)
            if number == 0:
                raise
            raise _data_loss(f"{error.message} {_advice(self.base.prefix, number - 1)}") from None


def prefix_of(path: str) -> str:
    """Returns the prefix that a path names: the path itself, or a folder's latest checkpoint.

    Raises:
        ValueError: the folder has no checkpoint.
    """
    if not tf.io.gfile.isdir(path):
        return path
    latest = tf.train.latest_checkpoint(path)
    if latest is None:
        raise ValueError(f"There is no checkpoint in '{path}'.")
    return str(latest)


def open_chain(prefix: str) -> Chain:
    """Opens the checkpoint or state that `prefix` names.

    Raises:
        ValueError: there is no checkpoint, or an increment follows another base.
        tf.errors.DataLossError: a part is missing or damaged; says what can be restored.
    """
    base, number = split(prefix)
    return open_links(base, newest(base) if number is None else number)


def open_whole(prefix: str) -> Bundle:
    """Opens a whole checkpoint, without increments that follow it.

    Raises:
        ValueError: there is none, or the prefix names an increment.
    """
    bundle = Bundle(prefix)
    if bundle.layout.increment is not None:
        raise ValueError(
            f"'{prefix}' is an increment, which has only what changed. Make a whole checkpoint of "
            f"it: collective checkpoint consolidate {prefix} OUT."
        )
    return bundle


def open_links(base: str, number: int) -> Chain:
    """Opens a base and its increments 1 to `number`; errors as for `open_chain`."""
    if number and not tf.io.gfile.exists(index_path(base)) and increments_of(base):
        raise _data_loss(_without_base(base))
    opened = Bundle(base)
    increments: list[Bundle] = []
    for link in range(1, number + 1):
        increments.append(_open_increment(opened, increments, link, number))
    return Chain(opened, tuple(increments))


def newest(prefix: str) -> int:
    """Returns the number of the newest increment in the state that a whole checkpoint's name means.

    It is 0 for a checkpoint that isn't its folder's latest.
    """
    return last_increment(prefix) if increments_of(prefix) and is_latest(prefix) else 0


def last_increment(prefix: str) -> int:
    """Returns the number of the last increment of a whole checkpoint; 0 if there is none.

    Increments of a checkpoint that this one replaced don't count.
    """
    if not tf.io.gfile.exists(index_path(prefix)):
        return max((number for number, _ in increments_of(prefix)), default=0)  # opening it says so
    layout = Bundle(prefix).layout
    number = 0
    for number_there, increment in increments_of(prefix):
        try:
            place = Bundle(increment).layout.increment
        except tf.errors.DataLossError:
            number = number_there  # Opening it reports the problem.
            continue
        if place is None or not layout.replaced or place.base != layout.replaced:
            number = number_there
    return number


def newest_state(prefix: str) -> str:
    """Names the newest state of a whole checkpoint, with its step if the name doesn't have it.

    Returns:
        `'model.ckpt-100'`, or `'model.ckpt-100.increment-3' (step 130)`.
    """
    number = newest(prefix)
    if not number:
        return f"'{prefix}'"
    increment = increment_prefix(prefix, number)
    step = step_of(Bundle(increment))
    return f"'{increment}'" + (f" (step {step})" if step is not None else "")


def step_of(bundle: Bundle) -> int | None:
    """Returns the global step of a checkpoint, or of an increment; None if it has none."""
    dtype, shape = bundle.entries.get(tf.GraphKeys.GLOBAL_STEP, (np.dtype(object), ()))
    if shape != () or np.dtype(dtype).kind not in "iu":
        return None
    return int(bundle.read_whole(tf.GraphKeys.GLOBAL_STEP))


def is_latest(prefix: str) -> bool:
    """Tells whether a whole checkpoint is the latest in its folder."""
    latest = latest_of(prefix)
    return bool(latest) and os.path.abspath(latest) == os.path.abspath(prefix)


def latest_of(prefix: str) -> str:
    """Returns the latest checkpoint of the folder of `prefix`; '' if that isn't known."""
    try:
        state = checkpoint_management.get_checkpoint_state(os.path.dirname(prefix) or ".")
    except ValueError:  # Some damage raises this; for other damage TensorFlow returns None.
        return ""
    return str(state.model_checkpoint_path) if state else ""


def _open_increment(base: Bundle, before: list[Bundle], number: int, last: int) -> Bundle:
    prefix = increment_prefix(base.prefix, number)
    advice = _advice(base.prefix, number - 1)
    if not tf.io.gfile.exists(index_path(prefix)):
        raise _data_loss(f"{_missing(base.prefix, number, last)} {advice}")
    try:
        bundle = Bundle(prefix)
        bundle.check_files()
    except tf.errors.DataLossError as error:
        raise _data_loss(
            f"increment {number} of checkpoint '{base.prefix}' is damaged: {error.message} {advice}"
        ) from None
    place, previous = bundle.layout.increment, before[-1] if before else base
    if place is None:
        raise ValueError(f"'{prefix}' is not an increment but a whole checkpoint. {advice}")
    if place.base != base.layout.id:
        raise ValueError(
            f"'{prefix}' is an increment of another checkpoint: it follows the one with the id "
            f"'{place.base}', but '{base.prefix}' has the id '{base.layout.id}'. {advice}"
        )
    if (place.number, place.previous) != (number, previous.layout.id):
        raise ValueError(
            f"'{prefix}' is increment {place.number}, after '{place.previous}', but increment "
            f"{number}, after '{previous.layout.id}', belongs there. {advice}"
        )
    return bundle


def _missing(base: str, number: int, last: int) -> str:
    """Says that an increment is missing, for a state that ends with increment `last`."""
    there = [number_there for number_there, _ in increments_of(base)]
    later = [number_there for number_there in there if number_there > number]
    if not later:
        has = counted(len(there), "increment") if there else "no increments"
        path = index_path(increment_prefix(base, last))
        return f"checkpoint '{base}' has {has}, and no increment {last}: there is no file {path}."
    path = index_path(increment_prefix(base, number))
    is_one = later[0] == number + 1
    gap = f"increment {number}" if is_one else f"increments {number} to {later[0] - 1}"
    return (
        f"{gap} of checkpoint '{base}' {'is' if is_one else 'are'} missing: there is no file "
        f"{path}, but increment {later[-1]} is there, which follows {'it' if is_one else 'them'}."
    )


def _without_base(base: str) -> str:
    """Says that there are increments, but not the checkpoint that they follow."""
    count = len(increments_of(base))
    follow = f"{counted(count, 'increment')} of it {'is' if count == 1 else 'are'}"
    return (
        f"checkpoint '{base}' is missing, and {follow} there: there is no file {index_path(base)}. "
        f"Nothing of {'it' if count == 1 else 'them'} can be restored without it."
    )


def _advice(base: str, number: int) -> str:
    """Says what can be restored: the state of an intact increment."""
    return f"'{increment_prefix(base, number)}' names the newest state that can be restored."


def _data_loss(text: str) -> Exception:
    error: Exception = tf.errors.DataLossError(None, None, text)
    return error


def removed_keys(bundle: Bundle, table: StoredTable, part: int) -> np.ndarray:
    """Returns the keys of a part that an increment lists as removed."""
    if not table.removed or not table.removed[part]:
        return np.zeros(0, np.int64)
    return bundle.read_whole(bundle.layout.removed_entry(table, part))
