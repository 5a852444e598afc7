"""The server answers each request or says what is wrong with it; nothing waits for ever."""

from __future__ import annotations

import json
import socket
import threading
import time
from urllib.request import urlopen

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from model_server import PREDICT, Client, served
from prometheus_client.parser import text_string_to_metric_families

from collective.data import Batch
from collective.inference.served_model import ServedModel
from collective.inference.server.application import ARROW, Limits
from tests import saved_models

LIMITS = Limits(body_bytes=1 << 16, batch_rows=100, requests=4, body_seconds=0.5, threads=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m")
    saved_models.write(folder, 3, 2)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with served(folder, LIMITS) as (port, application, context):
        yield port


@pytest.fixture
def client(server):
    client = Client(server)
    yield client
    client.close()


def test_rows_columns_and_bytes(client):
    x = [[0.1, 0.7], [3, -4.5]]
    want = (np.array(x, np.float32) @ np.full([2, 1], 3, np.float32))[:, 0].tolist()
    for body, key in (
        ({"instances": x}, "predictions"),
        ({"instances": [{"x": row} for row in x]}, "predictions"),
        ({"inputs": x}, "outputs"),
        ({"inputs": {"x": x}, "signature_name": "serving_default"}, "outputs"),
    ):
        assert client.predict(body) == (200, {key: want})
        assert client.predict(body, "/v1/models/m/versions/3:predict") == (200, {key: want})
    batch = Batch(dense={"x": np.array(x, np.float32)}).to_bytes()
    assert client.predict(batch, content_type=ARROW) == (200, {"outputs": want})


def test_a_batch_as_bytes_comes_back_as_one(server):
    batch = Batch(dense={"x": np.ones([2, 2], np.float32)}).to_bytes()
    connection = Client(server)._connection
    connection.request("POST", PREDICT, batch, {"Content-Type": ARROW, "Accept": ARROW})
    answer = Batch.from_bytes(connection.getresponse().read())
    assert answer.dense["score"].tolist() == [6.0, 6.0] and len(answer) == 2
    connection.close()


def test_state_and_metadata(client):
    state = {"version": "3", "state": "AVAILABLE"}
    (found,) = client.ask("GET", "/v1/models/m")[1]["model_version_status"]
    assert {**found, "status": None} == {**state, "status": None}
    assert found["status"]["error_code"] == "OK"
    assert client.ask("GET", "/v1/models/m/versions/3")[0] == 200
    status, found = client.ask("GET", "/v1/models/m/versions/3/metadata")
    assert (status, found["model_spec"]["version"]) == (200, "3")
    signature = found["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert signature["inputs"]["x"]["dtype"] == "DT_FLOAT"
    assert [dim["size"] for dim in signature["inputs"]["x"]["tensor_shape"]["dim"]] == ["-1", "2"]
    assert client.ask("GET", "/healthz") == (200, {"status": "ok", "model": "m", "version": 3})


@pytest.mark.parametrize(
    "method, path, status, message",
    [
        ("POST", "/v1/models/other:predict", 404, "no model 'other'; this is 'm'"),
        ("POST", "/v1/models/m/versions/4:predict", 404, "version '4' isn't served; version 3 is"),
        ("GET", "/v1/models/m/versions/4", 404, "version '4' isn't served"),
        ("GET", "/v1/models/n/metadata", 404, "no model 'n'"),
        ("POST", "/v1/models/m:classify", 405, "POST /v1/models/m:classify isn't possible"),
        ("GET", "/", 404, "nothing at /"),
        ("DELETE", "/v1/models/m", 405, "DELETE /v1/models/m isn't possible"),
    ],
)
def test_other_addresses(client, method, path, status, message):
    got, answer = client.ask(method, path, {"inputs": [[1, 2]]} if method == "POST" else None)
    assert got == status and message in answer["error"]


def test_limits_of_a_batch_and_of_a_body(client, server):
    for body in ({"instances": [[1, 2]] * 101}, {"inputs": {"x": [[1, 2]] * 101}}):
        status, answer = client.predict(body)
        assert status == 413 and "101 rows, and 100 is the limit" in answer["error"]
    batch = Batch(dense={"x": np.ones([101, 2], np.float32)}).to_bytes()
    assert client.predict(batch, content_type=ARROW)[0] == 413
    assert client.predict({"instances": [[1, 2]] * 100})[0] == 200
    for size in ((1 << 16) + 1, 5 << 20):  # the rest is dropped, the connection goes on
        status, answer = client.predict(b" " * size)
        assert status == 413 and f"{size:,} bytes or more, and 65,536" in answer["error"]
        assert client.predict({"instances": [[1, 2]]})[0] == 200

    # Without Content-Length, its size shows only as it comes.
    with socket.create_connection(("127.0.0.1", server), 10) as raw:
        raw.sendall(
            f"POST {PREDICT} HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        for _ in range(5):
            raw.sendall(b"4000\r\n" + b" " * 0x4000 + b"\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_come(server):
    with socket.create_connection(("127.0.0.1", server), 10) as raw:
        raw.sendall(f"POST {PREDICT} HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n{{".encode())
        began = time.monotonic()
        answer = b"".join(iter(lambda: raw.recv(4096), b""))  # until it is closed
        assert answer.startswith(b"HTTP/1.1 408 ") and time.monotonic() - began < 5
        assert b"didn't come within 0.5 s" in answer


def test_more_requests_at_once_than_the_limit_are_told_to_try_again(server, client):
    """Four bodies are awaited; a fifth request isn't read, and probes are answered."""
    head = f"POST {PREDICT} HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n".encode()
    waiting = [socket.create_connection(("127.0.0.1", server), 10) for _ in range(4)]
    for raw in waiting:
        raw.sendall(head)
    time.sleep(0.1)
    status, answer = client.predict({"inputs": [[1, 2]]})
    assert status == 503 and "4 requests at once" in answer["error"]
    assert client.ask("GET", "/healthz")[0] == 200
    for raw in waiting:
        assert raw.recv(4096).startswith(b"HTTP/1.1 408 ")
        raw.close()
    assert client.predict({"inputs": [[1, 2]]})[0] == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=10,
)
BODIES = (
    st.binary(max_size=40)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.fixed_dictionaries({"instances": JSON}).map(lambda value: json.dumps(value).encode())
    | st.fixed_dictionaries({"inputs": st.fixed_dictionaries({"x": JSON})}).map(
        lambda value: json.dumps(value).encode()
    )
)


@settings(deadline=None)
@given(body=BODIES, kind=st.sampled_from(["application/json", ARROW, "text/plain", ""]))
def test_whatever_comes_is_answered_or_refused_with_a_reason(server, body, kind):
    client = Client(server)
    status, answer = client.predict(body, content_type=kind)
    client.close()
    assert status in (200, 400) and (status == 200 or answer["error"])


def test_bytes_of_a_batch_cut_anywhere_are_refused(client):
    whole = Batch(dense={"x": np.ones([2, 2], np.float32)}).to_bytes()
    for size in range(0, len(whole), 37):
        status, answer = client.predict(whole[:size], content_type=ARROW)
        assert status == 400 and answer["error"]


def test_what_the_model_refuses_is_a_clear_error(tmp_path):
    with tf.Graph().as_default(), tf.Session() as session:
        ids = tf.placeholder(tf.int64, [None])
        row = tf.nn.embedding_lookup(tf.constant([1.0, 2.0]), ids)
        tf.saved_model.simple_save(session, str(tmp_path / "1"), {"ids": ids}, {"row": row})
    with served(tmp_path) as (port, _, _):
        client = Client(port)
        assert client.predict({"instances": [1, 0]}) == (200, {"predictions": [2.0, 1.0]})
        status, answer = client.predict({"instances": [1, 7]})
        assert status == 400 and "indices[1] = 7 is not in [0, 2)" in answer["error"]
        client.close()


def test_a_failure_is_told_and_the_next_request_is_answered(server, client, monkeypatch, caplog):
    def fail(*_):
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(ServedModel, "predict", fail)
        status, answer = client.predict({"inputs": [[1, 2]]})
    assert status == 500 and answer == {"error": "the server has failed; its log says why."}
    assert "planted" in caplog.text
    assert client.predict({"inputs": [[1, 2]]}) == (200, {"outputs": [9.0]})


def samples(port):
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        families = text_string_to_metric_families(page.read().decode())
        return {
            (sample.name, sample.labels.get("code", "")): sample.value
            for family in families
            for sample in family.samples
            if "le" not in sample.labels
        }


def test_metrics_count_what_was_answered(tmp_path):
    saved_models.write(tmp_path, 7, 2)
    with served(tmp_path) as (port, _, _):
        client = Client(port)
        for _ in range(3):
            client.predict({"instances": [[1, 2]] * 5})
        client.predict(b"{")
        client.close()
        found = samples(port)
    name = "collective_serve_"
    assert found[f"{name}requests_total", "200"] == 3
    assert found[f"{name}requests_total", "400"] == 1
    assert found[f"{name}request_seconds_count", ""] == 4
    assert found[f"{name}batch_rows_sum", ""] == 15
    assert found[f"{name}model_version", ""] == 7
    assert found[f"{name}requests_in_flight", ""] == found[f"{name}versions_failed", ""] == 0


@pytest.mark.parametrize("clients", [16, pytest.param(64, marks=pytest.mark.matrix)])
def test_no_request_fails_while_versions_change(tmp_path, clients):
    """Each answer is one version's, and a client never gets an older one than before."""
    width, last = 20, 8
    saved_models.write(tmp_path, 1, width)
    failed, ends = [], threading.Event()
    seen = set()

    def ask(port):
        client, before = Client(port), 1.0
        try:
            while not ends.is_set():
                status, answer = client.predict({"instances": [[1] * width] * 4})
                assert status == 200, answer
                (score,) = set(answer["predictions"])
                assert score / width >= before
                before = score / width
                seen.add(before)
        except BaseException as error:
            failed.append(error)
        finally:
            client.close()

    with served(tmp_path) as (port, _, context):
        threads = [threading.Thread(target=ask, args=(port,)) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for number in range(2, last + 1):
            saved_models.write(tmp_path, number, width)
            time.sleep(0.2)
        deadline = time.monotonic() + 30
        while last not in seen and not failed:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ends.set()
        for thread in threads:
            thread.join()
        assert samples(port)["collective_serve_requests_total", "200"] > clients
    assert not failed and len(seen) > 2
