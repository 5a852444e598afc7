"""Checks what kernels are launched and fed with, apart from the kernels."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from collective.ops import placement
from collective.ops.exchange import embedding_bag
from collective.ops.gpu.cupy_device import CupyDevice
from collective.ops.gpu.distinct import SOURCE, distinct
from collective.ops.gpu.gather import gather
from collective.ops.gpu.partition import partition
from collective.ops.gpu.reference.owners import owners
from collective.ops.gpu.segments import (
    DYNAMIC,
    MOST_RANKS,
    ON_ONE_RANK,
    STATIC,
    TILE,
    Segments,
    plan,
)
from collective.ops.gpu.workspace import Workspace
from tests.kernels.gpu.emulator import EmulatedDevice


def test_owners_are_those_of_the_cpu():
    keys = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 1000, np.int64)
    for ranks in (1, 2, 3, 7, 8):
        np.testing.assert_array_equal(
            owners(keys, DYNAMIC, ranks), placement.dynamic(ranks).owner(keys)
        )
        assert np.all((keys - owners(keys, STATIC, ranks)) % ranks == 0)
        for made in (placement.static, placement.dynamic):
            for only in range(ranks):
                np.testing.assert_array_equal(owners(keys, made(ranks, only).kind, ranks), only)


def test_kinds_are_those_of_the_cpu():
    assert (STATIC, DYNAMIC) == (embedding_bag.STATIC, embedding_bag.DYNAMIC)
    assert (STATIC, DYNAMIC, ON_ONE_RANK) == (
        placement.STATIC,
        placement.DYNAMIC,
        placement.ON_ONE_RANK,
    )


def test_a_plan():
    """Three segments with keys, two of them of section 1, and an empty one."""
    made = plan(Segments.of([10, 0, TILE + 1, 5], [1, 0, 2, 1]), [STATIC, STATIC, DYNAMIC])
    np.testing.assert_array_equal(
        made.segments,
        [
            # tile, first, end, section, kind, slots, slot_count
            [0, 0, 10, 1, 0, 0, 30],
            [1, TILE + 11, TILE + 16, 1, 0, 0, 30],
            [2, 10, TILE + 11, 2, 1, 30, 2 * TILE + 2],
        ],
    )
    assert made.section_tiles.tolist() == [0, 0, 2, 4] and made.tiles == 4


@pytest.mark.parametrize(
    "lengths, sections, kinds, message",
    [
        ([1], [1], [STATIC], "a segment is of section 1, but there are 1"),
        ([2**31], [0], [STATIC], "use smaller batches"),
        ([-1], [0], [STATIC], "must ascend"),
        ([1], [-1], [STATIC], "negative"),
        ([1, 2], [0], [STATIC], "one more than there are sections, 1"),
    ],
)
def test_segments_that_are_wrong(
    lengths: list[int], sections: list[int], kinds: list[int], message: str
):
    with pytest.raises(ValueError, match=message):
        plan(Segments.of(lengths, sections), kinds)


def test_too_many_ranks():
    for ranks in (0, MOST_RANKS + 1):
        with pytest.raises(ValueError, match=f"{ranks} ranks: there can be 1 to 1536"):
            partition(
                np.zeros(1, np.int64),
                Segments.of([1], [0]),
                [STATIC],
                ranks,
                Workspace(EmulatedDevice()),
            )


@pytest.mark.parametrize(
    "table", [np.zeros(4, np.float32), np.zeros((4, 2), np.float64), np.zeros((2, 4), np.float32).T]
)
def test_tables_that_are_wrong(table: np.ndarray):
    with pytest.raises(ValueError, match="table 0 must be a contiguous matrix of float32"):
        gather(
            [table],
            np.zeros(1, np.int64),
            Segments.of([1], [0]),
            Workspace(EmulatedDevice()),
        )


def test_nothing_is_allocated_once_warm():
    device = EmulatedDevice()
    workspace = Workspace(device)
    tables = [np.ones((50, 3), np.float32)]
    for batch in range(5):
        keys = np.random.default_rng(batch).integers(0, 50, 900 if batch == 0 else 700 + batch)
        segments = Segments.of([len(keys)], [0])
        distinct(keys, segments, [STATIC], 2, workspace)
        gather(tables, keys, segments, workspace)
        if batch == 1:
            warm, held = device.allocations, workspace.nbytes
    assert (device.allocations, workspace.nbytes) == (warm, held)


def test_a_workspace_grows_with_room_to_spare_and_names_what_has_none():
    device = EmulatedDevice()
    workspace = Workspace(device)
    assert workspace.take("a", 100, np.int32).size == 100 and workspace.nbytes == 400
    assert workspace.take("a", 200, np.int32).size == 200 and workspace.nbytes == 1000

    def refuse(shape: object, dtype: object) -> None:
        raise MemoryError("there are none left")

    device.empty = refuse
    with pytest.raises(MemoryError, match="rows needs 12,000 bytes: there are none left"):
        workspace.take("rows", 3000, np.float32)


def test_a_workspace_is_of_one_stream():
    """Also where nothing is uploaded or nothing is taken again."""
    device, keys = EmulatedDevice(), np.arange(5)
    workspace, segments = Workspace(device), Segments.of([5], [0])
    distinct(keys, segments, [STATIC], 2, workspace)
    device.current_stream = 0x7F
    wrong = "a workspace was first used on stream 0x0 and now is on stream 0x7f"
    with pytest.raises(RuntimeError, match=wrong):
        distinct(keys, segments, [STATIC], 2, workspace)
    with pytest.raises(RuntimeError, match=wrong):
        workspace.take("distinct.keys", 3, np.int64)
    with pytest.raises(RuntimeError, match=wrong):
        workspace.upload("distinct.segments", keys)
    distinct(keys, segments, [STATIC], 2, Workspace(device))
    device.current_stream = 0
    distinct(keys, segments, [STATIC], 2, workspace)


def test_an_upload_is_repeated_only_if_it_differs():
    workspace = Workspace(EmulatedDevice())
    first = workspace.upload("a", np.arange(3))
    assert workspace.upload("a", np.arange(3)) is first
    np.testing.assert_array_equal(workspace.upload("a", np.arange(3) + 1), [1, 2, 3])
    np.testing.assert_array_equal(workspace.upload("a", np.arange(4)), [0, 1, 2, 3])


def test_a_kernel_that_is_not_there():
    with pytest.raises(
        ValueError, match="distinct.cu has the kernels distinct_insert, .*, not sort"
    ):
        EmulatedDevice().kernel(SOURCE, "sort")


def test_without_cupy_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(
        RuntimeError, match="CuPy can not be imported .*cupy-cuda12x or cupy-cuda13x"
    ):
        CupyDevice()


class _RuntimeError(RuntimeError):
    """Stands for CuPy's own error."""


def cupy_double(gpus: int, compiler: bool = True) -> types.SimpleNamespace:
    """Imitates as much of CuPy as launches a kernel; modules and launches are listed in `calls`."""
    calls: list[tuple] = []
    current = [0]

    class RawModule:
        def __init__(self, code: str, options: tuple):
            calls.append(("compiled", code, options))

        def get_function(self, name: str):
            if not compiler:
                raise RuntimeError("CuPy failed to load libnvrtc.so.12")

            def launch(blocks: tuple, threads: tuple, arguments: tuple, shared_mem: int) -> None:
                calls.append(
                    (
                        name,
                        blocks,
                        threads,
                        arguments,
                        shared_mem,
                        launch.max_dynamic_shared_size_bytes,
                    )
                )

            launch.max_dynamic_shared_size_bytes = 48 * 1024
            return launch

    def count() -> int:
        if gpus == 0:
            raise _RuntimeError("cudaErrorNoDevice")
        return gpus

    runtime = types.SimpleNamespace(
        getDeviceCount=count,
        getDevice=lambda: current[0],
        CUDARuntimeError=_RuntimeError,
        getDeviceProperties=lambda _: {"name": b"H200", "multiProcessorCount": 132},
        memGetInfo=lambda: (40, 8000),
    )

    cuda = types.SimpleNamespace(
        runtime=runtime,
        get_current_stream=lambda: types.SimpleNamespace(ptr=0x7F00),
        set_allocator=lambda allocator: calls.append(("allocator", allocator)),
    )
    pool = types.SimpleNamespace(
        used_bytes=lambda: 5,
        total_bytes=lambda: 6000,
    )
    return types.SimpleNamespace(
        cuda=cuda,
        RawModule=RawModule,
        empty=np.empty,
        calls=calls,
        current=current,
        get_default_memory_pool=lambda: pool,
    )


def test_cupy_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cupy", cupy_double(0))
    with pytest.raises(
        RuntimeError, match="CuPy can use no GPU .cudaErrorNoDevice.: look at nvidia-smi"
    ):
        CupyDevice()


def test_cupy_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cupy", cupy_double(1, compiler=False))
    with pytest.raises(
        RuntimeError,
        match="can compile no kernel .CuPy failed to load libnvrtc.*NVRTC and the headers",
    ):
        CupyDevice()


def test_cupys_stream_and_pool(monkeypatch: pytest.MonkeyPatch):
    cupy = cupy_double(1)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    device = CupyDevice()
    assert device.stream() == 0x7F00 and [call[0] for call in cupy.calls] == ["compiled"], (
        "a kernel on trial"
    )
    cupy.calls.clear()
    assert device.memory() == (
        "hash tables and kernels use 5 bytes and hold 6,000; 40 of the GPU's 8,000 are free"
    )
    CupyDevice(pooled=False)
    assert cupy.calls[-1] == ("allocator", None)
    cupy.current[0] = 1  # of another thread, say
    with pytest.raises(
        RuntimeError, match="GPU 1 is current in this thread, but kernels run on GPU 0"
    ):
        device.stream()


def test_cupy_compiles_a_file_once_and_asks_for_much_shared_memory(monkeypatch: pytest.MonkeyPatch):
    cupy = cupy_double(1)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    device = CupyDevice()
    cupy.calls.clear()
    kernel = device.kernel(SOURCE, "distinct_inverse")
    assert device.kernel(SOURCE, "distinct_inverse") is kernel
    kernel(0, 256, (1,))
    kernel(7, 256, (1, 2), shared=100)
    kernel(7, 256, (), shared=50000)
    device.kernel(SOURCE, "distinct_count")
    compiled, few, much = cupy.calls
    assert compiled == ("compiled", SOURCE.text(), ("-std=c++17",))
    assert few == ("distinct_inverse", (7,), (256,), (1, 2), 100, 48 * 1024)
    assert much == ("distinct_inverse", (7,), (256,), (), 50000, 50000)
