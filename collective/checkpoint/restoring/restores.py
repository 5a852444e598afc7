"""Restores inside scope(): changes nothing on any rank before all ranks have read everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files import chain, storage, tensor_bundle
from collective.checkpoint.files.chain_names import split
from collective.checkpoint.reading import compatibility, merged_reader
from collective.checkpoint.rows import table_io
from collective.checkpoint.rows.shards import dynamic_tables
from collective.checkpoint.saving import background
from collective.checkpoint.saving.gathered_state import gathered_states
from collective.checkpoint.saving.saver import (
    common_prefix,
    make_unsharded_def,
    note_last_checkpoint,
    optional_variables,
    shards_of_saver,
    unsharded_def,
    unsharded_variables,
)
from collective.coordination import barrier
from collective.coordination.session_state import state_of_session
from collective.gradients import accumulation
from collective.ops.communication import collectives
from collective.ops.counting import counted
from collective.ops.graph import graphs
from collective.ops.graph.sessions import run_unpatched
from collective.ops.rows import file_systems
from collective.scope import SCOPES
from collective.startup import STARTUP
from collective.tables import served_table
from collective.tables.policies import eviction


def restore(original: Any, saver: Any, sess: Any, save_path: Any) -> None:
    """Replaces `Saver.restore`.

    Gradients that were summed over batches (scope(local_steps=…)) are discarded.
    """
    file_systems.check(save_path)
    if not hasattr(sess, "graph"):
        # Eager code has no session: it restores only this rank's variables.
        return original(saver, sess, save_path)
    background.settle(sess)
    with STARTUP.doing(sess.graph, f"restoring checkpoint '{save_path}'"):
        _restore(SCOPES.options.missing_slots == "fresh", original, saver, sess, save_path)
    accumulation.restart(sess)
    state_of_session(sess).restored()
    return None


def _restore(fresh_slots: bool, original: Any, saver: Any, sess: Any, save_path: Any) -> None:
    if tf.executing_eagerly() or saver._is_empty or save_path is None:
        return original(saver, sess, save_path)
    prefix, served = tf.compat.as_text(save_path), served_table.served_graph(sess.graph)
    if served is not None:
        return served.source(prefix, saver)
    shards, states = shards_of_saver(saver, sess.graph), gathered_states(saver)
    optional = optional_variables(saver)
    is_plain = collectives.size() == 1 and not shards and not states and not optional
    # A Saver that was imported with a graph knows no variables, and restores by its operations.
    if is_plain and (saver._var_list is None or not _has_tables(prefix)):
        original(saver, sess, save_path)
        note_last_checkpoint(prefix)
        return None
    prefix = common_prefix(sess, "restoring a checkpoint", prefix)
    base = split(prefix)[0]

    def on_all_ranks(doing: str, function: Callable[[], Any]) -> list[Any]:
        def read() -> Any:
            with storage.reading():
                return function()

        return barrier.run_on_all_ranks(sess, f"restoring checkpoint '{prefix}': {doing}", read)

    if not tf.io.gfile.exists(tensor_bundle.index_path(base)) and not shards:
        # There is no checkpoint, or it has TensorFlow's first format.
        on_all_ranks("all of it", lambda: original(saver, sess, prefix))
        note_last_checkpoint(prefix)
        return None
    links: list[chain.Chain] = []
    plans: list[compatibility.RestorePlan] = []
    table_restores: list[table_io.TableRestore] = []
    absent: list[str] = []
    values: dict[str, np.ndarray] = {}  # of ordinary variables that are tables in the checkpoint

    # Another rank may see the folder at another time.
    number = on_all_ranks("finding its increments", lambda: _increments(prefix))[0]

    def compare() -> None:
        links.append(chain.open_links(base, number))
        bundle = links[0].base
        saved_tensors = compatibility.tensors_saved_by(sess.graph, unsharded_def(saver))
        for name, state in states.items():
            entries = [spec.name for spec in state.specs]
            if not all(entry in bundle.entries for entry in entries):
                absent.append(name)
                saved_tensors = {n: t for n, t in saved_tensors.items() if n not in entries}
        for name in optional:
            if name not in bundle.entries:
                absent.append(name)
                saved_tensors.pop(name, None)
        plans.append(compatibility.plan(bundle, shards, saved_tensors, fresh_slots, saver._reshape))
        table_restores.append(table_io.TableRestore(sess, links[0], plans[0].pairs))

    on_all_ranks("comparing", compare)
    plan, tables = plans[0], table_restores[0]
    tables.reads_twice = any(on_all_ranks("memory", tables.must_read_twice))
    if tables.reads_twice:
        on_all_ranks("verifying", tables.verify)

    def read() -> None:
        tables.read()
        for name, stored in plan.whole.items():
            values[name] = merged_reader.read_whole(links[0], stored)

    apart = [*plan.missing, *absent, *plan.whole]
    try:
        on_all_ranks("reading", read)
        on_all_ranks(
            "replicated variables",
            lambda: _restore_unsharded(original, saver, sess, links[0].last.prefix, apart),
        )
    except BaseException:
        tables.undo()
        raise

    def assign() -> None:
        tables.assign()
        variables = unsharded_variables(saver)
        for name in list(values):
            assign_whole(sess, variables[name], values.pop(name))

    on_all_ranks("tables", assign)
    finish_tables(on_all_ranks, sess, prefix, dynamic_tables(shards))
    for name in absent:
        if name in states:
            states[name].restart()
    if links[0].increments:
        note_last_checkpoint(links[0].last.prefix, chain.step_of(links[0].last))
    else:
        note_last_checkpoint(prefix)
    fresh = [shard.variable for shard in plan.fresh if not shard.dynamic]
    fresh += [v for name, v in unsharded_variables(saver).items() if name in plan.missing]
    fresh += [v for name, v in optional.items() if name in absent]
    if fresh:
        sess.run([v.initializer for v in fresh])
    return None


def _has_tables(prefix: str) -> bool:
    """Tells whether a checkpoint has tables, which TensorFlow alone can't read."""
    base = split(prefix)[0]
    if not tf.io.gfile.exists(tensor_bundle.index_path(base)):
        return False
    try:
        return bool(tensor_bundle.Bundle(base).layout.tables)
    except tf.errors.OpError:
        return False  # TensorFlow says what is wrong with it.


def assign_whole(session: Any, variable: Any, value: np.ndarray) -> None:
    """Gives an ordinary variable, or all parts of one, its value by its own initializer."""
    for part in variable if isinstance(variable, list) else [variable]:
        info, of_part = getattr(part, "_save_slice_info", None), value
        if info is not None:
            ends = zip(info.var_offset, info.var_shape)
            of_part = value[tuple(slice(first, first + count) for first, count in ends)]
        place = part.initializer.inputs[1]
        if place.shape.is_fully_defined():
            of_part = of_part.reshape(place.shape.as_list())  # Saver(reshape=True)
        run_unpatched(session, part.initializer, {place: of_part})


def _increments(prefix: str) -> int:
    """Returns how many increments the state named by `prefix` has, as rank 0 sees it."""
    if collectives.rank() > 0:
        return 0
    number = split(prefix)[1]
    return chain.newest(prefix) if number is None else number


def finish_tables(
    on_all_ranks: Callable[..., list[Any]], sess: Any, prefix: str, tables: Sequence[Any]
) -> None:
    """Lets the policies of dynamic tables that were just read take effect.

    Rows that are too many are evicted, which rank 0 reports.

    Args:
        on_all_ranks: carries out a step on all ranks, given a description and a function.
        sess: the session; None for tables that were made eagerly.
        prefix: the checkpoint's prefix.
        tables: the tables.
    """
    for table in tables:
        if table.last_used is not None:
            # Starts the last uses of rows that were saved without one.
            table.last_used.begin(sess, in_file=True)
    bounded = [table for table in tables if table.policy.capacity is not None]
    if not bounded:
        return
    by_rank = on_all_ranks("capacity", lambda: eviction.limit(sess, bounded))
    for table in bounded:
        rows = sum(evicted[table.op.name] for evicted in by_rank)
        if rows and collectives.rank() == 0:
            tf.logging.warning(
                f"checkpoint '{prefix}' has more rows of table '{table.op.name}' than "
                f"capacity={table.policy.capacity} allows. The least recently used rows were "
                f"left out: {counted(rows, 'row')}. The checkpoint still has them."
            )


def _restore_unsharded(
    original: Any, saver: Any, sess: Any, prefix: str, missing: list[str]
) -> None:
    """Lets TensorFlow restore the variables that aren't tables, except for missing ones."""
    variables, saver_def = unsharded_variables(saver), unsharded_def(saver)
    if missing:
        with graphs.open_for_changes(sess.graph), sess.graph.as_default(), tf.init_scope():
            there = {name: v for name, v in variables.items() if name not in missing}
            saver_def = make_unsharded_def(saver, there, saver._filename)
    original_def, original_list = saver.saver_def, saver._var_list
    saver.saver_def, saver._var_list = saver_def, variables
    try:
        original(saver, sess, prefix)
    finally:
        saver.saver_def, saver._var_list = original_def, original_list
