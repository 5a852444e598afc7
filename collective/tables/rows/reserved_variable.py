"""Makes variables in reserved memory, for dynamic tables and their slots."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import tempfile
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.exchange import dispatch
from collective.ops.graph import device_scopes
from collective.tables.rows import row_store
from collective.tensorflow_internals.graphs import attr_value_pb2
from collective.tensorflow_internals.variables import resource_variable_ops

_paths = itertools.count()


class ReservedVariable(resource_variable_ops.ResourceVariable):
    """Keeps [capacity, D] in reserved memory, which is never read or written as a whole.

    Attributes:
        number: reads the number of its memory in `collective.tables.rows.row_store`.
        on_device: whether its memory is where kernels compute, not the host's.
    """

    def _create(
        self,
        name: str,
        rows: int,
        dim: int,
        dtype: tf.DType,
        make: Any,
        inputs: Sequence[tf.Tensor],
        trainable: bool,
        collections: Sequence[str] | None,
        constraint: Any = None,
        on_device: bool = False,
    ) -> None:
        """Makes the variable's operations.

        Args:
            rows: the memory's number of rows.
            make: f(path, *inputs) -> int64 [1, 1], run by the initializer: the number of a column
                that it exposes at `path`.
            on_device: the attribute.
        """
        self.on_device = on_device
        path = os.path.join(tempfile.gettempdir(), f"collective-{os.getpid()}-{next(_paths)}")

        def placement_scope() -> contextlib.AbstractContextManager[None]:
            return dispatch.device(dynamic=True) if on_device else device_scopes.on_host()

        with tf.init_scope(), device_scopes.on_host(), tf.name_scope(name) as scope:
            name = scope[:-1]
            with placement_scope():
                handle = resource_variable_ops._variable_handle_from_shape_and_dtype(
                    shape=tf.TensorShape([None, dim]),
                    dtype=dtype,
                    shared_name=name,
                    name=scope,
                    graph_mode=True,
                )
            number = tf.raw_ops.VarHandleOp(
                dtype=tf.int64, shape=[], shared_name=f"{name}/number", name="number"
            )
            # Initialization must not count as training: after an IdentityN a write isn't seen as
            # one (`collective.ops.graph.graph_analysis.holder`).
            number_at = tf.raw_ops.IdentityN(input=[number])[0]
            with placement_scope():
                at = tf.raw_ops.IdentityN(input=[handle])[0]
            with tf.control_dependencies(inputs), placement_scope():
                # An assignment to a variable that has been updated would copy all of the memory.
                emptied = tf.raw_ops.DestroyResourceOp(resource=at, ignore_lookup_error=True)
            with tf.control_dependencies([emptied]):
                column_number = tf.reshape(
                    tf.numpy_function(
                        functools.partial(make, path), inputs, tf.int64, stateful=True
                    ),
                    [],
                )
            with tf.control_dependencies([column_number]):
                if on_device:
                    address = tf.reshape(
                        tf.numpy_function(_address, [column_number], tf.int64, stateful=True), []
                    )
                    # It is placed with the variable: TensorFlow copies a tensor that several
                    # operations use to another device, or swaps it out, and this one is as large as
                    # all reserved memory.
                    with handle.graph.colocate_with(handle.op, ignore_existing=True):
                        mapped = native_library.library().collective_memory(
                            address,
                            column_number,
                            dtype=dtype,
                            shape=[rows, dim],
                            device=dispatch.bridge().kind,
                        )
                else:
                    mapped = _in_file(path, rows, dim, dtype)
            with placement_scope():
                assigned = tf.raw_ops.AssignVariableOp(resource=at, value=mapped)
                with tf.control_dependencies([assigned]):
                    # The first sparse update of a variable copies it if anything else holds the
                    # memory. Nothing does now.
                    nothing = {
                        "resource": at,
                        "indices": tf.zeros([0], tf.int64),
                        "updates": tf.zeros([0, dim], dtype),
                    }
                    owned = (
                        dispatch.operations().collective_write_rows(**nothing)
                        if on_device
                        else tf.raw_ops.ResourceScatterUpdate(**nothing)
                    )
            with tf.control_dependencies([owned]):
                adopted = tf.numpy_function(
                    _adopt_mapping, [column_number], tf.int64, stateful=True
                )
            with tf.control_dependencies([adopted]):
                initializer = tf.raw_ops.AssignVariableOp(resource=number_at, value=column_number)
            with placement_scope():
                is_initialized = tf.raw_ops.VarIsInitializedOp(resource=handle)
            resource_variable_ops.BaseResourceVariable.__init__(
                self,
                trainable=trainable,
                shape=tf.TensorShape([None, dim]),
                dtype=dtype,
                handle=handle,
                name=name,
                unique_id=name,
                handle_name=name,
                initializer_op=initializer,
                constraint=constraint,
                in_graph_mode=True,
                is_initialized_op=is_initialized,
            )
            self.number = tf.raw_ops.ReadVariableOp(resource=number, dtype=tf.int64)
            self.number.set_shape([])
        collections = [tf.GraphKeys.GLOBAL_VARIABLES] if collections is None else list(collections)
        if trainable and tf.GraphKeys.TRAINABLE_VARIABLES not in collections:
            collections.append(tf.GraphKeys.TRAINABLE_VARIABLES)
        tf.add_to_collections(collections, self)

    def to_proto(self, export_scope: str | None = None) -> None:
        """Leaves the variable out of an exported graph, because its keys are in this process."""

    def refuse(self, way: str) -> NoReturn:
        raise NotImplementedError

    def _as_graph_element(self) -> NoReturn:
        """Refuses to be fetched: a session calls this method for a variable among its fetches."""
        self.refuse("Fetching the value")


def _in_file(path: str, rows: int, dim: int, dtype: tf.DType) -> tf.Tensor:
    """Returns the memory of a file that is mapped, [rows, dim]."""
    mapped = tf.raw_ops.ImmutableConst(dtype=dtype, shape=[rows, dim], memory_region_name=path)
    # The graph optimizer would run it before the file exists. It leaves operations with this
    # attribute alone.
    mapped.op._set_attr(
        "_scoped_allocator", attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(i=[]))
    )
    return mapped


def _column(number: np.ndarray) -> Any:
    memory = row_store.registered(int(number))
    return memory.values if isinstance(memory, row_store.Store) else memory


def _address(number: np.ndarray) -> np.int64:
    return np.int64(_column(number).address)


def _adopt_mapping(number: np.ndarray) -> np.int64:
    _column(number).adopt_mapping()
    return np.int64(0)


def refusing_method(method: str, way: str) -> Any:
    """Returns a method that refuses."""

    def guarded(self: ReservedVariable, *args: Any, **kwargs: Any) -> Any:
        self.refuse(way)

    guarded.__name__ = method
    return guarded
