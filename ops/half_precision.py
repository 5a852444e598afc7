"""Has TensorFlow compute the dense part of a graph in half precision: scope(mixed_precision=…).

TensorFlow's graph optimizer rewrites what a session runs: matrix products and the operations
between them compute in 16 bits, everything else in float32. It knows none of the operations of
tables and exchanges, and leaves them, all variables and all slots in float32.

It is asked for float16 on GPUs only. On CPUs TensorFlow emulates float16, which is slower than
float32, and its rewriting to it crashes on graphs in which a run feeds sums of gradients.
"""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.kernel_device import chosen

_TYPES = {"float16": tf.float16, "bfloat16": tf.bfloat16}
# For which precisions this process has found out whether the rewriting takes place.
_TRIED: set[str] = set()


def rewrite(config: tf.ConfigProto, precision: str) -> None:
    """Sets the options by which a session computes in half precision.

    Args:
        config: the session's; what it says about the rewriting stays.
        precision: 'float16' or 'bfloat16'.
    """
    options, on = config.graph_options.rewrite_options, 1
    if precision == "bfloat16":
        options.auto_mixed_precision_onednn_bfloat16 = (
            options.auto_mixed_precision_onednn_bfloat16 or on
        )
    elif chosen() == "gpu":
        options.auto_mixed_precision = options.auto_mixed_precision or on


def warn_if_not_rewritten(config: tf.ConfigProto, precision: str) -> None:
    """Warns, once in a process, if TensorFlow doesn't compute in this precision here.

    Everything then stays in float32, without a word of TensorFlow's: in float16 on a processor and
    on a GPU older than Volta, in bfloat16 on a GPU and on a processor without instructions for it.
    """
    if precision in _TRIED:
        return
    _TRIED.add(precision)
    if not _is_rewritten(config, _TYPES[precision]):
        other = " Try 'float16'." if precision == "bfloat16" and chosen() == "gpu" else ""
        warnings.warn(
            f"scope(mixed_precision='{precision}') has no effect on the speed of this rank: "
            f"TensorFlow computes no matrix product in {precision} on its "
            f"{'GPU' if chosen() == 'gpu' else 'processor'}, and stays with float32.{other}",
            stacklevel=2,
        )


def _is_rewritten(config: tf.ConfigProto, dtype: tf.DType) -> bool:
    tried = tf.ConfigProto()
    tried.CopyFrom(config)
    tried.graph_options.rewrite_options.min_graph_nodes = -1
    ran: Any = tf.RunMetadata()
    with tf.Graph().as_default(), tf.Session(config=tried) as session:
        x = tf.placeholder(tf.float32, [16, 16])
        y = tf.matmul(tf.nn.relu(tf.matmul(x, x)), x)
        session.run(
            y,
            {x: [[1.0] * 16] * 16},
            tf.RunOptions(output_partition_graphs=True),
            ran,
        )
    return any(
        node.attr["DstT"].type == dtype.as_datatype_enum
        for part in ran.partition_graphs
        for node in part.node
        if node.op == "Cast"
    )
