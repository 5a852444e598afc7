"""Is the web application that answers for one model."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import tensorflow.compat.v1 as tf
from google.protobuf import json_format
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from collective.data.batches.batch import Batch
from collective.inference.context import InferenceContext
from collective.inference.served_model import ServedModel
from collective.inference.server import rest_form
from collective.inference.server.request_metrics import CONTENT_TYPE, RequestMetrics
from collective.inference.server.rest_form import PredictRequest
from collective.ops.counting import counted

_LOG = logging.getLogger("collective.serve")
ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"


@dataclasses.dataclass(frozen=True)
class Limits:
    """Holds what a server accepts.

    Attributes:
        body_bytes: of a request's body.
        batch_rows: of a request.
        requests: that are read or computed at the same time.
        body_seconds: from a request's head to the end of its body.
        threads: that compute.
    """

    body_bytes: int = 16 << 20
    batch_rows: int = 8192
    requests: int = 256
    body_seconds: float = 30.0
    threads: int = 4


class RefusedRequest(Exception):
    """Is answered with an error.

    Attributes:
        status: HTTP's status.
    """

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class ModelApplication:
    """Answers requests for one model.

        GET  /v1/models/NAME[/versions/V]             state of the versions
        GET  /v1/models/NAME[/versions/V]/metadata    signatures
        POST /v1/models/NAME[/versions/V]:predict     predictions
        GET  /healthz                                 200 while the model answers
        GET  /metrics                                 for Prometheus

    The body of a request for predictions is JSON, or the bytes of a `collective.data.Batch` with
    the content type `application/vnd.apache.arrow.stream`.

    Args:
        context: the model. Whoever made it closes it.
        name: the model's, in addresses.
        limits: what is accepted.

    Attributes:
        asgi: the application for a server.
    """

    def __init__(self, context: InferenceContext, name: str, limits: Limits):
        self._context, self._name, self._limits = context, name, limits
        self._metrics, self._in_flight = RequestMetrics(name), 0
        self._threads: Any = None
        model = "/v1/models/{model}"
        routes = [Route("/healthz", self._health), Route("/metrics", self._expose)]
        for path in (model, model + "/versions/{version}"):
            routes += [
                Route(path + ":predict", self._predict, methods=["POST"]),
                Route(path + "/metadata", self._metadata),
                Route(path, self._status),
            ]
        self.asgi = Starlette(
            routes=routes,
            exception_handlers={HTTPException: _http_error, RefusedRequest: _refused},
        )

    # ---- GET

    async def _health(self, request: Request) -> Response:
        return _json({"status": "ok", "model": self._name, "version": self._context.version})

    async def _expose(self, request: Request) -> Response:
        failed = len(self._context.problems())
        text = self._metrics.text(self._in_flight, self._context.version, failed)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def _status(self, request: Request) -> Response:
        with self._context.current() as model:
            self._check_path(request, model)
            number = model.number
        states = [(number, "AVAILABLE", "OK", "")]
        if "version" not in request.path_params:
            states += [
                (failed, "END", "UNKNOWN", why) for failed, why in self._context.problems().items()
            ]
        found = [
            {
                "version": str(version),
                "state": state,
                "status": {"error_code": code, "error_message": why},
            }
            for version, state, code, why in states
        ]
        return _json({"model_version_status": found})

    async def _metadata(self, request: Request) -> Response:
        with self._context.current() as model:
            self._check_path(request, model)
            signatures = {
                key: json_format.MessageToDict(signature.proto, preserving_proto_field_name=True)
                for key, signature in model.signatures.items()
            }
            spec = {"name": self._name, "signature_name": "", "version": str(model.number)}
        metadata = {"signature_def": {"signature_def": signatures}}
        return _json({"model_spec": spec, "metadata": metadata})

    def _check_path(self, request: Request, model: ServedModel) -> None:
        """Refuses another model or version than the one that answers."""
        name, version = request.path_params["model"], request.path_params.get("version")
        if name != self._name:
            raise RefusedRequest(404, f"there is no model {name!r}; this is {self._name!r}.")
        if version is not None and version != str(model.number):
            raise RefusedRequest(
                404, f"version {version!r} isn't served; version {model.number} is."
            )

    # ---- POST

    async def _predict(self, request: Request) -> Response:
        began, limit = time.monotonic(), self._limits.requests
        if self._in_flight >= limit:
            self._metrics.answered(503, 0.0)
            return _refusal(503, f"{counted(limit, 'request')} at once is the limit: try again.")
        self._in_flight += 1
        response = _refusal(500, "the server has failed; its log says why.")
        try:
            body = await self._body(request)
            compute = self._in_thread(request, body)
            response = await anyio.to_thread.run_sync(compute, limiter=self._limiter())
        except RefusedRequest as refused:
            response = _refusal(refused.status, str(refused))
        except ClientDisconnect:
            response = _refusal(400, "the connection ended before the body did.")
        except Exception:
            _LOG.exception("a request for predictions failed")
        finally:
            self._in_flight -= 1
            self._metrics.answered(response.status_code, time.monotonic() - began)
        return response

    def _limiter(self) -> Any:
        if self._threads is None:  # it belongs to the running loop
            self._threads = anyio.CapacityLimiter(self._limits.threads)
        return self._threads

    async def _body(self, request: Request) -> bytes:
        try:
            with anyio.fail_after(self._limits.body_seconds):
                return await self._read(request)
        except TimeoutError:
            raise RefusedRequest(
                408, f"the body didn't come within {self._limits.body_seconds:g} s."
            ) from None

    async def _read(self, request: Request) -> bytes:
        most, pieces, size = self._limits.body_bytes, [], 0
        told = request.headers.get("content-length", "")
        if told.isdigit() and int(told) > most:
            raise RefusedRequest(413, _too_large(int(told), most))
        async for piece in request.stream():
            size += len(piece)
            if size > most:
                raise RefusedRequest(413, _too_large(size, most))
            pieces.append(piece)
        return b"".join(pieces)

    def _in_thread(self, request: Request, body: bytes) -> Callable[[], Response]:
        """Returns what computes the answer: it reads and writes JSON, too, off the event loop."""
        kind = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
        accepts_arrow = ARROW in request.headers.get("accept", "")

        def compute() -> Response:
            with self._context.current() as model:
                self._check_path(request, model)
                try:
                    if kind == ARROW:
                        return self._answer_batch(model, body, accepts_arrow)
                    return self._answer_json(model, body)
                except (ValueError, TypeError) as error:
                    raise RefusedRequest(400, str(error)) from error
                except (tf.errors.InvalidArgumentError, tf.errors.OutOfRangeError) as error:
                    raise RefusedRequest(400, f"the model refuses this: {error.message}") from error

        return compute

    def _answer_json(self, model: ServedModel, body: bytes) -> Response:
        asked = PredictRequest.of(body)
        if asked.rows is not None:
            self._check_rows(len(asked.rows))
        signature = model.signature(asked.signature)
        values = asked.values(signature)
        rows = signature.samples(values)
        self._check_rows(rows)
        answer = asked.answer(model.predict(values, signature.key))
        self._metrics.predicted(rows)
        return Response(answer, headers={"content-type": JSON})

    def _answer_batch(self, model: ServedModel, body: bytes, as_batch: bool) -> Response:
        try:
            batch = Batch.from_bytes(body)
        except ImportError as error:
            raise RefusedRequest(415, str(error)) from error
        self._check_rows(len(batch))
        outputs = model.predict(batch)
        self._metrics.predicted(len(batch))
        if as_batch:
            arrays = {name: np.asarray(value) for name, value in outputs.items()}
            return Response(Batch(dense=arrays).to_bytes(), headers={"content-type": ARROW})
        answer = PredictRequest(None, None).answer(outputs)
        return Response(answer, headers={"content-type": JSON})

    def _check_rows(self, rows: int) -> None:
        if rows > self._limits.batch_rows:
            raise RefusedRequest(
                413,
                f"the request has {counted(rows, 'row')}, and {self._limits.batch_rows:,} is the "
                "limit: ask in several requests, or serve with a larger --max-batch.",
            )


def _too_large(size: int, most: int) -> str:
    return (
        f"the body has {counted(size, 'byte')} or more, and {most:,} is the limit: ask in several "
        "requests, or serve with a larger --max-body."
    )


def _json(value: Any) -> Response:
    return Response(json.dumps(value), headers={"content-type": JSON})


def _refusal(status: int, message: str) -> Response:
    headers = {"content-type": JSON}
    if status == 408:
        # Of a body that is too large, uvicorn drops the rest as it comes. A connection that is
        # closed with bytes to read is reset, and its client may never see the answer.
        headers["connection"] = "close"
    if status == 503:
        headers["retry-after"] = "1"
    return Response(rest_form.error(message), status, headers)


async def _http_error(request: Request, error: Any) -> Response:
    what = f"{request.method} {request.url.path}"
    texts = {
        404: f"there is nothing at {request.url.path}; a model is asked by POST at "
        "/v1/models/NAME:predict.",
        405: f"{what} isn't possible; a model is asked by POST at /v1/models/NAME:predict.",
    }
    return _refusal(error.status_code, texts.get(error.status_code, str(error.detail)))


async def _refused(request: Request, error: Any) -> Response:
    return _refusal(error.status, str(error))
