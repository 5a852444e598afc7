"""DeepRec's `tf.get_embedding_variable`, and how many rows tables have."""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import collectives, gate
from collective.scope import SCOPES
from collective.tables.table import Table


def get_embedding_variable(
    name: str,
    embedding_dim: int,
    key_dtype: Any = tf.int64,
    value_dtype: Any = tf.float32,
    initializer: Any = None,
    trainable: bool = True,
    collections: Any = None,
    partitioner: Any = None,
    ev_option: Any = None,
) -> Any:
    """A dynamic table: an embedding for any key, without a vocabulary. The signature is DeepRec's.

    `tf.get_variable(name, [None, embedding_dim])` inside scope() makes the same. It is sharded over
    all ranks by a mix of the key, lies in the CPU's memory, and grows with the keys that training
    looks up; elsewhere an unknown key yields zeros. Row and slots start from (seed, name, key)
    alone, whatever the number of ranks and the order in which keys come.

    Args:
        name: the variable's, in the variable scope that is open; with reuse, the one that is there.
        embedding_dim: D.
        key_dtype: tf.int64, tf.int32 or tf.string: what is looked up. Keys of any integer type are
            the same keys; strings become keys by `collective.ops.key_hashing.of_strings`.
        value_dtype: a floating-point type.
        initializer: fills a row: TensorFlow's zeros, ones, constant (one number, or one row of D),
            uniform, normal, truncated normal, or variance scaling by fan_out. Default: truncated
            normal, standard deviation 1 / sqrt(D).
        trainable, collections: as for `tf.get_variable`.
        partitioner: no effect: the table is sharded over all ranks anyway.
        ev_option: DeepRec's options of admission, eviction and storage: accepted, no effect yet,
            which a warning says.

    Returns:
        A `collective.tables.dynamic_table.DynamicTable`.

    Raises:
        ValueError: outside strategy.scope(); an initializer or a type that isn't one of those
            above.
        ImportError: the compiled key map isn't built.
    """
    del partitioner
    check_scope(f"get_embedding_variable('{name}')")
    keys, values = tf.as_dtype(key_dtype), tf.as_dtype(value_dtype)
    if keys not in (tf.int64, tf.int32, tf.string):
        raise ValueError(
            f"dynamic table '{name}': key_dtype is tf.int64, tf.int32 or tf.string, not "
            f"{keys.name}."
        )
    if not isinstance(embedding_dim, int) or embedding_dim < 1:
        raise ValueError(
            f"dynamic table '{name}': embedding_dim must be a positive integer, not "
            f"{embedding_dim!r}."
        )
    if ev_option is not None:
        warn_of_option(f"dynamic table '{name}'")
    made = tf.get_variable(
        name,
        [None, embedding_dim],
        values,
        initializer,
        trainable=trainable,
        collections=collections,
    )
    return made


def warn_of_option(what: str) -> None:
    """Of DeepRec's options, to the caller's caller."""
    warnings.warn(
        f"{what}: ev_option has no effect yet: every key is admitted and none is evicted. Leave it "
        "out to silence this.",
        stacklevel=3,
    )


def check_scope(what: str) -> None:
    """Raises ValueError outside of strategy.scope()."""
    if not SCOPES.is_open:
        raise ValueError(
            f"{what} makes a dynamic table, which needs strategy.scope(): with strategy.scope(), "
            "tf.Graph().as_default(): …"
        )


def embedding_sizes() -> dict[str, tf.Tensor]:
    """The rows on each rank of every table of the graph, by the table's name: int64 [N].

    Every rank runs them together, like a training step; it isn't one. A dynamic table's are those
    of some moment of the run.
    """
    ranks = collectives.size()
    tables = sorted(
        (v for v in tf.global_variables() if isinstance(v, Table)),
        key=lambda table: str(table.op.name),
    )
    sizes = {
        table.op.name: tf.constant(
            [len(range(r, table.rows, ranks)) for r in range(ranks)], tf.int64
        )
        for table in tables
        if table.rows is not None
    }
    dynamic: list[Any] = [table for table in tables if table.rows is None]
    if dynamic:
        mine = tf.stack([table.count() for table in dynamic])
        if ranks > 1:
            zero = gate.gates_of(tf.get_default_graph()).beside([mine]).zero
            mine = collectives.allgather(mine, collectives.unique_name("embedding_sizes"), zero)
        all_ = tf.reshape(mine, [ranks, len(dynamic)])
        sizes.update({table.op.name: all_[:, i] for i, table in enumerate(dynamic)})
    return {table.op.name: sizes[table.op.name] for table in tables}
