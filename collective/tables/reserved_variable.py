"""A variable in reserved memory: what dynamic tables and their slots are made of."""

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
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.ops import resource_variable_ops

from collective.ops import dispatch, native_library
from collective.tables import row_store

_paths = itertools.count()


class Lazy(resource_variable_ops.ResourceVariable):
    """A resource variable [capacity, D] in reserved memory, which nothing may read or write whole.

    Attributes:
        number: the read of the number under which `collective.tables.row_store` knows its memory.
    """

    def _make(
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
        """
        Args:
            rows: of the memory.
            make: f(path, *inputs) -> int64 [1, 1], run by the initializer: the number of a column
                that it offers at `path`.
            on_device: the column is where kernels compute, not in the host's memory.
        """
        path = os.path.join(tempfile.gettempdir(), f"collective-{os.getpid()}-{next(_paths)}")

        def placed() -> contextlib.ExitStack:
            stack = contextlib.ExitStack()
            if on_device:
                stack.enter_context(tf.device(None))
                stack.enter_context(dispatch.device(dynamic=True))
            return stack

        with tf.init_scope(), tf.device("/cpu:0"), tf.name_scope(name) as scope:
            name = scope[:-1]
            with placed():
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
            # Through other operations, or setting up would count as training.
            number_at = tf.raw_ops.IdentityN(input=[number])[0]
            with placed():
                at = tf.raw_ops.IdentityN(input=[handle])[0]
            with tf.control_dependencies(inputs), placed():
                # Assigned to a variable that has been updated, the memory would be copied, all of
                # it.
                emptied = tf.raw_ops.DestroyResourceOp(resource=at, ignore_lookup_error=True)
            with tf.control_dependencies([emptied]):
                made = tf.reshape(
                    tf.numpy_function(
                        functools.partial(make, path), inputs, tf.int64, stateful=True
                    ),
                    [],
                )
            with tf.control_dependencies([made]):
                if on_device:
                    address = tf.reshape(
                        tf.numpy_function(_address, [made], tf.int64, stateful=True), []
                    )
                    # Where the variable is: of all of this memory nothing may be copied, from one
                    # device to another or to be swapped out, which TensorFlow tries with what
                    # several operations take.
                    with tf.colocate_with(handle.op, ignore_existing=True):
                        mapped = native_library.library().collective_memory(
                            address,
                            made,
                            dtype=dtype,
                            shape=[rows, dim],
                            device=dispatch.bridge().kind,
                        )
                else:
                    mapped = _in_file(path, rows, dim, dtype)
            with placed():
                assigned = tf.raw_ops.AssignVariableOp(resource=at, value=mapped)
                with tf.control_dependencies([assigned]):
                    # The first sparse update of a variable copies it if anybody else holds the
                    # memory: nobody does now.
                    owned = tf.raw_ops.ResourceScatterUpdate(
                        resource=at,
                        indices=tf.zeros([0], tf.int64),
                        updates=tf.zeros([0, dim], dtype),
                    )
            with tf.control_dependencies([owned]):
                settled = tf.numpy_function(_settle_in, [made], tf.int64, stateful=True)
            with tf.control_dependencies([settled]):
                initializer = tf.raw_ops.AssignVariableOp(resource=number_at, value=made)
            with placed():
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
        """What stands for it in an exported graph: nothing, since its keys are in this process."""

    def refuse(self, way: str) -> NoReturn:
        raise NotImplementedError

    def _as_graph_element(self) -> NoReturn:
        """What a session asks of a variable that is fetched."""
        self.refuse("Fetching the value")


def _in_file(path: str, rows: int, dim: int, dtype: tf.DType) -> tf.Tensor:
    """[rows, dim], the memory of a file that is mapped."""
    mapped = tf.raw_ops.ImmutableConst(dtype=dtype, shape=[rows, dim], memory_region_name=path)
    # Else the graph optimizer would try what it gives before there is anything; it leaves alone
    # what looks like this.
    mapped.op._set_attr(
        "_scoped_allocator", attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(i=[]))
    )
    return mapped


def _column(number: np.ndarray) -> Any:
    made = row_store.living(int(number))
    return made.values if isinstance(made, row_store.Store) else made


def _address(number: np.ndarray) -> np.int64:
    return np.int64(_column(number).address)


def _settle_in(number: np.ndarray) -> np.int64:
    _column(number).settle_in()
    return np.int64(0)


def never(method: str, way: str) -> Any:
    """A method that refuses."""

    def guarded(self: Lazy, *args: Any, **kwargs: Any) -> Any:
        self.refuse(way)

    guarded.__name__ = method
    return guarded


def run_here(session: Any, fetches: Any, feed_dict: Any = None) -> Any:
    """Runs what concerns this rank alone: no rank agrees on it, and it trains nothing."""
    run = type(session).run
    return getattr(run, "__wrapped__", run)(session, fetches, feed_dict)
