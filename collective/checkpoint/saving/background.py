"""Writes checkpoints during training: records the state at once, and writes it in threads.

    every rank     PartSnapshot ──► its thread writes the part ──► note_<rank> in the staging folder
    rank 0         its thread waits for all notes ──► merges and publishes, or removes everything
    every rank     `settle`: waits for its thread, exchanges outcomes, raises an error on all alike

No thread uses a collective: ranks hear from each other through the notes. They meet again when they
are together anyway: at the next save, at the end of the session, or when the script waits.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow.compat.v1 as tf

from collective.checkpoint.files import commit, storage
from collective.coordination import barrier, coordinator
from collective.coordination.session_state import state_of_session
from collective.job.progress_board import Phase
from collective.ops.communication import collectives
from collective.ops.graph.sessions import raw_session

if TYPE_CHECKING:
    from collective.checkpoint.saving.snapshot import PartSnapshot

NOTE = "note_{}"
# How many seconds rank 0 waits for the other ranks' notes, or how many times its own part's time.
MOST_SECONDS, MOST_TIMES = 600.0, 10
LOOK = 0.02  # seconds between two looks for notes


class BackgroundSave:
    """Handles one checkpoint that is being written during training.

    Attributes:
        prefix: the checkpoint's prefix.
        room: the room that copies of rows take on this rank.
        seconds: how long the thread has worked, once it has ended.

    Args:
        session: the session that was saved.
        prefix: see above.
        staging: the folder of this save.
        part: this rank's part.
        publish: makes the checkpoint from the ranks' notes (rank 0).
        undo: removes what was written (rank 0).
        over: called on every rank once all know the outcome: with the error, or None.
        storage_error: makes the error from the texts about a storage failure; called by all ranks.
    """

    def __init__(
        self,
        session: Any,
        prefix: str,
        staging: str,
        part: PartSnapshot,
        publish: Callable[[list[dict[str, Any]]], None],
        undo: Callable[[], None],
        over: Callable[[Exception | None], None],
        storage_error: Callable[[list[str]], Exception],
    ):
        self.prefix, self.room, self.seconds = prefix, part.room, 0.0
        self._session, self._staging, self._part = session, staging, part
        self._publish, self._undo = publish, undo
        self._over, self._storage_error = over, storage_error
        # The error on this rank: its text, and whether the storage failed.
        self._error: dict[str, Any] | None = None
        # Whether this rank's part is on the disk; and on rank 0, whether it knows about all parts.
        self._written, self._gathered = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"checkpoint {os.path.basename(prefix)}", daemon=True
        )

    def start(self) -> None:
        """Starts the thread. From now on the session's end waits for it."""
        state_of_session(self._session).background_save = self
        _running.append(self)
        self._thread.start()

    def settle(self) -> None:
        """Waits together with all ranks, and raises the same error on all. Every rank calls it.

        Raises:
            CheckpointStorageError: the storage failed.
            RuntimeError: something else failed.
        """
        doing = f"waiting for checkpoint '{self.prefix}'"
        outcomes = barrier.run_on_all_ranks(self._session, doing, self._outcome)
        errors = [each for each in outcomes if each is not None]
        if not errors:
            self._over(None)
            return
        # Rank 0 names every rank whose part failed. Other ranks may have failed only as a result.
        errors = [each for each in errors if each["rank"] == 0] or errors
        words = [each["words"] for each in errors]
        error: Exception = RuntimeError(
            f"checkpoint '{self.prefix}' was not written: {'; '.join(words)}"
        )
        if all(each["is_storage"] for each in errors):
            error = self._storage_error(words)
        self._over(error)
        raise error

    def wait_alone(self) -> None:
        """Waits for this rank's part if the ranks can't meet any more; reports any error."""
        self._thread.join()
        self._forget()
        if self._error is not None:
            tf.logging.error(
                "checkpoint '%s' was not written: %s", self.prefix, self._error["words"]
            )

    @property
    def is_over(self) -> bool:
        """Tells whether this rank's thread has ended."""
        return not self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Tells whether this rank knows of a failure so far."""
        return self._error is not None

    def _outcome(self) -> dict[str, Any] | None:
        if collectives.size() > 1 and collectives.rank() == 0:
            self._written.wait()
            # The launcher sees that this rank waits for another, which may be stopped.
            progress = coordinator.instance().progress
            progress.enters(Phase.AGREEING)
            self._gathered.wait()
            progress.enters(Phase.WORKING)
        self._thread.join()
        self._forget()
        return self._error

    def _forget(self) -> None:
        state_of_session(self._session).background_save = None
        if self in _running:
            _running.remove(self)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = self._error or _described(error)
        finally:
            # However it ends, nobody has to wait for it any longer.
            self._written.set()
            self._gathered.set()

    def _work(self) -> None:
        began = time.monotonic()
        _work_when_idle()
        try:
            self._leave_note({"message": self._write()})
        except BaseException as error:
            self._error = _described(error)
            self._leave_error()
        finally:
            self._part.end()
            self._written.set()
        if collectives.rank() == 0:
            try:
                self._finish(time.monotonic() - began)
            except BaseException as error:
                self._error = self._error or _described(error)
                with contextlib.suppress(Exception):
                    self._undo()
        self.seconds = time.monotonic() - began

    def _write(self) -> dict[str, Any]:
        """Writes this rank's part; returns its message once everything is on the disk."""
        prefixes, rows = self._part.write()
        commit.sync_bundles(prefixes)
        files = [os.path.basename(prefix) for prefix in prefixes]
        return {"host": socket.gethostname(), "rows": rows, "files": files}

    def _leave_note(self, note: dict[str, Any]) -> None:
        path = os.path.join(self._staging, NOTE.format(collectives.rank()))
        with storage.failures():
            with tf.io.gfile.GFile(path + ".new", "w") as file:
                file.write(json.dumps(note))
            commit.move(path + ".new", path)

    def _leave_error(self) -> None:
        """Tells rank 0 that this rank's part failed."""
        try:
            self._leave_note({"error": self._error})
        except Exception:
            # A full disk can't store text, but it can store an empty file: rank 0 needn't wait.
            path = os.path.join(self._staging, NOTE.format(collectives.rank()))
            with contextlib.suppress(Exception):
                with tf.io.gfile.GFile(path + ".new", "w") as file:
                    file.write("")
                commit.move(path + ".new", path)

    def _finish(self, seconds: float) -> None:
        """Makes the checkpoint from all parts, on rank 0."""
        notes = self._notes(max(MOST_SECONDS, MOST_TIMES * seconds))
        self._gathered.set()
        errors = [note["error"] for note in notes if "error" in note]
        if errors:
            words = "; ".join(error["words"] for error in errors)
            is_storage = all(error["is_storage"] for error in errors)
            self._error = {"rank": 0, "words": words, "is_storage": is_storage}
            self._undo()
        else:
            self._publish([note["message"] for note in notes])

    def _notes(self, most: float) -> list[dict[str, Any]]:
        """Returns the notes of all ranks once they exist."""
        notes: list[dict[str, Any]] = []
        deadline = time.monotonic() + most
        for rank in range(collectives.size()):
            if rank == 0 and self._error is not None:
                notes.append({"error": self._error})  # Its own note may be missing, too.
                continue
            path = os.path.join(self._staging, NOTE.format(rank))
            while not tf.io.gfile.exists(path):
                if "://" not in path and _is_gone(self._staging):
                    raise storage.StorageFailure(f"the folder {self._staging} is gone")
                if time.monotonic() > deadline:
                    raise storage.StorageFailure(
                        f"rank {rank} did not finish its part within {most:.0f} s of rank 0: it is "
                        "stopped, or its storage is too slow"
                    )
                time.sleep(LOOK)
            with storage.failures(), tf.io.gfile.GFile(path, "r") as file:
                text = file.read()
            if text:
                notes.append(json.loads(text))
            else:
                words = f"rank {rank}: its storage failed, and had no room to say how"
                notes.append({"error": {"rank": rank, "words": words, "is_storage": True}})
        return notes


def _work_when_idle() -> None:
    """Lets this thread use only idle processor time; on Linux, only this thread."""
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


def _described(error: BaseException) -> dict[str, Any]:
    is_storage = storage.is_failure(error)
    if not is_storage:
        traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)
    words = storage.described(error, collectives.rank())
    return {"rank": collectives.rank(), "words": words, "is_storage": is_storage}


_running: list[BackgroundSave] = []


def settle(session: Any) -> None:
    """Waits with all ranks for a background save of `session`, if any. Raises its error."""
    work = state_of_session(raw_session(session)).background_save
    if work is not None:
        work.settle()


def wait() -> None:
    """Waits for all saves of this process; all ranks call it together. Raises their errors."""
    while _running:
        _running[0].settle()


def wait_alone() -> None:
    """Waits for this rank's parts if ranks can't meet; returns whether all went well."""
    while _running:
        _running[0].wait_alone()


def _end_of_process() -> None:
    # A fork of this process has no threads.
    if os.getpid() != _process or not _running:
        return
    saves = list(_running)
    wait_alone()
    if any(save.has_failed for save in saves):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # Closing the session would have raised it.


_process = os.getpid()
atexit.register(_end_of_process)


def _is_gone(folder: str) -> bool:
    """Tells whether a folder has been removed; False if that can't be determined now."""
    try:
        os.stat(folder)
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False
