"""Tests the frames and messages between launchers: who holds the secret is heard, nobody else."""

from __future__ import annotations

import json
import random

import pytest

from collective.launch.connection.frames import LONGEST_PAYLOAD, FrameStream, Refused
from collective.launch.connection.messages import decode, encode

SECRET = b"a secret of the test"


def streams(secret=SECRET, of_client=SECRET):
    return FrameStream(of_client, is_server=False), FrameStream(secret, is_server=True)


def carry(sender, receiver):
    """Carries all that waits to be sent, and returns the payloads."""
    data = bytes(sender.outgoing)
    sender.outgoing.clear()
    return receiver.feed(data)


def meet(client, server):
    carry(client, server)
    carry(server, client)
    carry(client, server)


def test_payloads_pass_both_ways():
    client, server = streams()
    meet(client, server)
    assert client.authenticated and server.authenticated
    client.write(b"one")
    client.write(b"")
    assert carry(client, server) == [b"one", b""]
    server.write(b"two" * 100_000)
    assert carry(server, client) == [b"two" * 100_000]


def test_payloads_pass_byte_by_byte():
    client, server = streams()
    heard = []
    for _ in range(200):
        if client.outgoing:
            heard += server.feed(bytes([client.outgoing.pop(0)]))
        if server.outgoing:
            client.feed(bytes([server.outgoing.pop(0)]))
    client.write(b"slow")
    while client.outgoing:
        heard += server.feed(bytes([client.outgoing.pop(0)]))
    assert heard == [b"slow"]


def test_another_secret_is_refused_on_both_sides():
    client, server = streams(of_client=b"another secret, as long")
    carry(client, server)
    with pytest.raises(Refused, match="another secret"):
        carry(server, client)
    with pytest.raises(Refused, match="another secret"):
        carry(client, server)
    assert not client.authenticated and not server.authenticated


def test_what_was_recorded_is_refused():
    client, server = streams()
    greeting = bytes(client.outgoing)
    carry(client, server)
    carry(server, client)
    proof = bytes(client.outgoing)
    carry(client, server)
    client.write(b"frame")
    frame = bytes(client.outgoing)
    assert carry(client, server) == [b"frame"]
    with pytest.raises(Refused, match="sent before"):  # the same frame once more
        server.feed(frame)
    _, other = streams()
    with pytest.raises(Refused, match="another secret"):  # the whole connection once more
        other.feed(greeting + proof + frame)


def test_what_comes_back_is_refused():
    client, server = streams()
    meet(client, server)
    client.write(b"frame")
    with pytest.raises(Refused, match="changed"):
        client.feed(bytes(client.outgoing))
    _, server = streams()
    server.feed(FrameStream(SECRET, is_server=False).outgoing)
    with pytest.raises(Refused, match="another secret"):  # the server's own proof
        server.feed(bytes(server.outgoing[-32:]))


def test_frames_in_another_order_are_refused():
    client, server = streams()
    meet(client, server)
    client.write(b"1")
    first = bytes(client.outgoing)
    client.outgoing.clear()
    client.write(b"2")
    with pytest.raises(Refused, match="changed"):
        server.feed(bytes(client.outgoing) + first)


def test_a_long_frame_is_refused_before_it_comes():
    client, server = streams()
    meet(client, server)
    with pytest.raises(Refused, match=f"{LONGEST_PAYLOAD + 1} bytes, more than"):
        server.feed((LONGEST_PAYLOAD + 1).to_bytes(4, "big") + bytes(32))
    with pytest.raises(ValueError, match="more than"):
        client.write(bytes(LONGEST_PAYLOAD + 1))


def fuzz(cases):
    """Feeds garbage and changed bytes to either side: it is refused, or waited for."""
    chance = random.Random(7)
    refused = 0
    for _ in range(cases):
        client, server = streams()
        greeting = bytes(client.outgoing)
        how = chance.randrange(4)
        try:
            if how == 0:  # garbage from the start
                server.feed(chance.randbytes(chance.randrange(200)))
            elif how == 1:  # a greeting, then garbage
                server.feed(greeting + chance.randbytes(chance.randrange(100)))
            else:
                meet(client, server)
                receiver, sender = (client, server) if how == 2 else (server, client)
                sender.write(b"payload")
                frame = sender.outgoing
                place = chance.randrange(len(frame))
                frame[place] ^= 1 << chance.randrange(8)
                # A longer length is waited for, up to the bound.
                assert carry(sender, receiver) == []
        except Refused:
            refused += 1
        assert len(server._incoming) <= 200 and len(client._incoming) <= 200
    return refused


def test_garbage_is_refused():
    assert fuzz(2000) > 1000


@pytest.mark.long
def test_much_garbage_is_refused():
    assert fuzz(100_000) > 50_000


def test_messages_pass():
    message = decode(encode("signal", {"number": 15, "groups": True}))
    assert message == {"kind": "signal", "number": 15, "groups": True}


WRONG = [
    b"",
    b"\xff",
    b"[" * 100_000,
    b"[]",
    b"1",
    b'{"kind": 1}',
    b'{"kind": ["signal"]}',
    b'{"kind": "unknown"}',
    b'{"kind": "signal"}',
    b'{"kind": "signal", "number": 1, "groups": true, "more": 1}',
    b'{"kind": "signal", "number": true, "groups": true}',
    b'{"kind": "signal", "number": 1.0, "groups": true}',
    b'{"kind": "signal", "number": %d, "groups": true}' % (1 << 63),
    b'{"kind": "signal", "number": 1, "groups": 1}',
    b'{"kind": "exited", "rank": 0, "pid": 1, "code": 0, "time": NaN, "words": [], "source": ""}',
    b'{"kind": "exited", "rank": 0, "pid": 1, "code": 0, "time": 1e300, "words": [], "source": ""}',
    b'{"kind": "exited", "rank": 0, "pid": 1, "code": 0, "time": 1, "words": [1], "source": ""}',
    b'{"kind": "world", "node": 1, "hosts": [{"name": "a"}]}',
    b'{"kind": "world", "node": 1, "hosts": [{"name": "a", "devices": [1]}]}',
]


@pytest.mark.parametrize("payload", WRONG, ids=range(len(WRONG)))
def test_what_is_no_message_is_refused(payload):
    with pytest.raises(Refused, match="a message"):
        decode(payload)


def test_messages_of_chance_are_refused():
    chance = random.Random(3)
    values = [None, True, 0, -1, 1 << 70, 1e308, "text", [], ["a"], {}, {"a": []}]
    for _ in range(2000):
        kind = chance.choice(["join", "exited", "output", "progress", "world", "put", "none"])
        names = ["rank", "pid", "code", "time", "words", "hosts", "node", "value", "data", "key"]
        fields = {name: chance.choice(values) for name in chance.sample(names, 4)}
        with pytest.raises(Refused):
            decode(json.dumps({"kind": kind, **fields}).encode())
