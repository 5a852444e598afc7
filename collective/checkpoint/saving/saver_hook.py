"""Lets hooks save: training may continue without a checkpoint, but not end without its last one."""

from __future__ import annotations

import threading
from typing import Any

import tensorflow.compat.v1 as tf

from collective.checkpoint.files import storage
from collective.checkpoint.saving import background, running_chain
from collective.checkpoint.saving.saver_options import options_of
from collective.coordination.session_state import state_of_session
from collective.ops.communication import collectives

# Set while a hook makes its last save: no training follows during which it could be written.
_ending = threading.Event()
# Set while a hook with listeners saves, which use the checkpoint, as an evaluation does.
_is_listened_to = threading.Event()


def blocks(saver: Any) -> bool:
    """Tells whether training waits until a checkpoint of a Saver is written."""
    return _ending.is_set() or _is_listened_to.is_set() or options_of(saver).checkpoint_blocking


def save(original: Any, hook: Any, session: Any, step: Any) -> Any:
    """Replaces `CheckpointSaverHook._save`: training may continue without a checkpoint.

    Instead of its last checkpoint it may end with an increment, which takes less room.

    Returns:
        Whether a listener wants training to stop.
    """
    state, saver = state_of_session(session), hook._get_saver()
    state.saver_hooks[running_chain.normal(hook._checkpoint_dir)] = hook
    settle(session, saver)
    if hook._listeners:
        _is_listened_to.set()
    try:
        stops = original(hook, session, step)
        state.save_failed = False
        return stops
    except storage.CheckpointStorageError as error:
        state.save_failed = True
        newest = _last_increment(hook, session, step) if _ending.is_set() else ""
        if not newest:
            go_on_without(error, saver)
        elif collectives.rank() == 0:
            tf.logging.warning(
                "%s But '%s' has all of step %d: nothing is lost.", error, newest, step
            )
        return False
    finally:
        _is_listened_to.clear()


def _last_increment(hook: Any, session: Any, step: int) -> str:
    """Saves an increment as the last state of a session; returns its prefix, or '' if none is."""
    saves = state_of_session(session).last_increments
    save_increment = saves.get(running_chain.normal(hook._checkpoint_dir))
    may_go_on = options_of(hook._get_saver()).checkpoint_on_error != "stop"
    return save_increment(session, step) if save_increment is not None and may_go_on else ""


def save_whole(session: Any, folder: str, step: int) -> bool:
    """Makes the hook that saves whole checkpoints in a folder save one now, early.

    Returns:
        Whether a listener wants training to stop.
    """
    hook = state_of_session(session).saver_hooks.get(running_chain.normal(folder))
    if hook is None or hook._timer.last_triggered_step() == step:
        return False  # The hook has just tried.
    hook._timer.update_last_triggered_step(step)
    return bool(hook._save(session, step))


def end(original: Any, hook: Any, session: Any) -> None:
    """Replaces `CheckpointSaverHook.end`: waits for the last checkpoint, or tries it again."""
    state = state_of_session(session)
    settle(session, hook._get_saver())
    if state.save_failed:
        hook._timer._last_triggered_step = None  # as if this step hadn't been saved
    _ending.set()
    try:
        original(hook, session)
    finally:
        _ending.clear()


def settle(session: Any, saver: Any = None) -> None:
    """Waits for the previous save if training may continue without it; `saver`: the hook's."""
    try:
        background.settle(session)
    except storage.CheckpointStorageError as error:
        state_of_session(session).save_failed = True
        go_on_without(error, saver)


def go_on_without(error: storage.CheckpointStorageError, saver: Any = None) -> None:
    """Reports that training continues, if it may; else raises the error."""
    if _ending.is_set() or options_of(saver).checkpoint_on_error == "stop":
        raise error
    if collectives.rank() == 0:
        tf.logging.warning(
            "%s Training continues, and the next save tries again. "
            "(scope(checkpoint_on_error='stop') makes this an error.)",
            error,
        )
