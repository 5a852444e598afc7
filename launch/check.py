"""--check: what is installed, what this machine has, what is missing and how to get it.

TensorFlow, Horovod and CuPy are imported by another process: it takes seconds, and a broken build
may crash.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys

from .devices import driver_gpus, visible_gpus
from .machine import available_cores, memory_bytes, shared_memory_bytes
from .usage import UsageError

_OLDEST, _NEWEST = (3, 9), (3, 11)
# NCCL keeps its buffers there; a container has 64 MB unless told otherwise.
_ENOUGH_SHARED_MEMORY = 1 << 30
_PROBE_SECONDS = 180

_TENSORFLOW = "import tensorflow as module; facts = {'CUDA': module.test.is_built_with_cuda()}"
_HOROVOD = """
import horovod as module
import horovod.tensorflow as hvd
facts = {"gloo": hvd.gloo_built(), "nccl": bool(hvd.nccl_built()), "mpi": hvd.mpi_built()}
"""
_CUPY = "import cupy as module; facts = {}"
_REPORT = """
import json, sys
json.dump({"version": getattr(module, "__version__", "of unknown version"), **facts}, sys.__stdout__)
"""


def check() -> int:
    """Prints it all. Returns 0 if nothing is missing that training on the CPU needs, else 1."""
    needed: list[str] = []  # without which nothing trains
    wanted: list[str] = []  # without which something else doesn't
    _check_python(needed)
    gpus = _visible()
    _check_packages(needed, wanted, bool(gpus))
    _check_machine(wanted, gpus)
    for sentence in needed + wanted:
        print(f"missing: {sentence}")
    if not needed:
        print("Training on the CPU can start.")
    return 1 if needed else 0


def _check_python(needed: list[str]) -> None:
    _show("Python", f"{platform.python_version()} ({sys.executable})")
    if not _OLDEST <= sys.version_info[:2] <= _NEWEST:
        needed.append("Python 3.9, 3.10 or 3.11; `make setup` looks for the newest of them")


def _check_packages(needed: list[str], wanted: list[str], gpus: bool) -> None:
    tensorflow, problem = _probe(_TENSORFLOW)
    _show("TensorFlow", _described(tensorflow, problem))
    if problem:
        needed.append(
            "TensorFlow; `make setup` installs it"
            + (", `make setup GPU=1` with CUDA" if gpus else "")
        )
    horovod, problem = _probe(_HOROVOD)
    _show("Horovod", _described(horovod, problem))
    if problem or not horovod["gloo"]:
        needed.append(
            "Horovod with Gloo, built against the installed TensorFlow; `make setup` builds it"
        )
    elif gpus and not horovod["nccl"]:
        wanted.append("Horovod with NCCL, for more than one GPU; `make setup GPU=1` builds it")
    cupy, problem = _probe(_CUPY)
    _show("CuPy", _described(cupy, problem) + ("" if gpus else " (needed on GPUs only)"))
    if problem and gpus:
        wanted.append(
            "CuPy, for the kernels on GPUs; `pip install '.[gpu]'` or `make setup "
            "GPU=1` installs it"
        )


def _check_machine(wanted: list[str], gpus: tuple[str, ...]) -> None:
    driver = driver_gpus()
    names = f" ({', '.join(gpus)})" if gpus else ""
    _show("GPUs", f"{len(gpus)} visible{names}, {len(driver)} reported by the driver")
    _show("cores", f"{available_cores()} available of {os.cpu_count()}")
    _show("memory", _gigabytes(memory_bytes()))
    _show("/dev/shm", _gigabytes(shared_memory_bytes()))
    if len(gpus) > 1 and shared_memory_bytes() < _ENOUGH_SHARED_MEMORY:
        wanted.append(
            "shared memory for NCCL; `docker run --shm-size=1g` or `--ipc=host` gives a "
            "container more"
        )


def _visible() -> tuple[str, ...]:
    try:
        return visible_gpus(os.environ, driver_gpus())
    except UsageError as error:
        _show("GPUs", str(error))
        return ()


def _probe(source: str) -> tuple[dict[str, object], str]:
    """Imports a package elsewhere: (what it says about itself, "") or ({}, why it can't be
    imported).
    """
    try:
        result = subprocess.run(
            [sys.executable, "-c", source + "\n" + _REPORT],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
    except subprocess.TimeoutExpired:
        return {}, f"its import takes more than {_PROBE_SECONDS} s"
    if result.returncode < 0:
        return {}, f"its import crashes ({signal.Signals(-result.returncode).name})"
    if result.returncode:
        return {}, (result.stderr.strip().splitlines() or ["its import fails"])[-1]
    facts: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return facts, ""


def _described(facts: dict[str, object], problem: str) -> str:
    if problem:
        return f"none: {problem}"
    features = ", ".join(
        f"{name} {'yes' if fact else 'no'}" for name, fact in facts.items() if name != "version"
    )
    return f"{facts['version']}{f' ({features})' if features else ''}"


def _gigabytes(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _show(name: str, text: str) -> None:
    print(f"{name:<11} {text}", flush=True)
