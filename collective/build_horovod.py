"""Builds Horovod against the TensorFlow that is installed here, and installs it.

    collective build-horovod          for CPU ranks (2 to 5 minutes on two cores)
    collective build-horovod --gpu    with NCCL, too (needs nvcc of CUDA 12)

Horovod is published as source only. pip would build it where it sees no TensorFlow, and its build
fails with newer setuptools, pip and CMake. So it is built in a throw-away environment that has
older ones and sees the packages installed here, and only the wheel is installed: no other package
changes. In a checkout `make setup` does all of that.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

HOROVOD = "horovod==0.28.1"
TENSORFLOW = "tensorflow>=2.15.1,<2.22"
# pip 25.3, wheel 0.46 and setuptools 70 lost functions that Horovod's setup.py calls.
TOOLS = ("pip<25.3", "setuptools>=65,<70", "wheel<0.46", "cmake>=3.13,<4", "packaging")
SETTINGS = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # Horovod's Gloo was written for CMake 2.8.
}
GPU_SETTINGS = {
    "HOROVOD_GPU_OPERATIONS": "NCCL",
    # V100, A100, H100; no GPU need be here. Newer ones run the last one's PTX: nvcc before 12.8
    # doesn't know them.
    "HOROVOD_BUILD_CUDA_CC_LIST": "70,80,90",
}
# The user's settings for other installations must not lead out of the throw-away environment.
_FOREIGN_SETTINGS = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PIP_USER",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_REQUIRE_VIRTUALENV",
    "MAKEFLAGS",
)
# The newest g++ that nvcc takes: from a release of CUDA 12 on.
NEWEST_COMPILERS = ((0, 12), (4, 13), (8, 14))
_COMPILER_MEMORY = 1_500_000  # kB: a compiler takes about a gigabyte.
_LAST_LINES = 15
_TRIAL = """
import sys
import horovod.tensorflow as hvd
sys.exit(not (hvd.gloo_built() and (hvd.nccl_built() or {gpu} == 0)))
"""


class BuildError(Exception):
    """Says in one sentence why there is no Horovod, and what to do."""


def main(arguments: Sequence[str] | None = None, prog: str = "collective build-horovod") -> int:
    """Runs the command; returns its exit code: 0 if Horovod is there in the end, else 1."""
    options = _parser(prog).parse_args(arguments)
    try:
        if options.wheel_dir is None and works(options.gpu):
            _say(f"Horovod is installed and fits TensorFlow in {sys.prefix}: nothing to do")
            return 0
        _check_machine(options.gpu)
        with tempfile.TemporaryDirectory(prefix="horovod-") as folder:
            _build_and_install(Path(folder), options.gpu, options.wheel_dir)
    except BuildError as error:
        _say(str(error))
        return 1
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    assert __doc__
    parser = argparse.ArgumentParser(
        prog=prog,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--gpu", action="store_true", help="build with NCCL, the one that TensorFlow brings"
    )
    parser.add_argument(
        "--wheel-dir",
        metavar="FOLDER",
        type=Path,
        help="leave the wheel in FOLDER, for machines with the same Python and TensorFlow, and "
        "install nothing",
    )
    return parser


def _build_and_install(folder: Path, gpu: bool, wheel_dir: Path | None) -> None:
    log = Path(tempfile.gettempdir()) / f"build_horovod-{os.getpid()}.log"
    _say("a throw-away environment with the tools of the build ...")
    python = _make_environment(folder / "environment", log)
    _say(f"{HOROVOD}, built against TensorFlow (2 to 5 minutes on two cores) ...")
    wheel = _build_wheel(python, folder / "wheels", build_environment(python, folder, gpu), log)
    if wheel_dir is not None:
        wheel_dir.mkdir(parents=True, exist_ok=True)
        _say(f"done: {shutil.copy(wheel, wheel_dir)}")
    else:
        install = ["--python", sys.executable, "install", "--no-deps", "--force-reinstall"]
        run_logged([str(python), "-m", "pip", *install, str(wheel)], dict(os.environ), log)
        if not works(gpu):
            raise BuildError(
                f"Horovod is installed, but `import horovod.tensorflow` fails: see {log}, and "
                "open it in Python for the cause"
            )
        _say(f"done: {HOROVOD.replace('==', ' ')} is installed in {sys.prefix}")
    log.unlink()


def works(gpu: bool) -> bool:
    """Tells whether a Horovod is installed that has been built for this TensorFlow."""
    trial = subprocess.run(
        [sys.executable, "-c", _TRIAL.format(gpu=int(gpu))],
        capture_output=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    return trial.returncode == 0


# ---- The machine


def _check_machine(gpu: bool) -> None:
    """Names at once what the build lacks.

    Raises:
        BuildError: something is missing.
    """
    missing, remedies = [], []
    if importlib.util.find_spec("tensorflow") is None:
        missing.append("TensorFlow")
        remedies.append(f"pip install '{TENSORFLOW}'")
    packages = [program for program in ("g++", "make") if shutil.which(program) is None]
    missing += packages
    if importlib.util.find_spec("ensurepip") is None:
        missing.append("the venv module of Python")
        packages.append("python{}.{}-venv".format(*sys.version_info))
    if packages:
        remedies.append(f"apt-get install {' '.join(packages)}")
    if gpu:
        release = _cuda_release(_cuda_home())
        if not release.startswith("12."):
            missing.append(
                f"nvcc of CUDA 12 in {_cuda_home()}/bin ({release or 'there is none'}; "
                "HOROVOD_CUDA_HOME= names another place)"
            )
            remedies.append("apt-get install cuda-toolkit-12-2 (from NVIDIA's package source)")
        elif (newest := newest_compiler(release)) < (found := _compiler_release()):
            missing.append(
                f"g++ {newest} or older, which is what nvcc {release} takes "
                f"({shutil.which(_compiler())} is {found}; CXX= names another)"
            )
            remedies.append(f"apt-get install g++-{newest}, then CXX=g++-{newest}")
        if "HOROVOD_NCCL_HOME" not in os.environ and _nccl_folder() is None:
            missing.append("NCCL (HOROVOD_NCCL_HOME= names its place)")
            remedies.append(f"pip install '{TENSORFLOW.replace('>', '[and-cuda]>', 1)}'")
    if missing:
        raise BuildError(f"missing: {', '.join(missing)}. To install: {'; '.join(remedies)}")


def _cuda_home() -> str:
    named = os.environ.get("HOROVOD_CUDA_HOME") or os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc")
    return named or (str(Path(nvcc).resolve().parents[1]) if nvcc else "/usr/local/cuda")


def _cuda_release(home: str) -> str:
    try:
        said = subprocess.run([f"{home}/bin/nvcc", "--version"], capture_output=True, text=True)
    except OSError:
        return ""
    match = re.search(r"release ([\d.]+)", said.stdout)
    return match.group(1) if match else ""


def newest_compiler(release: str) -> int:
    """Returns the newest g++ that nvcc of a release of CUDA 12 takes."""
    minor = int(release.split(".")[1])
    return max(newest for first, newest in NEWEST_COMPILERS if first <= minor)


def _compiler() -> str:
    return os.environ.get("CXX") or "g++"  # CMake has nvcc use the same


def _compiler_release() -> int:
    """Returns the compiler's main version; 0 if it says none."""
    try:
        said = subprocess.run([_compiler(), "-dumpversion"], capture_output=True, text=True)
    except OSError:
        return 0
    match = re.match(r"\d+", said.stdout)
    return int(match.group()) if match else 0


def _nccl_folder() -> Path | None:
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0]) if locations else None


# ---- The steps


def _make_environment(folder: Path, log: Path) -> Path:
    """Makes an environment with the tools that also sees the packages of this one."""
    environment = _without_foreign_settings()
    run_logged([sys.executable, "-m", "venv", str(folder)], environment, log)
    python = folder / "bin" / "python"
    run_logged([str(python), "-m", "pip", "install", *TOOLS], environment, log)
    # Only now: pip would count the packages of this environment as installed in that one.
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "installed_here.pth").write_text("\n".join(package_folders()) + "\n")
    return python


def package_folders() -> list[str]:
    """Returns the folders from which this Python imports installed packages."""
    spec = importlib.util.find_spec("tensorflow")
    folders = [str(Path(spec.origin).parents[1])] if spec and spec.origin else []
    folders += [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return list(dict.fromkeys(folders))


def build_environment(python: Path, folder: Path, gpu: bool) -> dict[str, str]:
    """Returns the environment variables of Horovod's build.

    Args:
        python: the interpreter of the temporary environment, which also has CMake.
        folder: where links to NCCL may lie.
        gpu: with NCCL.
    """
    environment = _without_foreign_settings()
    environment.update(SETTINGS)
    environment["PATH"] = f"{python.parent}:{environment.get('PATH', os.defpath)}"
    environment["MAKEFLAGS"] = f"-j{_parallel_jobs()}"
    if gpu:
        for name, value in GPU_SETTINGS.items():
            environment.setdefault(name, value)
        environment["HOROVOD_CUDA_HOME"] = _cuda_home()
        # Horovod asks the first nvcc of the PATH for its architectures, whichever one it then
        # compiles with.
        environment["PATH"] = f"{_cuda_home()}/bin:{environment['PATH']}"
        nccl = _nccl_folder()
        if "HOROVOD_NCCL_HOME" not in environment and nccl is not None:
            environment.update(_nccl_settings(nccl, folder / "nccl", environment))
    return environment


def _nccl_settings(nccl: Path, links: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Points the build at the NCCL that TensorFlow loads.

    Its package has no libnccl.so to link with, nor is it on a library path.
    """
    (links / "lib").mkdir(parents=True)
    (links / "include").symlink_to(nccl / "include")
    for name in ("libnccl.so", "libnccl.so.2"):
        (links / "lib" / name).symlink_to(nccl / "lib" / "libnccl.so.2")
    flags = f"-Wl,-rpath,{nccl}/lib {environment.get('LDFLAGS', '')}".strip()
    return {"HOROVOD_NCCL_HOME": str(links), "HOROVOD_NCCL_LINK": "SHARED", "LDFLAGS": flags}


def _build_wheel(python: Path, folder: Path, environment: Mapping[str, str], log: Path) -> Path:
    # By its path: the temporary environment need not see this package.
    program = Path(__file__).with_name("horovod_source.py")
    run_logged([str(python), str(program), HOROVOD, str(folder)], environment, log)
    (wheel,) = folder.glob("horovod-*.whl")
    return wheel


def run_logged(command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """Runs a command, its output appended to a log.

    Raises:
        BuildError: it failed; the end of its output is in the message.
    """
    with open(log, "a", encoding="utf-8", errors="replace") as output:
        print("+", *command, file=output, flush=True)
        code = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ).returncode
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        end = "\n".join(f"    {line}" for line in lines)
        raise BuildError(f"this failed: {' '.join(command)}\n{end}\nall of its output is in {log}")


def _without_foreign_settings() -> dict[str, str]:
    kept = {name: v for name, v in os.environ.items() if name not in _FOREIGN_SETTINGS}
    return {**kept, "PYTHONNOUSERSITE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def _parallel_jobs() -> int:
    cores = len(os.sched_getaffinity(0))
    with open("/proc/meminfo", encoding="ascii") as file:
        match = re.search(r"^MemAvailable:\s+(\d+)", file.read(), re.MULTILINE)
    return max(1, min(cores, int(match.group(1)) // _COMPILER_MEMORY)) if match else cores


def _say(text: str) -> None:
    print(f"build_horovod: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
