"""What `tools/gpu` makes of libraries and archives for a machine with a GPU."""

from __future__ import annotations

import io
import random
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools" / "gpu"
MAGIC, PTX, MACHINE_CODE = 0xBA55ED50, 1, 2


@pytest.fixture(autouse=True)
def tools_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


def container(*entries: tuple[int, bytes]) -> bytes:
    """Makes a container of code for GPUs, as CUDA's linker does."""
    parts = [struct.pack("<HHIQ", kind, 1, 16, len(code)) + code for kind, code in entries]
    inside = b"".join(parts)
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(inside)) + inside


def library(folder: Path, code: bytes) -> Path:
    """Makes a shared library with such a section."""
    file, made = folder / "code.bin", folder / "lib.so"
    file.write_bytes(code)
    source = f'__asm__(".section .nv_fatbin, \\"a\\"\\n.incbin \\"{file}\\"\\n");'
    options = ["-shared", "-fPIC", "-o", str(made), "-x", "c", "-"]
    subprocess.run(["gcc", *options], input=source, text=True, check=True)
    return made


def test_machine_code_becomes_zeros_and_ptx_stays(tmp_path: Path):
    from strip_fatbin import strip

    before = container((PTX, b"ptx of sm_80...."), (MACHINE_CODE, b"sm_70 code......"))
    after = container((MACHINE_CODE, b"sm_80 code......"), (PTX, b"more of ptx....."))
    made = library(tmp_path, before + bytes(16) + after)
    size = made.stat().st_size
    assert strip(made) == 32
    content = made.read_bytes()
    assert b"ptx of sm_80...." in content and b"more of ptx....." in content
    assert b"code......" not in content and len(content) == size
    assert strip(made) == 32, "the table of what is inside is as it was"


def test_what_is_no_library_with_code_for_gpus_is_refused(tmp_path: Path):
    from strip_fatbin import strip

    text = tmp_path / "text"
    text.write_text("no library at all, just so many words that a header would fit in here")
    with pytest.raises(ValueError, match="no 64-bit ELF file"):
        strip(text)
    with pytest.raises(ValueError, match=r"no section .nv_fatbin"):
        made = tmp_path / "plain.so"
        command = ["gcc", "-shared", "-o", str(made), "-x", "c", "/dev/null"]
        subprocess.run(command, check=True)
        strip(made)


@pytest.mark.parametrize("program", ["xz", None])
def test_pieces_are_one_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None
):
    """With an xz, or by Python alone."""
    import lzma

    import pack

    if program is None:
        monkeypatch.setattr(pack.shutil, "which", lambda name: None)
    staged, out = tmp_path / "staged", tmp_path / "out"
    (staged / "inner").mkdir(parents=True)
    out.mkdir()
    kept = random.Random(1).randbytes(5000)
    (staged / "inner" / "file").write_bytes(kept)
    files = pack.compress(staged, out, 1000, 0)
    assert [file.name for file in files][:2] == ["piece.00", "piece.01"]
    assert {file.stat().st_size for file in files[:-1]} <= {1000}
    joined = io.BytesIO(b"".join(file.read_bytes() for file in sorted(out.iterdir())))
    with lzma.open(joined) as opened, tarfile.open(fileobj=opened, mode="r|") as archive:
        archive.extractall(tmp_path / "there")
    assert (tmp_path / "there" / "inner" / "file").read_bytes() == kept


def test_what_is_fetched_is_pinned():
    import pack

    assert [line.split("==")[0] for line in pack.pinned(pack.FETCHED)] == list(pack.FETCHED)


@pytest.mark.parametrize("call", ["checks", "times"])
def test_a_rehearsal_comes_as_far_as_the_missing_gpu(tmp_path: Path, call: str):
    finished = subprocess.run(
        [str(TOOLS / "call.sh"), "--rehearse", call, str(tmp_path)],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        timeout=120,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "gpu_check: CuPy can" in finished.stdout


def test_an_unknown_call_is_refused(tmp_path: Path):
    finished = subprocess.run(
        [str(TOOLS / "call.sh"), "--rehearse", "dance", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 2 and "there is no call dance" in finished.stdout
