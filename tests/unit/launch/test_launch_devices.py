"""How many ranks, and which device each gets: the rules as tables."""

from __future__ import annotations

import pytest

from collective.job.errors import UsageError
from collective.launch.planning.devices import choose_devices, visible_gpus

TWO = ("GPU-aaaa", "GPU-bbbb")


@pytest.mark.parametrize(
    "cuda, nvidia, driver, expected",
    [
        # Nothing set: what the driver reports.
        (None, None, (), ()),
        (None, None, TWO, ("0", "1")),
        # CUDA_VISIBLE_DEVICES: its entries in its order, whatever else is set.
        ("0,1", None, (), ("0", "1")),
        ("1,0", None, TWO, ("1", "0")),
        (" 1 , 0 ", None, TWO, ("1", "0")),
        ("1", "all", TWO, ("1",)),
        ("GPU-bbbb,GPU-aa", None, TWO, ("GPU-bbbb", "GPU-aa")),
        ("MIG-1,MIG-2", None, TWO, ("MIG-1", "MIG-2")),
        ("MIG-GPU-aaaa/3/0", None, (), ("MIG-GPU-aaaa/3/0",)),
        # Empty is none.
        ("", None, TWO, ()),
        ("", "all", TWO, ()),
        # What isn't a device hides itself and what follows.
        ("-1", None, TWO, ()),
        ("NoDevFiles", None, TWO, ()),
        ("0,-1,1", None, TWO, ("0",)),
        ("0,2,1", None, TWO, ("0",)),
        ("0,2,1", None, (), ("0", "2", "1")),
        ("GPU-aaaa,GPU-cccc,GPU-bbbb", None, TWO, ("GPU-aaaa",)),
        ("GPU-cccc", None, ("", ""), ("GPU-cccc",)),
        # NVIDIA_VISIBLE_DEVICES only says how many; indices start again.
        (None, "all", TWO, ("0", "1")),
        (None, "all", (), ()),
        (None, "none", TWO, ()),
        (None, "void", TWO, ()),
        (None, "", TWO, ()),
        (None, "3", TWO, ("0",)),
        (None, "GPU-x,GPU-y", TWO, ("0", "1")),
        (None, "0,1,2", TWO, ("0", "1")),
        (None, "2,3,5", (), ("0", "1", "2")),
    ],
)
def test_visible_gpus(cuda, nvidia, driver, expected):
    values = {"CUDA_VISIBLE_DEVICES": cuda, "NVIDIA_VISIBLE_DEVICES": nvidia}
    assert (
        visible_gpus({name: value for name, value in values.items() if value is not None}, driver)
        == expected
    )


def test_a_device_named_twice_is_an_error():
    with pytest.raises(UsageError, match="0,1,0 names device 0 twice"):
        visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,0"}, ())


@pytest.mark.parametrize(
    "ranks, device, gpus, expected",
    [
        ("auto", "auto", (), (None,)),
        ("auto", "auto", ("3", "5"), ("3", "5")),
        ("auto", "cpu", ("3", "5"), (None,)),
        ("auto", "gpu", ("3", "5"), ("3", "5")),
        ("gpu", "auto", ("3", "5"), ("3", "5")),
        ("cpu", "auto", ("3", "5"), (None,) * 4),
        ("cpu", "auto", (), (None,) * 4),
        (1, "auto", ("3", "5"), ("3",)),
        (2, "auto", ("3", "5"), ("3", "5")),
        (3, "cpu", ("3", "5"), (None,) * 3),
        (3, "auto", (), (None,) * 3),
    ],
)
def test_choose_devices(ranks, device, gpus, expected):
    assert choose_devices(ranks, device, gpus, cores=4) == expected


@pytest.mark.parametrize(
    "ranks, device, gpus, words",
    [
        (0, "auto", (), "-np 0: a job has at least one rank"),
        (-2, "cpu", (), "-np -2: a job has at least one rank"),
        (3, "auto", ("3", "5"), "3 ranks, but 2 GPUs are visible .*--device cpu"),
        (2, "gpu", ("0",), "2 ranks, but 1 GPU is visible .*--device cpu"),
        ("gpu", "auto", (), "-np gpu: no GPU is visible"),
        (2, "gpu", (), "--device gpu: no GPU is visible"),
        ("gpu", "cpu", ("0",), "contradict"),
        ("cpu", "gpu", ("0",), "contradict"),
    ],
)
def test_what_cannot_be_had(ranks, device, gpus, words):
    with pytest.raises(UsageError, match=words):
        choose_devices(ranks, device, gpus, cores=4)


def test_ranks_share_a_gpu_where_a_test_says_so():
    assert choose_devices(3, "auto", ("0", "1"), cores=4, shared=True) == ("0", "1", "0")
    assert choose_devices("gpu", "auto", ("0", "1"), cores=4, shared=True) == ("0", "1")
