"""Makes DeepRec's embedding variables, and counts and clears the rows of tables."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.communication import collectives, gate
from collective.policy import PolicyOption, TablePolicy, is_whole, policy_of
from collective.scope import SCOPES
from collective.tables.dynamic_table import DynamicTable
from collective.tables.policies.open_dimension import OpenDimension
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
    ev_option: TablePolicy | PolicyOption | None = None,
    *,
    steps_to_live: int | None = None,
) -> Any:
    """Makes a dynamic table: an embedding for any key, without a vocabulary.

    The signature is DeepRec's.

    `tf.get_variable(name, [None, embedding_dim])` inside scope() makes the same. It is sharded over
    all ranks by a hash of the key, and is in the GPU's memory if tables are on a GPU, else in the
    host's. It grows with the keys that training looks up; outside of training an unknown key yields
    zeros. Initial values of a row and its slots depend only on (seed, name, key), not on the number
    of ranks or the order in which keys come.

    Args:
        name: the variable's name in the current variable scope; with reuse, the existing variable
            is returned.
        embedding_dim: D.
        key_dtype: the keys' type, tf.int64, tf.int32 or tf.string. Keys of any integer type are
            the same keys; strings become keys by `collective.ops.key_hashing.of_strings`.
        value_dtype: a floating-point type.
        initializer: fills a row: TensorFlow's zeros, ones, constant (one number, or one row of D),
            uniform, normal, truncated normal, or variance scaling by fan_out. Default: truncated
            normal, standard deviation 1 / sqrt(D).
        trainable, collections: as for `tf.get_variable`.
        partitioner: no effect, since the table is sharded over all ranks anyway.
        ev_option: the table's policy: a `collective.TablePolicy`, DeepRec's
            `EmbeddingVariableOption` or PERSIA's `EmbeddingConfig`. A warning names the options
            that have no effect yet. Its initializer takes precedence over `initializer`. Default:
            the policy of the current embedding_scope(), if any.
        steps_to_live: in older scripts for DeepRec, the policy's `steps_to_live`; 0 for none. That
            of `ev_option` takes precedence. Default None.

    Returns:
        A `collective.tables.dynamic_table.DynamicTable`.

    Raises:
        TypeError: `ev_option` has none of these types.
        ValueError: it is called outside strategy.scope(), an argument isn't among the values
            above, or the variable is there already with another policy.
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
    if steps_to_live is not None and not (is_whole(steps_to_live) and steps_to_live >= 0):
        raise ValueError(
            f"dynamic table '{name}': steps_to_live is a whole number from 0, or None, not "
            f"{steps_to_live!r}."
        )
    policy = policy_of(ev_option, f"dynamic table '{name}': ev_option")
    if steps_to_live and (policy is None or policy.steps_to_live is None):
        policy = dataclasses.replace(policy or TablePolicy(), steps_to_live=steps_to_live)
    return tf.get_variable(
        name,
        [None if policy is None else OpenDimension(policy), embedding_dim],
        values,
        initializer,
        trainable=trainable,
        collections=collections,
    )


def check_scope(what: str) -> None:
    """Raises ValueError outside of strategy.scope()."""
    if not SCOPES.is_open:
        raise ValueError(
            f"{what} makes a dynamic table, which needs strategy.scope(): with strategy.scope(), "
            "tf.Graph().as_default(): …. For a script of another framework that has no scope: "
            "collective launch --as … --embedding-scope auto"
        )


def embedding_sizes() -> dict[str, tf.Tensor]:
    """Returns the rows on each rank of every table of the graph, by the table's name: int64 [N].

    All ranks run them together, like a training step, though it isn't one. The numbers of a dynamic
    table are those at some moment of the run.
    """
    ranks = collectives.size()
    tables = sorted(
        (v for v in tf.global_variables() if isinstance(v, Table)),
        key=lambda table: str(table.op.name),
    )
    sizes: dict[str, tf.Tensor] = {}
    dynamic: list[Any] = []
    for table in tables:
        if table.rows is None:
            dynamic.append(table)
            continue
        sizes[table.op.name] = tf.constant(table.row_placement.counts(table.rows), tf.int64)
    if dynamic:
        counts = tf.stack([table.count() for table in dynamic])
        if ranks > 1:
            zero = gate.gates_of(tf.get_default_graph()).of_collective([counts]).zero
            counts = collectives.allgather(counts, collectives.unique_name("embedding_sizes"), zero)
        counts = tf.reshape(counts, [ranks, len(dynamic)])
        sizes.update({table.op.name: counts[:, i] for i, table in enumerate(dynamic)})
    return {table.op.name: sizes[table.op.name] for table in tables}


def clear_embeddings(session: Any) -> dict[str, int]:
    """Removes all rows of the dynamic tables of a session's graph, on this rank.

    Call it on every rank between two steps. A key that comes back starts as a new one, as after
    `DynamicTable.remove`. Static tables and all other variables keep their values.

    Args:
        session: a session, also a `MonitoredSession`.

    Returns:
        How many rows each table had here, by its name.
    """
    variables = session.graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    tables = [table for table in variables if isinstance(table, DynamicTable)]
    return {table.op.name: table.clear(session) for table in tables}
