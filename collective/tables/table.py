"""Defines the static table and its slots: they show the whole shape, but hold only the shard."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import tensorflow.compat.v1 as tf

from collective.errors import TableError
from collective.ops import placement
from collective.ops.communication import collectives
from collective.ops.counting import counted
from collective.ops.exchange import dispatch, tensorflow_lookup
from collective.ops.graph import graph_state, graphs
from collective.ops.placement import Placement, RowPlacement
from collective.policy import TablePolicy
from collective.tables import dense_view
from collective.tables.grouping import before_write
from collective.tables.rows import initializers
from collective.tensorflow_internals.checkpoints import tensor_callable
from collective.tensorflow_internals.variables import base, resource_variable_ops

_view = threading.local()
_aliases = itertools.count(-1, -1)  # TensorFlow counts those of variables from 0.


@contextlib.contextmanager
def shard_view() -> Iterator[None]:
    """Makes tables look like their shards inside the context.

    It is for optimizers, which then make slots of the shard's shape.
    """
    previous, _view.on = in_shard_view(), True
    try:
        yield
    finally:
        _view.on = previous


def in_shard_view() -> bool:
    return getattr(_view, "on", False)


@dataclasses.dataclass(frozen=True)
class Named:
    """Stands for the operation of a variable that was made eagerly, which has none."""

    name: str


class _Hidden:
    """Holds the handle of a shard where TensorFlow's eager operations look for one.

    They would read a variable's memory by it, without asking the variable, and compute with a
    single rank's rows. So they ask for the value of the table.

    Args:
        handle: the shard's.
    """

    def __init__(self, handle: tf.Tensor):
        self.handle = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)


class Sharded(resource_variable_ops.ResourceVariable):
    """Holds V rows of dimension D, each on one of N ranks (`collective.ops.placement`).

    Rows are read by `tf.nn.embedding_lookup`, `embedding_lookup_sparse`,
    `safe_embedding_lookup_sparse` and `tf.gather`, and by the feature columns that use them.
    Operations that use a variable as one value (a fetch, `tf.matmul`, slices, `tf.nn.l2_loss`,
    `read_value`) get all rows from all ranks, and `assign`, `assign_add`, `assign_sub` and `load`
    take such a value, the same on every rank (see `collective.tables.dense_view`). Other operations
    would reach only one rank's shard, so they raise `TableError`. With one rank, shard and variable
    are the same.

    Attributes:
        rows: V.
        dim: D.
        shape: [V, D].
        handle: the resource of this rank's shard, [its number of rows, D].
        shard_shape: its shape.
        shows_shard: True if the script sees the shard: in its shape, its value and assignments.
        hashed: True if a key's owner is found by hashing it.
        made_by: how a script of another framework has made it, for errors; '' if it hasn't.
        warned_of_dense_read: True if the user was warned that it is read as one value.
        moves: how often rows of a dynamic table of eager code may have moved, as on all ranks.
        parts_elsewhere: into how many parts the script's partitioner splits it in plain TensorFlow.

    Args:
        rows, dim: V and D.
        placed: the placement of its rows, if it isn't `collective.ops.placement.static`.
        **kwargs: `ResourceVariable`'s; its initial value is the shard's.
    """

    shows_shard = False
    hashed = False
    made_by = ""
    moves = 0
    parts_elsewhere = 1
    rows: Any  # None of dynamic tables.

    def __init__(self, *, rows: int, dim: int, placed: RowPlacement | None = None, **kwargs: Any):
        self.rows, self.dim, self.warned_of_dense_read = rows, dim, False
        self._placed = placed
        self._fetched: tf.Tensor | None = None
        with shard_view():
            super().__init__(**kwargs)
        if isinstance(self._initial_value, tf.Tensor):
            initializers.only_after(self.initializer, self._initial_value)
        self._unread = None if self._is_whole() or self.is_eager else dense_view.unread(self)

    @property
    def _handle(self) -> Any:
        if collectives.size() > 1 and not self.shows_shard and not self._in_graph_mode:
            return self._hidden
        return self._hidden.handle

    @_handle.setter
    def _handle(self, handle: tf.Tensor) -> None:
        self._hidden = _Hidden(handle)

    @property
    def handle(self) -> tf.Tensor:
        return self._hidden.handle

    def __tf_tracing_type__(self, signature_context: Any) -> Any:
        """Has a `tf.function` that gets tables as arguments traced for each of them.

        TensorFlow would call it again with another table of the same shape, and what it was traced
        with would find the rows of the first one.
        """
        spec = super().__tf_tracing_type__(signature_context)
        alias = self.__dict__.setdefault("_alias", next(_aliases))
        signature_context.add_placeholder(alias, self)
        return type(spec)(
            shape=spec.shape, dtype=spec.dtype, trainable=spec.trainable, alias_id=alias
        )

    @property
    def is_eager(self) -> bool:
        """Tells whether it was made eagerly: it belongs to no graph."""
        return not self._in_graph_mode

    @property
    def op(self) -> Any:
        """Returns the operation that holds it; one made eagerly has only its name."""
        return Named(self._shared_name) if self.is_eager else super().op

    @property
    def counts_keys(self) -> bool:
        """Tells whether owners are told how often each key was requested."""
        return False

    @property
    def shape(self) -> tf.TensorShape:
        if self.shows_shard or in_shard_view():
            return self._shape
        return tf.TensorShape([self.rows, self.dim])

    def get_shape(self) -> tf.TensorShape:
        return self.shape

    @property
    def shard_shape(self) -> tf.TensorShape:
        return self._shape

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Looks up rows, for `tf.gather(table, indices)`."""
        if in_shard_view():
            return super().sparse_read(indices, name)
        return tf.nn.embedding_lookup(self, indices, name=name)

    @property
    def placement(self) -> Placement:
        """Returns the placement of its keys on ranks."""
        return self.row_placement

    @property
    def row_placement(self) -> RowPlacement:
        """Returns the placement of its keys on ranks, and on the rows of their shards."""
        return self._placed or placement.static(collectives.size())

    def owners(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the ranks that own the int64 `keys` [K], int32 [K]."""
        return self.placement.owner_tensor(keys)

    def fetch(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the rows of `keys` [K] int64, all of which this rank owns: [K, D].

        The gradient is `IndexedSlices` of the shard.
        """
        return tensorflow_lookup.gather_rows(self, self.row_placement.row(keys), [self.dim])

    def ids_of_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the ids, int64 [K], of `rows` [K] of this rank's shard."""
        if collectives.size() == 1:
            return rows
        return self.row_placement.key(collectives.rank(), tf.cast(rows, tf.int64))

    def rows_of_ids(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the rows of this rank's shard, int64 [K], of `ids` [K], which it owns."""
        return ids if collectives.size() == 1 else self.row_placement.row(tf.cast(ids, tf.int64))

    def check_is_looked_up(self) -> None:
        """Refuses a lookup by TensorFlow's functions if the table doesn't allow it."""

    def __iter__(self) -> Iterator[Any]:
        """Yields the table itself, as if it were the only part of a partitioned variable.

        `list(variable)` of a partitioned variable gives its parts, which lookups accept.
        """
        yield self

    # -- As one value

    def _is_whole(self) -> bool:
        return self.shows_shard or collectives.size() == 1 or in_shard_view()

    def value(self) -> tf.Tensor:
        return super().value() if self._is_whole() else dense_view.read(self)

    def read_value(self) -> tf.Tensor:
        return super().read_value() if self._is_whole() else dense_view.read(self)

    def read_value_no_copy(self) -> tf.Tensor:
        return super().read_value_no_copy() if self._is_whole() else dense_view.read(self)

    def gather_nd(self, indices: Any, name: str | None = None) -> tf.Tensor:
        return (
            super().gather_nd(indices, name)
            if self._is_whole()
            else dense_view.gather_nd(self, indices, name)
        )

    def l2_loss(self, name: str | None = None) -> tf.Tensor:
        """Computes `tf.nn.l2_loss(table)`."""
        if self.rows is None:
            self.refuse("tf.nn.l2_loss")
        return (
            tf.nn.l2_loss(super().value(), name)
            if self._is_whole()
            else dense_view.l2_loss(self, name)
        )

    @property
    def initial_value(self) -> Any:
        return self._initial_value if self._is_whole() else self.refuse("Reading the initial value")

    def _as_graph_element(self) -> Any:
        if self._is_whole():
            return super()._as_graph_element()
        # Name scopes ask for it, too, to find the graph.
        return self._unread if self._fetched is None else self._fetched

    def to_be_fetched(self) -> None:
        """From now on, makes the table's graph element the whole value."""
        if self._is_whole() or self._fetched is not None:
            return
        graph = self.graph
        with graphs.open_for_changes(graph), graph.as_default(), tf.init_scope():
            self._fetched = self._fetchable()

    def _fetchable(self) -> tf.Tensor:
        """Returns what a fetch of the table gives, on several ranks."""
        return dense_view.read(self)

    def eval(self, session: Any = None) -> Any:
        self.to_be_fetched()
        return self._as_graph_element().eval(session=session)

    def load(self, value: Any, session: Any = None) -> None:
        if self._is_whole():
            super().load(value, session)
        else:
            dense_view.load(self, value, session)

    def _serialize_to_tensors(self) -> Any:
        if self._is_whole():
            return super()._serialize_to_tensors()
        if not self.is_eager:
            return self._refuse_checkpoint()

        def read() -> tf.Tensor:
            # Not when a checkpoint is restored, which asks for names and types only.
            return dense_view.read(self) if dense_view.saves_whole() else self._refuse_checkpoint()

        value = tensor_callable.Callable(read, dtype=self.dtype, device=self.device)
        return {base.VARIABLE_VALUE_KEY: value}

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        if self.is_eager and collectives.size() > 1:
            # An optimizer, to which a table looks like its shard, may restore its slots.
            value = restored_tensors[base.VARIABLE_VALUE_KEY]
            with shard_view():
                own = tf.identity(dense_view.local_rows(self, value))
                return super().assign(own, read_value=False)
        return (
            super()._restore_from_tensors(restored_tensors)
            if self._is_whole()
            else self._refuse_checkpoint()
        )

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_whole():
            return super()._export_to_saved_model_graph(*args, **kwargs)
        raise TableError(
            f"A SavedModel of table '{self.op.name}' isn't possible, as its rows are on several "
            "ranks. Export a functional or sequential Keras model by "
            "strategy.export_saved_model(folder, model=model), or save the weights "
            "(model.save_weights('…h5')), and load them outside of scope() into the same model, "
            "which plain TensorFlow can save."
        )

    def _refuse_checkpoint(self) -> NoReturn:
        ways = (
            "tf.train.Checkpoint outside of a tf.function, model.save_weights, or "
            "collective.keras.callbacks.Checkpoint, on all ranks"
            if self.is_eager
            else "tf.train.Saver, or a session with a checkpoint_dir"
        )
        raise TableError(
            f"tf.train.Checkpoint of table '{self.op.name}' isn't possible here, as its rows are "
            f"on several ranks: use {ways}."
        )

    def refuse(self, way: str) -> NoReturn:
        """Raises an error that names the table, and what to do instead of `way`."""
        raise TableError(
            f"{way} of table '{self.op.name}' would see only this rank's {self._shape[0]} of its "
            f"{counted(self.rows, 'row')}. Look up the rows (tf.nn.embedding_lookup, "
            "embedding_lookup_sparse, safe_embedding_lookup_sparse, tf.gather), assign a whole "
            "value, or make the variable outside embedding_scope() to have it whole on every rank."
        )


class Table(Sharded):
    """Holds rows of the model; `tf.get_variable` makes it in embedding_scope().

    It is in `tf.trainable_variables()` under its own name, and can be used like a variable: in
    optimizers, `var_list` and `tf.gradients`.

    Attributes:
        policy: its policy; the code that makes the table sets it.

    Args:
        initializer: fills [V, D]; see `collective.tables.rows.initializers.shard`.
        shape: [V, D].
    """

    policy = TablePolicy()

    def __init__(
        self,
        *,
        initializer: Any,
        shape: tf.TensorShape,
        dtype: tf.DType,
        name: str,
        placed: RowPlacement | None = None,
        **kwargs: Any,
    ):
        rows, dim = shape.as_list()
        self._whole_value: Any = functools.partial(
            initializers.shard, initializer, (rows, dim), dtype, name
        )
        with dispatch.device():
            super().__init__(
                rows=rows,
                dim=dim,
                placed=placed,
                initial_value=lambda: self._whole_value(self.row_placement, collectives.rank()),
                name=name,
                dtype=dtype,
                **kwargs,
            )

    @property
    def initial_value(self) -> Any:
        """Returns the table's initial value: all rows, made on this rank."""
        if self._is_whole():
            return self._initial_value
        return (
            self._whole_value(placement.static(1), 0)
            if self._whole_value
            else self.refuse("Reading the initial value, a checkpoint's,")
        )


def _whole_assignment(method: str) -> Any:
    """Returns `assign`, `assign_add` or `assign_sub` for a whole value, the same on all ranks."""
    inherited = getattr(resource_variable_ops.ResourceVariable, method)

    @functools.wraps(inherited)
    def assign(
        self: Sharded,
        value: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        if self._is_whole():
            before_write(self)
            return inherited(self, value, use_locking, name, read_value)
        if read_value and graphs.is_traced(tf.get_default_graph()):
            raise NotImplementedError(
                f"table '{self.op.name}': {method} in a tf.function returns all rows, which ranks "
                "would exchange after they have agreed on the call. Call it outside of the "
                "function, or with read_value=False."
            )
        given = tf.convert_to_tensor(value, self.dtype)
        if tf.executing_eagerly():
            # A value of another shape on one rank is an error of all, too.
            dense_view.compare_eagerly(self, method, given)
        before_write(self)
        value = dense_view.local_rows(self, given)
        if tf.executing_eagerly():
            with shard_view():
                inherited(self, value, use_locking, name, False)
            return self
        if graphs.is_traced(given.graph):
            graph_state.of(given.graph, dense_view.WholeWrites).made.append((self, given))
        with tf.control_dependencies([dense_view.agreed(self, method)]), shard_view():
            done = inherited(self, tf.identity(value), use_locking, name, False)
        if not read_value:
            return done
        with tf.control_dependencies([done]):
            return dense_view.read(self)

    return assign


def _refusing_on_several_ranks(method: str, way: str) -> Any:
    """Returns the inherited method, which refuses if there are several ranks."""
    inherited = getattr(resource_variable_ops.ResourceVariable, method)

    @functools.wraps(inherited)
    def guarded(self: Sharded, *args: Any, **kwargs: Any) -> Any:
        if not self._is_whole():
            self.refuse(way)
        before_write(self)
        return inherited(self, *args, **kwargs)

    return guarded


# Methods that read or write all of a sharded variable, and their names in errors.
WHOLE_VALUE_METHODS = {
    "value": "Reading the value",
    "read_value": "Reading the value",
    "read_value_no_copy": "Reading the value",
    "_dense_var_to_tensor": "Converting to a tensor",
    "eval": "Reading the value",
    "gather_nd": "tf.gather_nd",
    "assign": "Assigning to all",
    "assign_add": "Adding to all",
    "assign_sub": "Subtracting from all",
    "load": "Loading the value",
}
REFUSED_METHODS = {
    "initialized_value": "initialized_value (take initial_value; gradients of several batches are "
    "added up by strategy.scope(local_steps=…))",
    "count_up_to": "Counting up",
    "scatter_sub": "A scatter",
    "scatter_add": "A scatter",
    "scatter_max": "A scatter",
    "scatter_min": "A scatter",
    "scatter_mul": "A scatter",
    "scatter_div": "A scatter",
    "scatter_update": "A scatter",
    "batch_scatter_update": "A scatter",
    "scatter_nd_sub": "A scatter",
    "scatter_nd_add": "A scatter",
    "scatter_nd_update": "A scatter",
    "_lazy_read": "A scatter",
    "scatter_nd_max": "A scatter",
    "scatter_nd_min": "A scatter",
}
for _method in ("assign", "assign_add", "assign_sub"):
    setattr(Sharded, _method, _whole_assignment(_method))
for _method, _way in REFUSED_METHODS.items():
    setattr(Sharded, _method, _refusing_on_several_ranks(_method, _way))


def mark_shard(variable: Any, table: Table) -> None:
    """Marks `variable` as having a row for each row of `table`'s shard.

    It is never made equal over ranks.
    """
    if variable is None:
        return
    variable._collective_shard = table
    if variable is not table and table.is_eager:
        table.__dict__.setdefault("_slots", weakref.WeakValueDictionary())[id(variable)] = variable


def shard_of(variable: Any) -> Table | None:
    """Returns the table of which `variable` is the shard or a slot; None if it is replicated."""
    table: Table | None = (
        variable if isinstance(variable, Table) else getattr(variable, "_collective_shard", None)
    )
    return table


def is_replicated(variable: Any) -> bool:
    return shard_of(variable) is None


# Those that eager code has made, replicated ones, too, by their ids: no graph has them.
_eager_tables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def note_eager(table: Any) -> None:
    """Notes a table that eager code has made."""
    _eager_tables[id(table)] = table


def eager_tables() -> list[Any]:
    """Returns the tables that eager code has made, replicated ones, too, and still uses."""
    return list(_eager_tables.values())


def eager_slots(table: Any) -> list[Any]:
    """Returns the slots of a table that eager code has made."""
    return list(getattr(table, "_slots", {}).values())


def mark_replicated_table(variable: Any) -> None:
    """Marks an ordinary variable as a table that `placement` or `replicate_below` replicates."""
    variable._collective_replicated_table = True


def is_replicated_table(variable: Any) -> bool:
    """Tells whether `variable` would be a `Table` if its placement were 'rows'."""
    return getattr(variable, "_collective_replicated_table", False)


def replicated_slots(table: Any, variables: Iterable[Any]) -> list[Any]:
    """Returns the slots of a table that is an ordinary variable on every rank."""
    name, rows = name_of(table), table.shape[0]
    return [
        v
        for v in variables
        if name_of(v).rpartition("/")[0] == name and v.shape.rank == 2 and v.shape[0] == rows
    ]


def name_of(variable: Any) -> str:
    """Returns the name of a variable of a graph, or of eager code."""
    return str(variable.name).partition(":")[0]


def is_movable(variable: Any) -> bool:
    """Tells whether the values of `variable` are numbers, which can be compared and sent."""
    return variable.dtype.base_dtype not in (tf.string, tf.variant, tf.resource)
