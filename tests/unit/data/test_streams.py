"""A reader takes batches from loaders by Arrow Flight: in order, once; errors name the loader."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pyarrow.flight as flight
import pytest
import tensorflow.compat.v1 as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from collective import data
from collective.data import Batch, StreamError
from collective.data.streams import loader, protocol
from collective.data.streams.loader import LoaderServer
from collective.data.streams.stream_reader import StreamReader
from collective.job import streams as job_streams

KEY = b"a key of a test"


def batch(stream, number, samples=5):
    """Returns a batch whose ids say where it is from: 1000 * stream + 10 * number + sample."""
    ids = 1000 * stream + 10 * number + np.arange(samples)
    return Batch(
        ids={"id": ids, "seen": [[i] * (i % 3) for i in ids]},
        dense={"x": np.stack([ids, -ids], 1).astype(np.float32)},
        labels={"y": ids.astype(np.float32)},
        meta=b"%d" % number,
    )


def batches_of(length, samples=5):
    def batches(stream, streams, first):
        for number in range(first, length):
            yield batch(stream, number, samples)

    return batches


def served(*lengths, key=KEY, **options):
    """Returns servers of streams of these lengths, each closed by its test's end."""
    return [
        LoaderServer(
            {"data": batches_of(length)}, "127.0.0.1:0", key, stream, len(lengths), **options
        )
        for stream, length in enumerate(lengths)
    ]


@pytest.fixture
def loaders():
    """Makes servers, and shuts them down."""
    made = []

    def make(*lengths, **options):
        made.extend(served(*lengths, **options))
        return [each.address for each in made[-len(lengths) :]]

    make.made = made
    yield make
    for each in made:
        each.__exit__()


def firsts(batches):
    return [int(each.ids["id"].values[0]) for each in batches]


def test_batches_come_whole_and_in_turn(loaders):
    addresses = loaders(3, 1, 2)
    found = list(StreamReader(addresses, "data", KEY).batches())
    assert firsts(found) == [0, 1000, 2000, 10, 2010, 20]
    expected = batch(2, 1)
    for role in ("ids", "dense", "labels"):
        for name, value in getattr(expected, role).items():
            other = getattr(found[4], role)[name]
            if role == "ids":
                assert other.to_list() == value.to_list()
            else:
                np.testing.assert_array_equal(other, value)
                assert other.dtype == value.dtype
    assert found[4].meta == b"1"


@pytest.mark.parametrize("first", range(8))
def test_a_position_is_found_again(loaders, first):
    """Also by loaders that have never made the batches before it."""
    addresses = loaders(3, 1, 2)
    order = [0, 1000, 2000, 10, 2010, 20]
    assert firsts(StreamReader(addresses, "data", KEY).batches(first)) == order[first:]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_parts_of_ranks_are_the_batch(loaders, ranks):
    addresses = loaders(2)
    parts = [
        list(StreamReader(addresses, "data", KEY, rank, ranks).batches()) for rank in range(ranks)
    ]
    for number in range(2):
        expected = batch(0, number)
        own = [of_rank[number] for of_rank in parts]
        assert {len(each) for each in own} <= {5 // ranks, -(-5 // ranks)}
        for name in ("id", "seen"):
            found = [row for each in own for row in each.ids[name].to_list()]
            assert found == expected.ids[name].to_list()
        np.testing.assert_array_equal(
            np.concatenate([each.dense["x"] for each in own]), expected.dense["x"]
        )


def test_a_batch_with_fewer_samples_than_ranks_is_refused(loaders):
    addresses = loaders(2)
    with pytest.raises(StreamError, match="batch 0 has 5 samples, and each of 6 ranks needs one"):
        next(StreamReader(addresses, "data", KEY, 5, 6).batches())


def test_sizes_are_checked_where_they_are_given():
    def batches(stream, streams, first):
        sizes = [5, 5, 3, 5]
        return (batch(0, n, sizes[n]) for n in range(first, 4))

    with LoaderServer({"data": batches}, "127.0.0.1:0", KEY) as server:

        def reader(size):
            return StreamReader([server.address], "data", KEY, batch_size=size).batches()

        with pytest.raises(StreamError, match=r"batch 2 of stream 0 has 3 samples, .*size=5\)"):
            list(reader(5))
        with pytest.raises(StreamError, match=r"batch 0 of stream 0 has 5 samples, .*size=4\)"):
            list(reader(4))
        assert len(list(reader(None))) == 4


def test_a_wrong_secret_is_an_error_at_once(loaders):
    (address,) = loaders(2)
    began = time.monotonic()
    reader = StreamReader([address], "data", b"another", timeout=30)
    with pytest.raises(StreamError, match=f"{address} and this rank don't know each other: the se"):
        reader.example()
    assert time.monotonic() - began < 10


def test_a_call_without_a_proof_gets_nothing(loaders):
    (address,) = loaders(2)
    request = protocol.Request(protocol.BATCH, "data", 0, 1)
    client = flight.connect(f"grpc+tcp://{address}")
    with pytest.raises(flight.FlightUnauthenticatedError):
        client.do_get(flight.Ticket(request.encode()))

    class Guesses(flight.ClientAuthHandler):
        def __init__(self):
            super().__init__()
            self.token = b""

        def authenticate(self, outgoing, incoming):
            outgoing.write(b"n" * 32)
            incoming.read()
            outgoing.write(b"p" * 32)
            self.token = incoming.read()

        def get_token(self):
            return self.token

    with pytest.raises(flight.FlightUnauthenticatedError):
        client.authenticate(Guesses())


def test_a_loader_out_of_reach_is_named_in_time(loaders):
    (address,) = loaders(2)
    loaders.made[0].__exit__()
    began = time.monotonic()
    reader = StreamReader([address], "data", KEY, timeout=1)
    with pytest.raises(StreamError, match=f"loader at {address} has been out of reach for [12] s"):
        list(reader.batches())
    assert time.monotonic() - began < 8


def test_a_loader_that_answers_but_makes_nothing_is_named_in_time():
    def batches(stream, streams, first):
        threading.Event().wait(60)
        yield batch(0, 0)

    with LoaderServer({"data": batches}, "127.0.0.1:0", KEY) as server:
        reader = StreamReader([server.address], "data", KEY, timeout=0.1)
        with pytest.raises(StreamError, match="answers, but hasn't made batch 0 of stream 0"):
            list(reader.batches())


def test_a_restarted_loader_is_taken_up_again(loaders):
    (address,) = loaders(6)
    reading = StreamReader([address], "data", KEY, ahead=1, timeout=20).batches()
    assert firsts([next(reading), next(reading)]) == [0, 10]
    loaders.made[0].__exit__()

    def restart():
        time.sleep(0.5)
        loaders.made.append(LoaderServer({"data": batches_of(6)}, address, KEY))

    thread = threading.Thread(target=restart)
    thread.start()
    assert firsts(reading) == [20, 30, 40, 50]
    thread.join()


def test_what_a_loader_cannot_do_names_it(loaders):
    first, second = loaders(2, 2)
    with pytest.raises(StreamError, match="it has no batches 'test', but 'data'"):
        StreamReader([first, second], "test", KEY).example()
    with pytest.raises(StreamError, match=f"{second}, .*: it has stream 1 of 2, and was asked for"):
        StreamReader([second], "data", KEY).example()
    with pytest.raises(OSError, match=f"a loader can't listen at {first}"):
        LoaderServer({"data": batches_of(1)}, first, KEY)

    def broken(stream, streams, first):
        for number in range(first, 3):
            if number == 1:
                raise OSError("the disk is gone")
            yield batch(0, number)

    with LoaderServer({"data": broken}, "127.0.0.1:0", KEY) as server:
        reading = StreamReader([server.address], "data", KEY).batches()
        assert firsts([next(reading)]) == [0]
        with pytest.raises(StreamError, match="batch 1 can't be made: OSError: the disk is gone"):
            next(reading)


def test_streams_without_a_batch():
    with LoaderServer({"data": batches_of(0)}, "127.0.0.1:0", KEY) as server:
        reader = StreamReader([server.address], "data", KEY)
        assert list(reader.batches()) == []
        with pytest.raises(StreamError, match="no stream of the loaders"):
            reader.example()


@pytest.fixture(scope="module")
def client():
    """Returns a client that has proven its key, and a request that is right."""
    (server,) = served(3)
    with server:
        connected = flight.connect(f"grpc+tcp://{server.address}")
        connected.authenticate(protocol.handlers()[1](KEY))
        yield connected


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.text(max_size=3), st.floats()
)
REQUEST = {"ask": "batch", "name": "data", "stream": 0, "streams": 1}
REQUEST |= {"number": 0, "rank": 0, "ranks": 1}


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.sampled_from([*REQUEST, "other"]), VALUES, min_size=1), st.booleans())
def test_malformed_requests_are_refused_and_change_nothing(client, changes, drops):
    fields = {k: v for k, v in REQUEST.items() if not (drops and k in changes)}
    fields |= {} if drops else changes
    ticket = flight.Ticket(json.dumps(fields).encode())
    try:
        protocol.Request.decode(ticket.ticket)
    except ValueError as error:
        with pytest.raises(flight.FlightServerError, match="malformed request"):
            client.do_get(ticket)
        assert str(error)
    good = flight.Ticket(protocol.Request(**REQUEST).encode())
    _, found = protocol.read_reply(client.do_get(good))
    assert firsts([found.unpacked()]) == [0]


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=60))
def test_tickets_that_are_no_requests_are_refused(client, ticket):
    with pytest.raises(flight.FlightServerError, match="malformed request"):
        client.do_get(flight.Ticket(ticket))


@pytest.fixture
def environment(monkeypatch):
    for name in (job_streams.LOADERS, job_streams.LOADER):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(job_streams.KEY, KEY.decode())
    return monkeypatch


def elements(dataset):
    element = tf.data.make_one_shot_iterator(dataset).get_next()
    found = []
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        try:
            while True:
                found.append(session.run(element))
        except tf.errors.OutOfRangeError:
            return found


def test_the_dataset_has_tensors_of_all(environment, loaders):
    environment.setenv(job_streams.LOADERS, ",".join(loaders(2, 1)))
    with tf.Graph().as_default():
        found = elements(data.stream(start=1))
    assert [each["labels"]["y"][0] for each in found] == [1000, 10]
    assert found[0]["ids"]["seen"].to_list() == batch(1, 0).ids["seen"].to_list()
    assert found[0]["dense"]["x"].dtype == np.float32


def test_loaders_may_have_another_order_of_names_but_no_others(environment):
    """Batches that are packed alike aren't looked at one by one; others are."""

    def loader_of(*names):
        def batches(stream, streams, first):
            ids = {name: np.arange(3) + 10 * len(name) for name in names}
            yield Batch(ids=ids, labels={"y": np.full(3, stream, np.float32)})

        return batches

    def read(*orders):
        with contextlib.ExitStack() as stack:
            servers = [
                LoaderServer({"data": loader_of(*names)}, "127.0.0.1:0", KEY, k, len(orders))
                for k, names in enumerate(orders)
            ]
            for server in servers:
                stack.enter_context(server)
            with tf.Graph().as_default():
                return elements(data.stream([server.address for server in servers]))

    found = read(("a", "bb"), ("bb", "a"))
    assert [each["labels"]["y"][0] for each in found] == [0, 1]
    for each in found:
        ids = {name: value.values.tolist() for name, value in each["ids"].items()}
        assert ids == {"a": [10, 11, 12], "bb": [20, 21, 22]}
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"batch 1 isn't like the others: .*b"):
        read(("a", "bb"), ("a", "b"))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loaders": []}, "there is no address of a loader"),
        ({"loaders": "h:1"}, "it is a list of addresses"),
        ({"loaders": ["h:1", "h"]}, r"'h' isn't HOST:PORT"),
        ({"loaders": ["h:99999"]}, r"'h:99999' isn't HOST:PORT"),
        ({"loaders": ["h:1", "h:1"]}, "h:1 occurs twice"),
        ({}, "there is no COLLECTIVE_LOADERS in the environment"),
        ({"loaders": ["h:1"], "name": "no name"}, "stream.name='no name'."),
        ({"loaders": ["h:1"], "start": -1}, "stream.start=-1."),
        ({"loaders": ["h:1"], "on_change": "stop"}, "stream.on_change='stop'."),
        ({"loaders": ["h:1"], "batch_size": 0}, "stream.batch_size=0."),
        ({"loaders": ["h:1"], "timeout": 0}, "stream.timeout=0."),
        ({"loaders": ["h:1"], "prefetch": 0}, "stream.prefetch=0."),
    ],
)
def test_options_of_a_stream_are_checked(environment, options, message):
    with tf.Graph().as_default(), pytest.raises(ValueError, match=message):
        data.stream(**options)


@pytest.mark.parametrize(
    "options, variables, message",
    [
        ({}, {}, "there is no COLLECTIVE_LOADERS"),
        ({"address": "7000"}, {}, r"address='7000'\): it is HOST:PORT"),
        ({"window": 0}, {}, "window=0"),
        ({"ahead": True}, {}, "ahead=True"),
        ({}, {"COLLECTIVE_LOADERS": "a:1,b:1"}, "COLLECTIVE_LOADER='': it says which of 2 addr"),
        ({}, {"COLLECTIVE_LOADERS": "a:1", "COLLECTIVE_LOADER": "1"}, "COLLECTIVE_LOADER='1'"),
    ],
)
def test_options_of_a_loader_are_checked(environment, options, variables, message):
    for name, value in variables.items():
        environment.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        data.serve_stream(batches_of(1), **options)
    with pytest.raises(TypeError, match="takes a function"):
        data.serve_stream([batch(0, 0)], address="127.0.0.1:0")


def test_a_loader_listens_where_the_environment_says():
    listed = {"COLLECTIVE_LOADERS": "127.0.0.1:7,job-loader-1.job:8"}
    place = [loader._place(None, listed | {"COLLECTIVE_LOADER": str(i)}) for i in (0, 1)]
    assert place == [("127.0.0.1:7", 0, 2), ("0.0.0.0:8", 1, 2)]
    assert loader._place("[::1]:9", listed | {"COLLECTIVE_LOADER": "1"}) == ("[::1]:9", 1, 2)


PROGRAM = """
import signal, sys, threading
import numpy as np
from collective import data

def batches(stream, streams, first):
    for number in range(first, 3):
        yield data.Batch(ids={'id': np.arange(4)})
    assert 'tensorflow' not in sys.modules

def signal_itself():
    sys.stdin.read()
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

if len(sys.argv) > 1:
    threading.Thread(target=signal_itself).start()
data.serve_stream(batches)
print('over')
"""


@pytest.mark.parametrize("to_a_thread", [False, True])
def test_a_loader_loads_no_tensorflow_and_ends_by_a_signal(environment, to_a_thread):
    """The kernel may give a signal to any thread; Python's main thread then goes on waiting."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    variables = {**os.environ, "COLLECTIVE_LOADERS": address}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *["thread"] * to_a_thread],
        env=variables,
        stdin=-1,
        stdout=-1,
        stderr=-1,
        text=True,
    )
    found = list(StreamReader([address], "data", KEY).batches())
    if not to_a_thread:
        process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)  # it closes stdin first
    assert len(found) == 3
    assert (process.returncode, out) == (0, "over\n")
    assert err == f"this loader serves stream 0 of 1, 'data', at {address}\n"


STANDING_STILL = """
import signal, sys, threading
from collective import data

def batches(stream, streams, first):
    print('asked', flush=True)
    threading.Event().wait()

data.serve_stream(batches)
"""


def test_a_loader_whose_function_stands_still_ends_by_a_signal(environment):
    """A call that waits for the function itself has no answer, so that gRPC would wait on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen(
        [sys.executable, "-c", STANDING_STILL],
        env={**os.environ, "COLLECTIVE_LOADERS": address},
        stdout=-1,
        stderr=-1,
        text=True,
    )
    assert "serves stream 0" in process.stderr.readline()
    reader = StreamReader([address], "data", KEY, timeout=1)
    asking = threading.Thread(target=lambda: pytest.raises(StreamError, reader.example))
    asking.start()
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    asking.join()
    assert process.returncode == 128 + signal.SIGTERM
    assert "told to stop by SIGTERM 5 s ago, and ends at once" in err
