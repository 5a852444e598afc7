"""Removes what killed exports have left in a folder of versions.

    <dir>/temp-<seconds since 1970>/          a version while it is written
        owner                                 which process of which host writes it

TensorFlow Serving and `collective.serving.watch` ignore them, because their names aren't numbers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time

import tensorflow.compat.v1 as tf

from collective.checkpoint.saving import ownership

# A process that can't be seen, on another host for example, counts as ended after so many seconds.
MOST_SECONDS = 24 * 3600.0
_NAME = re.compile(r"temp-(\d+)")
_OWNER = "owner"


def make(folder: str) -> None:
    """Makes the folder in which this process writes a version."""
    tf.io.gfile.makedirs(folder)
    owner = ownership.this_process(ownership.marks().id)
    with tf.io.gfile.GFile(os.path.join(folder, _OWNER), "w") as file:
        file.write(json.dumps(dataclasses.asdict(owner)))


def remove_abandoned(folder: str) -> None:
    """Removes the folders in `folder` of processes that are gone.

    A process on this host is visible. For other processes, and folders without an owner, the age
    decides: by the folder's name, the export began more than `MOST_SECONDS` ago.
    """
    if not tf.io.gfile.isdir(folder):
        return
    for entry in tf.io.gfile.listdir(folder):
        match = _NAME.fullmatch(entry.rstrip("/"))
        if match is None:
            continue
        path = os.path.join(folder, entry.rstrip("/"))
        mark = ownership.read(os.path.join(path, _OWNER))
        lives = None if mark is None or mark.owner is None else mark.owner.lives()
        is_old = time.time() - int(match[1]) > MOST_SECONDS
        if lives is False or lives is None and is_old:
            try:
                tf.io.gfile.rmtree(path)
            except tf.errors.OpError as error:  # another user's, say
                tf.logging.warning("'%s' of a killed export can't be removed: %s", path, error)
