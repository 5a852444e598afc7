"""Serves the numbers of a job to Prometheus: rank 0, at the port of `--metrics-port`."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from collective.coordination import milestones
from collective.job import metrics_address
from collective.job.info import job_info
from collective.job.metrics_address import MetricsAddress
from collective.monitoring import job_metrics
from collective.monitoring.job_metrics import JobMetrics
from collective.ops.communication import collectives
from collective.profiling.breakdown import Breakdown
from collective.profiling.owner_balance import imbalances
from collective.profiling.report.phases import by_phase

_LOSS = "The mean training loss of all ranks, of the steps since the value before."


class JobCollector(Collector):
    """Hands the numbers to Prometheus's client, which calls it in a thread.

    Args:
        metrics: the numbers.
    """

    def __init__(self, metrics: JobMetrics):
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Yields everything that is known."""
        metrics, poster = self._metrics, milestones.poster()
        yield GaugeMetricFamily(
            "collective_ranks", "How many ranks the job has.", value=collectives.size()
        )
        yield CounterMetricFamily(
            "collective_restarts",
            "How often the launcher has restarted the job.",
            value=job_info().restarts,
        )
        yield CounterMetricFamily(
            "collective_steps",
            "Training steps since the job, or its restart, began.",
            value=poster.steps,
        )
        yield GaugeMetricFamily(
            "collective_global_step",
            "The global step, if each run counts one.",
            value=max(poster.start + poster.steps, poster.checkpoint_step),
        )
        yield CounterMetricFamily(
            "collective_samples",
            "Samples that all ranks have trained on since the job, or its restart, began.",
            value=metrics.samples,
        )
        yield CounterMetricFamily(
            "collective_saves",
            "Checkpoints and increments of them that all ranks have saved.",
            value=poster.saves,
        )
        if poster.last_save is not None:
            step, seconds = poster.last_save
            yield GaugeMetricFamily(
                "collective_last_save_global_step", "The global step of the last one.", value=step
            )
            yield GaugeMetricFamily(
                "collective_last_save_timestamp_seconds",
                "When the last one was saved, in seconds since 1970.",
                value=seconds,
            )
        if metrics.loss is not None:
            yield GaugeMetricFamily("collective_loss", _LOSS, value=metrics.loss)
        yield self._evaluation_family()
        if metrics.samples_per_s is not None:
            yield GaugeMetricFamily(
                "collective_samples_per_second",
                "Samples per second of all ranks, evaluations and saves in between included.",
                value=metrics.samples_per_s,
            )
        if metrics.breakdown is not None:
            yield from _of_step(metrics.breakdown, metrics.static_rows)

    def _evaluation_family(self) -> Metric:
        family = GaugeMetricFamily(
            "collective_metric",
            "A metric of the last evaluation of this name.",
            labels=["evaluation", "metric"],
        )
        for labels, value in self._metrics.evaluations.items():
            family.add_metric(labels, value)
        return family


def _of_step(breakdown: Breakdown, static_rows: Mapping[str, int]) -> Iterable[Metric]:
    """Yields what was measured of a step."""
    yield GaugeMetricFamily(
        "collective_step_seconds",
        "Seconds of the step that was measured last, the mean over ranks.",
        value=sum(breakdown.ms) / len(breakdown.ms) / 1e3,
    )
    phases = GaugeMetricFamily(
        "collective_phase_seconds",
        "Seconds of each phase of that step, the mean over ranks; they add up to it.",
        labels=["phase"],
    )
    for phase, ms in by_phase(breakdown.mean_phases()).items():
        phases.add_metric([phase], ms / 1e3)
    yield phases
    received: dict[str, float] = {}
    for of_rank in breakdown.received:
        for name, size in of_rank.items():
            received[name] = received.get(name, 0.0) + size
    sizes = GaugeMetricFamily(
        "collective_exchanged_bytes",
        "Bytes that all ranks received in that step, each one's own share included.",
        labels=["phase"],
    )
    for phase, size in by_phase(received).items():
        sizes.add_metric([phase], size)
    yield sizes
    rows = GaugeMetricFamily(
        "collective_table_rows", "Rows of a table, on all ranks.", labels=["table"]
    )
    dynamic = {table: sum(counts) for table, counts in breakdown.dynamic_rows.items()}
    for table, count in sorted({**static_rows, **dynamic}.items()):
        rows.add_metric([table], count)
    yield rows
    balance = GaugeMetricFamily(
        "collective_table_keys_max_by_mean",
        "How many times the mean the busiest rank was asked for keys of a table in that step.",
        labels=["table"],
    )
    for table, ratio in imbalances(breakdown.keys_per_owner).items():
        balance.add_metric([table], ratio)
    yield balance


_served: dict[int, MetricsAddress] = {}  # by process


def start() -> None:
    """Begins to serve, on rank 0, if the job asks for it; once in a process.

    The server is a thread that ends with the process. The process's own memory, processor time and
    files are served, too.

    Raises:
        ValueError: the variable holds no port.
        OSError: the port is taken, or the address isn't one of this host.
    """
    if not job_metrics.is_on() or os.getpid() in _served:
        return
    text = os.environ[metrics_address.VARIABLE]
    try:
        address = metrics_address.parse(text)
    except ValueError as error:
        raise ValueError(f"{metrics_address.VARIABLE}={error}.") from None
    _served[os.getpid()] = address
    if collectives.rank() > 0:
        return
    registry = CollectorRegistry()
    registry.register(JobCollector(job_metrics.metrics()))
    ProcessCollector(registry=registry)
    try:
        server, _ = start_http_server(address.port, address.address or "0.0.0.0", registry)
    except OSError as error:
        del _served[os.getpid()]
        raise OSError(
            error.errno,
            f"rank 0 can't serve metrics at '{text}' ({error.strerror}): give --metrics-port, or "
            f"{metrics_address.VARIABLE}, another one; 0 takes any that is free",
        ) from error
    if not address.port:
        host = address.address or socket.gethostname()
        host = f"[{host}]" if ":" in host else host
        words = f"collective: metrics are at http://{host}:{server.server_port}/metrics"
        print(words, file=sys.stderr, flush=True)
