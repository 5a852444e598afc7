"""The static table: a resource variable whose shape is the whole table's and whose memory is this rank's shard."""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import tensorflow.compat.v1 as tf
from tensorflow.python.ops import resource_variable_ops

from collective.errors import TableError
from collective.ops import communication, kernels
from collective.tables import initial

_view = threading.local()


@contextlib.contextmanager
def shard_view() -> Iterator[None]:
    """Inside, a table presents itself as its shard: for optimizers, which then make slots of the shard's shape."""
    before, _view.on = in_shard_view(), True
    try:
        yield
    finally:
        _view.on = before


def in_shard_view() -> bool:
    return getattr(_view, 'on', False)


class Table(resource_variable_ops.ResourceVariable):
    """A table of V rows of dimension D, whose row i lives on rank i mod N, as row i div N of the shard there.

    It stands in `tf.trainable_variables()` under its own name and goes wherever a variable goes: optimizers, `var_list`,
    `tf.gradients`. Rows are read by `tf.nn.embedding_lookup`, `embedding_lookup_sparse`, `safe_embedding_lookup_sparse` and
    `tf.gather`, and by the feature columns that use them. Every other way to read or write it would reach one
    rank's shard only and raises `TableError`. With one rank, shard and table are the same and nothing raises.

    Attributes:
        rows: V.
        dim: D.
        shape: [V, D].
        handle: the resource of this rank's shard, [ceil((V - rank) / N), D].
        shard_shape: its shape.
        hashed: whether a key's owner is found by hashing it.
    """

    hashed = False

    def __init__(self, *, initializer: Any, shape: tf.TensorShape, dtype: tf.DType, name: str, **kwargs: Any):
        self.rows, self.dim = shape.as_list()
        rank, ranks = communication.rank(), communication.size()
        with shard_view():
            super().__init__(
                initial_value=lambda: initial.shard(initializer, (self.rows, self.dim), dtype, name, rank, ranks),
                name=name, dtype=dtype, **kwargs)
        initial.only_after(self.initializer, self._initial_value)

    @property
    def shape(self) -> tf.TensorShape:
        return self._shape if in_shard_view() else tf.TensorShape([self.rows, self.dim])

    def get_shape(self) -> tf.TensorShape:
        return self.shape

    @property
    def shard_shape(self) -> tf.TensorShape:
        return self._shape

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """What `tf.gather(table, indices)` calls."""
        return tf.nn.embedding_lookup(self, indices, name=name)

    def owners(self, keys: tf.Tensor) -> tf.Tensor:
        """int32 [K], the ranks that own the int64 `keys` [K]."""
        return tf.cast(tf.math.floormod(keys, communication.size()), tf.int32)

    def local(self, keys: tf.Tensor) -> tf.Tensor:
        """[K] int64, the shard's rows for what the exchange of a group tells an owner of keys [K]: here the rows themselves."""
        return keys

    def fetch(self, keys: tf.Tensor) -> tf.Tensor:
        """[K, D], the rows of `keys` [K] int64, all of which this rank owns. Its gradient is `IndexedSlices` of the shard."""
        return kernels.gather_rows(self, keys // communication.size(), [self.dim])

    def refuse(self, way: str) -> NoReturn:
        """Raises the error that names the table, and what to do instead of `way`."""
        raise TableError(
            f"{way} of table '{self.op.name}' would see only this rank's {self._shape[0]} of its {self.rows} rows. Look the "
            'rows up (tf.nn.embedding_lookup, embedding_lookup_sparse, safe_embedding_lookup_sparse, tf.gather), or make '
            'the variable outside embedding_scope() to have it whole on every rank.')


def _whole_only(method: str, way: str) -> Any:
    inherited = getattr(resource_variable_ops.ResourceVariable, method)

    def guarded(self: Table, *args: Any, **kwargs: Any) -> Any:
        if communication.size() > 1 and not in_shard_view():
            self.refuse(way)
        return inherited(self, *args, **kwargs)
    guarded.__name__, guarded.__doc__ = method, inherited.__doc__
    return guarded


# What would read or write all of a table, and how the error calls it.
WHOLE = {
    'value': 'Reading the value', 'read_value': 'Reading the value', 'read_value_no_copy': 'Reading the value',
    '_dense_var_to_tensor': 'Converting to a tensor',
    'initialized_value': 'Reading the value', 'eval': 'Reading the value', 'gather_nd': 'tf.gather_nd',
    'assign': 'Assigning to all', 'assign_add': 'Adding to all', 'assign_sub': 'Subtracting from all',
    'load': 'Loading the value', 'count_up_to': 'Counting up', 'scatter_sub': 'A scatter',
    'scatter_add': 'A scatter', 'scatter_max': 'A scatter', 'scatter_min': 'A scatter', 'scatter_mul': 'A scatter',
    'scatter_div': 'A scatter', 'scatter_update': 'A scatter', 'batch_scatter_update': 'A scatter',
    'scatter_nd_sub': 'A scatter', 'scatter_nd_add': 'A scatter', 'scatter_nd_update': 'A scatter',
    '_lazy_read': 'A scatter',
    'scatter_nd_max': 'A scatter', 'scatter_nd_min': 'A scatter'}
for _method, _way in WHOLE.items():
    setattr(Table, _method, _whole_only(_method, _way))
