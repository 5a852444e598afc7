"""Tests the rendezvous of the ranks: what Gloo asks of it, and that all it takes is bounded."""

from __future__ import annotations

import http.client
import random
import socket
import threading

import pytest

from collective.job import key_value_store as module
from collective.job.hosts import Host, placements
from collective.job.key_value_store import Entry, KeyValueStore, scope_members


@pytest.fixture
def server():
    made = KeyValueStore({"global": 2, "local_h": 2, "cross_0": 1})
    made.serve()
    yield made
    made.stop()


def ask(server, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request(method, server.path + path.lstrip("/"), body, headers or {})
    response = connection.getresponse()
    answer = response.status, response.read()
    connection.close()
    return answer


def test_members_of_horovods_scopes():
    hosts = (Host("a", (None, None)), Host("b", (None,)))
    assert scope_members(placements(hosts)) == {
        "global": 3,
        "local_a": 2,
        "local_b": 1,
        "cross_0": 2,
        "cross_1": 1,
    }


def test_values_are_kept_until_all_are_done_with_a_scope(server):
    assert ask(server, "GET", "/global/0") == (404, b"")
    assert ask(server, "PUT", "/global/0", b"zero") == (200, b"")
    assert ask(server, "GET", "/global/0") == (200, b"zero")
    ask(server, "DELETE", "/global/0")
    assert ask(server, "GET", "/global/0") == (200, b"zero")
    ask(server, "DELETE", "/global/1")
    assert ask(server, "GET", "/global/0") == (404, b"")


@pytest.mark.parametrize("path", ["/global/0", "/" + "0" * 32 + ":{port}/global/0", "", "*"])
def test_who_does_not_know_the_path_is_refused(server, path):
    ask(server, "PUT", "/global/0", b"zero")
    for method in ("GET", "PUT", "DELETE"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
        connection.request(method, path.format(port=server.port), b"one" * (method == "PUT"))
        assert connection.getresponse().status == 403
        connection.close()
    assert ask(server, "GET", "/global/0") == (200, b"zero")


def test_what_a_rank_does_is_published_instead_of_done():
    published = []
    server = KeyValueStore({"global": 1}, published.append)
    server.serve()
    try:
        ask(server, "PUT", "/global/0", b"zero")
        ask(server, "DELETE", "/global/0")
        assert published == [Entry("global", "0", b"zero"), Entry("global", "0", None)]
        assert ask(server, "GET", "/global/0") == (404, b"")
        server.apply(published[0])
        assert ask(server, "GET", "/global/0") == (200, b"zero")
    finally:
        server.stop()


def test_what_is_too_large_is_refused(server):
    too_long = {"Content-Length": str(module.MOST_VALUE_BYTES + 1)}
    assert ask(server, "PUT", "/global/0", b"", too_long)[0] == 413
    assert ask(server, "PUT", "/global/0", b"", {"Content-Length": "-1"})[0] == 411
    assert ask(server, "PUT", "/global/0", b"", {"Content-Length": "9" * 20})[0] == 411
    assert ask(server, "PUT", "/" + "x" * 600, b"")[0] == 414
    statuses = [ask(server, "PUT", f"/scope/{key}", b"")[0] for key in range(1300)]
    assert statuses[0] == 200 and statuses[-1] == 507


@pytest.mark.slow
def test_garbage_changes_nothing(server):
    chance = random.Random(2)
    ask(server, "PUT", "/global/0", b"zero")
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", server.port), 5) as connection:
            connection.sendall(chance.randbytes(chance.randrange(300)) + b"\r\n\r\n")
    # More at a time than there may be, and none of them says anything.
    others = threading.active_count()
    held = [socket.create_connection(("127.0.0.1", server.port), 5) for _ in range(400)]
    assert threading.active_count() < others + 300
    for connection in held:
        connection.close()
    assert ask(server, "GET", "/global/0") == (200, b"zero")
