"""Tests how hosts come together: garbage, floods, slow clients and wrong hosts change nothing."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import threading
import time

import pytest

from collective.job.errors import UsageError
from collective.job.hosts import Host
from collective.launch.command_line.host_options import HostOptions
from collective.launch.connection import rendezvous as module
from collective.launch.connection.channel import Channel
from collective.launch.connection.rendezvous import (
    HostRendezvous,
    Stopped,
    introduction,
    join,
    make_world,
)
from collective.launch.connection.withdrawal import withdraw
from collective.launch.other_hosts.host_agent import HostAgent
from collective.launch.planning.plan import LaunchPlan
from collective.version import __version__

SECRET = b"a secret of the test"


class Signals:
    """Stands for the launcher's signals: `come` makes one come."""

    stop_signals = (signal.SIGTERM,)

    def __init__(self):
        self.descriptor, self._end = os.pipe()
        os.set_blocking(self.descriptor, False)
        self._come = []

    def come(self):
        self._come.append(signal.SIGTERM)

    def take(self):
        taken, self._come = self._come, []
        return taken

    def wait(self, seconds):
        time.sleep(seconds)
        return next(iter(self.take()), None)

    def close(self):
        os.close(self.descriptor)
        os.close(self._end)


@pytest.fixture
def signals():
    made = Signals()
    yield made
    made.close()


def gathering(nodes=2, address="127.0.0.1"):
    return HostRendezvous(address, 0, SECRET, range(1, nodes), nodes, host_timeout=5.0)


class Wait:
    """Waits for hosts in a thread."""

    def __init__(self, server, signals, timeout=20.0):
        self.guests, self.error = {}, None
        self._thread = threading.Thread(target=self._run, args=(server, signals, timeout))
        self._thread.start()

    def _run(self, server, signals, timeout):
        try:
            self.guests = server.wait(signals, timeout)
        except Exception as error:
            self.error = error

    def end(self):
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.guests


def come(port, signals, secret=SECRET, timeout=5.0, returns=True, **fields):
    about = {**introduction(1, 2, [None, "GPU-1"]), **fields}
    how = {"returns": returns}
    return join(lambda: ["127.0.0.1"], port, secret, about, (timeout, 5.0), signals, **how)


def finish(server, waiting, signals):
    """Comes as the host that is awaited: the job is unharmed."""
    result = {}

    def be_host():
        result["joined"] = come(server.port, signals, host="h2")

    host = threading.Thread(target=be_host)
    host.start()
    guests = waiting.end()
    assert guests[1].devices == (None, "GPU-1") and guests[1].name == "h2"
    hosts = make_world([Host("h1", (None,))], guests)
    host.join(10)
    channel, known, node = result["joined"]
    assert hosts == known == [Host("h1", (None,)), Host("h2", (None, "GPU-1"))] and node == 1
    with pytest.raises(OSError):  # nobody listens any more
        socket.create_connection(("127.0.0.1", server.port), 1)
    guests[1].channel.close()
    channel.close()


@pytest.mark.parametrize("has_joined", [True, False])
def test_a_host_that_can_not_take_part_ends_the_waiting(has_joined, signals, capsys):
    """Its script is missing: the first host, and those that come soon, end at once."""
    server = gathering(nodes=3)
    waiting = Wait(server, signals, timeout=60.0)
    others = Signals()
    told = []

    def be_host_1():
        try:
            come(server.port, others, nodes=3)
        except UsageError as error:
            told.append(str(error))

    host = threading.Thread(target=be_host_1)
    late = "waiting up to 10 s for node 1, to say so there, too"
    if has_joined:
        host.start()
        end = time.monotonic() + 10
        while not server._guests and time.monotonic() < end:
            time.sleep(0.01)
        assert server._guests
    start = time.monotonic()
    options = HostOptions(3, 2, "127.0.0.1", server.port)
    withdraw(options, {"COLLECTIVE_SECRET": SECRET.decode()}, "there is no script s.py")
    if not has_joined:
        host.start()
    waiting.end()
    name = os.uname().nodename
    sentence = f"host {name} (node 2) can't take part: there is no script s.py"
    assert str(waiting.error) == sentence and time.monotonic() < start + 20
    host.join(10)
    assert told == [f"the first host gave up: {sentence}"]
    assert (late in capsys.readouterr().err) is not has_joined
    others.close()


def test_late_hosts_are_not_awaited_for_long(signals, monkeypatch):
    monkeypatch.setattr(module, "_LATE_SECONDS", 0.3)
    server = gathering(nodes=3)
    waiting = Wait(server, signals, timeout=60.0)
    options = HostOptions(3, 2, "127.0.0.1", server.port)
    withdraw(options, {"COLLECTIVE_SECRET": SECRET.decode()}, "there is no script s.py")
    waiting.end()
    assert "can't take part: there is no script s.py" in str(waiting.error)


def test_two_hosts_decline_and_a_third_hears_the_first_reason(signals):
    server = gathering(nodes=4)
    waiting = Wait(server, signals, timeout=60.0)
    for node in (1, 2):
        options = HostOptions(4, node, "127.0.0.1", server.port)
        withdraw(options, {"COLLECTIVE_SECRET": SECRET.decode()}, f"no script on node {node}")
    with pytest.raises(
        UsageError, match=r"gave up: host .* \(node 1\) can't.*: no script on node 1"
    ):
        come(server.port, signals, node=3, nodes=4)
    waiting.end()
    assert str(waiting.error).endswith("(node 1) can't take part: no script on node 1")


def test_the_first_host_declines(signals, capsys):
    """It listens until all have heard why, those that withdraw themselves, too."""
    server = gathering(nodes=3)
    others = Signals()
    thread = threading.Thread(target=server.refuse_all, args=(others, "there is no script s.py"))
    thread.start()
    with pytest.raises(UsageError, match="^the first host gave up: there is no script s.py$"):
        come(server.port, signals, node=1, nodes=3)
    assert thread.is_alive()
    options = HostOptions(3, 2, "127.0.0.1", server.port)
    withdraw(options, {"COLLECTIVE_SECRET": SECRET.decode()}, "another reason")
    thread.join(5)
    assert not thread.is_alive()
    assert "waiting up to 10 s for nodes 1, 2, to say so there, too" in capsys.readouterr().err
    others.close()


def test_the_first_host_waits_for_nobody_for_long(signals, monkeypatch):
    monkeypatch.setattr(module, "_LATE_SECONDS", 0.1)
    gathering().refuse_all(signals, "there is no script s.py")
    signals.come()
    with pytest.raises(Stopped):
        gathering().refuse_all(signals, "there is no script s.py")


@pytest.mark.parametrize(
    "options, secret",
    [
        ({"nodes": 4}, SECRET),  # of another job
        ({"node": 2}, SECRET),
        ({}, b"another secret, long enough"),
    ],
)
def test_a_stranger_can_not_decline(options, secret, signals, capsys):
    server = gathering()
    waiting = Wait(server, signals)
    about = HostOptions(
        **{"nodes": 2, "node": 1, "master": "127.0.0.1", "port": server.port, **options}
    )
    withdraw(about, {"COLLECTIVE_SECRET": secret.decode()}, "there is no script")
    finish(server, waiting, signals)
    assert "refused a connection from 127.0.0.1" in capsys.readouterr().err


def test_declining_to_nobody_is_no_error():
    withdraw(HostOptions(2, 1, "127.0.0.1", 9), {"COLLECTIVE_SECRET": SECRET.decode()}, "why")
    withdraw(HostOptions(2, 1, "nowhere.invalid", 9), {"COLLECTIVE_SECRET": SECRET.decode()}, "why")
    withdraw(HostOptions(2, 1, "127.0.0.1", 9, secret_file="/none/x"), {}, "why")


def test_hosts_come_together(signals):
    server = gathering()
    finish(server, Wait(server, signals), signals)


def test_orders_that_arrive_with_the_list_of_hosts_are_followed(signals):
    """The network, or a busy host, delivers both in one piece: one read takes all."""
    server = gathering()
    waiting = Wait(server, signals)
    result = []
    host = threading.Thread(target=lambda: result.append(come(server.port, signals)))
    host.start()
    [guest] = waiting.end().values()
    flush, guest.channel.flush = guest.channel.flush, lambda: None
    hosts = make_world([Host("h1", (None,))], {1: guest})
    guest.channel.send("over", code=7)
    flush()
    host.join(10)
    [(channel, _, node)] = result
    plan = LaunchPlan(("python",), (None,) * 3, {}, 1, hosts=tuple(hosts), node=node)
    codes = []
    agent = threading.Thread(
        target=lambda: codes.append(HostAgent(plan, signals, channel).run()), daemon=True
    )
    agent.start()
    agent.join(10)
    assert codes == [7]
    guest.channel.close()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": "0.0"}, f"it has collective 0.0, the first host {__version__}"),
        ({"nodes": 3}, "it says --nnodes 3, the first host --nnodes 2"),
        ({"node": 2}, r"--node-rank 2 isn't awaited, but \[1\]"),
        ({"devices": []}, "it has no rank"),
    ],
)
def test_a_wrong_host_is_told_why(fields, words, signals, capsys):
    server = gathering()
    waiting = Wait(server, signals)
    with pytest.raises(UsageError, match=words):
        come(server.port, signals, **fields)
    finish(server, waiting, signals)
    assert "refused a connection from 127.0.0.1" in capsys.readouterr().err


def test_a_wrong_secret_is_refused_on_both_sides(signals, capsys):
    server = gathering()
    waiting = Wait(server, signals)
    with pytest.raises(UsageError, match="another secret"):
        come(server.port, signals, secret=b"another one, as long")
    finish(server, waiting, signals)
    assert "refused a connection from 127.0.0.1: it has another secret" in capsys.readouterr().err


def flood(server, connections, chance):
    """Makes connections that send garbage, nothing, a part of a greeting, or close at once."""
    held = []
    for _ in range(connections):
        try:
            connection = socket.create_connection(("127.0.0.1", server.port), 2)
        except OSError:
            continue  # the backlog is full: as good as refused
        kind = chance.randrange(4)
        try:
            if kind == 0:
                connection.sendall(chance.randbytes(chance.randrange(1, 300)))
            elif kind == 1:
                connection.sendall(module.Channel.__name__.encode())
            elif kind == 2:
                connection.sendall(b"collective/host1" + chance.randbytes(chance.randrange(40)))
        except OSError:
            pass
        if kind == 3 or len(held) > 200:
            connection.close()
        else:
            held.append(connection)
    return held


def check_flood(connections, signals, capsys):
    server = gathering()
    waiting = Wait(server, signals)
    threads = set(threading.enumerate())
    held = flood(server, connections, random.Random(5))
    assert len(server._strangers) <= module.MOST_STRANGERS_OF_ADDRESS
    # No thread is started; one that an earlier test left may end.
    assert set(threading.enumerate()) <= threads
    for connection in held:
        connection.close()
    finish(server, waiting, signals)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 12, lines  # one for each kind of refusal, and a sum
    assert any("it doesn't speak this protocol" in line for line in lines)
    assert any("too many connections at a time" in line for line in lines)


def test_a_flood_of_garbage_changes_nothing(signals, capsys):
    check_flood(300, signals, capsys)


@pytest.mark.long
def test_ten_thousand_connections_change_nothing(signals, capsys):
    check_flood(10_000, signals, capsys)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1 << 21


def test_a_slow_client_is_refused(signals, capsys, monkeypatch):
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 0.3)
    server = gathering()
    waiting = Wait(server, signals)
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.sendall(b"coll")
        slow.settimeout(5)
        assert slow.recv(1) == b""
    finish(server, waiting, signals)
    assert "refused a connection from 127.0.0.1: it was too slow" in capsys.readouterr().err


def test_a_recorded_connection_is_refused(signals, capsys):
    """What a host sent to join is sent once more."""
    server = gathering(nodes=3)
    waiting = Wait(server, signals)
    recorded = bytearray()
    connection = socket.create_connection(("127.0.0.1", server.port))
    channel = Channel(connection, SECRET, False, 5.0)
    stream = channel._stream
    recorded += stream.outgoing
    channel.flush()
    while not channel.authenticated:
        channel.receive()
    recorded += stream._proof(b"client")
    stream.write(module.__name__.encode())
    recorded += stream.outgoing
    stream.outgoing.clear()
    with socket.create_connection(("127.0.0.1", server.port)) as again:
        again.settimeout(5)
        again.sendall(recorded)
        while again.recv(4096):
            pass
    channel.close()
    signals.come()
    waiting.end()
    assert isinstance(waiting.error, Stopped)
    assert "it has another secret" in capsys.readouterr().err


def test_hosts_that_do_not_come_are_named(signals):
    server = gathering(nodes=3)
    with pytest.raises(UsageError, match=r"after 0.1 s .* nodes 1, 2 of 3 did not come"):
        server.wait(signals, 0.1)


def test_a_problem_ends_the_wait(signals):
    server = gathering()
    with pytest.raises(UsageError, match="host h2: no such thing"):
        server.wait(signals, 20, lambda: "host h2: no such thing")


def test_a_host_that_waits_hears_that_the_first_gives_up(signals):
    server = gathering(nodes=3)
    waiting = Wait(server, signals, timeout=1.0)
    with pytest.raises(UsageError, match="the first host gave up: after 1 s"):
        come(server.port, signals, nodes=3)
    waiting.end()


class KilledFirst:
    """Takes one host, proves that it holds the secret, and is gone without a word."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        connection, _ = self._listener.accept()
        channel = Channel(connection, SECRET, True, 5.0)
        while not channel.authenticated:
            channel.receive()
        self._listener.close()
        channel.close()

    def end(self):
        self._thread.join(30)
        assert not self._thread.is_alive()


def test_a_host_waits_for_a_first_one_that_is_started_again(signals, capsys):
    killed = KilledFirst()
    result = {}

    def be_host():
        result["joined"] = come(killed.port, signals, timeout=20.0, host="h2")

    host = threading.Thread(target=be_host)
    host.start()
    killed.end()
    server = HostRendezvous("127.0.0.1", killed.port, SECRET, [1], 2, host_timeout=5.0)
    guests = Wait(server, signals).end()
    assert guests[1].name == "h2"
    make_world([Host("h1", (None,))], guests)
    host.join(10)
    assert result["joined"][2] == 1
    assert "waiting until it comes again" in capsys.readouterr().err
    result["joined"][0].close()
    guests[1].channel.close()


def test_a_host_that_the_first_one_has_started_ends_where_that_is_gone(signals):
    killed = KilledFirst()
    with pytest.raises(UsageError, match="the first host has gone before the job began"):
        come(killed.port, signals, timeout=20.0, returns=False)
    killed.end()
    with pytest.raises(UsageError, match="does not answer, or refuses connections: .* refused"):
        come(killed.port, signals, timeout=20.0, returns=False)


def test_a_first_host_that_is_not_there_is_named(signals):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(
        UsageError, match=f"did not answer.*127.0.0.1 port {port}: Connection refused"
    ):
        come(port, signals, timeout=0.5)


def test_a_taken_port_is_an_error():
    server = gathering()
    try:
        with pytest.raises(UsageError, match=f"--master-port {server.port} at 127.0.0.1 can't be"):
            HostRendezvous("127.0.0.1", server.port, SECRET, [1], 2, 5.0)
    finally:
        server.close()
