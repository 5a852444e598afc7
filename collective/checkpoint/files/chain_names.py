"""Names the increments of a checkpoint, which are stored next to it.

model.ckpt-100                  the base: a whole checkpoint
model.ckpt-100.increment-1      what changed since
model.ckpt-100.increment-2      what changed since that
"""

from __future__ import annotations

import os
import re

import tensorflow.compat.v1 as tf

_INCREMENT = re.compile(r"(?P<base>.+)\.increment-(?P<number>\d+)")


def increment_prefix(base: str, number: int) -> str:
    """Returns the prefix of an increment."""
    return f"{base}.increment-{number}"


def split(prefix: str) -> tuple[str, int | None]:
    """Returns the base that a prefix names, and its increment's number; None if it has none.

    Number 0 means the base alone.
    """
    match = _INCREMENT.fullmatch(prefix)
    return (match["base"], int(match["number"])) if match else (prefix, None)


def bases_in(folder: str) -> list[str]:
    """Returns the prefixes of the whole checkpoints in a folder, sorted by names and numbers.

    A checkpoint that is gone is included if there are increments of it.
    """
    found = set()
    for entry in tf.io.gfile.listdir(folder):
        stem, extension = os.path.splitext(entry.rstrip("/"))
        if extension == ".index":
            found.add(split(stem)[0])
    stems = sorted(
        found, key=lambda stem: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", stem)]
    )
    return [os.path.join(folder, stem) for stem in stems]


def increments_of(base: str) -> list[tuple[int, str]]:
    """Returns the numbers and prefixes of the existing increments, sorted by number."""
    folder, name = os.path.split(base)
    if split(name)[1] is not None or not tf.io.gfile.isdir(folder or "."):
        return []
    found = []
    for entry in tf.io.gfile.listdir(folder or "."):
        stem, extension = os.path.splitext(entry.rstrip("/"))
        if extension == ".index":
            stem_base, number = split(stem)
            if stem_base == name and number:
                found.append((number, os.path.join(folder, stem)))
    return sorted(found)
