"""Does the work of TensorFlow's file systems for `s3://…` and others, by fsspec.

The compiled library (`ops/native/remote_file_system.cc`) registers them and calls `_called`.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import fnmatch
import functools
import importlib
import itertools
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.ops import native_library

# An object store has no empty folder. This object makes one, and no listing shows it.
FOLDER_MARK = ".collective-folder"
_END_TIMEOUT = 10.0  # seconds that the end of Python waits for calls inside
_INTERRUPT_DELAY = 0.1  # seconds after which TensorFlow has made its own error
_EVERY_CALL = ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_void_p,
)
# TensorFlow's codes of errors, by the first class that fits.
_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (KeyboardInterrupt, 1),
    (FileNotFoundError, 5),
    (FileExistsError, 6),
    (PermissionError, 7),
    (NotADirectoryError, 9),
    (IsADirectoryError, 9),
    (TimeoutError, 14),
    (asyncio.TimeoutError, 14),  # the same since Python 3.11
    (ConnectionError, 14),
    (NotImplementedError, 12),
    (ValueError, 3),
    (MemoryError, 8),
    (OSError, 14),
    (ImportError, 9),
)
_UNKNOWN = 2
_NO_ROOM = (28, 122)  # ENOSPC, EDQUOT
_RESOURCE_EXHAUSTED = 8

_options: dict[str, dict[str, Any]] = {}
_handles = itertools.count(1)
_writers: dict[int, _Writer] = {}


def register(scheme: str, options: dict[str, Any] | None = None) -> bool:
    """Registers a scheme; returns False where TensorFlow has it by itself.

    Raises:
        ImportError: the compiled library can't be used here.
    """
    if scheme in _options:
        _options[scheme].update(options or {})
        return True
    if scheme in tf.io.gfile.get_registered_schemes():
        return False
    library, callback = _library()
    if library.collective_file_system_register(scheme.encode(), callback):
        return False
    _options[scheme] = dict(options or {})
    return True


def of_path(path: str) -> tuple[Any, str] | None:
    """Returns fsspec's file system of a path, and the path in it; None if it isn't used here.

    Raises:
        ImportError: the package that fsspec needs for the scheme is not installed; says which.
    """
    return _resolve(path) if path.partition("://")[0] in _options else None


def check(scheme: str) -> None:
    """Checks that fsspec can be used for a scheme that is registered here.

    Raises:
        ImportError: the package that it needs is not installed; says which.
    """
    if scheme in _options:
        importlib.import_module("fsspec").get_filesystem_class(scheme)


def load() -> None:
    """Loads the compiled library.

    Raises:
        ImportError: it can't be used here; says why.
    """
    _library()


@functools.cache
def _library() -> tuple[Any, Any]:
    library = native_library.functions()
    if not hasattr(library, "collective_file_system_register"):
        raise ImportError(
            "the compiled operations of collective are of a release without remote file systems: "
            "run `make setup` again in a checkout, or pip install --force-reinstall --no-deps ."
        )
    library.collective_file_system_register.argtypes = [ctypes.c_char_p, _EVERY_CALL]
    library.collective_file_system_answer.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_char_p,
        ctypes.c_int64,
    ]
    library.collective_file_system_answer.restype = None
    library.collective_file_system_close.argtypes = [ctypes.c_double]
    atexit.register(_end)
    os.register_at_fork(after_in_child=_forked)
    return library, _EVERY_CALL(_called)


def _end() -> None:
    for writer in list(_writers.values()):
        try:
            writer.flush()
        except Exception as error:
            tf.logging.warning("'%s' was not written: %s", writer.path, error)
    _library()[0].collective_file_system_close(_END_TIMEOUT)


def _forked() -> None:
    _writers.clear()  # The parent's files: a child must not write them a second time.
    _library()[0].collective_file_system_forked()


def _called(
    operation: bytes,
    path: bytes,
    target: bytes,
    number: int,
    size: int,
    data: int | None,
    answer: int,
) -> None:
    """Does an operation. Its last act is the answer: a call without one has failed."""
    text, name = os.fsdecode(path), operation.decode()
    try:
        result = _OPERATIONS[name](text, os.fsdecode(target), number, size, data)
        code, content = (0, result) if isinstance(result, bytes) else (int(result or 0), b"")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            # It is for the whole program, which may survive the error that it becomes here.
            threading.Timer(_INTERRUPT_DELAY, _interrupt).start()
        code = -_code(error)
        content = os.fsencode(f"{text}: {name}: {type(error).__name__}: {error}")
    _library()[0].collective_file_system_answer(answer, code, content, len(content))


def _interrupt() -> None:
    main_thread = threading.main_thread().ident
    if main_thread is not None:
        signal.pthread_kill(main_thread, signal.SIGINT)


def _code(error: BaseException) -> int:
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return _RESOURCE_EXHAUSTED
    return next((code for kind, code in _CODES if isinstance(error, kind)), _UNKNOWN)


def _resolve(path: str, is_new: bool = True) -> tuple[Any, str]:
    """Returns the file system of a path, and the path in it.

    Args:
        path: with its scheme.
        is_new: forgets listings that were kept, so that what other ranks wrote is seen.
    """
    scheme = path.partition("://")[0]
    url_to_fs = importlib.import_module("fsspec.core").url_to_fs
    files, inner = url_to_fs(path, **_options[scheme])
    if is_new:
        files.invalidate_cache()
    return files, inner


def _kind(files: Any, inner: str) -> str | None:
    """Returns 'file', 'directory', or None for nothing; unlike exists(), not for an error."""
    try:
        return str(files.info(inner)["type"])
    except FileNotFoundError:
        return None


def _is_directory(files: Any, inner: str) -> bool:
    return bool(files.info(inner)["type"] == "directory")


class _Writer:
    """Collects a file locally; it is visible from a flush on, whole, as an object store has it."""

    def __init__(self, path: str, append: bool):
        self.path = path
        self._files, self._inner = _resolve(path)
        # Unbuffered: a forked child would write what is in a buffer a second time.
        self._local = tempfile.TemporaryFile(buffering=0)
        self._changed = True
        if append and _kind(self._files, self._inner):
            self.append(self._files.cat_file(self._inner))
            self._changed = False

    def append(self, content: bytes) -> None:
        self._changed = True
        rest = memoryview(content)
        while rest:  # One write takes 2 GB at most.
            rest = rest[self._local.write(rest) :]

    def tell(self) -> int:
        return self._local.tell()

    def flush(self) -> None:
        if self._changed:
            # A failed upload leaves no part of a file; closing a file of fsspec's would.
            self._files.put_file(f"/proc/self/fd/{self._local.fileno()}", self._inner)
            self._changed = False

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._local.close()


def _open_reader(path: str, *_: Any) -> int:
    files, inner = _resolve(path)
    info = files.info(inner)
    if info["type"] == "directory":
        raise IsADirectoryError("it is a folder")
    return int(info["size"])


def _read(path: str, _: str, offset: int, size: int, data: int) -> None:
    files, inner = _resolve(path, is_new=False)
    content = files.cat_file(inner, start=offset, end=offset + size)
    if len(content) != size:
        raise OSError(f"it has {len(content)} of the {size} bytes from {offset} on: it changed")
    ctypes.memmove(data, content, size)


def _open_writer(path: str, append: bool) -> int:
    handle = next(_handles)
    _writers[handle] = _Writer(path, append)
    return handle


def _writer(handle: int) -> _Writer:
    if handle not in _writers:
        raise OSError("the file was opened in the process that this one was forked from")
    return _writers[handle]


def _close_writer(_: str, __: str, handle: int, *___: Any) -> None:
    writer = _writer(handle)
    del _writers[handle]
    writer.close()


def _exists(path: str, *_: Any) -> None:
    files, inner = _resolve(path)
    files.info(inner)  # It says so if there is nothing.


def _base(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


def _listed(path: str) -> list[str]:
    files, inner = _resolve(path)
    if not _is_directory(files, inner):
        raise NotADirectoryError("it is a file")
    names = {_base(name) for name in files.ls(inner, detail=False)} - {_base(inner), ""}
    return sorted(names)


def _joined(names: list[str]) -> bytes:
    return b"".join(os.fsencode(name) + b"\0" for name in names)


def _children(path: str, *_: Any) -> bytes:
    return _joined([name for name in _listed(path) if name != FOLDER_MARK])


def _matching(pattern: str, *_: Any) -> bytes:
    # fsspec's own glob() takes a folder that can't be listed for an empty one.
    scheme, rest = pattern.rstrip("/").split("://", 1)
    box, *parts = rest.split("/")
    found = [f"{scheme}://{box}"]
    for part in parts:
        if _has_marks(part):
            found = [f"{folder}/{name}" for folder in found for name in _names_like(part, folder)]
        else:
            found = [f"{folder}/{part}" for folder in found]
    return _joined([path for path in found if _kind(*_resolve(path))])


def _has_marks(part: str) -> bool:
    return any(mark in part for mark in "*?[")


def _names_like(pattern: str, folder: str) -> list[str]:
    try:
        names = _listed(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [name for name in fnmatch.filter(names, pattern) if name != FOLDER_MARK]


def _stat(path: str, _: str, __: int, ___: int, data: int) -> None:
    files, inner = _resolve(path)
    info = files.info(inner)
    changed = next((info[k] for k in ("mtime", "LastModified", "last_modified") if k in info), 0)
    seconds = changed.timestamp() if hasattr(changed, "timestamp") else changed
    try:
        nanoseconds = int(float(seconds) * 1e9)
    except (TypeError, ValueError):  # Each fsspec file system has its own form of it.
        nanoseconds = 0
    out = (ctypes.c_int64 * 3).from_address(data)
    out[:] = [info["size"] or 0, nanoseconds, info["type"] == "directory"]


def _delete_file(path: str, *_: Any) -> None:
    files, inner = _resolve(path)
    if _is_directory(files, inner):
        raise IsADirectoryError("it is a folder")
    files.rm_file(inner)


def _create_folder(path: str, *_: Any) -> None:
    files, inner = _resolve(path)
    if _kind(files, inner):
        raise FileExistsError("it exists")
    _create_folders(path)


def _create_folders(path: str, *_: Any) -> None:
    files, inner = _resolve(path)
    files.makedirs(inner, exist_ok=True)
    files.invalidate_cache()
    if _kind(files, inner) is None:
        files.pipe_file(f"{inner.rstrip('/')}/{FOLDER_MARK}", b"")


def _delete_folder(path: str, *_: Any) -> None:
    files, inner = _resolve(path)
    names = _listed(path)
    if [name for name in names if name != FOLDER_MARK]:
        raise IsADirectoryError("the folder is not empty")
    if names:
        files.rm_file(f"{inner.rstrip('/')}/{FOLDER_MARK}")
        files.invalidate_cache()
    if _kind(files, inner):
        files.rmdir(inner)


def _delete_tree(path: str, *_: Any) -> None:
    files, inner = _resolve(path)
    files.rm(inner, recursive=_is_directory(files, inner))
    files.invalidate_cache()
    if _kind(files, inner):
        raise OSError("not all of it could be deleted")


def _rename(source: str, target: str, *_: Any) -> None:
    files, before = _resolve(source)
    _, after = _resolve(target)
    is_folder, there = _is_directory(files, before), _kind(files, after)
    if there == "directory" or (is_folder and there):
        raise FileExistsError(f"{target} exists")
    if is_folder and type(files).mv is importlib.import_module("fsspec").AbstractFileSystem.mv:
        _copy_folder(files, before, after, target)
        _delete_tree(source)
        return
    try:
        files.mv(before, after)
    except FileExistsError:  # HDFS moves onto no file.
        files.rm_file(after)
        files.mv(before, after)


def _copy_folder(files: Any, before: str, after: str, target: str) -> None:
    """Copies all that is in a folder; where it can't all be listed, it raises the error.

    fsspec's own copy() leaves out what can't be listed, and its mv() then deletes it.
    """
    names = sorted(_files_below(files, before.rstrip("/")))
    if names:
        start = len(before.rstrip("/"))
        files.copy(names, [after.rstrip("/") + name[start:] for name in names])
    else:
        _create_folders(target)


def _files_below(files: Any, folder: str) -> Iterator[str]:
    for entry in files.ls(folder, detail=True):
        name = entry["name"].rstrip("/")
        if entry["type"] != "directory":
            yield entry["name"]
        elif name != folder:  # A store may list the folder itself.
            yield from _files_below(files, name)


def _is_folder(path: str, *_: Any) -> None:
    if not _is_directory(*_resolve(path)):
        raise NotADirectoryError("it is a file")


def _content(path: str, *_: Any) -> bytes:
    files, inner = _resolve(path)
    return files.cat_file(inner)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "open_reader": _open_reader,
    "read": _read,
    "open_writer": lambda path, *_: _open_writer(path, append=False),
    "open_appender": lambda path, *_: _open_writer(path, append=True),
    "append": lambda _, __, handle, size, data: _writer(handle).append(
        ctypes.string_at(data, size)
    ),
    "flush": lambda _, __, handle, *___: _writer(handle).flush(),
    "tell": lambda _, __, handle, *___: _writer(handle).tell(),
    "close_writer": _close_writer,
    "content": _content,
    "exists": _exists,
    "children": _children,
    "matching": _matching,
    "stat": _stat,
    "delete_file": _delete_file,
    "create_folder": _create_folder,
    "create_folders": _create_folders,
    "delete_folder": _delete_folder,
    "delete_tree": _delete_tree,
    "rename": _rename,
    "is_folder": _is_folder,
}
