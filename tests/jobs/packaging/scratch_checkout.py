"""A scratch checkout in which the scripts of tools/ run for real, on programs that do nothing.

The programs only note that they were called.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = (
    "awk",
    "bash",
    "cat",
    "cut",
    "dirname",
    "env",
    "find",
    "flock",
    "grep",
    "ln",
    "mkdir",
    "nproc",
    "readlink",
    "rm",
    "sed",
    "sha256sum",
    "sleep",
    "sort",
    "tail",
    "touch",
    "uname",
    "cp",
    "chmod",
)

# An interpreter as far as set-up can tell. FAIL names a step that ends badly, HANG one that does
# not end; in FAIL, a step of one version only is 3.10:job.
PYTHON = """#!/usr/bin/env bash
compile() {  # as make prints it
    local i
    for i in {1..20}; do
        printf '    cd /build && /usr/bin/c++ -DNDEBUG %01000d -c x.cc\n/usr/bin/g++-12 -shared x.o\n' $i
        printf 'x.cc:%d: note: %01000d\n' $i 0
    done
}
call() {
    echo "$1" >>"$CALLS"
    case ${FAIL-} in "$1" | "SHORT:$1") compile; echo "fatal error: $1 is broken"; compile; exit 1 ;; esac
    if [ "${HANG-}" = "$1" ]; then trap 'compile; exit 1' INT; sleep 600; fi
}
case "$*" in
    -c*executable*) echo "VERSION MISSING $0" ;;
    *'-m venv'*) call environment; mkdir -p "$3"/{bin,lib/pythonSHORT/site-packages}; cp "$0" "$3/bin/python" ;;
    *'pip install -r'*) ;;
    *'pip install --no-build-isolation -r'*) call packages ;;
    */horovod_source.py*)
        call horovod
        echo "nvcc: $(type -P nvcc)"
        [ -f "$1" ] && [ "${2%%==*}" = horovod ] || exit 2
        mkdir -p "$3" && touch "$3/horovod-1-any.whl"
        ;;
    *'--editable'*) call package ;;
    *'--only-binary :all: uv'*) call uv-from-PyPI; cp "$UV_OF_PYPI" "${0%/*}/uv" ;;
    *'pytest tests/unit'*) call tests ;;
    *'collective.launch -np 2'*train.py*) call job ;;
esac
"""
# Fetch the Python of a mirror, which a test makes, as set-up calls them.
UV = """#!/usr/bin/env bash
echo uv >>"$CALLS"
[ "$*:$UV_PYTHON_INSTALL_BIN" = "python install 3.12:0" ] || exit 2
folder=$UV_PYTHON_INSTALL_DIR/cpython-3.12.11-linux-x86_64-gnu/bin
mirror=${UV_PYTHON_INSTALL_MIRROR:?Failed to download, the network is unreachable}
mkdir -p "$folder" && cp "${mirror#file://}/python3.12" "$folder"
"""
CONDA = """#!/usr/bin/env bash
echo conda >>"$CALLS"
[ "$1 $2 $3 $5 $6 $7" = "create --yes --prefix --channel conda-forge python=3.12" ] || exit 2
mkdir -p "$4/bin" && cp "${CONDA_MIRROR:?no channel can be reached}/python3.12" "$4/bin"
"""
EVERY_STEP = ["environment", "packages", "package", "horovod"]


class Checkout:
    """Holds a folder with the scripts, and a PATH with nothing on it but what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.programs = folder / "bin"
        self.calls_file = folder / "calls"
        (self.root / "tools").mkdir(parents=True)
        self.programs.mkdir()
        for name in ("pyproject.toml", "setup.py"):
            shutil.copy(ROOT / name, self.root)
        (self.root / "ops").mkdir()
        shutil.copytree(ROOT / "ops" / "native", self.root / "ops" / "native")
        (self.root / "collective").mkdir()
        shutil.copy(ROOT / "collective" / "horovod_source.py", self.root / "collective")
        for name in ("setup.sh", "test_versions.sh"):
            shutil.copy(ROOT / "tools" / name, self.root / "tools")
        shutil.copytree(ROOT / "tools" / "pins", self.root / "tools" / "pins")
        for name in PROGRAMS:
            (self.programs / name).symlink_to(shutil.which(name) or name)
        for name in ("g++", "make"):
            self.program(name, "#!/usr/bin/env bash\n")
        self.environment = {
            "PATH": str(self.programs),
            "CALLS": str(self.calls_file),
            "HOME": str(folder),
            "PYENV_ROOT": str(folder / "pyenv"),
        }

    def program(self, name: str, text: str, folder: Path | None = None) -> Path:
        path = (folder or self.programs) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(
        self, name: str, version: str, missing: str = "-", folder: Path | None = None
    ) -> Path:
        short = ".".join(version.split(".")[:2])
        text = PYTHON.replace("VERSION", f"{short} {version}").replace("MISSING", missing)
        text = text.replace("SHORT", short)
        return self.program(name, text, folder)

    def start(
        self, *arguments: str, script: str = "setup.sh", **environment: str
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / "tools" / script), *arguments],
            text=True,
            start_new_session=True,
            # As in a terminal. A background job of a script ignores it, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, script: str, *arguments: str, expected: int = 0, **environment: str) -> str:
        """Runs a script of tools/ and returns what it printed."""
        process = self.start(*arguments, script=script, **environment)
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == expected, printed
        return printed

    def setup(self, *arguments: str, expected: int = 0, **environment: str) -> str:
        return self.run("setup.sh", *arguments, expected=expected, **environment)

    def calls(self) -> list[str]:
        """Returns the steps that were run since this was last called."""
        steps = self.calls_file.read_text().split() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return steps

    def wait_for_call(self, name: str) -> None:
        deadline = time.monotonic() + 30
        while not self.calls_file.exists() or name not in self.calls_file.read_text().split():
            assert time.monotonic() < deadline, f"{name} was not reached"
            time.sleep(0.02)

    def edit(self, file: str, change: Callable[[str], str]) -> None:
        path = self.root / file
        before = path.read_text()
        path.write_text(change(before))
        assert path.read_text() != before
