"""Reads data: files dealt to the ranks, positions in checkpoints, batches, items of work, Criteo's
click logs.

    resumable    deals global batches of any dataset, and goes on where a checkpoint was saved
    parquet      makes a dataset of this rank's batches of the records of Parquet files
    records      makes a dataset of the records of TFRecord files or lines, shuffled as a whole
    Batch        holds ids, numbers and labels of samples, checked; bytes, feeds and datasets of it
    RaggedIds    holds the ids of a batch's samples, any number each
    WorkQueue    deals items, such as file names, to the ranks; a part of checkpoints
    stream       takes batches that loaders make in other processes, exactly once
    serve_stream makes a process such a loader; StreamError is about one
    register_filesystem   lets TensorFlow read and write another scheme of fsspec
    criteo       converts Criteo's click logs to Parquet

`parquet`, `criteo`, streams and the bytes of a `Batch` need pyarrow: pip install
'collective-strategy[data]'. `collective data criteo` converts from the command line. The guide is
docs/guides/data.md.

Importing this package loads no TensorFlow; the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collective.data.batches.batch import Batch
    from collective.data.batches.ragged_ids import RaggedIds
    from collective.data.criteo_logs import criteo
    from collective.data.parquet_dataset import parquet
    from collective.data.records_dataset import records
    from collective.data.resumable_dataset import resumable
    from collective.data.streams.loader import serve_stream
    from collective.data.streams.loader_connection import StreamError
    from collective.data.streams.stream_dataset import stream
    from collective.data.work_queue import WorkQueue
    from collective.ops.rows.file_systems import register_filesystem

__all__ = [
    "Batch",
    "RaggedIds",
    "StreamError",
    "WorkQueue",
    "criteo",
    "parquet",
    "records",
    "register_filesystem",
    "resumable",
    "serve_stream",
    "stream",
]
_MODULES = {
    "Batch": "collective.data.batches.batch",
    "RaggedIds": "collective.data.batches.ragged_ids",
    "StreamError": "collective.data.streams.loader_connection",
    "WorkQueue": "collective.data.work_queue",
    "criteo": "collective.data.criteo_logs",
    "parquet": "collective.data.parquet_dataset",
    "records": "collective.data.records_dataset",
    "register_filesystem": "collective.ops.rows.file_systems",
    "resumable": "collective.data.resumable_dataset",
    "serve_stream": "collective.data.streams.loader",
    "stream": "collective.data.streams.stream_dataset",
}

# Type checkers find the names above; with this function, they would accept any other name, too.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
