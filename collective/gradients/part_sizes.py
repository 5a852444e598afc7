"""Says what operations make of the number of this rank's rows, and of shapes that begin with it."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import tensor_util

from collective.gradients.part_kinds import BY_ROW, MIXES, NOTHING, Kind, Verdict, by_row

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
_KEPT_SIZES = frozenset(
    "Cast Identity Pack ConcatV2 ExpandDims Squeeze Reshape StopGradient Slice StridedSlice Mul "
    "Prod GatherV2 Unpack Split Switch Merge".split()
)


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
        return by_row(Kind.PLACES)
    if op.type == "Tile" or (op.type == "Reshape" and 0 not in kinds):
        # What is the same on all ranks gets the shape of this rank's rows.
        return by_row(Kind.ROWS)
    if op.type == "Slice" and 0 not in kinds or op.type in ("UnsortedSegmentSum", "ScatterNd"):
        return MIXES
    to_number = op.type == "Cast" and not op.outputs[0].dtype.is_integer
    if op.type in _KEPT_SIZES and not to_number:
        picked = _picked_size(op, kinds)
        return NOTHING if picked is None else Verdict(dict.fromkeys(range(len(op.outputs)), picked))
    if op.type.endswith("Summary") or Kind.SHAPE not in kinds.values():
        return Verdict(counted=tuple(i for i, kind in kinds.items() if kind is Kind.COUNT))
    return Verdict(refused="it computes with the shape")


def _picked_size(op: tf.Operation, kinds: Mapping[int, Kind]) -> Kind | None:
    """Returns the kind of what an operation makes of a shape; None if it is none of the rows."""
    kind = Kind.COUNT if set(kinds.values()) == {Kind.COUNT} else Kind.SHAPE
    if op.type in ("Pack", "ConcatV2"):
        return Kind.SHAPE
    if kind is Kind.COUNT or op.type not in ("StridedSlice", "GatherV2", "Slice", "Prod"):
        return Kind.COUNT if op.type == "Prod" else kind
    if op.type == "Prod":
        return Kind.COUNT
    begin = tensor_util.constant_value(op.inputs[1])
    if begin is None:
        return kind
    first = int(begin.reshape(-1)[0]) if begin.size else 0
    masked = op.type == "StridedSlice" and op.get_attr("begin_mask") & 1
    if op.type == "StridedSlice" and not masked:
        end = tensor_util.constant_value(op.inputs[2])
        stop = None if op.get_attr("end_mask") & 1 or end is None else int(end.reshape(-1)[0])
        if first == 0 and stop == 0:
            return None
        rank = op.inputs[0].shape.num_elements()
        if first != 0 and not (rank is not None and first == -rank):
            return None
    elif first > 0:
        return None
    shrinks = op.type == "StridedSlice" and op.get_attr("shrink_axis_mask") & 1
    return (
        Kind.COUNT if shrinks or (op.type == "GatherV2" and not op.inputs[1].shape.rank) else kind
    )
