"""Says what operations make of the number of this rank's rows, and of shapes that begin with it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow.compat.v1 as tf

from collective.gradients.part_kinds import BY_ROW, MIXES, NOTHING, Kind, Verdict, by_row
from collective.tensorflow_internals.graphs import tensor_util

# Which of their inputs are shapes or sizes.
_SIZED: dict[str, tuple[int, ...]] = {
    "Fill": (0,),
    "BroadcastTo": (1,),
    "RandomUniform": (0,),
    "RandomStandardNormal": (0,),
    "TruncatedNormal": (0,),
    "RandomUniformInt": (0,),
    "StatelessRandomUniform": (0,),
    "StatelessRandomNormal": (0,),
    "StatelessTruncatedNormal": (0,),
    "StatelessRandomUniformV2": (0,),
    "StatelessRandomNormalV2": (0,),
    "StatelessTruncatedNormalV2": (0,),
}
# Operations that leave sizes as they are, by what they do to their form alone.
_SAME_SIZES = frozenset("Cast Identity ExpandDims Squeeze Reshape StopGradient Switch".split())


def of_shape(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    """Judges an operation that gives the shape, or the size, of its inputs."""
    if op.type == "Size":
        return by_row(Kind.COUNT) if kinds[0] in BY_ROW else NOTHING
    return Verdict({i: Kind.SHAPE for i, kind in kinds.items() if kind in BY_ROW})


def of_sizes(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    """Judges an operation that takes shapes and counts alone."""
    sized = _SIZED.get(op.type)
    if sized is not None and set(kinds) <= set(sized):
        return by_row(Kind.ROWS)
    if op.type == "Range":
        return by_row(Kind.PLACES) if set(kinds) == {1} else _of_all_ranks(kinds)
    if op.type == "Tile":
        # One row, as often as there are rows.
        is_row = set(kinds) == {1} and tf.compat.dimension_value(op.inputs[0].shape[:1][0]) == 1
        return by_row(Kind.ROWS) if is_row else MIXES
    if op.type == "Reshape" and 0 not in kinds:
        # What is the same on all ranks gets the shape of this rank's rows.
        return by_row(Kind.ROWS)
    if op.type == "Slice" and 0 not in kinds or op.type in ("UnsortedSegmentSum", "ScatterNd"):
        return MIXES
    if op.type == "Merge" and len(kinds) < len(op.inputs):
        return Verdict(refused="one branch has a number that isn't of rows")
    picked = _picked_sizes(op, kinds)
    return _of_all_ranks(kinds) if picked is None else Verdict(picked)


def _of_all_ranks(kinds: Mapping[int, Kind]) -> Verdict:
    """Returns the verdict on what computes with sizes: these are to be of the rows of all ranks."""
    return Verdict(counted=tuple(kinds))


def _picked_sizes(op: tf.Operation, kinds: Mapping[int, Kind]) -> dict[int, Kind] | None:
    """Returns the kinds of the outputs of an operation that gives sizes on.

    None if it computes with them, or gives them on in a form that no kind stands for.
    """
    outputs = range(len(op.outputs))
    if op.type in _SAME_SIZES:
        to_number = op.type == "Cast" and not op.outputs[0].dtype.is_integer
        return None if to_number or set(kinds) != {0} else dict.fromkeys(outputs, kinds[0])
    if op.type == "Merge":
        return {0: kinds[0]} if len(set(kinds.values())) == 1 else None
    if op.type == "Mul":
        return {0: next(iter(kinds.values()))} if len(kinds) == 1 else None
    if op.type in ("Pack", "ConcatV2"):
        # What stands before it is nothing at all.
        first = next(i for i, x in enumerate(op.inputs) if i in kinds or x.shape != [0])
        return {0: Kind.SHAPE} if set(kinds) == {first} else None
    if op.type == "Prod" and set(kinds) == {0}:
        return {0: Kind.COUNT}
    value = 1 if op.type == "Split" else 0
    if op.type not in _PICKS or set(kinds) != {value}:
        return None
    kind = kinds[value]
    if kind is Kind.COUNT:
        return dict.fromkeys(outputs, kind)
    if op.type in ("Unpack", "Split", "SplitV"):
        return {0: Kind.COUNT if op.type == "Unpack" else Kind.SHAPE}
    places = _picked_places(op)
    if places is None:
        return None
    if 0 not in places:
        return {}
    if places.ndim == 0:
        return {0: Kind.COUNT}
    return {0: Kind.SHAPE} if places[0] == 0 and 0 not in places[1:] else None


_PICKS = frozenset("Unpack Split SplitV StridedSlice Slice GatherV2".split())


def _picked_places(op: tf.Operation) -> np.ndarray | None:
    """Returns which entries of a shape `op` takes; None if only a run will tell."""
    arguments = [tensor_util.constant_value(x) for x in op.inputs[1:]]
    length = op.inputs[0].shape.num_elements()
    if length is None or any(x is None for x in arguments):
        return None
    places = np.arange(length)
    if op.type == "GatherV2":
        return np.asarray(places[arguments[0]])
    begin, end = (int(x.reshape(-1)[0]) for x in arguments[:2])
    if op.type == "Slice":
        return places[begin:] if end < 0 else places[begin : begin + end]
    if op.get_attr("ellipsis_mask") or op.get_attr("new_axis_mask"):
        return None
    if op.get_attr("shrink_axis_mask"):
        return np.asarray(places[begin])
    first = None if op.get_attr("begin_mask") else begin
    last = None if op.get_attr("end_mask") else end
    return places[first : last : int(arguments[2].reshape(-1)[0])]
