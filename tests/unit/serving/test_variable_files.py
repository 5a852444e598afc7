"""Variables are split into data files that stay the same where their rows do; those are linked.

Plain TensorFlow reads what was written and linked, and NumPy has the truth.
"""

import errno
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.checkpoint.files import tensor_bundle
from collective.checkpoint.files.tensor_bundle import Bundle, BundleWriter
from collective.serving import variable_files
from collective.serving.base_version import BaseVersion
from collective.serving.export_record import ExportRecord, described
from collective.serving.variable_files import EntryReader, VariableFiles

MOST = 1 << 12  # bytes in a file


def source_of(folder, tables, block):
    """Writes a checkpoint of arrays, in slices of `block` rows."""
    writer = BundleWriter(str(folder / "source"))
    for name, rows in tables.items():
        for first in range(0, len(rows), block):
            writer.add(name, rows.shape, first, rows[first : first + block])
    tensor_bundle.merge(writer.close(), str(folder / "model"))
    return Bundle(str(folder / "model"))


def version(folder, tables, others, keys=None, base=None, block=100):
    """Writes the variables of a version, and its record. Returns the version and its files."""
    (folder / "variables").mkdir(parents=True)
    source = source_of(folder, tables, block)
    files = VariableFiles(str(folder / "variables" / "part"), MOST, base)
    for name in tables:
        of_keys = EntryReader(source, keys[name], block) if keys and name in keys else None
        files.add_table_part(name, EntryReader(source, name, block), of_keys)
    for name, values in others.items():
        files.add_other(name, np.asarray(values))
    written = files.close()
    target = str(folder / "variables" / "variables")
    tensor_bundle.merge([file.prefix for file in written], target)
    described_files = {
        f"variables/{os.path.basename(tensor_bundle.data_path(target, i, len(written)))}": each.file
        for i, each in enumerate(written)
    }
    ExportRecord(None, MOST, described_files).write(str(folder))
    return BaseVersion(str(folder), ExportRecord.read(str(folder))), described_files


def holds(folder, variables):
    """Holds what plain TensorFlow reads against `variables`."""
    prefix = str(folder / "variables" / "variables")
    reader = tf.train.load_checkpoint(prefix)
    assert set(reader.get_variable_to_shape_map()) == set(variables)
    for name, values in variables.items():
        dtype = reader.get_variable_to_dtype_map()[name]
        with tf.Graph().as_default(), tf.Session() as session:
            restored = session.run(
                tf.raw_ops.RestoreV2(
                    prefix=prefix, tensor_names=[name], shape_and_slices=[""], dtypes=[dtype]
                )[0]
            )
        np.testing.assert_array_equal(restored, values, err_msg=name)


def linked(files):
    return sum(file.linked for file in files.values())


@pytest.fixture
def model():
    rng = np.random.default_rng(1)
    tables = {
        "large": rng.normal(size=(1000, 8)).astype(np.float32),
        "doubles": rng.normal(size=(600, 2)),
        "small/a": rng.normal(size=(5, 3)).astype(np.float32),
        "small/b": rng.normal(size=(7, 2)),
        "keys": np.arange(2000, dtype=np.int64),
    }
    others = {"dense": np.ones([3, 4]), "step": np.int64(3), "wide": np.arange(3000.0)}
    return tables, others


@pytest.mark.parametrize("block", [97, 5000])
def test_digests_and_sizes_are_those_of_the_files(tmp_path, model, block):
    tables, others = model
    _, files = version(tmp_path / "v", tables, others, block=block)
    holds(tmp_path / "v", {**tables, **others})
    for name, file in files.items():
        on_disk = described(str(tmp_path / "v" / name))
        assert (file.size, file.digest) == (on_disk.size, on_disk.digest)
        assert file.size <= MOST or file.size == 8 * 3000, "a dense variable is never cut"
    assert len(files) == 8 + 3 + 4 + 1 + 1 + 1  # large, doubles, keys; small; dense; wide


def test_only_files_of_rows_that_changed_are_written(tmp_path, model):
    tables, others = model
    base, before = version(tmp_path / "1", tables, others)
    changed = {name: values.copy() for name, values in tables.items()}
    changed["large"][[3, 500]] += 1
    others = {**others, "step": np.int64(4)}
    # Another cut of the checkpoint into slices changes nothing.
    _, files = version(tmp_path / "2", changed, others, base=base, block=130)
    holds(tmp_path / "2", {**changed, **others})
    assert len(files) == len(before) and linked(files) == len(files) - 3
    for name, file in files.items():
        same = [os.path.samefile(tmp_path / "2" / name, tmp_path / "1" / other) for other in before]
        assert any(same) == file.linked
    # A version that is linked is a base like any.
    last = BaseVersion(str(tmp_path / "2"), ExportRecord.read(str(tmp_path / "2")))
    _, files = version(tmp_path / "3", changed, others, base=last)
    assert linked(files) == len(files)


def test_the_same_bytes_of_another_form(tmp_path):
    """Rows of another length, of other types and names: linked where values are cut alike."""
    zeros = np.zeros([4096], np.float32)
    base, _ = version(tmp_path / "1", {"t": zeros.reshape(-1, 8)}, {})
    tables = {"u": zeros.reshape(-1, 4), "n": zeros.view(np.int32).reshape(-1, 2)}
    _, files = version(tmp_path / "2", tables, {}, base=base)
    holds(tmp_path / "2", tables)
    assert linked(files) == len(files)


def test_tables_that_are_cut_otherwise_inside_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_bundle, "SLICE_BYTES", 1000)
    rows = np.zeros([4096], np.float32)
    base, _ = version(tmp_path / "1", {"t": rows.reshape(-1, 8)}, {})
    tables = {"t": rows.reshape(-1, 32)}  # of 7 rows, 896 bytes, instead of 31 rows, 992 bytes
    _, files = version(tmp_path / "2", tables, {}, base=base)
    holds(tmp_path / "2", tables)
    assert linked(files) == 0


def test_strings_are_written(tmp_path):
    words, table = np.array([b"to", b"be", b""], object), {"t": np.ones([2, 2])}
    base, _ = version(tmp_path / "1", table, {"words": words})
    _, files = version(tmp_path / "2", table, {"words": words}, base=base)
    holds(tmp_path / "2", {**table, "words": words})
    assert [file.linked for file in files.values()] == [True, False]


@pytest.mark.parametrize("reason", ["another device", "damaged", "deleted"])
def test_what_can_not_be_linked_is_written(tmp_path, model, monkeypatch, reason):
    tables, others = model
    base, files = version(tmp_path / "1", tables, others)
    if reason == "another device":

        def link(source, target):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source)

        monkeypatch.setattr(os, "link", link)
    for name in files:
        if reason == "damaged":
            os.truncate(tmp_path / "1" / name, 3)
        elif reason == "deleted":
            (tmp_path / "1" / name).unlink()
    _, files = version(tmp_path / "2", tables, others, base=base)
    holds(tmp_path / "2", {**tables, **others})
    assert linked(files) == 0 and base.problem


# -- Where files end


@pytest.mark.parametrize(
    "count, most, ends",
    [(1, 5, [1]), (5, 5, [5]), (6, 5, [5, 6]), (10, 5, [5, 10]), (3, 1, [1, 2, 3])],
)
def test_rows_are_cut_by_number(count, most, ends):
    assert variable_files.ends_by_number(count, most) == ends


def chunks(keys, most, block=1000):
    ends = variable_files.ends_by_key(
        (keys[first : first + block] for first in range(0, len(keys), block)), most
    )
    assert ends[-1] == len(keys) and ends == sorted(set(ends))
    starts = [0, *ends[:-1]]
    assert all(0 < end - start <= most for start, end in zip(starts, ends))
    return [tuple(keys[start:end]) for start, end in zip(starts, ends)]


@pytest.mark.parametrize("most", [1, 2, 3, 64, 1000])
def test_rows_are_cut_by_keys_alone(most):
    """Of 20,000 random keys, a new one and one that is gone change what is near them."""
    rng = np.random.default_rng(most)
    keys = np.unique(rng.integers(-(2**63), 2**63 - 1, 20_000))
    before = chunks(keys, most)
    assert before == chunks(keys, most, block=777)
    assert len(keys) / most <= len(before) <= 4 * len(keys) / most + 2
    changed = np.delete(np.append(keys, -(2**63) + 5), 10_000)
    after = chunks(np.sort(changed), most)
    # A file, and those after it up to the next key that begins one.
    assert len(set(after) - set(before)) <= 2 + (20 if most > 2 else 0)


@pytest.mark.parametrize(
    "total, known, most",
    [
        (0, None, 1 << 20),
        (256 << 20, None, 1 << 20),
        (257 << 20, None, 2 << 20),
        (10 << 30, None, 64 << 20),
        (1 << 40, None, 96 << 20),
        (257 << 20, 1 << 20, 1 << 20),  # as the base has it
        (0, 1 << 22, 1 << 22),
        (1025 << 20, 1 << 20, 8 << 20),  # tables have grown to several times what they were
    ],
)
def test_how_large_a_file_is(total, known, most):
    assert variable_files.file_bytes(total, known) == most
