"""Decides which variables become tables, and makes them in `tf.get_variable`."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives
from collective.ops.graph import graph_state, graphs
from collective.ops.placement import Placement, dynamic, static
from collective.options import EmbeddingOptions
from collective.planner.workload import TableWork
from collective.policy import TablePolicy
from collective.scope import SCOPES
from collective.startup import STARTUP
from collective.tables import served_table
from collective.tables.automatic_placement import AUTOMATIC
from collective.tables.dynamic_table import DynamicTable
from collective.tables.policies import admission, eviction
from collective.tables.policies.open_dimension import policy_in
from collective.tables.rows import initializers, rows_in_file
from collective.tables.table import (
    Table,
    in_shard_view,
    is_replicated_table,
    mark_replicated_table,
    note_eager,
)
from collective.tables.updates import weight_bound
from collective.tensorflow_internals.graphs import make_tensor_proto, tensor_shape


def _shape_of(shape: Any, initializer: Any) -> tf.TensorShape | None:
    if shape is None and initializer is not None and not callable(initializer):
        shape = initializer.shape if hasattr(initializer, "shape") else np.shape(initializer)
    return None if shape is None else tensor_shape.as_shape(shape)


def _dtype_of(value: Any) -> Any:
    """Returns the type that `value` has as a tensor."""
    if hasattr(value, "dtype"):
        return value.dtype
    return make_tensor_proto(value).dtype


def is_dynamic(shape: Any) -> bool:
    """Tells whether `shape` is [None, D], a dynamic table's."""
    try:
        table_shape = tensor_shape.as_shape(shape)
    except (TypeError, ValueError):  # TensorFlow takes more than that for a shape.
        return False
    if table_shape.rank != 2:
        return False
    rows, dim = table_shape.as_list()
    return rows is None and dim is not None


def is_embedding(name: str, partitioner: Any) -> bool:
    """Tells whether a variable that the script hasn't marked is an embedding.

    Weights of embedding columns are, and partitioned variables, except for the weights of layers.
    """
    last = name.rpartition("/")[2]
    return last == "embedding_weights" or partitioner is not None and last not in LAYER_WEIGHTS


# Names of the matrices of TensorFlow's layers.
LAYER_WEIGHTS = ("kernel", "recurrent_kernel", "depthwise_kernel", "weights")
# Of a dynamic table that is made outside of embedding_scope().
OUTSIDE = EmbeddingOptions()


def table_getter(
    getter: Callable[..., Any],
    name: str,
    shape: Any = None,
    dtype: Any = None,
    initializer: Any = None,
    partitioner: Any = None,
    options: EmbeddingOptions = OUTSIDE,
    kind: type[Table] | None = None,
    **kwargs: Any,
) -> Any:
    """Makes a `Table` of a 2-D floating-point variable: a variable-scope getter.

    [V, D] is a static table if V is at least `options.min_rows`; [None, D] is a dynamic one. A
    static table that the options replicate is an ordinary variable with a table's initial value.
    A table that the options put on one rank has all rows there.

    Other variables (that are no matrix, integers, local ones, slots that an optimizer makes) are
    made as outside: replicated. No variable is partitioned: in embedding_scope() the library, not a
    partitioner, decides how to shard a table. `kind` is a table's class.
    """
    _refuse_in_function(name)
    own_policy = policy_in(shape)
    policy = own_policy or options.policy or TablePolicy()
    if own_policy is not None and own_policy.initializer is not None:
        initializer = own_policy.initializer
    table_shape = _shape_of(shape, initializer)
    if initializer is not None and not callable(initializer) and not is_dynamic(shape):
        dtype = _dtype_of(initializer)  # As in TensorFlow, whatever `dtype` is.
    dtype = tf.as_dtype(dtype or getattr(initializer, "dtype", None) or tf.float32).base_dtype
    if is_dynamic(shape) and not dtype.is_floating:
        raise ValueError(
            f"dynamic table '{name}': values of a dynamic table are floating-point numbers, not "
            f"{dtype.name}."
        )
    # as_list: an element of a shape is a Dimension in TensorFlow's first version.
    rows, dim = None, None
    if table_shape is not None and table_shape.rank == 2:
        rows, dim = table_shape.as_list()
    if (
        in_shard_view()
        or dim is None
        or not dtype.is_floating
        or rows is not None
        and rows < options.min_rows
        or tf.GraphKeys.LOCAL_VARIABLES in (kwargs.get("collections") or ())
    ):
        return getter(
            name, shape=shape, dtype=dtype, initializer=initializer, partitioner=None, **kwargs
        )
    if initializer is None:
        initializer = policy.initializer
    if initializer is None and not is_dynamic(shape):
        initializer = tf.glorot_uniform_initializer()  # tf.get_variable's own default.
    weight_bound.check(policy, dtype, name)
    placement = _placement(name, rows, dim, dtype, options, policy)
    if placement == "replicated":
        return _replicated_table(getter, name, shape, dtype, initializer, policy, **kwargs)
    made: list[Table] = []

    def create(next_creator: Any, **arguments: Any) -> Any:
        del next_creator
        served = served_table.served_graph(tf.get_default_graph())
        if served is not None:
            return served.table(
                arguments["name"],
                rows,
                dim,
                dtype,
                unknown=policy.default_value_no_permission,
                trainable=arguments.get("trainable"),
                collections=arguments.get("collections"),
            )
        if not tf.executing_eagerly():
            STARTUP.makes_table(graphs.outermost(tf.get_default_graph()))
        placed: Any = _placed(placement, rows, dim * int(dtype.size))
        of_kind = {"policy": policy} if is_dynamic(table_shape) else {}
        table = (kind or (DynamicTable if is_dynamic(table_shape) else Table))(
            **of_kind,
            placed=placed,
            initializer=initializer,
            shape=table_shape,
            dtype=dtype,
            name=arguments["name"],
            **{
                key: arguments.get(key)
                for key in (
                    "trainable",
                    "collections",
                    "caching_device",
                    "validate_shape",
                    "constraint",
                    "synchronization",
                    "aggregation",
                )
            },
        )
        table.policy = policy
        if isinstance(table, DynamicTable):
            rows_in_file.prepare(table)
            admission.prepare(table, arguments.get("collections"))
            eviction.prepare(table, arguments.get("collections"))
            if table.is_eager:
                table.follow_policy(table.store(None))  # It was made with the table.
        made.append(table)
        return table

    kwargs["use_resource"] = True
    placeholder = initializer
    if is_dynamic(table_shape):
        # get_variable takes only a known number of rows, and an initializer for them.
        shape, placeholder = [1, dim], tf.zeros_initializer()
    elif not callable(initializer):
        shape = None  # get_variable takes an array's or a tensor's own.
    with tf.variable_creator_scope(create):
        variable = getter(
            name, shape=shape, dtype=dtype, initializer=placeholder, partitioner=None, **kwargs
        )
    if own_policy is not None and isinstance(variable, Table) and variable.policy != own_policy:
        raise ValueError(
            f"table '{name}' is there already with {variable.policy}, and is asked for with "
            f"{own_policy}. Give both places the same options."
        )
    if made:
        made[0].parts_elsewhere = _parts(partitioner, table_shape, dtype)
        _start_from_first_rows(policy, variable)
        if tf.executing_eagerly():
            note_eager(variable)
    return variable


def _parts(partitioner: Any, shape: tf.TensorShape, dtype: tf.DType) -> int:
    """Returns into how many parts of whole rows TensorFlow would split a variable."""
    if not callable(partitioner) or not shape.is_fully_defined():
        return 1
    try:
        return int(partitioner(shape=shape, dtype=dtype)[0])
    except (TypeError, ValueError):
        return 1  # TensorFlow might refuse it: it has no effect here.


def _start_from_first_rows(policy: TablePolicy, variable: Any) -> None:
    """Lets a table start from the checkpoint that its policy names, if it names one."""
    first_rows = policy.first_rows
    if first_rows is not None:
        name = first_rows.name or variable.op.name
        tf.train.init_from_checkpoint(first_rows.checkpoint, {name: variable})


@dataclasses.dataclass
class WholeTables:
    """Remembers the sizes of the tables that each rank has whole.

    Nobody knows how many rows a dynamic table will have, so dynamic tables are dealt to ranks by
    themselves.

    Attributes:
        of_static: by rank, the bytes of the weights of static tables.
        of_dynamic: by rank, the bytes of a row of each dynamic table, added up.
    """

    of_static: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    of_dynamic: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)

    def place(self, rows: int | None, row_bytes: int, only: int | None) -> Placement:
        """Returns the placement of a table, and counts it: the same on all ranks.

        Args:
            rows: V; None if the table is dynamic.
            row_bytes: the bytes of a row's weights.
            only: the rank. None: that with the fewest bytes of such tables, the first of several.
        """
        ranks, sizes = collectives.size(), self.of_dynamic if rows is None else self.of_static
        if only is None:
            only = min(range(ranks), key=lambda rank: sizes[rank])
        placed = dynamic(ranks, only) if rows is None else static(ranks, only)
        assert placed.holder is not None
        sizes[placed.holder] += row_bytes if rows is None else rows * row_bytes
        return placed


def _placed(where: str, rows: int | None, row_bytes: int) -> Placement | None:
    """Returns where the rows of a table are to be; None for its share on each rank.

    Args:
        where: 'rows', 'whole' or 'whole:K'.
        rows, row_bytes: as for `WholeTables.place`.
    """
    name, _, number = where.partition(":")
    if name != "whole":
        return None
    whole_tables = graph_state.of(graphs.outermost(tf.get_default_graph()), WholeTables)
    return whole_tables.place(rows, row_bytes, int(number) if number else None)


def _placement(
    name: str,
    rows: int | None,
    dim: int,
    dtype: tf.DType,
    options: EmbeddingOptions,
    policy: TablePolicy,
) -> str:
    """Returns the placement of the table [rows, dim]: 'rows', 'replicated', 'whole' or 'whole:K'.

    Raises:
        ValueError: placement='replicated' demands it, but the table is dynamic or has a bound; or
            the file of tables that placement='auto' is to follow isn't one.
        OSError: that file can't be read.
        RankError: placement='auto', and another rank makes no table now.
    """
    served = served_table.served_graph(tf.get_default_graph())
    if served is not None and served.has_table(name):
        return "rows"  # Whatever its placement was in training, it is served by its parts.
    bound = policy.weight_bound
    if rows is None and options.placement == "replicated":
        raise ValueError(
            f"dynamic table '{name}': placement='replicated' is for tables with a known number of "
            "rows, and this one gets rows as keys come. Make it in "
            "embedding_scope(placement='rows') or 'whole', or give it a shape [V, D]."
        )
    if options.placement == "replicated":
        if bound is not None:
            raise ValueError(
                f"table '{name}': placement='replicated' makes an ordinary variable, whose weights "
                f"nothing keeps within weight_bound={bound!r}. Make it in "
                "embedding_scope(placement='rows'), or leave the bound out."
            )
        return "replicated"
    is_small = rows is not None and rows * dim * int(dtype.size) < int(options.replicate_below)
    if is_small and bound is None:
        return "replicated"
    if not options.is_automatic:
        return options.placement
    _, _, file = options.placement.partition(":")
    if rows is None and (served is not None or not file):
        return "rows"  # Only a file says how many rows are expected.
    if served is not None:
        return "replicated"  # as it was in training: the checkpoint has it as a variable
    table = TableWork(
        name,
        rows or 1,
        dim,
        type=dtype.name,
        dynamic=rows is None,
        bounded=bound is not None,
    )
    return AUTOMATIC.choose(file, table).placement


def _replicated_table(
    getter: Callable[..., Any],
    name: str,
    shape: Any,
    dtype: tf.DType,
    initializer: Any,
    policy: TablePolicy,
    **kwargs: Any,
) -> Any:
    """Makes an ordinary variable that starts with the values of a `Table` of this name."""
    whole_value = initializer
    if served_table.served_graph(tf.get_default_graph()) is not None:
        pass  # It is never initialized, and plain TensorFlow must be able to run the graph.
    elif callable(initializer):

        def whole_value(shape: Any, dtype: Any = None) -> tf.Tensor:
            rows, dim = tensor_shape.as_shape(shape).as_list()
            return initializers.shard(
                initializer, (rows, dim), tf.as_dtype(dtype), name, static(1), 0
            )

    if not callable(initializer):
        shape = None  # get_variable takes an array's or a tensor's own.
    kwargs["use_resource"] = True  # like a table
    variable = getter(
        name, shape=shape, dtype=dtype, initializer=whole_value, partitioner=None, **kwargs
    )
    if isinstance(variable, Table) or is_replicated_table(variable):
        return variable  # It was there before.
    mark_replicated_table(variable)
    if tf.executing_eagerly():
        note_eager(variable)
    if isinstance(variable._initial_value, tf.Tensor):
        initializers.only_after(variable.initializer, variable._initial_value)
    _start_from_first_rows(policy, variable)
    return variable


def _refuse_in_function(name: str) -> None:
    """Refuses a table that is made in the graph of a function, which each call would make again.

    Raises:
        RuntimeError: it is, and eager code calls the function.
    """
    if tf.executing_eagerly_outside_functions() and not tf.executing_eagerly():
        raise RuntimeError(
            f"embedding_scope(): '{name}' is made inside a tf.function. Make it outside, once: "
            "Keras's layers do so by themselves, in `build`."
        )


def get_variable(
    original: Any, scope: Any, store: Any, name: str, *args: Any, **kwargs: Any
) -> Any:
    """Makes tables, in place of `VariableScope.get_variable`.

    [None, D] is always a dynamic table: TensorFlow has no such variable.
    """
    options = SCOPES.embedding_options
    if options is not None and options.chosen:
        partitioner = kwargs.get("partitioner") or scope.partitioner
        options = options if is_embedding(name, partitioner) else None
    if options is not None or is_dynamic(args[0] if args else kwargs.get("shape")):
        getter: Callable[..., Any] = functools.partial(table_getter, options=options or OUTSIDE)
        users_getter = kwargs.get("custom_getter") or scope.custom_getter
        if users_getter is not None:
            getter = _inside(users_getter, getter)
        kwargs["custom_getter"] = getter
    return original(scope, store, name, *args, **kwargs)


def _inside(outer: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    """Nests two getters: the outer one may rename or cast; its `getter` makes the table."""

    def getter(getter: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return outer(functools.partial(inner, getter), *args, **kwargs)

    return getter
