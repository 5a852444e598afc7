"""Has Horovod's collectives for values that eager code has computed, such as a metric.

All ranks call the same in the same order; ranks that don't get an error, as they do for different
types or shapes. Nothing of a tape: gradients are exchanged by scope() itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.compat.horovod_stand_in import process
from collective.coordination.functions import eager_values
from collective.scope import SCOPES
from collective.tensorflow_internals.graphs import pywrap_tfe

_FOLDS = {"Min": np.minimum, "Max": np.maximum, "Product": np.multiply}


def allreduce(
    tensors: Sequence[Any], title: str, scales: tuple[float, float], compression: Any, name: Any
) -> list[Any]:
    """Returns tensors that are reduced over ranks; see `reductions.grouped_allreduce`.

    Args:
        tensors: numbers, or `tf.IndexedSlices`.
        title: of the reduction.
        scales: factors before and after it.
        compression: what sends the tensors.
        name: the script's, for messages.
    """
    what = f"hvd.allreduce(op={title}) of {name or 'tensors'}"
    given = list(tensors)
    slices = [x for x in given if isinstance(x, tf.IndexedSlices)]
    if slices:
        if title not in ("Sum", "Average") or scales != (1.0, 1.0):
            raise NotImplementedError(
                "hvd.allreduce of tf.IndexedSlices has op=Sum and op=Average, without factors."
            )
        return [
            _of_slices(x, title, what)
            if isinstance(x, tf.IndexedSlices)
            else allreduce([x], title, scales, compression, name)[0]
            for x in given
        ]
    sent = [compression.compress(tf.convert_to_tensor(x)) for x in given]
    before, after = scales
    of_ranks = _of_all_ranks(what, [x for x, _ in sent])
    reduced = []
    for parts, (x, context) in zip(zip(*of_ranks), sent):
        parts = tuple(_scaled(part, before) for part in parts)
        if title in _FOLDS:
            result = _scaled(reduce(_FOLDS[title], parts), after)
        else:
            total = sum(parts[1:], parts[0])
            result = _scaled(total, after / len(parts) if title == "Average" else after)
        reduced.append(compression.decompress(tf.constant(result, x.dtype), context))
    return reduced


def _of_slices(slices: tf.IndexedSlices, title: str, what: str) -> tf.IndexedSlices:
    of_ranks = _of_all_ranks(what, [slices.values, slices.indices], other_lengths=True)
    values, indices = (np.concatenate(each) for each in zip(*of_ranks))
    if title == "Average":
        values = _scaled(values, 1 / len(of_ranks))
    return tf.IndexedSlices(
        tf.constant(values, slices.values.dtype),
        tf.constant(indices, slices.indices.dtype),
        slices.dense_shape,
    )


def allgather(tensor: Any, name: str | None) -> tf.Tensor:
    """Returns the ranks' tensors one after another; see `reductions.allgather`."""
    x = tf.convert_to_tensor(tensor)
    what = f"hvd.allgather of {name or 'a tensor'}"
    of_ranks = _of_all_ranks(what, [x], other_lengths=True)
    return tf.constant(np.concatenate([each for (each,) in of_ranks]), x.dtype)


def broadcast(tensors: Sequence[Any], root_rank: int, what: str) -> list[tf.Tensor]:
    """Returns tensors of a rank; `what` says so to peers."""
    process.check_root(root_rank)
    given = [tf.convert_to_tensor(x) for x in tensors]
    of_ranks = _of_all_ranks(f"{what} from rank {root_rank}", given)
    return [tf.constant(x, own.dtype) for x, own in zip(of_ranks[root_rank], given)]


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> None:
    """Gives variables the values of a rank."""
    ordered = list(variables)
    what = f"hvd.broadcast_variables({[v.name for v in ordered]})"
    for variable, value in zip(ordered, broadcast(ordered, root_rank, what)):
        variable.assign(value)


def _of_all_ranks(
    what: str, tensors: Sequence[tf.Tensor], other_lengths: bool = False
) -> list[list[np.ndarray]]:
    """Returns the tensors of each rank as arrays.

    Raises:
        RuntimeError: no scope() is open.
        NotImplementedError: a tape records them, and their gradient would be lost.
    """
    process.needed()
    if not SCOPES.is_open:
        raise RuntimeError(process.unavailable(f"{what} in eager code outside of scope()"))
    if tensors and pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes(list(tensors)):
        raise NotImplementedError(
            f"{what} is called while a tf.GradientTape records, and its gradient would be lost. "
            "Call it after the tape's `with` block: gradients are of all ranks without it."
        )
    return eager_values.parts(what, [x.numpy() for x in tensors], other_lengths)


def _scaled(x: np.ndarray, factor: float) -> Any:
    """Returns `x * factor` in the type of `x`; integers are cut off towards zero."""
    if factor == 1.0:
        return x
    is_short = x.dtype.itemsize < 4
    wide = np.float64 if x.dtype.kind in "iub" else np.float32 if is_short else x.dtype
    return (x.astype(wide) * np.asarray(factor, wide)).astype(x.dtype)
