"""Records the files and folders that a script handles alike on all ranks.

A script for one process makes folders, removes them, and moves and writes files. If every rank runs
it unchanged, the second rank finds that the first has already done the same. So each rank notes in
the record what it has done, and knows by it what another rank has done in its place:

    rank 0: mkdir a    ──▶  0 made a       rank 1: mkdir a     made: nothing is left to do
    rank 0: rmtree a   ──▶  0 removed a    rank 1: rmtree a    removed: nothing is left to do
    rank 0: open(f, w) ──▶  0 writes f     rank 1: open(f, w)  writes f.rank1

A rank's k-th operation on a path corresponds to another rank's k-th operation on it. The record is
a journal in unnamed memory with one line per operation. A rank locks it while it reads the new
lines, carries out its operation, and adds its own line.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

VARIABLE = "COLLECTIVE_SCRIPT_FILES"  # the environment variable that holds the record's path
MADE, REMOVED = "made", "removed"
_MADE_AGAIN, _REMOVED_AGAIN = "made again", "removed again"
_WRITES, _SAID = "writes", "said"


class FileRecord:
    """Opens the record in a rank.

    Args:
        path: the launcher's path, under which the record is opened.
        rank: this process's number.
        is_of_several_hosts: whether the job has other hosts, whose ranks don't see this record but
            may see these files.
        has_rank_0: whether rank 0 is on this host.

    Attributes:
        written: the paths that this rank has opened for writing, as the script names them.
    """

    def __init__(
        self, path: str, rank: int, is_of_several_hosts: bool = False, has_rank_0: bool = True
    ):
        self.written: set[str] = set()
        self._path, self._rank = path, rank
        self._several_hosts, self._has_rank_0 = is_of_several_hosts, has_rank_0
        self._begin = time.time()
        self._lock = threading.RLock()
        self._descriptor, self._offset = -1, 0
        self._deeds: dict[str, list[str]] = collections.defaultdict(list)
        # How many operations on a path this rank has done, or found done.
        self._position: dict[str, int] = collections.defaultdict(int)
        # For each path that late ranks have made again after another rank moved or removed it: the
        # late ranks that use it.
        self._again: dict[str, set[int]] = collections.defaultdict(set)
        # What this rank has written, and moved or removed since.
        self._gone: set[str] = set()
        # For each path that is written: the file of each rank that writes it, and its size before.
        self._files: dict[str, dict[int, str]] = collections.defaultdict(dict)
        self._sizes: dict[str, int] = {}
        self._said: set[str] = set()

    # -- folders, and whole files

    def make(self, path: str, do: Callable[[], None], deed: str = MADE) -> None:
        """Makes something, unless another rank has made it in this rank's place.

        Args:
            path: the path.
            do: makes it, or checks that it exists; its errors are the script's errors.
            deed: what to note instead of MADE: a copy names its source.
        """
        with self.held():
            ahead = self._ahead(path)
            if deed in ahead:
                self._position[path] += ahead.index(deed) + 1
                is_gone = not os.path.lexists(path)  # Another rank has removed it again.
                if is_gone:
                    do()
                if is_gone or self._again[path]:
                    self._append(self._rank, _MADE_AGAIN, path)
                return
            was_there = os.path.lexists(path)
            try:
                do()
            except FileExistsError:
                if not self._again[path] and not self._is_of_another_host(path):
                    raise
            if deed != MADE or not was_there or self._again[path]:
                self._note(deed, path)

    def remove(self, path: str, do: Callable[[], None]) -> bool:
        """Removes something, unless another rank has removed it in this rank's place.

        Something that another rank has made since, and that doesn't exist for this rank yet, stays.

        Returns:
            False if it stays.
        """
        with self.held():
            own = self._files[path].get(self._rank)
            if own is not None and own != path:
                self._forget(path)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(own)
                return True
            ahead = self._ahead(path)
            if REMOVED in ahead:
                self._position[path] += ahead.index(REMOVED) + 1
                if self._is_done_with(path):
                    do()
                return True
            if ahead or not self._deeds[path] and self._is_of_another_host(path):
                return False
            if self._several_hosts and not self._has_rank_0:
                with contextlib.suppress(FileNotFoundError):
                    do()
            else:
                do()
            self._note(REMOVED, path)
            self._forget(path)
            return True

    def move(self, source: str, target: str, do: Callable[[str, str], str]) -> str | None:
        """Moves something, unless another rank has moved it in this rank's place.

        Args:
            source, target: the paths as the script names them.
            do: is called with both, and returns the new path.

        Returns:
            The new path; None if another rank has moved it.
        """
        with self.held():
            own = self._files[source].get(self._rank)
            if own is not None:
                is_folder = os.path.isdir(target)
                path = os.path.join(target, os.path.basename(source)) if is_folder else target
                with self.writing(path, "w") as (file, _):
                    do(own, file)
                if own == source:
                    self._note(REMOVED, source)
                self._forget(source)
                return path
            ahead = self._ahead(source)
            is_gone = self._deeds[source][-1:] == [REMOVED] and not os.path.lexists(source)
            if REMOVED in ahead or is_gone:
                self._position[source] = len(self._deeds[source])
                self._position[target] = len(self._deeds[target])
                is_last = self._is_done_with(source)
                if is_last and not any(files for _, _, files in os.walk(source)):
                    shutil.rmtree(source)
                return None
            moved = do(source, target)
            self._note(REMOVED, source)
            self._note(MADE, moved)
            return moved

    # -- files that are written

    @contextlib.contextmanager
    def writing(self, path: str, mode: str) -> Iterator[tuple[str, str]]:
        """Gives this rank a file to write; the caller opens it inside the context.

        Args:
            path: the path as the script names it.
            mode: the mode of Python's open.

        Yields:
            The file and the mode to open it with.
        """
        with self.held():
            files = self._files[path]
            is_new = self._rank not in files
            own, moved = self._file_of(path, mode) if is_new else (files[self._rank], None)
            if moved is not None:
                self._append(moved, _WRITES, path, files[moved], 0)
            yield own, mode.replace("x", "w") if own != path else mode
            self.written.add(path)
            self._gone.discard(path)
            if is_new:
                self._append(self._rank, _WRITES, path, own, self._sizes.get(path, 0))
                if MADE not in self._ahead(path):
                    self._append(self._rank, MADE, path)
                self._position[path] = len(self._deeds[path])

    def reading(self, path: str) -> str:
        """Returns the file from which this rank reads back what it has written."""
        if path not in self.written:
            return path
        with self.held():
            own = self._files[path].get(self._rank, path)
            return own if os.path.lexists(own) else path

    def others(self, path: str) -> dict[int, str]:
        """Returns the files under other names that ranks write instead of `path`."""
        with self.held():
            return {rank: file for rank, file in self._files[path].items() if file != path}

    def hidden(self) -> set[str]:
        """Returns what a listing of a folder leaves out in this rank.

        It is all files under other names, and what late ranks have made again, or write only now
        that this rank has moved or removed its own.
        """
        with self.held():
            renamed = {
                own for path, files in self._files.items() for own in files.values() if own != path
            }
            again = {path for path, late in self._again.items() if late and self._rank not in late}
            return renamed | again | {path for path in self._gone if self._files[path]}

    def says(self, text: str) -> bool:
        """Tells whether this rank is the first on its host to say a text."""
        with self.held():
            if text in self._said:
                return False
            self._append(self._rank, _SAID, text)
            return True

    def _file_of(self, path: str, mode: str) -> tuple[str, int | None]:
        """Chooses the file that this rank writes: the lowest writing rank gets the path itself.

        Returns:
            The file, and the rank whose file was renamed to make way for it, if any.
        """
        files = self._files[path]
        keeps = "a" in mode or "r" in mode
        holder = next((rank for rank, file in files.items() if file == path), None)
        if holder is None:
            has_size = keeps and os.path.isfile(path)
            self._sizes[path] = os.path.getsize(path) if has_size else 0
        own = f"{path}.rank{self._rank}"
        was_apart = keeps and self._rank > 0 and os.path.lexists(own)
        if holder is None and not was_apart and self._has_rank_0:
            return path, None
        if holder is not None and self._rank < holder:
            files[holder] = f"{path}.rank{holder}"
            with contextlib.suppress(FileNotFoundError):
                # A process that has the file open keeps writing to it under its new name.
                os.rename(path, files[holder])
                if keeps:
                    _copy_beginning(files[holder], path, self._sizes[path])
            return path, holder
        if keeps and not os.path.lexists(own) and os.path.isfile(path):
            _copy_beginning(path, own, self._sizes[path])
        return own, None

    def _forget(self, path: str) -> None:
        if self._files[path].pop(self._rank, None) is not None:
            self.written.discard(path)
            self._gone.add(path)
            self._append(self._rank, _WRITES, path, "", 0)

    # -- the journal

    def _ahead(self, path: str) -> list[str]:
        """Returns other ranks' operations on a path that this rank hasn't reached yet."""
        return self._deeds[path][self._position[path] :]

    def _is_done_with(self, path: str) -> bool:
        """Notes that this late rank needs a path no longer; tells whether it was the last one."""
        if self._rank not in self._again[path]:
            return False
        self._append(self._rank, _REMOVED_AGAIN, path)
        return not self._again[path]

    def _is_of_another_host(self, path: str) -> bool:
        """Tells whether a rank on another host may have made it: it was made during this job."""
        if not self._several_hosts:
            return False
        with contextlib.suppress(OSError):
            return os.lstat(path).st_ctime >= self._begin
        return False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lets no other rank make, move, remove or open a file inside."""
        with self._lock:
            if self._descriptor >= 0:  # nested call
                yield
                return
            # Opened each time: a fork would share the lock, and some programs close all files.
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
                self._read()
                yield
            finally:
                os.close(self._descriptor)
                self._descriptor = -1

    def _read(self) -> None:
        """Reads what other ranks have noted."""
        end = os.fstat(self._descriptor).st_size
        text = os.pread(self._descriptor, end - self._offset, self._offset)
        self._offset = end
        for line in text.decode().splitlines():
            self._apply(*json.loads(line))

    def _apply(self, rank: int, deed: str, path: str, file: str = "", size: int = 0) -> None:
        if deed == _SAID:
            self._said.add(path)
        elif deed in (_MADE_AGAIN, _REMOVED_AGAIN):
            late = self._again[path]
            late.add(rank) if deed == _MADE_AGAIN else late.discard(rank)
        elif deed != _WRITES:
            self._deeds[path].append(deed)
            self._again[path].clear()
        elif not file:
            self._files[path].pop(rank, None)
        else:
            self._files[path][rank] = file
            self._sizes.setdefault(path, size)

    def _note(self, deed: str, path: str) -> None:
        self._append(self._rank, deed, path)
        self._position[path] = len(self._deeds[path])

    def _append(self, rank: int, deed: str, path: str, *more: Any) -> None:
        line = json.dumps([rank, deed, path, *more]) + "\n"
        self._offset += os.pwrite(self._descriptor, line.encode(), self._offset)
        self._apply(rank, deed, path, *more)


def _copy_beginning(source: str, target: str, size: int) -> None:
    """Copies the content that a file had before any rank of the job wrote to it."""
    shutil.copyfile(source, target)
    os.truncate(target, min(size, os.path.getsize(target)))
