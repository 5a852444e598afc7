"""Builds a wheel of Horovod from its published source, edited to fit the installed TensorFlow.

    python horovod_source.py horovod==0.28.1 FOLDER

It is run by the Python of the build: its pip and setuptools are used, the TensorFlow that it
imports is built against, and Horovod's own variables (HOROVOD_WITH_GLOO, ...) are its settings. So
it imports nothing of this package, and set-up runs it where nothing else of the package is there.

Horovod 0.28.1 was written for TensorFlow up to 2.15. `EDITS` are what later ones need, and for each
what spares the build needless work.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

Version = tuple[int, int]  # of TensorFlow: 2.21 is (2, 21)


class Edit(NamedTuple):
    """Replaces each occurrence of a text in a file of Horovod's source.

    Attributes:
        since: the first TensorFlow for which it is made.
        file: its path in the source.
        text: what is there.
        replacement: what stands there afterwards.
    """

    since: Version
    file: str
    text: str
    replacement: str


_SOURCES = "horovod/tensorflow"
EDITS = (
    # Of its two builds of Gloo, for C++11 and for C++17, TensorFlow since 2.10 links the second.
    Edit(
        (2, 15),
        "CMakeLists.txt",
        "    add_subdirectory(third_party/gloo)\n",
        "    add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)\n",
    ),
    # The same, less what is for debuggers.
    Edit((2, 15), "setup.py", "else 'RelWithDebInfo'", "else 'Release'"),
    # g++ 13 and newer no longer include these by way of others.
    Edit(
        (2, 16),
        "horovod/common/common.h",
        "#include <memory>\n",
        "#include <memory>\n#include <stdexcept>\n",
    ),
    Edit(
        (2, 16),
        "horovod/common/group_table.h",
        "#include <queue>\n",
        "#include <queue>\n#include <string>\n",
    ),
    # XLA's name for Abseil's type is gone in 2.20.
    Edit((2, 16), f"{_SOURCES}/xla_mpi_ops.cc", "::xla::StatusOr<", "::absl::StatusOr<"),
    Edit(
        (2, 16),
        f"{_SOURCES}/xla_mpi_ops.cc",
        '#include "tensorflow/compiler/xla/shape.h"\n',
        '#include "absl/status/statusor.h"\n#include "tensorflow/compiler/xla/shape.h"\n',
    ),
    Edit(
        (2, 19),
        f"{_SOURCES}/xla_mpi_ops.cc",
        "xla/client/xla_builder.h",
        "xla/hlo/builder/xla_builder.h",
    ),
    # Headers of TensorFlow include these two libraries by paths that start in their own folders.
    Edit(
        (2, 16),
        f"{_SOURCES}/CMakeLists.txt",
        "include_directories(SYSTEM ${Tensorflow_INCLUDE_DIRS})\n",
        "include_directories(SYSTEM ${Tensorflow_INCLUDE_DIRS}\n"
        "        ${Tensorflow_INCLUDE_DIRS}/external/highwayhash\n"
        "        ${Tensorflow_INCLUDE_DIRS}/external/farmhash_archive/src)\n",
    ),
    # Its hook is made only if it finds the class by this name, which TensorFlow no longer has.
    Edit(
        (2, 16),
        f"{_SOURCES}/__init__.py",
        "_SessionRunHook = tf.estimator.SessionRunHook\n",
        "_SessionRunHook = tf.compat.v1.train.SessionRunHook\n",
    ),
    # For GPUs: TensorFlow no longer exports this function. A stream tells its handle itself.
    Edit(
        (2, 16),
        f"{_SOURCES}/mpi_ops.cc",
        "// Forward declaration of AsGpuStreamValue\n",
        '#include "tensorflow/compiler/xla/stream_executor/stream.h"\n',
    ),
    Edit(
        (2, 16),
        f"{_SOURCES}/mpi_ops.cc",
        "GpuStreamHandle AsGpuStreamValue(Stream* stream);\n",
        "static GpuStreamHandle AsGpuStreamValue(Stream* stream) {\n"
        "  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);\n"
        "}\n",
    ),
)


class SourceError(Exception):
    """Says in one sentence why Horovod's source cannot be edited."""


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    requirement, folder = arguments
    try:
        build_wheel(requirement, Path(folder))
    except SourceError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


def build_wheel(requirement: str, folder: Path) -> None:
    """Builds Horovod's wheel into a folder.

    Args:
        requirement: Horovod and its version, as `horovod==0.28.1`.
        folder: made if it is missing.

    Raises:
        SourceError: an edit does not fit the source.
        subprocess.CalledProcessError: pip failed, and has printed why.
    """
    import tensorflow as tf

    with tempfile.TemporaryDirectory(prefix="horovod-source-") as scratch:
        source = fetch(requirement, Path(scratch))
        for edit in edits_for(tf.__version__):
            apply(edit, source)
        # Without pip's cache: it would hand back a wheel that was built against another TensorFlow.
        options = ("--verbose", "--no-cache-dir", "--no-deps", "--no-build-isolation")
        _pip("wheel", *options, "--wheel-dir", str(folder), str(source))


def fetch(requirement: str, folder: Path) -> Path:
    """Downloads a package's source into a folder and unpacks it there.

    Returns:
        The folder of the source.
    """
    options = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation")
    _pip("download", *options, "--dest", str(folder), requirement)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        # Older releases of Python have no filters.
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(folder)
    return folder / archive.name[: -len(".tar.gz")]


def edits_for(tensorflow: str) -> list[Edit]:
    """Returns the edits that a version of TensorFlow, as "2.21.0", needs.

    Raises:
        SourceError: it is no version.
    """
    match = re.match(r"(\d+)\.(\d+)", tensorflow)
    if match is None:
        raise SourceError(f"{tensorflow!r} is no version of TensorFlow, as 2.21.0 is")
    version = (int(match.group(1)), int(match.group(2)))
    return [edit for edit in EDITS if edit.since <= version]


def apply(edit: Edit, source: Path) -> None:
    """Edits a file of the source.

    Raises:
        SourceError: the file or the text is not there.
    """
    file = source / edit.file
    before = file.read_text(encoding="utf-8") if file.is_file() else ""
    if edit.text not in before:
        major, minor = edit.since
        raise SourceError(
            f"{edit.file} of {source.name} lacks the text {edit.text!r}, which TensorFlow "
            f"{major}.{minor} and newer need replaced: take the Horovod that "
            "`collective build-horovod` names"
        )
    file.write_text(before.replace(edit.text, edit.replacement), encoding="utf-8")


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
