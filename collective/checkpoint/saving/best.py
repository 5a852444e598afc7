"""Keeps the best checkpoints, whatever the Saver deletes.

<folder>/best/model.ckpt-300.index, .data-…, .meta    hard links to the checkpoint's files, which
                                                      take no room while the originals exist;
                                                      copies if links aren't supported
<folder>/best/record.json       the kept checkpoints, with their values
<folder>/best/checkpoint        names the best one as the latest: a restore from the
                                folder uses it
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import tensorflow.compat.v1 as tf

from collective.checkpoint.files import chain, commit, tensor_bundle
from collective.checkpoint.reading import consolidate
from collective.coordination import barrier
from collective.ops.communication import collectives
from collective.tensorflow_internals.checkpoints import checkpoint_management

FOLDER, RECORD = "best", "record.json"


@dataclasses.dataclass(frozen=True)
class KeepBest:
    """Says which checkpoints are kept as the best.

    Attributes:
        metric: the name of the metric.
        mode: 'max' if a higher value is better, 'min' if a lower one is.
        count: how many are kept.
        evaluation: for an Estimator, the name of the evaluations that count; None: those without
            one.

    Raises:
        ValueError: an attribute has an invalid value.
    """

    metric: str
    mode: Literal["max", "min"]
    count: int = 1
    evaluation: str | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.metric, str) and self.metric):
            raise ValueError(f"keep_best: the metric is a name, not {self.metric!r}.")
        if self.mode not in ("max", "min"):
            raise ValueError(f"keep_best: the mode is 'max' or 'min', not {self.mode!r}.")
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 1:
            raise ValueError(f"keep_best: the count is 1 or more, not {self.count!r}.")

    @staticmethod
    def of(option: Any) -> KeepBest:
        """Returns the option unchanged, or made from (metric, mode[, count])."""
        if isinstance(option, KeepBest):
            return option
        if isinstance(option, (tuple, list)) and len(option) in (2, 3):
            return KeepBest(*option)
        raise ValueError(
            "keep_best is (metric, 'max' or 'min', how many), as in ('auc', 'max', 3), or a "
            f"collective.checkpoint.KeepBest, not {option!r}."
        )


@dataclasses.dataclass(frozen=True)
class BestCheckpoint:
    """Describes a kept checkpoint.

    Attributes:
        name: its prefix in the folder of the best.
        value: the value of the metric.
    """

    name: str
    value: float


def keep_best(path: str, metrics: Mapping[str, Any], option: Any) -> bool:
    """Keeps a checkpoint if it is among the best (see `collective.checkpoint.keep_best`)."""
    wanted = KeepBest.of(option)
    if wanted.metric not in metrics:
        raise ValueError(
            f"keep_best: there is no metric '{wanted.metric}' (there is: "
            f"{', '.join(sorted(metrics)) or 'none'})."
        )
    value = float(metrics[wanted.metric])
    collectives.init()

    def step() -> bool:
        return collectives.rank() == 0 and _keep(tf.compat.as_str_any(path), value, wanted)

    return barrier.run_on_all_ranks(None, f"keeping the best checkpoints of '{path}'", step)[0]


def _keep(prefix: str, value: float, wanted: KeepBest) -> bool:
    if tf.io.gfile.isdir(prefix):
        latest = checkpoint_management.latest_checkpoint(prefix)
        if latest is None:
            raise ValueError(f"keep_best: there is no checkpoint in '{prefix}'.")
        prefix = latest
    elif not tf.io.gfile.exists(tensor_bundle.index_path(prefix)):
        raise ValueError(f"keep_best: there is no checkpoint '{prefix}'.")
    state = chain.open_chain(prefix)
    increments = len(state.increments)
    folder, name = os.path.join(os.path.dirname(prefix), FOLDER), os.path.basename(prefix)
    if increments:
        name = f"{os.path.basename(state.base.prefix)}+{increments}"
    if math.isnan(value):
        tf.logging.warning(f"keep_best: {wanted.metric} of '{prefix}' is NaN, so it isn't kept.")
        return False
    tf.io.gfile.makedirs(folder)
    kept = [best for best in _read_record(folder, wanted) if best.name != name]
    kept.append(BestCheckpoint(name, value))
    # The sort is stable: of equal values the first one is better.
    kept.sort(key=lambda best: best.value, reverse=wanted.mode == "max")
    kept = kept[: wanted.count]
    others = [best for best in kept if best.name != name]
    # An older checkpoint of this name, or a superseded one, is removed from the record before its
    # files are deleted; files that a killed job leaves unrecorded are deleted the next time.
    if len(others) == len(kept):
        _write_record(folder, kept, wanted)
        _remove_others(folder, kept)
        return False
    if increments or not _is_same(prefix, os.path.join(folder, name)):
        _write_record(folder, others, wanted)
        _remove_others(folder, others)
        if increments:
            consolidate.consolidate(prefix, os.path.join(folder, name))
        else:
            _link(prefix, folder)
    _write_record(folder, kept, wanted)
    _remove_others(folder, kept)
    return True


def _read_record(folder: str, wanted: KeepBest) -> list[BestCheckpoint]:
    path = os.path.join(folder, RECORD)
    if not tf.io.gfile.exists(path):
        return []
    with tf.io.gfile.GFile(path, "r") as file:
        record = json.loads(file.read())
    if (record["metric"], record["mode"]) != (wanted.metric, wanted.mode):
        raise ValueError(
            f"keep_best: '{folder}' has the best checkpoints by {record['metric']} "
            f"({record['mode']}), not by {wanted.metric} ({wanted.mode}): move it away, or go on "
            "with the same metric."
        )
    return [BestCheckpoint(**best) for best in record["checkpoints"]]


def _write_record(folder: str, kept: list[BestCheckpoint], wanted: KeepBest) -> None:
    path = os.path.join(folder, RECORD)
    record = {
        "metric": wanted.metric,
        "mode": wanted.mode,
        "checkpoints": [dataclasses.asdict(best) for best in kept],
    }
    with tf.io.gfile.GFile(path + ".new", "w") as file:
        file.write(json.dumps(record, indent=1))
    commit.sync(path + ".new")
    commit.move(path + ".new", path)
    commit.sync(folder)
    if kept:
        names = [os.path.join(folder, best.name) for best in reversed(kept)]
        checkpoint_management.update_checkpoint_state_internal(folder, names[-1], names, None, True)


def _link(prefix: str, folder: str) -> None:
    """Links a checkpoint's files into the folder, the index last."""
    files = sorted(_files(prefix), key=lambda path: path.endswith(".index"))
    for path in files:
        target = os.path.join(folder, os.path.basename(path))
        try:
            os.link(path, target)
        except OSError:
            tf.io.gfile.copy(path, target, overwrite=True)
            commit.sync(target)
    commit.sync(folder)


def _files(prefix: str) -> Iterator[str]:
    bundle = tensor_bundle.BundleIndex(prefix)
    yield tensor_bundle.index_path(prefix)
    for shard in range(bundle.shards):
        yield tensor_bundle.data_path(prefix, shard, bundle.shards)
    if tf.io.gfile.exists(f"{prefix}.meta"):
        yield f"{prefix}.meta"


def _is_same(prefix: str, other: str) -> bool:
    """Tells whether two checkpoints have the same index, which contains all values' checksums."""
    paths = [tensor_bundle.index_path(prefix), tensor_bundle.index_path(other)]
    if not all(map(tf.io.gfile.exists, paths)):
        return False
    contents = []
    for path in paths:
        with tf.io.gfile.GFile(path, "rb") as file:
            contents.append(file.read())
    return bool(contents[0] == contents[1])


def _remove_others(folder: str, kept: list[BestCheckpoint]) -> None:
    """Deletes the files of checkpoints that aren't kept, an index before its data."""
    names = {best.name for best in kept}
    entries = [
        entry
        for entry in tf.io.gfile.listdir(folder)
        if entry.endswith((".index", ".meta")) or ".data-" in entry
    ]
    for entry in sorted(entries, key=lambda entry: not entry.endswith(".index")):
        if entry.rpartition(".")[0] not in names:
            tf.io.gfile.remove(os.path.join(folder, entry))
