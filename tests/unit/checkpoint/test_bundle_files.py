"""Bundles that are written past the page cache are TensorFlow's: its own reader says so."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.checkpoint.files import storage, tensor_bundle
from collective.checkpoint.files.index_writer import IndexFile
from collective.ops.rows import data_files

pytestmark = pytest.mark.skipif(
    not data_files.are_possible(""), reason="the compiled operations are missing here"
)


def restore(prefix, name, spec, dtype):
    """Reads by TensorFlow's operation, which checks checksums."""
    with tf.Graph().as_default(), tf.Session() as session:
        return session.run(tf.raw_ops.RestoreV2(
            prefix=prefix, tensor_names=[name], shape_and_slices=[spec], dtypes=[dtype]
        ))[0]  # fmt: skip


ENTRIES = {
    "double": np.arange(7, dtype=np.float64),
    "flag": np.array(True),
    "half": np.arange(6, dtype=tf.bfloat16.as_numpy_dtype).reshape(2, 3),
    "large": np.random.RandomState(1).rand(2000, 700).astype(np.float32),
    "none": np.zeros((0, 4), np.float32),
    "number": np.array(3, np.int64),
}


def write(prefix, entries):
    writer = tensor_bundle.BundleWriter(prefix)
    for name, array in entries.items():
        writer.add_whole(name, array)
    return writer.close()


def test_tensorflow_reads_every_type_and_size(tmp_path):
    (prefix,) = write(str(tmp_path / "m"), ENTRIES)
    reader = tf.train.load_checkpoint(prefix)
    assert reader.get_variable_to_shape_map() == {n: list(a.shape) for n, a in ENTRIES.items()}
    for name, array in ENTRIES.items():
        got = restore(prefix, name, "", tf.as_dtype(array.dtype))
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array)
    size = os.path.getsize(tensor_bundle.data_path(prefix, 0, 1))
    assert size == sum(array.nbytes for array in ENTRIES.values())


@pytest.mark.parametrize("count", [1, 511, 1024, 40000])
def test_tensorflow_reads_slices_of_several_files(tmp_path, count):
    """Slices end anywhere in a page, and in the writer's buffer."""
    table = np.random.RandomState(2).rand(100_000, 11).astype(np.float32)[: count * 5]
    writer = tensor_bundle.BundleWriter(str(tmp_path / "part"), file_bytes=2 * count * 44)
    for first in range(0, len(table), count):
        writer.add("t", table.shape, first, table[first : first + count])
    written = writer.close()
    assert len(written) > 1
    tensor_bundle.merge(written, str(tmp_path / "m"))
    np.testing.assert_array_equal(restore(str(tmp_path / "m"), "t", "", tf.float32), table)
    few = f"{len(table)} 11 {count - 1},2:-" if len(table) > count else ""
    want = table[count - 1 : count + 1] if few else table
    np.testing.assert_array_equal(restore(str(tmp_path / "m"), "t", few, tf.float32), want)
    opened = tensor_bundle.Bundle(str(tmp_path / "m"))
    for first in range(0, len(table), count):
        rows = opened.read("t", first, min(count, len(table) - first))
        np.testing.assert_array_equal(rows, table[first : first + count])


def test_strings_and_numbers_lie_in_one_file(tmp_path):
    writer = tensor_bundle.BundleWriter(str(tmp_path / "part"))
    writer.add_whole("a", np.arange(3))
    writer.add_whole("s", np.array([b"x", b"yy"], object))
    writer.add_whole("b", np.arange(4))
    tensor_bundle.merge(writer.close(), str(tmp_path / "m"))
    opened = tensor_bundle.Bundle(str(tmp_path / "m"))
    assert opened.read_whole("s").tolist() == [b"x", b"yy"]
    assert opened.read_whole("a").tolist() == [0, 1, 2]
    assert opened.read_whole("b").tolist() == [0, 1, 2, 3]


def test_a_flipped_bit_and_a_cut_off_file_are_found(tmp_path):
    (prefix,) = write(str(tmp_path / "m"), {"t": np.ones((4000, 3), np.float32)})
    path = tensor_bundle.data_path(prefix, 0, 1)
    size = os.path.getsize(path)
    out = np.empty((4000, 3), np.float32)
    (part,) = tensor_bundle.Bundle(prefix).row_slices("t")
    assert data_files.read(path, part.offset, part.size, out) == part.checksum
    with open(path, "r+b") as file:
        file.seek(size // 2)
        file.write(b"\x01")
    assert data_files.read(path, part.offset, part.size, out) != part.checksum
    os.truncate(path, size - 1)
    assert data_files.read(path, part.offset, part.size, out) is None


def test_an_index_with_a_flipped_bit_is_refused_or_says_the_same(tmp_path):
    """Some of its bits mean nothing. Any other could have a slice read to a wrong place."""
    writer = tensor_bundle.BundleWriter(str(tmp_path / "m"))
    for first in range(0, 50, 20):
        writer.add("t", (50, 3), first, np.ones((min(20, 50 - first), 3), np.float32))
    writer.add_whole("k", np.arange(9))
    (prefix,) = writer.close()
    path = tensor_bundle.index_path(prefix)

    def content():
        opened = tensor_bundle.Bundle(prefix)
        return opened.entries, opened.data_paths(), [opened.row_slices(name) for name in "tk"]

    with open(path, "rb") as file:
        written, whole = file.read(), content()
    refused = 0
    for place in range(len(written)):
        damaged = bytearray(written)
        damaged[place] ^= 1 << place % 8
        with open(path, "wb") as file:
            file.write(damaged)
        try:
            assert content() == whole
        except tf.errors.DataLossError as error:
            assert "damaged" in error.message
            refused += 1
    assert refused > len(written) / 2


def test_a_slice_that_is_not_as_long_as_its_rows_is_refused(tmp_path):
    """Whatever wrote such an index, it is read to no other memory than the rows'."""
    prefix = str(tmp_path / "m")
    with open(tensor_bundle.data_path(prefix, 0, 1), "wb") as file:
        file.write(bytes(4096))
    index = IndexFile()
    index.add("t", np.float32, (10, 3), [(0, 5), (0, -1)], 4001, 0)
    index.add("t", np.float32, (10, 3), [(5, 5), (0, -1)], 60, 0)
    index.write(prefix)
    opened = tensor_bundle.Bundle(prefix)
    with pytest.raises(tf.errors.DataLossError, match="'t' has 4,001 bytes in .*, not 60"):
        opened.read("t", 0, 5)
    slices = [[0, s.offset, s.size, s.checksum, 0, 1, s.first, 1] for s in opened.row_slices("t")]
    with tf.Graph().as_default(), tf.Session() as session:
        variable = tf.get_variable("t", [10, 3], use_resource=True)
        restore = data_files.RestoreOperation(variable.handle, tf.float32)
        for size in (61, 4001):
            slices[0][2] = size
            feeds = restore.feeds(opened.data_paths(), np.array(slices), (10, 3))
            with pytest.raises(tf.errors.InvalidArgumentError, match="slice 0 has rows outside"):
                session.run(restore.operation, feeds)


def test_a_full_disk_is_a_failure_of_the_storage_in_an_index_too(tmp_path):
    index, prefix = IndexFile(), os.fspath(tmp_path / "full")
    index.add("x", tf.float32, [2], None, 8, 0)
    os.symlink("/dev/full", f"{prefix}.index")
    with pytest.raises(storage.StorageFailure, match=r"full\.index.*No space left"):
        index.write(prefix)


def test_a_full_disk_is_an_error_with_the_files_name(tmp_path):
    (tmp_path / "m-00000.data-00000-of-00001").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left.*m-00000.data") as error:
        write(str(tmp_path / "m"), ENTRIES)
    assert error.value.errno == 28


REFUSING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Stands for a file system that refuses direct writing when a file is opened, or at a write.
static int at_open(void) { return !strcmp(getenv("REFUSES"), "open"); }

int open(const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const mode_t mode = va_arg(list, int);
  va_end(list);
  if ((flags & O_DIRECT) && at_open()) { errno = EINVAL; return -1; }
  return ((int (*)(const char*, int, ...))dlsym(RTLD_NEXT, "open"))(path, flags, mode);
}

ssize_t pwrite(int file, const void* data, size_t size, off_t offset) {
  if (fcntl(file, F_GETFL) & O_DIRECT) {
    write(2, "refused\n", 8);
    errno = EINVAL;
    return -1;
  }
  return ((ssize_t (*)(int, const void*, size_t, off_t))dlsym(RTLD_NEXT, "pwrite"))(
      file, data, size, offset);
}
"""

WRITE = """
import sys
import numpy as np
from collective.checkpoint.files import tensor_bundle

writer = tensor_bundle.BundleWriter(sys.argv[1])
writer.add_whole("t", np.arange(3_000_001, dtype=np.float32))
writer.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("refuses", [pytest.param("open", marks=pytest.mark.matrix), "write"])
def test_file_systems_that_take_no_direct_writes(tmp_path, refuses):
    source, library = tmp_path / "refusing.c", tmp_path / "refusing.so"
    source.write_text(REFUSING)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, "-c", WRITE, tmp_path / "m"],
        env={**os.environ, "LD_PRELOAD": str(library), "REFUSES": refuses},
        check=True,
        stderr=subprocess.PIPE,
        timeout=120,
    )
    assert (b"refused" in done.stderr) == (refuses == "write")
    got = restore(f"{tmp_path}/m-00000", "t", "", tf.float32)
    np.testing.assert_array_equal(got, np.arange(3_000_001, dtype=np.float32))
