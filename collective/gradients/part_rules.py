"""Determines what TensorFlow's operations compute from this rank's part of a table's gradient.

A table's gradient is in parts: each rank has the rows that it owns. The `Kind` of a tensor computed
from one says what its first dimension counts and what its numbers mean.

An operation either keeps its inputs' rows separate (its outputs are then parts, too), or combines
them (all ranks' rows are then needed), or is unknown (a run that needs it is then refused). Single
operations determine all of this: the functions are pure and change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from collective.gradients import part_functions, part_sizes
from collective.gradients.part_kinds import BY_ROW, MIXES, NOTHING, SIZES, Kind, Verdict, by_row
from collective.ops.graph import graph_analysis
from collective.tensorflow_internals.graphs import tensor_util

# Operations whose output has one element for each element of their inputs, which depends only on
# that.
ELEMENTWISE = frozenset(
    """
    Abs Acos Acosh Asin Asinh Atan Atanh Bitcast Cast Ceil CheckNumerics CheckNumericsV2 Cos Cosh
    Digamma Elu Erf Erfc Erfinv Exp Expm1 Floor Identity Inv Invert IsFinite IsInf IsNan LeakyRelu
    Lgamma Log Log1p LogicalNot Neg OnesLike Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid
    Sign Sin Sinh Softplus Softsign Sqrt Square StopGradient PreventGradient Snapshot Tan Tanh
    ZerosLike ClipByValue DeepCopy EnsureShape Print PlaceholderWithDefault Enter Exit
    Add AddV2 AddN Atan2 BitwiseAnd BitwiseOr BitwiseXor Div DivNoNan Equal NotEqual FloorDiv
    FloorMod Greater GreaterEqual Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod Mul
    MulNoNan Pow RealDiv SquaredDifference Sub TruncateDiv TruncateMod Xdivy Xlogy Xlog1py LeftShift
    RightShift NextAfter BiasAdd Select SelectV2 ApproximateEqual Igamma Igammac Zeta Polygamma
    EluGrad InvGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad
    SoftplusGrad SoftsignGrad SqrtGrad TanhGrad FakeQuantWithMinMaxArgs
    """.split()
)
# Elementwise operations that don't change numbers.
_SAME_NUMBERS = frozenset(
    "Bitcast Cast Identity StopGradient PreventGradient Snapshot DeepCopy EnsureShape Print "
    "PlaceholderWithDefault Enter Exit CheckNumerics CheckNumericsV2".split()
)
# Reductions over the axes of their second input; `L2Loss` is over all.
REDUCTIONS = frozenset({"Sum", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm", "Mean"})
# Operations to which the order of their rows makes no difference, if all ranks' rows come in, and
# which inputs have rows.
_UNORDERED: dict[str, tuple[int, ...]] = {
    "ScatterNd": (0, 1),
    "UnsortedSegmentSum": (0, 1),
    "UnsortedSegmentMax": (0, 1),
    "UnsortedSegmentMin": (0, 1),
    "UnsortedSegmentProd": (0, 1),
    **{f"TensorScatter{how}": (1, 2) for how in ("Add", "Sub", "Max", "Min", "Update")},
    **{
        f"{kind}Scatter{how}": (1, 2)
        for kind in ("Resource", "")
        for how in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Update")
    },
    **{
        f"{kind}ScatterNd{how}": (1, 2)
        for kind in ("Resource", "")
        for how in ("Add", "Sub", "Max", "Min", "Update")
    },
    "HistogramFixedWidth": (0,),
    "Bincount": (0,),
    "DenseBincount": (0,),
}
# Operations that use rows, but don't affect the script's numbers.
SUMMARIES = frozenset(
    "HistogramSummary TensorSummary TensorSummaryV2 WriteHistogramSummary".split()
)
_ONLOOKERS = SUMMARIES | frozenset("StringFormat PrintV2 Assert NoOp".split())


def verdict(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    """Determines what `op` computes from its inputs.

    Args:
        op: an operation of a script.
        kinds: the kinds of the inputs that are parts, by their numbers.
    """
    if op.type in _ONLOOKERS:
        return NOTHING
    if op.type.endswith("Summary") and not any(kind in BY_ROW for kind in kinds.values()):
        return Verdict(counted=tuple(kinds))
    if op.type in ("Shape", "ShapeN", "Size"):
        return part_sizes.of_shape(op, kinds)
    if all(kind in SIZES for kind in kinds.values()):
        return part_sizes.of_sizes(op, kinds)
    special = _SPECIAL.get(op.type)
    if special is not None:
        return special(op, kinds)
    if op.type in ELEMENTWISE:
        return _elementwise(op, kinds)
    if op.type in REDUCTIONS or op.type == "L2Loss":
        return _reduction(op, kinds)
    if op.type in _UNORDERED:
        return _unordered(op, kinds)
    return MIXES


def _elementwise(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    ranks = [op.inputs[i].shape.rank for i, kind in kinds.items() if kind in BY_ROW]
    if any(kind in SIZES for kind in kinds.values()):
        # A number of this rank's rows among its rows: the number is to be of all ranks.
        return Verdict(counted=tuple(i for i, kind in kinds.items() if kind in SIZES))
    rank = max(ranks, default=None) if None not in ranks else None
    if op.type not in ("BiasAdd", "Select") and rank is not None:
        if len(set(ranks)) > 1:
            return MIXES
        for i, x in enumerate(op.inputs):
            if i in kinds or x.shape.rank is None or x.shape.rank < rank:
                continue
            if x.shape.rank > rank or tf.compat.dimension_value(x.shape[0]) != 1:
                return Verdict(
                    refused="it takes rows that aren't a part together with those that are"
                )
    if op.type == "BiasAdd" and set(kinds) != {0}:
        return MIXES
    same = op.type in _SAME_NUMBERS and (op.type != "Cast" or op.outputs[0].dtype.is_integer)
    kind = next(kind for kind in kinds.values() if kind in BY_ROW)
    if not same and {Kind.LOCAL, Kind.PLACES} & set(kinds.values()):
        return Verdict(refused="it computes with the places of rows")
    return by_row(kind if same else Kind.ROWS)


def axes_of(op: tf.Operation) -> list[int] | None:
    """Returns the axes over which `op` reduces its first input, counted from 0; None for all.

    Raises:
        ValueError: they are known only in a run.
    """
    # tf.reduce_sum(x) is over a range, where the rank is known in a run only.
    if op.type == "L2Loss" or op.inputs[1].op.type == "Range":
        return None
    rank, axes = op.inputs[0].shape.rank, tensor_util.constant_value(op.inputs[1])
    if rank is None or axes is None:
        raise ValueError(f"'{op.name}' is over axes that only a run will tell.")
    return sorted(int(axis) % rank for axis in axes.reshape(-1))


def _reduction(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    if set(kinds) != {0}:
        return MIXES
    try:
        axes = axes_of(op)
    except ValueError:
        return Verdict(refused="only a run will tell over which axes it goes")
    if axes is not None and 0 not in axes:
        return by_row(Kind.ROWS if axes else kinds[0])
    if kinds[0] in (Kind.LOCAL, Kind.PLACES):
        return Verdict(refused="it computes with the places of rows")
    return Verdict(reduces=True)


def _unordered(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    """Judges an operation that puts rows where another of its inputs says."""
    with_rows = _UNORDERED[op.type]
    where = op.type.startswith("Unsorted")
    index = kinds.get(with_rows[-1] if where else with_rows[0])
    if index in (Kind.LOCAL, Kind.PLACES):
        if graph_analysis.WRITES.match(op.type) and op.type != "ScatterNd":
            # A slot of the shard, in an optimizer.
            return NOTHING if index is Kind.LOCAL else MIXES
        return by_row(Kind.ROWS)
    parts = [i for i, kind in kinds.items() if kind in BY_ROW]
    if index is None and len(with_rows) > 1 or not set(parts) <= set(with_rows):
        return MIXES
    for i in set(with_rows) - set(parts):
        # One number for all rows.
        if op.inputs[i].shape.rank != 0:
            return Verdict(refused="it takes rows that aren't a part together with those that are")
    return Verdict(gathered=tuple(parts))


def _concat(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    axis, values = tensor_util.constant_value(op.inputs[-1]), op.inputs[:-1]
    found = {kind for kind in kinds.values() if kind in BY_ROW}
    rank = values[0].shape.rank
    if axis is None or rank is None or len(kinds) < len(values):
        if axis is not None and rank is not None and int(axis) % rank != 0:
            return by_row(Kind.ROWS)  # The others' first dimension has as many rows.
        return Verdict(refused="it puts rows that aren't a part below those that are")
    if int(axis) % rank == 0 and Kind.PLACES in found:
        return Verdict(refused="it computes with the places of rows")
    return by_row(found.pop() if len(found) == 1 else Kind.ROWS)


def _reshaped(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    if kinds.get(0) not in BY_ROW:
        return MIXES
    shape = tensor_util.constant_value_as_shape(op.inputs[1])
    before = op.inputs[0].shape
    if 1 not in kinds:
        if shape.rank is None:
            return Verdict(refused="it changes their shape")
        if shape.rank and tf.compat.dimension_value(shape[0]) is not None:
            return Verdict(refused="it changes their shape")
        if not shape.rank:
            return Verdict(refused="it changes their shape")
    flat = shape.rank == before.rank or (
        before.rank is not None
        and before[1:].num_elements() == 1
        or shape.rank is not None
        and shape[1:].num_elements() == before[1:].num_elements()
    )
    return by_row(kinds[0] if flat else Kind.ROWS)


def _keeps_first(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    """Judges an operation that leaves the first dimension of its first input alone, or doesn't."""
    if set(kinds) != {0}:
        return MIXES
    rank = op.inputs[0].shape.rank
    keeps = False
    if op.type == "ExpandDims":
        axis = tensor_util.constant_value(op.inputs[1])
        keeps = axis is not None and (int(axis) > 0 or rank is not None and int(axis) > -1 - rank)
    elif op.type == "Squeeze":
        axes = op.get_attr("squeeze_dims")
        keeps = bool(axes) and rank is not None and 0 not in [a % rank for a in axes]
    elif op.type == "Transpose":
        order = tensor_util.constant_value(op.inputs[1])
        keeps = order is not None and order.size > 0 and int(order[0]) == 0
    elif op.type == "Tile":
        times = tensor_util.constant_value(op.inputs[1])
        keeps = times is not None and times.size > 0 and int(times[0]) == 1
    elif op.type in ("Pad", "PadV2", "MirrorPad"):
        pads = tensor_util.constant_value(op.inputs[1])
        keeps = pads is not None and not pads[0].any()
    elif op.type in ("Softmax", "LogSoftmax", "TopKV2", "ReverseV2", "InTopKV2"):
        keeps = rank is not None and rank > 1 and op.type != "ReverseV2"
    elif op.type in ("ArgMax", "ArgMin", "Cumsum", "Cumprod"):
        axis = tensor_util.constant_value(op.inputs[1])
        keeps = axis is not None and rank is not None and int(axis) % rank != 0
    if not keeps:
        return MIXES
    kind = kinds[0] if op.type in ("ExpandDims", "Squeeze", "Tile") else Kind.ROWS
    return Verdict(dict.fromkeys(range(len(op.outputs)), kind))


def _strided_slice(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    if set(kinds) != {0}:
        return MIXES
    if op.get_attr("ellipsis_mask") & 1:
        # As many dimensions of its own as the input has from the other end.
        begin = tensor_util.constant_value(op.inputs[1])
        rank = op.inputs[0].shape.rank
        new = bin(op.get_attr("new_axis_mask")).count("1")
        whole = begin is not None and rank is not None and len(begin) - 1 - new < rank
    else:
        strides = tensor_util.constant_value(op.inputs[3])
        whole = (
            bool(op.get_attr("begin_mask") & 1)
            and bool(op.get_attr("end_mask") & 1)
            and not (op.get_attr("new_axis_mask") | op.get_attr("shrink_axis_mask")) & 1
            and strides is not None
            and int(strides[0]) == 1
        )
    if not whole:
        return Verdict(refused="it takes some of the rows by their places")
    only_reshapes = op.inputs[0].shape.rank == 1
    return by_row(kinds[0] if only_reshapes else Kind.ROWS)


def _split(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    value, axis = (1, 0) if op.type == "Split" else (0, 2)
    at = op.get_attr("axis") if op.type == "Unpack" else tensor_util.constant_value(op.inputs[axis])
    rank = op.inputs[value].shape.rank
    if set(kinds) != {value} or at is None or rank is None or int(at) % rank == 0:
        return Verdict(refused="it takes some of the rows by their places")
    return Verdict(dict.fromkeys(range(len(op.outputs)), Kind.ROWS))


def _pack(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    if op.get_attr("axis") == 0 or len(kinds) < len(op.inputs):
        return MIXES
    return by_row(Kind.ROWS)


def _matmul(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    is_turned = [op.get_attr(a) for a in _MATMUL[op.type]]
    if (op.inputs[0].shape.rank, op.inputs[1].shape.rank) != (2, 2):
        return MIXES
    if set(kinds) == {0} and not is_turned[0]:
        return by_row(Kind.ROWS)
    if set(kinds) == {0, 1} and is_turned[0] and not is_turned[1]:
        return Verdict(gathered=(0, 1))
    return MIXES


def _gather(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    axis = tensor_util.constant_value(op.inputs[2]) if op.type == "GatherV2" else 0
    if axis is None or (op.type == "GatherV2" and op.get_attr("batch_dims")):
        return MIXES
    params, index = kinds.get(0), kinds.get(1)
    if params is None:
        ids = index in (Kind.IDS, Kind.ROWS) and int(axis) == 0
        return by_row(Kind.ROWS) if ids else Verdict(refused="it takes rows by their places")
    if int(axis) == 0:
        places = index is Kind.PLACES and params in BY_ROW
        return (
            by_row(params)
            if places
            else Verdict(refused="it takes some of the rows by their places")
        )
    return by_row(Kind.ROWS) if index is None else MIXES


def _resource_gather(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    fits = kinds.get(1) in (Kind.IDS, Kind.ROWS, Kind.LOCAL)
    return by_row(Kind.ROWS) if fits else Verdict(refused="it takes rows by their places")


def _unique(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    if kinds.get(0) not in (Kind.IDS, Kind.LOCAL):
        return Verdict(refused="what is unique on this rank may be on another one, too")
    more = [Kind.ROWS] if op.type == "UniqueWithCounts" else []
    return by_row(kinds[0], Kind.PLACES, *more)


def _where(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    # Its rows are [places in dimension 0, …].
    return by_row(Kind.PLACES if op.inputs[0].shape.rank == 1 else Kind.ROWS)


def _switch(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    if set(kinds) != {0}:
        return Verdict(refused="it decides by them")
    return by_row(kinds[0], kinds[0])


def _merge(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    found = set(kinds.values())
    if len(kinds) < len(op.inputs):
        return Verdict(refused="one branch has rows that aren't a part")
    return by_row(found.pop() if len(found) == 1 else Kind.ROWS)


def _function(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    outputs = part_functions.outputs(op, kinds, verdict)
    if outputs is None:
        return Verdict(refused="it puts rows together in a branch or a function")
    return Verdict(outputs)


def _identities(op: tf.Operation, kinds: Mapping[int, Kind]) -> Verdict:
    return Verdict(dict(kinds))


_MATMUL = {
    "MatMul": ("transpose_a", "transpose_b"),
    "BatchMatMulV2": ("adj_x", "adj_y"),
    "BatchMatMul": ("adj_x", "adj_y"),
}
_SPECIAL: dict[str, Any] = {
    "ConcatV2": _concat,
    "Reshape": _reshaped,
    "StridedSlice": _strided_slice,
    "Split": _split,
    "SplitV": _split,
    "Unpack": _split,
    "Pack": _pack,
    "GatherV2": _gather,
    "GatherNd": _gather,
    "ResourceGather": _resource_gather,
    "ResourceGatherNd": _resource_gather,
    "Unique": _unique,
    "UniqueV2": _unique,
    "UniqueWithCounts": _unique,
    "Where": _where,
    "Switch": _switch,
    "Merge": _merge,
    "IdentityN": _identities,
    **dict.fromkeys(_MATMUL, _matmul),
    **dict.fromkeys(part_functions.TYPES, _function),
    **dict.fromkeys(
        "ExpandDims Squeeze Transpose Tile Pad PadV2 MirrorPad Softmax LogSoftmax TopKV2 ArgMax "
        "ArgMin Cumsum Cumprod".split(),
        _keeps_first,
    ),
}
