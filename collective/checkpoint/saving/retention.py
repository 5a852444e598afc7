"""Decides which checkpoints a Saver keeps."""

from __future__ import annotations

import dataclasses
import time
from typing import Any


@dataclasses.dataclass
class Retention:
    """Decides, as TensorFlow does, which checkpoints a Saver keeps once there is a new one.

    Attributes:
        last: [(path, seconds)] of the checkpoints that are kept, the newest last.
        to_be_deleted: [(path, seconds)] of checkpoints to be deleted later.
        next_time: the time after which one more is kept forever (`keep_checkpoint_every_n_hours`).
        superseded: paths of the checkpoints to be deleted now.
    """

    last: list[Any]
    to_be_deleted: list[Any]
    next_time: float
    superseded: list[str]

    @staticmethod
    def after(saver: Any, prefix: str | None) -> Retention:
        """Decides for the new checkpoint `prefix`; None if it isn't counted."""
        saver_def = saver.saver_def
        out = Retention(
            last=list(saver._last_checkpoints),
            to_be_deleted=list(saver._checkpoints_to_be_deleted),
            next_time=saver._next_checkpoint_time,
            superseded=[],
        )
        if prefix is None:
            return out
        if saver_def.max_to_keep:
            out.last = [entry for entry in out.last if entry[0] != prefix]
            out.last.append((prefix, time.time()))
            if len(out.last) > saver_def.max_to_keep:
                out.to_be_deleted.append(out.last.pop(0))
        if out.to_be_deleted:
            path, seconds = out.to_be_deleted.pop(0)
            if seconds > out.next_time:
                out.next_time += saver_def.keep_checkpoint_every_n_hours * 3600
            elif path != prefix:
                out.superseded.append(path)
        return out

    def apply(self, saver: Any) -> None:
        """Stores the decision in the Saver."""
        saver._last_checkpoints = self.last
        saver._checkpoints_to_be_deleted = self.to_be_deleted
        saver._next_checkpoint_time = self.next_time
