"""Tests which address the first host listens at, and which interface leads to others."""

from __future__ import annotations

import pytest

from collective.job import network
from collective.job.errors import UsageError
from collective.job.network import interface_of, listening_address

INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.5", "fe80::1"],
    "ib0": ["192.168.7.5"],
    "down0": [],
}
NAMES = {"here": ["127.0.1.1"], "there": ["10.0.0.9"], "both": ["10.9.9.9", "192.168.7.5"]}


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.setattr(network, "addresses_by_interface", lambda: INTERFACES)
    true = network.resolve
    monkeypatch.setattr(network, "resolve", lambda name: NAMES.get(name) or true(name))


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("10.0.0.5", "eth0"),
        ("fe80::1", "eth0"),
        ("127.0.0.1", "lo"),
        ("127.0.9.9", "lo"),
        ("10.0.0.9", ""),
    ],
)
def test_interfaces(address, interface):
    assert interface_of(address) == interface


@pytest.mark.parametrize(
    ("master", "interface", "address"),
    [
        ("10.0.0.5", None, "10.0.0.5"),
        ("both", None, "192.168.7.5"),
        ("there", "ib0", "192.168.7.5"),
        ("127.0.0.1", None, "127.0.0.1"),
        ("localhost", None, "127.0.0.1"),
    ],
)
def test_where_the_first_host_listens(master, interface, address):
    assert listening_address(master, interface) == address


@pytest.mark.parametrize(
    ("master", "interface", "words"),
    [
        ("there", None, "--master-addr there is 10.0.0.9, no address of this host"),
        ("here", None, "--master-addr here is 127.0.1.1 on this host, which no other host reaches"),
        ("there", "eth7", "--network-interface eth7: .* it has lo, eth0, ib0"),
        ("there", "down0", "--network-interface down0: this host has no such interface"),
        ("no.such.name.invalid", None, "--master-addr no.such.name.invalid can't be resolved"),
    ],
)
def test_where_it_can_not_listen(master, interface, words):
    with pytest.raises(UsageError, match=words):
        listening_address(master, interface)
