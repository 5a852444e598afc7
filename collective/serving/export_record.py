"""Records what files a SavedModel has, so that the next one can link those that are the same.

    <version>/saved_model.collective.json    names, sizes and digests of all other files, and
                                             the variables of each table

TensorFlow and TensorFlow Serving ignore the file. A version without it, such as one exported by
plain TensorFlow, is served in the same way; only nothing of it can be linked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from collective.serving.table_record import TableRecord

RECORD = "saved_model.collective.json"
_FORMAT = 1
_BLOCK_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True)
class ExportedFile:
    """Describes a file of a SavedModel.

    Attributes:
        size: its bytes.
        digest: BLAKE2b, 256 bits, of its content, in hexadecimal; '' if it isn't known, of files
            with strings.
        values: (bytes, checksum) of each entry or slice of a file of variables, as they lie there.
        linked: it is a file of the base, too.
    """

    size: int
    digest: str
    values: tuple[tuple[int, int], ...] = ()
    linked: bool = False

    def to_json(self) -> dict[str, Any]:
        record = {"bytes": self.size, "blake2b": self.digest, "linked": self.linked}
        return {**record, "values": [list(value) for value in self.values]}

    @staticmethod
    def from_json(record: dict[str, Any]) -> ExportedFile:
        values = tuple((int(size), int(checksum)) for size, checksum in record["values"])
        return ExportedFile(
            int(record["bytes"]), str(record["blake2b"]), values, bool(record["linked"])
        )


@dataclasses.dataclass(frozen=True)
class ExportRecord:
    """Describes a SavedModel.

    Attributes:
        base: the version from which files were linked; None if there was none.
        data_file_bytes: how many bytes of a table a data file has at most.
        files: by their paths in the folder.
        tables: by their names; None in a record of an older release.
    """

    base: str | None
    data_file_bytes: int
    files: dict[str, ExportedFile]
    tables: dict[str, TableRecord] | None = None

    def size(self, linked: bool) -> int:
        """Returns the bytes of all files that were linked, or of all that were written."""
        return sum(file.size for file in self.files.values() if file.linked == linked)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "base": self.base,
            "bytes_linked": self.size(linked=True),
            "bytes_written": self.size(linked=False),
            "data_file_bytes": self.data_file_bytes,
            "files": {name: file.to_json() for name, file in sorted(self.files.items())},
            "tables": {
                name: table.to_json() for name, table in sorted((self.tables or {}).items())
            },
        }

    @staticmethod
    def from_json(record: dict[str, Any]) -> ExportRecord:
        """Makes a record of what JSON holds.

        Raises:
            ValueError: it is none, or a later format's.
        """
        try:
            if record["format"] != _FORMAT:
                raise ValueError(f"its format is {record['format']!r}, not {_FORMAT}")
            files = {name: ExportedFile.from_json(file) for name, file in record["files"].items()}
            tables = record.get("tables")
            if tables is not None:
                tables = {name: TableRecord.from_json(table) for name, table in tables.items()}
            return ExportRecord(record["base"], int(record["data_file_bytes"]), files, tables)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it has another form ({type(error).__name__}: {error})") from None

    def write(self, folder: str) -> None:
        """Writes the record of the SavedModel in `folder`."""
        with tf.io.gfile.GFile(os.path.join(folder, RECORD), "w") as file:
            file.write(json.dumps(self.to_json()))

    @staticmethod
    def read(folder: str) -> ExportRecord | None:
        """Reads the record of the SavedModel in `folder`; None if it has none.

        Raises:
            ValueError: it is damaged.
        """
        try:
            with tf.io.gfile.GFile(os.path.join(folder, RECORD), "r") as file:
                return ExportRecord.from_json(json.loads(file.read()))
        except tf.errors.NotFoundError:
            return None


def files_in(folder: str) -> list[str]:
    """Returns the paths within `folder` of all files below it, sorted."""
    start = len(folder.rstrip("/")) + 1
    return sorted(
        os.path.join(parent, name)[start:]
        for parent, _, names in tf.io.gfile.walk(folder)
        for name in names
    )


def digest_of(pieces: Iterable[Any]) -> str:
    """Returns the digest of buffers, one after the other."""
    digest = hashlib.blake2b(digest_size=32)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def described(path: str) -> ExportedFile:
    """Describes a file that is written."""

    def blocks() -> Iterator[bytes]:
        with tf.io.gfile.GFile(path, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield block

    return ExportedFile(tf.io.gfile.stat(path).length, digest_of(blocks()))
