"""Horovod's source is edited for newer versions of TensorFlow, and for them only."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from collective import horovod_source
from collective.horovod_source import EDITS, Edit, SourceError

STREAMS = Edit((2, 16), "ops.cc", "AsGpuStreamValue(stream)", "stream->handle()")
BUILDER = Edit((2, 19), "ops.cc", "client/builder.h", "hlo/builder.h")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Has what each of the real edits replaces, twice."""
    folder = tmp_path / "horovod-0.28.1"
    for edit in EDITS:
        file = folder / edit.file
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a", encoding="utf-8") as text:
            text.write(f"{edit.text}\n{edit.text}\n")
    return folder


@pytest.mark.parametrize(
    "tensorflow, edits",
    [
        ("2.15.1", []),
        ("2.16.2", [STREAMS]),
        ("2.18.0", [STREAMS]),
        ("2.19.0-rc0", [STREAMS, BUILDER]),
        ("2.21.0", [STREAMS, BUILDER]),
        ("3.0.0", [STREAMS, BUILDER]),
    ],
)
def test_a_version_of_tensorflow_gets_the_edits_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, tensorflow: str, edits: list[Edit]
):
    monkeypatch.setattr(horovod_source, "EDITS", (STREAMS, BUILDER))
    assert horovod_source.edits_for(tensorflow) == edits


def test_for_tensorflow_2_15_no_source_is_edited():
    assert {edit.file for edit in horovod_source.edits_for("2.15.1")} == {
        "CMakeLists.txt",
        "setup.py",
    }


def test_every_occurrence_is_replaced(source: Path):
    for edit in horovod_source.edits_for("2.21.0"):
        horovod_source.apply(edit, source)
    builder = (source / "horovod/tensorflow/xla_mpi_ops.cc").read_text()
    assert "xla/client/" not in builder and builder.count("xla/hlo/builder/xla_builder.h") == 2
    assert "::xla::StatusOr" not in builder and builder.count("::absl::StatusOr<") == 2
    streams = (source / "horovod/tensorflow/mpi_ops.cc").read_text()
    assert streams.count("stream->platform_specific_handle().stream);\n}\n") == 2


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: f"{edit.file}: {edit.text.strip()}")
def test_a_text_that_is_missing_is_an_error(source: Path, edit: Edit):
    """Else a build would go on for minutes, or make a library that fails when it is loaded."""
    (source / edit.file).write_text("another release\n")
    with pytest.raises(SourceError) as error:
        horovod_source.apply(edit, source)
    version = "{}.{}".format(*edit.since)
    assert f"{edit.file} of horovod-0.28.1 lacks the text {edit.text!r}" in str(error.value)
    assert f"TensorFlow {version} and newer need" in str(error.value)


def test_a_file_that_is_missing_is_an_error(tmp_path: Path):
    with pytest.raises(SourceError, match=r"ops\.cc of .* lacks the text"):
        horovod_source.apply(STREAMS, tmp_path)


def test_the_wheel_is_built_from_the_edited_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(horovod_source, "EDITS", (Edit((2, 15), *STREAMS[1:]),))
    built = []

    def pip(*arguments: str) -> None:
        if arguments[0] == "download":
            assert arguments[-1] == "horovod==0.28.1"
            (tmp_path / "ops.cc").write_text("x = AsGpuStreamValue(stream);")
            folder = Path(arguments[arguments.index("--dest") + 1])
            with tarfile.open(folder / "horovod-0.28.1.tar.gz", "w:gz") as packed:
                packed.add(tmp_path / "ops.cc", "horovod-0.28.1/ops.cc")
        else:
            assert {"--no-build-isolation", "--no-deps", "--no-cache-dir"} < set(arguments)
            assert arguments[arguments.index("--wheel-dir") + 1] == str(tmp_path / "wheels")
            built.append((Path(arguments[-1]) / "ops.cc").read_text())

    monkeypatch.setattr(horovod_source, "_pip", pip)
    assert horovod_source.main(["horovod==0.28.1", str(tmp_path / "wheels")]) == 0
    assert built == ["x = stream->handle();"]


def test_a_source_that_does_not_fit_ends_the_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(horovod_source, "EDITS", (Edit((2, 15), *STREAMS[1:]),))
    monkeypatch.setattr(horovod_source, "fetch", lambda requirement, folder: folder)
    assert horovod_source.main(["horovod==0.29", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: ops.cc of ")


def test_it_runs_by_its_path_without_the_package(tmp_path: Path):
    """Set-up builds Horovod before the package is installed, and an image without its files."""
    program = tmp_path / "horovod_source.py"
    program.write_bytes(Path(horovod_source.__file__).read_bytes())
    check = "import runpy, sys; print(runpy.run_path(sys.argv[1])['edits_for']('2.14'))"
    command = [sys.executable, "-I", "-S", "-c", check, str(program)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")
