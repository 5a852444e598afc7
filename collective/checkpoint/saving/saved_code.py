"""Saves a script's code next to its checkpoints, and finds it again: `scope(save_code=True)`.

    <folder>/code/<digest>/manifest.json    what was saved, how the script was started, versions
    <folder>/code/<digest>/files/…          the script and the files below its folder
    <folder>/code/current                   the digest that was saved last

The digest covers all files: the same code is saved only once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from collective.version import __version__

FOLDER, MANIFEST, CURRENT, FILES = "code", "manifest.json", "current", "files"
# A folder of checkpoints has a file that names the latest one.
STATE, STATE_BEGINS = "checkpoint", b"model_checkpoint_path:"
ENDINGS = (".py", ".yaml", ".yml", ".json", ".toml")
LEFT_OUT_FOLDERS = frozenset(
    {"__pycache__", "node_modules", "site-packages", "dist-packages", "venv", "build", "dist"}
)
FILE_BYTES, ALL_BYTES, MOST_FILES, MOST_FOLDERS = 1 << 20, 16 << 20, 2000, 5000
PACKAGES = ("tensorflow", "tensorflow-cpu", "horovod", "numpy", "keras")
# Names that may mean a secret; text in a file that means a key.
SECRET = re.compile(r"passw|secret|token|credential|api[-_]?key|private[-_]?key", re.IGNORECASE)
SECRET_CONTENT = re.compile(rb"PRIVATE KEY-----|\"private_key\"|aws_secret_access_key")
HIDDEN = "***"


@dataclasses.dataclass
class Found:
    """Lists the files of a script.

    Attributes:
        root: the script's folder.
        script: the script's path in it.
        files: paths in it, the script first.
        left_out: {path: reason}.
    """

    root: str
    script: str
    files: list[str] = dataclasses.field(default_factory=list)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)


def main_script() -> str | None:
    """Returns the path of the running script; None in a notebook or for `python -c`."""
    candidates = [sys.argv[0] if sys.argv else "", getattr(sys.modules["__main__"], "__file__", "")]
    for path in candidates:
        if path and path.endswith(".py") and os.path.isfile(path):
            return os.path.realpath(path)
    return None


def find_files(script: str, excluded: Sequence[str] = ()) -> Found:
    """Finds the code and configurations below a script's folder.

    Hidden folders, environments, built files and folders of checkpoints (of any job, with the code
    saved there) are left out; links to folders aren't followed. Sizes are bounded: 1 MB per file,
    16 MB and 2,000 files in all.

    Args:
        script: the path of the script.
        excluded: further folders to leave out.
    """
    root = os.path.dirname(script)
    found = Found(root, os.path.basename(script))
    excluded_paths = {os.path.realpath(folder) for folder in excluded}
    size = _add(found, found.script, 0)
    for number, (folder, folders, names) in enumerate(os.walk(root)):
        if number >= MOST_FOLDERS:
            found.left_out[os.path.relpath(folder, root)] = f"more than {MOST_FOLDERS:,} folders"
            break
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in LEFT_OUT_FOLDERS
            and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
            and os.path.realpath(os.path.join(folder, name)) not in excluded_paths
        )
        for name in [n for n in folders if _is_of_a_job(os.path.join(folder, n))]:
            folders.remove(name)
            path = os.path.relpath(os.path.join(folder, name), root)
            found.left_out[path] = "it is a folder of checkpoints, or of saved code"
        for name in sorted(names):
            path = os.path.relpath(os.path.join(folder, name), root)
            if name.endswith(ENDINGS) and not name.startswith(".") and path != found.script:
                size = _add(found, path, size)
    return found


def _is_of_a_job(folder: str) -> bool:
    """Tells whether a folder has checkpoints, or code that is saved next to checkpoints."""
    state, current = os.path.join(folder, STATE), os.path.join(folder, CURRENT)
    with contextlib.suppress(OSError):
        if os.path.isfile(state):  # reading a pipe would block
            with open(state, "rb") as file:
                if file.read(len(STATE_BEGINS)) == STATE_BEGINS:
                    return True
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if not os.path.isfile(current):
            return False
        with open(current, encoding="utf-8") as file:
            digest = file.read(100).strip()
        return os.path.isfile(os.path.join(folder, digest, MANIFEST))
    return False


def _add(found: Found, path: str, size: int) -> int:
    """Adds a file if it may be saved; returns the bytes of all files."""
    full = os.path.join(found.root, path)
    try:
        bytes_here = os.path.getsize(full)
        if bytes_here > FILE_BYTES:
            found.left_out[path] = f"it has {bytes_here:,} bytes, more than {FILE_BYTES:,}"
        elif size + bytes_here > ALL_BYTES or len(found.files) >= MOST_FILES:
            found.left_out[path] = "all files together are too many"
        elif SECRET.search(os.path.basename(path)) and not path.endswith(".py"):
            found.left_out[path] = "its name says that it may hold a secret"
        elif SECRET_CONTENT.search(_content(full)):
            found.left_out[path] = "it holds a key"
        else:
            found.files.append(path)
            return size + bytes_here
    except OSError as error:
        found.left_out[path] = f"it can't be read: {error}"
    return size


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def visible_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns a command line with possible secrets hidden: `--password=***`, `--token ***`."""
    out: list[str] = []
    hides_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hides_next and not argument.startswith("-"):
            out.append(HIDDEN)
        elif equals and SECRET.search(name):
            out.append(f"{name}={HIDDEN}")
        else:
            out.append(re.sub(r"(://[^/@:]*:)[^/@]*@", rf"\1{HIDDEN}@", argument))
        hides_next = argument.startswith("-") and not equals and bool(SECRET.search(name))
    return out


def versions() -> dict[str, str]:
    """Returns the versions of Python, the system and the packages that matter."""
    found = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "collective": __version__,
    }
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def save(folder: str, options: dict[str, Any], ranks: int) -> str | None:
    """Saves the running script's code next to the checkpoints in `folder`, whole or not at all.

    Args:
        folder: the folder of the checkpoints.
        options: the options of scope(), for the manifest.
        ranks: how many ranks there are.

    Returns:
        The folder of the code; None if there is no script.
    """
    script = main_script()
    if script is None:
        return None
    found = find_files(script, [folder])
    contents = {path: _content(os.path.join(found.root, path)) for path in found.files}
    hashes = {path: hashlib.sha256(content).hexdigest() for path, content in contents.items()}
    digest = hashlib.sha256(json.dumps([found.script, sorted(hashes.items())]).encode()).hexdigest()
    target = os.path.join(folder, FOLDER, digest[:12])
    manifest = {
        "script": found.script,
        "root": found.root,
        "arguments": visible_arguments(sys.argv[1:]),
        "files": hashes,
        "left_out": found.left_out,
        "versions": versions(),
        "scope": {name: _text(value) for name, value in options.items()},
        "ranks": ranks,
        "saved": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(target):
        staging = f"{target}_temp_{secrets.token_hex(4)}"
        try:
            for path, content in contents.items():
                _write(os.path.join(staging, FILES, path), content)
            _write(os.path.join(staging, MANIFEST), json.dumps(manifest, indent=1).encode())
            os.rename(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    current = os.path.join(folder, FOLDER, CURRENT)
    _write(current + ".new", os.path.basename(target).encode())
    os.replace(current + ".new", current)
    return target


def is_in(folder: str) -> bool:
    """Tells whether there is code next to the checkpoints in a folder."""
    return os.path.isfile(os.path.join(folder, FOLDER, CURRENT))


def _text(value: Any) -> Any:
    is_plain = isinstance(value, (bool, int, float, str)) or value is None
    return value if is_plain else repr(value)


def _write(path: str, content: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


class SavedCode:
    """Holds the code that trained a model, as it was.

    Attributes:
        folder: the folder with its files, as the script's folder was.
        script: the path of the script.
        manifest: what is known about the job: 'script', 'arguments', 'versions', 'scope', 'ranks',
            'saved', 'files', 'left_out'.
    """

    def __init__(self, path: str):
        self.folder = os.path.join(path, FILES)
        with open(os.path.join(path, MANIFEST), encoding="utf-8") as file:
            self.manifest: dict[str, Any] = json.load(file)
        self.script = os.path.join(self.folder, self.manifest["script"])
        for name, digest in self.manifest["files"].items():
            file_path = os.path.join(self.folder, name)
            if not os.path.isfile(file_path):
                raise ValueError(f"{file_path} is missing: it was saved with the code.")
            if hashlib.sha256(_content(file_path)).hexdigest() != digest:
                raise ValueError(f"{file_path} isn't what was saved: it was changed since.")

    @contextlib.contextmanager
    def importable(self) -> Iterator[None]:
        """While open, lets `import` find the saved modules before any others.

        Modules with these names that were already imported are set aside, and restored at the end.
        """
        names = {path.replace(os.sep, "/").partition("/")[0] for path in self.manifest["files"]}
        names = {name.removesuffix(".py") for name in names}
        before = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in names}
        for name in before:
            del sys.modules[name]
        sys.path.insert(0, self.folder)
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(self.folder)
            for name in [n for n in sys.modules if n.partition(".")[0] in names]:
                del sys.modules[name]
            sys.modules.update(before)

    def module(self, name: str) -> Any:
        """Imports a saved module: 'model', 'layers.towers', or the script by its name."""
        with self.importable():
            return importlib.import_module(name)


def load_code(path: str) -> SavedCode:
    """Finds the code next to a checkpoint (see `collective.checkpoint.load_code`)."""
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    current = os.path.join(folder, FOLDER, CURRENT)
    if not os.path.isfile(current):
        raise ValueError(
            f"there is no code in '{folder}': a job with scope(save_code=True) saves it, with its "
            "first checkpoint there."
        )
    digest = _content(current).decode().strip()
    return SavedCode(os.path.join(folder, FOLDER, digest))
