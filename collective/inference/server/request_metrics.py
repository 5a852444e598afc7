"""Counts the requests of a server, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS = (1, 4, 16, 64, 256, 1024, 4096)


class RequestMetrics:
    """Holds the metrics of a server, in a registry of its own.

    Args:
        model: the name of the model; the label `model` of all of them.
    """

    def __init__(self, model: str):
        self._registry, self._model = CollectorRegistry(), model
        name, labels, registry = "collective_serve_", ["model"], self._registry
        self._requests = Counter(
            f"{name}requests",
            "Requests for predictions that were answered, by the status of the answer.",
            [*labels, "code"],
            registry=registry,
        )
        self._seconds = Histogram(
            f"{name}request_seconds",
            "Time from a request's head to its answer.",
            labels,
            buckets=_SECONDS,
            registry=registry,
        )
        self._rows = Histogram(
            f"{name}batch_rows",
            "Rows of a request that was answered with predictions.",
            labels,
            buckets=_ROWS,
            registry=registry,
        )
        self._in_flight = Gauge(
            f"{name}requests_in_flight",
            "Requests for predictions that are being read or computed.",
            labels,
            registry=registry,
        )
        self._version = Gauge(
            f"{name}model_version", "The version that answers.", labels, registry=registry
        )
        self._failed = Gauge(
            f"{name}versions_failed",
            "Versions after the one that answers that could not be loaded.",
            labels,
            registry=registry,
        )

    def answered(self, code: int, seconds: float) -> None:
        """Counts an answer."""
        self._requests.labels(self._model, str(code)).inc()
        self._seconds.labels(self._model).observe(seconds)

    def predicted(self, rows: int) -> None:
        """Counts the rows of predictions."""
        self._rows.labels(self._model).observe(rows)

    def text(self, in_flight: int, version: int, failed: int) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        self._in_flight.labels(self._model).set(in_flight)
        self._version.labels(self._model).set(version)
        self._failed.labels(self._model).set(failed)
        return bytes(generate_latest(self._registry))
