"""Keeps the chain that a session saves: its last whole checkpoint, and the changes since.

enable(graph, folder)                         before a session runs the graph
Saver.save into the folder ──► of_base        a chain begins, or the previous one stays
increments.save ──► the next increment of it
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.checkpoint.files import storage
from collective.checkpoint.files.chain import latest_of
from collective.checkpoint.files.chain_names import increment_prefix
from collective.checkpoint.files.tensor_bundle import Bundle, index_path
from collective.checkpoint.rows.shards import Shard
from collective.checkpoint.rows.table_changes import Follower
from collective.coordination import barrier
from collective.coordination.session_state import state_of_session
from collective.ops.communication import collectives
from collective.ops.graph import graph_state
from collective.tables.policies.last_use import global_step
from collective.tables.updates import write_announcements


@dataclasses.dataclass
class RunningChain:
    """Knows what the next increment follows.

    Attributes:
        saver: the Saver that saved the base.
        shards: its tables and slots.
        base: the path as given by the user; a folder's checkpoints with the same path belong
            together.
        prefix: the prefix of the whole checkpoint.
        follower: knows what has changed since the last save.
        number: the number of the last increment; 0 if there is none.
        id: the id of the last save, known where increments are published.
        base_id: the id of the whole checkpoint, known there, too.
        step: the global step of the last save.
    """

    saver: Any
    shards: Sequence[Shard]
    base: str
    prefix: str
    follower: Follower
    number: int = 0
    id: str = ""
    base_id: str = ""
    step: int = 0

    @property
    def newest(self) -> str:
        """Returns the prefix of the newest state: the last increment's, or the checkpoint's."""
        return increment_prefix(self.prefix, self.number) if self.number else self.prefix


@dataclasses.dataclass
class IncrementalFolders:
    """Records the folders in which increments follow the checkpoints of a graph's sessions."""

    paths: set[str] = dataclasses.field(default_factory=set)


def enable(graph: tf.Graph, folder: str) -> None:
    """Lets increments follow the checkpoints that sessions of `graph` save in `folder`.

    Raises:
        RuntimeError: the compiled operations are missing.
    """
    write_announcements.want(graph)
    graph_state.of(graph, IncrementalFolders).paths.add(normal(folder))


def is_enabled(graph: tf.Graph, folder: str) -> bool:
    """Tells whether increments may follow the checkpoints of `graph` in `folder`."""
    return normal(folder) in graph_state.of(graph, IncrementalFolders).paths


def of_folder(session: Any, folder: str) -> RunningChain:
    """Returns the chain that `session` saves in a folder.

    Raises:
        ValueError: there is no chain.
    """
    chain = state_of_session(session).chains.get(normal(folder))
    if chain is not None:
        found: RunningChain = chain
        return found
    if not is_enabled(session.graph, folder):
        raise ValueError(
            f"no increments are saved in '{folder}': call collective.checkpoint."
            "enable_increments(folder) while the graph is built, before a session runs it."
        )
    raise ValueError(
        f"this session has saved no whole checkpoint in '{folder}' that an increment could follow: "
        "call Saver.save first. (No restart finds one that was saved with write_state=False or "
        "latest_filename=….)"
    )


def check_base(chain: RunningChain) -> None:
    """Checks on rank 0 that an increment can follow the whole checkpoint of a chain.

    Raises:
        StorageFailure: it is gone or can't be read; or the file that names the folder's latest
            checkpoint can't be read.
        ValueError: another checkpoint is in its place, or is the latest.
    """
    advice = "Save a whole checkpoint, which begins a new chain."
    with storage.failures():
        if not tf.io.gfile.exists(index_path(chain.prefix)):
            raise storage.StorageFailure(
                f"the whole checkpoint '{chain.prefix}', which it would follow, is gone"
            )
        base_id = Bundle(chain.prefix).layout.id
    if base_id != chain.base_id:
        raise ValueError(
            f"increment {chain.number + 1} would follow the checkpoint '{chain.prefix}' with the "
            f"id '{chain.base_id}', but another one has taken its place, '{base_id}'. One job at a "
            f"time saves in a folder. {advice}"
        )
    latest = latest_of(chain.prefix)
    if not latest:
        state = os.path.join(os.path.dirname(chain.prefix), "checkpoint")
        raise storage.StorageFailure(
            f"'{state}', which names '{chain.prefix}' as the latest checkpoint, is gone or "
            "damaged: a restart would not find the increment"
        )
    if os.path.abspath(latest) != os.path.abspath(chain.prefix):
        raise ValueError(
            f"increment {chain.number + 1} would follow the checkpoint '{chain.prefix}', but the "
            f"latest in its folder is '{latest}': a restart would not find the increment. {advice}"
        )


def why_none_can_follow(session: Any, folder: str) -> str:
    """Tells all ranks why no increment can be saved in a folder now; '' if one can be."""
    chain = state_of_session(session).chains.get(normal(folder))
    if chain is None:
        return "this session has saved no whole checkpoint that it could follow"

    def look() -> str:
        try:
            check_base(chain)
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    doing = f"looking at the whole checkpoint '{chain.prefix}'"
    on_ranks = barrier.run_on_all_ranks(session, doing, lambda: collectives.rank() or look())
    return str(on_ranks[0])


@contextlib.contextmanager
def of_base(
    saver: Any,
    session: Any,
    shards: Sequence[Shard],
    base: str,
    prefix: str,
    as_latest: bool,
    saved_id: Callable[[], str],
) -> Iterator[None]:
    """Makes the whole checkpoint that is saved inside one that increments can follow, if enabled.

    After an error inside, the previous chain stays. It also stays if the checkpoint isn't to be its
    folder's latest: no restart would find what follows it.

    Args:
        saver: the Saver that saves it.
        session: the session.
        shards: the Saver's tables and slots.
        base: the path as given by the user.
        prefix: the checkpoint's prefix.
        as_latest: whether it becomes its folder's latest checkpoint.
        saved_id: returns the checkpoint's id on rank 0, once it is saved.
    """
    folder = normal(os.path.dirname(base))
    chains = state_of_session(session).chains
    before: RunningChain | None = chains.get(folder)
    as_latest = as_latest or before is not None and before.prefix == prefix
    if not as_latest or not is_enabled(session.graph, folder):
        yield
        return
    follower = None if before is None else before.follower
    if follower is None or not follower.follows(shards):
        follower = Follower(session, shards)
    follower.begin()
    step = global_step(session)
    try:
        yield  # The save may continue during training.
    except BaseException:
        follower.undo()
        raise
    follower.done()
    chains[folder] = RunningChain(
        saver, shards, base, prefix, follower, base_id=saved_id(), step=step
    )


def normal(folder: str) -> str:
    """Returns the normalized name under which sessions know a folder."""
    return os.path.normpath(os.fsdecode(folder) or ".")
