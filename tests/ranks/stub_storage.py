"""Stands in for a remote file system, `stub://…`: it fails, comes late and loses what is moved."""

import os
import shutil

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.client import session as session_lib
from tensorflow.python.lib.io import _pywrap_file_io
from tensorflow.python.summary.writer import event_file_writer

from collective.checkpoint.files import commit, tensor_bundle

SCHEME = "stub://"
# TensorFlow's own functions on files, with the number of paths that each begins with.
FUNCTIONS = {
    **dict.fromkeys(("FileExists", "DeleteFile", "CreateDir", "RecursivelyCreateDir"), 1),
    **dict.fromkeys(("DeleteRecursively", "IsDirectory", "GetChildren", "GetMatchingFiles"), 1),
    **dict.fromkeys(("Stat", "BufferedInputStream", "WritableFile"), 1),
    **dict.fromkeys(("RenameFile", "CopyFile"), 2),
}


class StubStorage:
    """Keeps the files of `stub://` in a folder.

    Attributes:
        fails: f(function, path) -> an error to raise, or None, asked before each operation.
        loses: f(source, target) -> whether a file that is moved is lost.
        late: how often a file that was moved isn't seen at first.
        looks: how often a file was not seen yet.

    Args:
        folder: where the files are.
        monkeypatch: pytest's.
    """

    def __init__(self, folder, monkeypatch):
        self._folder, self._hidden = folder, {}
        self.fails = lambda function, path: None
        self.loses = lambda source, target: False
        self.late = self.looks = 0
        for name, paths in FUNCTIONS.items():
            self._replace(monkeypatch, _pywrap_file_io, name, paths)
        schemes = tf.io.gfile.get_registered_schemes()
        monkeypatch.setattr(tf.io.gfile, "get_registered_schemes", lambda: [*schemes, "stub"])
        for name in ("save", "restore", "merge"):
            self._replace_operation(monkeypatch, name)
        self._replace_feeds(monkeypatch)
        writer = event_file_writer._pywrap_events_writer
        make = writer.EventsWriter
        monkeypatch.setattr(writer, "EventsWriter", lambda path: make(self.local("events", path)))

    def local(self, name, path):
        text = os.fsdecode(path)
        if not text.startswith(SCHEME):
            return path
        error = self.fails(name, text)
        if error is not None:
            raise error
        return (
            type(path)(text.replace(SCHEME, f"{self._folder}/").encode())
            if isinstance(path, bytes)
            else text.replace(SCHEME, f"{self._folder}/")
        )

    def _replace(self, monkeypatch, owner, name, count):
        original = getattr(owner, name)

        def replaced(*arguments):
            paths = [self.local(name, path) for path in arguments[:count]]
            if paths == list(arguments[:count]):
                return original(*arguments)
            source = os.fsdecode(arguments[0])
            if name == "FileExists" and self._hidden.get(source, 0) > 0:
                self._hidden[source] -= 1
                self.looks += 1
                raise tf.errors.NotFoundError(None, None, f"{source} is not there yet")
            if name == "RenameFile":
                target = os.fsdecode(arguments[1])
                if self.loses(source, target):
                    delete = shutil.rmtree if os.path.isdir(paths[0]) else os.remove
                    delete(paths[0])
                    return None
                self._hidden[target] = self.late
            found = original(*paths, *arguments[count:])
            if name == "GetMatchingFiles":
                return [path.replace(f"{self._folder}/", SCHEME) for path in found]
            return found

        monkeypatch.setattr(owner, name, replaced)

    def _replace_feeds(self, monkeypatch):
        """Replaces the paths that a script's own operations, as a Saver's, are fed."""
        original = session_lib.BaseSession._do_run

        def path(value):
            text = value.item() if isinstance(value, np.ndarray) and value.size == 1 else None
            is_path = isinstance(text, (str, bytes)) and os.fsdecode(text).startswith(SCHEME)
            return np.array(self.local("restore", text), object) if is_path else value

        def replaced(session, handle, targets, fetches, feeds, *arguments):
            feeds = {key: path(value) for key, value in feeds.items()}
            return original(session, handle, targets, fetches, feeds, *arguments)

        monkeypatch.setattr(session_lib.BaseSession, "_do_run", replaced)

    def _replace_operation(self, monkeypatch, name):
        original = getattr(tensor_bundle._BundleOperations, name)

        def path(argument):
            is_path = isinstance(argument, str) and argument.startswith(SCHEME)
            return self.local(name, argument) if is_path else argument

        def replaced(operations, *arguments):
            return original(
                operations,
                *(
                    [path(x) for x in each]
                    if name == "merge" and isinstance(each, list)
                    else path(each)
                    for each in arguments
                ),
            )

        monkeypatch.setattr(tensor_bundle._BundleOperations, name, replaced)


class Disk:
    """Is full, or may not be written, while `error` is set: on the last rank, which writes last.

    Attributes:
        error: see above.
        spares: files with this in their paths can be written all the same.
    """

    def __init__(self, monkeypatch, rank, size):
        self.error, self.spares, sync = None, None, commit.sync_bundles

        def sync_or_fail(prefixes):
            is_spared = self.spares is not None and self.spares in prefixes[0]
            if self.error is not None and rank == size - 1 and not is_spared:
                raise self.error
            sync(prefixes)

        monkeypatch.setattr(commit, "sync_bundles", sync_or_fail)


def warnings_noted(monkeypatch):
    """Returns a list to which the texts of this rank's warnings are added from now on."""
    texts = []
    monkeypatch.setattr(
        tf.logging, "warning", lambda text, *a: texts.append(text % a if a else text)
    )
    return texts
