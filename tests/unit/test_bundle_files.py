"""Bundles that are written past the page cache are TensorFlow's: its own reader says so."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.checkpoint import bundle_index, tensor_bundle
from collective.ops import data_files

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


def test_strings_lie_beside_numbers(tmp_path):
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


def test_a_flipped_bit_of_an_index_is_found(tmp_path):
    """Its blocks have checksums: names, shapes and places can't be others without notice."""
    (prefix,) = write(str(tmp_path / "m"), {name: ENTRIES[name] for name in ("flag", "half")})
    path, sound = f"{prefix}.index", bundle_index.BundleIndex(prefix)
    content = (tmp_path / f"{os.path.basename(prefix)}.index").read_bytes()
    unharmed = 0
    for place in range(len(content)):
        with open(path, "wb") as file:
            file.write(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        try:
            found = bundle_index.BundleIndex(prefix)
        except tf.errors.DataLossError as error:
            assert path in error.message
        else:
            unharmed += 1
            assert found.entries == sound.entries and found.least_sizes == sound.least_sizes
    # An unused block of 13 bytes with its checksum, and what pads the footer's four numbers.
    assert unharmed < 13 + 48 - 8
    with open(path, "wb") as file:
        file.write(content[:9] + bytes([content[9] ^ 4]) + content[10:])
    with pytest.raises(tf.errors.DataLossError, match="the checksum of the block at 0, of"):
        bundle_index.BundleIndex(prefix)
    with pytest.raises(tf.errors.OpError, match="block checksum mismatch"):
        tf.train.load_checkpoint(prefix).get_variable_to_shape_map()


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
from collective.checkpoint import tensor_bundle

writer = tensor_bundle.BundleWriter(sys.argv[1])
writer.add_whole("t", np.arange(3_000_001, dtype=np.float32))
writer.close()
"""


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
