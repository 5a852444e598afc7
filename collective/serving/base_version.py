"""Links files of an earlier version of a SavedModel into a new one."""

from __future__ import annotations

import os
from typing import Any

import tensorflow.compat.v1 as tf

from collective.checkpoint.files.tensor_bundle import Bundle, index_path
from collective.serving import versions
from collective.serving.export_record import RECORD, ExportedFile, ExportRecord


class BaseVersion:
    """Is the base of a new version, for one rank.

    A file is found by the digest of its content, whatever its name, and linked, so that the new
    version is independent: deleting the base doesn't affect it. If linking isn't possible, the
    caller writes the file.

    Args:
        path: the version's folder.
        record: the record of its files; None if it has none, in which case nothing is linked.

    Attributes:
        problem: why a file of the base could not be linked; '' as long as all could.
    """

    def __init__(self, path: str, record: ExportRecord | None):
        self.path, self.record = path, record
        self.problem = "" if record else f"it has no {RECORD}"
        files = {} if record is None else record.files
        self._names = {file.digest: name for name, file in files.items() if file.digest}

    def find(self, digest: str) -> ExportedFile | None:
        """Returns the file with this content; None if the base has none."""
        name = self._names.get(digest)
        return None if self.record is None or name is None else self.record.files[name]

    def link(self, digest: str, target: str) -> bool:
        """Makes `target` a link to the file with this content; tells whether it did."""
        known, source = self.find(digest), os.path.join(self.path, self._names.get(digest, ""))
        if known is None:
            return False
        try:
            if "://" in source or "://" in target:
                raise OSError("there are no hard links in a remote file system")
            if os.stat(source).st_size != known.size:
                raise OSError(f"{source} isn't as it was written")
            os.link(source, target)
        except OSError as error:
            self.problem = self.problem or str(error)
            return False
        return True

    def variables(self) -> set[str]:
        """Returns the names of its variables.

        Raises:
            tf.errors.DataLossError: their index is damaged.
        """
        prefix = os.path.join(self.path, "variables", "variables")
        return set(Bundle(prefix).entries) if tf.io.gfile.exists(index_path(prefix)) else set()

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "record": self.record and self.record.to_json()}

    @staticmethod
    def from_json(found: dict[str, Any]) -> BaseVersion:
        record = found["record"]
        return BaseVersion(found["path"], record and ExportRecord.from_json(record))


def find_base(base: str, folder: str) -> BaseVersion | None:
    """Finds the version that `base` names: by its folder, or as the newest in a folder of them.

    Args:
        base: the path.
        folder: where the new version is exported.

    Returns:
        The version; None if `base` is `folder` and has none yet.

    Raises:
        ValueError: there is no SavedModel, or none that is complete.
    """
    path: str | None = base
    if not versions.is_saved_model(base):
        path = versions.newest_complete(base)
        if path is None and os.path.normpath(base) == os.path.normpath(folder):
            damaged = versions.versions_in(base)
            if not damaged:
                return None
        if path is None:
            raise ValueError(_no_base(base))
    problem = versions.problem_of(str(path))
    if problem is not None:
        raise ValueError(
            f"base='{base}' can't be linked from: {problem}. Name another version, or export "
            "without base=, which writes everything."
        )
    return BaseVersion(str(path), ExportRecord.read(str(path)))


def _no_base(base: str) -> str:
    found = [
        f"version {number} isn't complete ({versions.problem_of(path)})"
        for number, path in versions.versions_in(base)[:1]
    ]
    if not found:
        is_there = tf.io.gfile.exists(base)
        found = ["it is neither one nor a folder of versions" if is_there else "it doesn't exist"]
    return (
        f"There is no SavedModel at base='{base}': {found[0]}. Name a version that was exported, "
        "or its folder; or export without base=, which writes everything."
    )
