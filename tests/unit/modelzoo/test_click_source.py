"""Rows of clicks, generated or read, come to the ranks in batches that don't depend on N."""

from __future__ import annotations

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow.compat.v1 as tf

from collective import data
from common import click_log, click_source
from common.click_source import GeneratedSource, ParquetSource, TextSource


def elements(make_dataset, count: int | None = None) -> list[dict]:
    """Returns the first batches of the dataset that `make_dataset` makes."""
    with tf.Graph().as_default(), tf.Session() as session:
        dataset = make_dataset().take(-1 if count is None else count)
        batch = tf.data.make_one_shot_iterator(dataset).get_next()
        batches = []
        try:
            while True:
                batches.append(session.run(batch))
        except tf.errors.OutOfRangeError:
            return batches


def training(source, batch, finished=0, rank=0, ranks=1):
    def make():
        records = click_source.training(source, batch, 3, finished).shard(ranks, rank)
        return click_source.batches(source, "train", records, batch // ranks, whole=True)

    return make


@pytest.fixture
def generated():
    return GeneratedSource(click_log.generate(100, history=3))


def criteo_line(label, number, separator="\t", history=None) -> str:
    counts = [str(number + column) if column else "" for column in range(13)]
    ids = [f"{number * 100 + column:08x}" if column else "" for column in range(26)]
    more = [] if history is None else [history]
    return separator.join([str(label), *counts, *ids, *more])


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_has_the_same_rows_for_every_number_of_ranks(generated, ranks):
    whole = elements(training(generated, 12), 15)
    parts = [elements(training(generated, 12, 0, rank, ranks), 15) for rank in range(ranks)]
    for step in range(15):
        for name in ("label", "dense", "categorical", "history"):
            together = np.empty_like(whole[step][name])
            for rank in range(ranks):
                together[rank::ranks] = parts[rank][step][name]
            np.testing.assert_array_equal(together, whole[step][name])


def test_training_goes_on_with_the_rows_that_come_next(generated):
    whole = elements(training(generated, 12), 15)
    rest = elements(training(generated, 12, finished=9), 6)
    for before, after in zip(whole[9:], rest):
        np.testing.assert_array_equal(before["categorical"], after["categorical"])


def test_an_epoch_has_every_row_once(generated):
    batches = elements(training(generated, 10), 9)
    seen = np.sort(np.concatenate([batch["dense"] for batch in batches]), axis=0)
    np.testing.assert_array_equal(seen, np.sort(generated._rows["train"]["dense"], axis=0))


def test_the_test_rows_come_in_order_to_the_last_one(generated):
    def make():
        records = generated.records("test")
        return click_source.batches(generated, "test", records, 4, whole=False)

    labels = [batch["label"] for batch in elements(make)]
    assert [len(each) for each in labels] == [4, 4, 2]
    np.testing.assert_array_equal(np.concatenate(labels), generated._rows["test"]["label"])


@pytest.mark.parametrize("ending, separator", [(".txt", "\t"), (".csv", ",")])
def test_criteos_text_is_read(tmp_path, ending, separator):
    lines = [criteo_line(number % 2, number, separator) for number in range(5)]
    (tmp_path / f"train{ending}").write_text("\n".join(lines) + "\n")
    (tmp_path / f"eval{ending}").write_text("\n".join(lines[:2]))  # the last line doesn't end
    source = TextSource(str(tmp_path), buckets=50)
    assert (source.count("train"), source.count("test")) == (5, 2)
    assert source.table_rows == (50,) * 26 and source.best_auc is None

    def make():
        records = source.records("train")
        return click_source.batches(source, "train", records, 5, whole=True)

    (batch,) = elements(make)
    np.testing.assert_array_equal(batch["label"], [0, 1, 0, 1, 0])
    np.testing.assert_array_equal(batch["dense"][3], [0, *range(4, 16)])
    ids = batch["categorical"]
    assert ids.shape == (5, 26) and (ids >= 0).all()
    assert len(set(ids[:, 0])) == 1  # a missing value is a value
    assert len(set(ids[:, 1])) == 5


def test_a_field_after_the_others_is_the_history(tmp_path):
    lines = [criteo_line(1, 7, history=items) for items in ("", "a b", "b c d e")]
    for name in ("train.txt", "eval.txt"):
        (tmp_path / name).write_text("\n".join(lines))
    source = TextSource(str(tmp_path), buckets=50, history=3)

    def make():
        records = source.records("test")
        return click_source.batches(source, "test", records, 3, whole=True)

    (batch,) = elements(make)
    none, two, cut = batch["history"]
    assert list(none) == [-1] * 3 and two[2] == -1 and (two[:2] >= 0).all()
    assert cut[0] == two[1] and (cut >= 0).all()


def test_parquet_files_have_the_rows_of_the_text(tmp_path):
    for name, rows in (("train", 5), ("eval", 2)):
        lines = [criteo_line(number % 2, number) for number in range(rows)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n")
    data.criteo(str(tmp_path / "*.txt"))
    text = TextSource(str(tmp_path), buckets=50)
    source = click_source.load(str(tmp_path), 50, lambda: None, pytest.fail)
    assert isinstance(source, ParquetSource)
    assert (source.count("train"), source.count("test")) == (5, 2)
    (of_text,), (batch,) = (elements(training(each, 5), 1) for each in (text, source))
    np.testing.assert_array_equal(batch["label"], of_text["label"])
    np.testing.assert_array_equal(batch["dense"], of_text["dense"])
    numbers = batch["dense"][:, 1] - 1
    np.testing.assert_array_equal(batch["categorical"][:, 1], numbers * 100 + 1)
    assert batch["categorical"].dtype == np.int64 and batch["label"].dtype == np.float32


def test_parquet_files_have_lists_for_histories(tmp_path):
    columns = {name: [1, 2] for name in ["label", *click_source.COUNTS, *click_source.KEYS]}
    table = pyarrow.table({**columns, "history": [[5], [6, 7, 8]]})
    for name in ("train", "eval"):
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    source = ParquetSource(str(tmp_path), 50, history=2)
    (batch,) = elements(
        lambda: click_source.batches(source, "test", source.records("test"), 4, whole=False)
    )
    assert batch["history"].tolist() == [[5, -1], [6, 7]]


def test_a_parquet_file_without_a_column_is_an_error(tmp_path):
    for name in ("train", "eval"):
        pyarrow.parquet.write_table(pyarrow.table({"label": [1]}), tmp_path / f"{name}.parquet")
    complaints = []
    with pytest.raises(ValueError):
        click_source.load(str(tmp_path), 10, lambda: None, complaints.append)
    assert complaints == [f"--data: {tmp_path}/train.parquet has no column 'C1'"]


def test_a_folder_without_the_files_is_an_error(tmp_path):
    (tmp_path / "train.txt").touch()
    (tmp_path / "eval.csv").touch()
    with pytest.raises(FileNotFoundError, match="neither train.txt and eval.txt"):
        TextSource(str(tmp_path), 10)
    complaints = []
    with pytest.raises(FileNotFoundError):
        click_source.load(str(tmp_path), 10, lambda: None, complaints.append)
    assert complaints[0].startswith("--data: ")
