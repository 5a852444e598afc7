"""`Saver.restore` inside scope(): everything is checked and read on all ranks before anything is
changed on any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from collective.checkpoint import compatibility, table_io, tensor_bundle
from collective.checkpoint.saver import (
    def_of_rest,
    note_last_checkpoint,
    rest_def,
    rest_of,
    same_path,
    shards_in,
)
from collective.coordination import barrier
from collective.gradients import accumulation
from collective.ops import collectives, graphs
from collective.scope import SCOPES
from collective.tables import served_table


def restore(original: Any, saver: Any, sess: Any, save_path: Any) -> None:
    """Stands in for `Saver.restore`.

    Everything is checked and read on all ranks before anything is changed on any. Gradients that
    were summed up over batches (scope(local_steps=…)) are forgotten.
    """
    _restore(SCOPES.options.missing_slots == "fresh", original, saver, sess, save_path)
    accumulation.restart(sess)


def _restore(fresh_slots: bool, original: Any, saver: Any, sess: Any, save_path: Any) -> None:
    if tf.executing_eagerly() or saver._is_empty or save_path is None:
        return original(saver, sess, save_path)
    prefix, served = tf.compat.as_text(save_path), served_table.served_graph(sess.graph)
    if served is not None:
        return served.source(prefix, saver)
    shards = shards_in(saver, sess.graph)
    if collectives.size() == 1 and not shards:
        original(saver, sess, save_path)
        note_last_checkpoint(prefix)
        return None
    same_path(sess, "restoring a checkpoint", prefix)
    what, made = f"restoring checkpoint '{prefix}'", list[Any]()

    def step(doing: str, function: Callable[[], Any]) -> list[Any]:
        return barrier.together(sess, f"{what}: {doing}", function)

    # none, or of TensorFlow's first format
    if not tf.io.gfile.exists(f"{prefix}.index") and not shards:
        step("all of it", lambda: original(saver, sess, prefix))
        note_last_checkpoint(prefix)
        return None

    def compare() -> None:
        opened = tensor_bundle.Bundle(prefix)
        made.append(
            compatibility.plan(
                opened,
                shards,
                compatibility.saved_by(sess.graph, rest_def(saver)),
                fresh_slots,
                saver._reshape,
            )
        )
        made.append(table_io.Loaded(sess, opened, made[0].pairs))

    step("comparing", compare)
    plan, loaded = made
    loaded.twice = any(step("memory", loaded.must_read_twice))
    if loaded.twice:
        step("verifying", loaded.verify)
    try:
        step("reading", loaded.read)
        step(
            "replicated variables",
            lambda: _restore_rest(original, saver, sess, prefix, plan.missing),
        )
    except BaseException:
        loaded.undo()
        raise
    step("tables", loaded.assign)
    note_last_checkpoint(prefix)
    anew = [shard.variable for shard in plan.fresh if not shard.dynamic]
    anew += [v for name, v in rest_of(saver).items() if name in plan.missing]
    if anew:
        sess.run([v.initializer for v in anew])
    return None


def _restore_rest(original: Any, saver: Any, sess: Any, prefix: str, missing: list[str]) -> None:
    whole, listed, rest = saver.saver_def, saver._var_list, rest_def(saver)
    if missing:
        with graphs.open_for_changes(sess.graph), sess.graph.as_default(), tf.init_scope():
            rest = def_of_rest(
                saver,
                {name: v for name, v in rest_of(saver).items() if name not in missing},
                saver._filename,
            )
    saver.saver_def, saver._var_list = rest, rest_of(saver)
    try:
        original(saver, sess, prefix)
    finally:
        saver.saver_def, saver._var_list = whole, listed
