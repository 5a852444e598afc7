"""The files of --log-dir: every byte that each rank wrote, as FOLDER/rank.N/stdout and stderr."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from collective.job.errors import UsageError
from collective.launch.planning.plan import LaunchPlan

STREAM_NAMES = ("stdout", "stderr")


def check_logs(plan: LaunchPlan) -> None:
    """Checks whether the logs can be written, and leaves no files.

    Raises:
        UsageError: they can't be written.
    """
    if plan.log_dir is None:
        return
    folder = Path(plan.log_dir).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        os.rmdir(tempfile.mkdtemp(dir=folder))
    except OSError as error:
        error.filename = plan.log_dir  # the trial's own name would tell the user nothing
        raise _unwritable(plan.log_dir, error) from None


def _unwritable(log_dir: str, error: OSError) -> UsageError:
    return UsageError(f"--log-dir {log_dir} can't be written: {error}")


def open_logs(plan: LaunchPlan) -> dict[int, tuple[BinaryIO | None, BinaryIO | None]]:
    """Opens the files that store stdout and stderr of each rank of this host.

    Raises:
        UsageError: they can't be written.
    """
    if plan.log_dir is None:
        return {rank: (None, None) for rank in plan.local_ranks}
    return _open(plan, [f"rank.{rank}" for rank in plan.local_ranks], plan.local_ranks)


def _open(
    plan: LaunchPlan, folders: Sequence[str], numbers: Sequence[int]
) -> dict[int, tuple[BinaryIO | None, BinaryIO | None]]:
    """Opens two files in each folder of --log-dir; raises UsageError where they can't be."""
    assert plan.log_dir is not None
    logs: dict[int, tuple[BinaryIO | None, BinaryIO | None]] = {}
    try:
        for name, number in zip(folders, numbers):
            folder = Path(plan.log_dir, name)
            folder.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a reader who follows the file sees the output as the rank writes it.
            # A restart appends to the files.
            stdout, stderr = (_opened(folder / each, plan) for each in STREAM_NAMES)
            logs[number] = stdout, stderr
    except OSError as error:
        raise _unwritable(plan.log_dir, error) from None
    return logs


def open_loader_logs(plan: LaunchPlan) -> dict[int, tuple[BinaryIO | None, BinaryIO | None]]:
    """Opens the files that store stdout and stderr of each loader, FOLDER/loader.N/stdout.

    Raises:
        UsageError: they can't be written.
    """
    if plan.log_dir is None:
        return dict.fromkeys(range(plan.loaders), (None, None))
    return _open(plan, [f"loader.{number}" for number in range(plan.loaders)], range(plan.loaders))


def _opened(path: Path, plan: LaunchPlan) -> BinaryIO:
    if plan.restart_count:
        return open(path, "ab", buffering=0)
    return open(path, "wb", buffering=0)
