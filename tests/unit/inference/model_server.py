"""Runs the web application on a thread, over a real socket."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time

import uvicorn

import collective
from collective.inference.server.application import Limits, ModelApplication

PREDICT = "/v1/models/m:predict"


class Client:
    """Keeps a connection to a server."""

    def __init__(self, port):
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def ask(self, method, path, body=None, **headers):
        """Returns the status, and the body as parsed JSON."""
        if body is not None and not isinstance(body, (bytes, str)):
            body = json.dumps(body)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request(method, path, body, named)
        response = self._connection.getresponse()
        return response.status, json.loads(response.read())

    def predict(self, body, path=PREDICT, **headers):
        return self.ask("POST", path, body, **headers)

    def close(self):
        self._connection.close()


@contextlib.contextmanager
def served(path, limits=None, **options):
    """Yields the port, the application and the context."""
    with collective.InferenceContext(path, interval=0.02, **options) as context:
        application = ModelApplication(context, "m", limits or Limits())
        listening = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(application.asgi, lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield listening.getsockname()[1], application, context
        finally:
            server.should_exit = True
            thread.join()
            listening.close()
