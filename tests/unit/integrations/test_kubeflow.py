"""What is posted to Kubeflow Trainer, to a server that stands in for its controller."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import ssl
import subprocess
import threading
import time

import pytest

from collective.integrations import kubeflow
from collective.integrations.kubeflow import CERTIFICATE, TOKEN, URL, TrainerStatus, trainer_status


class Controller(http.server.ThreadingHTTPServer):
    """Keeps (token, body) of each post, and answers with `code` after `delay` seconds."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.posts, self.code, self.delay = [], 200, 0.0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def wait_for(self, count):
        end = time.monotonic() + 20
        while len(self.posts) < count:
            assert time.monotonic() < end, self.posts
            time.sleep(0.01)
        return self.posts


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posts.append((self.headers["Authorization"], body))
        time.sleep(self.server.delay)
        self.send_response(self.server.code)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def controller():
    with Controller() as server:
        yield server
        server.shutdown()


@pytest.fixture
def environment(controller, tmp_path):
    (tmp_path / "token").write_text("first\n")
    return {URL: f"http://127.0.0.1:{controller.server_port}/status", TOKEN: f"{tmp_path}/token"}


def test_the_form_of_a_status(controller, environment):
    status = trainer_status(environment)
    status.tell(0.456, 119.6, {"loss": 0.23471, "samples_per_s": 81234.5, "auc": None})
    status.close()
    ((token, body),) = controller.posts
    assert token == "Bearer first"
    updated = body["trainerStatus"].pop("lastUpdatedTime")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", updated)
    assert body == {
        "trainerStatus": {
            "progressPercentage": 45,
            "estimatedRemainingSeconds": 120,
            "metrics": [
                {"name": "loss", "value": "0.23471"},
                {"name": "samples_per_s", "value": "81234.5"},
            ],
        }
    }


def test_the_newest_status_goes_on_and_the_last_one_always(
    controller, environment, tmp_path, monkeypatch
):
    """The token is read for each post: it changes every hour."""
    status = trainer_status(environment)
    status.tell(0.0, None, {})
    controller.wait_for(1)
    (tmp_path / "token").write_text("second")
    for percent in range(1, 101):
        status.tell(percent / 100, 1.0, {})
    began = time.monotonic()
    status.close()
    assert time.monotonic() - began < kubeflow.PAUSE
    assert [(t, b["trainerStatus"]["progressPercentage"]) for t, b in controller.posts] == [
        ("Bearer first", 0),
        ("Bearer second", 100),
    ]


def test_a_controller_that_refuses_is_a_warning_and_training_goes_on(
    controller, environment, monkeypatch
):
    monkeypatch.setattr(kubeflow, "PAUSE", 0.01)
    warned = []
    monkeypatch.setattr(kubeflow.warnings, "warn", lambda text, *_, **__: warned.append(text))
    controller.code = 403
    status = trainer_status(environment)
    for count in (1, 2):
        status.tell(0.1 * count, None, {})
        controller.wait_for(count)
    controller.code = 200
    status.tell(1.0, None, {})
    status.close()
    assert len(controller.posts) == 3 and len(warned) == 1
    assert "Kubeflow Trainer didn't take the progress" in warned[0] and "403" in warned[0]


@pytest.mark.parametrize("missing", ["controller", "token"])
def test_what_is_gone_is_a_warning(environment, tmp_path, monkeypatch, missing):
    warned = []
    monkeypatch.setattr(kubeflow.warnings, "warn", lambda text, *_, **__: warned.append(text))
    if missing == "controller":
        environment[URL] = "http://127.0.0.1:1/status"
    else:
        environment[TOKEN] = str(tmp_path / "none")
    status = trainer_status(environment)
    status.tell(0.5, None, {})
    status.close()
    assert len(warned) == 1 and "Training goes on" in warned[0]


def test_a_slow_controller_holds_up_nothing_but_the_end(controller, environment, monkeypatch):
    monkeypatch.setattr(kubeflow, "PATIENCE", 0.3)
    monkeypatch.setattr(kubeflow.warnings, "warn", lambda *_, **__: None)
    controller.delay = 30.0
    status = trainer_status(environment)
    began = time.monotonic()
    for percent in range(100):
        status.tell(percent / 100, None, {})
    assert time.monotonic() - began < 0.2
    status.close()
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("given", [{}, {URL: "http://h"}, {TOKEN: "file"}, {URL: "", TOKEN: "x"}])
def test_elsewhere_nothing_is_told(given):
    assert trainer_status(given) is None


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to certify with")
def test_only_a_server_with_the_certificate_is_told(controller, tmp_path, monkeypatch):
    """The controller signs its own certificate, which is in a file."""
    for name in ("own", "other"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
            + ["-keyout", f"{tmp_path}/{name}.key", "-out", f"{tmp_path}/{name}.crt"]
            + ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
            check=True,
            capture_output=True,
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{tmp_path}/own.crt", f"{tmp_path}/own.key")
    controller.socket = context.wrap_socket(controller.socket, server_side=True)
    (tmp_path / "token").write_text("t")
    warned = []
    monkeypatch.setattr(kubeflow.warnings, "warn", lambda text, *_, **__: warned.append(text))
    url = f"https://127.0.0.1:{controller.server_port}/"
    for name in ("other", "own"):
        status = TrainerStatus(url, f"{tmp_path}/token", f"{tmp_path}/{name}.crt")
        status.tell(1.0, None, {})
        status.close()
    assert len(controller.posts) == 1 and len(warned) == 1 and "CERTIFICATE" in warned[0].upper()
    assert CERTIFICATE == "KUBEFLOW_TRAINER_SERVER_CA_CERT"
