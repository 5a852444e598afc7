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
import tensorflow.compat.v2 as tf2

from collective.ops import native_library
from collective.ops.exchange import dispatch
from collective.ops.graph import device_scopes
from collective.ops.graph.sessions import run_unpatched
from collective.tables.rows import row_store
from collective.tensorflow_internals.graphs import attr_value_pb2
from collective.tensorflow_internals.variables import resource_variable_ops

_paths = itertools.count()


class ReservedVariable(resource_variable_ops.ResourceVariable):
    """Keeps [capacity, D] in reserved memory, which is never read or written as a whole.

    Attributes:
        on_device: whether its memory is where kernels compute, not the host's.
        view: the rows that it shows to an optimizer meanwhile
            (`collective.tables.updates.row_views`); else None.
    """

    view: Any = None

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
        if tf.executing_eagerly_outside_functions():
            with tf.init_scope():
                self._create_eagerly(name, rows, dim, dtype, make, inputs, trainable, constraint)
            return
        path, placement_scope = _new_path(), self._placement_scope

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
                        mapped = _on_device(address, column_number, rows, dim, dtype)
                else:
                    mapped = _in_file(path, rows, dim, dtype)
            with placement_scope():
                assigned = tf.raw_ops.AssignVariableOp(resource=at, value=mapped)
                with tf.control_dependencies([assigned]):
                    owned = _own(at, dim, dtype, on_device)
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
            self._number = tf.raw_ops.ReadVariableOp(resource=number, dtype=tf.int64)
            self._number.set_shape([])
        collections = [tf.GraphKeys.GLOBAL_VARIABLES] if collections is None else list(collections)
        if trainable and tf.GraphKeys.TRAINABLE_VARIABLES not in collections:
            collections.append(tf.GraphKeys.TRAINABLE_VARIABLES)
        tf.add_to_collections(collections, self)

    def _create_eagerly(
        self,
        name: str,
        rows: int,
        dim: int,
        dtype: tf.DType,
        make: Any,
        inputs: Sequence[tf.Tensor],
        trainable: bool,
        constraint: Any,
    ) -> None:
        """Makes the variable and its memory; the arguments are those of `_create`."""
        path = _new_path()
        with device_scopes.on_host(), tf.name_scope(name) as scope:
            name = scope[:-1]
            with self._placement_scope():
                handle = resource_variable_ops._variable_handle_from_shape_and_dtype(
                    shape=tf.TensorShape([None, dim]),
                    dtype=dtype,
                    shared_name=None,
                    name=name,
                    graph_mode=False,
                )
            # What is registered lives as long as this array.
            self._registered = make(path, *(x.numpy() for x in inputs))
            number = self._registered.reshape([])

            # An operation that is executed eagerly would copy the memory.
            @tf2.function(autograph=False)
            def fill() -> None:
                if self.on_device:
                    with self._placement_scope():
                        mapped = _on_device(_address(number), number, rows, dim, dtype)
                else:
                    mapped = _in_file(path, rows, dim, dtype)
                with self._placement_scope():
                    assigned = tf.raw_ops.AssignVariableOp(resource=handle, value=mapped)
                    with tf.control_dependencies([assigned]):
                        _own(handle, dim, dtype, self.on_device)

            # Calls of a new function each time count as retracing, which is warned about.
            fill.get_concrete_function()()
            _adopt_mapping(number)
            self._number_holder = resource_variable_ops.ResourceVariable(
                int(number), trainable=False, dtype=tf.int64, name=f"{name}/number"
            )
        resource_variable_ops.BaseResourceVariable.__init__(
            self,
            trainable=trainable,
            shape=tf.TensorShape([None, dim]),
            dtype=dtype,
            handle=handle,
            name=name,
            unique_id=f"{name}_{next(_paths)}",
            handle_name=name,
            constraint=constraint,
            in_graph_mode=False,
        )

    def _placement_scope(self) -> contextlib.AbstractContextManager[None]:
        return dispatch.device(dynamic=True) if self.on_device else device_scopes.on_host()

    @property
    def number(self) -> tf.Tensor:
        """Reads the number of its memory, int64 scalar."""
        if self._in_graph_mode:
            return self._number
        # Not by the variable: functions would count it among theirs, which ranks make equal.
        with device_scopes.on_host():
            number = tf.raw_ops.ReadVariableOp(resource=self._number_holder.handle, dtype=tf.int64)
        number.set_shape([])
        return number

    def number_in(self, session: Any) -> int:
        """Returns the number of its memory in `session`; one made eagerly has one memory.

        Raises:
            tf.errors.FailedPreconditionError: it isn't initialized.
        """
        if not self._in_graph_mode:
            return int(self._registered.reshape([]))
        return int(run_unpatched(session, self._number))

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Reads local rows, for an optimizer's `tf.gather(slot, indices)`."""
        if self.view is not None:
            return tf.gather(self.view.value(), indices, name=name)
        return super().sparse_read(indices, name)

    def to_proto(self, export_scope: str | None = None) -> None:
        """Leaves the variable out of an exported graph, because its keys are in this process."""

    def refuse(self, way: str) -> NoReturn:
        raise NotImplementedError

    def _serialize_to_tensors(self) -> NoReturn:
        self.refuse("tf.train.Checkpoint")

    def _restore_from_tensors(self, restored_tensors: Any) -> NoReturn:
        self.refuse("Restoring a tf.train.Checkpoint")

    def _export_to_saved_model_graph(self, *_: Any, **__: Any) -> NoReturn:
        self.refuse("A SavedModel")

    def _as_graph_element(self) -> NoReturn:
        """Refuses to be fetched: a session calls this method for a variable among its fetches."""
        self.refuse("Fetching the value")


def _new_path() -> str:
    return os.path.join(tempfile.gettempdir(), f"collective-{os.getpid()}-{next(_paths)}")


def _own(handle: tf.Tensor, dim: int, dtype: tf.DType, on_device: bool) -> Any:
    """Makes a variable the owner of its memory, which nothing else may hold now.

    The first sparse update of a variable copies it if anything else does.
    """
    nothing = {
        "resource": handle,
        "indices": tf.zeros([0], tf.int64),
        "updates": tf.zeros([0, dim], dtype),
    }
    if on_device:
        return dispatch.operations().collective_write_rows(**nothing)
    return tf.raw_ops.ResourceScatterUpdate(**nothing)


def _on_device(address: Any, number: Any, rows: int, dim: int, dtype: tf.DType) -> tf.Tensor:
    """Returns a device's memory, [rows, dim]."""
    memory: tf.Tensor = native_library.library().collective_memory(
        address, number, dtype=dtype, shape=[rows, dim], device=dispatch.bridge().kind
    )
    return memory


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
    """Returns a method that refuses, unless the variable shows some of its rows."""

    def guarded(self: ReservedVariable, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self.view, method):
            return getattr(self.view, method)(*args, **kwargs)
        return self.refuse(way)

    guarded.__name__ = method
    return guarded
