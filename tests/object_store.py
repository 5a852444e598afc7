"""Stands in for an object store, `objects://bucket/key`, which several processes share."""

import os
import shutil
import tempfile
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractFileSystem

from collective.data import register_filesystem

SCHEME = "objects"


class ObjectStore(AbstractFileSystem):
    """Keeps objects in a local folder, one file each. It has no folders, and can't rename.

    A name like a folder's is only what several keys begin with, and an upload is visible once it is
    whole.

    Attributes:
        before: f(operation, key), called before each operation, to wait or to raise an error.

    Args:
        root: the local folder.
    """

    protocol = (SCHEME,)
    before = staticmethod(lambda operation, key: None)

    def __init__(self, root, **options):
        super().__init__(**options)
        self._root = root

    def local_file(self, key):
        return os.path.join(self._root, quote(key, safe=""))

    def _keys(self):
        return [unquote(name) for name in os.listdir(self._root) if not name.startswith(".")]

    def info(self, path, **_):
        key = self._strip_protocol(path)
        self.before("info", key)
        if os.path.exists(self.local_file(key)):
            return {"name": key, "type": "file", "size": os.path.getsize(self.local_file(key))}
        if any(each.startswith(f"{key}/") for each in self._keys()):
            return {"name": key, "type": "directory", "size": 0}
        raise FileNotFoundError(key)

    def ls(self, path, detail=True, **_):
        key = self._strip_protocol(path)
        self.before("list", key)
        inside = (each[len(key) + 1 :] for each in self._keys() if each.startswith(f"{key}/"))
        names = {f"{key}/{each.partition('/')[0]}" for each in inside}
        if not names:
            names = {self.info(key)["name"]}
        return [self.info(name) for name in sorted(names)] if detail else sorted(names)

    def _open(self, path, mode="rb", **_):
        key = self._strip_protocol(path)
        self.before("open", key)
        return open(self.local_file(key), mode)

    def put_file(self, lpath, rpath, **_):
        key = self._strip_protocol(rpath)
        self.before("write", key)
        with tempfile.NamedTemporaryFile(dir=self._root, prefix=".", delete=False) as part:
            with open(lpath, "rb") as content:
                shutil.copyfileobj(content, part)
        os.replace(part.name, self.local_file(key))

    def pipe_file(self, path, value, **_):
        with tempfile.NamedTemporaryFile() as file:
            file.write(value)
            file.flush()
            self.put_file(file.name, path)

    def cp_file(self, path1, path2, **_):
        if self.info(path1)["type"] == "file":
            self.before("copy", self._strip_protocol(path1))
            self.put_file(self.local_file(self._strip_protocol(path1)), path2)

    def _rm(self, path):
        key = self._strip_protocol(path)
        self.before("delete", key)
        if os.path.exists(self.local_file(key)):
            os.remove(self.local_file(key))


def register(root):
    """Lets TensorFlow use `objects://`, kept in a local folder that is there."""
    fsspec.register_implementation(SCHEME, ObjectStore, clobber=True)
    register_filesystem(SCHEME, root=str(root))


def bring_up():
    """Undoes what a test has set `ObjectStore.before` to."""
    ObjectStore.before = staticmethod(lambda operation, key: None)


def bring_down(error, *operations, name=""):
    """Lets operations fail, for the keys that a name is in."""

    def fail(operation, key):
        if operation in operations and name in key:
            raise error

    ObjectStore.before = staticmethod(fail)
