"""Keeps the chain that a session saves: its last whole checkpoint, and what changes since.

enable(graph, folder)                         before a session runs the graph
Saver.save into the folder ──► of_base        a chain begins, or the one before stays
increments.save ──► the next increment of it
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.checkpoint import storage
from collective.checkpoint.chain import is_latest
from collective.checkpoint.following import Follower
from collective.checkpoint.shards import Shard
from collective.checkpoint.tensor_bundle import Bundle, index_path
from collective.coordination import barrier
from collective.coordination.session_state import state_of_session
from collective.ops import collectives
from collective.ops.graph_state import state_of
from collective.tables import write_announcements
from collective.tables.last_use import global_step


@dataclasses.dataclass
class RunningChain:
    """Knows what the next increment follows.

    Attributes:
        saver: saved the base.
        shards: its tables and slots.
        base: the path as the user gave it, by which a folder's checkpoints belong together.
        prefix: the whole checkpoint's.
        follower: knows what has changed since the last save.
        number: of the last increment; 0: there is none.
        id: that of the last save, known where increments are published; '' until it was read.
        base_id: that of the whole checkpoint, likewise.
        step: the global step of the last save.
        is_latest: the whole checkpoint was saved as its folder's latest.
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
    is_latest: bool = True


def enable(graph: tf.Graph, folder: str) -> None:
    """Has increments follow the checkpoints that sessions of `graph` save in `folder`.

    Raises:
        RuntimeError: the compiled operations are missing.
    """
    write_announcements.want(graph)
    state_of(graph).incremental_folders.add(normal(folder))


def of_folder(session: Any, folder: str) -> RunningChain:
    """Returns the chain that `session` saves in a folder.

    Raises:
        ValueError: there is none.
    """
    chain = state_of_session(session).chains.get(normal(folder))
    if chain is not None:
        found: RunningChain = chain
        return found
    if normal(folder) not in state_of(session.graph).incremental_folders:
        raise ValueError(
            f"no increments are saved in '{folder}': call collective.checkpoint."
            "enable_increments(folder) while the graph is built, before a session runs it."
        )
    raise ValueError(
        f"this session has saved no whole checkpoint in '{folder}' that an increment could follow: "
        "call Saver.save first."
    )


def check_base(chain: RunningChain) -> None:
    """Checks on rank 0 that an increment can follow the whole checkpoint of a chain.

    Raises:
        StorageFailure: it is gone, or can't be read.
        ValueError: another checkpoint is in its place, or is the latest.
    """
    advice = "Save a whole checkpoint, which begins a chain anew."
    with storage.failures():
        if not tf.io.gfile.exists(index_path(chain.prefix)):
            raise storage.StorageFailure(
                f"the whole checkpoint '{chain.prefix}', which it would follow, is gone"
            )
        base_id = Bundle(chain.prefix).layout.id
    chain.base_id = chain.base_id or base_id
    if base_id != chain.base_id:
        raise ValueError(
            f"increment {chain.number + 1} would follow the checkpoint '{chain.prefix}' with the "
            f"id '{chain.base_id}', but another one has taken its place, '{base_id}'. One job at a "
            f"time saves in a folder. {advice}"
        )
    if chain.is_latest and not is_latest(chain.prefix):
        raise ValueError(
            f"increment {chain.number + 1} would follow the checkpoint '{chain.prefix}', but it is "
            f"not the latest in its folder: a restart would not find the increment. {advice}"
        )


def why_none_can_follow(session: Any, folder: str) -> str:
    """Tells all ranks why no increment can be saved in a folder now; '' if one can."""
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
    as_latest: bool = True,
) -> Iterator[None]:
    """Makes the whole checkpoint that is saved inside one that increments follow, if any do.

    An error inside leaves the chain before as it was.
    """
    folder = normal(os.path.dirname(base))
    if folder not in state_of(session.graph).incremental_folders:
        yield
        return
    chains = state_of_session(session).chains
    before: RunningChain | None = chains.get(folder)
    follower = None if before is None else before.follower
    if follower is None or not follower.follows(shards):
        follower = Follower(session, shards)
    follower.begin()
    step = global_step(session)
    try:
        yield  # The save may go on beside training.
    except BaseException:
        follower.undo()
        raise
    follower.done()
    chains[folder] = RunningChain(
        saver, shards, base, prefix, follower, step=step, is_latest=as_latest
    )


def normal(folder: str) -> str:
    """Returns the name by which sessions know a folder."""
    return os.path.normpath(os.fsdecode(folder) or ".")
