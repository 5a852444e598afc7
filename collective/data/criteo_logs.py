"""Converts Criteo's click logs to Parquet; ranks share the files."""

from __future__ import annotations

from typing import Any

from collective.coordination import barrier
from collective.data import criteo_files
from collective.ops.communication import collectives


def criteo(path: Any, folder: str | None = None) -> list[str]:
    """Converts the original files of Criteo's click logs to Parquet, and returns the new files.

        files = collective.data.criteo("criteo/day_*.gz", "criteo-parquet")
        dataset = collective.data.parquet(files, batch_size=512)

    A line has a label, 13 whole numbers and 26 keys of 8 hexadecimal digits, separated by tabs;
    fields may be empty. This is the format of the Kaggle challenge and of the terabyte logs.
    Columns are 'label', 'I1' … 'I13' (int32) and 'C1' … 'C26' (int64: the digits' value). An empty
    field is 0. Lines of 39 fields have no label (the challenge's test.txt), nor has their file.

    Each file becomes one of the same name with '.parquet', which appears only when it is complete.
    An existing file is kept if it isn't older than its source. Ranks share the files and wait for
    each other; call it with the same arguments on every rank.

    Args:
        path: a path, a pattern, or a list of them; names that end in .gz are unpacked.
        folder: where new files go, on a file system of this machine; None: next to their sources.

    Raises:
        ImportError: pyarrow isn't installed.
        ValueError: there is no such file, or a line is malformed; the message names the file, and
            the line's number if pyarrow reports it. Other files stay converted.
        RankError: another rank had such an error.
    """
    sources, targets = criteo_files.plan(path, folder)
    collectives.init()
    share = slice(collectives.rank(), None, collectives.size())
    barrier.run_on_all_ranks(
        None,
        "converting Criteo's files",
        lambda: criteo_files.convert_new(sources[share], targets[share]),
    )
    return targets
