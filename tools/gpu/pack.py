"""Packs what TensorFlow needs on a machine that has only a GPU and its driver, in pieces.

    python tools/gpu/pack.py [--out .gpu] [--piece-mb 58] [--level 6]

README.md beside this file says what is packed. Call it by the Python of the environment; it fetches
CuPy and the CUDA packages of tools/pins that aren't installed there. Takes some minutes and 3 GB of
the temporary folder. On the other machine `call.sh unpack` joins the pieces, by Python's lzma.
"""

from __future__ import annotations

import argparse
import importlib.util
import lzma
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

import strip_fatbin

ROOT = Path(__file__).resolve().parents[2]
# What only builds, tests, formats or documents.
LEFT_OUT = (
    "__pycache__ _pytest array_record clang* cmake* coverage cryptography* grpc* hypothesis* "
    "markdown* mypy* *mypyc* pdoc* pip* pyarrow* pygments* pytest* ruff* setuptools* "
    "tensorboard_data_server tensorflow_datasets* tensorflow_io_gcs_filesystem* wheel* *.pth"
).split()
TENSORFLOW_LEFT_OUT = ("include", "xla_aot_runtime_src", "__pycache__")
PYTHON_LEFT_OUT = ("site-packages", "test", "idlelib", "ensurepip", "tkinter", "__pycache__", "*.a")
CUPY_LEFT_OUT = ("thrust*.so", "_generator_api*.so", "__pycache__")
FETCHED = ("cupy-cuda12x", "fastrlock", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12")
# TensorFlow registers no GPU unless it can open all of these.
STUBS = (
    "libcublas.so.12 libcublasLt.so.12 libcudnn.so.8 libcufft.so.11 libcurand.so.10 "
    "libcusolver.so.11 libcusparse.so.12 libnccl.so.2 libnvinfer.so.8 libnvinfer_plugin.so.8"
).split()


def pinned(names: tuple[str, ...]) -> list[str]:
    """Returns 'name==version' of packages, as tools/pins has them for this Python."""
    version = "{}.{}".format(*sys.version_info)
    text = "".join(
        (ROOT / "tools" / "pins" / name).read_text(encoding="utf-8")
        for name in (f"python{version}.txt", "gpu.txt")
    )
    return [re.findall(rf"^{re.escape(name)}==.*$", text, re.MULTILINE)[0] for name in names]


def stage_python(folder: Path) -> None:
    """Copies this interpreter with its standard library, and the shared libraries of the system
    that its modules need, for a machine which lacks them.
    """
    base, name = Path(sys.base_prefix), "python{}.{}".format(*sys.version_info)
    (folder / "bin").mkdir(parents=True)
    shutil.copy2(Path(sys.executable).resolve(), folder / "bin" / name)
    library = sysconfig.get_path("stdlib", vars={"installed_base": str(base)})
    ignored = shutil.ignore_patterns(*PYTHON_LEFT_OUT)
    shutil.copytree(library, folder / "lib" / name, ignore=ignored)
    for file in (base / "lib").glob("libpython3*.so*"):
        shutil.copy2(file, folder / "lib", follow_symlinks=False)
    for module in (folder / "lib" / name / "lib-dynload").glob("*.so"):
        said = subprocess.run(["ldd", str(module)], capture_output=True, text=True).stdout
        for file in re.findall(r"=> (/\S*/lib(?:ffi|ssl|crypto|sqlite3|bz2|lzma)\S*\.so\S*)", said):
            shutil.copy2(Path(file).resolve(), folder / "lib" / Path(file).name)


def stage_packages(folder: Path) -> None:
    """Copies the installed packages, and TensorFlow without what only older GPUs can use."""
    spec = importlib.util.find_spec("tensorflow")
    assert spec is not None and spec.origin is not None, "call this by .venv/bin/python"
    source = Path(spec.origin).parents[1]

    def ignored(parent: str, names: list[str]) -> set[str]:
        patterns = {source: LEFT_OUT, source / "tensorflow": TENSORFLOW_LEFT_OUT}
        wanted = patterns.get(Path(parent), ("__pycache__",))
        return shutil.ignore_patterns(*wanted)(parent, names)

    shutil.copytree(source, folder, ignore=ignored, symlinks=True)
    library = folder / "tensorflow" / "libtensorflow_cc.so.2"
    print(f"    TensorFlow is lighter by {strip_fatbin.strip(library):,} bytes", flush=True)


def stage_cupy(folder: Path) -> None:
    """Fetches CuPy and CUDA's compiler into the packages."""
    options = ["--no-deps", "--quiet", "--upgrade", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", *options, *pinned(FETCHED)]
    subprocess.run(command, check=True)
    for pattern in CUPY_LEFT_OUT:
        for file in (folder / "cupy").rglob(pattern):
            shutil.rmtree(file) if file.is_dir() else file.unlink()


def stage_stubs(folder: Path) -> None:
    """Makes libraries with nothing in them."""
    folder.mkdir()
    for name in STUBS:
        command = ["gcc", "-shared", f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run([*command, "-x", "c", "/dev/null"], check=True)


def stage_operations(folder: Path) -> None:
    """Copies the compiled operations, which no checkout has before it was set up."""
    folder.mkdir()
    files = list((ROOT / "ops").glob("*.so"))
    if not files:
        raise SystemExit("pack: ops/ has no compiled operations: run make setup first")
    for file in files:
        shutil.copy2(file, folder)


class Pieces:
    """Writes what it is given to files of at most `size` bytes, piece.00 and on."""

    def __init__(self, folder: Path, size: int):
        self.files: list[Path] = []
        self._folder, self._size, self._room = folder, size, 0

    def write(self, data: bytes) -> int:
        rest = memoryview(data)
        while rest:
            if self._room == 0:
                self.files.append(self._folder / f"piece.{len(self.files):02}")
                self.files[-1].write_bytes(b"")
                self._room = self._size
            with self.files[-1].open("ab") as file:
                file.write(rest[: self._room])
            written = min(len(rest), self._room)
            rest, self._room = rest[written:], self._room - written
        return len(data)


def compress(staged: Path, folder: Path, size: int, level: int) -> list[Path]:
    """Packs all of `staged` as .tar.xz in pieces, by all cores where there is an xz."""
    pieces = Pieces(folder, size)
    program = shutil.which("xz")
    if program is None:
        with lzma.open(pieces, "wb", preset=level) as out:  # type: ignore[call-overload]
            with tarfile.open(fileobj=out, mode="w|") as archive:
                archive.add(staged, ".")
        return pieces.files
    tar = subprocess.Popen(["tar", "-C", str(staged), "-c", "."], stdout=subprocess.PIPE)
    xz = subprocess.Popen(
        [program, f"-{level}", "-T0", "-c"], stdin=tar.stdout, stdout=subprocess.PIPE
    )
    assert tar.stdout is not None and xz.stdout is not None
    tar.stdout.close()
    while data := xz.stdout.read(2**20):
        pieces.write(data)
    if tar.wait() or xz.wait():
        raise SystemExit(f"pack: tar ended with {tar.returncode}, xz with {xz.returncode}")
    return pieces.files


def main() -> None:
    """Runs the command line."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu", help="the folder (.gpu)")
    parser.add_argument("--piece-mb", type=int, default=58, help="the most MiB of a piece (58)")
    parser.add_argument("--level", type=int, default=6, help="of xz, 0 to 9 (6)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("piece.*"):
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="collective-gpu-") as temporary:
        staged = Path(temporary)
        for stage, name in (
            (stage_python, "python"),
            (stage_packages, "site"),
            (stage_cupy, "site"),
            (stage_stubs, "stubs"),
            (stage_operations, "native"),
        ):
            print(f"pack: {name} ({stage.__name__})", flush=True)
            stage(staged / name)
        print("pack: compressing", flush=True)
        files = compress(staged, options.out, options.piece_mb * 2**20, options.level)
    total = sum(file.stat().st_size for file in files)
    print(f"pack: {len(files)} pieces in {options.out}, {total / 2**20:.0f} MiB in all")


if __name__ == "__main__":
    main()
