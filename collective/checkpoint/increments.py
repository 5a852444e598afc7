"""Saves increments: the rows and slots that changed since the last save, and everything else whole.

Each is committed as a checkpoint is, whole or not at all, and names its base, its number, and what
it follows (`chain`). Rows aren't evicted for an increment, as they are for a whole checkpoint:
training is the same with increments and without.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import tensorflow.compat.v1 as tf

from collective.checkpoint import commit, increment_io, running_chain
from collective.checkpoint.chain_names import increment_prefix
from collective.checkpoint.layout import CheckpointLayout, Increment
from collective.checkpoint.running_chain import RunningChain
from collective.checkpoint.saver import check_same_path
from collective.checkpoint.saving import Retention, ShardedSave
from collective.checkpoint.tensor_bundle import Bundle, BundleWriter
from collective.ops import collectives
from collective.tables.last_use import global_step


def save(session: Any, folder: str) -> str:
    """Saves what has changed since the last save that this session made in a folder.

    Every rank calls it, between the same two runs.

    Args:
        session: a `tf.Session`.
        folder: for which increments are enabled.

    Returns:
        The increment's prefix.

    Raises:
        ValueError: there is nothing that it could follow.
    """
    chain = running_chain.of_folder(session, folder)
    prefix = increment_prefix(chain.prefix, chain.number + 1)
    check_same_path(session, "saving an increment", prefix)
    increment = IncrementSave(
        chain.saver,
        session,
        list(chain.shards),
        chain.base,
        prefix,
        Retention.after(chain.saver, None),
        commit.Publication(),
        chain=chain,
    )
    chain.follower.begin()
    try:
        increment.run()
    except BaseException:
        chain.follower.undo()
        raise
    chain.follower.done()
    chain.number += 1
    chain.step = global_step(session)
    chain.id = Bundle(prefix).layout.id if collectives.rank() == 0 else ""
    return prefix


@dataclasses.dataclass
class IncrementSave(ShardedSave):
    """Makes an increment in the steps in which a whole checkpoint is made.

    Attributes:
        chain: what it follows.
    """

    chain: RunningChain = None  # type: ignore[assignment]

    def write_tables(self, writer: BundleWriter) -> dict[str, Any]:
        changes = self.chain.follower.changes()
        return increment_io.write(self.session, self.shards, changes, writer)

    def layout(self, written_by_rank: list[dict[str, Any]]) -> CheckpointLayout:
        chain, base = self.chain, Bundle(self.chain.prefix).layout.id
        chain.base_id = chain.base_id or base
        if base != chain.base_id:
            raise ValueError(
                f"increment {chain.number + 1} follows the checkpoint '{chain.prefix}' with the id "
                f"'{chain.base_id}', but another one has taken its place, '{base}'. One job at a "
                "time saves in a folder; save a whole checkpoint, which begins a chain anew."
            )
        increment = Increment(chain.number + 1, base, chain.id or base)
        return increment_io.layout_of(self.shards, written_by_rank, increment)


class IncrementHook(tf.train.SessionRunHook):
    """Saves increments of the checkpoints that a session saves in a folder.

    Every rank has one. The clock is rank 0's, and all ranks save behind the same run. Behind a run
    after which a whole checkpoint was saved there is no increment.

    Args:
        folder: the checkpoints'.
        secs, steps: seconds, or global steps, between saves. One of them is given.
    """

    def __init__(self, folder: str, secs: float | None = None, steps: int | None = None):
        self._folder = folder
        self._timer = tf.train.SecondOrStepTimer(every_secs=secs, every_steps=steps)

    def begin(self) -> None:
        graph = tf.get_default_graph()
        self._step = tf.train.get_global_step(graph)
        if self._step is None:
            raise RuntimeError("Global step should be created to save increments of checkpoints.")
        running_chain.enable(graph, self._folder)

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._timer.reset()
        self._timer.update_last_triggered_step(global_step(session))

    def before_run(self, run_context: Any) -> Any:
        return tf.train.SessionRunArgs(self._step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        # What was fetched may be the step before the run's update.
        if not self._timer.should_trigger_for_step(run_values.results + 1):
            return
        session = run_context.session
        step = session.run(self._step)
        if not self._timer.should_trigger_for_step(step):
            return
        self._timer.update_last_triggered_step(step)
        if running_chain.of_folder(session, self._folder).step != step:
            save(session, self._folder)


def enable(folder: str, graph: tf.Graph | None = None) -> None:
    """Has increments follow checkpoints in a folder (`collective.checkpoint.enable_increments`)."""
    running_chain.enable(tf.get_default_graph() if graph is None else graph, os.fspath(folder))
