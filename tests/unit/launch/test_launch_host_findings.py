"""What --check says of hosts, given what they tell of themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collective.launch.check.host_facts import HostFacts
from collective.launch.check.host_findings import (
    describe,
    ip_versions,
    network_text,
    of_host,
    of_hosts,
    open_files_needed,
)
from collective.launch.check.host_survey import Answer, Survey
from collective.launch.connection.ssh import explanation

HERE = HostFacts(
    collective="0.1.0",
    python="3.11.2",
    packages={"TensorFlow": "2.15.1", "Horovod": "0.28.1"},
    cores=8,
    gpus=0,
    open_files=1024,
    shared_memory=64 << 20,
    interfaces={"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.1"], "docker0": ["172.17.0.1"]},
    host_name="a",
    name_addresses=["127.0.1.1"],
    has_address_library=True,
    clock=0.0,
    address="10.0.0.1",
)
THERE = replace(
    HERE, interfaces={"lo": ["127.0.0.1"], "eth0": ["10.0.0.2"]}, host_name="b", address="10.0.0.2"
)


def judged(ranks=2, uses_gpus=True, here=HERE, answer=None, **changes):
    """Returns the sentences about host b, and whether each is an obstacle."""
    answer = answer or Answer("b", replace(THERE, **changes), addresses=["10.0.0.2"])
    surveyed = Survey([Answer("a", here, addresses=["10.0.0.1"]), answer], "10.0.0.1")
    found = of_hosts(surveyed, here, {"a": 1, "b": ranks}, uses_gpus)
    return [(each.sentence, each.is_obstacle) for each in found]


def test_hosts_that_are_alike_have_nothing_in_their_way():
    assert judged() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"collective": "0.0.9"}, "host b: collective 0.0.9, here 0.1.0: install the same on all"),
        (
            {"packages": {"TensorFlow": "2.14.0", "Horovod": "0.28.1"}},
            "host b: TensorFlow 2.14.0, here 2.15.1: install the same on all",
        ),
        (
            {"packages": {"TensorFlow": "2.15.1", "Horovod": ""}},
            "host b: Horovod is missing, here 0.28.1: install the same on all",
        ),
        ({"python": "3.9.2"}, "host b: Python 3.9, here 3.11: install the same on all"),
        (
            {"open_files": 100},
            "host b: a process may open 100 files (ulimit -n), a job of 3 ranks needs 136: "
            "`ulimit -n 136` before",
        ),
        ({"missing": ["train.py"]}, "host b: train.py does not exist: hosts need"),
        (
            {"unreachable": "No route to host"},
            "host b can't connect to this host at 10.0.0.1: No route to host: open all ports",
        ),
        (
            {"has_address_library": False},
            "host b: the ranks would listen where its name b leads, at 127.0.1.1, not at 10.0.0.2",
        ),
    ],
)
def test_a_host_that_differs_is_named_with_both_values(changes, words):
    [(sentence, is_obstacle)] = judged(**changes)
    assert sentence.startswith(words) and is_obstacle


def test_another_patch_of_python_is_the_same():
    assert judged(python="3.11.9") == []


def test_a_peer_that_is_not_reached_is_named():
    answer = Answer("b", THERE, addresses=["10.0.0.2"], unreachable={"c": "timed out"})
    [(sentence, is_obstacle)] = judged(answer=answer)
    assert sentence.startswith("host b can't connect to host c: timed out: ranks") and is_obstacle


@pytest.mark.parametrize(
    ("offset", "words"),
    [(1.0, ""), (-75.4, "75 s behind this host's"), (3.2, "3 s ahead of this host's")],
)
def test_clocks_that_are_apart_are_no_obstacle(offset, words):
    found = judged(answer=Answer("b", THERE, addresses=["10.0.0.2"], clock_offset=offset))
    assert len(found) == bool(words)
    assert all(words in sentence and not is_obstacle for sentence, is_obstacle in found)


def test_gpus_of_hosts_are_counted():
    gpus = replace(HERE, gpus=2, shared_memory=2 << 30)
    many = {"gpus": 2, "shared_memory": 2 << 30}
    assert judged(here=gpus, **many) == []
    [(sentence, _)] = judged(4, here=gpus, **many)
    assert sentence.startswith("host b: 4 ranks and 2 GPUs: give it fewer ranks")
    assert judged(4, uses_gpus=False, here=gpus, **many) == []
    [(sentence, _)] = judged(here=gpus)
    assert sentence == ("host a has 2 GPUs, host b none: leave hosts out, or --device cpu")
    [(sentence, is_obstacle)] = judged(here=gpus, gpus=2)
    assert sentence.startswith("host b: /dev/shm has 64 MiB, and NCCL's buffers of 2 GPUs may need")
    assert not is_obstacle


def test_a_host_that_does_not_answer_is_named():
    [(sentence, is_obstacle)] = judged(answer=Answer("b", problem="ssh can't start it"))
    assert sentence == "host b: ssh can't start it" and is_obstacle
    [(sentence, _)] = judged(answer=Answer("b", problem="no way", addresses=["fd00::2"]))
    assert sentence.startswith("host b: no way (b leads to fd00::2 only, and this host has")
    assert "addresses of IPv4: give its IPv4 address" in sentence


def test_a_name_that_only_ssh_knows_needs_an_address():
    [(sentence, is_obstacle)] = judged(answer=Answer("b", THERE))
    assert sentence.startswith("host b: ssh knows it, but its name doesn't lead to an address")
    assert not is_obstacle  # a way to another host was found


def test_the_interface_that_is_taken_is_told_with_the_others():
    assert network_text(HERE, "10.0.0.1", "the way to b") == (
        "eth0 (10.0.0.1), the way to b; also lo (127.0.0.1, ::1), docker0 (172.17.0.1)"
    )
    assert ip_versions(HERE) == "IPv4"
    both = replace(HERE, interfaces={"eth0": ["10.0.0.1", "fd00::1"], "lo": ["::1"]})
    assert ip_versions(both) == "IPv4 and IPv6"
    assert ip_versions(replace(HERE, interfaces={"eth0": ["fe80::1"]})) == "the loopback's only"
    assert describe(Answer("b", THERE)).startswith("10.0.0.2 (eth0), 8 cores, 0 GPUs, Python 3.11")


def test_open_files_grow_with_the_ranks():
    assert open_files_needed(1, 1) == 128
    assert open_files_needed(64, 8, 8) == 128 + 63 * 4
    assert open_files_needed(64, 64) == 128 + 63 * 4
    [finding] = of_host(replace(HERE, open_files=256), "", 64, 64, 1, True)
    assert finding.sentence.startswith(
        "a process may open 256 files (ulimit -n), a job of 64 ranks"
    )
    [finding] = of_host(replace(HERE, open_files=100), "", 1, None, 1, False)
    assert "a job of 1 rank needs 128: `ulimit -n 128`" in finding.sentence and finding.is_obstacle


def test_ranks_of_one_host_need_a_name_that_leads_somewhere():
    """Without the library that gives them an address Horovod's ranks end by a signal there."""
    nameless = replace(HERE, has_address_library=False, name_addresses=[])
    [finding] = of_host(nameless, "", 2, 2, 1, False)
    assert 'leads to no address: a line "127.0.1.1 a" in /etc/hosts' in finding.sentence
    assert finding.is_obstacle
    assert of_host(nameless, "", 1, 1, 1, False) == []
    assert of_host(replace(nameless, name_addresses=["127.0.1.1"]), "", 2, 2, 1, False) == []
    assert of_host(replace(nameless, has_address_library=True), "", 2, 2, 1, False) == []


@pytest.mark.parametrize(
    ("code", "line", "words"),
    [
        (255, "Host key verification failed.", "`ssh b true` by hand takes it"),
        (255, "WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!", "`ssh-keygen -R b`"),
        (255, "root@b: Permission denied (publickey).", "`ssh-copy-id b`"),
        (255, "ssh: connect to host b port 22: Connection refused", "--ssh-port"),
        (255, "ssh: connect to host b port 22: Connection timed out", "a firewall is between"),
        (255, "ssh: connect to host b port 22: No route to host", "a firewall is between"),
        (255, "something new", "something new; `ssh b true` must work"),
        (127, "sh: 1: exec: /py: not found", "there is no /py that runs there"),
        (2, "sh: 1: cd: can't cd to /job", "the folder from which you start does not exist"),
        (1, "bash: line 1: cd: /job: No such file or directory", "the folder from which you"),
        (1, "/py: No module named collective.launch.check.host_facts", "another version of it"),
        (1, "ModuleNotFoundError: No module named 'collective'", "/py there doesn't find this"),
    ],
)
def test_what_ssh_says_is_explained(code, line, words):
    assert words in explanation("b", code, [line, *["last"] * (code == 1)], "/py")


def test_what_is_not_known_is_not_explained():
    assert explanation("b", 1, ["Traceback", "ValueError: no"], "/py") == ""
