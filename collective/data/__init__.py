"""Reads data: files dealt to the ranks, places in checkpoints, items of work, Criteo's click logs.

    resumable    deals global batches of any dataset, and goes on where a checkpoint was saved
    parquet      makes a dataset of this rank's batches of the records of Parquet files
    records      makes a dataset of the records of TFRecord files or lines, shuffled as a whole
    WorkQueue    deals items, such as file names, to the ranks; a part of checkpoints
    criteo       converts Criteo's click logs to Parquet

`parquet` and `criteo` need pyarrow: pip install 'collective-strategy[data]'. `collective data
criteo` converts from the command line. The guide is docs/guides/data.md.
"""

from __future__ import annotations

from collective.data.criteo_logs import criteo
from collective.data.parquet_dataset import parquet
from collective.data.records_dataset import records
from collective.data.resumable import resumable
from collective.data.work_queue import WorkQueue

__all__ = ["WorkQueue", "criteo", "parquet", "records", "resumable"]
