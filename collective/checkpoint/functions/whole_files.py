"""Lets all ranks save whole tables of eager code together, in files that plain TensorFlow reads.

    rank 0: its rows ─┐                       ┌─ rank 0: the script's file
                      ├── whole tables ───────┤
    rank 1: its rows ─┘   (also of slots)     └─ others: a file that is thrown away

Keras and `tf.train.Checkpoint` read a variable's value for each file that they write, and all ranks
take part in reading a table.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

from collective.coordination import agreement, barrier
from collective.ops.communication import collectives
from collective.tables import dense_view


def write(doing: str, path: str, save: Callable[[str], None]) -> None:
    """Saves to a path, on rank 0. All ranks call it; when it returns, the file is there for all.

    Every rank holds each table whole for a while.

    Args:
        doing: says what the ranks do; the same on every rank.
        path: of the file, without an ending if there are several.
        save: saves what has tables, at the path that it is given.

    Raises:
        RankError: it failed on another rank, or another rank does something else.
    """

    def save_here() -> None:
        with dense_view.whole_saves():
            if collectives.rank() == 0:
                save(path)
                return
            with tempfile.TemporaryDirectory() as folder:
                save(os.path.join(folder, os.path.basename(path.rstrip("/"))))

    with agreement.because(f"{doing}, which all ranks call, and rank 0 writes"):
        barrier.run_on_all_ranks(None, doing, save_here)
