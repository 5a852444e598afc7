"""Lets all ranks of an unchanged script make, move, remove and write its files at the same time.

Every rank runs the whole script, and so makes its folders and opens its log. What a script's own
code does with these functions is done once, by the first rank that gets there. A file that all
ranks write is the lowest rank's; the others write to `<file>.rank<number>` (`FileRecord`). This
library, TensorFlow and Horovod work as usual.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import io
import os
import pathlib
import shutil
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from collective.compat.script_modules import is_script
from collective.coordination import common_folder
from collective.job.file_record import MADE, VARIABLE, FileRecord

# Stack frames of these between a script and a function mean that the script didn't call it.
_LIBRARIES = ("collective", "tensorflow", "tensorflow_estimator", "keras", "horovod", "tensorboard")
# TensorFlow's functions in these modules call each other on behalf of a script.
_TRANSPARENT = ("tensorflow.python.lib.io.file_io", "tensorflow.python.platform.gfile")
_APIS_OF_FILES = (
    "tensorflow.compat.v1.gfile",
    "tensorflow.compat.v1.io.gfile",
    "tensorflow.io.gfile",
)
_inside = threading.local()


def install() -> None:
    """Lets this process, if it is one of several ranks, share its script's files with them."""
    size, path = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get(VARIABLE, "")
    if size > 1 and path:
        local_rank, rank = (int(os.environ[name]) for name in ("LOCAL_RANK", "RANK"))
        several_hosts = int(os.environ["LOCAL_WORLD_SIZE"]) < size
        _Replacements(FileRecord(path, rank, several_hosts, rank == local_rank), rank).install()


class _Replacements:
    """Has a method for each replaced function; it gets the original and the caller's arguments."""

    def __init__(self, record: FileRecord, rank: int):
        self._record, self._rank = record, rank

    def install(self) -> None:
        """Installs the replacements."""
        by_owner: list[tuple[Any, dict[str, Callable[..., Any]]]] = [
            (os, {"mkdir": self._make, "symlink": self._link, "link": self._link}),
            (os, {"rmdir": self._remove, "remove": self._remove, "unlink": self._remove}),
            (os, {"rename": self._rename, "replace": self._rename}),
            (os, {"listdir": self._list, "scandir": self._scan}),
            (shutil, {"rmtree": self._remove, "move": self._move, "copyfile": self._copy}),
            (builtins, {"open": self._open}),
        ]
        for owner, replacements in by_owner:
            for name, replacement in replacements.items():
                original = getattr(owner, name)
                replaced = self._replacing(original, replacement)
                setattr(owner, name, replaced)
                accessor = getattr(pathlib, "_NormalAccessor", None)  # in Python 3.9 and 3.10
                if getattr(accessor, name, None) is original:
                    setattr(accessor, name, staticmethod(replaced))
        io.open = builtins.open
        common_folder.listeners.append(_lead_to)
        self._install_for_tensorflow()

    def _install_for_tensorflow(self) -> None:
        from collective.compat.framework import find
        from collective.tensorflow_internals.checkpoints import file_io

        replaced: dict[Any, Any] = {}
        for name, replacement in (
            ("create_dir_v2", self._make),
            ("recursive_create_dir_v2", self._make),
            ("delete_file_v2", self._remove),
            ("delete_recursively_v2", self._remove),
            ("rename_v2", self._rename),
            ("copy_v2", self._copy),
            ("list_directory_v2", self._list),
            ("get_matching_files_v2", self._match),
        ):
            original = getattr(file_io, name)
            # Making an existing folder isn't an error, so folders that TensorFlow makes are noted,
            # too.
            is_noted = replacement == self._make
            replaced[original] = self._replacing(original, replacement, is_noted)
            setattr(file_io, name, replaced[original])
        for path in _APIS_OF_FILES:
            module = find(path)
            for name, value in list(vars(module).items()):
                if isinstance(value, types.FunctionType) and value in replaced:
                    setattr(module, name, replaced[value])
        opening = self._replacing(file_io.FileIO.__init__, self._open_for_tensorflow)
        file_io.FileIO.__init__ = opening

    def _replacing(
        self, original: Any, replacement: Callable[..., Any], is_for_all: bool = False
    ) -> Any:
        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if getattr(_inside, "now", False) or not (is_for_all or _is_by_script()):
                return original(*args, **kwargs)
            return replacement(original, *args, **kwargs)

        return replaced

    # -- folders, links, whole files

    def _make(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        local = _local(path, kwargs)
        if local is None:
            return original(path, *args, **kwargs)
        with _passing():
            self._record.make(local, lambda: original(path, *args, **kwargs))
        return None

    def _link(self, original: Any, src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        self._make(lambda path, **given: original(src, path, *args, **given), dst, **kwargs)

    def _remove(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        local = _local(path, kwargs)
        if local is None:
            return original(path, *args, **kwargs)
        with _passing():
            is_gone = self._record.remove(local, lambda: original(path, *args, **kwargs))
        if not is_gone:
            self._say_once(
                "what another rank has made stays",
                f"rank {self._rank} leaves {path}, which another rank has made meanwhile",
            )
        return None

    def _rename(self, original: Any, src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        def rename(source: str, target: str) -> str:
            original(source, target, *args, **kwargs)
            return target

        local, local_target = _local(src, kwargs), _local(dst)
        if local is None or local_target is None:
            original(src, dst, *args, **kwargs)
            return
        with _passing():
            self._record.move(local, local_target, rename)

    def _move(self, original: Any, src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        def move(source: str, target: str) -> str:
            return _whole(original(source, target, *args, **kwargs))

        with _passing():
            return self._record.move(_whole(src), _whole(dst), move) or dst

    def _copy(self, original: Any, src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        local, local_target = _local(src), _local(dst)
        if local is None or local_target is None:
            return original(src, dst, *args, **kwargs)
        own = self._record.reading(local)
        with _passing():
            if own != local:
                with self._record.writing(local_target, "w") as (file, _):
                    original(own, file, *args, **kwargs)
            else:
                copy = functools.partial(original, src, dst, *args, **kwargs)
                self._record.make(local_target, copy, f"{MADE} of {local}")
        return dst

    # -- writing and reading files

    def _open(self, original: Any, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        local = _local(file)
        if local is None or kwargs.get("opener") is not None:
            return original(file, mode, *args, **kwargs)
        with self._opening(local, file, mode) as (own, mode):
            return original(own, mode, *args, **kwargs)

    def _open_for_tensorflow(
        self, original: Any, file: Any, name: Any, mode: str = "r", *args: Any, **kwargs: Any
    ) -> None:
        local = _local(name)
        if local is None:
            original(file, name, mode, *args, **kwargs)
            return
        with self._opening(local, name, mode) as (own, mode):
            original(file, own, mode, *args, **kwargs)
            if mode[0] in "wa":
                file.write("")  # Opens the file now, before it gets another name.

    @contextlib.contextmanager
    def _opening(self, local: str, path: Any, mode: str) -> Iterator[tuple[Any, str]]:
        if not set(mode) & set("wax+"):
            own = self._record.reading(local)
            yield (path if own == local else own), mode
            return
        with _passing():
            with self._record.writing(local, mode) as (own, mode):
                yield (path if own == local else own), mode
            for rank, other in [*self._record.others(local).items()][:1]:
                self._say_once(
                    "ranks write files of their own",
                    "a file that all ranks write is rank 0's, and the others write files of their "
                    f"own: rank {rank} writes {other}",
                )

    # -- listings

    def _list(self, original: Any, path: Any = ".") -> Any:
        """Leaves out what this rank's listings don't show; so do the next two methods."""
        with self._record.held():
            names, hidden = original(path), self._record.hidden()
        if not hidden or isinstance(path, int):
            return names
        folder = os.path.realpath(os.fsdecode(path))
        return [name for name in names if os.path.join(folder, os.fsdecode(name)) not in hidden]

    def _match(self, original: Any, pattern: Any) -> Any:
        with self._record.held():
            paths, hidden = original(pattern), self._record.hidden()
        return [path for path in paths if _whole(path) not in hidden]

    def _scan(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with self._record.held(), original(*args, **kwargs) as entries:
            shown, hidden = [*entries], self._record.hidden()
        return _Scan(entry for entry in shown if not hidden or _whole(entry.path) not in hidden)

    def _say_once(self, kind: str, text: str) -> None:
        """Writes a line to stderr, unless a rank of this host has written one of its kind."""
        if self._record.says(kind):
            print(f"collective: {text}", file=sys.stderr, flush=True)


class _Scan:
    """Replaces the result of os.scandir: an iterator, and a context that closes it."""

    def __init__(self, entries: Iterator[Any]):
        self._entries = entries

    def __iter__(self) -> _Scan:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the iteration."""
        self._entries = iter(())


@contextlib.contextmanager
def _passing() -> Iterator[None]:
    """Lets the originals do everything inside."""
    before = getattr(_inside, "now", False)
    _inside.now = True
    try:
        yield
    finally:
        _inside.now = before


def _is_by_script() -> bool:
    """Tells whether the caller's caller acts for a script, maybe through other libraries."""
    frame: Any = inspect.currentframe()
    frame = frame.f_back.f_back
    while frame is not None:
        if is_script(frame.f_globals):
            return True
        module = frame.f_globals.get("__name__") or ""
        if module.partition(".")[0] in _LIBRARIES and module not in _TRANSPARENT:
            return False
        frame = frame.f_back
    return False


def _local(path: Any, arguments: Any = None) -> str | None:
    """Returns the full path of a local file; None for other files, and for descriptors."""
    if any(value is not None for name, value in (arguments or {}).items() if "dir_fd" in name):
        return None
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None
    name = os.fsdecode(path)
    return None if "://" in name or name.startswith("/dev/") else _whole(name)


def _whole(path: Any) -> str:
    """Returns the path by which all ranks know a file: links to its folder are resolved."""
    folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
    return os.path.join(os.path.realpath(folder), name)


def _lead_to(own: str, of_rank_0: str) -> None:
    """Links this rank's name of a folder, which contains the time, to rank 0's folder.

    It does nothing if this rank has made a folder of that name.
    """
    if os.path.isdir(of_rank_0) and not os.path.lexists(own):
        with _passing(), contextlib.suppress(OSError):
            os.symlink(os.path.abspath(of_rank_0), own, target_is_directory=True)
