"""Tells from which inputs of an operation a dimension of its result comes.

That is so where the two grow alike: one is the other, or a number of times as long that is written
in the graph, as after two tensors of a batch are concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

Dimension = tuple[tf.Tensor, int]

# Operations on numbers one by one, whose inputs are broadcast.
_BY_ELEMENT = frozenset(
    "Add AddV2 AddN Sub Mul RealDiv Div DivNoNan FloorDiv FloorMod Maximum Minimum Pow "
    "SquaredDifference Xdivy Xlogy Xlog1py Select SelectV2 Neg Square Sqrt Rsqrt Exp Expm1 Log "
    "Log1p Sigmoid Tanh Sin Cos Erf Relu Relu6 LeakyRelu Elu Selu Softplus Softsign Abs Sign Cast "
    "Identity CheckNumerics StopGradient PreventGradient ClipByValue Reciprocal Inv Softmax "
    "LogSoftmax Greater GreaterEqual Less LessEqual Equal NotEqual LogicalAnd LogicalOr "
    "LogicalNot IsNan IsInf IsFinite OnesLike ZerosLike Round Rint Floor Ceil Cumsum Cumprod "
    "ReverseV2 Tan Asin Acos Atan Atan2 Sinh Cosh Asinh Acosh Atanh Erfc Erfinv Lgamma Digamma "
    "Igamma Mod TruncateMod TruncateDiv MulNoNan NextAfter BitwiseAnd BitwiseOr "
    "TanhGrad SigmoidGrad ReluGrad Relu6Grad LeakyReluGrad EluGrad SeluGrad SoftplusGrad "
    "SoftsignGrad SqrtGrad RsqrtGrad ReciprocalGrad InvGrad "
    "StringToNumber StringToHashBucketFast StringToHashBucketStrong StringToHashBucket "
    "AsString".split()
)
# Operations whose first result has the samples of their first input, its first dimension.
_BY_SAMPLE = frozenset("BiasAdd Conv2D MaxPool AvgPool FusedBatchNorm FusedBatchNormV3".split())
_CROSS_ENTROPIES = frozenset(
    {"SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"}
)
_PRODUCTS = frozenset({"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"})
_DIAGONALS = frozenset({"MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3"})
_REDUCTIONS = frozenset({"Sum", "Mean", "Max", "Min", "Prod", "All", "Any"})
_SEARCHES = frozenset({"ArgMax", "ArgMin"})


def origins(x: tf.Tensor, axis: int) -> list[list[Dimension]]:
    """Returns the dimensions of inputs from which dimension `axis` of `x` comes.

    Args:
        x: a tensor of a graph, of known rank.
        axis: the number of the dimension, from 0.

    Returns:
        Lists of which each gives the dimension by itself; a list of several dimensions does so
        where they come from the same one: they are put one after another. Empty if it isn't known,
        or if it is a number of the graph.
    """
    op = x.op
    if op.type in _BY_ELEMENT:
        return [[each] for each in _broadcast(x, axis, _by_element(op))]
    if op.type == "ConcatV2":
        return _of_concat(x, axis)
    if op.type in _CROSS_ENTROPIES:
        return [[(each, 0)] for each in op.inputs] if axis == 0 else []
    if op.type in _DIAGONALS and axis == len(x.shape) - 1:
        given = op.inputs[0]
        return [[(given, axis), (given, axis + 1)]] if _is_main(op) else []
    if op.type == "Pack":
        at = op.get_attr("axis") % len(x.shape)
        return [[(each, axis - (axis > at))] for each in op.inputs] if axis != at else []
    of_one = _RULES.get(op.type)
    found = of_one(x, axis) if of_one else None
    return [[found]] if found else []


def _is_main(op: tf.Operation) -> bool:
    """Tells whether an operation takes the main diagonals of matrices, each as long as these."""
    given = tf.get_static_value(op.inputs[1]) if len(op.inputs) > 1 else 0
    return given is not None and not np.any(given) and np.size(given) == 1


def reduced_axes(op: tf.Operation) -> list[int]:
    """Returns the dimensions over which a reduction goes; none if that isn't known."""
    rank, axes = op.inputs[0].shape.rank, tf.get_static_value(op.inputs[1])
    if not rank or axes is None:
        return []
    return sorted({int(axis) % rank for axis in axes.reshape(-1)})


def reduced(op: tf.Operation) -> list[Dimension]:
    """Returns the dimensions over which a reduction, or `tf.nn.l2_loss`, goes.

    Of a tensor of unknown rank these are the dimensions of what it is computed from by element,
    which it has among its own. None if the axes aren't known.
    """
    x = op.inputs[0]
    if op.type == "L2Loss" or x.shape.rank is None and _is_of_all_axes(op):
        return _dimensions(x)
    return [(x, axis) for axis in reduced_axes(op)]


def _is_of_all_axes(op: tf.Operation) -> bool:
    """Tells whether a tensor of unknown rank is reduced as it is where no axis is given."""
    axes = op.inputs[1].op
    ranks = [each.op for each in axes.inputs if each.op.type == "Rank"]
    return axes.type == "Range" and any(rank.inputs[0].name == op.inputs[0].name for rank in ranks)


def _dimensions(x: tf.Tensor) -> list[Dimension]:
    found: list[Dimension] = []
    stack, seen = [x], set()
    while stack:
        x = stack.pop()
        if x.name in seen:
            continue
        seen.add(x.name)
        if x.shape.rank is not None:
            found += [(x, axis) for axis in range(x.shape.rank)]
        elif x.op.type in _BY_ELEMENT:
            stack += _by_element(x.op)
        elif x.op.type == "Squeeze" and x.op.inputs[0].shape.rank is not None:
            given = x.op.inputs[0]
            found += [(given, axis) for axis, n in enumerate(given.shape.as_list()) if n != 1]
    return found


def _by_element(op: tf.Operation) -> Sequence[tf.Tensor]:
    """Returns the inputs by element; the condition of a Select may be of whole rows."""
    return op.inputs[1:] if op.type == "Select" else op.inputs


def _broadcast(x: tf.Tensor, axis: int, inputs: Sequence[tf.Tensor]) -> list[Dimension]:
    """Returns the dimensions of those inputs that aren't broadcast along `axis`."""
    found = []
    for each in inputs:
        if each.shape.rank is None:
            continue
        at = axis - (len(x.shape) - each.shape.rank)
        if at >= 0 and each.shape.as_list()[at] in (None, x.shape.as_list()[axis]):
            found.append((each, at))
    return found


def _of_concat(x: tf.Tensor, axis: int) -> list[list[Dimension]]:
    joined = tf.get_static_value(x.op.inputs[-1])
    if joined is None:
        return []
    each = [(part, axis) for part in x.op.inputs[:-1]]
    return [each] if joined % len(x.shape) == axis else [[part] for part in each]


def _of_gather(x: tf.Tensor, axis: int) -> Dimension | None:
    params, ids = x.op.inputs[:2]
    at = tf.get_static_value(x.op.inputs[2])
    params_rank, ids_rank = params.shape.rank, ids.shape.rank
    if at is None or params_rank is None or ids_rank is None:
        return None
    batch = x.op.get_attr("batch_dims")  # so many dimensions are those of both
    batch += ids_rank if batch < 0 else 0
    first, of_ids = int(at) % params_rank, ids_rank - batch
    if first <= axis < first + of_ids:
        return ids, axis - first + batch
    return params, (axis if axis < first else axis - of_ids + 1)


def _of_places(x: tf.Tensor, axis: int) -> Dimension | None:
    """The places that `tf.gather_nd` takes have their numbers in their last dimension."""
    places = x.op.inputs[1]
    return (places, axis) if places.shape.rank and axis < places.shape.rank - 1 else None


def _of_rows(x: tf.Tensor, axis: int) -> Dimension | None:
    """Rows of a variable have the dimensions of their ids first."""
    ids = x.op.inputs[1]
    is_of_ids = ids.shape.rank is not None and axis < ids.shape.rank
    return (ids, axis) if is_of_ids and not x.op.get_attr("batch_dims") else None


def _of_product(x: tf.Tensor, axis: int) -> Dimension | None:
    op, rank = x.op, len(x.shape)
    names = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    number = 1 if axis == rank - 1 else 0
    given = op.inputs[number]
    if axis < rank - 2:  # of a batch of matrices; one of the two may be broadcast along it
        return next(iter(_broadcast(x, axis, op.inputs)), None)
    if given.shape.rank != rank:
        return None
    is_turned = axis >= rank - 2 and op.get_attr(names[number])
    return given, (2 * rank - 3 - axis if is_turned else axis)


def _of_einsum(x: tf.Tensor, axis: int) -> Dimension | None:
    equation = x.op.get_attr("equation").decode().replace(" ", "")
    labels, _, result = equation.partition("->")
    if "." in equation or axis >= len(result):
        return None
    for given, names in zip(x.op.inputs, labels.split(",")):
        if result[axis] in names:
            return given, names.index(result[axis])
    return None


def _of_reduction(x: tf.Tensor, axis: int) -> Dimension | None:
    axes, given = reduced_axes(x.op), x.op.inputs[0]
    if not axes:
        return None
    if x.op.type in _REDUCTIONS and x.op.get_attr("keep_dims"):
        return None if axis in axes else (given, axis)
    return given, [each for each in range(given.shape.rank) if each not in axes][axis]


def _of_transpose(x: tf.Tensor, axis: int) -> Dimension | None:
    order = tf.get_static_value(x.op.inputs[1])
    return None if order is None else (x.op.inputs[0], int(order[axis]))


def _of_squeeze(x: tf.Tensor, axis: int) -> Dimension | None:
    given = x.op.inputs[0]
    rank, axes = given.shape.rank, x.op.get_attr("squeeze_dims")
    if rank is None:
        return None
    if axes:
        gone = {each % rank for each in axes}
    else:  # All sizes are known, as the rank of the result is.
        gone = {each for each, size in enumerate(given.shape.as_list()) if size == 1}
    return given, [each for each in range(rank) if each not in gone][axis]


def _of_expanded(x: tf.Tensor, axis: int) -> Dimension | None:
    at = tf.get_static_value(x.op.inputs[1])
    if at is None or x.shape.rank is None or (at := int(at) % x.shape.rank) == axis:
        return None
    return x.op.inputs[0], axis - (axis > at)


def _of_one_hot(x: tf.Tensor, axis: int) -> Dimension | None:
    at = x.op.get_attr("axis") % len(x.shape)
    return (x.op.inputs[0], axis - (axis > at)) if axis != at else None


def _of_reshape(x: tf.Tensor, axis: int) -> Dimension | None:
    """The first dimension comes from the first one, if all others are numbers of the graph."""
    given = x.op.inputs[0]
    if (found := _of_shape(x.op.inputs[1], axis)) is not None:
        return found
    if axis != 0 or not given.shape.rank:
        return None
    rows = [shape[1:].num_elements() for shape in (given.shape, x.shape)]
    return (given, 0) if None not in rows else None


def _of_shape(shape: tf.Tensor, axis: int) -> Dimension | None:
    """Returns the dimension that is number `axis` of a shape: of `tf.shape(y)`, or its parts."""
    op = shape.op
    if op.type in ("Cast", "Identity"):
        return _of_shape(op.inputs[0], axis)
    if op.type in ("Shape", "ShapeN"):
        y = op.inputs[shape.value_index]
        return (y, axis) if y.shape.rank is not None and axis < y.shape.rank else None
    if op.type == "Unpack":
        return _of_shape(op.inputs[0], shape.value_index)
    if op.type == "Pack":
        return _of_shape(op.inputs[axis], 0)
    if op.type == "ConcatV2":
        return _of_joined_shapes(op.inputs[:-1], axis)
    if op.type in ("Slice", "StridedSlice", "GatherV2"):
        taken = tf.get_static_value(op.inputs[1])
        if taken is None:
            return None
        places = taken.reshape(-1)
        at = axis + places[0] if op.type == "Slice" else places[min(axis, len(places) - 1)]
        is_one = op.type != "StridedSlice" or shape.shape.rank == 0
        return _of_shape(op.inputs[0], int(at)) if is_one and at >= 0 else None
    return None


def _of_joined_shapes(parts: Sequence[tf.Tensor], axis: int) -> Dimension | None:
    for part in parts:
        length = part.shape.num_elements()
        if length is None:
            return None
        if axis < length:
            return _of_shape(part, axis)
        axis -= length
    return None


def _of_filled(x: tf.Tensor, axis: int) -> Dimension | None:
    return _of_shape(x.op.inputs[0], axis)


def _of_slice(x: tf.Tensor, axis: int) -> Dimension | None:
    """A dimension is kept if all of it is taken: `[:, 1]`, `[..., None]`."""
    op, given = x.op, x.op.inputs[0]
    entries, strides = op.inputs[1].shape.num_elements(), tf.get_static_value(op.inputs[3])
    if given.shape.rank is None or entries is None or strides is None:
        return None
    names = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    begin, end, ellipsis, new, gone = (op.get_attr(f"{name}_mask") for name in names)
    first = tf.get_static_value(op.inputs[1])
    named = sum(not (ellipsis | new) >> entry & 1 for entry in range(entries))
    kept: list[int | None] = []  # of each dimension of the result, the one that is taken whole
    at = 0
    for entry in range(entries):
        bit = 1 << entry
        if ellipsis & bit:
            kept += range(at, at + given.shape.rank - named)
            at += given.shape.rank - named
        elif new & bit:
            kept.append(None)
        else:
            from_start = begin & bit or first is not None and first[entry] == 0
            is_whole = from_start and end & bit and strides[entry] == 1
            kept += [] if gone & bit else [at if is_whole else None]
            at += 1
    kept += range(at, given.shape.rank)
    taken = kept[axis]
    return None if taken is None else (given, taken)


def _of_part(x: tf.Tensor, axis: int) -> Dimension | None:
    """`tf.slice` keeps a dimension that it takes from 0 to its end, or as much of as `y` has."""
    if (found := _of_shape(x.op.inputs[2], axis)) is not None:
        return found
    start, size = (tf.get_static_value(each) for each in x.op.inputs[1:])
    if start is None or size is None or start[axis] != 0 or size[axis] != -1:
        return None
    return x.op.inputs[0], axis


def _of_leading(x: tf.Tensor, axis: int) -> Dimension | None:
    """All dimensions come from the first input but the last one."""
    return None if axis == len(x.shape) - 1 else (x.op.inputs[0], axis)


def _of_broadcast(x: tf.Tensor, axis: int) -> Dimension | None:
    if (found := _of_shape(x.op.inputs[1], axis)) is not None:
        return found
    return next(iter(_broadcast(x, axis, x.op.inputs[:1])), None)


def _of_tile(x: tf.Tensor, axis: int) -> Dimension | None:
    times = x.op.inputs[1]
    number = times.op.inputs[axis] if times.op.type == "Pack" else times
    return None if tf.get_static_value(number) is None else (x.op.inputs[0], axis)


def _of_pad(x: tf.Tensor, axis: int) -> Dimension | None:
    added = tf.get_static_value(x.op.inputs[1])
    return None if added is None or added[axis].any() else (x.op.inputs[0], axis)


def _of_unpacked(x: tf.Tensor, axis: int) -> Dimension | None:
    given = x.op.inputs[0]
    if given.shape.rank is None:
        return None
    return given, axis + (axis >= x.op.get_attr("axis") % given.shape.rank)


def _of_split(x: tf.Tensor, axis: int) -> Dimension | None:
    """Equal parts grow with the whole."""
    return x.op.inputs[1], axis


def _of_split_by_sizes(x: tf.Tensor, axis: int) -> Dimension | None:
    at = tf.get_static_value(x.op.inputs[2])
    if at is None or int(at) % len(x.shape) == axis:
        return None
    return x.op.inputs[0], axis


def _of_sample(x: tf.Tensor, axis: int) -> Dimension | None:
    return (x.op.inputs[0], 0) if axis == 0 and x.value_index == 0 else None


def _of_its_own(x: tf.Tensor, axis: int) -> Dimension | None:
    return x.op.inputs[x.value_index], axis


_RULES: dict[str, Callable[[tf.Tensor, int], Dimension | None]] = {
    "GatherV2": _of_gather,
    "ResourceGather": _of_rows,
    "GatherNd": _of_places,
    "Einsum": _of_einsum,
    "Transpose": _of_transpose,
    "Squeeze": _of_squeeze,
    "ExpandDims": _of_expanded,
    "OneHot": _of_one_hot,
    "Reshape": _of_reshape,
    "StridedSlice": _of_slice,
    "Slice": _of_part,
    "TopKV2": _of_leading,
    **dict.fromkeys(_DIAGONALS, _of_leading),
    "BroadcastTo": _of_broadcast,
    "Fill": _of_filled,
    "StridedSliceGrad": _of_filled,
    "Tile": _of_tile,
    "Pad": _of_pad,
    "PadV2": _of_pad,
    "Unpack": _of_unpacked,
    "Split": _of_split,
    "SplitV": _of_split_by_sizes,
    "IdentityN": _of_its_own,
    **dict.fromkeys(_PRODUCTS, _of_product),
    **dict.fromkeys(_REDUCTIONS | _SEARCHES, _of_reduction),
    **dict.fromkeys(_BY_SAMPLE, _of_sample),
}
