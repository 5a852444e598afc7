"""What is published of devices, and what a command line says of machines."""

from __future__ import annotations

import pytest

from collective.planner import machines
from collective.planner.machines import Machines
from collective.planner.published import DEVICES


@pytest.mark.parametrize(
    "text, count, name",
    [
        ("64 x H100-80GB", 64, "H100-SXM-80GB"),
        ("8xa100", 8, "A100-SXM-80GB"),
        ("2 × A100 40GB", 2, "A100-SXM-40GB"),
        ("1,024 x NVIDIA H100 PCIe", 1024, "H100-PCIe-80GB"),
        ("16 * l40s", 16, "L40S-48GB"),
        ("2 x cpu", 2, "CPU"),
    ],
)
def test_devices_are_found(text, count, name):
    ranks, wanted = machines.counted_devices(text)
    assert (ranks, machines.find(wanted, DEVICES).name) == (count, name)


@pytest.mark.parametrize("text", ["H100", "0 x H100", "x H100", "8 x ", "-1 x H100", "8.5 x H100"])
def test_what_names_no_devices_is_refused(text):
    with pytest.raises(ValueError, match="how many devices there are, and which: '64 x H100-80GB'"):
        machines.counted_devices(text)


def test_an_unknown_device_gets_the_nearest_and_all():
    with pytest.raises(ValueError) as raised:
        machines.find("H1000-80GB", DEVICES)
    assert "there is no device 'H1000-80GB'. Did you mean 'H100-" in str(raised.value)
    assert str(raised.value).endswith("T4-16GB, CPU.")


@pytest.mark.parametrize(
    "text, per_second, value",
    [
        ("80 GB", False, 80e9),
        ("1.5TiB", False, 1.5 * 1024**4),
        ("400 Gbit/s", True, 50e9),
        ("300 GB/s", True, 300e9),
    ],
)
def test_sizes(text, per_second, value):
    assert machines.size_of(text, per_second) == pytest.approx(value)


@pytest.mark.parametrize(
    "text, per_second",
    [("80", False), ("80 GB/s", False), ("400 Gbit", True), ("0 GB", False), ("GB", False)],
)
def test_what_is_no_size_is_refused(text, per_second):
    with pytest.raises(ValueError, match="is no size: write '"):
        machines.size_of(text, per_second)


@pytest.mark.parametrize("ranks, hosts", [(0, 1), (8, 0), (9, 2)])
def test_hosts_have_equal_parts(ranks, hosts):
    with pytest.raises(ValueError, match="every host has the same number of ranks"):
        Machines(DEVICES[0], ranks, hosts)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_each_number_has_a_source_and_a_sensible_size(device):
    figures = device.figures()
    assert len(figures) == 13
    for name, figure in figures.items():
        assert figure.value > 0 and figure.source, name
        assert (figure.origin == "published") == ("https://" in figure.source), name
    for share in ("usable", "memory_share", "wire_share", "flop_share"):
        assert figures[share].value <= 1
    if device.name != "CPU":
        assert f"{figures['memory'].value / 1e9:g}GB" in device.name
        assert figures["between_rate"].value <= figures["within_rate"].value
