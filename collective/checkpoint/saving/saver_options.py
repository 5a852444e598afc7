"""Gives a Saver its own options, which override those of scope()."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.options import ScopeOptions
from collective.options.declaration import INHERIT, given
from collective.options.scopes import CheckpointFailure, check_given
from collective.scope import SCOPES
from collective.tables.updates import write_announcements


class Saver(tf.train.Saver):
    """A `tf.train.Saver` with options that apply to its own saves.

        saver = collective.checkpoint.Saver(max_to_keep=3, checkpoint_blocking=False)
        scaffold = tf.train.Scaffold(saver=saver)      # of a MonitoredTrainingSession, say

    Give it the same options on every rank. Options that aren't given are those of
    `strategy.scope()` at the time of a save.

    Args:
        arguments: the arguments of `tf.train.Saver`.
        save_code: see `CollectiveStrategy.scope`, as for the other options.
        checkpoint_blocking: see above. With False, make the Saver before a session runs the graph.
        checkpoint_buffer: see above.
        checkpoint_on_error: see above; for saves that hooks make with this Saver.

    Raises:
        ValueError: an option has an invalid value.
    """

    def __init__(
        self,
        *arguments: Any,
        save_code: bool = INHERIT,
        checkpoint_blocking: bool = INHERIT,
        checkpoint_buffer: int | float = INHERIT,
        checkpoint_on_error: CheckpointFailure = INHERIT,
        **more: Any,
    ):
        self._collective_options = given(
            save_code=save_code,
            checkpoint_blocking=checkpoint_blocking,
            checkpoint_buffer=checkpoint_buffer,
            checkpoint_on_error=checkpoint_on_error,
        )
        check_given("Saver", self._collective_options)
        super().__init__(*arguments, **more)
        is_background = self._collective_options.get("checkpoint_blocking") is False
        if is_background and not tf.executing_eagerly() and native_library.missing() is None:
            write_announcements.want(tf.get_default_graph())


class TablesSaver(Saver):
    """Saves tables without the rest of the model.

    Its checkpoints aren't ones from which training continues, so nobody is told of them.

    Args:
        tables: tables and slots.
        more: as for `tf.train.Saver`.

    Attributes:
        variables: the tables and slots.
    """

    def __init__(self, tables: list[Any], **more: Any):
        self.variables = tables
        super().__init__(tables, **more)


def options_of(saver: Any) -> ScopeOptions:
    """Returns the options for a Saver's saves; None means any other Saver."""
    return dataclasses.replace(SCOPES.options, **getattr(saver, "_collective_options", {}))
