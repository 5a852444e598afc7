"""What Horovod builds for GPUs in addition to its CPU part compiles against this TensorFlow, and
links with it. Neither CUDA nor NCCL is needed: TensorFlow brings CUDA's headers, and stubs have the
functions.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import tensorflow as tf

from collective import horovod_source
from collective.build_horovod import HOROVOD

SOURCES = (
    "horovod/tensorflow/mpi_ops.cc",
    "horovod/tensorflow/xla_mpi_ops.cc",
    "horovod/common/ops/nccl_operations.cc",
    "horovod/common/ops/gpu_operations.cc",
    "horovod/common/ops/cuda_operations.cc",
)
OPERATIONS = ("ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER")
# What of NCCL 2's interface Horovod uses.
NCCL = """
#pragma once
#include <cuda_runtime.h>
#define NCCL_VERSION(X, Y, Z) ((X) * 10000 + (Y) * 100 + (Z))
#define NCCL_VERSION_CODE NCCL_VERSION(2, 16, 5)
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct ncclComm* ncclComm_t;
typedef enum { ncclSuccess, ncclInProgress = 7 } ncclResult_t;
typedef enum { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg } ncclRedOp_t;
typedef enum {
  ncclInt8 = 0, ncclChar = 0, ncclUint8 = 1, ncclInt32 = 2, ncclInt = 2, ncclUint32 = 3,
  ncclInt64 = 4, ncclUint64 = 5, ncclFloat16 = 6, ncclHalf = 6, ncclFloat32 = 7, ncclFloat = 7,
  ncclFloat64 = 8, ncclDouble = 8, ncclBfloat16 = 9
} ncclDataType_t;
#define BETWEEN const void*, void*, size_t, ncclDataType_t
#define ON ncclComm_t, cudaStream_t
extern "C" {
ncclResult_t ncclGetUniqueId(ncclUniqueId*);
ncclResult_t ncclCommInitRank(ncclComm_t*, int, ncclUniqueId, int);
ncclResult_t ncclCommDestroy(ncclComm_t);
ncclResult_t ncclCommAbort(ncclComm_t);
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t*);
const char* ncclGetErrorString(ncclResult_t);
ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();
ncclResult_t ncclAllReduce(BETWEEN, ncclRedOp_t, ON);
ncclResult_t ncclReduceScatter(BETWEEN, ncclRedOp_t, ON);
ncclResult_t ncclReduce(BETWEEN, ncclRedOp_t, int, ON);
ncclResult_t ncclBroadcast(BETWEEN, int, ON);
ncclResult_t ncclAllGather(BETWEEN, ON);
ncclResult_t ncclBcast(void*, size_t, ncclDataType_t, int, ON);
ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int, ON);
ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int, ON);
}
"""


def run(*command: object) -> str:
    finished = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert finished.returncode == 0, f"{command}: {finished.stderr[-3000:]}"
    return finished.stdout


@pytest.fixture
def horovod(package_index: None, tmp_path: Path) -> Path:
    """Fetches Horovod's sources, as they are built for this TensorFlow."""
    source = horovod_source.fetch(HOROVOD, tmp_path)
    for edit in horovod_source.edits_for(tf.__version__):
        horovod_source.apply(edit, source)
    return source


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_horovods_operations_for_gpus_compile_and_link(horovod: Path, tmp_path: Path):
    (tmp_path / "nccl.h").write_text(NCCL)
    tensorflow = Path(tf.sysconfig.get_include())
    folders = [horovod, *horovod.glob("third_party/*/include"), horovod / "third_party" / "gloo"]
    folders += horovod.glob("third_party/boost/*/include")
    cuda = tensorflow / "third_party" / "gpus" / "cuda"
    theirs = [tensorflow, cuda / "include", cuda / "libcudacxx" / "include", tmp_path]
    theirs += [tensorflow / "external" / name for name in ("highwayhash", "farmhash_archive/src")]
    version = "{}{:03}{:03}{:03}".format(*map(int, tf.__version__.split(".")), 0)
    options = [
        *tf.sysconfig.get_compile_flags(),
        *("-O0", "-fPIC", "-w", "-DHAVE_CUDA=1", "-DHAVE_GPU=1", "-DHAVE_NCCL=1", "-DHAVE_GLOO=1"),
        f"-DTENSORFLOW_VERSION={version}",
        *(f"-DHOROVOD_GPU_{name}='N'" for name in OPERATIONS),
        *(f"-I{folder}" for folder in folders),
        *(part for folder in theirs for part in ("-isystem", folder)),
    ]
    objects = [tmp_path / f"{Path(source).stem}.o" for source in SOURCES]
    for source, made in zip(SOURCES, objects):
        run("g++", *options, "-c", horovod / source, "-o", made)
    undefined = set(re.findall(r" U (nccl\w+|cuda\w+|cu[A-Z]\w+)$", run("nm", *objects), re.M))
    assert {"ncclSend", "ncclAllReduce", "cudaStreamWaitEvent"} < undefined
    stubs = tmp_path / "stubs.c"
    stubs.write_text("".join(f"void {name}(void) {{}}\n" for name in sorted(undefined)))
    run("gcc", "-shared", "-fPIC", "-w", stubs, "-o", tmp_path / "libstubs.so")
    linked = subprocess.run(
        ["g++", "-shared", *objects, "-o", tmp_path / "gpu.so", tmp_path / "libstubs.so"]
        + [f"-L{tf.sysconfig.get_lib()}", "-l:libtensorflow_framework.so.2"]
        + ["-l:libtensorflow_cc.so.2", "-Wl,--no-undefined"],
        capture_output=True,
        text=True,
    )
    missing = set(re.findall(r"undefined reference to `(.*)'", linked.stderr))
    assert any("ScaleBufferCudaImpl" in name for name in missing), "of Horovod's CUDA kernels"
    assert not [name for name in missing if not re.search("horovod::common::|^horovod_", name)], (
        "only what Horovod's other sources have is missing, and nothing of TensorFlow"
    )
