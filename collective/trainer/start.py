"""Decides from what training starts: its own checkpoint, another one's weights, or nothing.

    model_dir has a checkpoint   with this continue_id         it continues
                                 with another one              an error: give another model_dir
    latest_checkpoint=PATH       with this continue_id         it is copied to model_dir: continues
                                 with another one, or None     its weights; counters start at 0
    neither                                                    a new training

Source: `determined.pytorch.Trainer.fit(latest_checkpoint)` and
`determined.keras.DeterminedCallback(checkpoint, continue_id)`.
"""

from __future__ import annotations

import os

import tensorflow.compat.v1 as tf

from collective.checkpoint.files import chain
from collective.checkpoint.reading import consolidate, opening
from collective.checkpoint.saving.best import FOLDER as BEST
from collective.coordination import barrier
from collective.job.info import job_info
from collective.ops.communication import collectives
from collective.tensorflow_internals.checkpoints import checkpoint_management
from collective.trainer import record as records
from collective.trainer.record import TrainingRecord


def decide(
    folder: str, latest_checkpoint: str | None, continue_id: str | None
) -> tuple[TrainingRecord, str | None]:
    """Returns the record to continue, or a new one; and the checkpoint whose weights to take.

    Rank 0 looks at the files, and all ranks do what it finds. Every rank calls it.

    Raises:
        ValueError: on rank 0 the checkpoints are of another training, or there is none at the path.
        RankError: that, on the other ranks.
    """

    def look() -> str | None:
        if collectives.rank() > 0:
            return None
        return _weights_source(folder, latest_checkpoint, continue_id)

    weights = barrier.run_on_all_ranks(None, "looking for a checkpoint to start from", look)[0]
    record = None
    if checkpoint_management.latest_checkpoint(folder):
        record = records.read(folder)
    record = record or TrainingRecord(folder)
    record.continue_id = continue_id or record.continue_id
    return record, weights


def _weights_source(
    folder: str, latest_checkpoint: str | None, continue_id: str | None
) -> str | None:
    """Returns the checkpoint whose weights to take; None if `folder` has one, or there is none."""
    own = checkpoint_management.latest_checkpoint(folder)
    if own:
        _check_own(folder, own, latest_checkpoint, continue_id)
        return None
    if latest_checkpoint is None or latest_checkpoint == "auto":
        return None
    prefix = chain.prefix_of(os.fspath(latest_checkpoint))
    if continue_id is None or _id_at(os.path.dirname(prefix)) != continue_id:
        return prefix
    _adopt(prefix, folder)
    return None


def _check_own(
    folder: str, own: str, latest_checkpoint: str | None, continue_id: str | None
) -> None:
    if latest_checkpoint is None and not job_info().restarts:
        raise ValueError(
            f"latest_checkpoint=None begins from nothing, but '{folder}' has '{own}'. Give another "
            "model_dir, or latest_checkpoint='auto', which continues."
        )
    found = _id_at(folder)
    if continue_id is not None and found != continue_id:
        raise ValueError(
            f"continue_id={continue_id!r}, but the checkpoints in '{folder}' are those of "
            f"{found!r}. To continue them, give that one; to take their weights only, give another "
            f"model_dir and latest_checkpoint='{folder}'."
        )
    if latest_checkpoint is None or latest_checkpoint == "auto":
        return
    path = os.fspath(latest_checkpoint)
    if not tf.io.gfile.isdir(path) and _is_same_folder(os.path.dirname(path), folder):
        if os.path.basename(path) != os.path.basename(own):
            raise ValueError(
                f"latest_checkpoint='{path}', but the newest one in '{folder}' is '{own}', with "
                "which training there continues. To start from an older one, give another "
                "model_dir."
            )


def _is_same_folder(path: str, other: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)


def _id_at(folder: str) -> str | None:
    """Returns the id of the checkpoints in a folder, or in its folder of the best ones."""
    found = records.read(folder)
    if found is None and os.path.basename(folder) == BEST:
        found = records.read(os.path.dirname(folder))
    return found.continue_id if found is not None else None


def _adopt(prefix: str, folder: str) -> None:
    """Copies a checkpoint, and its record, to the folder where its training continues."""
    step = chain.step_of(opening.open_checkpoint(prefix).last)
    target = os.path.join(folder, f"model.ckpt-{step}")
    consolidate.consolidate(prefix, target)
    source = os.path.dirname(prefix)
    if not tf.io.gfile.exists(os.path.join(source, records.FILE)):
        source = os.path.dirname(source)  # `prefix` is one of the best
    tf.io.gfile.copy(
        os.path.join(source, records.FILE), os.path.join(folder, records.FILE), overwrite=True
    )
    checkpoint_management.update_checkpoint_state_internal(folder, target, [target], None, True)


def latest(folder: str) -> tuple[str, int]:
    """Returns the newest checkpoint in a folder, and its global step. Every rank calls it.

    Raises:
        ValueError: on rank 0 there is none. RankError: that, on the other ranks.
    """

    def look() -> tuple[str, int] | None:
        if collectives.rank() > 0:
            return None
        prefix = chain.prefix_of(folder)
        return prefix, chain.step_of(opening.open_checkpoint(prefix).last) or 0

    found = barrier.run_on_all_ranks(None, f"looking for the last checkpoint in '{folder}'", look)
    prefix, step = found[0]  # type: ignore[misc]
    return prefix, step
