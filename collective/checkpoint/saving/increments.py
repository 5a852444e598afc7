"""Saves increments: the rows and slots changed since the last save, and everything else whole.

Each is committed like a checkpoint, completely or not at all, and names its base, its number, and
its predecessor (`chain`). Rows aren't evicted for an increment, as they are for a whole checkpoint:
training is the same with and without increments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Callable
from typing import Any, ClassVar

import tensorflow.compat.v1 as tf

from collective.checkpoint.files import commit
from collective.checkpoint.files.chain_names import increment_prefix
from collective.checkpoint.files.layout import CheckpointLayout, Increment
from collective.checkpoint.files.storage import CheckpointStorageError
from collective.checkpoint.files.tensor_bundle import BundleWriter, index_path
from collective.checkpoint.rows import increment_io
from collective.checkpoint.saving import background, running_chain, saver_hook
from collective.checkpoint.saving.retention import Retention
from collective.checkpoint.saving.running_chain import RunningChain
from collective.checkpoint.saving.saver import common_prefix, note_last_checkpoint
from collective.checkpoint.saving.saves import ShardedSave
from collective.coordination import session_making
from collective.coordination.session_state import state_of_session
from collective.ops.communication import collectives
from collective.tables.policies.last_use import global_step
from collective.tensorflow_internals.sessions import monitored_session


def save(session: Any, folder: str) -> str:
    """Saves what has changed since this session's last save in a folder.

    Every rank calls it, between the same two runs.

    Args:
        session: a `tf.Session`.
        folder: the folder, for which increments are enabled.

    Returns:
        The increment's prefix.

    Raises:
        ValueError: there is no checkpoint that it could follow.
        CheckpointStorageError: the storage failed, or its predecessor is gone.
    """
    background.settle(session)
    chain = running_chain.of_folder(session, folder)
    prefix = increment_prefix(chain.prefix, chain.number + 1)
    prefix = common_prefix(session, "saving an increment", prefix)
    increment = IncrementSave(
        chain.saver,
        session,
        list(chain.shards),
        chain.base,
        prefix,
        "checkpoint",
        Retention.after(chain.saver, None),
        commit.Publication(),
        {},
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
    chain.id = increment.id
    note_last_checkpoint(prefix, chain.step, is_saved=True)
    return prefix


@dataclasses.dataclass
class IncrementSave(ShardedSave):
    """Makes an increment in the same steps as a whole checkpoint.

    Attributes:
        chain: the chain that it continues.
    """

    chain: RunningChain = None  # type: ignore[assignment]

    at_most: ClassVar[str] = "at most "

    def _begin(self) -> str:
        if collectives.rank() == 0:
            running_chain.check_base(self.chain)
        return super()._begin()

    def _latest(self, folder: str) -> str | None:
        latest = super()._latest(folder)
        if latest is None:
            # The folder may not tell, though the predecessor exists.
            with contextlib.suppress(OSError, tf.errors.OpError):
                if tf.io.gfile.exists(index_path(self.chain.prefix)):
                    latest = f"'{self.chain.newest}'"
        return latest

    def write_tables(self, writer: BundleWriter) -> dict[str, Any]:
        changes = self.chain.follower.changes()
        return increment_io.write(self.session, self.shards, changes, writer)

    def layout(self, written_by_rank: list[dict[str, Any]]) -> CheckpointLayout:
        chain = self.chain
        increment = Increment(chain.number + 1, chain.base_id, chain.id or chain.base_id)
        return increment_io.layout_of(self.shards, written_by_rank, increment)


def training_session(
    original: Callable[..., Any],
    *args: Any,
    save_incremental_checkpoint_secs: float | None = None,
    save_incremental_checkpoint_steps: int | None = None,
    **kwargs: Any,
) -> Any:
    """Replaces `MonitoredTrainingSession`, and saves increments at the given interval, too.

    Args:
        original: the function.
        args, kwargs: its arguments.
        save_incremental_checkpoint_secs, save_incremental_checkpoint_steps: seconds, or global
            steps, between increments: one of them, or neither. (The names are DeepRec's.)

    Raises:
        ValueError: both are given, or there are no checkpoints that increments could follow.
    """
    secs, steps = save_incremental_checkpoint_secs, save_incremental_checkpoint_steps
    if secs is None and steps is None:
        return session_making.without_agreement(original, *args, **kwargs)
    check_interval("MonitoredTrainingSession", secs, steps)
    signature = inspect.signature(original)

    def with_increments(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        times = [given.arguments[f"save_checkpoint_{unit}"] for unit in ("secs", "steps")]
        by_default = [time is monitored_session.USE_DEFAULT for time in times]
        is_on = all(by_default) or any(
            time for time, is_default in zip(times, by_default) if not is_default
        )
        if not given.arguments["checkpoint_dir"] or not is_on:
            raise ValueError(
                "MonitoredTrainingSession(save_incremental_checkpoint_…) saves what has changed "
                "since the last checkpoint: give checkpoint_dir, and don't turn checkpoints off "
                "(save_checkpoint_secs, save_checkpoint_steps)."
            )
        hook = IncrementHook(given.arguments["checkpoint_dir"], secs, steps)
        given.arguments["hooks"] = [*(given.arguments["hooks"] or []), hook]
        return original(*given.args, **given.kwargs)

    return session_making.without_agreement(with_increments, *args, **kwargs)


def check_interval(owner: str, secs: Any, steps: Any) -> None:
    """Checks the interval at which increments are to be saved.

    Args:
        owner: the owner of the options, for the message.
        secs, steps: seconds, and global steps, between increments.

    Raises:
        ValueError: both are given, or one isn't positive.
    """
    given = {
        "save_incremental_checkpoint_secs": secs,
        "save_incremental_checkpoint_steps": steps,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise ValueError(
            f"{owner}: give one of save_incremental_checkpoint_secs={secs!r} and "
            f"save_incremental_checkpoint_steps={steps!r}."
        )
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"{owner}: {name} is a positive number, or None, not {value!r}.")


class IncrementHook(tf.train.SessionRunHook):
    """Saves increments of the checkpoints that a session saves in a folder.

    Every rank has one. Rank 0's clock decides, and all ranks save after the same run. If a whole
    checkpoint was saved after a run, there is no increment.

    Args:
        folder: the folder of the checkpoints.
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
        folder = running_chain.normal(self._folder)
        state_of_session(session).last_increments[folder] = self._save_last

    def before_run(self, run_context: Any) -> Any:
        return tf.train.SessionRunArgs(self._step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        # The fetched step may be the one before the run's update.
        if not self._timer.should_trigger_for_step(run_values.results + 1):
            return
        session = run_context.session
        step = session.run(self._step)
        if not self._timer.should_trigger_for_step(step):
            return
        self._timer.update_last_triggered_step(step)
        saver_hook.settle(session)
        if self._save(session, step):
            run_context.request_stop()

    def _save(self, session: Any, step: int) -> bool:
        """Saves an increment, or a whole checkpoint if there is none that it could follow.

        Returns:
            Whether a listener wants training to stop.
        """
        state = state_of_session(session)
        # After a failed save, the changes since the last successful save are still known.
        why = running_chain.why_none_can_follow(session, self._folder) if state.save_failed else ""
        if not why:
            chain = running_chain.of_folder(session, self._folder)
            if chain.step == step:
                return False
            try:
                save(session, self._folder)
                return False
            except CheckpointStorageError as error:
                state.save_failed = True
                saver_hook.go_on_without(error, chain.saver)
            why = running_chain.why_none_can_follow(session, self._folder)
        if why:
            if collectives.rank() == 0:
                text = "no increment is saved in '%s' at step %d: %s. A whole checkpoint is tried."
                tf.logging.warning(text, self._folder, step, why.rstrip("."))
            return saver_hook.save_whole(session, self._folder, step)
        return False

    def _save_last(self, session: Any, step: int) -> str:
        """Saves an increment at a session's end, if a whole checkpoint could not be written.

        Returns:
            The prefix of the newest state, if it is now that of `step`; else ''.
        """
        if running_chain.why_none_can_follow(session, self._folder):
            return ""
        chain = running_chain.of_folder(session, self._folder)
        try:
            return chain.newest if chain.step == step else save(session, self._folder)
        except CheckpointStorageError:
            return ""


def enable(folder: str, graph: tf.Graph | None = None) -> None:
    """Lets increments follow a folder's checkpoints (`collective.checkpoint.enable_increments`)."""
    running_chain.enable(tf.get_default_graph() if graph is None else graph, os.fspath(folder))
