"""Defines the saver of increments that DeepRec's scripts use with a `tf.train.Saver`."""

from __future__ import annotations

import os
from typing import Any

import tensorflow.compat.v1 as tf

from collective import checkpoint
from collective.checkpoint.saving import increments
from collective.compat.framework import say_once
from collective.tables.updates import write_announcements


class IncrementalSaver:
    """Saves increments that follow the checkpoints of a saver (`checkpoint.save_increment`).

    An increment is saved next to the whole checkpoint that it follows, even if a script names a
    different folder.

    Args:
        full_saver: the `tf.train.Saver` of whole checkpoints, made while the graph is built.
    """

    def __init__(self, full_saver: Any):
        self._saver, self._graph = full_saver, tf.get_default_graph()
        self._folder: str | None = None
        self._save_whole = full_saver.save
        write_announcements.want(self._graph)
        full_saver.save = self._save_and_follow

    def _save_and_follow(self, sess: Any, save_path: Any, *args: Any, **kwargs: Any) -> Any:
        self._folder = os.path.dirname(os.fspath(save_path)) or "."
        increments.enable(self._folder, self._graph)
        return self._save_whole(sess, save_path, *args, **kwargs)

    def incremental_save(
        self,
        sess: Any,
        save_path: Any,
        global_step: Any = None,
        meta_graph_suffix: str = "meta",
        write_state: bool = True,
    ) -> str:
        """Saves what has changed since the saver's last whole checkpoint, or the last increment.

        Returns:
            The increment's prefix, which `incremental_restore` and `tf.train.Saver.restore` take.

        Raises:
            ValueError: the saver has saved no whole checkpoint yet.
        """
        del save_path, global_step, meta_graph_suffix, write_state
        if self._folder is None:
            raise ValueError(
                "incremental_save: the saver has saved no whole checkpoint that an increment could "
                "follow: call its save() first."
            )
        say_once("incremental_save: increments are written next to the checkpoint that they follow")
        return checkpoint.save_increment(sess, self._folder)

    def incremental_restore(self, sess: Any, save_path: Any, incr_save_path: Any) -> None:
        """Restores an increment, together with the checkpoint that it follows."""
        del save_path
        self._saver.restore(sess, incr_save_path)

    def recover_incr_checkpoints(self, sess: Any, checkpoint_dir: Any) -> None:
        """Does nothing: a session restores the latest checkpoint with its increments."""


def get_incremental_saver(
    incremental_save_restore: bool, full_saver: Any
) -> IncrementalSaver | None:
    """Makes an `IncrementalSaver`; None if increments aren't wanted."""
    return IncrementalSaver(full_saver) if incremental_save_restore else None
