"""Keeps what the library knows about a graph outside of the graph: one record per graph.

A record lives and dies with its graph. The graph of a function or a branch has its own record:
`state_of(outermost(graph))` is the record of the graph that a session runs.

The types of some fields are defined in layers above this one. They are typed Any here; the module
that the field's documentation names has a typed function for it (`gates_of`, `lookups_of`, …).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow.compat.v1 as tf


@dataclasses.dataclass
class GraphState:
    """Records everything that is remembered about one graph, by layer.

    Attributes:
        gates: the gates and checks of the graph (`collective.ops.communication.gate.gates_of`).
        gate_by_collective: the gate for which each collective waits, by the collective's name.
        gradient_wire_types: the types in which gradients of rows travel, by the casts' names.
        flat_gradients: the operation that sends a gradient of rows to their owners, by the
            operation through which the rows came (`collective.strategies.two_level_exchange`).
        distinct_indices: the names of indices that have no row twice.
        pool_gradients: the members of a group whose gradients an operation sums, by the operation.
        training_flag: bool scalar, True in runs that update something
            (`collective.ops.graph.training_flag`).
        function_calls: the functions that only one call uses
            (`collective.ops.graph.function_copies`).
        replicated_operations: operations whose results are the same on all ranks, though their
            inputs aren't.
        groups: the groups of lookups (`collective.strategies.grouped_exchange.groups_of`).
        lookups: the lookups as they were written (`collective.tables.grouping.lookups_of`).
        served_from: the checkpoint that the graph is served from, while one is exported
            (`collective.tables.served_table.served_graph`).
        seen_by_session: the highest number of an operation that a session has seen: TensorFlow
            accepts no change of such operations any more.
        broadcasts: the assignments of rank 0's values, by the variables' names
            (`collective.coordination.initial_broadcast`).
        run_extension: takes part in the graph's runs in addition to the script
            (`collective.coordination.run_extension.extension_of`).
        reduced_values: values that are reduced over all ranks, by the operations that return them
            (`collective.ops.communication.fused_reductions`).
        joined_sums: sums that travel alone or with gradients
            (`collective.ops.communication.fused_reductions`).
        open_places: places that allreduces of gradients keep for other values
            (`collective.ops.communication.dense_allreduce`).
        slice_means: sparse gradients whose mean may travel as a matrix, by the names of their
            values (`collective.ops.exchange.slice_means`).
        metric_updates: this rank's own updates, by the operations that return their sums over ranks
            (`collective.replication.metrics`).
        metric_variables: the variables of Keras's metrics, which are in no collection, and of an
            Estimator's (`collective.replication.metric_states`).
        metric_obstacles: why the ranks' states of a metric can't be combined, by the variables'
            names.
        metric_reads: the metrics' states of this rank, by the tensors' names
            (`collective.replication.metric_reads`).
        reduced_reads: the values of all ranks, by the names of tensors with this rank's values
            (`collective.coordination.reduced_reads`).
        refused_reads: why operations must not run, or tensors (by their names) not be fetched.
        refusals: how often `refused_reads` has changed.
        pending_syncs: assignments that are still to be synced
            (`collective.replication.pending_syncs`).
        gradient_proxies: what scripts get for gradients that are summed over several batches,
            by its operations (`collective.gradients.accumulation`).
        kept_batches: int64 scalars, numbers of batches whose gradients a session keeps for a later
            run (`collective.gradients.accumulation`). These gradients know rows by their numbers.
        library_operations: the numbers of the first and the last operation of each part that the
            library has made itself (`collective.ops.graph.library_operations`).
        optimizer_operations: the same for operations that optimizers have made to update tables.
        own_optimizer_operations: the same for a script's own optimizers.
        table_gradients: the gradients of tables, by the names of their indices
            (`collective.gradients.table_gradients`).
        shard_gradients: what optimizers get instead of a script's gradients of tables, and whether
            it is rows of the shard, by name.
        gradient_parts: what a script makes of tables' gradients
            (`collective.gradients.rank_parts`).
        refused_operations: why no run may need an operation, by the operation.
        prefetch_refused: why keys of the graph are not to be exchanged ahead; '' if they may be.
        prefetch_settled_version: the graph's version when prefetching was last considered.
        keras_seeds: how many seeds Keras has got (`collective.wrappers.keras.create_seed`).
        estimator: the estimator whose model_fn builds the graph.
        training_run: the footprint of the first training run, once there was one.
        received_bytes: bytes per step by the names of the collectives, from the last profile, on
            this rank.
        keys_per_owner: keys per step that each rank was asked for, by the names of the tables, from
            the last profile.
        plan_notes: what parts of the library add to the plan, by their names.
        prepared_version: the graph's version when `collective.interception.graph_passes` last
            prepared it.
        input_is_dealt: whether an Estimator has dealt the batches of its input to the ranks.
        dealt_input: what is known about the datasets that are dealt to the ranks
            (`collective.data.dealt_input`).
        needs_all_data: why training must not end before all ranks are out of data; '' if it may.
        evicting_tables: the tables whose rows are evicted
            (`collective.tables.policies.eviction`).
        drawing_tables: the tables that admit keys by chance
            (`collective.tables.policies.admission`).
        next_step: int64 scalar, the global step to which a run leads
            (`collective.tables.policies.next_step`).
        tables_with_files: the tables whose rows go to files
            (`collective.tables.rows.rows_in_file`).
        batch_counter: counts the batches that runs take from iterators
            (`collective.coordination.batch_counter.counter_of`).
        input_check: the result of comparing the ranks' first batches
            (`collective.monitoring.input_check`).
        announces_writes: whether writes of tables and slots are announced
            (`collective.tables.updates.write_announcements`).
        announced: operations before which a write is announced, with the numbers of the inputs
            that are the written variables.
        unannounced: the names of variables written by operations that a session had seen before
            their writes were to be announced.
        incremental_folders: folders in which increments follow the checkpoints of its sessions
            (`collective.checkpoint.saving.running_chain`).
    """

    gates: Any = None
    gate_by_collective: dict[str, Any] = dataclasses.field(default_factory=dict)
    gradient_wire_types: dict[str, tf.DType] = dataclasses.field(default_factory=dict)
    flat_gradients: dict[tf.Operation, Any] = dataclasses.field(default_factory=dict)
    distinct_indices: set[str] = dataclasses.field(default_factory=set)
    pool_gradients: dict[tf.Operation, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    training_flag: tf.Tensor | None = None
    function_calls: Any = None
    replicated_operations: set[tf.Operation] = dataclasses.field(default_factory=set)
    groups: list[Any] = dataclasses.field(default_factory=list)
    lookups: Any = None
    served_from: Any = None
    seen_by_session: int = 0
    broadcasts: dict[tuple[str, ...], list[tf.Operation]] = dataclasses.field(default_factory=dict)
    run_extension: Any = None
    reduced_values: dict[tf.Operation, Any] = dataclasses.field(default_factory=dict)
    joined_sums: list[Any] = dataclasses.field(default_factory=list)
    open_places: list[Any] = dataclasses.field(default_factory=list)
    slice_means: dict[str, Any] = dataclasses.field(default_factory=dict)
    metric_updates: dict[tf.Operation, tf.Operation] = dataclasses.field(default_factory=dict)
    metric_variables: list[Any] = dataclasses.field(default_factory=list)
    metric_obstacles: dict[str, str] = dataclasses.field(default_factory=dict)
    metric_reads: Any = None
    reduced_reads: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)
    refused_reads: dict[tf.Operation | str, str] = dataclasses.field(default_factory=dict)
    refusals: int = 0
    pending_syncs: Any = None
    gradient_proxies: dict[tf.Operation, Any] = dataclasses.field(default_factory=dict)
    kept_batches: list[tf.Tensor] = dataclasses.field(default_factory=list)
    library_operations: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    optimizer_operations: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    own_optimizer_operations: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    table_gradients: dict[str, Any] = dataclasses.field(default_factory=dict)
    shard_gradients: dict[str, tuple[tf.Tensor, Any, bool]] = dataclasses.field(
        default_factory=dict
    )
    gradient_parts: Any = None
    refused_operations: dict[tf.Operation, str] = dataclasses.field(default_factory=dict)
    prefetch_refused: str = ""
    prefetch_settled_version: int | None = None
    keras_seeds: int = 0
    estimator: Any = None
    training_run: Any = None
    received_bytes: dict[str, float] = dataclasses.field(default_factory=dict)
    keys_per_owner: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    plan_notes: dict[str, str] = dataclasses.field(default_factory=dict)
    prepared_version: tuple[Any, ...] | None = None
    input_is_dealt: bool = False
    dealt_input: Any = None
    needs_all_data: str = ""
    evicting_tables: list[Any] = dataclasses.field(default_factory=list)
    drawing_tables: list[Any] = dataclasses.field(default_factory=list)
    next_step: tf.Tensor | None = None
    tables_with_files: list[Any] = dataclasses.field(default_factory=list)
    batch_counter: Any = None
    input_check: Any = None
    announces_writes: bool = False
    announced: set[tuple[tf.Operation, int]] = dataclasses.field(default_factory=set)
    unannounced: set[str] = dataclasses.field(default_factory=set)
    incremental_folders: set[str] = dataclasses.field(default_factory=set)


def state_of(graph: tf.Graph) -> GraphState:
    """Returns the record of `graph`; it is made at its first use."""
    state: GraphState | None = getattr(graph, "_collective_state", None)
    if state is None:
        state = graph._collective_state = GraphState()
    return state
