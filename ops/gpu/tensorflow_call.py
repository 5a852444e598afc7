"""Makes operations of TensorFlow that call kernels.

    EagerPyFunc on the GPU ──► Python: tensors ──► arrays in their memory ──► kernels ──► tensors
    a compiled operation ──► kernels

How memory is shared with Python, in which order TensorFlow and kernels work, and what that costs,
says `memory_bridge.py`. Compiled operations (`ops/native/gpu/`) launch kernels on TensorFlow's own
stream, and share nothing with anybody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops import op_attributes
from collective.ops.counting import counted
from collective.ops.gpu.memory_bridge import MemoryBridge
from collective.ops.gpu.sources import Source

# What is int32 in between: tf.py_function takes no int32 on a GPU.
INT32_BITS = tf.uint32
Outputs = Sequence[tuple[tf.DType, Any]]  # types and shapes
Work = Callable[..., Sequence[Any]]  # f(kernels, arrays of the inputs…) -> arrays of the outputs


class KernelCaller:
    """Makes operations that call kernels.

    Args:
        bridge: where they compute.
        tables: the names of the tables that they are about, for errors.

    Attributes:
        bridge: as above.
    """

    def __init__(self, bridge: MemoryBridge, tables: Sequence[str] = ()):
        self.bridge, self._tables = bridge, list(tables)

    def memory(self) -> str:
        """Says how much memory kernels take, for a report."""
        return self.bridge.memory()

    def _operation(
        self,
        name: str,
        work: Work,
        inputs: Sequence[tf.Tensor],
        types: Sequence[tf.DType],
        attributes: dict[str, Any],
    ) -> tf.Operation:
        """Makes an operation in the place of the compiled one called `name`, whose outputs, of
        `types`, are what `work` makes of the kernels and of arrays of `inputs`.
        """
        bridge = self.bridge
        dtypes = [np.dtype(x.dtype.as_numpy_dtype) for x in inputs]

        def run(*tensors: Any) -> list[Any]:
            try:
                with bridge.call():
                    return bridge.results(work(bridge.kernels, *bridge.given(tensors, dtypes)))
            except (MemoryError, tf.errors.ResourceExhaustedError) as error:
                raise MemoryError(
                    f"{name} of {_shortened(self._tables)}: {error}. {bridge.advice()}"
                ) from error

        graph = tf.get_default_graph()
        marks = {**op_attributes.marks(name, attributes), **op_attributes.table_marks(self._tables)}
        with (
            tf.device(bridge.placed),
            graph._attr_scope(marks),
            graph.gradient_override_map({"EagerPyFunc": name}),
            tf.name_scope(name),
        ):
            made = tf.py_function(
                run,
                [tf.bitcast(x, INT32_BITS) if x.dtype == tf.int32 else x for x in inputs],
                [INT32_BITS if dtype == tf.int32 else dtype for dtype in types],
            )
        return made[0].op if types else made

    @contextlib.contextmanager
    def _launching(self, name: str, source: Source) -> Iterator[None]:
        """Has the compiled operation called `name` that is made inside launch kernels of `source`
        itself, on TensorFlow's own stream.
        """
        self.bridge.hand_over(source)
        graph, label = tf.get_default_graph(), self.bridge.label
        with (
            tf.device(self.bridge.placed),
            graph._attr_scope(op_attributes.table_marks(self._tables)),
            graph._kernel_label_map({name: label} if label else {}),
        ):
            yield

    def _call(
        self,
        name: str,
        work: Work,
        inputs: Sequence[tf.Tensor],
        outputs: Outputs,
        **attributes: Any,
    ) -> list[tf.Tensor]:
        """Returns the outputs of such an operation."""
        types = [dtype for dtype, _ in outputs]
        made = list(self._operation(name, work, inputs, types, attributes).outputs)
        for tensor, (_, shape) in zip(made, outputs):
            tensor.set_shape(shape)
        return made


def _shortened(tables: Sequence[str]) -> str:
    named = ", ".join(f"'{table}'" for table in tables[:5])
    more = f" and {counted(len(tables) - 5, 'other')}" if len(tables) > 5 else ""
    return f"table{'s' * (len(tables) > 1)} {named}{more}"
