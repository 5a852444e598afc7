"""Chooses where rows of clicks come from: files of Criteo's form, or a generated log.

A source has records (lines, or numbers of rows), which are dealt to the ranks, and makes features
of a batch of them. Only a rank's own records are parsed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorflow.compat.v1 as tf

from collective import data
from common.click_log import CARDINALITIES, CATEGORICAL, DENSE, Rows

IDS = 2**62  # how many there are of hashed values
SHUFFLED = 200_000  # records that are shuffled together
# For a missing value there is an empty field.
SEPARATORS = {".txt": "\t", ".csv": ","}
PARQUET = ".parquet"
# The columns of files that `collective data criteo` makes.
LABEL, HISTORY = "label", "history"
COUNTS = [f"I{i}" for i in range(1, DENSE + 1)]
KEYS = [f"C{i}" for i in range(1, CATEGORICAL + 1)]
READ_TOGETHER = 1024  # records of a Parquet file


class Source(Protocol):
    """Gives the rows of 'train' and of 'test'.

    Attributes:
        table_rows: of each categorical column.
        best_auc: the best possible on the test rows, if that is known.
        reference: a line on what the scores are to be compared with, or ''.
        shuffled: how many training records are shuffled together; 1: they stay in order.
    """

    table_rows: tuple[int, ...]
    shuffled: int
    best_auc: float | None
    reference: str

    def count(self, split: str) -> int:
        """Returns the number of rows."""
        ...

    def records(self, split: str) -> Any:
        """Makes a `tf.data.Dataset` of single records, the same on every rank."""
        ...

    def parse(self, split: str, records: tf.Tensor) -> dict[str, tf.Tensor]:
        """Makes the features of a batch of records, and their 'label'."""
        ...


class Log(Protocol):
    """Stands for generated rows."""

    @property
    def train(self) -> Rows: ...

    @property
    def test(self) -> Rows: ...

    @property
    def best_auc(self) -> float: ...

    @property
    def best_log_loss(self) -> float: ...


class GeneratedSource:
    """Gives the rows of a generated log, which every rank has in memory."""

    shuffled = SHUFFLED

    def __init__(self, log: Log, table_rows: tuple[int, ...] = CARDINALITIES):
        self._rows: dict[str, Rows] = {"train": log.train, "test": log.test}
        self.table_rows = table_rows
        self.best_auc: float | None = log.best_auc
        self.reference = (
            f"the best possible on these generated rows is AUC {log.best_auc:.4f}  "
            f"log loss {log.best_log_loss:.4f}"
        )

    def count(self, split: str) -> int:
        return len(self._rows[split]["label"])

    def records(self, split: str) -> Any:
        return tf.data.Dataset.range(self.count(split))

    def parse(self, split: str, records: tf.Tensor) -> dict[str, tf.Tensor]:
        rows = self._rows[split]
        names = sorted(rows)

        def take(numbers: np.ndarray) -> list[np.ndarray]:
            return [rows[name][numbers] for name in names]

        values = tf.numpy_function(take, [records], [rows[name].dtype for name in names])
        for name, value in zip(names, values):
            value.set_shape([None, *rows[name].shape[1:]])
        return dict(zip(names, values))


class TextSource:
    """Reads Criteo's text: a label, 13 counts and 26 categorical values a line, no header.

    The folder has `train.txt` and `eval.txt`, tab-separated as Criteo publishes its log, or
    `train.csv` and `eval.csv`, comma-separated as DeepRec's examples have it. An id is a hash of
    the value's text.

    Args:
        folder: of the files.
        buckets: the rows of each table.
        history: the longest history of items that a line has in a field after the others,
            separated by spaces; 0 where there is no such field.

    Raises:
        OSError: a file is missing.
    """

    shuffled = SHUFFLED

    def __init__(self, folder: str, buckets: int, history: int = 0):
        self._history = history
        ending = next((ending for ending in SEPARATORS if has_files(folder, ending)), None)
        if ending is None:
            raise FileNotFoundError(
                f"{folder} has neither train.txt and eval.txt (tab-separated) nor train.csv and "
                "eval.csv (comma-separated) nor train.parquet and eval.parquet"
            )
        self._files, self._separator = files_of(folder, ending), SEPARATORS[ending]
        self._counts = {split: _count_lines(file) for split, file in self._files.items()}
        self.table_rows = (buckets,) * CATEGORICAL
        self.best_auc: float | None = None
        self.reference = ""

    def count(self, split: str) -> int:
        return self._counts[split]

    def records(self, split: str) -> Any:
        return tf.data.TextLineDataset(str(self._files[split]))

    def parse(self, split: str, records: tf.Tensor) -> dict[str, tf.Tensor]:
        defaults: list = [[0.0]] * (1 + DENSE) + [[""]] * (CATEGORICAL + bool(self._history))
        fields = tf.io.decode_csv(
            records, defaults, field_delim=self._separator, use_quote_delim=False
        )
        first = 1 + DENSE
        values = tf.stack(fields[first : first + CATEGORICAL], axis=1)
        features = {
            "label": fields[0],
            "dense": tf.stack(fields[1:first], axis=1),
            "categorical": tf.strings.to_hash_bucket_fast(values, IDS),
        }
        if self._history:
            items = tf.RaggedTensor.from_sparse(tf.strings.split(fields[-1]))
            hashed = items.with_values(tf.strings.to_hash_bucket_fast(items.values, IDS))
            features["history"] = hashed.to_tensor(-1, shape=[None, self._history])
        return features


class ParquetSource:
    """Reads Criteo's columns from `train.parquet` and `eval.parquet`.

    `collective data criteo` makes such files of text. An id is the value itself.

    Args:
        folder: of the files.
        buckets: the rows of each table.
        history: the longest history of items, the lists in a column of that name; 0 for none.

    Raises:
        ImportError: there is no pyarrow.
        OSError, ValueError: a file isn't whole, or lacks a column.
    """

    shuffled = SHUFFLED

    def __init__(self, folder: str, buckets: int, history: int = 0):
        self._history, self._files = history, files_of(folder, PARQUET)
        self._columns = [LABEL, *COUNTS, *KEYS, *([HISTORY] if history else [])]
        self._counts = {split: self._count(file) for split, file in self._files.items()}
        self.table_rows = (buckets,) * CATEGORICAL
        self.best_auc: float | None = None
        self.reference = ""

    def count(self, split: str) -> int:
        return self._counts[split]

    def records(self, split: str) -> Any:
        path = str(self._files[split])
        whole = data.parquet(path, self._columns, READ_TOGETHER, rank=0, ranks=1)
        return whole.map(self._features).unbatch()

    def parse(self, split: str, records: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return records

    def _count(self, file: Path) -> int:
        from pyarrow import parquet

        metadata = parquet.read_metadata(file)
        missing = set(self._columns) - set(metadata.schema.to_arrow_schema().names)
        if missing:
            raise ValueError(f"{file} has no column {min(missing)!r}")
        return int(metadata.num_rows)

    def _features(self, columns: dict[str, Any]) -> dict[str, tf.Tensor]:
        features = {
            "label": tf.cast(columns[LABEL], tf.float32),
            "dense": tf.cast(tf.stack([columns[name] for name in COUNTS], axis=1), tf.float32),
            "categorical": tf.stack([columns[name] for name in KEYS], axis=1),
        }
        if self._history:
            features["history"] = columns[HISTORY].to_tensor(-1, shape=[None, self._history])
        return features


def files_of(folder: str, ending: str) -> dict[str, Path]:
    """Returns the paths of a folder's files of 'train' and of 'test'."""
    return {"train": Path(folder) / f"train{ending}", "test": Path(folder) / f"eval{ending}"}


def has_files(folder: str, ending: str) -> bool:
    return all(file.is_file() for file in files_of(folder, ending).values())


def load(
    folder: str | None,
    buckets: int,
    generated: Callable[[], GeneratedSource],
    fail: Callable[[str], Any],
    history: int = 0,
) -> Source:
    """Opens the files in `folder`, or without one generates a log.

    `fail` gets what is wrong with the folder, and doesn't return.
    """
    if folder is None:
        return generated()
    try:
        is_parquet = has_files(folder, PARQUET)
        return (ParquetSource if is_parquet else TextSource)(folder, buckets, history)
    except ImportError as error:
        fail(
            f"--data: Parquet files need pyarrow ({error}): pip install 'collective-strategy[data]'"
        )
        raise
    except (OSError, ValueError) as error:
        fail(f"--data: {error}")
        raise


def training(source: Source, batch: int, seed: int, finished: int) -> Any:
    """Makes endless records of training, from global step `finished` on, the same on every rank."""
    records, together = source.records("train"), min(source.count("train"), source.shuffled)
    if together > 1:
        records = records.shuffle(together, seed=seed)
    return records.repeat().skip(finished * batch)


def batches(source: Source, split: str, records: Any, size: int, whole: bool) -> Any:
    """Makes batches of features of records; with `whole` a shorter last one is left out."""
    batched = records.batch(size, drop_remainder=whole)
    return batched.map(lambda batch: source.parse(split, batch)).prefetch(2)


def _count_lines(file: Path) -> int:
    lines, last = 0, b"\n"
    with open(file, "rb") as stream:
        while block := stream.read(1 << 22):
            lines, last = lines + block.count(b"\n"), block[-1:]
    return lines + (last != b"\n")
